"""What the ranks of one checkpointer have agreed on: the run, and who writes what they hold in common.

The ranks meet in the first save, and again where one of them holds something that is not agreed upon, or where they
were found to differ. Which save that is follows from the outcomes of earlier ones: save `n` meets if the outcome of
save `n - window` says so, unless the ranks have met since. `window` is the smallest `slots` of all ranks. A rank begins
save `n` only when it knows that outcome; if it does not come to a save that meets, it refuses, and the next one meets.
They find each other by the save's path; who has saved more than the others has higher numbers for the same saves, until
a meeting has made all ranks count as the one that is the furthest.

A rank that cannot learn any more whether the others meet in save `n` is *in doubt*: since it was cut off in the last
round of a meeting, or the outcome is lost (see `outcomes`). It refuses save `n` and those after it, which makes their
outcomes say that the ranks meet, and comes to the first one that such an outcome names.

A worker that dies may have told some ranks an outcome that its successor, which knows less, tells otherwise to others.
So for some saves after that, a rank also refuses the meetings of those saves in which it does not meet.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import msgpack

from asyncckpt.basics.failpoints import reach
from asyncckpt.client.save_outcomes import Outcomes
from asyncckpt.client.worker_links import Links, Worker
from asyncckpt.config import CheckpointerConfig, RankInfo
from asyncckpt.distributed.rendezvous import SAVE, Exchange, Meeting, Save, ranks_disagree
from asyncckpt.errors import AsyncCkptError, PlanTimeoutError, RanksDisagreeError, SaveFailedError
from asyncckpt.planning.contributions import Contribution, decode_contributions
from asyncckpt.planning.replica_checks import exchange_and_compare_digests
from asyncckpt.planning.write_agreement import Agreement
from asyncckpt.protocol.messages import PROTOCOL_VERSION
from asyncckpt.state_dict.flatten import Flattened

_AGREED = ("package", "protocol", "path", "step", "replicated", "fsync", "overwrite", "layout")
"""What must be equal on all ranks at the first save, as far as it is known."""

_KNOWN = ("run", "worker", "agreement", "sequence", "slots", "differ", "absent", "contribution")
"""What else a rank says: `Coordination._known` and its contribution."""


def introduced(config: CheckpointerConfig, *, package: str, path: str, step: int) -> dict[str, Any]:
    """Return what a rank says that must be equal on all of them."""
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


def check_equal(everybody: Sequence[Mapping[str, Any]]) -> None:
    """Prove that all ranks save the same.

    Raises:
        RanksDisagreeError: Naming what differs, and the ranks.
    """
    for name in _AGREED:
        known = [rank for rank, found in enumerate(everybody) if found[name] != ""]
        for rank in known:
            if everybody[rank][name] != everybody[known[0]][name]:
                first, second = (known[0], everybody[known[0]][name]), (rank, everybody[rank][name])
                raise ranks_disagree(name, first, second, everybody[0]["path"])


def unpacked(data: bytes) -> dict[str, Any]:
    """Return one rank's part of the first meeting, or say that it is of another version.

    Raises:
        RanksDisagreeError: It lacks something.
    """
    try:
        found: Mapping[str, Any] = msgpack.unpackb(data)
        if not type(found["sequence"]) is type(found["slots"]) is int or found["slots"] < 1:
            raise ValueError("sequence and slots are no numbers")
        if not all(type(name) is str for name in found["differ"]):
            raise ValueError("names that are no texts")
        return {name: found[name] for name in (*_KNOWN, *_AGREED)}
    except (ValueError, TypeError, KeyError, AttributeError, msgpack.UnpackException) as error:
        raise RanksDisagreeError(
            f"another rank speaks another version of asyncckpt: {error!r}", detail="version"
        ) from error


BRIEF_S = 10.0
"""While the other ranks have not come to the last save, the next ones wait for them so long only: training goes on."""

MAX_IN_A_ROW = 8
"""Meetings in a row for something new that the save of a meeting did not hold: ranks may save structures in turn. What
has not come by then is stored per rank for good. As many as `PlanCache` keeps plans."""

MAX_DIFFERING = 10_000
"""Names of tensors found to differ that a rank brings to a meeting."""

PREPARATIONS = "prepare"
"""Name of the meetings of `prepare()`, which has no path."""

_log = logging.getLogger("asyncckpt")


class Coordination:
    """See the module. Used by the training thread; `differs`, and `outcomes`, by any.

    Args:
        rank: Of this process.
        config: For `plan_timeout_s`, `replicated` and `slots`.
        find: Returns the exchange to meet at.
        package: asyncckpt's version.
        worker: Of this rank; None: there is none.
    """

    def __init__(
        self,
        rank: RankInfo,
        config: CheckpointerConfig,
        find: Callable[[], Exchange],
        *,
        package: str,
        worker: Worker | None = None,
    ) -> None:
        self.rank, self._config, self.find, self._package = rank, config, find, package
        self.links = Links(rank, worker or Worker(), config.worker_timeout_s)
        self.run_id = secrets.token_hex(6)
        self.agreement: Agreement | None = None
        self.outcomes = Outcomes()
        self._waited_in_vain = False
        self.knows_run = False
        self._ahead = 0
        self._window = 1
        self._came_to = self._counts_from = self._looked_at = self._last = -1
        self._meets = False
        self._doubt = ""
        self._new: frozenset[str] = frozenset()
        self._given_up: frozenset[str] = frozenset()
        self._n_in_a_row = 0
        self._differing: dict[str, None] = {}

    @property
    def alone(self) -> bool:
        """Whether there is but one rank: then there is nothing to agree on."""
        return self.rank.world_size == 1

    # ---- which save meets

    def aligned(self, own: int) -> int:
        """Return the number that all ranks give the save that is this one's `own`: they may have saved more or less."""
        return own + self._ahead

    def align(self, mine: int, everybody: Iterable[int]) -> int:
        """Number saves from here on as the rank does that is the furthest; returns the number of the latest save.

        Args:
            mine: As this rank numbers the save that all of them are at, or have made last.
            everybody: The same of all ranks.
        """
        latest = max(everybody)
        self._ahead += latest - mine
        return latest

    def awaits(self, sequence: int) -> int | None:
        """Return the save whose outcome must be known before save `sequence` begins; None: it may begin.

        Numbers of saves are those of all ranks, here and below; see `aligned`.
        """
        while (self.agreement is not None or self._doubt) and not self._meets and self._looked_at < sequence:
            source = self._looked_at + 1 - self._window
            if source >= self._counts_from:
                meets = self.outcomes.get(self.run_id, source)
                if meets is None and not self.outcomes.is_lost(self.run_id, source):
                    return source
                if meets is None:
                    self._begin_doubt(sequence, f"it cannot learn any more how save {source} has ended on all ranks")
                    return None
                self._meets = meets
            self._looked_at += 1
        return None

    def _begin_doubt(self, sequence: int, why: str) -> None:
        """Refuse saves from this one on, until the outcome of one of these says that the ranks meet."""
        self._doubt, self._meets = why, False
        self._counts_from = self._looked_at = sequence

    @property
    def window(self) -> int:
        """How many saves of the run may be open at once: of a save, the one so many before it has ended."""
        return self._window

    @property
    def in_doubt(self) -> bool:
        """Whether this rank refuses saves, since it cannot know whether the others meet in them."""
        return bool(self._doubt) and not self._meets

    @property
    def must_meet(self) -> bool:
        """Whether the next save meets the other ranks, or cannot be; if `awaits` said that this is known."""
        return self.agreement is None or self._meets or self.in_doubt

    def agree(self, flat: Flattened, contribution: Contribution, *, sequence: int, path: str, step: int) -> Agreement:
        """Return the agreement; meets the other ranks if this save is one that does.

        Args:
            flat: This rank's state; tensors that other ranks hold too are hashed.
            contribution: What is in it.
            sequence, path, step: Of the save.

        Raises:
            PlanTimeoutError: Ranks have not called `save()` within `plan_timeout_s`.
            RanksDisagreeError: They save something else, or to another place.
            SaveFailedError: A rank has failed before it came, or the exchange broke down.
            WorkerUnavailableError, EndpointError: No process group, and no worker; or the workers cannot be linked.

        Blocks: in a save that meets, up to `plan_timeout_s` for the other ranks, and as long again for each to hash.
        """
        self._last = max(sequence, self._last)
        if self.agreement is not None and not self.must_meet:
            return self.agreement
        self._came_to = sequence
        save = Save(path, sequence)
        if self.in_doubt:
            text = (
                f"this rank does not know whether the ranks meet in this save: {self._doubt}; they meet in a later one"
            )
            self.refuse_save(save, text)
            raise SaveFailedError(text, code="exchange", rank=self.rank.rank, path=path, step=step)
        return self._meet_and_settle(save.series, flat, contribution, save, step)

    def pass_by(self, sequence: int, path: str) -> None:
        """This rank saves without meeting the others: those that a dead worker told to meet it must not wait."""
        self._last = max(sequence, self._last)
        if self._may_be_expected(sequence):
            self.refuse_save(
                Save(path, sequence), "it was not told that the ranks meet in this save; a later one meets"
            )

    def _may_be_expected(self, sequence: int) -> bool:
        # The saves that a worker had when it was lost, those that their outcomes name, and as many tries again.
        at_loss = self.outcomes.at_loss
        return at_loss is not None and sequence <= at_loss + 3 * self._window

    def prepare(self, contributed: Callable[[], tuple[Flattened, Contribution]]) -> None:
        """Agree on a structure before its first save: a collective, that consumes no save id.

        A failure, wherever, leaves all ranks without an agreement: their next save meets again.

        Args:
            contributed: Returns this rank's state and what is in it; where it raises, the other ranks are told.

        Raises:
            Exception: What `contributed` raises; else as `agree`.

        Blocks: up to `plan_timeout_s` for the other ranks.
        """
        try:
            flat, contribution = contributed()
        except BaseException as error:
            self.agreement = None  # as on the ranks that are told
            self.refuse_meeting(PREPARATIONS, repr(error))
            raise
        self._meet_and_settle(PREPARATIONS, flat, contribution, None, 0)

    def _meet_and_settle(
        self, series: str, flat: Flattened, contribution: Contribution, save: Save | None, step: int
    ) -> Agreement:
        path = save.path if save else ""
        names = {key[0] for key in contribution.tensors} | {claim.fqn for claim in contribution.shards}
        mine = {**self.introduction(path, step), **self._known(names), "contribution": contribution.encode()}
        meeting, has_agreed = self.meet_next(series, SAVE if save else "prepare()", save), False
        try:
            reach("ranks: meeting")
            everybody = [unpacked(data) for data in meeting.gather(msgpack.packb(mine), self._first_deadline())]
            self._waited_in_vain = False
            # IMPORTANT: before anything may fail: the next save meets where this one does not.
            self._last = self.align(self._last, (found["sequence"] for found in everybody))
            self._came_to = self._last if save else self._came_to
            reach("ranks: introduced")
            check_equal(everybody)
            if len({found["agreement"] for found in everybody}) > 1:
                self.agreement = None
            self.run_id, self.knows_run = everybody[0]["run"], True
            workers = [found["worker"] for found in everybody]
            self.links.settle(self.run_id, workers, lambda data: meeting.gather(data, self._deadline()))
            reach("ranks: linked")
            raw = {rank: found["contribution"] for rank, found in enumerate(everybody)}
            differ = {name for found in everybody for name in found["differ"]}
            self.settle(raw, flat, lambda digests: meeting.gather(digests, self._deadline()), differ)
            reach("ranks: agreed")
            has_agreed = True
            meeting.gather(b"", self._deadline())  # who has come so far has all it needs, and so have the others
        except BaseException as error:
            self.agreement = None
            self._waited_in_vain = self._waited_in_vain or isinstance(error, PlanTimeoutError)
            if has_agreed and getattr(error, "code", None) != "withdrawn":
                # IMPORTANT: the others may have got through. They hear that this rank has not by the outcome of this
                # save, and meet when that says so; to wait for them before would be in vain.
                self._window = min(found["slots"] for found in everybody)
                self._begin_doubt(self._last if save else self._last + 1, "it was cut off while they agreed")
            else:
                meeting.refuse(repr(error))
            raise
        finally:
            meeting.close()
        self._have_met(everybody, names, is_save=save is not None)
        assert self.agreement is not None
        return self.agreement

    def _known(self, names: Collection[str]) -> dict[str, Any]:
        return {
            "agreement": "" if self.agreement is None else self.agreement.fingerprint,
            "sequence": self._last,
            "slots": self._config.slots,
            "differ": list(self._differing),
            "absent": not self._new <= set(names),
        }

    def _have_met(self, everybody: Sequence[Mapping[str, Any]], names: Collection[str], *, is_save: bool) -> None:
        """Note what holds for all ranks alike after a meeting that has succeeded."""
        self._window = min(found["slots"] for found in everybody)
        self._counts_from = self._last if is_save else self._last + 1
        self._looked_at, self._doubt = self._last, ""
        left = self._new.difference(names)
        # What a rank has said to be new may be of another structure than this save's: the next save may have that.
        self._meets = any(found["absent"] for found in everybody) and self._n_in_a_row < MAX_IN_A_ROW
        self._n_in_a_row = self._n_in_a_row + 1 if self._meets else 0
        self._new = left if self._meets else frozenset()
        self._given_up = self._given_up.difference(names) | (frozenset() if self._meets else left)
        self._differing.clear()

    def _first_deadline(self) -> float:
        brief = min(self._config.plan_timeout_s, BRIEF_S)
        return time.monotonic() + brief if self._waited_in_vain else self._deadline()

    def _deadline(self) -> float:
        return time.monotonic() + self._config.plan_timeout_s

    def is_changed(self, new: Collection[str]) -> bool:
        """Return whether the ranks are to meet for names that this rank holds and that are not agreed upon."""
        wanted = frozenset(new) - self._given_up
        self._new |= wanted
        return bool(wanted)

    def differs(self, fqn: str) -> None:
        """A tensor that was taken for a replica was found to differ: it is stored per rank from the next meeting on."""
        if len(self._differing) < MAX_DIFFERING:
            self._differing[fqn] = None

    def introduction(self, path: str, step: int) -> dict[str, Any]:
        """Return what must be equal on all ranks, and this rank's run id: rank 0's is taken."""
        mine = introduced(self._config, package=self._package, path=path, step=step)
        return {**mine, "run": self.run_id, "worker": self.links.instance()}

    def settle(
        self,
        raw: Mapping[int, bytes],
        flat: Flattened,
        gather: Callable[[bytes], list[bytes]],
        differing: Collection[str] = (),
    ) -> None:
        """Make the agreement from what all ranks contribute; what several of them hold is compared first.

        Args:
            raw: Encoded contributions by rank, equal on all ranks.
            flat: This rank's state, to be hashed where that is needed.
            gather: Exchanges digests: this rank's for everybody's.
            differing: FQNs that were found to differ between ranks in a save.

        Raises:
            ProtocolError: A rank sent nonsense.
            ReplicaMismatchError: Shards that several ranks hold differ.
            RanksDisagreeError, OverlappingShardsError: What ranks say of shards cannot be true together.
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
        """From now on each rank stores its own of these tensors; shards are agreed on anew. On all ranks alike."""
        assert self.agreement is not None
        after = self.agreement.after({}, fqns)
        self.agreement = after if after.shards.names.isdisjoint(fqns) else None

    def refuse(self, sequence: int, path: str, reason: str) -> None:
        """Tell ranks that meet in a save, or may, that this one does not come.

        Args:
            sequence: Of the save.
            path: Of it; "": it has none that is any.
            reason: For the other ranks.
        """
        if self.alone or sequence <= self._came_to or sequence < self._looked_at:
            return
        self._came_to = sequence
        self._last = max(sequence, self._last)
        if self.awaits(sequence) is not None or self.must_meet or self._may_be_expected(sequence):
            self.refuse_save(Save(path, sequence), reason)

    def refuse_save(self, save: Save, reason: str) -> None:
        """Tell ranks that wait for this one in a save that it does not come."""
        if save.path:
            self.refuse_meeting(save.series, reason)
        elif not self.alone:
            try:
                self.find().say_absent(save.sequence, reason)
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
    """Warn of tensors that each rank stores its own of from now on, if there are any."""
    if differing:
        _log.warning(
            "from this save on each rank stores its own of %d tensors that were found to differ between ranks: %s",
            len(differing),
            ", ".join(sorted(differing)[:8]),
        )
