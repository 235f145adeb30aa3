"""Kills, errors and long waits at the named instants of a save that links unchanged shards.

Promises P1, P2, P3, P4 and P10: the save is whole or not listed, and the checkpoint whose files it links stays whole.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import signal
import time
from collections.abc import Callable

import pytest

from asyncckpt.basics.failpoints import observed
from asyncckpt.format.names import SaveId
from asyncckpt.storage.catalog import COMMITTED, found_at
from asyncckpt.storage.checkpoint_dir import prepare_directory
from asyncckpt.storage.commit import publish, remove_leftovers
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import LocalStore
from asyncckpt.storage.reuse.shard_history import ShardHistory
from asyncckpt.storage.verification import verify_checkpoint
from tests.failing_process import SLEEP_S, At, fail, kill
from tests.failpoint_groups import REUSED, cases
from tests.storage_samples import SAVE_ID, RecordingFiles, Snapshot, manifest_of

pytestmark = pytest.mark.fault

OLD, NEW, NEXT = (SaveId(1, sequence, SAVE_ID.run_id) for sequence in range(3))


def save(root: pathlib.Path, save_id: SaveId, history: ShardHistory) -> int:
    """Save to a directory of its own, and return how many bytes were linked. All saves have the same values."""
    path, store = str(root / str(save_id)), LocalStore(RecordingFiles())
    with Snapshot({"a": 300_000, "b": 5}, save_id=save_id, n_parts=2) as snapshot:
        prepare_directory(path, save_id=save_id, store=store, fsync=True, overwrite=False)
        result = snapshot.write(path, RecordingFiles(), history=history)
        publish(path, manifest_of(result, save_id=save_id), store=store, overwrite=False)
    remove_leftovers(path, save_id, store=store)
    return result.reused_nbytes


def is_whole(root: pathlib.Path, save_id: SaveId) -> bool:
    """Whether a save is listed; then every byte of it is verified."""
    path = str(root / str(save_id))
    found = found_at(path, LocalStore()) if os.path.isdir(path) else None
    if found is None or found.state != COMMITTED:
        return False
    assert verify_checkpoint(path, Files()).faults == []
    return True


def killed(root: pathlib.Path, history: ShardHistory, point: str) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            with observed(At(point, kill)):
                save(root, NEW, history)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert not is_whole(root, NEW)


def failed(root: pathlib.Path, history: ShardHistory, point: str) -> None:
    at = At(point, fail)
    with observed(at), pytest.raises(OSError):
        save(root, NEW, history)
    assert at.met and not is_whole(root, NEW)


def held(root: pathlib.Path, history: ShardHistory, point: str) -> None:
    at = At(point, lambda: time.sleep(SLEEP_S))
    with observed(at):
        assert save(root, NEW, history) > 300_000
    assert at.met and is_whole(root, NEW)


@pytest.mark.parametrize(
    ("disturb", "point"), [(do, point) for do, (_, point) in itertools.product((killed, failed, held), cases(REUSED))]
)
def test_a_disturbed_save_that_links_leaves_both_checkpoints_whole(
    tmp_path: pathlib.Path, disturb: Callable[[pathlib.Path, ShardHistory, str], None], point: str
) -> None:
    history = ShardHistory()
    save(tmp_path, OLD, history)
    disturb(tmp_path, history, point)
    assert is_whole(tmp_path, OLD)
    for path in (tmp_path / str(OLD)).iterdir():
        path.unlink()
    save(tmp_path, NEXT, history)
    assert is_whole(tmp_path, NEXT)
