"""What the ranks of one checkpointer have agreed on: the run, and which rank writes what several of them hold.

The ranks meet in the first save. They meet again after a rank has saved something that is not agreed on, or after
tensors were found to differ between ranks. Which save they meet in follows from the outcomes of earlier saves:

- At most `max_in_flight` saves are in flight: the smallest `slots` of all ranks. Save `n` meets if the outcome of save
  `n - max_in_flight` says so, unless the ranks have met since. A rank begins save `n` only when it knows that outcome.
- A rank that does not come to a save that meets refuses it; then the next save meets.
- In a meeting the ranks find each other by the save's path. A rank that has saved more often than the others has higher
  sequences for the same saves; a meeting sets the sequence of all ranks to the highest.

A rank that can no longer learn whether the others meet in save `n` is *out of sync*: the connections were lost in the
last round of a meeting, or the outcome is lost (see `client.save_outcomes`). It refuses save `n` and those after it. So
their outcomes say that the ranks meet, and this rank comes to the first save that such an outcome names.

A worker that dies may have reported one outcome to some ranks, and its successor, which knows less, another one to
others. So for some saves after that, a rank that does not meet in a save also refuses the meeting of that save.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import msgpack

from asyncckpt.basics.failpoints import reach
from asyncckpt.basics.seen_saves import all_seen, note_seen
from asyncckpt.client.save_outcomes import SaveOutcomes
from asyncckpt.client.worker_links import WorkerAccess, WorkerLinks
from asyncckpt.config import CheckpointerConfig, RankInfo
from asyncckpt.distributed.meetings import SAVE, Exchange, Meeting, Save, ranks_disagree
from asyncckpt.errors import AsyncCkptError, PlanTimeoutError, RanksDisagreeError, SaveFailedError
from asyncckpt.format.names import SaveId
from asyncckpt.planning.contributions import Contribution, decode_contributions
from asyncckpt.planning.replica_checks import exchange_and_compare_digests
from asyncckpt.planning.write_agreement import Agreement
from asyncckpt.protocol.messages import PROTOCOL_VERSION
from asyncckpt.state_dict.flatten import Flattened

_EQUAL_FIELDS = ("package", "protocol", "path", "step", "replicated", "fsync", "overwrite", "layout")
"""Fields of an introduction that must be equal on all ranks; those that are "" are not compared."""

_OTHER_FIELDS = ("run", "worker", "agreement", "sequence", "slots", "differ", "absent", "seen", "contribution")
"""The other fields of an introduction: see `Coordination._own_fields`, `own_introduction` and `Contribution`."""


def equal_fields(config: CheckpointerConfig, *, package: str, path: str, step: int) -> dict[str, Any]:
    """Return the fields of a rank's introduction that must be equal on all ranks."""
    return {
        "package": package,
        "protocol": PROTOCOL_VERSION,
        "path": path,
        "step": step,
        "replicated": config.replicated,
        "fsync": config.fsync,
        "overwrite": config.overwrite,
        "layout": config.layout,
    }


def check_equal(introductions: Sequence[Mapping[str, Any]]) -> None:
    """Check that all ranks save the same step to the same path, with the same settings.

    Args:
        introductions: The ranks' introductions, by rank.

    Raises:
        RanksDisagreeError: They do not; names the field that differs, and the ranks.
    """
    for name in _EQUAL_FIELDS:
        known = [rank for rank, found in enumerate(introductions) if found[name] != ""]
        for rank in known:
            if introductions[rank][name] != introductions[known[0]][name]:
                first, second = (known[0], introductions[known[0]][name]), (rank, introductions[rank][name])
                raise ranks_disagree(name, first, second, introductions[0]["path"])


def decode_introduction(data: bytes) -> dict[str, Any]:
    """Decode one rank's introduction, its payload in the first round of a meeting.

    Raises:
        RanksDisagreeError: A field is missing or invalid: the rank has another version of asyncckpt.
    """
    try:
        found: Mapping[str, Any] = msgpack.unpackb(data)
        if not type(found["sequence"]) is type(found["slots"]) is int or found["slots"] < 1:
            raise ValueError("sequence or slots is not an int, or slots is less than 1")
        if not all(type(name) is str for name in found["differ"]):
            raise ValueError("differ contains something else than strings")
        for directory, newest in found["seen"].items():
            if type(directory) is not str or SaveId.parse(newest) != newest:
                raise ValueError("seen is not a dict of directories and save IDs")
        return {name: found[name] for name in (*_OTHER_FIELDS, *_EQUAL_FIELDS)}
    except (ValueError, TypeError, KeyError, AttributeError, msgpack.UnpackException) as error:
        raise RanksDisagreeError(
            f"another rank has another version of asyncckpt: {error!r}; install the same version on all nodes",
            detail="version",
        ) from error


BRIEF_TIMEOUT_S = 10.0
"""After the other ranks have not come to a meeting, the next saves wait for them only so long: training goes on."""

MAX_MEETINGS_IN_A_ROW = 8
"""How many saves in a row meet because of new tensors that the save of the last meeting did not hold: ranks may save
several structures in turn. Tensors that were in none of these saves are stored per rank for good. As many as
`PlanCache` keeps plans."""

MAX_DIFFERING = 10_000
"""How many names of tensors that were found to differ a rank brings to a meeting."""

PREPARATIONS = "prepare"
"""Name of the series of meetings of `prepare()`, which has no path."""

_log = logging.getLogger("asyncckpt")


class Coordination:
    """One rank's view of the run: when the ranks meet, and what they have agreed on.

    For the training thread only, except `differs` and `outcomes`, which any thread may use.

    Args:
        rank: Rank of this process.
        config: For `plan_timeout_s`, `replicated` and `slots`.
        find: Returns the exchange for meetings.
        package: asyncckpt's version.
        worker: Worker of this rank; None: there is none.

    Attributes:
        run_id: ID of the run; this rank's own until `knows_run`.
        agreement: What the ranks have agreed on; None: the next save meets.
        outcomes: Outcomes of the run's saves.
        links: Links between the ranks' workers.
    """

    def __init__(
        self,
        rank: RankInfo,
        config: CheckpointerConfig,
        find: Callable[[], Exchange],
        *,
        package: str,
        worker: WorkerAccess | None = None,
    ) -> None:
        self.rank, self._config, self.find, self._package = rank, config, find, package
        self.links = WorkerLinks(rank, worker or WorkerAccess(), config.worker_timeout_s)
        self.run_id = secrets.token_hex(6)
        self.agreement: Agreement | None = None
        self.outcomes = SaveOutcomes()
        self._waited_in_vain = False
        self.knows_run = False
        self._sequence_offset = 0
        self._max_in_flight = 1
        self._last_attended = self._outcomes_count_from = self._checked_until = self._last_sequence = -1
        self._next_meets = False
        self._out_of_sync = ""
        self._new_names: frozenset[str] = frozenset()
        self._never_shared: frozenset[str] = frozenset()
        self._n_meetings_in_a_row = 0
        self._differing: dict[str, None] = {}

    @property
    def alone(self) -> bool:
        """Whether there is only one rank: then there is nothing to agree on."""
        return self.rank.world_size == 1

    # ---- which save meets

    def aligned(self, own: int) -> int:
        """Return the sequence that all ranks give the save which this rank counts as its `own`."""
        return own + self._sequence_offset

    def align(self, mine: int, sequences: Iterable[int]) -> int:
        """Continue with the highest sequence of all ranks, and return it.

        Args:
            mine: This rank's sequence of the save that all ranks are in, or have made last.
            sequences: The same of all ranks.
        """
        latest = max(sequences)
        self._sequence_offset += latest - mine
        return latest

    def awaited_save(self, sequence: int) -> int | None:
        """Return the save whose outcome must be known before save `sequence` begins; None: it may begin.

        Here and below, sequences are those of all ranks; see `aligned`.
        """
        is_first = self.agreement is None and not self._out_of_sync
        while not is_first and not self._next_meets and self._checked_until < sequence:
            source = self._checked_until + 1 - self._max_in_flight
            if source >= self._outcomes_count_from:
                meets = self.outcomes.meets_after(self.run_id, source)
                if meets is None and not self.outcomes.is_lost(self.run_id, source):
                    return source
                if meets is None:
                    self._lose_sync(sequence, f"it cannot learn any more how save {source} has ended on all ranks")
                    return None
                self._next_meets = meets
            self._checked_until += 1
        return None

    def _lose_sync(self, sequence: int, why: str) -> None:
        """Refuse saves from this one on, until the outcome of one of them says that the ranks meet."""
        self._out_of_sync, self._next_meets = why, False
        self._outcomes_count_from = self._checked_until = sequence

    @property
    def max_in_flight(self) -> int:
        """How many saves of the run may be in flight: save `n` begins once save `n - max_in_flight` has ended."""
        return self._max_in_flight

    @property
    def is_out_of_sync(self) -> bool:
        """Whether this rank refuses saves, since it cannot know whether the others meet in them."""
        return bool(self._out_of_sync) and not self._next_meets

    @property
    def must_meet(self) -> bool:
        """Whether the next save must meet the other ranks, or be refused. Valid once `awaited_save` returns None."""
        return self.agreement is None or self._next_meets or self.is_out_of_sync

    def agree(self, flat: Flattened, contribution: Contribution, *, sequence: int, path: str, step: int) -> Agreement:
        """Return the agreement; meet the other ranks if this save must.

        Args:
            flat: This rank's state; tensors that other ranks hold too are hashed.
            contribution: The tensors and shards in `flat`.
            sequence, path, step: Sequence, directory and step of the save.

        Raises:
            PlanTimeoutError: Ranks have not called `save()` within `plan_timeout_s`.
            RanksDisagreeError: They save another step, to another path, or with other settings.
            SaveFailedError: A rank has failed before it came, the exchange broke down, or this rank is out of sync.
            WorkerUnavailableError, EndpointError: No process group, and no worker; or the workers cannot be linked.

        Blocks: in a save that meets, up to `plan_timeout_s` for the other ranks, and as long again for each to hash.
        """
        self._last_sequence = max(sequence, self._last_sequence)
        if self.agreement is not None and not self.must_meet:
            return self.agreement
        self._last_attended = sequence
        save = Save(path, sequence)
        if self.is_out_of_sync:
            text = (
                f"this rank does not know whether the other ranks wait for it in this save: {self._out_of_sync}. In a "
                "later save all ranks agree again on what each of them writes: save again"
            )
            self.refuse_save(save, text)
            raise SaveFailedError(text, code="exchange", rank=self.rank.rank, path=path, step=step)
        return self._meet_and_agree(save.series, flat, contribution, save, step)

    def skip_meeting(self, sequence: int, path: str) -> None:
        """Note that this rank saves without meeting the others; a dead worker may have told some of them to meet."""
        self._last_sequence = max(sequence, self._last_sequence)
        if self._may_be_expected(sequence):
            self.refuse_save(
                Save(path, sequence), "its worker has not reported that the ranks meet in this save; a later one meets"
            )

    def _may_be_expected(self, sequence: int) -> bool:
        # Saves that the lost worker had in flight, those that their outcomes name, and as many retries.
        at_loss = self.outcomes.at_loss
        return at_loss is not None and sequence <= at_loss + 3 * self._max_in_flight

    def prepare(self, contributed: Callable[[], tuple[Flattened, Contribution]]) -> None:
        """Agree on a structure before its first save: a collective that consumes no save id.

        If it fails on any rank, all ranks are left without an agreement: their next save meets.

        Args:
            contributed: Returns this rank's state and its contribution; if it raises, the other ranks are told.

        Raises:
            Exception: What `contributed` raises; else as `agree`.

        Blocks: up to `plan_timeout_s` for the other ranks.
        """
        try:
            flat, contribution = contributed()
        except BaseException as error:
            self.agreement = None  # as on the other ranks
            self.refuse_meeting(PREPARATIONS, repr(error))
            raise
        self._meet_and_agree(PREPARATIONS, flat, contribution, None, 0)

    def _meet_and_agree(
        self, series: str, flat: Flattened, contribution: Contribution, save: Save | None, step: int
    ) -> Agreement:
        path = save.path if save else ""
        names = {key[0] for key in contribution.tensors} | {claim.fqn for claim in contribution.shards}
        mine = {**self.own_introduction(path, step), **self._own_fields(names), "contribution": contribution.encode()}
        meeting, has_agreed = self.meet_next(series, SAVE if save else "prepare()", save), False
        try:
            reach("ranks: meeting")
            payloads = meeting.gather(msgpack.packb(mine), self._first_deadline())
            introductions = [decode_introduction(data) for data in payloads]
            self._waited_in_vain = False
            # IMPORTANT: align before any check that may fail, so that all ranks use the same sequence for the next
            # save, in which they meet again.
            self._last_sequence = self.align(self._last_sequence, (found["sequence"] for found in introductions))
            self._last_attended = self._last_sequence if save else self._last_attended
            for found in introductions:  # one rank may have restored for all of them
                for directory, newest in found["seen"].items():
                    note_seen([directory], [newest])
            reach("ranks: introduced")
            check_equal(introductions)
            if len({found["agreement"] for found in introductions}) > 1:
                self.agreement = None
            self.run_id, self.knows_run = introductions[0]["run"], True
            workers = [found["worker"] for found in introductions]
            self.links.link(self.run_id, workers, lambda data: meeting.gather(data, self._deadline()))
            reach("ranks: linked")
            raw = {rank: found["contribution"] for rank, found in enumerate(introductions)}
            differ = {name for found in introductions for name in found["differ"]}
            self.renew_agreement(raw, flat, lambda digests: meeting.gather(digests, self._deadline()), differ)
            reach("ranks: agreed")
            has_agreed = True
            meeting.gather(b"", self._deadline())  # a barrier: here every rank has what it needs for the agreement
        except BaseException as error:
            self.agreement = None
            self._waited_in_vain = self._waited_in_vain or isinstance(error, PlanTimeoutError)
            if has_agreed and getattr(error, "code", None) != "withdrawn":
                # IMPORTANT: the others may have passed the barrier, and do not meet in the next save. By the outcome of
                # this save they learn that this rank has not passed it, and meet when that outcome says so. To wait
                # for them in a save before that one would be in vain.
                self._max_in_flight = min(found["slots"] for found in introductions)
                first = self._last_sequence if save else self._last_sequence + 1
                self._lose_sync(first, "the connection to the other ranks was lost in the last round of a meeting")
            else:
                meeting.refuse(repr(error))
            raise
        finally:
            meeting.close()
        self._note_meeting(introductions, names, is_save=save is not None)
        assert self.agreement is not None
        return self.agreement

    def _own_fields(self, names: Collection[str]) -> dict[str, Any]:
        return {
            "agreement": "" if self.agreement is None else self.agreement.fingerprint,
            "sequence": self._last_sequence,
            "slots": self._config.slots,
            "differ": list(self._differing),
            "absent": not self._new_names <= set(names),
            "seen": all_seen(),
        }

    def _note_meeting(
        self, introductions: Sequence[Mapping[str, Any]], names: Collection[str], *, is_save: bool
    ) -> None:
        """Set the state that all ranks share after a successful meeting."""
        self._max_in_flight = min(found["slots"] for found in introductions)
        self._outcomes_count_from = self._last_sequence if is_save else self._last_sequence + 1
        self._checked_until, self._out_of_sync = self._last_sequence, ""
        left = self._new_names.difference(names)
        # New tensors that a rank has announced may belong to another structure than this save's: if some were absent
        # from this save, the next save meets too.
        may_meet = self._n_meetings_in_a_row < MAX_MEETINGS_IN_A_ROW
        self._next_meets = may_meet and any(found["absent"] for found in introductions)
        self._n_meetings_in_a_row = self._n_meetings_in_a_row + 1 if self._next_meets else 0
        self._new_names = left if self._next_meets else frozenset()
        self._never_shared = self._never_shared.difference(names) | (frozenset() if self._next_meets else left)
        self._differing.clear()

    def _first_deadline(self) -> float:
        brief = min(self._config.plan_timeout_s, BRIEF_TIMEOUT_S)
        return time.monotonic() + brief if self._waited_in_vain else self._deadline()

    def _deadline(self) -> float:
        return time.monotonic() + self._config.plan_timeout_s

    def is_changed(self, new: Collection[str]) -> bool:
        """Return whether the ranks must meet for `new`: names that this rank holds and that are not agreed on."""
        wanted = frozenset(new) - self._never_shared
        self._new_names |= wanted
        return bool(wanted)

    def differs(self, fqn: str) -> None:
        """Note that a tensor that was taken for a replica differs: from the next meeting on it is stored per rank."""
        if len(self._differing) < MAX_DIFFERING:
            self._differing[fqn] = None

    def own_introduction(self, path: str, step: int) -> dict[str, Any]:
        """Return what must be equal on all ranks, this rank's run id (all ranks take rank 0's) and its worker."""
        mine = equal_fields(self._config, package=self._package, path=path, step=step)
        return {**mine, "run": self.run_id, "worker": self.links.instance()}

    def renew_agreement(
        self,
        raw: Mapping[int, bytes],
        flat: Flattened,
        gather: Callable[[bytes], list[bytes]],
        differing: Collection[str] = (),
    ) -> None:
        """Make the agreement from all ranks' contributions; compare first what several of them hold.

        Args:
            raw: Encoded contributions by rank, equal on all ranks.
            flat: This rank's state; what other ranks hold too is hashed.
            gather: All-gathers digests: takes this rank's, returns all ranks'.
            differing: FQNs that were found to differ between ranks in a save.

        Raises:
            ProtocolError: A contribution is malformed.
            ReplicaMismatchError: Shards that several ranks hold differ.
            RanksDisagreeError, OverlappingShardsError: The ranks' claims of shards contradict each other.
            AsyncCkptError: From `gather`.
        """
        contributions = decode_contributions(raw)
        checked = self._config.replicated == "check"
        agreement = self.agreement or Agreement.start(self.rank.world_size)
        settled = exchange_and_compare_digests(agreement, contributions, flat, self.rank.rank, gather, compare=checked)
        agreement = agreement.after(settled, differing)
        agreement.shards.check()
        _warn_of(differing)
        self.agreement = agreement

    def store_per_rank(self, fqns: Sequence[str]) -> None:
        """Store these tensors per rank from now on; if shards are among them, agree anew. Call it on all ranks."""
        assert self.agreement is not None
        after = self.agreement.after({}, fqns)
        self.agreement = after if after.shards.names.isdisjoint(fqns) else None

    def refuse(self, sequence: int, path: str, reason: str) -> None:
        """Tell ranks that meet in a save, or may do so, that this one does not come.

        Args:
            sequence: Sequence of the save.
            path: Its directory; "": the user's path was invalid.
            reason: For the other ranks.
        """
        if self.alone or sequence <= self._last_attended or sequence < self._checked_until:
            return
        self._last_attended = sequence
        self._last_sequence = max(sequence, self._last_sequence)
        if self.awaited_save(sequence) is not None or self.must_meet or self._may_be_expected(sequence):
            self.refuse_save(Save(path, sequence), reason)

    def refuse_save(self, save: Save, reason: str) -> None:
        """Tell ranks that wait for this one in a save that it does not come."""
        if save.path:
            self.refuse_meeting(save.series, reason)
        elif not self.alone:
            try:
                self.find().announce_absence(save.sequence, reason)
            except AsyncCkptError as error:
                _log.warning("the other ranks cannot be told that this save has failed: %s", error)

    def refuse_meeting(self, series: str, reason: str) -> None:
        """Tell ranks that wait for this one at the next meeting of a series that it does not come."""
        if self.alone:
            return
        try:
            meeting = self.meet_next(series)
            meeting.refuse(reason)
            meeting.close()
        except AsyncCkptError as error:
            _log.warning("the other ranks cannot be told that this save has failed: %s", error)

    def meet_next(self, series: str, call: str = SAVE, about: Save | None = None) -> Meeting:
        """Return the next meeting of a series; see `Exchange`."""
        return self.find().meet_next(series, call, about)


def _warn_of(differing: Collection[str]) -> None:
    """Warn of tensors that are stored per rank from now on, if there are any."""
    if differing:
        _log.warning(
            "from this save on, %d tensors that were found to differ between ranks are stored for each rank: %s",
            len(differing),
            ", ".join(sorted(differing)[:8]),
        )
