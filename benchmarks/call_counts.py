"""Counts calls of our functions in every thread of a process, and runs a worker in which they are counted."""

from __future__ import annotations

import contextlib
import inspect
import json
import mmap
import runpy
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks import machine

PACKAGES = ("asyncckpt", "asyncckpt_worker")
START_S = 120.0


class Counts:
    """Counts calls in this thread, and in those that this process starts from now on.

    Args:
        switch: A file of one page. Its first byte says for which operation all processes count; 0: for none.
    """

    def __init__(self, switch: Path) -> None:
        with switch.open("r+b") as opened:
            self.operation = mmap.mmap(opened.fileno(), mmap.PAGESIZE)
        self._first = threading.get_ident()
        self._calls: Counter[tuple[int, bool, str, bool]] = Counter()
        threading.setprofile(self._event)
        sys.setprofile(self._event)

    def _event(self, frame: FrameType, event: str, _: Any) -> None:
        operation = self.operation[0]
        if event != "call" or not operation or (module := _ours(frame)) is None or _goes_on(frame):
            return
        caller = frame.f_back
        while caller is not None and (of := _ours(caller)) is None:
            caller = caller.f_back
        switched = caller is not None and of != module
        self._calls[operation, threading.get_ident() == self._first, module, switched] += 1

    def found(self, operation: int, *, first: bool = False) -> dict[str, Any]:
        """Return the counts of an operation, in all threads or in the first one."""
        of = {key[1:]: n for key, n in self._calls.items() if key[0] == operation and (key[1] or not first)}
        names = sorted({module for _, module, _ in of})
        switches = sum(n for (*_, switched), n in of.items() if switched)
        return {"calls": sum(of.values()), "switches": switches, "modules": len(names), "names": " ".join(names)}


def _goes_on(frame: FrameType) -> bool:
    """Return whether an event is no call of a function: it goes on in a generator, or begins a comprehension."""
    code = frame.f_code
    resumed = code.co_flags & inspect.CO_GENERATOR and frame.f_lineno != code.co_firstlineno
    return bool(resumed) or code.co_name.endswith(("comp>", "genexpr>"))


def _ours(frame: FrameType) -> str | None:
    name = str(frame.f_globals.get("__name__", ""))
    return name if name.partition(".")[0] in PACKAGES else None


@contextlib.contextmanager
def counting_worker(directory: Path, switch: Path, operations: int) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Run a worker until the end of the block.

    Args:
        directory: For its files; it is made.
        switch: As for `Counts`.
        operations: How many are counted, from 1.

    Yields:
        Its endpoint, and a list that has the counts of each operation when it has ended.
    """
    directory.mkdir(mode=0o700)
    target, endpoint = directory / "found.json", f"ipc://{directory}/w.sock"
    found: list[dict[str, Any]] = []
    command = [sys.executable, "-m", "benchmarks.call_counts", str(switch), str(operations), str(target)]
    process = subprocess.Popen([*command, "--endpoint", endpoint], stdin=subprocess.DEVNULL)
    try:
        yield endpoint, found
        machine.stop_worker("--endpoint", endpoint)
        process.wait(START_S)
        found += json.loads(target.read_text())
    finally:
        process.kill()
        process.wait(START_S)


def main() -> None:
    """Be the worker: `SWITCH OPERATIONS TARGET`, then the worker's arguments."""
    switch, operations, target = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    del sys.argv[1:4]
    counts = Counts(switch)
    try:
        runpy.run_module("asyncckpt_worker", run_name="__main__", alter_sys=True)
    finally:
        sys.setprofile(None)
        target.write_text(json.dumps([counts.found(number + 1) for number in range(operations)]))


if __name__ == "__main__":
    main()
