"""Two ranks go on from a mirror on a new disk: what they save is newer than all that the mirror holds."""

from __future__ import annotations

import pathlib

import pytest
import rank_processes
from real_worker import DEADLINE_S, RealWorker, manifest_of, running, wait_until

import asyncckpt
from asyncckpt import AsyncCheckpointer, CheckpointManager, RankInfo, SyncCheckpointer
from asyncckpt.basics.seen_saves import all_seen
from asyncckpt.errors import UnsupportedLeafError
from asyncckpt.format.names import SaveId
from tests import object_proxy


def goes_on(rank: int, endpoint: str, root: str, mirror: str, how: str, prepares: bool) -> None:
    """Save steps 7 to 9, of which only step 8 has a mirror."""
    if how == "restore_latest":
        found = asyncckpt.restore_latest(root, mirror=mirror, source="disk")
        assert found is not None and found.step == 6
    elif how == "rank 0 restores alone" and rank == 0:
        asyncckpt.restore_latest(root, mirror=mirror, source="disk", rank_info=RankInfo(0, 1))
    elif how == "rank 0 looks" and rank == 0:
        assert asyncckpt.latest_checkpoint(root, mirror=mirror) == f"{mirror}/step-6"
    with AsyncCheckpointer(endpoint=endpoint) as checkpointer:
        if prepares:
            checkpointer.prepare({"n": 0})
        for step in (7, 8, 9):
            place = f"{mirror}/step-{step}" if step == 8 else None
            handle = checkpointer.save({"n": step}, f"{root}/step-{step}", step=step, mirror=place)
            handle.written.result(DEADLINE_S)
            if handle.mirrored is not None:
                handle.mirrored.result(DEADLINE_S)
            if rank == 0:
                assert asyncckpt.latest_checkpoint(root, mirror=mirror) == f"{root}/step-{step}" or how == "nothing"


@pytest.mark.parametrize(
    ("how", "prepares", "epochs"),
    [
        ("restore_latest", False, [2, 2, 2]),
        ("rank 0 restores alone", False, [2, 2, 2]),
        ("rank 0 looks", True, [2, 2, 2]),
        ("nothing", False, [1, 2, 2]),
    ],
)
def test_what_ranks_save_on_a_new_disk_is_newer_than_the_mirror(
    shared_worker: RealWorker, tmp_path: pathlib.Path, how: str, prepares: bool, epochs: list[int]
) -> None:
    runs, mirror = tmp_path / "runs", tmp_path / "mirror"
    with SyncCheckpointer() as earlier:
        earlier.save({"n": 6}, mirror / "step-6", step=6)
    rank_processes.run(2, goes_on, shared_worker.endpoint, str(runs), str(mirror), how, prepares)
    saved = [SaveId.parse(manifest_of(runs / f"step-{step}")["save_id"]).epoch for step in (7, 8, 9)]
    assert saved == epochs
    assert asyncckpt.latest_checkpoint(runs, mirror=mirror) == str(runs / "step-9")


def misses_one(rank: int, endpoint: str, root: str, mirror: str) -> list[str]:
    """Save steps 7 to 10, of which only step 8 has a mirror, and rank 1 cannot save that one; return the ends."""
    ends = []
    with AsyncCheckpointer(endpoint=endpoint) as checkpointer:
        for step in (7, 8, 9, 10):
            place = f"{mirror}/step-{step}" if step == 8 else None
            state = {"n": object() if (rank, step) == (1, 8) else step}
            try:
                handle = checkpointer.save(state, f"{root}/step-{step}", step=step, mirror=place)
            except UnsupportedLeafError as error:
                ends.append(type(error).__name__)
            else:
                ends.append(type(handle.written.exception(DEADLINE_S)).__name__)
    return ends


def test_ranks_that_disagree_because_one_has_missed_the_mirror_agree_again(
    shared_worker: RealWorker, tmp_path: pathlib.Path
) -> None:
    runs, mirror = tmp_path / "runs", tmp_path / "mirror"
    with SyncCheckpointer() as earlier:
        earlier.save({"n": 6}, mirror / "step-6", step=6)
    ends = rank_processes.run(2, misses_one, shared_worker.endpoint, str(runs), str(mirror))
    assert [end[2:] for end in ends] == [["RanksDisagreeError", "NoneType"]] * 2, ends
    assert asyncckpt.latest_checkpoint(runs, mirror=mirror) == str(runs / "step-10")


def saves_once_rank_0_has_no_answer(rank: int, endpoint: str, root: str, options: dict[str, str]) -> None:
    """Save a step with a manager, once that of rank 0 has found out that the mirror hangs."""
    mirror, found_out = "s3://bucket/hangs", pathlib.Path(root).parent / "found out"
    with CheckpointManager(root, mirror=mirror, endpoint=endpoint, storage_options=options) as manager:
        if rank == 0:
            wait_until(lambda: mirror in all_seen(), "it was found out that the mirror hangs")
            found_out.touch()
        wait_until(found_out.exists, "rank 0 has found out")
        handle = manager.save(7, {"n": 7})
        assert handle is not None
        handle.written.result(DEADLINE_S)


def test_no_rank_waits_in_its_first_save_for_a_mirror_that_hangs(endpoint: str, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("obstore", reason="the extra cloud is not installed")
    with object_proxy.SilentServer() as silent, running(endpoint, "--drain-timeout-s=1"):
        rank_processes.run(2, saves_once_rank_0_has_no_answer, endpoint, str(tmp_path / "runs"), silent.options)
        assert silent.n_listings("hangs") == 1, f"only by rank 0's manager: {silent.asked}"
    saved = SaveId.parse(manifest_of(tmp_path / "runs" / "step-00000007")["save_id"])
    assert saved.epoch >= 490_000, "the hours since 1970"
