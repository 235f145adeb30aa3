"""How ranks take one checkpoint, or one answer: rank 0 says what there is, each tries, and all go on alike."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import msgpack

from asyncckpt.config import RankInfo
from asyncckpt.distributed.process_group import find_exchange
from asyncckpt.distributed.rendezvous import Meeting, all_or_none
from asyncckpt.distributed.run_agreement import Coordination
from asyncckpt.errors import (
    AsyncCkptError,
    ConfigError,
    CorruptCheckpointError,
    RanksDisagreeError,
    SaveFailedError,
    SharedLoadError,
)
from asyncckpt.format.names import SaveId
from asyncckpt.recall.newest import NewestCandidate
from asyncckpt.storage.catalog import Candidate, is_broken

TRY_TIMEOUT_S = 1800.0
"""For the slowest rank to load a checkpoint, or to find it broken; as torch.distributed has it for gloo."""

RESTORE = "restore_latest()"
_SOUND, _BROKEN, _TOLD, _FAILED = "sound", "broken", "told", "failed"


class Broken(NamedTuple):
    """Why a checkpoint is passed over.

    Attributes:
        error: This rank's, or a SharedLoadError that names a rank that found it broken.
        is_damaged: Some rank found bytes that are not what was written: not just a storage that does not answer.
    """

    error: Exception
    is_damaged: bool


class Ranks(ABC):
    """Those that restore together. A context manager: leaving it tells the others."""

    @abstractmethod
    def same_candidates(self, root: str, look: Callable[[], list[Candidate]], timeout_s: float) -> list[Candidate]:
        """Return rank 0's candidates.

        Args:
            root: The directory.
            look: Called on rank 0 only.
            timeout_s: How long `look` may take, and how long to wait for the last rank.

        Raises:
            PlanTimeoutError: Some ranks do not restore.
            RanksDisagreeError: They restore from another directory.
            SharedLoadError: Rank 0 cannot look, or the ranks lost each other.
            Exception: Whatever `look` raises, on rank 0.
        """

    @abstractmethod
    def verdict(self, path: str, save_id: SaveId | None, error: Exception | None) -> Broken | None:
        """Tell how the load of the checkpoint at `path` went here, and learn how it went everywhere.

        Args:
            path: Of the checkpoint.
            save_id: Of the save that was read there.
            error: What this rank's load raised.

        Returns:
            None: all ranks have loaded it. Else why all go on to the next one.

        Raises:
            Exception: `error`, if it says that something else is wrong than the checkpoint.
            SharedLoadError: That is so on another rank; or the ranks lost each other.
            RanksDisagreeError: They have loaded different saves, one of which has taken the place of the other.
            PlanTimeoutError: A rank is too slow.
        """

    @abstractmethod
    def first_says(self, text: Callable[[], list[str | None]]) -> list[str | None]:
        """Return what `text` returns on rank 0, where alone it is called.

        Raises:
            SharedLoadError: The ranks lost each other.
            PlanTimeoutError: A rank is too slow.
        """

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        return None


class OneRank(Ranks):
    """There is but one."""

    def same_candidates(self, root: str, look: Callable[[], list[Candidate]], timeout_s: float) -> list[Candidate]:
        return look()

    def verdict(self, path: str, save_id: SaveId | None, error: Exception | None) -> Broken | None:
        if error is None:
            return None
        if not is_broken(error):
            raise error
        return Broken(error, isinstance(error, CorruptCheckpointError))

    def first_says(self, text: Callable[[], list[str | None]]) -> list[str | None]:
        return text()


class _Outcome(NamedTuple):
    """How a load went on one rank. Kind `told`: another rank has ended it, and says itself why.

    `text`: of a sound one its save id, else what is wrong.
    """

    kind: str
    text: str = ""
    is_damaged: bool = False


class ManyRanks(Ranks):
    """The ranks of the default process group.

    Args:
        rank: This one.
        meeting: Theirs.
    """

    def __init__(self, rank: RankInfo, meeting: Meeting) -> None:
        self._rank, self._meeting = rank, meeting
        self._arrived = False
        self._root = ""

    def same_candidates(self, root: str, look: Callable[[], list[Candidate]], timeout_s: float) -> list[Candidate]:
        self._root = root
        mine = [_to_wire(one) for one in look()] if self._rank.rank == 0 else []
        self._arrived = True
        timeout_s = (1 if self._rank.rank == 0 else 2) * timeout_s  # rank 0 may have taken so long to look
        found = [_unpacked(data) for data in self._gather(_packed([root, mine]), timeout_s)]
        for rank, (other, _) in enumerate(found):
            if other != found[0][0]:
                detail = f"rank 0 from {found[0][0]}, rank {rank} from {other}"
                raise RanksDisagreeError(
                    f"the ranks restore from different directories: {detail}", detail=detail, path=root, ranks=[0, rank]
                )
        return [_from_wire(one) for one in found[0][1]]

    def verdict(self, path: str, save_id: SaveId | None, error: Exception | None) -> Broken | None:
        def mine() -> list[Any]:
            outcome = _outcome(error) if error is not None else _Outcome(_SOUND, str(save_id))
            if error is not None and outcome.kind == _FAILED:
                raise error
            return list(outcome)

        def failed(rank: int, other: AsyncCkptError) -> SharedLoadError:
            return _shared(path, rank, _text(other))

        said = all_or_none(lambda data: self._gather(data, TRY_TIMEOUT_S), mine, failed)
        outcomes = [_Outcome(*one) for one in said]
        of_kind = {kind: [r for r, one in enumerate(outcomes) if one.kind == kind] for kind in (_BROKEN, _TOLD)}
        if of_kind[_BROKEN]:
            found = error if error is not None and outcomes[self._rank.rank].kind == _BROKEN else None
            reason = found or self._failed(path, of_kind[_BROKEN][0], outcomes)
            return Broken(reason, any(one.is_damaged for one in outcomes))
        if of_kind[_TOLD]:  # nobody says that anything is wrong with the checkpoint
            raise error if error is not None else self._failed(path, of_kind[_TOLD][0], outcomes)
        saves = sorted({one.text for one in outcomes})
        if len(saves) > 1:
            detail = f"saves {saves[0]} and {saves[1]}"
            raise RanksDisagreeError(
                f"{path} was overwritten while the ranks restored it: they have loaded {detail}",
                detail=detail,
                path=path,
            )
        return None

    def first_says(self, text: Callable[[], list[str | None]]) -> list[str | None]:
        mine = text() if self._rank.rank == 0 else []
        found: list[str | None] = _unpacked(self._gather(_packed(mine), TRY_TIMEOUT_S)[0])
        return found

    def _gather(self, payload: bytes, timeout_s: float) -> list[bytes]:
        try:
            return self._meeting.gather(payload, time.monotonic() + timeout_s)
        except SaveFailedError as error:
            raise _shared(self._root, error.rank, str(error.detail or error.message)) from error

    def _failed(self, path: str, rank: int, outcomes: list[_Outcome]) -> SharedLoadError:
        return _shared(path, rank, outcomes[rank].text)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not self._arrived:
            self._meeting.refuse(f"{type(error).__name__}: {error}" if error else "it restores nothing")
        self._meeting.close()


def ranks_that_restore(rank: RankInfo, meet: Callable[[], Meeting | None]) -> Ranks:
    """Return the ranks that must come to one checkpoint.

    Args:
        rank: This one.
        meet: Where they meet if there is no process group of just these ranks; None: nowhere.

    Raises:
        ConfigError: There are several, and they meet nowhere: each for itself might take another checkpoint.
        SharedLoadError: The process group's store is gone.
        AsyncCkptError: What `meet` raises.
    """
    if rank.world_size == 1:
        return OneRank()
    exchange = find_exchange(rank)
    try:
        meeting = meet() if exchange is None else exchange.meet_next("restore", RESTORE)
    except SaveFailedError as error:
        raise SharedLoadError(error.message, detail=error.message) from error
    if meeting is None:
        raise ConfigError(
            f"this is rank {rank.rank} of {rank.world_size}, and restore_latest() needs an initialised process group "
            "of these, for all to take the same checkpoint; for this process alone pass rank_info=RankInfo(0, 1)",
            field="rank_info",
            value=repr(rank),
        )
    return ManyRanks(rank, meeting)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".encode("utf-8", "backslashreplace").decode()[:1000]


def _outcome(error: Exception) -> _Outcome:
    text = _text(error)
    if is_broken(error):
        return _Outcome(_BROKEN, text, isinstance(error, CorruptCheckpointError))
    return _Outcome(_TOLD if isinstance(error, SharedLoadError) else _FAILED, text)


def _shared(path: str, rank: int | None, detail: str) -> SharedLoadError:
    who = "the ranks lost each other" if rank is None else f"rank {rank} could not load it"
    return SharedLoadError(f"{path}: {who}: {detail}", path=path, rank=rank, detail=detail)


def _packed(value: Any) -> bytes:
    """File names that are not UTF-8 are texts with lone surrogates."""
    return bytes(msgpack.packb(value, unicode_errors="surrogateescape"))


def _unpacked(data: bytes) -> Any:
    return msgpack.unpackb(data, unicode_errors="surrogateescape")


def _to_wire(candidate: Candidate) -> list[Any]:
    return [candidate.path, None if candidate.save_id is None else str(candidate.save_id), candidate.step]


def _from_wire(raw: list[Any]) -> Candidate:
    path, save_id, step = raw
    return Candidate(path=path, save_id=None if save_id is None else SaveId.parse(save_id), step=step)


def same_choice(
    ranks: Coordination,
    look: Callable[[], list[NewestCandidate]],
    usable: Callable[[list[NewestCandidate]], list[bool]],
    timeout_s: float,
    call: str,
) -> NewestCandidate | None:
    """Return, on every rank, the first of rank 0's candidates that each of them can use; a collective.

    Args:
        ranks: The ranks.
        look: Called on rank 0 only.
        usable: Says on each rank which of rank 0's candidates it can use; not called where the first one is on disk.
        timeout_s: How long rank 0 may look, and how long to wait for the other ranks.
        call: What the ranks call, for messages.

    Raises:
        PlanTimeoutError: Some ranks did not call.
        SaveFailedError: Rank 0's `look` failed (on the others), or the exchange broke down.
        Exception: Whatever `look` raises, on rank 0.

    Blocks: at most three times `timeout_s`.
    """
    if ranks.alone:
        return next(iter(look()), None)
    meeting = ranks.meet_next("answer", call)
    first = ranks.rank.rank == 0
    began = time.monotonic()

    def together(work: Callable[[], Any], deadline: Callable[[], float]) -> list[Any]:
        return all_or_none(lambda data: meeting.gather(data, deadline()), work, _failed_on)

    try:
        answers = together(
            lambda: [list(candidate) for candidate in look()] if first else None,
            # Rank 0 may take so long for its answer.
            lambda: time.monotonic() + timeout_s if first else began + 2 * timeout_s,
        )
        candidates = _candidates_of(answers[0])
        if not candidates or not candidates[0].save_id:
            return next(iter(candidates), None)
        votes = together(lambda: usable(candidates), lambda: time.monotonic() + timeout_s)
    finally:
        meeting.close()
    if any(not isinstance(vote, list) or len(vote) != len(candidates) for vote in votes):
        raise SaveFailedError("a rank answered with something else than which checkpoints it can load", code="exchange")
    return next((candidate for n, candidate in enumerate(candidates) if all(vote[n] for vote in votes)), None)


def _failed_on(rank: int, error: AsyncCkptError) -> SaveFailedError:
    return SaveFailedError(f"rank {rank} failed: {error}", code="withdrawn", rank=rank, detail=str(error)[:1000])


def same_answer(ranks: Coordination, ask: Callable[[], str], timeout_s: float, call: str) -> str:
    """Return rank 0's answer on every rank; a collective.

    Args:
        ranks: The ranks.
        ask: Called on rank 0 only.
        timeout_s, call, Raises, Blocks: As for `same_choice`.
    """
    found = same_choice(
        ranks, lambda: [NewestCandidate(ask())], lambda candidates: [True] * len(candidates), timeout_s, call
    )
    if found is None:
        raise SaveFailedError("rank 0 answered with nothing", code="exchange", rank=0)
    return found.path


def _candidates_of(raw: Any) -> list[NewestCandidate]:
    try:
        return [NewestCandidate(str(path), str(save_id), int(step)) for path, save_id, step in raw]
    except (ValueError, TypeError) as error:
        text = "rank 0 answered with something else than checkpoints"
        raise SaveFailedError(text, code="exchange", rank=0) from error
