"""What is remembered of saves that have ended, so that late questions and repeated requests find them.

A record is small: what all ranks have alike, and what the saves of a run have alike, is there once. What a rank's jobs
have reported is kept for the latest saves only: the trainers have been told.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from asyncckpt.storage.checkpoint_dir import NO_HOME
from asyncckpt_worker.core.events import Wire
from asyncckpt_worker.core.model import MAX_HISTORY, RankSave, Save

MAX_REPORTS = 8192
"""Reports of ranks that are kept, of all saves together: 16 saves of 512 ranks. Chosen, not measured."""

MAX_SHARED = 64
"""Columns that records share, so that the ranks, sessions and slots of one run are there once. Chosen, not measured."""

_COLUMNS = ("phase", "session", "slot", "generation", "link")
Column = Any
"""A value for each rank, or the one that all of them have."""

Share = Callable[[tuple[Any, ...]], tuple[Any, ...]]


class EndedSave:
    """One save that has ended, and of each rank that was heard of how its part has.

    Attributes:
        save_id, world_size, outcome, error, complete, path, step, home: As of `Save`, and of its first rank.
        directories: Of the paths that its ranks have named.
        begun_at: When its first rank began.
        ranks: The ranks that were heard of, in order.
    """

    __slots__ = (
        "_columns", "_errors", "begun_at", "complete", "directories", "error", "home", "outcome", "path",
        "ranks", "reports", "save_id", "step", "world_size",
    )  # fmt: skip

    def __init__(self, save: Save, share: Share) -> None:
        assert save.outcome is not None and not save.jobs
        first = save.ranks[min(save.ranks)]
        self.save_id, self.world_size, self.outcome = save.save_id, save.world_size, save.outcome
        self.error, self.complete = save.error, save.complete
        self.path, self.step, self.home = first.path, first.step, first.home
        self.begun_at = min(entry.begun_at for entry in save.ranks.values())
        self.directories: tuple[str, ...] = ()
        self.ranks: tuple[int, ...] = ()
        self._columns: tuple[Column, ...] = ((),) * len(_COLUMNS)
        self._errors: dict[int, Wire | None] = {}
        self.reports: dict[int, Mapping[str, Any]] = {}
        self.add(save, share)

    def add(self, save: Save, share: Share) -> None:
        """Take the ranks of a save: the first ones, or some that came after the end."""
        rows = {rank: self._row(at) for at, rank in enumerate(self.ranks)}
        for rank, entry in save.ranks.items():
            rows[rank] = tuple(getattr(entry, name) for name in _COLUMNS)
            self._errors.pop(rank, None)
            if entry.error is not self.error:
                self._errors[rank] = entry.error
            if entry.report:
                self.reports[rank] = entry.report
            if entry.home != NO_HOME:
                self.home = entry.home
        self.ranks = share(tuple(sorted(rows)))
        values = zip(*(rows[rank] for rank in self.ranks), strict=True)
        self._columns = tuple(column[0] if len(set(column)) == 1 else share(column) for column in values)
        self.directories = tuple({*self.directories, *map(os.path.dirname, save.paths)})

    def _row(self, at: int) -> tuple[Any, ...]:
        return tuple(column[at] if isinstance(column, tuple) else column for column in self._columns)

    def entry(self, rank: int) -> RankSave | None:
        """Return how a rank's part has ended, as a record of its own; None for one that was not heard of."""
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
            home=self.home,
            **of_rank,
        )

    def phases(self, limit: int) -> Iterator[tuple[int, str]]:
        """Yield rank and phase of the first ranks."""
        return ((rank, self._row(at)[0]) for at, rank in enumerate(self.ranks[:limit]))

    def has_link(self, link: str) -> bool:
        """Whether a rank had this stream."""
        links = self._columns[-1]
        return link in links if isinstance(links, tuple) else link == links

    def reopened(self, ranks: Iterable[int] = ()) -> Save:
        """Return a save that has ended, with some of its ranks: for what comes after the end."""
        save = Save(self.save_id, self.world_size, outcome=self.outcome, error=self.error)
        save.complete, save.told_end = self.complete, True
        for rank in ranks:
            if (entry := self.entry(rank)) is not None:
                save.ranks[rank] = entry
                save.paths.add(entry.path)
        return save


class History:
    """The saves that have ended, oldest first: the latest `MAX_HISTORY`."""

    def __init__(self) -> None:
        self._saves: dict[str, EndedSave] = {}
        self._calls: dict[str, list[str]] = {}
        self._reported: dict[str, None] = {}
        self._n_reports = 0
        self._shared: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def _share(self, column: tuple[Any, ...]) -> tuple[Any, ...]:
        if column not in self._shared and len(self._shared) >= MAX_SHARED:
            del self._shared[next(iter(self._shared))]
        return self._shared.setdefault(column, column)

    def add(self, save: Save) -> None:
        """Remember a save of which no job is outstanding; one that is known gets its late ranks."""
        known = self._saves.get(save.save_id)
        if known is not None:
            self._n_reports -= len(known.reports)
            known.add(save, self._share)
        else:
            known = self._saves[save.save_id] = EndedSave(save, self._share)
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
        """Return a save, or None."""
        return self._saves.get(save_id)

    def of_call(self, call: str) -> list[EndedSave]:
        """Return the saves of one `SaveId.call`."""
        return [self._saves[save_id] for save_id in self._calls.get(call, ())]

    def latest(self, limit: int) -> list[EndedSave]:
        """Return the latest ones, the last one first."""
        return [save for save, _ in zip(reversed(self._saves.values()), range(limit), strict=False)]

    def __iter__(self) -> Iterator[EndedSave]:
        """Iterate over all, oldest first."""
        return iter(self._saves.values())

    def __len__(self) -> int:
        """How many are remembered."""
        return len(self._saves)
