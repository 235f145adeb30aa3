"""One choice for all ranks: rank 0 sends candidates, each rank says which it can use, and all take the same one."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import msgpack

from asyncckpt.config import RankInfo
from asyncckpt.distributed.meetings import Meeting, all_or_none
from asyncckpt.distributed.process_group import find_exchange
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
"""How long the slowest rank may take to load a checkpoint, or to find it broken. The default timeout of gloo."""

RESTORE = "restore_latest()"
_LOADED, _BROKEN, _OTHER_FAILED, _FAILED = "loaded", "broken", "other failed", "failed"
"""Kinds of `_Outcome`: loaded; the checkpoint is broken; ended by another rank's error; another error of this rank."""


class Broken(NamedTuple):
    """Why a checkpoint is skipped.

    Attributes:
        error: This rank's error, or a SharedLoadError that names a rank that found the checkpoint broken.
        is_damaged: A rank has read bytes that are not what was written; False: storage does not answer, for example.
    """

    error: Exception
    is_damaged: bool


class Ranks(ABC):
    """The ranks that restore together. A context manager: on exit, ranks that still wait for this one are told."""

    @abstractmethod
    def same_candidates(self, root: str, look: Callable[[], list[Candidate]], timeout_s: float) -> list[Candidate]:
        """Return rank 0's candidates.

        Args:
            root: The directory.
            look: Returns the candidates. Called on rank 0 only.
            timeout_s: How long `look` may take, and how long to wait for the last rank.

        Raises:
            PlanTimeoutError: Some ranks do not restore.
            RanksDisagreeError: They restore from another directory.
            SharedLoadError: `look` failed on rank 0, or the connection to another rank is lost.
            Exception: The error of `look`, on rank 0.
        """

    @abstractmethod
    def vote(self, path: str, save_id: SaveId | None, error: Exception | None) -> Broken | None:
        """Exchange how the load of the checkpoint at `path` went on each rank, and decide for all of them.

        Args:
            path: Directory of the checkpoint.
            save_id: ID of the save that was read there.
            error: The error of this rank's load, if it failed.

        Returns:
            None: all ranks have loaded it. Else why all of them skip it.

        Raises:
            Exception: `error`, if its cause is not a broken checkpoint.
            SharedLoadError: Another rank has such an error; or the connection to another rank is lost.
            RanksDisagreeError: They have loaded different saves: the checkpoint was overwritten meanwhile.
            PlanTimeoutError: A rank is too slow.
        """

    @abstractmethod
    def from_rank_0(self, text: Callable[[], list[str | None]]) -> list[str | None]:
        """Call `text` on rank 0, and return its result on every rank.

        Raises:
            SharedLoadError: The connection to another rank is lost.
            PlanTimeoutError: A rank is too slow.
        """

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        return None


class OneRank(Ranks):
    """A single rank: every step is local."""

    def same_candidates(self, root: str, look: Callable[[], list[Candidate]], timeout_s: float) -> list[Candidate]:
        return look()

    def vote(self, path: str, save_id: SaveId | None, error: Exception | None) -> Broken | None:
        if error is None:
            return None
        if not is_broken(error):
            raise error
        return Broken(error, isinstance(error, CorruptCheckpointError))

    def from_rank_0(self, text: Callable[[], list[str | None]]) -> list[str | None]:
        return text()


class _Outcome(NamedTuple):
    """How a load went on one rank.

    Attributes:
        kind: `_LOADED`, `_BROKEN`, `_OTHER_FAILED` or `_FAILED`.
        text: If loaded, the save id, else the error.
        is_damaged: As `Broken.is_damaged`.
    """

    kind: str
    text: str = ""
    is_damaged: bool = False


class ManyRanks(Ranks):
    """Several ranks, connected by a meeting: through the default process group, or through the worker.

    Args:
        rank: This rank.
        meeting: The meeting of these ranks.
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

    def vote(self, path: str, save_id: SaveId | None, error: Exception | None) -> Broken | None:
        def mine() -> list[Any]:
            outcome = _outcome(error) if error is not None else _Outcome(_LOADED, str(save_id))
            if error is not None and outcome.kind == _FAILED:
                raise error
            return list(outcome)

        def failed(rank: int, other: AsyncCkptError) -> SharedLoadError:
            return _shared(path, rank, _text(other))

        votes = all_or_none(lambda data: self._gather(data, TRY_TIMEOUT_S), mine, failed)
        outcomes = [_Outcome(*one) for one in votes]
        broken = [rank for rank, one in enumerate(outcomes) if one.kind == _BROKEN]
        if broken:
            own = error if error is not None and outcomes[self._rank.rank].kind == _BROKEN else None
            reason = own or self._failed(path, broken[0], outcomes)
            return Broken(reason, any(one.is_damaged for one in outcomes))
        ended = [rank for rank, one in enumerate(outcomes) if one.kind == _OTHER_FAILED]
        if ended:  # by an error that says nothing against the checkpoint
            raise error if error is not None else self._failed(path, ended[0], outcomes)
        saves = sorted({one.text for one in outcomes})
        if len(saves) > 1:
            detail = f"saves {saves[0]} and {saves[1]}"
            raise RanksDisagreeError(
                f"{path} was overwritten while the ranks restored it: they have loaded {detail}",
                detail=detail,
                path=path,
            )
        return None

    def from_rank_0(self, text: Callable[[], list[str | None]]) -> list[str | None]:
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
    """Return the ranks that must restore the same checkpoint.

    Args:
        rank: This rank.
        meet: Returns a meeting if there is no process group of just these ranks; None: they cannot meet.

    Raises:
        ConfigError: There are several ranks, and they cannot meet: each might restore another checkpoint.
        SharedLoadError: From `meet`: the ranks cannot reach each other.
        AsyncCkptError: From `meet`.
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
    return _Outcome(_OTHER_FAILED if isinstance(error, SharedLoadError) else _FAILED, text)


def _shared(path: str, rank: int | None, detail: str) -> SharedLoadError:
    who = "the ranks lost each other" if rank is None else f"rank {rank} could not load it"
    return SharedLoadError(f"{path}: {who}: {detail}", path=path, rank=rank, detail=detail)


def _packed(value: Any) -> bytes:
    """Pack as msgpack. File names that are not UTF-8 are strings with lone surrogates."""
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
        look: Returns the candidates. Called on rank 0 only.
        usable: Returns, on each rank, which of rank 0's candidates it can use. Not called if the first one is on disk.
        timeout_s: How long `look` may take on rank 0, and how long to wait for the other ranks.
        call: The function that the ranks must call, for messages.

    Raises:
        PlanTimeoutError: Some ranks did not call it.
        SaveFailedError: `look` failed on rank 0 (raised on the other ranks), or the exchange broke down.
        Exception: The error of `look`, on rank 0.

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
            # Rank 0 may take `timeout_s` for `look`; the others wait for that as well.
            lambda: time.monotonic() + timeout_s if first else began + 2 * timeout_s,
        )
        candidates = _candidates_of(answers[0])
        if not candidates or not candidates[0].save_id:
            return next(iter(candidates), None)
        votes = together(lambda: usable(candidates), lambda: time.monotonic() + timeout_s)
    finally:
        meeting.close()
    if any(not isinstance(vote, list) or len(vote) != len(candidates) for vote in votes):
        bad = next(r for r, vote in enumerate(votes) if not isinstance(vote, list) or len(vote) != len(candidates))
        raise SaveFailedError(
            f"rank {bad} sent no list of {len(candidates)} votes, one for each checkpoint", code="exchange"
        )
    return next((candidate for n, candidate in enumerate(candidates) if all(vote[n] for vote in votes)), None)


def _failed_on(rank: int, error: AsyncCkptError) -> SaveFailedError:
    return SaveFailedError(f"rank {rank} failed: {error}", code="withdrawn", rank=rank, detail=str(error)[:1000])


def same_answer(ranks: Coordination, ask: Callable[[], str], timeout_s: float, call: str) -> str:
    """Return rank 0's answer on every rank; a collective.

    Args:
        ranks: The ranks.
        ask: Returns the answer. Called on rank 0 only.
        timeout_s, call: As for `same_choice`.

    Raises, Blocks: As `same_choice`.
    """
    found = same_choice(
        ranks, lambda: [NewestCandidate(ask())], lambda candidates: [True] * len(candidates), timeout_s, call
    )
    if found is None:
        raise SaveFailedError("rank 0 sent no answer", code="exchange", rank=0)
    return found.path


def _candidates_of(raw: Any) -> list[NewestCandidate]:
    try:
        return [NewestCandidate(str(path), str(save_id), int(step)) for path, save_id, step in raw]
    except (ValueError, TypeError) as error:
        text = f"rank 0 sent something else than a list of checkpoints: {error}"
        raise SaveFailedError(text, code="exchange", rank=0) from error
