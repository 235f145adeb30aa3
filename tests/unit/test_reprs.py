"""What `repr` shows of the objects that users hold, without asking a worker or another rank."""

from __future__ import annotations

import pathlib
from concurrent.futures import Future
from typing import Any

import torch

from asyncckpt import AsyncCheckpointer, CheckpointManager, RankInfo, SyncCheckpointer


class OwnProcess:
    """A `CheckpointProcess` whose saves end when the test says so."""

    def __init__(self) -> None:
        self.writes: list[Future[Any]] = []

    def write(self, staged: Any, path: str, **kw: Any) -> Future[Any]:
        self.writes.append(Future())
        return self.writes[-1]

    def close(self) -> None:
        pass


def test_a_sync_checkpointer_shows_its_rank_and_whether_it_is_closed() -> None:
    with SyncCheckpointer(rank_info=RankInfo(0, 1)) as checkpointer:
        assert repr(checkpointer) == "SyncCheckpointer(rank=0, world_size=1, closed=False)"
    assert repr(checkpointer) == "SyncCheckpointer(rank=0, world_size=1, closed=True)"


def test_an_async_checkpointer_shows_its_pending_saves_and_a_handle_its_phase(tmp_path: pathlib.Path) -> None:
    process = OwnProcess()
    with AsyncCheckpointer(checkpoint_process=process) as checkpointer:
        handle = checkpointer.save({"w": torch.ones(2)}, tmp_path / "a", step=7)
        rest = "rank=0, world_size=1, closed=False)"
        assert repr(checkpointer) == f"AsyncCheckpointer(staging='auto', pending=1, {rest}"
        assert repr(handle).startswith(f"SaveHandle(step=7, path={str(tmp_path / 'a')!r}, save_id=")
        assert repr(handle).endswith("phase='staged')")
        process.writes[0].set_result(None)
        assert repr(checkpointer) == f"AsyncCheckpointer(staging='auto', pending=0, {rest}"
        assert repr(handle).endswith("phase='written')")


def test_a_manager_shows_its_root_and_the_last_step(tmp_path: pathlib.Path) -> None:
    with CheckpointManager(tmp_path, checkpointer=SyncCheckpointer(rank_info=RankInfo(0, 1))) as manager:
        manager.save(3, {"w": torch.ones(2)})
        rest = f"root={str(tmp_path)!r}, rank=0, world_size=1, last_step=3"
        assert repr(manager) == f"CheckpointManager({rest}, closed=False)"
    assert repr(manager) == f"CheckpointManager({rest}, closed=True)"
