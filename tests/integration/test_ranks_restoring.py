"""restore_latest on two ranks: both take the same checkpoint, whatever only one of them finds."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rank_processes
import torch
import torch.distributed as dist
from real_worker import RealWorker
from storage_samples import flip_byte, shard_paths

import asyncckpt
from asyncckpt import restore as restoring
from asyncckpt.config import RankInfo
from asyncckpt.errors import PlanTimeoutError

ROWS = 400
GROWING = ("names", "note", "log", "pair")


def grown(step: int) -> dict[str, Any]:
    """Return containers that have more members at each step."""
    names = {f"at {n}": step for n in range(0, step, 10)}
    log = [{"loss": n} for n in range(step)]
    return {"names": names, "note": names, "log": log, "pair": (names, log)}


def target(rank: int) -> dict[str, Any]:
    """Return a target of which each rank reads its half of the rows."""
    half = torch.zeros(ROWS // 2, 500)
    return {"rows": asyncckpt.ShardedSlice(half, (ROWS, 500), (ROWS // 2 * rank, 0)), "step": -1}


def restore(rank: int, root: str, **options: Any) -> dict[str, Any]:
    """Restore, and say in plain words what came of it."""
    began, wanted = time.monotonic(), target(rank)
    said: dict[str, Any] = {}
    try:
        if rank == 1 and options.pop("unfit", False):
            wanted["rows"] = torch.zeros(3)
        options.pop("unfit", None)
        found = asyncckpt.restore_latest(root, wanted, **options)
        if found is None:
            return {"none": True, "seconds": time.monotonic() - began}
        value = wanted["rows"].tensor
        said = {"path": os.path.basename(found.path), "filled": bool((value == float(found.step)).all())}
        said["skipped"] = [(type(one.error).__name__, getattr(one.error, "rank", None)) for one in found.skipped]
        said["moved"] = [one.moved_to and os.path.basename(one.moved_to) for one in found.skipped]
    except Exception as error:
        said = {"error": type(error).__name__, "rank": getattr(error, "rank", None), "text": str(error)}
    return {**said, "seconds": time.monotonic() - began}


def _absent(rank: int, root: str) -> dict[str, Any]:
    said = {}
    if rank == 0:
        began = time.monotonic()
        with asyncckpt.SyncCheckpointer() as checkpointer, pytest.raises(PlanTimeoutError) as caught:
            checkpointer.restore_latest(root, timeout_s=1.0)
        said = {"missing": caught.value.missing_ranks, "seconds": time.monotonic() - began}
    dist.barrier()
    return said


def _elsewhere(rank: int, root: str) -> dict[str, Any]:
    return restore(rank, root if rank == 0 else root + "2")


def _with_checkpointer(rank: int, root: str) -> dict[str, Any]:
    with asyncckpt.SyncCheckpointer() as checkpointer:
        found = checkpointer.restore_latest(root)
    return {"path": os.path.basename(found.path)}


def _grown(rank: int, root: str) -> dict[str, Any]:
    """Restore into containers that are empty or short, twice: the second time missing keys are no error."""
    said = {}
    for strict in (True, False):
        wanted = {**target(rank), "names": {}, "note": None, "log": [{"loss": 0}], "pair": (None, [])}
        try:
            asyncckpt.restore_latest(root, wanted, strict=strict)
        except Exception as error:
            wanted = {"error": str(error)}
        said[strict] = {name: wanted.get(name) for name in ("error", *GROWING)}
    return said


SCENARIOS: dict[str, Callable[[int, str], dict[str, Any]]] = {
    "absent": _absent,
    "sound": restore,
    "half": lambda rank, root: restore(rank, root, quarantine=True),
    "shared": lambda rank, root: restore(rank, root, redundant_reads="broadcast"),
    "none": restore,
    "empty": restore,
    "unfit": lambda rank, root: restore(rank, root, unfit=True),
    "elsewhere": _elsewhere,
    "checkpointer": _with_checkpointer,
    "grown": _grown,
}


def _all(rank: int, base: str) -> dict[str, dict[str, Any]]:
    return {name: play(rank, f"{base}/{name}") for name, play in SCENARIOS.items()}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("restoring")
    with asyncckpt.SyncCheckpointer(fsync=False, rank_info=RankInfo(0, 1)) as checkpointer:
        for step in (10, 20):
            checkpointer.save(
                {"rows": torch.full((ROWS, 500), float(step)), "step": step, **grown(step)}, base / "one" / f"s{step}"
            )
    for name in SCENARIOS:
        shutil.copytree(base / "one", base / name)
    shutil.copytree(base / "one", base / "worker")
    for name in ("half", "shared", "checkpointer", "worker", "grown"):
        break_last_rows(base / name / "s20")
    for name in ("s10", "s20"):
        break_last_rows(base / "none" / name)
        shutil.rmtree(base / "empty" / name)
    return base


def break_last_rows(path: Path) -> None:
    """Damage what only rank 1 reads."""
    shard = shard_paths(str(path))[0]
    flip_byte(shard, os.path.getsize(shard) - 1)


@pytest.fixture(scope="module")
def said(base: Path) -> list[dict[str, dict[str, Any]]]:
    """What came of every scenario, by rank: all are played by the same two ranks, one after the other."""
    return rank_processes.run(2, _all, str(base))


Said = list[dict[str, dict[str, Any]]]


def test_ranks_take_the_newest(said: Said) -> None:
    for one in said:
        assert one["sound"]["path"] == "s20" and one["sound"]["filled"] and not one["sound"]["skipped"]


def test_what_one_rank_finds_broken_is_passed_over_by_both_and_put_aside_once(said: Said, base: Path) -> None:
    for one in said:
        assert one["half"]["path"] == "s10" and one["half"]["filled"] and one["half"]["moved"] == ["s20.broken-1"]
    assert said[0]["half"]["skipped"] == [("SharedLoadError", 1)]
    assert said[1]["half"]["skipped"] == [("CorruptCheckpointError", None)]
    assert sorted(os.listdir(base / "half")) == ["s10", "s20.broken-1"]


@pytest.mark.parametrize("strict", [True, False])
def test_containers_hold_nothing_of_a_newer_one_that_only_another_rank_finds_broken(said: Said, strict: bool) -> None:
    for one in said:
        assert one["grown"][strict] == {"error": None, **grown(10)}


def test_so_is_what_ends_a_load_that_shares_its_reads(said: Said) -> None:
    for one in said:
        assert one["shared"]["path"] == "s10" and one["shared"]["filled"] and len(one["shared"]["skipped"]) == 1


def test_none_that_all_ranks_can_load_is_the_same_error_on_all(said: Said) -> None:
    assert [one["none"]["error"] for one in said] == ["NoSoundCheckpointError"] * 2
    assert "rank 1" in said[0]["none"]["text"] and "'rows'" in said[0]["none"]["text"]


def test_all_ranks_learn_that_there_is_no_checkpoint(said: Said) -> None:
    assert [one["empty"].get("none") for one in said] == [True, True]


def test_a_target_of_one_rank_that_does_not_fit_is_passed_over_by_nobody(said: Said) -> None:
    assert [one["unfit"]["error"] for one in said] == ["SharedLoadError", "ShapeMismatchError"]
    assert said[0]["unfit"]["rank"] == 1 and "ShapeMismatchError" in said[0]["unfit"]["text"]


def test_ranks_that_restore_from_different_directories_are_told_so(said: Said) -> None:
    assert [one["elsewhere"]["error"] for one in said] == ["RanksDisagreeError"] * 2


def test_a_rank_that_does_not_come_is_named_in_time_and_the_next_call_works(said: Said) -> None:
    assert said[0]["absent"]["missing"] == [1]
    assert said[0]["absent"]["seconds"] < 50 and said[1]["sound"]["path"] == "s20"


def test_a_checkpointer_s_ranks_agree_too(said: Said) -> None:
    assert [one["checkpointer"]["path"] for one in said] == ["s10", "s10"]


def _dies(rank: int, root: str) -> dict[str, Any]:
    if rank == 1:

        def gone(*args: Any, **kw: Any) -> None:
            os._exit(1)

        restoring.DefaultReader.read = gone  # type: ignore[method-assign]
    return restore(rank, root)


def test_a_rank_that_dies_while_it_reads_ends_it_on_the_other(base: Path) -> None:
    with rank_processes.running(2, _dies, str(base / "sound")) as ranks:
        found = ranks.receive(0)
    assert found["error"] == "SharedLoadError" and found["seconds"] < 50


def _without_group(rank: int, root: str) -> tuple[str, int]:
    with asyncckpt.AsyncCheckpointer() as checkpointer:
        found = checkpointer.restore_latest(root, target(rank))
        return os.path.basename(found.path), len(found.skipped)


def test_ranks_without_a_process_group_agree_through_their_worker(base: Path, shared_worker: RealWorker) -> None:
    environ = {"ASYNCCKPT_ENDPOINT": shared_worker.endpoint}
    found = rank_processes.run(2, _without_group, str(base / "worker"), group=False, environ=environ)
    assert found == [("s10", 1), ("s10", 1)]
