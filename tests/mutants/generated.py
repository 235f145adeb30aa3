"""Small random changes of the product, one at a time, and whether the unit tests that run the changed line notice.

    python -m tests.mutants.generated [--count 500] [--seed 1] [--only PREFIX] [--jobs 2] [--write FILE] [--map FILE]

Where `run.py` has the bugs that somebody thought of, this one has those that nobody did: a comparison turned round, a
call left out, a number one too high. The same seed gives the same changes of the same product, so two suites can be
compared: one is as good as another if no more changes survive it. A change that survives is no proof of a missing test,
since it may change nothing that anybody can see.

First the unit tests run once with `coverage`, which notes the lines that each of them runs (`--map` keeps that in a
file, and reads it if it is there). Then each change is made in a copy of the working tree, and at most `MAX_TESTS` of
the tests that run its line are run there, those that run the fewest lines first. What only other processes run is not
reached by this, and counted apart.
"""

from __future__ import annotations

import argparse
import ast
import collections
import concurrent.futures
import itertools
import json
import pathlib
import queue
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.mutants.run import ROOT, Copy, RunError

PRODUCT = ("asyncckpt", "worker")
MAX_TESTS = 40
MAP_TIMEOUT_S = 3600
OPERATORS: dict[type[ast.AST], tuple[str, str]] = {
    **{ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is")},
    **{ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">")},
    **{ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"), ast.And: ("and", "or"), ast.Or: ("or", "and")},
    **{ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.FloorDiv: ("//", "*")},
}


@dataclass(frozen=True)
class Change:
    """One change: columns `start` to `end` of a line of a file become `text`."""

    path: str
    line: int
    start: int
    end: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}:{self.start} {self.text}"


# ---- what can be changed --------------------------------------------------------------------------------------------


def changes_of(path: str, source: str) -> list[Change]:
    """Return every change of a module's functions that this program knows; all are within one line."""
    lines = [line.encode() for line in source.splitlines()]
    found: dict[Change, None] = {}

    def add(line: int, start: int, end: int, text: str) -> None:
        found[Change(path, line, start, end, text)] = None

    def between(left: ast.expr, right: ast.expr, operator: ast.AST) -> None:
        old, new = OPERATORS.get(type(operator), ("", ""))
        if old and left.end_lineno == right.lineno:
            at = lines[right.lineno - 1].find(old.encode(), left.end_col_offset, right.col_offset)
            if at >= 0:
                add(right.lineno, at, at + len(old), new)

    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    for node in (inner for function in functions for statement in function.body for inner in ast.walk(statement)):
        if getattr(node, "lineno", 0) != getattr(node, "end_lineno", -1):
            continue
        if isinstance(node, ast.Compare):
            for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
                between(left, right, operator)
        elif isinstance(node, ast.BoolOp):
            for left, right in zip(node.values, node.values[1:], strict=False):
                between(left, right, node.op)
        elif isinstance(node, ast.BinOp):
            between(node.left, node.right, node.op)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            add(node.lineno, node.col_offset, node.operand.col_offset, "")
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            text = str(not node.value) if isinstance(node.value, bool) else str(node.value + 1)
            add(node.lineno, node.col_offset, node.end_col_offset or 0, text)
        elif isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
            add(node.lineno, node.value.col_offset, node.value.end_col_offset or 0, "None")
        elif isinstance(node, ast.Expr | ast.Raise) and _is_needed(node):
            add(node.lineno, node.col_offset, node.end_col_offset or 0, "pass")
    return list(found)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_needed(node: ast.Expr | ast.Raise) -> bool:
    """Return whether a statement is more than a text or a record of a log."""
    if isinstance(node, ast.Raise):
        return True
    called = node.value.func if isinstance(node.value, ast.Call) else None
    return called is not None and not (isinstance(called, ast.Attribute) and "log" in ast.unparse(called.value).lower())


def changed(source: str, change: Change) -> str:
    """Return a module's text with a change."""
    lines = source.splitlines(keepends=True)
    line = lines[change.line - 1].encode()
    lines[change.line - 1] = (line[: change.start] + change.text.encode() + line[change.end :]).decode()
    text = "".join(lines)
    compile(text, change.path, "exec")
    return text


def drawn(count: int, seed: int, only: str) -> list[Change]:
    """Return that many changes, drawn from all."""
    every: list[Change] = []
    for package in PRODUCT:
        for file in sorted((ROOT / package).rglob("*.py")):
            if (path := str(file.relative_to(ROOT))).startswith(only):
                every += changes_of(path, file.read_text())
    random.Random(seed).shuffle(every)
    return list(itertools.islice(filter(_compiles, every), count))


def _compiles(change: Change) -> bool:
    try:
        changed((ROOT / change.path).read_text(), change)
    except SyntaxError:
        return False
    return True


# ---- which tests run a line -----------------------------------------------------------------------------------------


class Contexts:
    """A plugin of pytest: what is run from now on is run by this test."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        import coverage

        running = coverage.Coverage.current()
        assert running is not None
        running.switch_context(item.nodeid.partition("[")[0])
        try:
            return (yield)
        finally:
            running.switch_context("")


def lines_by_test(target: pathlib.Path) -> None:
    """Run the unit tests, and write for each line of the product which tests run it (JSON: file, line, tests)."""
    import coverage

    with tempfile.TemporaryDirectory(prefix="lines-by-test-") as directory:
        measured = coverage.Coverage(data_file=f"{directory}/data", source=[*PRODUCT], config_file=False)
        measured.start()
        pytest.main(["-q", "-p", "no:cacheprovider", "tests/unit"], plugins=[Contexts()])
        measured.stop()
        data = measured.get_data()
        found = {
            str(pathlib.Path(file).relative_to(ROOT)): {
                line: [context for context in contexts if context]
                for line, contexts in data.contexts_by_lineno(file).items()
            }
            for file in data.measured_files()
        }
    target.write_text(json.dumps(found))


def tests_of(changes: list[Change], lines: dict[str, dict[str, list[str]]]) -> dict[Change, tuple[str, ...]]:
    """Return the tests to be run for each change: at most `MAX_TESTS`, those that run the fewest lines first."""
    reach = collections.Counter(test for file in lines.values() for tests in file.values() for test in tests)
    return {
        change: tuple(
            sorted(lines.get(change.path, {}).get(str(change.line), ()), key=lambda t: (reach[t], t))[:MAX_TESTS]
        )
        for change in changes
    }


# ---- running them ---------------------------------------------------------------------------------------------------


def survives(copy: Copy, change: Change, tests: tuple[str, ...]) -> bool:
    """Return whether no test notices a change."""
    path = copy.root / change.path
    source = path.read_text()
    path.write_text(changed(source, change))
    try:
        return not copy.run(("-x", *tests))[0]
    except RunError:
        return False  # it does not end, or takes pytest with it: noticed
    finally:
        path.write_text(source)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="of files whose path begins so")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--map", type=pathlib.Path, help="a file: which tests run a line; made if it is not there")
    parser.add_argument("--write", type=pathlib.Path, help="where the result goes")
    parser.add_argument("--make-map", type=pathlib.Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.make_map:
        lines_by_test(args.make_map)
        return 0
    print(f"seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="generated-mutants-") as directory:
        target = args.map or pathlib.Path(directory, "map.json")
        if not target.exists():
            command = [sys.executable, "-m", "tests.mutants.generated", "--make-map", str(target.resolve())]
            subprocess.run(command, cwd=ROOT, timeout=MAP_TIMEOUT_S, check=True)
        changes = drawn(args.count, args.seed, args.only)
        tests = tests_of(changes, json.loads(target.read_text()))
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for number in range(args.jobs):
            pathlib.Path(directory, str(number)).mkdir()
            copies.put(Copy(f"{directory}/{number}"))

        def tried(change: Change) -> bool:
            copy = copies.get()
            try:
                return survives(copy, change, tests[change])
            finally:
                copies.put(copy)

        reached = [change for change in changes if tests[change]]
        survivors = []
        with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            for change, one in zip(reached, pool.map(tried, reached), strict=True):
                print(f"{'SURVIVES' if one else 'noticed '} {change}", flush=True)
                if one:
                    survivors.append(change)
    said = (
        f"{len(changes)} changes, seed {args.seed}: {len(reached) - len(survivors)} noticed, {len(survivors)} survive"
    )
    said += f", {len(changes) - len(reached)} in lines that no unit test runs in its own process"
    print(said)
    if args.write:
        args.write.write_text(
            "\n".join((f"# Generated mutants\n\n{said}.\n", *(f"- {one}" for one in survivors))) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
