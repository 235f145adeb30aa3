"""An overwrite meets every failure and every kill: one complete checkpoint is there afterwards, the old one or the new.

Promises P1, P3 and P10. Kills meet the storage calls in a forked child, and a worker that a torch-free client saves to.
"""

from __future__ import annotations

import errno
import os
import pathlib
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from storage_samples import SHARE, FailingFiles, RecordingFiles, Snapshot, some_of

from asyncckpt.errors import CheckpointExistsError, CommitUnknownError
from asyncckpt.format.names import LOCK_NAME, SaveId, owner_of
from asyncckpt.protocol import messages as m
from asyncckpt.storage.catalog import read_manifest, scan
from asyncckpt.storage.commit import remove_files_of, remove_leftovers
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import LocalStore
from asyncckpt.storage.verification import verify_checkpoint
from tests.killing_worker import KillingFiles
from tests.torch_free_client import Client, ClientSlot
from tests.torch_free_client import Snapshot as ClientSnapshot

pytestmark = pytest.mark.fault

LENGTHS = {"a": 700_000, "b": 700, "c": 0}
OLD, NEW, NEXT = (SaveId(1, number, "0123456789ab") for number in range(3))
ROOT = pathlib.Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / '.typing'}"}


def stands(path: pathlib.Path) -> SaveId:
    """Return the save that is committed at `path`, after a look at every byte of it."""
    assert verify_checkpoint(str(path), Files()).faults == []
    return read_manifest(str(path), LocalStore()).save_id


def overwrite(path: pathlib.Path, snapshot: Snapshot, files: Files) -> None:
    """Save as the worker does: write, publish, clean up."""
    try:
        snapshot.save(str(path), files, overwrite=True)
    except CommitUnknownError:
        raise
    except OSError:
        remove_files_of(str(path), snapshot.save_id, store=LocalStore(files))
        raise
    remove_leftovers(str(path), snapshot.save_id, store=LocalStore(files))


def owners(path: pathlib.Path) -> set[SaveId]:
    return {owner for name in os.listdir(path) if (owner := owner_of(name)) is not None}


def old_at(path: pathlib.Path) -> None:
    with Snapshot(LENGTHS, save_id=OLD, seed=1) as snapshot:
        snapshot.save(str(path), RecordingFiles())
    (path / "notes.txt").write_text("mine")


def check_after(path: pathlib.Path, following: Snapshot) -> SaveId:
    """One complete checkpoint stands; the next overwrite works and leaves its own files only, and foreign ones."""
    found = stands(path)
    assert found in (OLD, NEW)
    overwrite(path, following, RecordingFiles())
    assert stands(path) == NEXT and owners(path) == {NEXT}
    assert {n for n in os.listdir(path) if owner_of(n) is None} == {"manifest.json", "notes.txt"}
    return found


class CountingFiles(RecordingFiles):
    """Counts the calls that went well, too: some ask for what is not there."""

    well = 0

    def after(self, name: str, args: Sequence[Any]) -> None:
        self.well += 1


def number_of_calls(tmp_path: pathlib.Path, *, late: bool = False) -> int:
    files = CountingFiles()
    old_at(tmp_path / "rehearsal")
    with Snapshot(LENGTHS, save_id=NEW) as snapshot:
        overwrite(tmp_path / "rehearsal", snapshot, files)
    assert {"rename", "flock"} <= set(files.names())
    return files.well if late else len(files.calls)


CODES = [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ESTALE, errno.EINTR, errno.EINVAL]


@pytest.mark.parametrize(
    ("code", "late"), [*((code, False) for code in CODES), (errno.EIO, True), (errno.ESTALE, True)]
)
def test_a_failure_of_any_call_of_an_overwrite_leaves_one_complete_checkpoint(
    memory_path: pathlib.Path, rng: random.Random, code: int, late: bool
) -> None:
    """`late`: the call is done, and answers with an error all the same."""
    total, outcomes = number_of_calls(memory_path), dict.fromkeys(("saved", "failed", "unknown"), 0)
    with (
        Snapshot(LENGTHS, save_id=NEW) as snapshot,
        Snapshot(LENGTHS, save_id=NEXT, seed=2) as following,
    ):
        for nth in some_of(total, rng):
            path = memory_path / f"try-{nth}"
            old_at(path)
            fds = set(os.listdir("/proc/self/fd"))
            try:
                overwrite(path, snapshot, FailingFiles(code, nth=nth, wanted=lambda *_: True, late=late))
                outcome, expected = "saved", {NEW}
            except CommitUnknownError:
                outcome, expected = "unknown", {OLD, NEW}
                assert owners(path) >= {OLD, NEW}, "nothing is deleted before it is known which one stands"
            except OSError:
                outcome, expected = "failed", {OLD}
            assert set(os.listdir("/proc/self/fd")) == fds, f"call {nth} left a descriptor open"
            outcomes[outcome] += 1
            assert check_after(path, following) in expected, f"call {nth}: {outcome}"
    assert outcomes["failed"] > total // SHARE // 8, outcomes
    if SHARE == 1:
        assert outcomes["saved"], outcomes
        assert outcomes["unknown"] or code not in (errno.EIO, errno.ESTALE), outcomes


@pytest.mark.parametrize("late", [False, True])
def test_a_kill_at_any_call_of_an_overwrite_leaves_one_complete_checkpoint(
    memory_path: pathlib.Path, rng: random.Random, late: bool
) -> None:
    total, found = number_of_calls(memory_path, late=late), []
    with Snapshot(LENGTHS, save_id=NEXT, seed=2) as following:
        for nth in some_of(total, rng):
            path = memory_path / f"try-{nth}"
            old_at(path)
            pid = os.fork()
            if pid == 0:
                try:  # its own memory: a snapshot's does not come along
                    overwrite(path, Snapshot(LENGTHS, save_id=NEW), KillingFiles(nth, late=late))
                finally:
                    os._exit(0)
            _, status = os.waitpid(pid, 0)
            killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
            assert killed or nth > total - 10, f"call {nth} of {total} was never reached"
            found.append(check_after(path, following))
    assert found == sorted(found) and set(found) <= {OLD, NEW}, "the old one up to a call, the new one from there on"
    assert SHARE > 1 or len(set(found)) == 2


# ---- the worker -----------------------------------------------------------------------------------------------------


def start(endpoint: str, kill: str) -> subprocess.Popen[bytes]:
    """Start a worker that dies at `kill`, see `tests.killing_worker`; "" for one that does not."""
    command = [sys.executable, "-m", "tests.killing_worker", endpoint, kill]
    return subprocess.Popen(command, env=ENVIRONMENT, cwd=ROOT, stderr=subprocess.DEVNULL)


def ring(client: Client, slot: ClientSlot, save_id: SaveId) -> None:
    """Ring the doorbell, and wait for no answer: the worker may not live to give it."""
    client.send(m.Submit(id=client.next_id(), save_id=str(save_id), slot=slot.number, generation=slot.generation))


def save_by(endpoint: str, path: pathlib.Path, sequence: int, kill: str = "") -> str:
    """Save with `overwrite` through a worker of its own; returns how that ended."""
    snapshot = ClientSnapshot(nbytes=300_000, seed=sequence)
    with start(endpoint, kill) as process, Client(endpoint) as client:
        try:
            client.hello()
            slot = client.allocate(snapshot.slot_nbytes())
            save_id = SaveId(1, sequence, "0123456789ab")
            client.stage(slot, snapshot, save_id, str(path), overwrite=True)
            ring(client, slot, save_id)
            if kill:
                process.wait(60)
                return "killed" if process.returncode == -signal.SIGKILL else f"exit {process.returncode}"
            return str(client.wait(save_id)["phase"])
        finally:
            process.terminate()
            try:
                process.wait(60)
            finally:
                process.kill()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("method", "nth"), [("fallocate", 1), ("pwrite", 1), ("flock", 1), ("rename", 1), ("unlink", 2), ("unlink", 4)]
)
def test_a_worker_killed_while_it_overwrites_leaves_one_complete_checkpoint(
    endpoint: str, tmp_path: pathlib.Path, method: str, nth: int, late: bool
) -> None:
    path = tmp_path / "last"
    assert save_by(endpoint, path, 0) == "committed"
    assert save_by(endpoint, path, 1, f"{method}:{nth}:{signal.SIGKILL.value}:{int(late)}") == "killed"
    renamed = method == "unlink" or (method == "rename" and late)
    assert stands(path) == (NEW if renamed else OLD)
    assert [found.state for found in scan(str(tmp_path), LocalStore())] == ["committed"]
    assert save_by(endpoint, path, 2) == "committed"
    assert stands(path) == NEXT and owners(path) == {NEXT} and LOCK_NAME not in os.listdir(path)


def test_a_frozen_worker_of_an_older_run_never_replaces_a_newer_checkpoint(
    endpoint: str, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "last"
    assert save_by(endpoint, path, 0) == "committed"
    snapshot = ClientSnapshot(nbytes=300_000, seed=1)
    with start(endpoint, f"pwrite:1:{signal.SIGSTOP.value}:0") as process, Client(endpoint) as client:
        try:
            client.hello()
            slot = client.allocate(snapshot.slot_nbytes())
            client.stage(slot, snapshot, NEW, str(path), overwrite=True)
            ring(client, slot, NEW)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            with Snapshot(LENGTHS, save_id=SaveId(2, 0, "f" * 12)) as newer:
                overwrite(path, newer, RecordingFiles())
            process.send_signal(signal.SIGCONT)
            row = client.wait(NEW)
            assert row["phase"] == "failed" and row["error"]["code"] == CheckpointExistsError.wire_code
        finally:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            process.wait(60)
    assert stands(path) == SaveId(2, 0, "f" * 12) and owners(path) == {SaveId(2, 0, "f" * 12)}
