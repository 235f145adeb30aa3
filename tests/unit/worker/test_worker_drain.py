"""The worker's core and its own end: drained, stopped at once, or idle."""

from __future__ import annotations

from dataclasses import replace

import pytest
from worker_bench import CONFIG, FIRST, REQUEST, SECOND, Bench, code

from asyncckpt.protocol import messages as m
from asyncckpt_worker.core import actions as ac
from asyncckpt_worker.core import events as ev


@pytest.fixture
def bench() -> Bench:
    """A core with one session, that keeps nothing for trainers that are gone."""
    bench = Bench(replace(CONFIG, keep_snapshots_s=0.0))
    bench.hello()
    return bench


def test_drain_finishes_what_is_in_flight(bench: Bench) -> None:
    bench.at_writing(bench.slot())
    bench.feed(ev.StopRequested)
    bench.feed(ev.SlotRead, slot=1, generation=1, request=REQUEST)
    bench.feed(ev.Written, key=(FIRST, 0), result="r")
    assert not bench.of(ac.Exit)
    bench.feed(ev.Published, save_id=FIRST)
    assert bench.of(ac.ReadSlot) and not bench.of(ac.Exit), "one more look"
    bench.feed(ev.SlotRead, slot=1, generation=1, request=REQUEST)
    assert bench.of(ac.Exit) == [ac.Exit(complete=True, reason="drained")]


def test_drain_looks_once_more_before_the_exit(bench: Bench) -> None:
    slot = bench.slot()
    bench.feed(ev.StopRequested)
    bench.feed(ev.SlotRead, slot=slot, reason="EMPTY")
    assert bench.of(ac.ReadSlot) and not bench.of(ac.Exit)
    bench.read(slot)
    assert bench.phase() == "sealed" and not bench.of(ac.Exit)


def test_drain_lets_a_known_session_begin_within_the_grace(bench: Bench) -> None:
    slot = bench.slot()
    bench.feed(ev.StopRequested)
    bench.feed(ev.SlotRead, slot=slot, reason="OPEN", opened=True)
    bench.now = 9.0
    bench.feed(ev.Tick)
    assert not bench.of(ac.Exit) and not bench.of(ac.ReadSlot), "a trainer is copying, its Begin is under way"
    assert isinstance(bench.begin(slot), m.Ok)
    bench.now = 18.0
    bench.feed(ev.Prepared, key=(FIRST, 0))
    assert not bench.of(ac.Exit) and bench.core.wakes_at == 19.0
    bench.submit(slot)
    bench.read(slot)
    assert bench.phase() == "writing" and not bench.of(ac.Exit)


@pytest.mark.parametrize("begun", [True, False])
def test_drain_waits_a_little_for_what_is_being_staged(bench: Bench, begun: bool) -> None:
    slot = bench.slot()
    if begun:
        bench.begin(slot)
        bench.feed(ev.Prepared, key=(FIRST, 0))
    bench.feed(ev.StopRequested)
    bench.feed(ev.SlotRead, slot=slot, reason="OPEN", opened=True)
    assert not bench.of(ac.Exit) and bench.core.wakes_at == CONFIG.staging_grace_s
    bench.now = CONFIG.staging_grace_s
    bench.feed(ev.Tick)
    bench.feed(ev.SlotRead, slot=slot, reason="OPEN", opened=True)
    assert bench.of(ac.Exit) == [ac.Exit(complete=True, reason="drained")]


def test_drain_gives_up_after_its_timeout_and_says_so(bench: Bench) -> None:
    bench.at_writing(bench.slot())
    bench.feed(ev.StopRequested)
    bench.feed(ev.SlotRead, slot=1, reason="")
    bench.now = CONFIG.drain_timeout_s
    bench.feed(ev.Tick)
    assert bench.of(ac.Exit) == [ac.Exit(complete=False, reason="drain timeout")]


@pytest.mark.parametrize("saving", [True, False])
def test_second_stop_exits_at_once_and_is_an_error_only_while_something_is_saved(bench: Bench, saving: bool) -> None:
    if saving:
        bench.at_writing(bench.slot())
    else:
        bench.slot()
    bench.feed(ev.StopRequested)
    bench.feed(ev.StopRequested, immediately=True)
    assert bench.of(ac.Exit) == [ac.Exit(complete=not saving, reason="stopped at once")]


def test_draining_worker_refuses_sessions_slots_and_saves(bench: Bench) -> None:
    first, second = bench.slot(), bench.slot()
    bench.at_writing(first)
    bench.feed(ev.StopRequested)
    assert code(bench.hello(b"q", "2" * 16)) == "worker_unavailable"
    assert code(bench.say(m.Allocate, nbytes=12288, populate=False)) == "worker_unavailable"
    bench.now = CONFIG.staging_grace_s
    assert code(bench.begin(second, SECOND)) == "worker_unavailable"


def test_idle_worker_exits_and_a_session_keeps_it() -> None:
    bench = Bench()
    bench.now = 599.0
    bench.feed(ev.Tick)
    assert not bench.of(ac.Exit) and bench.core.wakes_at == 600.0
    bench.hello()
    bench.now = 5000.0
    bench.feed(ev.Tick)
    assert not bench.of(ac.Exit) and bench.core.wakes_at is None
    bench.say(m.Goodbye)
    bench.now = 5600.0
    bench.feed(ev.Tick)
    assert bench.of(ac.Exit) == [ac.Exit(complete=True, reason="idle")]


@pytest.mark.parametrize("idle_exit_s", [0.0, 10.0])
def test_worker_that_is_kept_by_a_process_or_set_so_never_leaves_for_idleness(idle_exit_s: float) -> None:
    bench = Bench(replace(CONFIG, idle_exit_s=idle_exit_s))
    for bench.now in (5.0, 1000.0):
        assert bench.feed(ev.Tick, has_owner=idle_exit_s > 0) == [] and bench.core.wakes_at is None
    bench.now = 1001.0
    bench.feed(ev.Tick)
    assert bench.core.wakes_at == (1011.0 if idle_exit_s else None), "the idle time begins with the keeper's death"
    bench.now = 1011.0
    assert bench.feed(ev.Tick) == ([ac.Exit(complete=True, reason="idle")] if idle_exit_s else [])
