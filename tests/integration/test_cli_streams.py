"""Every command with stdout or stderr closed, full, read by nobody, or ASCII only: no traceback, and the exit codes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import asyncckpt
from asyncckpt.cli import COMMANDS

NAME = "wéight名"
NOWHERE = "ipc://{root}/../nobody.sock"

TABLE: dict[str, int] = {  # {root}: two checkpoints; {bad}: a damaged one; {new}: a name of its own
    "ls {root}": 0,
    "ls {root}/none": 4,
    "inspect {root}/a": 0,
    "du {root}": 0,
    "verify {root}/a": 0,
    "verify {bad}": 3,
    "diff {root}/a {root}/b": 1,
    "convert {root}/a {new}.pt --to torch": 0,
    "pin {root}/a": 0,
    "prune {root} --keep 5": 0,
    "gc {root}": 0,
    "report {root} -o {new}.html": 0,
    "doctor --help": 0,
    "demo --help": 0,
    "top --once --endpoint " + NOWHERE: 5,
    "worker status --endpoint " + NOWHERE: 5,
    "run --help": 0,
    "--version": 0,
    "--help": 0,
    "no-such-command": 2,
    "ls": 2,
}

ASCII = {"PYTHONIOENCODING": "ascii"}
C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
UNBUFFERED = {"PYTHONUNBUFFERED": "1"}
STREAMS: dict[str, tuple[str, dict[str, str]]] = {
    "closed stdout": (">&-", {}),
    "all closed": ("<&- >&- 2>&-", {}),
    "full stdout": (">/dev/full", {}),
    "both full": (">/dev/full 2>&1", UNBUFFERED),
    "full stdout, closed stderr": (">/dev/full 2>&-", UNBUFFERED),
    "closed stdout, full stderr": (">&- 2>/dev/full", {}),
    "nobody reads": ("pipe", UNBUFFERED),
    "C locale": ("", C_LOCALE),
}
EACH_EXIT = (
    "ls {root}", "inspect {root}/a", "verify {bad}", "ls {root}/none", "top --once --endpoint " + NOWHERE,
    "no-such-command", "--help",
)  # fmt: skip
"""One that prints for each exit code, one with names that ASCII lacks, and help: with all of `STREAMS`, which are the
same code for every command."""

SLOW = {"diff": "both full", "convert": "all closed", "report": "nobody reads"}
"""They import torch, or draw: with one."""

LOST = ("full stdout", "both full", "full stdout, closed stderr", "nobody reads")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("there") / "runs"
    root.mkdir()
    with asyncckpt.SyncCheckpointer(fsync=False) as checkpointer:
        for number, name in enumerate(("a", "b")):
            state = {NAME: torch.full((9,), float(number)), "x": 1}
            checkpointer.save(state, root / name, metadata={NAME: NAME}, step=number)
    bad = root.parent / "bad"
    shutil.copytree(root / "a", bad)
    shard = next(bad.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[4096] ^= 1
    shard.write_bytes(data)
    return root


def ended(command: str, redirection: str, environ: dict[str, str]) -> tuple[int, str]:
    """Return the exit code, and what came on both streams as far as anybody could read it."""
    shell = f'exec "$PYTHON" -m asyncckpt {command} ' + (redirection if redirection != "pipe" else "")
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        ["sh", "-c", shell],
        env={**os.environ, "PYTHON": sys.executable, "PYTHONUNBUFFERED": "", **environ},
        stdout=writing if redirection == "pipe" else subprocess.PIPE,
        stderr=subprocess.PIPE,
        timeout=120,
        check=False,
    )
    os.close(writing)
    return done.returncode, ((done.stdout or b"") + done.stderr).decode(errors="replace")


def test_every_command_is_in_the_table() -> None:
    assert {command.split()[0] for command in TABLE} >= set(COMMANDS), "add a call of the command to TABLE"


@pytest.mark.parametrize("command", TABLE)
def test_a_command_ends_in_order_whatever_its_streams_are(root: Path, command: str) -> None:
    def failure_of(streams: str) -> str | None:
        new = root.parent / f"new-{abs(hash((command, streams)))}"
        words = command.format(root=root, bad=root.parent / "bad", new=new)
        code, said = ended(words, *STREAMS[streams])
        prints = TABLE[command] not in (2, 4, 5)  # on stdout, not only on stderr
        expected = {1, TABLE[command] or 1} if prints and streams in LOST else {TABLE[command]}
        wrong = code not in expected or "Traceback" in said or "Exception ignored" in said
        made = new.with_suffix(".pt").exists() if "{new}.pt" in command else True
        return f"{streams}: code {code}, expected {expected}, {made=}; {said}" if wrong or not made else None

    few = ("all closed", "both full", "nobody reads")
    streams = STREAMS if command in EACH_EXIT else [one] if (one := SLOW.get(command.split(maxsplit=1)[0])) else few
    with ThreadPoolExecutor(2) as pool:
        failures = [failure for failure in pool.map(failure_of, streams) if failure]
    assert not failures, "\n\n".join(failures)


def test_what_ascii_cannot_say_is_escaped(root: Path) -> None:
    for environ in (ASCII, C_LOCALE):
        code, said = ended(f"inspect {root}/a", "", environ)
        assert code == 0 and NAME.encode("ascii", "backslashreplace").decode() in said and said.isascii()


def test_a_full_stdout_is_said_on_stderr_and_a_reader_that_has_gone_is_not(root: Path) -> None:
    code, said = ended(f"ls {root}", ">/dev/full", {})
    assert code == 1 and said.count("\n") == 1 and "No space left on device" in said
    for environ in ({}, UNBUFFERED):
        assert ended(f"ls {root}", "pipe", environ) == (1, "")


def test_what_a_command_opens_never_takes_the_number_of_a_closed_stream(root: Path) -> None:
    child = (
        "import os, sys; sys.exit(0 if all(os.readlink(f'/proc/self/fd/{n}') == os.devnull for n in range(3)) else 9)"
    )
    code, _ = ended(f'run -- "$PYTHON" -c "{child}"', "<&- >&- 2>&-", {"ASYNCCKPT_JOB": f"streams-{os.getpid()}"})
    assert code == 0
