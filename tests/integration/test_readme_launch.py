"""Starting a job, in the guide to several ranks: both ways to start a worker, and how to ask it."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
from documented_code import ROOT, blocks_in, run
from real_worker import manifest_of

COMMANDS = {
    "asyncckpt": "asyncckpt",
    "asyncckpt-worker": "asyncckpt_worker",
    "torchrun": "torch.distributed.run",
}


def scripts() -> list[str]:
    """Return the shell scripts of the section, with a fourth and a third of the steps."""
    guide = (ROOT / "docs/guides/several-ranks.md").read_text()
    found = blocks_in(guide.partition("\n## Starting the job\n")[2].partition("\n## ")[0], "sh")
    return [one.replace("--steps 40", "--steps 10").replace("--steps 60", "--steps 20") for one in found]


@pytest.fixture
def environment(endpoint_dir: Path, tmp_path: Path) -> dict[str, str]:
    """The commands by their names, installed or not, and everything else in private places."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, module in COMMANDS.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        (programs / name).chmod(0o755)
    path = os.pathsep.join([str(programs), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "XDG_RUNTIME_DIR": str(endpoint_dir), "OMP_NUM_THREADS": "1"}


def left(directory: Path) -> set[str]:
    return {p.name for p in directory.rglob("*") if not p.is_dir()}


def test_there_are_three_scripts() -> None:
    assert [s.split()[-1] for s in scripts()] == ["10", "drain", "--json"]


def test_asyncckpt_run_as_the_guide_shows_it(tmp_path: Path, environment: dict[str, str], endpoint_dir: Path) -> None:
    said = run(["bash", "-euc", scripts()[0]], tmp_path, environment)
    assert len(set(re.findall(r"rank \d: weights sha256 (\w+)", said))) == 1
    assert manifest_of(tmp_path / "runs/gpt/step-000010")["world_size"] == 2
    assert left(endpoint_dir) == set()


def test_a_worker_beside_torchrun_and_how_to_ask_it_as_the_guide_shows_them(
    tmp_path: Path, environment: dict[str, str], endpoint_dir: Path
) -> None:
    beside, ask = scripts()[1].replace("/run/user/$UID/asyncckpt", str(endpoint_dir)), scripts()[2]
    before, _, drain = beside.rstrip().rpartition("\n")
    script = f"{before}\necho ASKED\n{ask}{drain}\nwait $!"
    said = run(["bash", "-euc", script], tmp_path, environment)
    answers = said.partition("ASKED\n")[2]
    status, end = json.JSONDecoder().raw_decode(answers)
    listed, _ = json.JSONDecoder().raw_decode(answers[end:].lstrip())
    assert status["endpoint"] == f"ipc://{endpoint_dir}/train.sock"
    assert {save["phase"] for save in status["saves"]} == {"committed"}
    assert [(row["step"], row["ranks"]) for row in listed] == [(step, 2) for step in (10, 20)]
    assert left(endpoint_dir) == {"train.sock.lock"}
