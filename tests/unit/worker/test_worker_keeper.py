"""`--while-pid`: the core does not leave for idleness while the process lives."""

from __future__ import annotations

from dataclasses import replace

from worker_bench import CONFIG, FakeResources

from asyncckpt_worker.core import actions as ac
from asyncckpt_worker.core import events as ev
from asyncckpt_worker.core.machine import Core


def test_a_kept_brain_never_leaves_for_idleness_and_the_idle_time_begins_with_the_keepers_death() -> None:
    core = Core(replace(CONFIG, idle_exit_s=10.0), 0.0, FakeResources())
    for now in (0.0, 5.0, 100.0, 1000.0):
        assert core.handle(ev.Tick(now=now, kept=True)) == []
    assert core.wakes_at is None
    assert core.handle(ev.Tick(now=1001.0)) == []
    assert core.wakes_at == 1011.0
    assert core.handle(ev.Tick(now=1010.9)) == []
    assert core.handle(ev.Tick(now=1011.0)) == [ac.Exit(complete=True, reason="idle")]


def test_a_kept_brain_drains_when_it_is_asked_to() -> None:
    core = Core(CONFIG, 0.0, FakeResources())
    core.handle(ev.Tick(now=0.0, kept=True))
    assert ac.Exit(complete=True, reason="drained") in core.handle(ev.StopRequested(now=1.0))
