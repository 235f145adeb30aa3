"""Two ranks go on from a mirror on a new disk: what they save is newer than all that the mirror holds."""

from __future__ import annotations

import pathlib

import pytest
import rank_processes
from real_worker import DEADLINE_S, RealWorker, manifest_of

import asyncckpt
from asyncckpt import AsyncCheckpointer, RankInfo, SyncCheckpointer
from asyncckpt.errors import UnsupportedLeafError
from asyncckpt.format.names import SaveId


def epoch_of(path: pathlib.Path) -> int:
    return SaveId.parse(manifest_of(path)["save_id"]).epoch


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
                assert asyncckpt.latest_checkpoint(root, mirror=mirror) == f"{root}/step-{step}"


@pytest.mark.parametrize(
    ("how", "prepares"),
    [("restore_latest", False), ("rank 0 restores alone", False), ("rank 0 looks", True)],
)
def test_what_ranks_save_on_a_new_disk_is_newer_than_what_one_has_found_in_the_mirror(
    shared_worker: RealWorker, tmp_path: pathlib.Path, how: str, prepares: bool
) -> None:
    runs, mirror = tmp_path / "runs", tmp_path / "mirror"
    with SyncCheckpointer() as earlier:
        earlier.save({"n": 6}, mirror / "step-6", step=6)
    rank_processes.run(2, goes_on, shared_worker.endpoint, str(runs), str(mirror), how, prepares)
    newest = epoch_of(mirror / "step-6")
    assert [epoch_of(runs / f"step-{step}") for step in (7, 8, 9)] == [newest + 1] * 3
    assert asyncckpt.latest_checkpoint(runs, mirror=mirror) == str(runs / "step-9")


def misses_one(rank: int, endpoint: str, root: str, mirror: str) -> list[str]:
    """Save steps 7 to 10, of which only step 8 has a mirror, and rank 1 cannot save that one; return the ends."""
    ends = []
    assert asyncckpt.latest_checkpoint(mirror) == f"{mirror}/step-6"
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
