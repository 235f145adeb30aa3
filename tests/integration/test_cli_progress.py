"""The line that says how far a long command is: on a terminal, on stderr, and never between what a program reads."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

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
def checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them, in the working directory, which differ in nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TERM", "xterm")
    for period in ("_REDRAW_S", "_NEXT_LINE_S"):  # else a quick command draws what it happens to
        monkeypatch.setattr(f"asyncckpt.cli.progress.{period}", 0.0)
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


def lines_of(written: str) -> list[str]:
    """Return what a terminal shows in the end of what was written to it."""
    lines, row = [""], 0
    for order, text in re.findall("(\x1b\\[[?0-9;]*[A-Za-z]|[\r\n])|([^\x1b\r\n]+)", written):
        if order == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif order == "\x1b[1A":
            row -= 1
        elif order == "\x1b[2K":
            lines[row] = ""
        lines[row] += text
    return lines


@pytest.mark.parametrize("command", COMMANDS)
def test_a_terminal_sees_how_far_it_is_and_then_nothing_of_it(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    out, err = run(monkeypatch, COMMANDS[command], is_terminal=True)
    assert "100%" in err and "B/s" in err and "\r" not in out and "\x1b" not in out
    assert "".join(lines_of(err)).strip() == "", "the bar is cleared"


@pytest.mark.parametrize("command", COMMANDS)
def test_without_a_terminal_nothing_is_drawn(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = run(monkeypatch, COMMANDS[command], is_terminal=False)
    assert out and err == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_json_is_alone_even_on_a_terminal(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = run(monkeypatch, [*COMMANDS[command], "--json"], is_terminal=True)
    assert json.loads(out) and err == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_without_rich_a_terminal_sees_plain_lines(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"] or ["rich"]:
        monkeypatch.setitem(sys.modules, name, None)
    out, err = run(monkeypatch, COMMANDS[command], is_terminal=True)
    assert "100%" in err and "\x1b" not in err + out and "\r" not in err + out
    assert all(line.endswith("B/s") for line in err.splitlines())


@pytest.mark.parametrize(("columns", "encoding"), [("20", "utf-8"), ("80", "ascii")])
def test_a_narrow_terminal_and_one_of_ascii_only_get_a_bar_that_they_can_show(
    columns: str, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(Stream, "encoding", encoding)
    err = run(monkeypatch, ["verify", "one"], is_terminal=True)[1]
    drawn = re.sub("\x1b\\[[?0-9;]*[A-Za-z]", "", err).replace("\r", "\n").splitlines()
    assert any(line.strip() for line in drawn) and max(map(len, drawn)) <= int(columns)
    assert encoding == "utf-8" or err.isascii()
    assert not re.search("\x1b\\[[0-9;]*3[0-9]", err), "a colour, in spite of NO_COLOR"


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    err = run(monkeypatch, ["verify", "one"], is_terminal=True)[1]
    assert "100%" in err and "\x1b" not in err and "\r" not in err


def test_where_nobody_knows_how_much_there_is_the_pace_alone_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    err = run(monkeypatch, ["diff", "one", "two", "--keys", "w"], is_terminal=True)[1]
    assert "B/s" in err and "%" not in err


def test_a_fast_verify_reads_too_little_to_show(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, ["verify", "one", "--fast"], is_terminal=True)[1] == ""


def test_a_command_that_fails_clears_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shard,) = (tmp_path / "one").glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    err = Stream(is_terminal=True)
    with monkeypatch.context() as streams:
        streams.setattr(sys, "stderr", err)
        assert cli.main(["convert", "one", "made", "--to", "dcp"]) == 3
    (said,) = [line for line in lines_of(err.getvalue()) if line.strip()]
    assert "differ from their checksum" in said
