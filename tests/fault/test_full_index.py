"""The disk is full exactly when a rank's index is written: the save fails with ENOSPC on every rank.

Promises P4 and P9: nothing is listed, nothing of the save is left on the full disk, and the next save works.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from asyncckpt.errors import SaveFailedError, from_wire
from asyncckpt.format.names import SaveId
from asyncckpt.storage.catalog import scan
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import LocalStore
from asyncckpt.storage.verification import verify_checkpoint
from tests.storage_samples import RecordingFiles
from tests.torch_free_client import Client, ClientSlot, Snapshot, new_save_id
from tests.worker_here import Here

pytestmark = pytest.mark.fault


class FullAtIndex(RecordingFiles):
    """One call on the index of one rank fails once, for want of room; a write takes half of the bytes first."""

    def __init__(self, method: str, rank: int) -> None:
        super().__init__()
        self._method, self._rank, self.failed = method, f"rank-{rank:05d}.", False

    def before(self, name: str, args: Sequence[Any]) -> None:
        path = self.paths.get(args[0], "") if isinstance(args[0], int) else str(args[0])
        if name != self._method or self.failed or not path.endswith(".index") or self._rank not in path:
            return
        if name == "pwrite":
            Files.pwrite(self, args[0], args[1][: len(args[1]) // 2], args[2])
        self.failed = True
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *([path] if name == "open" else []))


@contextlib.contextmanager
def two_ranks(endpoint: str) -> Iterator[list[tuple[Client, ClientSlot, Snapshot]]]:
    """Two ranks of one run, with a slot each."""
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(2):
            client = stack.enter_context(Client(endpoint, rank=rank, world_size=2))
            client.hello()
            snapshot = Snapshot(seed=rank, shard=(rank, 2))
            ranks.append((client, client.allocate(snapshot.slot_nbytes()), snapshot))
        yield ranks


def save(ranks: list[tuple[Client, ClientSlot, Snapshot]], save_id: SaveId, path: pathlib.Path) -> list[Any]:
    """Save on all ranks, and return their last rows."""
    for client, slot, snapshot in ranks:
        client.stage(slot, snapshot, save_id, str(path), step=save_id.sequence)
        client.submit(slot, save_id)
    return [client.wait(save_id) for client, _, _ in ranks]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("method", ["open", "pwrite", "fsync", "close"])
def test_a_disk_that_is_full_at_an_index_fails_the_save_on_all_ranks_and_the_next_works(
    endpoint: str, tmp_path: pathlib.Path, method: str, rank: int
) -> None:
    files = FullAtIndex(method, rank)
    with contextlib.closing(Here(endpoint, files)), two_ranks(endpoint) as ranks:
        for row in save(ranks, new_save_id(1), tmp_path / "a"):
            error = from_wire(row["error"])
            assert isinstance(error, SaveFailedError)
            assert (error.code, error.rank, error.path) == ("ENOSPC", rank, str(tmp_path / "a"))
            assert ".index" in str(error) and "free space" in str(error)
        assert files.failed
        assert [found.state for found in scan(str(tmp_path), LocalStore())] in ([], ["incomplete"])
        rows = save(ranks, new_save_id(2), tmp_path / "a")
        assert [row["phase"] for row in rows] == ["committed"] * 2
    assert verify_checkpoint(str(tmp_path / "a"), Files()).faults == []
    assert len(os.listdir(tmp_path / "a")) == 7, "the files of the save that failed are gone"
