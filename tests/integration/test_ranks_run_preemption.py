"""Ranks of a framework's training that are told to stop: wherever each of them is then."""

from __future__ import annotations

import signal
from pathlib import Path

import rank_processes
from rank_processes import talk

from asyncckpt.manager import preemption
from asyncckpt.manager.preemption import FrameworkPreemption


def _told_in_the_first_step(rank: int) -> int:
    preemption.GRACE_S = rank_processes.DEADLINE_S / 2
    with FrameworkPreemption(signal.SIGUSR1) as stop:
        step = 1
        if rank == 0:
            signal.raise_signal(signal.SIGUSR1)
            assert stop.stops_at(step), "the other one is still in its first step"
            talk().say("stops")
        else:
            talk().hear()
            assert stop.stops_at(step)
    return step


def test_a_rank_that_is_still_in_its_first_step_keeps_none_from_stopping(tmp_path: Path) -> None:
    environ = {"MASTER_PORT": f"{tmp_path}"}
    with rank_processes.running(2, _told_in_the_first_step, environ=environ) as ranks:
        assert ranks.receive(0) == "stops"
        ranks.send(1, "go on")
        assert ranks.results() == [1, 1]


def _one_ends_early(rank: int) -> list[int]:
    stopped = []
    with FrameworkPreemption(signal.SIGUSR1) as stop:
        for step in range(1, 4):
            if rank == 0 and step == 3:
                talk().hear()
                signal.raise_signal(signal.SIGUSR1)
            if stop.stops_at(step):
                stopped.append(step)
            if rank == 1 and step == 2:
                break
    if rank == 1:
        talk().say("ended")
        talk().hear()
    return stopped


def test_a_rank_that_has_ended_keeps_none_from_stopping(tmp_path: Path) -> None:
    environ = {"MASTER_PORT": f"{tmp_path}"}
    with rank_processes.running(2, _one_ends_early, environ=environ) as ranks:
        assert ranks.receive(1) == "ended"
        ranks.send(0, "go on")
        ranks.send(1, "go on")
        assert ranks.results() == [[3], []]
