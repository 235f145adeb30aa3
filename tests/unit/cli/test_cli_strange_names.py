"""Odd names: nothing that a terminal obeys is printed, and an empty path is not taken for the current directory."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import asyncckpt
from asyncckpt.cli import main

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e"
OBEYED = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ud800-\udfff]")


@pytest.fixture
def evil(tmp_path: Path) -> list[Path]:
    """Checkpoints whose names and metadata are orders to a terminal; of ours, and of another format."""
    header = {f"w{EVIL}\ud800\n": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "__metadata__": {"a": EVIL}}
    raw = json.dumps(header).encode()
    (tmp_path / "a.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(4))
    with asyncckpt.SyncCheckpointer(fsync=False) as checkpointer:
        checkpointer.save({f"w{EVIL}": torch.ones(2), f"o{EVIL}": EVIL}, tmp_path / "c", metadata={EVIL: EVIL})
        checkpointer.save({"w": torch.ones(2)}, tmp_path / "d")
    return [tmp_path / "a.safetensors", tmp_path / "c"]


@pytest.mark.parametrize("command", ["inspect", "verify", "ls", "diff"])
def test_names_that_are_orders_to_a_terminal_are_shown_and_not_given(
    evil: list[Path], capsys: pytest.CaptureFixture[str], command: str
) -> None:
    for path in evil:
        paths = [str(path), str(path.parent / "d")] if command == "diff" else [str(path)]
        main([command, *paths])
        said = "".join(capsys.readouterr())
        assert said and not OBEYED.search(said)
        said.encode()


def test_a_message_about_a_damaged_file_is_shown_the_same_way(
    evil: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    shard = next(evil[1].glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert main(["verify", str(evil[1])]) == 3
    assert main(["inspect", str(evil[1] / EVIL)]) == 4
    assert not OBEYED.search("".join(capsys.readouterr()))


def test_a_warning_of_the_library_is_shown_the_same_way(evil: list[Path]) -> None:
    (evil[0].parent / f"x{EVIL}").mkdir()
    (evil[0].parent / f"x{EVIL}" / "manifest.json").write_text("{}")
    done = subprocess.run(
        [sys.executable, "-m", "asyncckpt", "verify", "--newest", str(evil[0].parent)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "asyncckpt verify: " in done.stderr and "is skipped" in done.stderr, done
    assert not OBEYED.search(done.stdout + done.stderr)


@pytest.mark.parametrize(
    "command",
    [
        *("ls", "du", "gc --delete", "inspect", "verify", "verify --newest", "doctor", "report", "pin", "pin --list"),
        *("prune --keep 1 --delete", "diff a", "convert --to dcp a", "report . --output", "demo --dir"),
    ],
)
def test_an_empty_path_as_of_a_variable_that_is_not_set_is_wrong_usage_and_changes_nothing(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with asyncckpt.SyncCheckpointer(fsync=False) as checkpointer:
        for name in ("a", "b"):
            checkpointer.save({"w": torch.ones(2)}, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit, match="2"):
        main([*command.split(), ""])
    assert "empty" in capsys.readouterr().err and sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', "[" * 200_000, "\ufeff{}"])
def test_a_map_of_keys_that_is_none_is_wrong_usage(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "map").write_text(text, encoding="utf-8")
    arguments = ["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--to", "dcp"]
    assert main([*arguments, "--key-map", str(tmp_path / "map")]) == 2
    assert "--key-map" in capsys.readouterr().err
