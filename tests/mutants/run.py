"""`make mutants`: known bugs put in on purpose, one at a time, and which tests catch them.

    python -m tests.mutants.run [NAME ...] [--all] [--jobs N] [--check] [--write FILE] [--diff]

A patch in this directory is a header, an empty line, and a diff without line numbers:

    what: the fsync of a shard file is dropped
    promise: P1
    tests: tests/unit/storage/test_storage_rank_writer.py::test_every_file_is_fsynced

    --- asyncckpt/storage/shard_writer.py
    @@
     what must be there, once in the file, however far it is indented
    -what goes
    +what comes

Each is applied to a copy of the working tree, never to the tree itself, and the tests that it names run there; with
`--all` the whole of `tests/unit` where these do not notice. A patch that no longer applies, or that nothing notices,
fails the run. So does a named test that fails, or is not there, without any mutant: that is tried first. A mutant is
caught by a test that fails, by a module of tests that can no longer be imported, or by the end of pytest by a signal;
if pytest ends otherwise with an error of its own, the run fails, since nothing has been shown. `test_mutants.py` checks
in `make test` that all apply and that the tests exist.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import difflib
import os
import pathlib
import platform
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parents[2]
PATCHES = ROOT / "tests" / "mutants"
RESULTS = PATCHES / "RESULTS.md"
TEST_TIMEOUT_S = 60
RUN_TIMEOUT_S = 900
FIELDS = ("what", "promise", "tests")


class RunError(RuntimeError):
    """Pytest has ended, and has shown nothing; the text has what it said."""


class PatchError(ValueError):
    """A patch that is malformed or does not apply; the text says which and why."""


@dataclass(frozen=True)
class Mutant:
    """One patch: its name, its header, and per file the pairs of text to be found and text to take its place."""

    name: str
    what: str
    promise: str
    tests: tuple[str, ...]
    changes: Mapping[str, tuple[tuple[str, str], ...]]

    def applied(self, root: pathlib.Path) -> dict[str, str]:
        """Return the changed files' texts by their paths below `root`.

        Raises:
            PatchError: What must be found is not there, or more than once.
        """
        found = {}
        for path, pairs in self.changes.items():
            try:
                text = (root / path).read_text()
            except OSError as error:
                raise PatchError(f"{self.name}: {path}: {error.strerror}") from error
            for pair in pairs:
                moved = (tuple(_indented(part, by) for part in pair) for by in (0, -4, 4, -8, 8))
                fitting = next((both for both in moved if text.count(both[0]) == 1), None)
                if fitting is None:
                    count = text.count(pair[0])
                    raise PatchError(f"{self.name}: {path}: found {count} times, expected once:\n{pair[0]}")
                text = text.replace(*fitting)
            compile(text, path, "exec")
            found[path] = text
        return found


def _indented(text: str, by: int) -> str:
    """Return lines moved to the right, or left: what is found stays what it is in another block."""
    if by < 0 and any(line.strip() and not line.startswith(" " * -by) for line in text.splitlines()):
        return "\0"
    lines = text.splitlines(keepends=True)
    return "".join(line if not line.strip() else " " * by + line if by > 0 else line[-by:] for line in lines)


def parsed(path: pathlib.Path) -> Mutant:
    """Read a patch.

    Raises:
        PatchError: Malformed.
    """
    head, _, body = path.read_text().partition("\n\n")
    fields = dict(line.partition(": ")[::2] for line in head.splitlines())
    if tuple(fields) != FIELDS:
        raise PatchError(f"{path.name}: its header has {list(fields)}, expected {list(FIELDS)}")
    changes: dict[str, list[tuple[str, str]]] = {}
    old: list[str] = []
    new: list[str] = []
    file = ""

    def close() -> None:
        if old or new:
            changes.setdefault(file, []).append(("\n".join(old) + "\n", "\n".join(new) + "\n"))
            old.clear()
            new.clear()

    for line in body.splitlines():
        if line.startswith("--- "):
            close()
            file = line[4:]
        elif line == "@@":
            close()
        elif line[:1] in (" ", "-", "+", ""):
            if line[:1] != "+":
                old.append(line[1:])
            if line[:1] != "-":
                new.append(line[1:])
        else:
            raise PatchError(f"{path.name}: {line!r}")
    close()
    if not changes or any(a == b for pairs in changes.values() for a, b in pairs):
        raise PatchError(f"{path.name}: it changes nothing")
    return Mutant(path.stem, fields["what"], fields["promise"], tuple(fields["tests"].split()), {
        name: tuple(pairs) for name, pairs in changes.items()
    })  # fmt: skip


def every_mutant() -> list[Mutant]:
    """Return all patches, by name."""
    return [parsed(path) for path in sorted(PATCHES.glob("*.patch"))]


def missing_tests(mutant: Mutant) -> list[str]:
    """Return the tests that a patch names and that are not there."""
    missing = []
    for test in mutant.tests:
        file, _, name = test.partition("::")
        path, function = ROOT / file, re.escape(name.partition("[")[0])
        if not path.is_file() or not re.search(rf"^def {function}\(", path.read_text(), re.MULTILINE):
            missing.append(test)
    return missing


def diff_of(mutant: Mutant) -> str:
    """Return the patch as `git apply` takes it."""
    lines: list[str] = []
    for path, text in mutant.applied(ROOT).items():
        before = (ROOT / path).read_text().splitlines(keepends=True)
        lines += difflib.unified_diff(before, text.splitlines(keepends=True), f"a/{path}", f"b/{path}")
    return "".join(lines)


# ---- running them ---------------------------------------------------------------------------------------------------


class Copy:
    """A copy of the working tree, with what git does not ignore, in which one mutant at a time lives."""

    def __init__(self, directory: str) -> None:
        self.root = pathlib.Path(directory)
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
        for name in filter(None, names):
            source, target = ROOT / name, self.root / name
            if source.is_file() and ".typing" not in pathlib.PurePath(name).parts:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
        (self.root / ".typing").mkdir()
        (self.root / ".typing" / "asyncckpt_worker").symlink_to("../worker")

    def run(self, tests: tuple[str, ...]) -> tuple[list[str], float, str]:
        """Run tests; returns those that failed, the seconds that it took, and what pytest said.

        Raises:
            RunError: Pytest has ended with an error of its own, or not at all.
        """
        path = os.pathsep.join((str(self.root), str(self.root / ".typing")))
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", "--tb=line"]
        command += [f"--timeout={TEST_TIMEOUT_S}", *tests]
        started = time.monotonic()
        try:
            done = subprocess.run(
                command,
                cwd=self.root,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=RUN_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise RunError(f"pytest has not ended within {RUN_TIMEOUT_S} s: {' '.join(tests)}") from error
        return failures(done.returncode, done.stdout), time.monotonic() - started, done.stdout

    def caught(self, mutant: Mutant, *, everything: bool) -> tuple[list[str], float]:
        """Return the tests that fail under a mutant, and the seconds until that was known."""
        texts = mutant.applied(self.root)
        kept = {path: (self.root / path).read_text() for path in texts}
        try:
            for path, text in texts.items():
                (self.root / path).write_text(text)
            failed, seconds, _ = self.run(mutant.tests)
            if not failed and everything:
                failed, more, _ = self.run(("tests/unit",))
                seconds += more
            return failed, seconds
        finally:
            for path, text in kept.items():
                (self.root / path).write_text(text)


def failures(code: int, said: str) -> list[str]:
    """Return what has failed in a run of pytest: tests, modules that cannot be imported, or pytest by a signal.

    Args:
        code: It ended with.
        said: What it printed, with `-rfE`.

    Raises:
        RunError: It ended with an error of its own: an argument that it does not take, a test that is not there,
            nothing collected.
    """
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+?::\S+)", said, re.MULTILINE)
    unimportable = re.findall(r"^ERROR (\S+\.py)(?: - .*)?$", said, re.MULTILINE)
    if code < 0:
        failed.append(f"(pytest ended by {signal.Signals(-code).name})")
    elif code in (2, 4) and unimportable:  # 4 where tests of the module were named one by one
        failed += [f"({module} cannot be imported)" for module in unimportable]
    elif code not in (0, 1):
        raise RunError(f"pytest ended with {code}, which shows nothing:\n{said[-2000:]}")
    elif code == 1 and not failed:
        raise RunError(f"pytest says that tests failed, and not which:\n{said[-2000:]}")
    return list(dict.fromkeys(failed))


def _rows(found: Mapping[str, tuple[Mutant, list[str], float]]) -> Iterator[str]:
    yield "| mutant | what it does | promise | caught by | s |"
    yield "|---|---|---|---|---|"
    for name, (mutant, failed, seconds) in found.items():
        tests = list(dict.fromkeys(f"`{f.partition('[')[0].rpartition('/')[2]}`" for f in failed))
        shown = ", ".join(tests[:4]) + (f" and {len(tests) - 4} more" if len(tests) > 4 else "")
        yield f"| {name} | {mutant.what} | {mutant.promise} | {shown or '**nothing**'} | {seconds:.0f} |"


def tried(copies: list[Copy], mutants: list[Mutant], *, everything: bool) -> dict[str, tuple[Mutant, list[str], float]]:
    """Return, by name, every mutant with the tests that caught it and the seconds that it took.

    Args:
        copies: Copies of the working tree; as many mutants are tried at a time.
        mutants: The mutants.
        everything: Whether to run all unit tests where the named ones notice nothing.

    Raises:
        RunError: A named test fails without any mutant; or, once all have been tried, pytest ended with an error of its
            own for some.
    """
    failed, seconds, said = copies[0].run(tuple(dict.fromkeys(test for m in mutants for test in m.tests)))
    if failed:
        raise RunError("\n".join((said, "these tests fail without any mutant:", *failed)))
    print(f"without a mutant every test passes ({seconds:.0f} s)", flush=True)
    found, nothing_shown, free = {}, list[str](), queue.SimpleQueue[Copy]()
    for copy in copies:
        free.put(copy)

    def caught(mutant: Mutant) -> tuple[list[str], float] | RunError:
        copy = free.get()
        try:
            return copy.caught(mutant, everything=everything)
        except RunError as error:
            return error
        finally:
            free.put(copy)

    with concurrent.futures.ThreadPoolExecutor(len(copies)) as pool:
        for mutant, end in zip(mutants, pool.map(caught, mutants), strict=True):
            if isinstance(end, RunError):
                nothing_shown.append(f"{mutant.name}: {end}")
                print(f"NOTHING SHOWN {mutant.name}", flush=True)
                continue
            failed, seconds = end
            found[mutant.name] = mutant, failed, seconds
            print(f"{'caught  ' if failed else 'SURVIVES'} {mutant.name} ({seconds:.0f} s)", flush=True)
    if nothing_shown:
        raise RunError("\n".join(nothing_shown))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of patches, without .patch; none runs all")
    parser.add_argument("--all", action="store_true", help="run tests/unit where the named tests notice nothing")
    parser.add_argument("--jobs", type=int, default=2, help="how many to try at a time (default: 2)")
    parser.add_argument("--check", action="store_true", help="only look whether the patches apply")
    parser.add_argument("--diff", action="store_true", help="print the patches as git takes them")
    parser.add_argument("--write", type=pathlib.Path, help="where the table goes; all patches go to RESULTS.md")
    args = parser.parse_args(argv)
    mutants = [m for m in every_mutant() if not args.names or m.name in args.names]
    broken = []
    for mutant in mutants:
        try:
            mutant.applied(ROOT)
            if args.diff:
                print(diff_of(mutant))
        except PatchError as error:
            print(f"does not apply: {error}")
            broken.append(mutant.name)
    if args.check or args.diff or broken:
        print(f"{len(mutants) - len(broken)} of {len(mutants)} patches apply", file=sys.stderr)
        return 1 if broken else 0
    with tempfile.TemporaryDirectory(prefix="mutants-of-") as directory:
        try:
            copies = [Copy(f"{directory}/{number}") for number in range(args.jobs)]
            found = tried(copies, mutants, everything=args.all)
        except RunError as error:
            print(error)
            return 1
    survivors = [name for name, (_, failed, _) in found.items() if not failed]
    target = args.write or (None if args.names else RESULTS)
    if target is not None:
        today = datetime.date.today().isoformat()
        target.parent.mkdir(parents=True, exist_ok=True)
        head = f"{len(found) - len(survivors)} of {len(found)} caught, {today}, Python {platform.python_version()}"
        target.write_text("\n".join((f"# Seeded bugs\n\nMade by `make mutants`: {head}.\n", *_rows(found))) + "\n")
    print(f"{len(survivors)} survive: {', '.join(survivors)}" if survivors else f"all {len(found)} are caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
