"""ls, inspect and verify of checkpoints that several ranks saved."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from command_calls import Command
from many_ranks import save_ranks
from storage_samples import flip_byte, shard_paths

from asyncckpt import PerRank


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    w = torch.arange(40.0).reshape(10, 4)
    states = [
        {"w": w, "own": PerRank({"t": torch.ones(3), "s": r}), "step": 5, "seen": r, "tiny": torch.tensor(1)}
        for r in range(4)
    ]
    states[3]["late"] = torch.zeros(2)
    return save_ranks(tmp_path_factory.mktemp("ranks") / "c", states, step=5, block_nbytes=4096)


def rows_of(out: str) -> list[list[str]]:
    return [line.split() for line in out.splitlines() if line]


def test_inspect_shows_who_has_what_in_a_row_each(path: str, command: Command) -> None:
    code, out, _ = command("inspect", path)
    rows = rows_of(out)
    assert code == 0
    assert "world_size: 4" in out and "tensors: 7" in out
    assert ["w", "float32", "[10,", "4]", "160", "B", "4", "0-3"] in rows
    assert ["own.t@rank[0-3]", "float32", "[3]", "48", "B", "4", "0-3"] in rows
    assert ["tiny", "int64", "[]", "8", "B", "1", "0"] in rows
    assert ["late", "float32", "[2]", "8", "B", "1", "3"] in rows
    assert ["step", "5", "0-3"] in rows and ["seen", "2", "2"] in rows and ["own.s", "3", "3"] in rows


def test_inspect_as_json_tells_ranks_parts_and_boxes(path: str, command: Command) -> None:
    code, out, _ = command("inspect", "--json", path)
    found = json.loads(out)
    tensors: dict[str, Any] = {t["fqn"]: t for t in found["tensors"]}
    assert code == 0
    assert tensors["w"]["rank"] is None and tensors["own.t@rank2"]["rank"] == 2
    assert [(p["rank"], p["part"], p["offsets"], p["sizes"], p["nbytes"]) for p in tensors["w"]["pieces"]] == [
        (0, 0, [0, 0], [2, 4], 32), (1, 0, [2, 0], [3, 4], 48), (2, 0, [5, 0], [2, 4], 32), (3, 0, [7, 0], [3, 4], 48)
    ]  # fmt: skip
    assert len(tensors["w"]["shards"]) == tensors["w"]["chunks"] == 4
    assert {(o["rank"], o["value"]) for o in found["objects"] if o["fqn"] == "own.s" and o["per_rank"]} == {
        (rank, str(rank)) for rank in range(4)
    }
    assert not any(o["per_rank"] for o in found["objects"] if o["fqn"] == "seen")


def test_ls_tells_the_number_of_ranks(path: str, command: Command) -> None:
    code, out, _ = command("ls", "--json", os.path.dirname(path))
    assert code == 0 and [(r["state"], r["ranks"]) for r in json.loads(out)] == [("committed", 4)]


def test_verify_reads_every_rank_and_names_the_file_that_is_damaged(
    path: str, tmp_path: Path, command: Command
) -> None:
    code, out, _ = command("verify", path)
    assert code == 0 and "7 tensors" in out
    copy = tmp_path / "c"
    copy.mkdir()
    for name in os.listdir(path):
        (copy / name).write_bytes((Path(path) / name).read_bytes())
    shard = shard_paths(str(copy))[2]
    flip_byte(shard, os.path.getsize(shard) - 1)
    code, out, _ = command("verify", "--json", str(copy))
    (fault,) = json.loads(out)[0]["faults"]
    assert code == 3 and fault["file"] == os.path.basename(shard) and fault["fqn"] in ("w", "own.t@rank2")
