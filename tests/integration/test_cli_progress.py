"""The line that says how far a long command is: on a terminal, on stderr, and never between what a program reads."""

from __future__ import annotations

import io
import json
import pathlib
import sys

import pytest
import torch

import asyncckpt
from asyncckpt import cli

COMMANDS = {
    "verify": ["verify", "one"],
    "verify --newest": ["verify", "--newest", "."],
    "convert": ["convert", "one", "made", "--to", "dcp"],
    "inspect --stats": ["inspect", "one", "--stats"],
    "diff": ["diff", "one", "two"],
}


class Stream(io.StringIO):
    """What a command writes; a terminal or not."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.fixture(autouse=True)
def checkpoints(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them, in the working directory, which differ in nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("asyncckpt.cli.progress._REDRAW_S", 0.0)  # else a quick command draws what it happens to
    with asyncckpt.SyncCheckpointer() as checkpointer:
        for name in ("one", "two"):
            checkpointer.save({"w": torch.arange(300_000.0), "step": 1}, name)


def run(monkeypatch: pytest.MonkeyPatch, arguments: list[str], *, is_terminal: bool) -> tuple[str, str]:
    """Return what a command that goes well writes to stdout and to stderr; both are terminals, or both are not."""
    out, err = Stream(is_terminal=is_terminal), Stream(is_terminal=is_terminal)
    with monkeypatch.context() as streams:
        streams.setattr(sys, "stdout", out)
        streams.setattr(sys, "stderr", err)
        assert cli.main(arguments) == 0
    return out.getvalue(), err.getvalue()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_terminal_sees_how_far_it_is_and_then_nothing_of_it(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = run(monkeypatch, COMMANDS[command], is_terminal=True)
    assert "100%" in err and "B/s" in err and "\r" not in out
    *_, last, cursor = err.split("\r")
    assert not last.strip() and cursor == "", "the line is cleared"


@pytest.mark.parametrize("command", COMMANDS)
def test_without_a_terminal_nothing_is_drawn(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = run(monkeypatch, COMMANDS[command], is_terminal=False)
    assert out and err == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_json_is_alone_even_on_a_terminal(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = run(monkeypatch, [*COMMANDS[command], "--json"], is_terminal=True)
    assert json.loads(out) and err == ""


def test_where_nobody_knows_how_much_there_is_the_pace_alone_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    err = run(monkeypatch, ["diff", "one", "two", "--keys", "w"], is_terminal=True)[1]
    assert "B/s" in err and "%" not in err


def test_a_fast_verify_reads_too_little_to_show(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, ["verify", "one", "--fast"], is_terminal=True)[1] == ""


def test_a_command_that_fails_clears_its_line(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shard,) = (tmp_path / "one").glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    err = Stream(is_terminal=True)
    with monkeypatch.context() as streams:
        streams.setattr(sys, "stderr", err)
        assert cli.main(["convert", "one", "made", "--to", "dcp"]) == 3
    drawn, _, said = err.getvalue().rpartition("\r")
    assert not drawn.rpartition("\r")[2].strip() and "differ from their checksum" in said
