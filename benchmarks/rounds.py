"""Rounds of contenders, each in a process of its own: who runs, how much of it, and what it has left behind.

Part of `benchmarks.compare`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.kept import Budget, NoLimitsError

NBYTES = {"gpt": 1_493_716_496, "small": 327_685_056, "large": 4_295_610_896, "tiny": 9_899_840}
STATES = tuple(NBYTES)
LEFT_ROOM_S = 10.0
"""For ending what has not ended, and for removing its files."""

ROUNDS_OF_LOADS = 2
"""So many rounds measure a peer's memory and loads; ours are in every one."""


@dataclass(frozen=True)
class Setting:
    """What a run measures.

    Attributes:
        state: What is saved.
        saves: Of a contender in a round.
        deadline_s: For a contender in a round.
        peer_saves_s: A peer begins no save later than this after its first one, once it has made three; None: no end.
    """

    state: str
    saves: int
    deadline_s: float
    peer_saves_s: float | None = None


class Rounds:
    """Makes rounds.

    Args:
        setting: What is measured.
        directory: Where to write.
        budget: For all rounds of this run.
        best: What `best` was in an earlier run.

    Attributes:
        best: Which block sizes and thread counts measure the machine's limits; found by the first round.
    """

    def __init__(self, setting: Setting, directory: Path, budget: Budget, best: dict[str, Any] | None = None) -> None:
        self._setting, self._directory, self._budget = setting, directory, budget
        self.best: dict[str, Any] = best or {}
        self._removed: threading.Thread | None = None

    def make(self, names: list[str], before: list[Any], asked: int) -> dict[str, Any] | None:
        """Return one round, its contenders turned by its number; None if the budget ends it before they have all run.

        Args:
            names: Of the contenders.
            before: Earlier rounds. Who failed there is not run again, and says the same.
            asked: Rounds in all.
        """
        number = len(before)
        shift = number * len(names) // asked
        row: dict[str, Any] = {"limits": self.limits(), "contenders": {}}
        for name in [*names[shift:], *names[:shift]]:
            earlier = [r["contenders"][name] for r in before]
            failed = [one for one in earlier if "error" in one]
            if failed:
                row["contenders"][name] = failed[0]
                continue
            left_s = self._budget.left_s() - LEFT_ROOM_S if before else self._setting.deadline_s
            if left_s <= 0:
                return None
            deadline_s = min(self._setting.deadline_s, left_s)
            found = self._contest(name, deadline_s, self._asked_of(name, earlier))
            if "error" in found and deadline_s < self._setting.deadline_s:
                return None  # the budget's fault, not the contender's
            row["contenders"][name] = found
            print(f"{self._budget.elapsed_s():6.0f} s, round {number + 1}: {name}", file=sys.stderr)
        return row

    def _asked_of(self, name: str, earlier: list[Any]) -> list[str]:
        """Return the options with which a contender runs, beside those of all."""
        if name.startswith("asyncckpt"):
            return []
        found = [] if self._setting.peer_saves_s is None else ["--saves-s", str(self._setting.peer_saves_s)]
        loaded = sum("load_cold_s" in one for one in earlier)
        return [*found, "--saves-only"] if loaded >= ROUNDS_OF_LOADS else found

    def limits(self) -> dict[str, float]:
        """Return the machine's limits, measured in a process that gives its memory back.

        Raises:
            NoLimitsError: They cannot be measured, or not before the deadline of a contender.
        """
        self.settle()
        code = (
            "import json, pathlib, sys; from benchmarks.limits import Limits;"
            "found = Limits(pathlib.Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]));"
            "print(json.dumps([found.measure(), found.best])); found.close()"
        )
        nbytes = str(max(NBYTES[self._setting.state], 1 << 20))
        command = [sys.executable, "-c", code, str(self._directory), nbytes, json.dumps(self.best)]
        deadline_s = self._setting.deadline_s
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, check=False)
        except subprocess.TimeoutExpired:
            raise NoLimitsError(f"the limits are not measured after {deadline_s:.0f} s") from None
        if ended.returncode:
            raise NoLimitsError(f"the limits cannot be measured: {ended.stderr[-500:]}")
        limits, self.best = json.loads(ended.stdout)
        return dict(limits)

    def _contest(self, name: str, deadline_s: float, options: list[str]) -> dict[str, Any]:
        """Run one contender in its own process group; whatever it leaves behind is ended."""
        began = time.monotonic()
        place, gone = self._directory / "run", self._directory / "gone"
        place.mkdir()
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.contest", name, "--state", self._setting.state]
        command += ["--saves", str(self._setting.saves), "--dir", str(place), "--when-gone", str(gone), *options]
        log = self._directory / "stderr"
        with log.open("wb") as stderr:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True)
        late = False
        try:
            try:
                output, _ = process.communicate(timeout=deadline_s)
            except subprocess.TimeoutExpired:
                late = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if late:
                output, _ = process.communicate(timeout=LEFT_ROOM_S)
            found = outcome(output.decode(errors="replace"), log, process.returncode, deadline_s if late else None)
            return found | {"took_s": time.monotonic() - began}
        except subprocess.TimeoutExpired:
            return {"error": f"not ended after {deadline_s:.0f} s, and cannot be killed"}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if name.startswith("asyncckpt"):
                command = [sys.executable, "-m", "asyncckpt", "worker", "stop"]
                subprocess.run(command, capture_output=True, check=False, timeout=deadline_s)
            self._remove(place, gone)

    def _remove(self, place: Path, gone: Path) -> None:
        """Remove what a contender has left while the next one makes its state: it saves when that is done."""
        self.settle()
        place.rename(gone)
        self._removed = threading.Thread(target=shutil.rmtree, args=(gone,), kwargs={"ignore_errors": True})
        self._removed.start()

    def settle(self) -> None:
        """Wait until everything has been removed."""
        if self._removed is not None:
            self._removed.join()


def outcome(output: str, log: Path, code: int, late_s: float | None) -> dict[str, Any]:
    """Return what a contender's process has measured, or why it has not.

    Args:
        output: What it printed: where it was, line by line, and in the end its figures.
        log: What it wrote to stderr.
        code: It ended with.
        late_s: The deadline at which it was killed.
    """
    lines = output.splitlines()
    figures = [line for line in lines if line.startswith("{")]
    if figures:
        return dict(json.loads(figures[-1]))
    where = f" ({lines[-1]})" if lines else ""
    if late_s is not None:
        return {"error": f"not ended after {late_s:.0f} s{where}"}
    said = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return {"error": f"ended with {code}{where}{': ' + said[-1][:200] if said else ''}"}
