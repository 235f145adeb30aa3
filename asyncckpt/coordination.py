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
from asyncckpt.ends import BackgroundThread
from asyncckpt.errors import AsyncCkptError, PlanTimeoutError
from asyncckpt.exchange import SAVE, Exchange, Meeting
from asyncckpt.failpoints import reach
from asyncckpt.introductions import check_equal, introduced, unpacked
from asyncckpt.links import Links, Worker
from asyncckpt.planning.agreement import Agreement
from asyncckpt.planning.contributions import Change, Contribution, decode_contributions
from asyncckpt.planning.flattened import Flattened
from asyncckpt.planning.settling import settled_together
from asyncckpt.taken_changes import TakenChanges, say_per_rank

BRIEF_S = 10.0
"""While the other ranks have not come to the last save, the next ones wait for them so long only: training goes on."""

LATE = "it took this save before it heard that the ranks agree anew; the next one agrees"

_log = logging.getLogger("asyncckpt")


class Coordination:
    """See the module. Used by the training thread; `take_change` by any.

    Args:
        rank: Of this process.
        config: For `plan_timeout_s` and `replicated`.
        find: Returns the exchange to meet at.
        package: asyncckpt's version.
        name: Of the checkpointer, the same on all ranks; see `process_group.Membership`.
        worker: Of this rank; None: there is none.
    """

    def __init__(
        self,
        rank: RankInfo,
        config: CheckpointerConfig,
        find: Callable[[], Exchange],
        *,
        package: str,
        name: str = "0",
        worker: Worker | None = None,
    ) -> None:
        self.rank, self._config, self.find, self._package = rank, config, find, package
        self.links = Links(rank, worker or Worker(), config.worker_timeout_s)
        self.run_id = secrets.token_hex(6)
        self.agreement: Agreement | None = None
        self._first: Agreement | None = None
        self._name = name
        self._met: set[int] = set()
        self._met_last = -1
        self._doubted = self._waited_in_vain = False
        self.knows_run = False
        self.answers, self.preparations = itertools.count(), itertools.count()
        self._changes = TakenChanges()
        self._lock = threading.Lock()

    @property
    def alone(self) -> bool:
        """Whether there is but one rank: then there is nothing to agree on."""
        return self.rank.world_size == 1

    # ---- the first save

    def agree(self, flat: Flattened, contribution: Contribution, *, sequence: int, path: str, step: int) -> Agreement:
        """Return the agreement; the first call meets the other ranks, and one after an agreement that was doubted.

        Args:
            flat: This rank's state; tensors that other ranks hold too are hashed.
            contribution: What is in it.
            sequence, path, step: Of the save.

        Raises:
            PlanTimeoutError: Ranks have not called `save()` within `plan_timeout_s`.
            RanksDisagreeError: They save something else, or to another place.
            SaveFailedError: A rank has failed before it came, or the exchange broke down.
            WorkerUnavailableError, EndpointError: No process group, and no worker; or the workers cannot be linked.

        Blocks: in the first save, up to `plan_timeout_s` for the other ranks, and as long again for each to hash.
        """
        with self._lock:
            if self._doubted:
                self._doubted, self.agreement, self._first = False, None, None
            self._met_last = sequence if self.agreement is None else self._met_last
        if self.agreement is not None:
            return self.agreement
        self._met.add(sequence)
        return self._meet_and_settle(f"save/{sequence}", flat, contribution, path, step)

    def prepare(self, contributed: Callable[[], tuple[Flattened, Contribution]]) -> None:
        """Agree on a structure before its first save: a collective, that consumes no save id.

        A failure, wherever, leaves all ranks without an agreement: their next save meets again.

        Args:
            contributed: Returns this rank's state and what is in it; where it raises, the other ranks are told.

        Raises:
            Exception: What `contributed` raises; else as `agree`.

        Blocks: up to `plan_timeout_s` for the other ranks.
        """
        name = f"prepare/{next(self.preparations)}"
        try:
            flat, contribution = contributed()
        except BaseException as error:
            self.agreement = self._first = None  # as on the ranks that are told
            self.refuse_meeting(name, repr(error))
            raise
        self._meet_and_settle(name, flat, contribution, "", 0)

    def _meet_and_settle(
        self, name: str, flat: Flattened, contribution: Contribution, path: str, step: int
    ) -> Agreement:
        mine = {**self.introduction(path, step), **self._known(), "contribution": contribution.encode()}
        meeting = self.meet(name, SAVE if step or path else "prepare()")
        try:
            reach("ranks: meeting")
            everybody = [unpacked(data) for data in meeting.gather(msgpack.packb(mine), self._first_deadline())]
            self._waited_in_vain = False
            reach("ranks: introduced")
            check_equal(everybody)
            self._begin_alike(everybody)
            self.run_id, self.knows_run = everybody[0]["run"], True
            workers = [found["worker"] for found in everybody]
            self.links.settle(self.run_id, workers, lambda data: meeting.gather(data, self._deadline()))
            reach("ranks: linked")
            raw = {rank: found["contribution"] for rank, found in enumerate(everybody)}
            self.settle(raw, flat, lambda digests: meeting.gather(digests, self._deadline()))
            reach("ranks: agreed")
            meeting.gather(b"", self._deadline())  # who has come so far has all it needs, and so have the others
        except BaseException as error:
            self.agreement = self._first = None
            self._waited_in_vain = self._waited_in_vain or isinstance(error, PlanTimeoutError)
            meeting.refuse(repr(error))
            raise
        finally:
            meeting.close()
        assert self.agreement is not None
        self._first = self.agreement
        return self.agreement

    def _known(self) -> dict[str, Any]:
        fingerprint = "" if self.agreement is None else self.agreement.fingerprint
        return {"agreement": fingerprint, "leader": self.links.leader, "changes": self._changes.heard()}

    def _begin_alike(self, everybody: Sequence[Mapping[str, Any]]) -> None:
        """Go on with the agreement that all ranks have; else begin anew, on all of them.

        IMPORTANT: a change that some ranks have heard of, and perhaps applied, must not be applied by the others to
        what is agreed upon now.
        """
        agreed = {(found["agreement"], found["leader"]) for found in everybody}
        if self.agreement is None or agreed != {(self.agreement.fingerprint, everybody[0]["worker"])}:
            self.agreement = None
            self._changes.overtake([found["changes"] for found in everybody])

    def _first_deadline(self) -> float:
        brief = min(self._config.plan_timeout_s, BRIEF_S)
        return time.monotonic() + brief if self._waited_in_vain else self._deadline()

    def _deadline(self) -> float:
        return time.monotonic() + self._config.plan_timeout_s

    def forget(self, since: int | None = None) -> None:
        """Agree anew in the next save: a rank has not agreed, although this one thinks that all have. Thread-safe.

        Args:
            since: The save in which that rank had not; it may wait for this one at those that came after it.
        """
        with self._lock:
            if since is not None and since < self._met_last:
                return  # the ranks have agreed since, or are about to
            self._doubted = True
        if since is not None:
            self._stay_away(self._changes.taken_since(since + 1))

    @property
    def must_meet(self) -> bool:
        """Whether the next save meets the other ranks."""
        return self.agreement is None or self._doubted

    def introduction(self, path: str, step: int) -> dict[str, Any]:
        """Return what must be equal on all ranks, and this rank's run id: rank 0's is taken."""
        mine = introduced(self._config, package=self._package, path=path, step=step)
        return {**mine, "run": self.run_id, "worker": self.links.instance()}

    def settle(self, raw: Mapping[int, bytes], flat: Flattened, gather: Callable[[bytes], list[bytes]]) -> None:
        """Extend the agreement by what ranks contribute; what several of them hold is compared first.

        Args:
            raw: Encoded contributions by rank, equal on all ranks.
            flat: This rank's state, to be hashed where that is needed.
            gather: Exchanges digests: this rank's for everybody's.

        Raises:
            ProtocolError: A rank sent nonsense.
            ReplicaMismatchError: Shards that several ranks hold differ.
            RanksDisagreeError, OverlappingShardsError: What ranks say of shards cannot be true together.
            AsyncCkptError: From `gather`.
        """
        contributions = decode_contributions(raw)
        checked = self._config.replicated == "check"
        agreement = self.agreement or Agreement.start(self.rank.world_size)
        settled = settled_together(agreement, contributions, flat, self.rank.rank, gather, compare=checked)
        change = Change(contributions=settled)
        agreement = agreement.extended(change, change.encode(), compared=True)
        agreement.shards.check()
        self.agreement = agreement

    def store_per_rank(self, fqns: Sequence[str]) -> None:
        """From now on each rank stores its own of these tensors; shards are agreed on anew. On all ranks alike."""
        assert self.agreement is not None
        change = Change(contributions={}, per_rank=tuple(fqns))
        after = self.agreement.extended(change, change.encode())
        self.agreement = after if after.shards.names.isdisjoint(fqns) else None

    def refuse(self, sequence: int, reason: str) -> None:
        """Tell ranks that wait for this one in their first save that it does not come."""
        if self.agreement is None and sequence not in self._met:
            self._met.add(sequence)
            self.refuse_meeting(f"save/{sequence}", reason)

    def refuse_meeting(self, name: str, reason: str) -> None:
        """Tell ranks that wait for this one at a meeting that it does not come."""
        if self.alone:
            return
        try:
            meeting = self.meet(name)
            meeting.refuse(reason)
            meeting.close()
        except AsyncCkptError as error:
            _log.warning("the other ranks cannot be told that this save has failed: %s", error)

    def meet(self, name: str, call: str = SAVE) -> Meeting:
        """Return the meeting of this checkpointer's ranks called `name`, which is used once."""
        return self.find().meet(f"{self._name}/{name}", call)

    # ---- what comes later

    def take_change(self, leader: str, number: int, effective: int, raw: bytes) -> None:
        """Keep a change of the run for the saves from sequence `effective` on: as `TakenChanges.take`. Thread-safe."""
        self._stay_away(self._changes.take(leader, number, effective, raw))

    def _stay_away(self, sequences: range) -> None:
        """Tell ranks that meet at saves which this one took without meeting. In a thread, as this one must not wait."""
        for name in [f"save/{one}" for one in sequences if one not in self._met]:
            thread = BackgroundThread(self.refuse_meeting, "asyncckpt-late", (name, LATE))
            try:
                thread.start()
            except RuntimeError as error:  # can't start new thread: the others wait for as long as they have patience
                _log.warning("the other ranks cannot be told that this one does not meet them at %s: %s", name, error)

    def expect_changes(self, leader: str, number: int) -> None:
        """Let the next save wait a moment for changes of which the worker has told. Thread-safe."""
        self._changes.expect(leader, number)

    def advance(self, sequence: int) -> None:
        """Apply the changes that hold from save `sequence` on.

        Blocks: for changes that are being fetched, at most `taken_changes.EXPECT_S`.
        """
        for raw in self._changes.due(sequence):
            if self.agreement is not None:
                change = Change.decode(raw)
                self.agreement = self.agreement.extended(change, raw)
                shards = self.agreement.shards
                # Known to all ranks: they meet until contradictions are settled, and shards covered again.
                if shards.conflicts or not shards.names.isdisjoint(change.per_rank):
                    self.forget()
                say_per_rank(change.per_rank)

    def start_over(self) -> None:
        """Go back to what the last meeting agreed on: another worker knows nothing of the changes since.

        Some ranks may have heard of the last change and others not. All of them come here before they save with the
        other worker; what was news then is news again.
        """
        self._changes.clear()
        self.agreement = self._first
