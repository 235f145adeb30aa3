"""What the ranks of one checkpointer have agreed on: the run, and who writes what they hold in common.

The ranks meet once, in the first save. Later news (another structure, replicas that have diverged) travel with the
saves themselves: the worker collects them into a change of the run, which every rank applies from the same save on.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgpack

from asyncckpt.config import CheckpointerConfig, RankInfo
from asyncckpt.errors import AsyncCkptError, RanksDisagreeError, SaveFailedError
from asyncckpt.exchange import Exchange, Meeting
from asyncckpt.planning.agreement import Agreement
from asyncckpt.planning.contributions import (
    Change,
    Contribution,
    candidates,
    decode_contributions,
    with_digests,
)
from asyncckpt.planning.digests import digests_for
from asyncckpt.planning.state_dict import Flattened

_NUMBERS = itertools.count()
"""Of the checkpointers of several ranks in this process, in the order of their first meetings: alike on all ranks."""

_AGREED = ("package", "path", "step", "replicated", "fsync")
"""What must be equal on all ranks at the first save."""

_log = logging.getLogger("asyncckpt")


class Coordination:
    """See the module. Used by the training thread; `take_change` by any.

    Args:
        rank: Of this process.
        config: For `plan_timeout_s` and `replicated`.
        find: Returns the exchange to meet at.
        package: asyncckpt's version.
    """

    def __init__(
        self, rank: RankInfo, config: CheckpointerConfig, find: Callable[[], Exchange], *, package: str
    ) -> None:
        self.rank, self._config, self._find, self._package = rank, config, find, package
        self.run_id = secrets.token_hex(6)
        self.agreement: Agreement | None = None
        self._first: Agreement | None = None
        self._number: int | None = None
        self._met: set[int] = set()
        self._answers, self._preparations = itertools.count(), itertools.count()
        self._changes: list[tuple[int, bytes]] = []
        self._lock = threading.Lock()

    @property
    def alone(self) -> bool:
        """Whether there is but one rank: then there is nothing to agree on."""
        return self.rank.world_size == 1

    # ---- the first save

    def agree(self, flat: Flattened, contribution: Contribution, *, sequence: int, path: str, step: int) -> Agreement:
        """Return the agreement; the first call meets the other ranks.

        Args:
            flat: This rank's state; tensors that other ranks hold too are hashed.
            contribution: What is in it.
            sequence, path, step: Of the save.

        Raises:
            PlanTimeoutError: Ranks have not called `save()` within `plan_timeout_s`.
            RanksDisagreeError: They save something else, or to another place.
            SaveFailedError: A rank has failed before it came, or the exchange broke down.
            WorkerUnavailableError: Without a process group, and without the worker.

        Blocks: in the first save, up to `plan_timeout_s` for the other ranks.
        """
        if self.agreement is not None:
            return self.agreement
        self._met.add(sequence)
        return self._meet_and_settle(f"save/{sequence}", flat, contribution, path, step)

    def prepare(self, contributed: Callable[[], tuple[Flattened, Contribution]]) -> None:
        """Agree on a structure before its first save: a collective, that consumes no save id.

        Args:
            contributed: Returns this rank's state and what is in it; where it raises, the other ranks are told.

        Raises:
            Exception: What `contributed` raises; else as `agree`.

        Blocks: up to `plan_timeout_s` for the other ranks.
        """
        name = f"prepare/{next(self._preparations)}"
        try:
            flat, contribution = contributed()
        except BaseException as error:
            self._refuse(name, repr(error))
            raise
        self._meet_and_settle(name, flat, contribution, "", 0)

    def _meet_and_settle(
        self, name: str, flat: Flattened, contribution: Contribution, path: str, step: int
    ) -> Agreement:
        mine = {**self.introduction(path, step), "contribution": contribution.encode()}
        deadline = time.monotonic() + self._config.plan_timeout_s
        meeting = self.meet(name)
        try:
            everybody = [_unpacked(data) for data in meeting.gather(msgpack.packb(mine), deadline)]
            check_equal(everybody)
            self.settle(
                {rank: found["contribution"] for rank, found in enumerate(everybody)},
                flat,
                lambda digests: meeting.gather(digests, deadline),
            )
        finally:
            meeting.close()
        assert self.agreement is not None
        self._first = self.agreement
        self.run_id = everybody[0]["run"]
        return self.agreement

    def introduction(self, path: str, step: int) -> dict[str, Any]:
        """Return what must be equal on all ranks, and this rank's run id: rank 0's is taken."""
        return {
            "run": self.run_id,
            "package": self._package,
            "path": path,
            "step": step,
            "replicated": self._config.replicated,
            "fsync": self._config.fsync,
        }

    def settle(self, raw: Mapping[int, bytes], flat: Flattened, gather: Callable[[bytes], list[bytes]]) -> None:
        """Extend the agreement by what ranks contribute; what several of them hold is compared first.

        Args:
            raw: Encoded contributions by rank, equal on all ranks.
            flat: This rank's state, to be hashed where that is needed.
            gather: Exchanges digests: this rank's for everybody's.

        Raises:
            ProtocolError: A rank sent nonsense.
            AsyncCkptError: From `gather`.
        """
        contributions = decode_contributions(raw)
        checked = self._config.replicated == "check"
        positions = candidates(contributions).get(self.rank.rank, ())
        gathered = gather(digests_for(flat, positions) if checked and positions else b"")
        if checked:
            contributions = with_digests(contributions, {rank: gathered[rank] for rank in contributions})
        change = Change(contributions=contributions)
        agreement = self.agreement or Agreement.start(self.rank.world_size)
        self.agreement = agreement.extended(change, change.encode())

    def store_per_rank(self, fqns: Sequence[str]) -> None:
        """From now on each rank stores its own of these tensors. Called on all ranks alike."""
        assert self.agreement is not None
        change = Change(contributions={}, per_rank=tuple(fqns))
        self.agreement = self.agreement.extended(change, change.encode())

    def refuse(self, sequence: int, reason: str) -> None:
        """Tell ranks that wait for this one in their first save that it does not come."""
        if self.alone or self.agreement is not None or sequence in self._met:
            return
        self._met.add(sequence)
        self._refuse(f"save/{sequence}", reason)

    def _refuse(self, name: str, reason: str) -> None:
        try:
            meeting = self.meet(name)
            meeting.refuse(reason)
            meeting.close()
        except AsyncCkptError as error:
            _log.warning("the other ranks cannot be told that this save has failed: %s", error)

    def meet(self, name: str) -> Meeting:
        """Return the meeting of this checkpointer's ranks called `name`, which is used once."""
        if self._number is None:
            self._number = next(_NUMBERS)
        return self._find().meet(f"{self._number}/{name}")

    # ---- what comes later

    def take_change(self, effective: int, raw: bytes) -> None:
        """Keep a change of the run for the saves from sequence `effective` on. Thread-safe."""
        with self._lock:
            self._changes.append((effective, raw))

    def advance(self, sequence: int) -> None:
        """Apply the changes that hold from save `sequence` on."""
        with self._lock:
            due = [raw for effective, raw in self._changes if effective <= sequence]
            self._changes = [change for change in self._changes if change[0] > sequence]
        for raw in due:
            if self.agreement is not None:
                change = Change.decode(raw)
                self.agreement = self.agreement.extended(change, raw)
                if change.per_rank:
                    _log.warning(
                        "%d tensors differ between ranks, or are not held by the rank that was to write them; from "
                        "save %d on each rank stores its own: %s",
                        len(change.per_rank),
                        sequence,
                        ", ".join(change.per_rank[:8]),
                    )

    def start_over(self) -> None:
        """Go back to what the last meeting agreed on: another worker knows nothing of the changes since.

        Some ranks may have heard of the last change and others not. All of them come here before they save with the
        other worker; what was news then is news again.
        """
        with self._lock:
            self._changes.clear()
        self.agreement = self._first

    # ---- one answer for all

    def same_answer(self, ask: Callable[[], str | None], timeout_s: float) -> str | None:
        """Return rank 0's answer on every rank; a collective.

        Args:
            ask: Called on rank 0 only.
            timeout_s: How long to wait for the other ranks.

        Raises:
            PlanTimeoutError: Some ranks did not call.
            SaveFailedError: Rank 0's `ask` failed (on the others), or the exchange broke down.
            Exception: Whatever `ask` raises, on rank 0.
        """
        if self.alone:
            return ask()
        meeting = self.meet(f"answer/{next(self._answers)}")
        deadline = time.monotonic() + timeout_s
        try:
            try:
                mine = msgpack.packb(ask() if self.rank.rank == 0 else None)
            except Exception as error:
                meeting.refuse(repr(error))
                raise
            found = msgpack.unpackb(meeting.gather(mine, deadline)[0])
        finally:
            meeting.close()
        if found is not None and not isinstance(found, str):
            raise SaveFailedError("rank 0 answered with something else than a path", code="exchange", rank=0)
        return found


def check_equal(everybody: Sequence[Mapping[str, Any]]) -> None:
    """Prove that all ranks save the same.

    Raises:
        RanksDisagreeError: Naming what differs, and the ranks.
    """
    for name in _AGREED:
        for rank, found in enumerate(everybody):
            if found[name] != everybody[0][name]:
                raise RanksDisagreeError(
                    f"rank {rank} saves with {name} {found[name]!r}, rank 0 with {everybody[0][name]!r}; "
                    "every rank must save the same step to the same path, with the same settings",
                    detail=name,
                    ranks=[0, rank],
                    path=everybody[0]["path"],
                )


def _unpacked(data: bytes) -> dict[str, Any]:
    """Return one rank's part of the first meeting, or say that it is of another version.

    Raises:
        RanksDisagreeError: It lacks something.
    """
    try:
        found: Mapping[str, Any] = msgpack.unpackb(data)
        return {name: found[name] for name in ("run", "contribution", *_AGREED)}
    except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
        raise RanksDisagreeError(
            f"another rank speaks another version of asyncckpt: {error!r}", detail="version"
        ) from error
