"""Two trainings in one process that take turns, step by step: what each step of both takes.

What the machine does besides falls on both steps of a pair alike. Two threads, of which one runs at a time.
"""

from __future__ import annotations

import secrets
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

TURN_TIMEOUT_S = 120.0


class Spent(NamedTuple):
    """Seconds of a step: on the wall, of its thread's CPU time, and of the whole process's."""

    wall: float
    cpu: float
    process: float


class Turns:
    """Two threads, of which one runs at a time, each from its tick to its next one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._there = [0, 1]
        self._turn = 0

    def take(self, me: int) -> None:
        """Wait until it is the turn of `me`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._turn == me, TURN_TIMEOUT_S):
                raise TimeoutError("the other training hangs")

    def give(self, me: int, *, leave: bool = False) -> None:
        """Let the other one run, if it is still there; with `leave` for good."""
        with self._changed:
            if leave:
                self._there.remove(me)
            others = [one for one in self._there if one != me]
            self._turn = others[0] if others else me
            self._changed.notify_all()


class Clock:
    """What each step takes, from tick to tick; what follows a step that saves counts to it.

    Args:
        turns: Who runs.
        me: Which of the two this is.
    """

    def __init__(self, turns: Turns, me: int) -> None:
        self._turns, self._me = turns, me
        self._began: Spent | None = None
        self.spent: list[Spent] = []

    def tick(self) -> None:
        """A step begins."""
        self.end()
        self._turns.give(self._me)
        self._turns.take(self._me)
        self._began = Spent(time.perf_counter(), time.thread_time(), time.process_time())

    def end(self) -> None:
        """A step has ended, if one has begun."""
        if self._began is not None:
            now = Spent(time.perf_counter(), time.thread_time(), time.process_time())
            self.spent.append(Spent(*(b - a for a, b in zip(self._began, now, strict=True))))
            self._began = None


Training = Callable[[Path, bool, Clock], None]
"""Trains below a directory, with our adapter or without, and ticks before every step."""


def together(training: Training, directory: Path, *, ours_first: bool) -> tuple[list[Spent], list[Spent]]:
    """Train by the framework alone and with the adapter, step by step in turn; return what each step of both took."""
    turns = Turns()
    clocks = [Clock(turns, 0), Clock(turns, 1)]
    failures: list[BaseException] = []

    def train(me: int) -> None:
        torch.set_num_threads(1)  # two that wait for each other measure how busy the machine is
        place = directory / f"{me}-{secrets.token_hex(4)}"
        try:
            turns.take(me)
            place.mkdir()
            training(place, (me == 0) == ours_first, clocks[me])
            clocks[me].end()
        except BaseException as error:
            failures.append(error)
        finally:
            turns.give(me, leave=True)
            shutil.rmtree(place, ignore_errors=True)

    threads = [threading.Thread(target=train, args=(me,), name=f"training-{me}") for me in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    ours, stock = (clocks[0], clocks[1]) if ours_first else (clocks[1], clocks[0])
    return ours.spent, stock.spent
