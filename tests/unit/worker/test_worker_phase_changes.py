"""What the worker tells of saves: the moves that the core makes, its report's rows, the lines of `events.jsonl`."""

from __future__ import annotations

import pathlib
from dataclasses import replace
from typing import Any

import pytest
from worker_bench import ERROR, FIRST, SECOND, Bench

from asyncckpt.maintenance.event_log import read_events
from asyncckpt.protocol.codec import MAX_FRAME_NBYTES, pack
from asyncckpt.protocol.messages import StatusReport
from asyncckpt_worker.config import WorkerConfig
from asyncckpt_worker.core import events as ev
from asyncckpt_worker.core.status import ALMOST, PhaseChange, with_progress
from asyncckpt_worker.service import observers
from asyncckpt_worker.service.observers import EventWriter, Observers


class Watched(Bench):
    """A bench that keeps what has change."""

    def __init__(self, **changes: Any) -> None:
        self.changes: list[PhaseChange] = []
        super().__init__()
        self.hello(**changes)

    def feed(self, kind: Any, **fields: Any) -> list[Any]:
        found = super().feed(kind, **fields)
        self.changes += self.core.phase_changes
        return found

    def commit(self, slot: int, save_id: str = FIRST, generation: int = 1) -> None:
        self.at_writing(slot, save_id, generation)
        self.now += 2
        report = {"seconds_write": 1.5, "nbytes": 7, "direct": True}
        self.feed(ev.Written, key=(save_id, 0), result="r", report=report)
        self.now += 1
        self.feed(ev.Published, save_id=save_id, report={"seconds_commit": 0.5})


@pytest.fixture
def bench() -> Watched:
    return Watched()


def phases(bench: Watched) -> list[tuple[str, str]]:
    return [(m.was, m.phase) for m in bench.changes]


def test_each_phase_rank_fields_is_told_once(bench: Watched) -> None:
    bench.commit(bench.slot())
    assert phases(bench) == [("", "open"), ("open", "writing"), ("writing", "durable"), ("durable", "committed")]
    *_, durable, committed = bench.changes
    assert (durable.was_s, durable.nbytes, durable.ends) == (2.0, 7, False)
    assert (committed.was_s, committed.begun_s, committed.ends) == (1.0, 3.0, True)
    bench.feed(ev.Tick)
    assert not bench.core.phase_changes, "an event without a phase change reports none"


def test_the_end_save_fields_is_told_once_however_many_ranks_it_has() -> None:
    bench = Watched(world_size=2)
    bench.hello(b"q", "2" * 16, rank=1, world_size=2, pid=8)
    first, second = bench.slot(), bench.slot(b"q")
    bench.at_writing(first)
    bench.at_writing(second, peer=b"q", rank=1)
    bench.feed(ev.Written, key=(FIRST, 1), error=ERROR)
    ended = [m for m in bench.changes if m.phase == "failed"]
    assert [m.ends for m in ended] == [True, False] and {m.rank for m in ended} == {0, 1}
    assert "no room" in ended[0].error


def test_a_rank_shows_its_last_save_and_its_last_durable_step(bench: Watched) -> None:
    slot = bench.slot()
    (row,) = bench.core.report()["ranks"]
    assert (row["phase"], row["step"], row["staged"], row["durable_step"], row["slots"]) == (
        "idle",
        None,
        None,
        None,
        1,
    )
    bench.commit(slot)
    bench.now += 4
    bench.begin(slot, SECOND, 2, step=6, path="/ckpt/b", nbytes=100)
    (row,) = bench.core.report()["ranks"]
    assert (row["phase"], row["step"], row["staged"], row["nbytes"]) == ("open", 6, 0.0, 100)
    assert (row["durable_step"], row["durable_age_s"], row["slots_nbytes"]) == (5, 5.0, 12288)
    (run,) = bench.core.report()["runs"]
    assert (run["committed_step"], run["committed_path"], run["committed_age_s"]) == (5, "/ckpt/a", 4.0)
    assert (run["in_flight"], run["ranks"], run["gone"]) == (1, 1, 0)


def nothing(slot: int, generation: int) -> int:
    return 0


def test_what_is_written_so_far_is_that_of_the_writer_or_all(bench: Watched) -> None:
    slot = bench.slot()
    bench.at_writing(slot)
    rows = bench.core.report()["ranks"]
    assert with_progress(rows, {}, nothing)[0]["written_nbytes"] is None
    assert with_progress(rows, {(FIRST, 0): 5}, nothing)[0]["written_nbytes"] == 5
    bench.feed(ev.Written, key=(FIRST, 0), result="r")
    assert with_progress(bench.core.report()["ranks"], {}, nothing)[0]["written_nbytes"] == 1


def test_what_is_staged_so_far_is_what_the_slot_says_until_its_seal_was_seen(bench: Watched) -> None:
    slot = bench.slot()
    bench.begin(slot, generation=3, nbytes=100)
    told = {(slot, 3): 25}
    (row,) = with_progress(bench.core.report()["ranks"], {}, lambda number, g: told.get((number, g), 0))
    assert row["staged"] == 0.25 and not {"slot", "generation"} & set(row)
    told[slot, 3] = 100
    (row,) = with_progress(bench.core.report()["ranks"], {}, lambda number, g: told.get((number, g), 0))
    assert row["staged"] == ALMOST < 1
    (remote,) = bench.core.report()["ranks"]
    assert with_progress([{**remote, "slot": None}], {}, nothing)[0]["staged"] is None, "on another node"


def test_a_report_of_many_ranks_fits_into_a_frame() -> None:
    bench = Bench()
    for rank in range(150):
        bench.hello(b"%d" % rank, f"{rank:016x}", rank=rank, world_size=150, pid=rank + 1)
        slot = bench.slot(b"%d" % rank)
        bench.begin(slot, peer=b"%d" % rank, path="/" + "x" * 900)
    report = bench.core.report()
    assert len(report["ranks"]) == 100 and [row["rank"] for row in report["ranks"]] == list(range(100))
    assert len(pack(StatusReport(id=1, report=report), MAX_FRAME_NBYTES)) < MAX_FRAME_NBYTES


def test_a_follower_leaves_the_lines_to_its_leader(bench: Watched, tmp_path: pathlib.Path) -> None:
    bench.commit(bench.slot())
    event_writer = EventWriter(())
    event_writer.write([_at(m, tmp_path, followed=True) for m in bench.changes])
    event_writer.log.close(60.0)
    assert not list(tmp_path.iterdir())


def test_nothing_is_told_outside_the_roots(bench: Watched, tmp_path: pathlib.Path) -> None:
    bench.commit(bench.slot())
    event_writer = EventWriter((str(tmp_path / "elsewhere"),))
    event_writer.write([_at(m, tmp_path) for m in bench.changes])
    event_writer.log.close(60.0)
    assert not list(tmp_path.iterdir()) and event_writer.log.dropped == 4


def _at(change: PhaseChange, root: pathlib.Path, **changes: Any) -> PhaseChange:
    return replace(change, path=str(root / "a"), **changes)


def test_a_line_that_cannot_be_written_costs_none_of_the_others(
    bench: Watched, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.commit(bench.slot())
    bugs: list[str] = []
    watching = Observers(WorkerConfig(endpoint="ipc:///tmp/x.sock", events=True), {}, bugs.append)
    real = observers._rank_fields

    def fails(change: PhaseChange) -> dict[str, object]:
        if change.phase == "durable":
            raise ValueError("simulated")
        return real(change)

    monkeypatch.setattr(observers, "_rank_fields", fails)
    watching.handle_phase_changes([_at(m, tmp_path) for m in bench.changes])
    watching.close("test")
    assert [event["event"] for event in read_events(str(tmp_path))] == ["begun", "sealed", "committed"]
    assert bugs == ["internal_errors"]
