"""Result files that grow round by round: written after each, so that a run that is ended keeps the rounds it has.

A later run adds rounds to a file (`--resume`) only if it would measure the same: the same machine, versions, options,
and the same code, as `benchmarks.sources` tells it.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import quiet

PASSING = ("date", "load_before")
"""Of a machine's description: what is another at every run."""

OF_A_RUN = ("rounds_asked", "budget_s", "deadline_s")
"""What may be another in a run that adds rounds."""


class NotTheSameError(Exception):
    """A result file to which this run cannot add; the text says why."""


class NoLimitsError(Exception):
    """The machine's limits could not be measured, so that there can be no round; the text says why."""


class Budget:
    """How long rounds may take together, and whether there is time for one more.

    Args:
        budget_s: For all of this run.
    """

    def __init__(self, budget_s: float) -> None:
        self.budget_s = budget_s
        self._began = time.monotonic()
        self._longest_s = 0.0
        self._rounds = 0

    def elapsed_s(self) -> float:
        """Return how long it runs."""
        return time.monotonic() - self._began

    def left_s(self) -> float:
        """Return what is left of it; below zero if it is up."""
        return self.budget_s - self.elapsed_s()

    def has_room(self) -> bool:
        """Return whether a round as long as the longest so far would end within it; the first one has always room."""
        return not self._rounds or self._longest_s <= self.left_s()

    def spent(self, took_s: float) -> None:
        """Count a round."""
        self._rounds += 1
        self._longest_s = max(self._longest_s, took_s)


class Kept:
    """One result file.

    Args:
        path: Where it is.
        head: What it says besides its rounds; what `OF_A_RUN` names may change from run to run.

    Attributes:
        result: What has been measured, the rounds of earlier runs included.
    """

    def __init__(self, path: Path, head: dict[str, Any]) -> None:
        self._path = path
        self.result: dict[str, Any] = head | {"rounds": [], "took_s": 0.0, "ended": "not"}

    @property
    def rounds(self) -> list[Any]:
        """All rounds; what is appended is written by `keep`."""
        rounds: list[Any] = self.result["rounds"]
        return rounds

    def resume(self) -> None:
        """Take over the rounds of the file, if it is there.

        Raises:
            NotTheSameError: It is about something else, or of other code, or of another machine.
        """
        then = earlier(self._path, self.result)
        if then is None:
            return
        mine = {name: self.result[name] for name in OF_A_RUN if name in self.result}
        self.result = then | mine | {"ended": "not"}

    def grow(self, budget: Budget, make: Callable[[], dict[str, Any] | None]) -> str:
        """Make rounds until there are as many as asked; each is in the file as soon as it is made.

        The machine is waited for before each, and how busy it was is in the round.

        Args:
            budget: For all of them.
            make: Makes one; None if the budget ended within it.

        Returns:
            Why no more are made: `done`, `budget`, or `limits` if those could not be measured.
        """
        asked = self.result["rounds_asked"]
        while len(self.rounds) < asked:
            began_s = budget.elapsed_s()
            idle = quiet.until_idle() if budget.has_room() else {}
            try:
                row = make() if budget.has_room() else None
            except NoLimitsError as error:
                print(f"{error}; {len(self.rounds)} of {asked} rounds were made", file=sys.stderr)
                return "limits"
            if row is None:
                print(f"the budget ends after {len(self.rounds)} of {asked} rounds", file=sys.stderr)
                return "budget"
            took_s = budget.elapsed_s() - began_s
            budget.spent(took_s)
            self.keep(row | idle, took_s)
        return "done"

    def keep(self, row: dict[str, Any], took_s: float) -> None:
        """Add a round, and write the file; `took_s` is what the round took."""
        row["ended"] = now()
        row["took_s"] = took_s
        self.rounds.append(row)
        self.result["took_s"] += took_s
        self.write()

    def end(self, why: str) -> None:
        """Write why no more rounds are made, as `grow` has returned it."""
        self.result["ended"] = why
        self.write()

    def write(self) -> None:
        """Write the file: what was there before, or what is there now, whatever happens meanwhile."""
        write(self._path, self.result)


def write(path: Path, result: dict[str, Any]) -> None:
    """Put a result into a file, by a rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(json.dumps(result, indent=1) + "\n")
    new.replace(path)


def earlier(path: Path, mine: dict[str, Any]) -> dict[str, Any] | None:
    """Return what is in a file; None if it is not there.

    Raises:
        NotTheSameError: It is about something else than `mine`, or of other code, or of another machine.
    """
    if not path.exists():
        return None
    then: dict[str, Any] = json.loads(path.read_text())
    other = differences(then, mine)
    if other:
        text = "; ".join(f"{name} was {_short(a)} and is {_short(b)}" for name, (a, b) in other.items())
        raise NotTheSameError(f"{path}: no rounds can be added: {text}. Without --resume it begins anew.")
    return then


def differences(then: dict[str, Any], mine: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return what keeps two results apart, by name: what it was, and what it is."""
    found: dict[str, tuple[Any, Any]] = {}
    made = {"rounds", "conversions", "dcp_load", "took_s", "ended", "machine", "code", "best", *OF_A_RUN}
    for name in sorted((then.keys() | mine.keys()) - made):
        _compare(found, name, then.get(name), mine.get(name))
    for part, passing in (("machine", PASSING), ("code", ("commit",))):
        old, new = then.get(part) or {}, mine.get(part) or {}
        for name in sorted((old.keys() | new.keys()) - set(passing)):
            _compare(found, f"{part}.{name}", old.get(name), new.get(name))
    return found


def _compare(found: dict[str, tuple[Any, Any]], name: str, then: Any, mine: Any) -> None:
    if json.loads(json.dumps(mine)) != then:
        found[name] = then, mine


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def now() -> str:
    """Return the time of day and the day."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
