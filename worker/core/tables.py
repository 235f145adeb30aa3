"""The state of the core: open saves, slots, sessions and runs; and compact records of ended saves.

Records of ended saves answer late and repeated requests. Values that all ranks of a save, or all saves of a run, share
are stored once. Reports of jobs are kept for the latest saves only: the trainers have received them.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncckpt.errors import AsyncCkptError, to_wire
from asyncckpt.format.names import SaveId
from asyncckpt.protocol.messages import Message, Refused
from asyncckpt.protocol.request import SaveRequest
from asyncckpt.storage.checkpoint_dir import NO_IDENTITY
from asyncckpt_worker.core.actions import Action, Log, LogFault, Send
from asyncckpt_worker.core.events import Peer, SaveKey, Wire
from asyncckpt_worker.core.model import MAX_HISTORY, RankSave, Run, Save, Session, Slot

MAX_REPORTS = 8192
"""Maximum number of ranks' reports of all ended saves: 16 saves of 512 ranks. Chosen, not measured."""

MAX_INTERNED = 64
"""Maximum number of columns that records share: ranks, sessions and slots of a run. Chosen, not measured."""

_COLUMNS = ("phase", "session", "slot", "generation", "follower")
Column = Any
"""A tuple with one value for each rank, or the value of all ranks."""

Intern = Callable[[tuple[Any, ...]], tuple[Any, ...]]
"""Returns the equal tuple that other records have already, or the tuple itself."""


class EndedSave:
    """Record of a save that has ended, and of its ranks' parts.

    Attributes:
        save_id, world_size, outcome, error, complete: As in `Save`.
        path, step, directory_identity: As in `RankSave`, of its first rank.
        directories: Parent directories of the paths that its ranks have named.
        begun_at: When its first rank began.
        ranks: Its ranks that have a part, in order.
    """

    __slots__ = (
        "_columns", "_errors", "begun_at", "complete", "directories", "directory_identity", "error", "outcome", "path",
        "ranks", "reports", "save_id", "step", "world_size",
    )  # fmt: skip

    def __init__(self, save: Save, intern: Intern) -> None:
        assert save.outcome is not None and not save.jobs
        first = save.ranks[min(save.ranks)]
        self.save_id, self.world_size, self.outcome = save.save_id, save.world_size, save.outcome
        self.error, self.complete = save.error, save.complete
        self.path, self.step, self.directory_identity = first.path, first.step, first.directory_identity
        self.begun_at = min(part.begun_at for part in save.ranks.values())
        self.directories: tuple[str, ...] = ()
        self.ranks: tuple[int, ...] = ()
        self._columns: tuple[Column, ...] = ((),) * len(_COLUMNS)
        self._errors: dict[int, Wire | None] = {}
        self.reports: dict[int, Mapping[str, Any]] = {}
        self.add(save, intern)

    def add(self, save: Save, intern: Intern) -> None:
        """Add the ranks of a save; called again for ranks that came after the end."""
        rows = {rank: self._row(at) for at, rank in enumerate(self.ranks)}
        for rank, part in save.ranks.items():
            rows[rank] = tuple(getattr(part, name) for name in _COLUMNS)
            self._errors.pop(rank, None)
            if part.error is not self.error:
                self._errors[rank] = part.error
            if part.report:
                self.reports[rank] = part.report
            if part.directory_identity != NO_IDENTITY:
                self.directory_identity = part.directory_identity
        self.ranks = intern(tuple(sorted(rows)))
        values = zip(*(rows[rank] for rank in self.ranks), strict=True)
        self._columns = tuple(column[0] if len(set(column)) == 1 else intern(column) for column in values)
        self.directories = tuple({*self.directories, *map(os.path.dirname, save.paths)})

    def _row(self, at: int) -> tuple[Any, ...]:
        return tuple(column[at] if isinstance(column, tuple) else column for column in self._columns)

    def part(self, rank: int) -> RankSave | None:
        """Return a new `RankSave` with the end of a rank's part; None if the rank has no part."""
        at = bisect_left(self.ranks, rank)
        if at == len(self.ranks) or self.ranks[at] != rank:
            return None
        of_rank = dict(zip(_COLUMNS, self._row(at), strict=True))
        return RankSave(
            rank=rank,
            path=self.path,
            step=self.step,
            nbytes=0,
            umask=0o077,
            overwrite=False,
            begun_at=self.begun_at,
            commit_timeout_s=float("inf"),
            seen=of_rank["phase"],
            error=self._errors.get(rank, self.error),
            report=dict(self.reports.get(rank, {})),
            directory_identity=self.directory_identity,
            **of_rank,
        )

    def phases(self, limit: int) -> Iterator[tuple[int, str]]:
        """Yield rank and phase of the first `limit` ranks."""
        return ((rank, self._row(at)[0]) for at, rank in enumerate(self.ranks[:limit]))

    def reopened(self, ranks: Iterable[int] = ()) -> Save:
        """Return the ended save as a `Save` with some of its ranks, to handle events after the end."""
        save = Save(self.save_id, self.world_size, outcome=self.outcome, error=self.error)
        save.complete, save.end_reported = self.complete, True
        for rank in ranks:
            if (part := self.part(rank)) is not None:
                save.ranks[rank] = part
                save.paths.add(part.path)
        return save


class History:
    """The latest `MAX_HISTORY` ended saves, oldest first."""

    def __init__(self) -> None:
        self._saves: dict[str, EndedSave] = {}
        self._calls: dict[str, list[str]] = {}
        self._reported: dict[str, None] = {}
        self._n_reports = 0
        self._internd: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def _intern(self, column: tuple[Any, ...]) -> tuple[Any, ...]:
        if column not in self._internd and len(self._internd) >= MAX_INTERNED:
            del self._internd[next(iter(self._internd))]
        return self._internd.setdefault(column, column)

    def add(self, save: Save) -> None:
        """Add an ended save without outstanding jobs; if it is known, add its late ranks."""
        known = self._saves.get(save.save_id)
        if known is not None:
            self._n_reports -= len(known.reports)
            known.add(save, self._intern)
        else:
            known = self._saves[save.save_id] = EndedSave(save, self._intern)
            self._calls.setdefault(save.save_id.call, []).append(save.save_id)
        self._n_reports += len(known.reports)
        self._reported[save.save_id] = None
        while len(self._saves) > MAX_HISTORY:
            self._forget(next(iter(self._saves)))
        while self._n_reports > MAX_REPORTS and len(self._reported) > 1:
            self._forget_reports(next(iter(self._reported)))

    def _forget_reports(self, save_id: str) -> None:
        if save_id in self._reported:
            del self._reported[save_id]
            self._n_reports -= len(self._saves[save_id].reports)
            self._saves[save_id].reports = {}

    def _forget(self, save_id: str) -> None:
        self._forget_reports(save_id)
        call = self._saves.pop(save_id).save_id.call
        self._calls[call].remove(save_id)
        if not self._calls[call]:
            del self._calls[call]

    def get(self, save_id: str) -> EndedSave | None:
        """Return the record of a save, or None."""
        return self._saves.get(save_id)

    def of_call(self, call: str) -> list[EndedSave]:
        """Return the saves with this `SaveId.call`."""
        return [self._saves[save_id] for save_id in self._calls.get(call, ())]

    def latest(self, limit: int) -> list[EndedSave]:
        """Return the latest `limit` saves, newest first."""
        return [save for save, _ in zip(reversed(self._saves.values()), range(limit), strict=False)]

    def __iter__(self) -> Iterator[EndedSave]:
        """Iterate over all saves, oldest first."""
        return iter(self._saves.values())

    def __len__(self) -> int:
        """Return the number of saves."""
        return len(self._saves)


@dataclass(slots=True)
class Tables:
    """The state of the core, and the actions of the current event."""

    now: float = 0.0
    draining: bool = False
    begins_until: float = float("inf")
    """Until when known sessions may begin saves during a drain: a trainer may be copying before its Begin arrives."""

    actions: list[Action] = field(default_factory=list)
    sessions: dict[str, Session] = field(default_factory=dict)
    peers: dict[Peer, str] = field(default_factory=dict)
    slots: dict[int, Slot] = field(default_factory=dict)
    closing: dict[int, Slot] = field(default_factory=dict)
    """Slots that are closing or kept."""

    postponed: dict[int, Slot] = field(default_factory=dict)
    """Slots that did not fit into memory; created when other slots have been freed."""

    adopted_committed: dict[int, tuple[Slot, SaveRequest]] = field(default_factory=dict)
    """Adopted slots that hold snapshots of committed saves, with their requests, until the saves are recorded."""

    review_closing_slots: bool = False
    """Since the last review, something has happened that may allow closing or kept slots to be freed or abandoned."""

    n_reading: int = 0
    """Number of slots that are being read, or opened to be read."""

    freeing: set[int] = field(default_factory=set)
    """Slots whose FreeSlot job is outstanding."""

    saves: dict[str, Save] = field(default_factory=dict)
    """Saves that are open or have a job outstanding. At the end of an event the others move to `ended`."""

    ended: History = field(default_factory=History)
    changed: dict[SaveKey, None] = field(default_factory=dict)
    """Parts that became durable or ended in this event, in order; their trainers are notified."""

    runs: dict[str, Run] = field(default_factory=dict)
    announced: dict[str, None] = field(default_factory=dict)
    """Runs with a new outcome or a new leader in this event; all members are notified."""

    goodbye_slots: dict[str, set[int]] = field(default_factory=dict)
    """Session that has sent Goodbye -> its slots; its process is watched until all of these are freed."""

    lineage_scans: int = 0
    next_slot: int = 1
    instance: str = ""
    touched: dict[SaveKey, None] = field(default_factory=dict)
    """Parts that are new, or whose phase or progress has changed, in this event."""

    to_report: set[str] = field(default_factory=set)
    """Followed runs with something new to report to the leader in this event, besides `touched`."""

    failures: dict[str, int] = field(default_factory=dict)
    """Kind of error (`failures.kind_of`) -> number of saves that have ended with it."""

    last_message_at: dict[str, float] = field(default_factory=dict)
    """Follower in a run (`RankSave.follower`) -> when its last message arrived."""

    def log(
        self, level: str, text: str, *, save_id: str | None = None, session: str | None = None, **rest: Any
    ) -> None:
        """Add a Log action, which names step and path of its save. `rest`: its `facts`, and its `count`."""
        count = rest.pop("count", None)
        if save_id is not None:
            text = f"{self._name_of(save_id)}: {text}"
        self.actions.append(Log(level=level, text=text, save_id=save_id, session=session, count=count, facts=rest))

    def _name_of(self, save_id: str) -> str:
        save = self.find(save_id)
        if isinstance(save, Save) and save.ranks:
            first = save.ranks[min(save.ranks)]
            path, steps = first.path, [part.step for part in save.ranks.values() if part.step is not None]
            step = steps[0] if steps else None
        elif isinstance(save, EndedSave):
            path, step = save.path, save.step
        else:
            return f"save {save_id}"
        return f"save of step {step} to {path}" if step is not None else f"save {save_id} to {path}"

    def send(self, peer: Peer, message: Message) -> None:
        """Send a message to a trainer."""
        self.actions.append(Send(peer=peer, message=message))

    def refuse(self, peer: Peer, id: int, error: AsyncCkptError) -> None:
        """Answer request `id` with an error."""
        self.log("debug", f"refused: {error}", session=self.peers.get(peer), count="requests_refused")
        self.send(peer, Refused(id=id, error=to_wire(error)))

    def run_guarded(self, save_id: str, call: Callable[..., object], *args: object) -> None:
        """Call a function; an exception in it, a bug, becomes a `fault`.

        IMPORTANT: the bug ends save `save_id` ("": none), and stops neither the rest of the event nor the worker.
        """
        try:
            call(*args)
        except Exception as error:
            self.fault(save_id, error)

    def fault(self, save_id: str, error: Exception) -> None:
        """Add a LogFault action: a bug, which ends save `save_id` ("": none)."""
        self.actions.append(LogFault(save_id=save_id, error=error))

    def part(self, key: SaveKey | None) -> RankSave | None:
        """Return a rank's part in a save, open or ended, or None."""
        if key is None:
            return None
        save = self.saves.get(key[0])
        if save is not None and (found := save.ranks.get(key[1])) is not None:
            return found
        ended = self.ended.get(key[0])
        return ended.part(key[1]) if ended is not None else None

    def find(self, save_id: str) -> Save | EndedSave | None:
        """Return a save, open or ended, or None."""
        return self.saves.get(save_id) or self.ended.get(save_id)

    def find_or_reopen(self, save_id: str, *ranks: int) -> Save | None:
        """Return a save, reopened with `ranks` of it if it has ended; None if it is unknown."""
        save, ended = self.saves.get(save_id), self.ended.get(save_id)
        if ended is not None:
            late = ended.reopened(ranks)
            if save is None:
                save = self.saves[save_id] = late
            for part in late.ranks.values():
                if part.rank not in save.ranks:
                    save.add(part)
        return save

    def of_call(self, call: str) -> list[Save | EndedSave]:
        """Return the saves of one sequence and run (`SaveId.call`); several if their epochs differ."""
        found: dict[str, Save | EndedSave] = {save.save_id: save for save in self.ended.of_call(call)}
        found |= {save.save_id: save for save in self.saves.values() if save.save_id.call == call}
        return list(found.values())

    def open_saves(self, run_id: str | None = None) -> list[Save]:
        """Return the open saves of one run, or of all runs."""
        found = self.saves.values()
        return [s for s in found if s.outcome is None and run_id in (None, s.save_id.run_id)]

    def parts(self) -> Iterable[tuple[Save, RankSave]]:
        """Yield every part in `saves`, with its save."""
        return ((save, part) for save in self.saves.values() for part in save.ranks.values())

    def is_followed(self, save_id: SaveId) -> bool:
        """Whether another worker leads the run of this save."""
        run = self.runs.get(save_id.run_id)
        return run is not None and run.followed

    @property
    def jobs(self) -> int:
        """Number of outstanding jobs."""
        jobs = self.lineage_scans + len(self.freeing) + self.n_reading
        return jobs + sum(save.jobs for save in self.saves.values())

    def archive(self, save: Save) -> None:
        """Move an ended save without outstanding jobs to `ended`, at the end of an event."""
        del self.saves[save.save_id]  # IMPORTANT: first. A save of which no record can be made is forgotten.
        try:
            self.ended.add(save)
        finally:
            save.ranks, save.declarations = {}, {}
