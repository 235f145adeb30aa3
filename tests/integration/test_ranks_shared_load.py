"""load(..., redundant_reads="broadcast"): what is read once, and that one rank's failure ends it on all."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import rank_processes
import torch
import torch.distributed as dist
from storage_samples import RecordingFiles, flip_byte, shard_paths

import asyncckpt
from asyncckpt.basics.failpoints import observed
from asyncckpt.config import RankInfo
from asyncckpt.errors import ConfigError, CorruptCheckpointError, PlanTimeoutError, SharedLoadError
from asyncckpt.loading.load import DefaultReader
from asyncckpt.loading.shared import broadcast
from tests.failing_process import ACTIONS, At

MIB = 1 << 20


def state() -> dict[str, Any]:
    torch.manual_seed(3)
    return {
        "model": {f"w{n}": torch.randn(200 + n, 300) for n in range(6)},
        "odd": torch.randn(7, 3).half(),
        "rows": torch.randn(400, 500),
        "mine": {str(n): torch.full((50_000,), float(n)) for n in range(4)},
        "lr": 0.5,
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("shared") / "c"
    with asyncckpt.SyncCheckpointer(fsync=False, rank_info=RankInfo(0, 1)) as checkpointer:
        checkpointer.save(state(), path)
    return str(path)


def target_of(rank: int, ranks: int) -> dict[str, Any]:
    """Return a target: a part of it is the same on all ranks, a part on two of them, a part on one."""
    half = 200 * (rank % 2)
    zeros = {key: torch.zeros_like(value) for key, value in state()["model"].items()}
    if rank == 1:
        zeros["w1"] = zeros["w1"].double()
        zeros["w2"] = torch.zeros(300, 202).t()
    return {
        "model": zeros,
        "odd": torch.zeros(7, 3, dtype=torch.float32 if rank == 0 else torch.float16),
        "rows": asyncckpt.ShardedSlice(torch.zeros(200, 500), (400, 500), (half, 0)),
        "mine": {str(rank): torch.zeros(50_000)},
        "lr": 0.0,
    }


def check(rank: int, found: dict[str, Any]) -> None:
    wanted = state()
    for key, value in wanted["model"].items():
        assert torch.equal(found["model"][key].float(), value)
    assert torch.equal(found["odd"].half(), wanted["odd"])
    half = 200 * (rank % 2)
    assert torch.equal(found["rows"].tensor, wanted["rows"][half : half + 200])
    assert torch.equal(found["mine"][str(rank)], wanted["mine"][str(rank)]) and found["lr"] == 0.5


def _load(rank: int, path: str, ranks: int, message_nbytes: int, options: dict[str, Any]) -> tuple[int, int]:
    broadcast.MESSAGE_NBYTES = message_nbytes
    files = RecordingFiles()
    found, _ = DefaultReader(files).read(path, target_of(rank, ranks), redundant_reads="broadcast", **options)
    check(rank, found)
    shared = sum(n for _, n in files.read_ranges if n > 64)
    alone = RecordingFiles()
    DefaultReader(alone).read(path, target_of(rank, ranks), verify=options.get("verify", True))
    return shared, sum(n for _, n in alone.read_ranges if n > 64)


@pytest.mark.parametrize(
    ("ranks", "message_nbytes", "options"),
    [(2, 16 * MIB, {"verify": False}), (4, 1 << 16, {"verify": False}), (3, 16 * MIB, {"low_memory": False})],
)
def test_what_several_ranks_want_is_read_once(
    saved: str, ranks: int, message_nbytes: int, options: dict[str, Any]
) -> None:
    found = rank_processes.run(ranks, _load, saved, ranks, message_nbytes, options)
    if not options.get("verify", True):
        files = sum(os.path.getsize(shard) for shard in shard_paths(saved))
        assert sum(shared for shared, _ in found) <= 1.1 * files
        assert sum(alone for _, alone in found) >= ranks * 0.6 * files
        assert max(shared for shared, _ in found) <= 0.75 * files  # by bytes, evenly


def _load_new(rank: int, path: str) -> None:
    found = asyncckpt.load(path, redundant_reads="broadcast")
    assert torch.equal(found["rows"], state()["rows"])
    found = asyncckpt.load(path, keys="odd", redundant_reads="broadcast")
    assert list(found) == ["odd"]


def test_a_new_dict_may_be_shared_too_and_one_load_may_follow_another(saved: str) -> None:
    rank_processes.run(2, _load_new, saved)


def test_without_a_process_group_it_is_refused(saved: str) -> None:
    with pytest.raises(ConfigError, match="process group"):
        asyncckpt.load(saved, redundant_reads="broadcast")


def test_another_word_is_refused(saved: str) -> None:
    with pytest.raises(ConfigError, match="'each' or 'broadcast'"):
        asyncckpt.load(saved, redundant_reads="once")


# ---- failures -------------------------------------------------------------------------------------------------------


def _fails(rank: int, path: str, how: str) -> tuple[str, Any, str, float]:
    began = time.monotonic()
    options: dict[str, Any] = {}
    target: Any = {"model": target_of(rank, 2)["model"]}
    if how == "strict" and rank == 1:
        target["nowhere"], options["strict"] = torch.zeros(1), True
    if how == "argument" and rank == 1:
        options["threads"] = 0
    if how == "word" and rank == 1:
        options["redundant_reads"] = "broadcats"
    if how == "absent" and rank == 1:
        return "absent", None, "", 0.0
    if how == "absent":
        broadcast.JOIN_TIMEOUT_S = 1.5
    if how == "receiving" and rank == 1:

        def broken(placement: Any) -> Any:
            def take(position: int, address: int, nbytes: int) -> None:
                raise OSError(5, "no more")

            return take

        broadcast._writer = broken
    try:
        asyncckpt.load(path, target, **{"redundant_reads": "broadcast", **options})
    except Exception as error:
        return type(error).__name__, getattr(error, "rank", None), str(error), time.monotonic() - began
    return "loaded", None, "", 0.0


def _meets(rank: int, path: str, bad: int, visit: int, action: str) -> tuple[int | None, str]:
    observer = At("load: passing on", ACTIONS[action], visit) if rank == bad else lambda point: None
    try:
        with observed(observer):
            asyncckpt.load(path, target_of(rank, 3), redundant_reads="broadcast")
    except (SharedLoadError, OSError) as error:
        return getattr(error, "rank", None), str(error)
    return None, "loaded"


@pytest.mark.parametrize("visit", [1, 4])
@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("action", ["kill", "raise", "sleep"])
def test_a_rank_that_ends_or_fails_before_it_passes_on_is_named_by_the_others(
    saved: str, bad: int, visit: int, action: str
) -> None:
    """Some of them share nothing with it, or wait for it in other rows than where it fails."""
    visit = min(visit, 3 if bad == 1 else 4)  # one message of each reader for all; ranks 0 and 2 want half the rows
    with rank_processes.running(3, _meets, saved, bad, visit, action) as ranks:
        if action == "kill":
            found = [ranks.receive(rank) for rank in range(3) if rank != bad]
            ranks.processes[bad].join(60)
        else:
            found = ranks.results()
    if action == "sleep":
        assert found == [(None, "loaded")] * 3
        return
    others = found if action == "kill" else [one for rank, one in enumerate(found) if rank != bad]
    assert [rank for rank, _ in others] == [bad] * 2, others
    assert action == "kill" or "Input/output error" in found[bad][1]


def test_damage_that_one_rank_finds_ends_the_load_on_all(tmp_path: Path) -> None:
    path = tmp_path / "c"
    with asyncckpt.SyncCheckpointer(fsync=False, rank_info=RankInfo(0, 1)) as checkpointer:
        checkpointer.save(state(), path)
    flip_byte(shard_paths(str(path))[0], 4096 + 700_000)
    found = rank_processes.run(3, _fails, str(path), "damage")
    kinds = [kind for kind, _, _, _ in found]
    assert "loaded" not in kinds and CorruptCheckpointError.__name__ in kinds
    culprit = kinds.index(CorruptCheckpointError.__name__)
    assert (
        all(rank == culprit for kind, rank, _, _ in found if kind == SharedLoadError.__name__) or len(set(kinds)) == 1
    )


@pytest.mark.parametrize(
    ("how", "error", "word"),
    [
        ("strict", "MissingKeysError", "nowhere"),
        ("argument", "ConfigError", "threads=0"),
        ("word", "ConfigError", "broadcats"),
    ],
)
def test_a_rank_that_refuses_its_target_or_arguments_tells_the_others_why(
    saved: str, how: str, error: str, word: str
) -> None:
    found = rank_processes.run(3, _fails, saved, how)
    assert [kind for kind, _, _, _ in found] == ["SharedLoadError", error, "SharedLoadError"]
    assert found[0][1] == found[2][1] == 1 and word in found[0][2]
    assert max(taken for _, _, _, taken in found) < 50


def test_a_rank_that_does_not_load_is_named(saved: str) -> None:
    found = rank_processes.run(2, _fails, saved, "absent")
    assert found[0][0] == PlanTimeoutError.__name__ and "[1]" in found[0][2] and "load(" in found[0][2]


def _again(rank: int, path: str, how: str) -> tuple[str, str]:
    join_s = broadcast.JOIN_TIMEOUT_S
    first = _fails(rank, path, how)
    broadcast.JOIN_TIMEOUT_S = join_s
    dist.barrier()
    began = time.monotonic()
    second = _fails(rank, path, "not at all")
    assert time.monotonic() - began < 50
    return first[0], second[0]


@pytest.mark.parametrize(
    ("how", "errors"), [("absent", ["PlanTimeoutError", "absent"]), ("word", ["SharedLoadError", "ConfigError"])]
)
def test_a_rank_that_has_missed_a_load_is_in_step_in_the_next(saved: str, how: str, errors: list[str]) -> None:
    assert rank_processes.run(2, _again, saved, how) == [(error, "loaded") for error in errors]


def test_a_rank_that_fails_while_it_receives_ends_the_load_on_all(saved: str) -> None:
    found = rank_processes.run(3, _fails, saved, "receiving")
    assert found[1][0] == "OSError"
    assert [(kind, rank) for kind, rank, _, _ in (found[0], found[2])] == [("SharedLoadError", 1)] * 2
    assert max(taken for _, _, _, taken in found) < 50


def _dies(rank: int, path: str) -> Any:
    if rank == 1:

        def die(*args: Any) -> Any:
            os._exit(9)

        broadcast.balance_reads = die
    return _fails(rank, path, "dies")


def test_a_rank_that_dies_ends_the_load_on_the_others(saved: str) -> None:
    with rank_processes.running(3, _dies, saved) as ranks:
        for rank in (0, 2):
            kind, culprit, _, taken = ranks.receive(rank)
            assert (kind, culprit) == ("SharedLoadError", 1) and taken < 20
