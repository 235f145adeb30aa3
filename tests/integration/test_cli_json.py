"""What `--json` prints is JSON, also where checkpoints hold NaN and infinities."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncckpt import CheckpointManager, SyncCheckpointer, cli

METRICS = {"loss": math.nan, "limit": math.inf, "floor": -math.inf}


@pytest.fixture(autouse=True)
def checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them in the working directory; tensors, objects and metrics hold NaN and infinities; and no worker."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    saver = SyncCheckpointer(fsync=False)
    with CheckpointManager(".", checkpointer=saver, step_format="s{step}", preemption_signal=()) as manager:
        for step in (1, 2):
            odd, number = (math.nan, math.inf) if step == 2 else (1.0, 0.1)
            state = {"nan": torch.tensor([odd]), "inf": torch.tensor([number]), "object": number, "other": odd}
            manager.save(step, state, METRICS)


def float4(byte: int) -> torch.Tensor:
    """Return two numbers of four bits each, in one byte."""
    return torch.tensor([byte], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """Return what a command prints, read as strictly as RFC 8259 has it."""
    capsys.readouterr()
    assert cli.main([*words, "--json"]) in (0, 1)
    return json.loads(capsys.readouterr().out, parse_constant=refuse)


CALLS = (
    *("ls .", "du .", "inspect s2", "inspect s2 --stats", "verify s1 s2", "diff s1 s2", "pin s1"),
    *("prune . --keep 1", "prune . --keep 1 --best limit", "gc .", "report .", "doctor ."),
    "convert s2 c --to dcp",
)


@pytest.mark.parametrize("command", CALLS)
def test_every_command_prints_json(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, *command.split())


def test_no_command_that_prints_json_is_left_out() -> None:
    needs_a_worker = {"top"}
    called = {call.split()[0] for call in CALLS}
    assert called == set(cli.COMMANDS) - {*cli.WITHOUT_JSON} - needs_a_worker, "add a call of the command to CALLS"


def test_diff_names_nan_and_infinity_and_prune_the_score(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["fqn"]: row["max_abs_difference"] for row in printed(capsys, "diff", "s1", "s2")["differences"]}
    assert rows == {"nan": "NaN", "inf": "Infinity", "object": "Infinity", "other": "NaN"}
    for metric, text in (("loss", "NaN"), ("limit", "Infinity"), ("floor", "-Infinity")):
        kept = printed(capsys, "prune", ".", "--keep", "1", "--best", metric)["kept"]
        assert {one["score"] for one in kept} == {text}


@pytest.mark.parametrize(
    ("first", "second", "apart"),
    [
        (0.1, math.inf, "inf"),
        (-math.inf, 1, "inf"),
        (1, 1.5, "0.5"),
        (0.5, 10**30, "1e+30"),
        (1, 10**400, "-"),  # no float holds it
        (True, 2, "-"),
        ("a", 2, "-"),
    ],
)
def test_diff_says_how_far_two_numbers_are_apart(
    first: Any, second: Any, apart: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with SyncCheckpointer(fsync=False) as checkpointer:
        checkpointer.save({"x": first}, "one")
        checkpointer.save({"x": second}, "two")
    assert cli.main(["diff", "one", "two"]) == 1
    assert capsys.readouterr().out.split()[-1] == apart


@pytest.mark.parametrize(
    ("first", "second", "what", "apart"),
    [
        (torch.tensor([2**53]), torch.tensor([2**53 + 1]), "value", 1.0),
        (torch.tensor([-(2**63)]), torch.tensor([2**63 - 1]), "value", 2.0**64),
        (torch.tensor([2**64 - 2], dtype=torch.uint64), torch.tensor([2**64 - 1], dtype=torch.uint64), "value", 1.0),
        (torch.tensor([2**64 - 1], dtype=torch.uint64), torch.tensor([2**63 - 1]), "dtype", 2.0**63),
        (torch.tensor([-1], dtype=torch.int8), torch.tensor([True]), "dtype", 2.0),
        (float4(0x21), float4(0x2F), "value", 6.5),  # 0.5 and -6
        (float4(0x00), float4(0x80), "bits", 0.0),
        (float4(0x21), torch.tensor([1.0]), "dtype", None),  # two numbers and one
    ],
)
def test_diff_says_how_far_two_tensors_are_apart_that_no_float_holds(
    first: torch.Tensor, second: torch.Tensor, what: str, apart: float | None, capsys: pytest.CaptureFixture[str]
) -> None:
    with SyncCheckpointer(fsync=False) as checkpointer:
        checkpointer.save({"x": first}, "one")
        checkpointer.save({"x": second}, "two")
    (row,) = printed(capsys, "diff", "one", "two")["differences"]
    assert (row["what"], row["max_abs_difference"]) == (what, apart)
