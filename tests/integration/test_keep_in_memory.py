"""`keep_in_memory="latest"` with a real worker: whatever happens to the next snapshot, the one before stays sealed."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from real_worker import DEADLINE_S, RealWorker, slots_of, wait_until

import asyncckpt
from asyncckpt import AsyncCheckpointer
from asyncckpt.memory.slot import PAGE_NBYTES, STATE_SEALED
from asyncckpt.protocol.request import decode_request
from asyncckpt.staging.cpu_copy import SlotImage

STATE = {"w": torch.arange(100_000.0)}


def snapshots(checkpointer: AsyncCheckpointer) -> list[str]:
    """Return the save ids of what lies sealed in memory."""
    found = []
    for slot in slots_of(checkpointer):
        if slot.memory.control.state == STATE_SEALED:
            sealed = slot.memory.control.read_request()
            found.append(decode_request(sealed.request, slot.memory.nbytes - PAGE_NBYTES).save_id)
    return sorted(found)


def test_a_torn_staging_leaves_the_snapshot_before_in_memory(
    worker: RealWorker, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: SlotImage, *arguments: Any) -> None:
        raise RuntimeError("the copy fails")

    with AsyncCheckpointer(endpoint=worker.endpoint, keep_in_memory="latest") as checkpointer:
        kept = checkpointer.save(STATE, tmp_path / "0").written.result(DEADLINE_S).save_id
        for n in range(3):
            with monkeypatch.context() as patch:
                patch.setattr(SlotImage, "fill", fail)
                assert checkpointer.save(STATE, tmp_path / f"bad-{n}").written.exception(DEADLINE_S) is not None
            assert snapshots(checkpointer) == [kept]
        newer = checkpointer.save(STATE, tmp_path / "1").written.result(DEADLINE_S).save_id
        assert snapshots(checkpointer) == [kept, newer]
        assert len(worker.status()["slots"]) == 2


def test_a_worker_that_dies_costs_no_snapshot(endpoint: str, worker: RealWorker, tmp_path: pathlib.Path) -> None:
    with AsyncCheckpointer(endpoint=endpoint, keep_in_memory="latest") as checkpointer:
        saves = [checkpointer.save(STATE, tmp_path / str(n)).written.result(DEADLINE_S).save_id for n in range(2)]
        worker.kill()
        saves.append(checkpointer.save(STATE, tmp_path / "2").written.result(DEADLINE_S).save_id)
        assert snapshots(checkpointer) == saves[1:]
        wait_until(lambda: len(RealWorker(endpoint).status()["slots"]) == 2, "the next worker has both")
        # It was told of the first one too, whose slot was not used again yet.
        rows = [(row["save_id"], row["phase"]) for row in RealWorker(endpoint).status()["saves"]]
        assert rows == [(save_id, "committed") for save_id in saves]
        held = asyncckpt.held_snapshots(tmp_path, endpoint=endpoint)
        assert [str(snapshot.save_id) for snapshot in held] == [saves[2], saves[1]]
        for n in (1, 2):
            assert torch.equal(checkpointer.load(tmp_path / str(n), source="memory")["w"], STATE["w"])
