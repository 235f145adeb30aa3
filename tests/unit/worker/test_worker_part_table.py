"""The table of a rank's part in a save: each cell is reached, and one that is missing ends its save only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from worker_bench import ERROR, FIRST, REQUEST, SECOND, Bench

from asyncckpt.protocol.save_phases import COMMITTED, DURABLE, ENDED, FAILED, OPEN, PHASES, RECOVERING, SEALED, WRITING
from asyncckpt_worker.core import actions as ac
from asyncckpt_worker.core import events as ev
from asyncckpt_worker.core import saves as saves_module
from asyncckpt_worker.core.model import ENDS, NEW, TABLE, Save

IN_FLIGHT = {SEALED, WRITING, DURABLE}


def reachable(start: str) -> set[str]:
    """Return the phases that a part in `start` can come to."""
    found, level = {start}, {start}
    while level:
        level = {after for phase in level for after, _ in TABLE.get(phase, {}).values()} - found
        found |= level
    return found


def test_every_phase_can_be_reached_and_left_but_the_ends() -> None:
    assert reachable(NEW) == PHASES | {NEW}
    assert not ENDED & TABLE.keys()
    for phase in PHASES - ENDED:
        assert {COMMITTED, FAILED} <= reachable(phase)


@pytest.mark.parametrize("phase", sorted(PHASES - ENDED))
@pytest.mark.parametrize("outcome", sorted(ENDS))
def test_a_save_can_end_in_every_way_while_a_part_is_in_any_phase(phase: str, outcome: str) -> None:
    after, steps = TABLE[phase][ENDS[outcome]]
    assert after in ENDED and not steps
    if phase in IN_FLIGHT | {RECOVERING}:
        assert (after == COMMITTED) == (outcome == COMMITTED), "sealed: as the save, and never as if it were not"
    else:
        assert after != COMMITTED, "what was not sealed was not committed"


def test_only_what_was_looked_for_leads_from_recovering_to_what_goes_on() -> None:
    on = {event for event, (after, _) in TABLE[RECOVERING].items() if after in (OPEN, SEALED, WRITING, DURABLE)}
    assert on == {"resume_open", "resume_sealed"}


# ---- every cell is reached


class Table:
    """Looks cells up, and notes which."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, str]] = set()

    def __getitem__(self, phase: str) -> Row:
        return Row(phase, self)


class Row:
    """One phase of a `Table`."""

    def __init__(self, phase: str, table: Table) -> None:
        self.phase, self.table = phase, table

    def get(self, event: str) -> Any:
        """Return a cell."""
        self.table.seen.add((self.phase, event))
        return TABLE[self.phase].get(event)


def at(phase: str) -> Bench:
    """Return a core with a save of two ranks, of which the first is in `phase`."""
    bench = Bench()
    for rank in range(2):
        bench.hello(str(rank).encode(), f"{rank + 1:016x}", rank, 2)
    if phase == RECOVERING:
        bench.adopted(b"0", generation=1, ended=0)
        bench.begin(1, peer=b"0")
        return bench
    slot = bench.slot(b"0")
    bench.begin(slot, peer=b"0")
    if phase in (WRITING, DURABLE):
        bench.feed(ev.Prepared, key=(FIRST, 0))
    if phase != OPEN:
        bench.submit(slot, peer=b"0")
        bench.read(slot, world_size=2)
    if phase == DURABLE:
        bench.feed(ev.Written, key=(FIRST, 0), result="files")
    return bench


def the_save(bench: Bench) -> Save:
    """Return the save that is open."""
    return bench.core.tables.saves[FIRST]


def streams(bench: Bench) -> None:
    """Let the first rank's slot be written while it is filled."""
    bench.submit(1, peer=b"0")
    bench.feed(ev.SlotRead, slot=1, generation=1, request=replace(REQUEST, world_size=2), streamed=True, opened=True)


def test_every_cell_is_reached_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table()
    monkeypatch.setattr(saves_module, "TABLE", table)
    for phase in PHASES - ENDED:
        assert at(phase).phase() == phase
        for outcome in ENDS:
            bench = at(phase)
            if outcome == COMMITTED:
                bench.core._saves.found_committed(the_save(bench), {})
            else:
                bench.core._saves.end_here(the_save(bench), outcome, ERROR)
            assert bench.phase() == TABLE[phase][ENDS[outcome]][0]
    bench = at(OPEN)  # once it is known that a dead worker has committed it
    bench.core._saves.advance(the_save(bench), the_save(bench).ranks[0], "recover")
    assert bench.phase() == "recovering"
    for sealed in (False, True):
        bench = at(RECOVERING)
        if sealed:
            bench.read(1, world_size=2)
            assert bench.phase() == "recovering", "it may have been committed"
        bench.feed(ev.Prepared, key=(FIRST, 0))
        assert bench.phase() == ("writing" if sealed else "open")
    bench = at(OPEN)
    bench.slot(b"1")
    bench.submit(2, peer=b"1")
    bench.read(2, rank=1, world_size=2)  # the first that is heard of it
    assert bench.phase(rank=1) == "sealed"
    bench = at(OPEN)
    bench.feed(ev.Prepared, key=(FIRST, 0))
    streams(bench)
    bench.feed(ev.Written, key=(FIRST, 0), result="files")
    assert bench.phase() == "open"
    bench = at(OPEN)
    bench.feed(ev.Prepared, key=(FIRST, 0))
    streams(bench)
    the_save(bench).pending_failure = ("failed", ERROR)
    bench.submit(1, peer=b"0")
    bench.read(1, world_size=2)
    bench.feed(ev.Written, key=(FIRST, 0), result="files")
    assert bench.phase() == "sealed", "it is being ended"
    bench = at(OPEN)
    bench.slot(b"1")
    bench.core._saves.end(the_save(bench), FAILED, ERROR)
    bench.begin(2, peer=b"1")
    assert bench.phase(rank=1) == "failed"
    bench = at(RECOVERING)
    bench.feed(ev.Prepared, key=(FIRST, 0), error=ERROR)
    bench.adopted(b"1", generation=1, ended=0)
    bench.read(2, rank=1, world_size=2)
    assert bench.phase(rank=1) == "unknown", "nobody knows whether the worker before has committed it"
    bench = at(RECOVERING)
    bench.adopted(b"1", generation=1, ended=0)
    bench.core._saves.found_committed(the_save(bench), {})
    bench.read(2, rank=1, world_size=2)
    assert bench.phase(rank=1) == "committed", "by the worker before"
    assert table.seen == {(phase, event) for phase, row in TABLE.items() for event in row}


# ---- a cell that is missing


@pytest.mark.parametrize("event", ["seal", "prepared", "written"])
def test_a_cell_that_is_missing_ends_its_save_and_no_other(event: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.hello()
    first, second = bench.slot(), bench.slot()
    bench.begin(second, SECOND, path="/ckpt/b")
    without = {phase: {e: cell for e, cell in row.items() if e != event} for phase, row in TABLE.items()}
    monkeypatch.setattr(saves_module, "TABLE", {**without, NEW: TABLE[NEW], OPEN: {**without[OPEN]}})
    bench.begin(first)
    faults = []
    for step in (
        lambda: bench.feed(ev.Prepared, key=(FIRST, 0)),
        lambda: bench.submit(first),
        lambda: bench.read(first),
        lambda: bench.feed(ev.Written, key=(FIRST, 0), result="files"),
    ):
        step()
        faults += bench.of(ac.LogFault)
    assert {fault.save_id for fault in faults} == {FIRST} and event in str(faults[0].error)
    for fault in faults:  # as the daemon answers them
        bench.feed(ev.InternalFault, save_id=fault.save_id, reason=repr(fault.error))
    bench.feed(ev.InternalFault, save_id="000009-00000000-aaaaaaaaaaaa", reason="of nobody")
    assert bench.row()["phase"] == "failed" and bench.row()["error"]["fields"]["code"] == "internal"
    assert bench.phase(SECOND) == "open"
