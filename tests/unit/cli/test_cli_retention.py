"""`prune`, `pin`, `du` and `inspect --stats`: what they say, what they do, and what they never touch."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from command_calls import Command

torch = pytest.importorskip("torch")

from asyncckpt import SyncCheckpointer  # noqa: E402
from asyncckpt.format.names import SaveId  # noqa: E402
from asyncckpt.interop import statistics  # noqa: E402
from asyncckpt.interop.sources.detect import read_any  # noqa: E402
from asyncckpt.maintenance.policy import manager_metadata  # noqa: E402
from asyncckpt.storage.catalog import read_manifest  # noqa: E402
from asyncckpt.storage.files import Files  # noqa: E402
from asyncckpt.storage.local import LocalStore  # noqa: E402

STEPS = (10, 20, 30, 40, 50)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    with SyncCheckpointer() as checkpointer:
        for step in STEPS:
            checkpointer.save({"w": torch.full((100,), float(step))}, root / f"s{step}", step=step)
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Five checkpoints, something foreign, and no worker."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    shutil.copytree(made, tmp_path / "runs")
    (tmp_path / "runs" / "notes").mkdir()
    return tmp_path / "runs"


def found(command: Command, *words: object) -> Any:
    code, printed = command.json(*words)
    assert code == 0
    return printed


def save_id_of(path: Path) -> SaveId:
    return read_manifest(str(path), LocalStore()).save_id


def steps(root: Path) -> list[int]:
    return sorted(int(path.name[1:]) for path in root.glob("s*") if (path / "manifest.json").exists())


# ---- prune and pin


def test_prune_changes_nothing_unless_told_to_delete(root: Path, command: Command) -> None:
    before = sorted(root.rglob("*"))
    rows = found(command, "prune", root, "--keep", 2)
    assert [(r["step"], r["action"]) for r in rows["found"]] == [(10, "would go"), (20, "would go"), (30, "would go")]
    assert [r["step"] for r in rows["kept"]] == [50, 40]
    code, out, _ = command("prune", root, "--keep", 2)
    assert code == 0 and "nothing was changed" in out and sorted(root.rglob("*")) == before


def test_prune_says_what_a_rollback_left_behind(root: Path, command: Command) -> None:
    with SyncCheckpointer() as checkpointer:
        checkpointer.save(
            {"w": torch.ones(1)}, root / "s21", step=21, metadata=manager_metadata([save_id_of(root / "s20")], None)
        )
    out = command("prune", root, "--keep", 2)[1]
    left = [line.split()[2] for line in out.splitlines() if line.endswith("(abandoned by a rollback)")]
    assert left == ["30", "40", "50"]


def test_prune_removes_the_oldest_and_nothing_foreign(root: Path, command: Command) -> None:
    rows = found(command, "prune", root, "--keep", 2, "--delete")
    assert {r["action"] for r in rows["found"]} == {"removed"}
    assert steps(root) == [40, 50] and (root / "notes").is_dir()
    assert found(command, "prune", root, "--keep", 2, "--delete")["found"] == []


def test_pins_and_periods_stay_until_the_pin_is_taken_off(root: Path, command: Command) -> None:
    assert command("pin", root / "s10")[0] == 0
    assert [(r["step"], r["pinned"]) for r in found(command, "pin", "--list", root)] == [(10, True)]
    assert [r["step"] for r in found(command, "ls", root) if r["pinned"]] == [10]
    assert "(pinned)" in command("ls", root)[1]
    command("prune", root, "--keep", 1, "--keep-period", 20, "--delete")
    assert steps(root) == [10, 20, 40, 50]
    assert command("pin", "--remove", root / "s10")[0] == 0
    command("prune", root, "--keep", 1, "--keep-period", 20, "--delete")
    assert steps(root) == [20, 40, 50]


def test_what_is_not_there_cannot_be_pinned_or_pruned(root: Path, command: Command) -> None:
    assert command("pin", root / "s60")[0] == 4
    assert command("pin", "--remove", root / "s10")[0] == 4
    assert command("pin", "--list", "--remove", root)[0] == 2
    assert command("prune", root / "nothing", "--keep", 1)[0] == 4
    assert command("prune", root, "--keep", 0)[0] == 2
    assert command("prune", root, "--keep", 1, "--best", "loss")[0] == 2, "no checkpoint has that metric"
    assert command("prune", root, "--keep", 1, "--endpoint", f"ipc://{root}/w.sock")[0] in (1, 5)
    assert steps(root) == list(STEPS)


def test_nothing_goes_while_the_newest_is_not_whole(root: Path, command: Command) -> None:
    next((root / "s50").glob("*.safetensors")).unlink()
    rows = found(command, "prune", root, "--keep", 1, "--delete")["found"]
    assert {r["action"] for r in rows} == {"kept"} and steps(root) == list(STEPS)


# ---- du


def test_du_adds_up_what_is_there_committed_or_not(root: Path, command: Command) -> None:
    (root / "s50" / "manifest.json").unlink()
    shown = found(command, "du", root)
    for row in shown["checkpoints"]:
        files = [p.stat() for p in Path(row["path"]).iterdir()]
        assert (row["files"], row["nbytes"]) == (len(files), sum(f.st_size for f in files))
        assert row["allocated_nbytes"] == sum(f.st_blocks * 512 for f in files)
    totals = shown["totals"]
    assert (totals["committed"]["checkpoints"], totals["incomplete"]["checkpoints"]) == (4, 1)
    assert "asyncckpt gc" in command("du", root)[1]
    assert command("du", root / "nothing")[0] == 4


# ---- inspect --stats


def test_statistics_are_those_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "SLAB_ELEMENTS", 7)
    torch.manual_seed(3)
    state = {
        "a": torch.randn(13, 5),
        "b": (torch.randn(50) * 1e4).to(torch.bfloat16),
        "c": torch.randint(-9, 9, (31,)),
        "d": torch.tensor([True, False, False]),
        "e": torch.randn(6, dtype=torch.complex64),
        "f": torch.tensor(2.5),
        "g": torch.empty(0, 4),
    }
    with SyncCheckpointer() as checkpointer:
        checkpointer.save(state, tmp_path / "a")
    files = Files()
    shown = {saved.fqn: stats for saved, stats in statistics.statistics_of(read_any(str(tmp_path / "a"), files), files)}
    for name, tensor in state.items():
        stats, values = shown[name], (tensor.abs() if tensor.is_complex() else tensor).double().reshape(-1)
        assert stats.n == tensor.numel() and stats.zeros == int((values == 0).sum())
        if values.numel():
            assert (stats.minimum, stats.maximum) == (values.min(), values.max())
            assert stats.mean == pytest.approx(float(values.mean()))
            assert stats.std == pytest.approx(float(values.std(correction=0)), abs=1e-9)
    assert shown["g"].minimum is None is shown["g"].std


def test_what_is_no_number_is_counted_and_left_out(tmp_path: Path, command: Command) -> None:
    tensor = torch.tensor([1.0, math.nan, math.inf, -math.inf, 3.0, 0.0])
    with SyncCheckpointer() as checkpointer:
        checkpointer.save({"w": tensor, "all": torch.full((2,), math.nan)}, tmp_path / "a")
    rows = {t["fqn"]: t["stats"] for t in found(command, "inspect", "--stats", tmp_path / "a")["tensors"]}
    assert (rows["w"]["nans"], rows["w"]["infinities"], rows["w"]["zeros"]) == (1, 2, 1)
    assert (rows["w"]["minimum"], rows["w"]["maximum"], rows["w"]["mean"]) == (0.0, 3.0, pytest.approx(4 / 3))
    assert rows["all"]["mean"] is None and rows["all"]["nans"] == 2
    code, out, _ = command("inspect", "--stats", tmp_path / "a")
    assert code == 0 and out.count("INF") == 1


def test_statistics_of_float4_are_those_of_both_numbers_in_a_byte(tmp_path: Path, command: Command) -> None:
    packed = torch.tensor([0x21, 0xF0], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)  # 0.5, 1, 0, -6
    with SyncCheckpointer() as checkpointer:
        checkpointer.save({"w": packed}, tmp_path / "a")
    (row,) = (t["stats"] for t in found(command, "inspect", "--stats", tmp_path / "a")["tensors"])
    assert (row["n"], row["zeros"], row["minimum"], row["maximum"], row["mean"]) == (4, 1, -6.0, 1.0, -1.125)


def test_statistics_of_damaged_data_are_refused(root: Path, command: Command) -> None:
    shard = next((root / "s10").glob("*.safetensors"))
    fd = os.open(shard, os.O_RDWR)
    os.pwrite(fd, b"\xff", 4096 + 8)
    os.close(fd)
    assert command("inspect", root / "s10")[0] == 0
    assert command("inspect", "--stats", root / "s10")[0] == 3
