"""The demo's crash, seen from outside: when all trainers are dead, the frozen worker goes on with what they left."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

from asyncckpt.cli.demo_children import RANKS, DemoFailedError, show, thaw
from asyncckpt.protocol.identity import start_ticks

DEATH_TIMEOUT_S = 60.0
"""torchrun gives the other ranks 30 s to end before it kills them."""

COMMIT_TIMEOUT_S = 30.0


class Crash:
    """Follows what the ranks of `asyncckpt.examples.train_gpt_crash` print.

    Args:
        checkpoint: The save that is staged at the crash.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.happened = False
        self._checkpoint = checkpoint
        self._trainers: dict[int, int | None] = {}
        self._worker = 0

    def read(self, line: str) -> None:
        """Take a line; at the crash, wait for the trainers' death and let the worker go on.

        Blocks: up to `DEATH_TIMEOUT_S` and `COMMIT_TIMEOUT_S`.

        Raises:
            DemoFailedError: The trainers live on; the crash fell at another moment; the save is not committed.
        """
        if self.happened:
            return
        if found := re.fullmatch(r"rank \d+: process (\d+)", line):
            self._trainers[int(found[1])] = start_ticks(int(found[1]))
        elif found := re.fullmatch(r"rank \d+: freezes worker (\d+)", line):
            self._worker = int(found[1])
        elif re.match(r"rank \d+: crash ", line):
            self.happened = True
            self._take_up(line)

    def _take_up(self, line: str) -> None:
        if not line.endswith("staged=True written=False"):
            raise DemoFailedError(f"the crash did not fall between staged and written: {line}")
        if len(self._trainers) != RANKS:
            raise DemoFailedError(f"{len(self._trainers)} ranks have given their process ids, expected {RANKS}")
        _wait(self._all_dead, DEATH_TIMEOUT_S, "the trainers did not end")
        if self._committed():
            raise DemoFailedError(f"{self._checkpoint.name} was committed before the crash: the worker was not frozen")
        began = time.monotonic()
        self.thaw()
        _wait(self._committed, COMMIT_TIMEOUT_S, f"the worker did not commit {self._checkpoint}")
        took_s = time.monotonic() - began
        show(f"   all trainers are dead; the worker goes on and commits {self._checkpoint.name} in {took_s:.2f} s")

    def thaw(self) -> None:
        """Let the worker go on, if it was frozen."""
        if self._worker:
            thaw(self._worker)

    def _all_dead(self) -> bool:
        return all(ticks is None or start_ticks(pid) != ticks for pid, ticks in self._trainers.items())

    def _committed(self) -> bool:
        return (self._checkpoint / "manifest.json").exists()


def _wait(holds: Callable[[], bool], timeout_s: float, otherwise: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            raise DemoFailedError(f"{otherwise} within {timeout_s:g} s")
        time.sleep(0.005)
