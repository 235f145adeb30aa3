"""`--while-pid`: the brain does not leave for idleness while the process lives; and how its death is learnt."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace

import pytest
from worker_bench import CONFIG, FakeResources

from asyncckpt_worker.core import actions as ac
from asyncckpt_worker.core import events as ev
from asyncckpt_worker.core.machine import Brain
from asyncckpt_worker.service.process_watch import Keeper, Liveness


def test_a_kept_brain_never_leaves_for_idleness_and_the_idle_time_begins_with_the_keepers_death() -> None:
    brain = Brain(replace(CONFIG, idle_exit_s=10.0), 0.0, FakeResources())
    for now in (0.0, 5.0, 100.0, 1000.0):
        assert brain.handle(ev.Tick(now=now, kept=True)) == []
    assert brain.wakes_at is None
    assert brain.handle(ev.Tick(now=1001.0)) == []
    assert brain.wakes_at == 1011.0
    assert brain.handle(ev.Tick(now=1010.9)) == []
    assert brain.handle(ev.Tick(now=1011.0)) == [ac.Exit(complete=True, reason="idle")]


def test_a_kept_brain_drains_when_it_is_asked_to() -> None:
    brain = Brain(CONFIG, 0.0, FakeResources())
    brain.handle(ev.Tick(now=0.0, kept=True))
    assert ac.Exit(complete=True, reason="drained") in brain.handle(ev.StopRequested(now=1.0))


@pytest.mark.parametrize("use_pidfd", [True, False])
def test_a_keepers_death_is_seen(use_pidfd: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        keeper = Keeper(process.pid, Liveness(use_pidfd=use_pidfd))
        assert keeper.lives()
        assert bool(keeper.fds()) == (use_pidfd) == (keeper.poll_s is None)
        process.kill()
        deadline = time.monotonic() + 60
        while keeper.lives():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert not keeper.lives()
        keeper.close()
    late = Keeper(process.pid)
    assert not late.lives()
    late.close()


def test_without_a_keeper_nobody_keeps() -> None:
    keeper = Keeper(0)
    assert not keeper.lives() and keeper.fds() == [] and keeper.poll_s is None
    keeper.close()
