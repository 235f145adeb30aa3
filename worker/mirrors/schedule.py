"""Copies of committed checkpoints to their mirrors: which one is next, and when a copy that has failed is tried again.

Of the copies to one mirror root, one is under way at a time, the oldest save first; it is tried again until it is done.
One that fails again and again lets others pass, since the failure may concern only this checkpoint. If others fail too,
it is the mirror, and a younger copy is tried only right after the oldest one has failed: when the mirror is back, at
most the one that is under way comes before the oldest. The worker of rank 0 copies. A worker that another rank asks
only checks whether that has been done.

The state is on disk: a checkpoint whose manifest names a mirror, and which has no mirror record, is still to be copied.
So a worker that dies loses nothing: the next one that mirrors into the same directory scans it and continues.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncckpt.basics.storage_options import NO_OPTIONS
from asyncckpt.basics.urls import parent_of
from asyncckpt.format.names import SaveId
from asyncckpt.protocol.fields import COPYING, DONE, FAILED, WAITING
from asyncckpt.protocol.messages import Mirror, Mirrored
from asyncckpt_worker.core.actions import CheckMirrored, CopyToMirror, ScanUnmirrored
from asyncckpt_worker.core.events import Copied, UnmirroredFound, Wire
from asyncckpt_worker.core.model import MAX_HISTORY, Session
from asyncckpt_worker.core.status import MAX_ERROR_CHARS, MAX_PATH_CHARS, MAX_ROWS
from asyncckpt_worker.core.tables import Tables

FIRST_PAUSE_S = 1.0
LAST_PAUSE_S = 60.0
"""Pause before a copy is tried again: doubled with every try. Chosen, not measured."""

MAX_BLOCKING_TRIES = 5
"""Attempts during which newer copies to the same mirror root wait for this one. After that they proceed while it
pauses. Chosen.
"""

CHECK_EVERY_S = 1.0
"""How often a worker that does not copy checks whether the mirror record exists."""

TRIES_BEFORE_LAST_CHANCE = 2
"""How many attempts count of a copy that has failed and is tried again because another one has succeeded: newer ones
wait for the rest of `MAX_BLOCKING_TRIES`. Chosen.
"""

MAX_PROBES = 8
"""Younger copies that are tried after a failure of the oldest one. Chosen: more would fill its pauses if each takes
seconds to fail, and one of them would come before the oldest when the mirror is back.
"""

MAX_COPIES = 4096
"""Copies that wait. More are found by another scan of their roots, once half of these are done."""

MAX_SCANS = 1024
"""Directories whose scan is remembered."""

FORGET_AFTER_S = 60.0
"""How long a worker that does not copy checks for a record after it was last asked."""

MAX_REPEATED = 64
"""Failures of a run that are sent to its other workers with every whole table: a message may be lost. Chosen."""


@dataclass(slots=True)
class MirrorCopy:
    """The copy of one checkpoint.

    Attributes:
        save_id: ID of the save.
        path, mirror: Directory of the checkpoint, and where it is copied to.
        root, mirror_root: What holds the checkpoints of the run, and what holds their copies.
        since: When the checkpoint was committed, or found.
        is_ours: This worker copies. False: another one does, and this one checks whether it is done.
        step, nbytes: Step and size in the manifest; None: not known.
        phase: One of `protocol.fields.COPY_PHASES`.
        tries: How often the copy, or the check, was started.
        retry_at: Time of the next try.
        error: Why the last try has failed.
        failed_at: When the last try has failed.
        is_suspect: It has failed since another copy to the same mirror root last succeeded.
        n_outlived: How often another copy to the same mirror root has succeeded while this one's last try had failed.
        report: Figures of the try that has succeeded.
        asked_at: When a trainer last asked for it.
        storage: Options of object stores, of the session that saved it or that asks.
    """

    save_id: SaveId
    path: str
    mirror: str
    since: float
    is_ours: bool = True
    step: int | None = None
    nbytes: int | None = None
    phase: str = WAITING
    tries: int = 0
    retry_at: float = 0.0
    error: Wire | None = None
    failed_at: float = 0.0
    is_suspect: bool = False
    n_outlived: int = 0
    report: Mapping[str, Any] = field(default_factory=dict)
    asked_at: float = 0.0
    storage: Mapping[str, str] = field(default=NO_OPTIONS, repr=False)
    root: str = field(init=False)
    mirror_root: str = field(init=False)

    def __post_init__(self) -> None:
        self.root, self.mirror_root = parent_of(self.path), parent_of(self.mirror)

    @property
    def is_at_fault(self) -> bool:
        """Whether its failures concern only this checkpoint: the mirror works."""
        return self.n_outlived > 1

    def take_over(self) -> None:
        """From now on this worker copies."""
        if not self.is_ours:
            self.is_ours, self.tries = True, 0

    def is_forgotten(self, now: float) -> bool:
        """Whether this worker only checks it, and no trainer has asked for `FORGET_AFTER_S`."""
        return not self.is_ours and self.phase == WAITING and now - self.asked_at > FORGET_AFTER_S

    def pause_s(self) -> float:
        """Return how long to wait for the next try."""
        if not self.is_ours:
            return CHECK_EVERY_S
        doublings = max(0, min(self.tries - 1, 10))  # none: the check that has ended was begun before `take_over`
        return min(LAST_PAUSE_S, FIRST_PAUSE_S * 2.0**doublings)


class MirrorRegistry:
    """The copies that this worker knows of."""

    def __init__(self, tables: Tables) -> None:
        self._t = tables
        self._open: dict[SaveId, MirrorCopy] = {}
        self._ended: OrderedDict[SaveId, MirrorCopy] = OrderedDict()
        """The latest `MAX_HISTORY`, for late questions."""

        self.new_failures: list[SaveId] = []
        """Copies that have failed for good since the leader has told its followers; it empties the list."""

        self._scans: OrderedDict[str, bool] = OrderedDict()
        """Root -> whether its scan has ended; the latest `MAX_SCANS`."""

        self._left_out: dict[str, Mapping[str, str]] = {}
        """Root with checkpoints above `MAX_COPIES` -> options of its object store. It is scanned again when there is
        room."""

    @property
    def is_behind(self) -> bool:
        """Whether a copy of this worker's is not done, or it is not known yet which are not."""
        is_copying = any(copy.is_ours for copy in self._open.values())
        return is_copying or bool(self._left_out) or not all(self._scans.values())

    # ---- what there is to copy

    def committed(self, copy: MirrorCopy) -> None:
        """A save that this worker leads was committed: copy it, and scan its directory for older ones."""
        self._ended.pop(copy.save_id, None)
        known = self._open.get(copy.save_id)
        if known is None:
            self._add(copy)
        else:  # a trainer has asked for it before; it may be under way
            known.take_over()
            known.step, known.nbytes, known.storage = copy.step, copy.nbytes, copy.storage
        self._renew(copy)
        self.scan(copy.root, copy.storage)
        self._begin()

    def _renew(self, newest: MirrorCopy) -> None:
        """Give the options of the latest commit to copies to the same directory whose own may have expired.

        These are the copies that have failed, and those that no trainer asks for; a trainer that asks gives its own.
        """
        for copy in self._open.values() if newest.storage else ():
            is_left = copy.error is not None or self._t.now - copy.asked_at > FORGET_AFTER_S
            if is_left and copy.mirror_root == newest.mirror_root:
                copy.storage = newest.storage

    def ask(self, session: Session, m: Mirror) -> None:
        """Answer how far a copy is. One that is not known is added."""
        save_id, is_first = SaveId.parse(m.save_id), session.rank == 0
        copy = self._open.get(save_id) or self._ended.get(save_id)
        if copy is None:
            now = self._t.now
            copy = MirrorCopy(save_id, m.path, m.mirror, now, is_ours=is_first, asked_at=now, storage=session.storage)
            self._add(copy)
            if is_first:
                self.scan(copy.root, session.storage)
            self._begin()
        elif is_first and not copy.is_ours:
            copy.take_over()
            self._begin()
        copy.storage, copy.asked_at = session.storage or copy.storage, self._t.now
        error = dict(copy.error or {}) if copy.phase == FAILED else {}
        report = dict(copy.report) if copy.phase == DONE else {}
        self._t.send(session.peer, Mirrored(id=m.id, phase=copy.phase, error=error, report=report))

    def scan(self, root: str, storage: Mapping[str, str] = NO_OPTIONS) -> None:
        """Search a directory for checkpoints that are still to be copied, once.

        `storage`: options of object stores, also for the copies that are found.
        """
        if root in self._scans:
            return
        self._scans[root] = False
        for old in [one for one, has_ended in self._scans.items() if has_ended][: max(0, len(self._scans) - MAX_SCANS)]:
            del self._scans[old]
        self._t.actions.append(ScanUnmirrored(root=root, storage=storage))

    def found(self, event: UnmirroredFound) -> None:
        """Add the copies that earlier workers have not done."""
        self._scans[event.root] = True
        if event.error is not None:
            del self._scans[event.root]  # the next commit there tries again
            text = f"{event.root} cannot be searched for checkpoints to copy to a mirror: {event.error.get('text')}"
            self._t.log("warning", text)
        for one in event.found:
            ended = self._ended.get(one.save_id)
            if one.save_id not in self._open and (ended is None or ended.phase != DONE):
                text = f"step {one.step} in {one.path} is still to be copied to {one.mirror}"
                self._t.log("info", text, save_id=one.save_id)
                copy = MirrorCopy(one.save_id, one.path, one.mirror, self._t.now, step=one.step, nbytes=one.nbytes)
                copy.storage = event.storage
                self._add(copy)
        self._begin()

    def _add(self, copy: MirrorCopy) -> None:
        if len(self._open) < MAX_COPIES and not (copy.is_ours and copy.root in self._left_out):
            self._open[copy.save_id] = copy
        elif copy.is_ours:
            if copy.root not in self._left_out:
                text = (
                    f"{MAX_COPIES} checkpoints wait for their mirrors: {copy.path} and later ones are looked for again"
                )
                self._t.log("warning", f"{text} when half of them are copied", save_id=copy.save_id)
            self._left_out[copy.root] = copy.storage

    # ---- which one is next

    def _begin(self, failed: MirrorCopy | None = None) -> None:
        """Start the copies and checks that are due. `failed`: a copy that has just failed."""
        for copy in [one for one in self._open.values() if one.is_forgotten(self._t.now)]:
            del self._open[copy.save_id]
        if self._left_out and len(self._open) <= MAX_COPIES // 2:
            left_out, self._left_out = self._left_out, {}
            for root, storage in left_out.items():
                self._scans.pop(root, None)
                self.scan(root, storage)
        by_mirror_root: dict[str, list[MirrorCopy]] = {}
        for copy in sorted(self._open.values(), key=lambda one: one.save_id):
            if copy.is_ours:
                by_mirror_root.setdefault(copy.mirror_root, []).append(copy)
            elif copy.phase == WAITING and copy.retry_at <= self._t.now:
                self._start(copy, CheckMirrored)
        for mirror_root, copies in by_mirror_root.items():
            has_failed = failed is not None and failed.mirror_root == mirror_root
            if (due := self._next_of(copies, failed if has_failed else None)) is not None:
                self._start(due, CopyToMirror)

    def _next_of(self, copies: Sequence[MirrorCopy], failed: MirrorCopy | None) -> MirrorCopy | None:
        """Return which of the copies to one mirror root, the oldest first, is to be started now; None: none."""
        if any(copy.phase == COPYING for copy in copies):
            return None
        waiting = [copy for copy in copies if self._scans.get(copy.root, True)]  # else older ones may be found
        if failed is not None and failed.is_at_fault:  # now it is the turn of others
            waiting.sort(key=lambda copy: copy.is_at_fault)
        is_down = sum(copy.is_suspect for copy in copies) > 1
        for number, copy in enumerate(waiting):
            if copy.retry_at <= self._t.now:
                return copy
            if not copy.is_at_fault and (is_down or copy.tries < MAX_BLOCKING_TRIES):
                return self._probe(copy, waiting[number + 1 :]) if is_down and failed is not None else None
        return None

    def _probe(self, oldest: MirrorCopy, younger: Sequence[MirrorCopy]) -> MirrorCopy | None:
        """Return which copy shows whether it is the mirror that does not work, right after the oldest one has failed.

        After each failure of the oldest it is one more, up to `MAX_PROBES`, so that many copies at fault hold up others
        for minutes only.
        """
        n_tried = sum(copy.is_suspect and copy.failed_at >= oldest.failed_at for copy in younger)
        due = [copy for copy in younger if copy.retry_at <= self._t.now and not copy.is_at_fault]
        n_allowed = min(MAX_PROBES, oldest.tries - MAX_BLOCKING_TRIES + 1)
        return min(due, key=lambda copy: copy.tries) if due and n_tried < n_allowed else None

    def _start(self, copy: MirrorCopy, job: type[CopyToMirror] | type[CheckMirrored]) -> None:
        copy.phase, copy.tries = COPYING, copy.tries + 1
        self._t.actions.append(job(save_id=copy.save_id, path=copy.path, mirror=copy.mirror, storage=copy.storage))

    def tick(self) -> None:
        """Try again what has waited long enough."""
        if self._open:
            self._begin()

    def times(self) -> Iterator[float]:
        """Yield the times at which `tick` must run."""
        return (copy.retry_at for copy in self._open.values() if copy.retry_at > self._t.now)

    def copied(self, event: Copied) -> None:
        """A copy, or a check, has ended."""
        copy = self._open.get(event.save_id)
        if copy is None:
            return
        what = f"the copy of {copy.path} to {copy.mirror}"
        if event.error is None and event.is_done:
            self._end(copy, DONE, None, event.report)
            copy.nbytes = event.report.get("nbytes", copy.nbytes)
            if copy.is_ours:
                self._note_success(copy)
                self._t.log("info", f"{what} is committed", save_id=copy.save_id, count="mirrored", **event.report)
        elif event.error is not None and event.is_final:
            self._end(copy, FAILED, event.error, {})
            text = f"{what} failed: {event.error.get('text')}"
            if copy.is_ours:
                self.new_failures.append(copy.save_id)
            self._t.log("error", text, save_id=copy.save_id, count="mirrors_failed")
        else:
            copy.phase, copy.error, copy.failed_at = WAITING, event.error, self._t.now
            copy.is_suspect = copy.is_ours and event.error is not None and not copy.is_at_fault
            pause_s = copy.pause_s()
            copy.retry_at = self._t.now + pause_s
            if event.error is not None:
                text = f"{what} is tried again in {pause_s:g} s (try {copy.tries}): {event.error.get('text')}"
                self._t.log("warning", text, save_id=copy.save_id, count="mirror_retries")
        self._begin(failed=copy if copy.is_ours and event.error is not None else None)

    def _note_success(self, done: MirrorCopy) -> None:
        """The mirror works: try again at once what has failed before, but each copy only once."""
        for copy in self._open.values():
            if copy.is_suspect and copy.mirror_root == done.mirror_root:
                copy.is_suspect, copy.n_outlived = False, copy.n_outlived + 1
                if not copy.is_at_fault:
                    copy.retry_at, copy.tries = self._t.now, min(copy.tries, TRIES_BEFORE_LAST_CHANCE)

    def _end(self, copy: MirrorCopy, phase: str, error: Wire | None, report: Mapping[str, Any]) -> None:
        copy.phase, copy.error, copy.report = phase, error, report
        self._open.pop(copy.save_id, None)
        self._ended[copy.save_id] = copy
        while len(self._ended) > MAX_HISTORY:
            self._ended.popitem(last=False)

    # ---- of other nodes

    def failed_elsewhere(self, save_id: SaveId, error: Wire) -> None:
        """The leader's copy has failed for good: no mirror record will be written."""
        copy = self._open.get(save_id)
        if copy is None and save_id not in self._ended:  # a trainer will ask for it
            copy = MirrorCopy(save_id, "", "", self._t.now, is_ours=False)
        if copy is not None and not copy.is_ours:
            self._end(copy, FAILED, error, {})

    def failure_of(self, save_id: SaveId) -> Wire | None:
        """Return why this worker's copy has failed for good; None: it has not."""
        copy = self._ended.get(save_id)
        return copy.error if copy is not None and copy.is_ours and copy.phase == FAILED else None

    def failures_of(self, run_id: str) -> list[SaveId]:
        """Return the latest copies of a run that have failed for good, at most `MAX_REPEATED`."""
        return [name for name in self._ended if name.run_id == run_id and self.failure_of(name)][-MAX_REPEATED:]

    # ---- reports

    def left_behind(self) -> list[MirrorCopy]:
        """Return the copies of this worker's that are not done, the oldest first."""
        found = [copy for copy in self._open.values() if copy.is_ours]
        return sorted(found, key=lambda copy: copy.save_id)

    def rows(self, *, has_all: bool = False) -> list[dict[str, Any]]:
        """Return the rows of the status report: copies that are not done, and the latest that have failed.

        Args:
            has_all: Whether it has all copies that are not done. Those of a message are limited.
        """
        failed = [copy for copy in self._ended.values() if copy.is_ours and copy.phase == FAILED]
        n_behind = MAX_COPIES if has_all else MAX_ROWS // 2
        return [self._row(copy) for copy in [*self.left_behind()[:n_behind], *failed[-MAX_ROWS // 2 :]]]

    def _row(self, copy: MirrorCopy) -> dict[str, Any]:
        return {
            "save_id": copy.save_id,
            "step": copy.step,
            "path": copy.path[:MAX_PATH_CHARS],
            "mirror": copy.mirror[:MAX_PATH_CHARS],
            "phase": copy.phase,
            "nbytes": copy.nbytes,
            "age_s": self._t.now - copy.since,
            "tries": copy.tries,
            "error": str((copy.error or {}).get("text", ""))[:MAX_ERROR_CHARS],
        }


def with_copied(rows: Iterable[Mapping[str, Any]], copied: Mapping[SaveId, int]) -> list[dict[str, Any]]:
    """Return the rows of copies with how many bytes of each are in its mirror; None where that is not known."""
    return [{**row, "copied_nbytes": copied.get(row["save_id"])} for row in rows]
