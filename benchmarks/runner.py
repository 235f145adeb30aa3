"""Makes the rounds of a question on a quiet machine, and keeps them in a result file.

A round measures everything that is compared once, in a process of its own, and in another order than the round before:
the speed of a shared machine changes, and what runs close together meets the same speed. With `--against`, each round
is made by this checkout and by others in turn, with the same code of the question and another `asyncckpt`.

Result files: `benchmark`, the options, `machine`, `code`, `rounds`, and what holds for all rounds (`nbytes`). Each
round is in the file as soon as it is made. `against` has the rounds of the other checkouts.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import json
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import CHECKOUT, RESULTS, figures, machine, processes, targets
from benchmarks.figures import Row


@dataclass
class Context:
    """What a round is given.

    Attributes:
        options: The options of the question, by name.
        directory: An empty directory for checkpoints; removed after the round.
        number: Of the round, from 0.
        rows: The rounds of this checkout that there are by now.
        facts: What holds for all rounds and checkouts; what a round adds is in the result file.
    """

    options: argparse.Namespace
    directory: Path
    number: int = 0
    rows: list[Row] = field(default_factory=list)
    facts: Row = field(default_factory=dict)

    def in_turn(self, ways: Any, turn: int = 0) -> list[Any]:
        """Return what is compared, in the order of this round, and of the turn within the round."""
        return figures.in_turn(ways, self.number + turn)


@dataclass(frozen=True)
class Question:
    """What a module of `benchmarks.questions` measures; the module's docstring says what it asks.

    Attributes:
        run: Makes one round: measures everything once, and returns the figures.
        shown: The figures that are printed (see `benchmarks.figures`).
        options: Option -> default: a number, a list of texts, or a dict of these by state, "" for the others. Of a
            tuple it is one, the first by default. Each `state`, which says what is saved, has a result file of its own.
        smallest: Options with which the question takes seconds and shows that it runs.
        suite: The states in which `python -m benchmarks` runs it; empty if it must be asked for.
        rounds: How many are made unless it is said.
        label: Names the result file besides the question; the state, if it is None.
    """

    run: Callable[[Context], Row]
    shown: Sequence[str]
    options: Mapping[str, Any] = field(default_factory=dict)
    smallest: str = ""
    suite: Sequence[str] = ("",)
    rounds: int = 5
    label: Callable[[], str] | None = None


def names() -> list[str]:
    """Return the names of all questions."""
    return sorted(file.stem for file in (CHECKOUT / "benchmarks" / "questions").glob("[a-z]*.py"))


def asks(name: str) -> str:
    """Return what a question asks: the docstring of its module."""
    return ast.get_docstring(ast.parse((CHECKOUT / f"benchmarks/questions/{name}.py").read_text())) or ""


def question(name: str) -> Question:
    """Return a question by its name."""
    found: Question = importlib.import_module(f"benchmarks.questions.{name}").QUESTION
    return found


def options_of(name: str, asked: Question, arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of a question."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(f"benchmarks {name}", description=asks(name), formatter_class=formatter)
    for option, default in asked.options.items():
        of = default[""] if isinstance(default, dict) else default
        how: dict[str, Any] = {"nargs": "+"} if isinstance(of, list) else {"type": type(of)}
        if isinstance(of, tuple):
            how, default = {"choices": of}, of[0]
        parser.add_argument(f"--{option.replace('_', '-')}", default=default, help=f"default: {default}", **how)
    group = parser.add_argument_group("options of every question")
    group.add_argument("--rounds", type=int, default=asked.rounds, help="how many")
    group.add_argument("--budget-s", type=float, default=2700.0, help="no round begins that cannot end within")
    group.add_argument("--quiet-wait-s", type=float, default=60.0, help="how long a round waits for an idle machine")
    group.add_argument("--dir", type=Path, help="where checkpoints are written (default: the temporary directory)")
    group.add_argument("--out", type=Path, help="the result file (default: in benchmarks/results)")
    group.add_argument("--quick", action="store_true", help="one round beside the result file, which is not changed")
    group.add_argument("--against", type=Path, nargs="+", default=[], metavar="PATH", help="other checkouts")
    found = parser.parse_args(arguments)
    for key, value in vars(found).items():
        if isinstance(value, dict):
            setattr(found, key, value.get(found.state, value[""]))
    found.rounds = 1 if found.quick else found.rounds
    return found


def main(name: str, arguments: Sequence[str]) -> int:
    """Measure, print, and keep the result file; return the exit code: 1 if no round could be made."""
    asked = question(name)
    options = options_of(name, asked, arguments)
    label = asked.label() if asked.label else getattr(options, "state", "")
    stem = "-".join(filter(None, (name, label, "against" if options.against else "")))
    path: Path = options.out or RESULTS / f"{stem}.json"
    checkouts = [CHECKOUT, *(path.resolve() for path in options.against)]
    with workplace(options.dir, checkouts) as place:
        run = Run(name, options, place, checkouts, None if options.quick else path)
        run.make(run.round)
    if not run.result["rounds"]:
        return 1
    beside = {"last": json.loads(path.read_text())} if options.quick and path.exists() else {}
    beside |= run.result.get("against", {})
    print("\n".join(report({**beside, CHECKOUT.name: run.result}, asked.shown, path.stem)))
    return 0


def round_in_process(
    name: str, options: Mapping[str, Any], directory: str, number: int, rows: list[Row]
) -> tuple[Row, Row]:
    """Make one round in this process; return its figures, and what holds for all rounds."""
    context = Context(argparse.Namespace(**options), Path(directory), number, rows)
    return question(name).run(context), context.facts


@contextlib.contextmanager
def workplace(parent: Path | None, checkouts: Sequence[Path]) -> Iterator[Path]:
    """Provide a directory for all rounds; in it are links to this package and to those of each checkout."""
    with tempfile.TemporaryDirectory(prefix="asyncckpt-bench-", dir=parent, ignore_cleanup_errors=True) as place:
        for number, checkout in enumerate(checkouts):
            links = Path(place, f"links-{number}")
            links.mkdir()
            (links / "benchmarks").symlink_to(CHECKOUT / "benchmarks")
            (links / "asyncckpt").symlink_to(checkout / "asyncckpt")
            (links / "asyncckpt_worker").symlink_to(checkout / "worker")
            if not (links / "asyncckpt" / "__init__.py").exists():
                sys.exit(f"{checkout} is no checkout of asyncckpt: it has no asyncckpt/__init__.py")
        yield Path(place)


class Run:
    """The rounds of one run, and the result file.

    Args:
        name: Of the question.
        options: Of the run.
        place: Where checkpoints are written.
        checkouts: This one, then those of `--against`.
        path: The result file; None keeps none.

    Attributes:
        result: What is in the file.
        rows: The rounds of each checkout.
        checkouts, options: As given.
    """

    def __init__(
        self, name: str, options: argparse.Namespace, place: Path, checkouts: Sequence[Path], path: Path | None
    ) -> None:
        self.checkouts = list(checkouts)
        self.options, self._name, self._place, self._path = options, name, place, path
        skipped = ("rounds", "dir", "out", "quick", "against", "quiet_wait_s")
        self.rows: dict[Path, list[Row]] = {checkout: [] for checkout in checkouts}
        of = {path.name: {"commit": machine.commit(path), "rounds": rows} for path, rows in self.rows.items()}
        if len(of) != len(checkouts):
            sys.exit("--against: the checkouts need directories of different names")
        here = of.pop(checkouts[0].name)
        self.result: Row = {
            "benchmark": name,
            **{key: value for key, value in vars(options).items() if key not in skipped},
            "rounds_asked": options.rounds,
            "machine": machine.describe(place),
            "code": {"commit": here["commit"]},
            "took_s": 0.0,
            "ended": "interrupted",
            "rounds": here["rounds"],
            **({"against": of} if of else {}),
        }

    def make(self, one: Callable[[int, Path], Row]) -> None:
        """Make rounds until there are as many as asked for, or one more could not end within the budget.

        The result says why no more were made, in `ended`: "done", "budget", or the error of a round.

        Args:
            one: Makes the round of a number in a checkout.
        """
        began, longest_s, asked = time.monotonic(), 0.0, self.result["rounds_asked"]
        ended = "done"
        while (number := min(len(self.rows[checkout]) for checkout in self.checkouts)) < asked:
            elapsed_s = time.monotonic() - began
            if longest_s and elapsed_s + longest_s > self.options.budget_s:
                ended = "budget"
                break
            idle = machine.until_idle(self.options.quiet_wait_s)
            made: dict[Path, Row] = {}
            try:
                for checkout in figures.in_turn(self.checkouts, number):
                    since = time.monotonic()
                    made[checkout] = {**one(number, checkout), **idle, "took_s": time.monotonic() - since}
            except processes.ProcessError as error:
                ended = str(error)
                break
            for checkout, row in made.items():
                self.rows[checkout].append({**row, "ended": machine.now()})
            longest_s = max(longest_s, took_s := time.monotonic() - began - elapsed_s)
            self.result["took_s"] += took_s
            print(f"round {number + 1} of {asked}: {took_s:.0f} s", file=sys.stderr)
            self._keep()
        if ended != "done":
            print(f"{len(self.result['rounds'])} of {asked} rounds were made: {ended}", file=sys.stderr)
        self.result["ended"] = ended
        self._keep()

    def round(self, number: int, checkout: Path) -> Row:
        """Make one round in a process that imports `asyncckpt` from a checkout, within the budget of all rounds."""
        links = self._place / f"links-{self.checkouts.index(checkout)}"
        how: dict[str, Any] = {"environment": {"PYTHONPATH": str(links)}, "cwd": links, "own_worker": True}
        with tempfile.TemporaryDirectory(dir=self._place, ignore_cleanup_errors=True) as directory:
            given = (self._name, vars(self.options), directory, number, self.rows[checkout])
            row, facts = processes.call(round_in_process, *given, deadline_s=self.options.budget_s, echo=True, **how)
        machine.until_discarded(self._place)
        self.result.update(facts)
        return dict(row)

    def _keep(self) -> None:
        """Replace the result file; without a round, the old one stays."""
        if self._path is None or not self.result["rounds"]:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_name(f".{self._path.name}.{os.getpid()}-{secrets.token_hex(4)}")
        new.write_text(json.dumps(self.result, indent=1) + "\n")
        new.replace(self._path)


def report(results: Mapping[str, Row], shown: Sequence[str], file: str) -> list[str]:
    """Return what is printed: the figures of the last result beside the others, and the targets of its file."""
    result = list(results.values())[-1]
    size = f"{result['nbytes'] / 1e9:.2f} GB, " if "nbytes" in result else ""
    lines = [
        f"{file}: {size}{len(result['rounds'])} rounds, {machine.how_busy(result)}",
        *figures.table(results, shown),
    ]
    return lines + [target_line(row) for row in targets.rows(only=file, result=result)]


def target_line(row: Sequence[str]) -> str:
    """Return a target as a line of text."""
    name, limit, measured, _, verdict, _ = row
    return f"  {name:62s} at most {limit:>9s} {measured:>9s}   {verdict}"


def smoke(wanted: Sequence[str]) -> int:
    """Run questions once at their smallest, and keep nothing; return 1 if one fails."""
    failed = []
    for name in wanted or names():
        with tempfile.TemporaryDirectory(prefix="asyncckpt-bench-") as directory:
            print(f"== {name}", flush=True)
            options = ["--rounds", "1", "--quiet-wait-s", "0", "--out", f"{directory}/result.json", "--dir", directory]
            if main(name, [*question(name).smallest.split(), *options]):
                failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all run")
    return int(bool(failed))
