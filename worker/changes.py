"""The brain's changes: what the ranks of a run report about their states, published for all of them at once.

A trainer attaches what is new to its request, again and again until a change holds it. So nothing that is dropped here
is lost; and what is never published costs speed only, since a rank stores on its own what the others have not heard of.
What ranks report apart looks like the only holder's, so contributions are published as they come together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgpack

from asyncckpt.format.names import SaveId
from asyncckpt_worker.records import Save, Tables
from asyncckpt_worker.run_record import Run

PREFIX = "change-"
MAX_CHANGES = 256
"""Changes of one run. Chosen: a structure changes a few times in a run, if ever."""

MAX_CHANGES_NBYTES = 128 << 20
"""Of all runs together that are not over. They stay, since a rank may ask late."""

MAX_NAMES = 10_000
"""FQNs to be stored for each rank that one run may name."""

MAX_NAME_CHARS = 4096

EFFECTIVE_AFTER = 4
"""So many saves after the highest that was heard of, a change holds. A rank that takes the first of them before it has
heard of the change costs that save, so that ranks whose saves follow one another quickly need time."""

EFFECTIVE_AFTER_NAMES = 1
"""As `EFFECTIVE_AFTER`, of changes with names: what these cure costs every save, or a replica's values, until then, so
that the one that a rank may take too early is no loss. Changes before it hold as early."""

TELL_AGAIN = 4
"""With every so manieth save all ranks that have news report them; otherwise with the first save of a structure only,
which some may have missed."""

_NOT_WHOLE = re.compile(r"(@rank[0-9]+| \[[0-9:,]*\])\Z")
"""What belongs to one rank already, and shards, which never do."""


class ChangeBook:
    """Changes `Run.changes`, and what belongs to it."""

    def __init__(self, tables: Tables) -> None:
        self._t = tables

    def note(self, save: Save, names: Iterable[str]) -> None:
        """FQNs that are to be stored for each rank from the next change on, or agreed on anew, if they are of shards.

        Those of which a change told that held for this very save already are told again: the ranks have agreed since.
        """
        run = self._run_of(save)
        if run is not None:
            sequence = SaveId.parse(save.save_id).sequence
            for name in names:
                fits = len(run.names) < MAX_NAMES and len(name) <= MAX_NAME_CHARS
                if (fits or name in run.names) and not _NOT_WHOLE.search(name):
                    told = run.names.get(name)
                    run.names[name] = told if told is not None and sequence < told else None

    def publish(self, save: Save, *, complete: bool) -> None:
        """Make what is new known to all ranks of the run.

        Args:
            save: That brings it.
            complete: All of its ranks have sealed it, and agree; else their contributions are left out.
        """
        run = self._run_of(save)
        if run is None:
            return
        fresh = self._contributions(run, save) if complete else {}
        names = [name for name, told in run.names.items() if told is None]
        if not fresh and not names:
            return
        in_order = max(run.effective, run.highest + EFFECTIVE_AFTER)  # whoever hears of them late
        effective = run.highest + EFFECTIVE_AFTER_NAMES if names else in_order
        body = self._packed(run, effective, fresh, names)
        if body is None:
            return
        run.changes.append(body)
        run.effective = effective
        run.names |= dict.fromkeys(names, effective)
        self._t.announced[run.run_id] = None
        text = f"change {len(run.changes)} of run {run.run_id}: {len(fresh)} contributions, {len(names)} names"
        self._t.log("info", text, save_id=save.save_id, count="changes_published")

    def board(self, name: str) -> bytes | None:
        """Return what lies on a board of the worker's own; None when there is none of that name."""
        run_id, _, number = name.removeprefix(PREFIX).partition("-")
        run = self._t.runs.get(run_id)
        if run is None or not number.isascii() or not number.isdigit() or len(number) > 9:
            return None
        return (run.changes[int(number) - 1] or None) if 0 < int(number) <= len(run.changes) else None

    def _contributions(self, run: Run, save: Save) -> dict[int, bytes]:
        """Return what the ranks of a save contribute, unless they will say it again, better."""
        sequence = SaveId.parse(save.save_id).sequence
        requests = {rank: save.ranks[rank].request for rank in sorted(save.ranks)}
        found = {rank: r.contribution for rank, r in requests.items() if r is not None and r.contribution}
        together = len(found) == save.world_size or sequence % TELL_AGAIN == 0
        # What was sealed before the last change held is news by an older agreement. From that change on every rank has
        # new plans, so that what is news still is reported again.
        return found if together and sequence >= run.effective else {}

    def _packed(self, run: Run, effective: int, fresh: dict[int, bytes], names: list[str]) -> bytes | None:
        self._forget_those_of_dead_runs(run)
        first: dict[bytes, int] = {}
        contributions: dict[int, bytes | int] = {}
        for rank, data in fresh.items():  # equal ones once: replicated ranks have many
            contributions[rank] = data if first.setdefault(data, rank) == rank else first[data]
        kept = sum(len(change) for other in self._t.runs.values() for change in other.changes)
        size = sum(len(c) for c in contributions.values() if isinstance(c, bytes)) + sum(map(len, names))
        if len(run.changes) >= MAX_CHANGES or kept + size > MAX_CHANGES_NBYTES:
            text = f"no more changes of run {run.run_id} are published: it has {len(run.changes)}, all runs {kept} B"
            self._t.log("warning", text, count="changes_refused")
            return None
        change = bytes(msgpack.packb({"contributions": contributions, "per_rank": names}))
        return bytes(msgpack.packb({"effective": effective, "change": change}))

    def _forget_those_of_dead_runs(self, living: Run) -> None:
        """Drop what nobody can ask for any more, else it would shut out those who can. Their numbers stay taken."""
        under_way = {save_id[-12:] for save_id, save in self._t.saves.items() if save.outcome is None}
        for run in self._t.runs.values():
            if run is not living and not run.members and run.run_id not in under_way:
                run.changes = [b""] * len(run.changes)

    def _run_of(self, save: Save) -> Run | None:
        run = self._t.runs.get(SaveId.parse(save.save_id).run_id)
        return run if run is not None and not run.followed and run.world_size == save.world_size > 1 else None
