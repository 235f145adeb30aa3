"""One training at a time in an output directory: refused while the other one lives, and only then."""

from __future__ import annotations

import errno
import fcntl
import gc
import json
import os
import pathlib
import shutil
import signal
import threading
import time

import pytest
from real_worker import wait_until

from asyncckpt.errors import DirectoryInUseError
from asyncckpt.manager import root_lock
from asyncckpt.manager.root_lock import ROOT_LOCK_NAME, RootLock
from tests.warm_python import WarmPython

HOLD = """
import sys
from asyncckpt.manager.root_lock import RootLock
held = RootLock(sys.argv[1])
held.take()
print("held", flush=True)
sys.stdin.read()
"""


def taken(directory: str) -> RootLock:
    lock = RootLock(directory)
    lock.take()
    return lock


def test_a_second_one_is_refused_in_the_same_process_until_the_first_has_ended(tmp_path: pathlib.Path) -> None:
    first = taken(str(tmp_path / "out"))
    with pytest.raises(DirectoryInUseError) as raised:
        taken(f"{tmp_path}/./out/")
    assert (raised.value.pid, raised.value.path) == (os.getpid(), str(tmp_path / "out"))
    taken(str(tmp_path / "other")).release()
    first.release()
    first.release()
    assert list((tmp_path / "out").iterdir()) == []
    taken(str(tmp_path / "out")).release()


def test_another_process_is_named_and_keeps_nobody_out_once_it_was_killed(
    tmp_path: pathlib.Path, warm_python: WarmPython
) -> None:
    with warm_python.talking(HOLD, str(tmp_path)) as (other, _, said):
        assert said.readline() == "held\n"
        with pytest.raises(DirectoryInUseError, match=f"process {other.pid} on ") as raised:
            taken(str(tmp_path))
        assert raised.value.pid == other.pid
    assert (tmp_path / ROOT_LOCK_NAME).exists()
    taken(str(tmp_path)).release()
    assert not (tmp_path / ROOT_LOCK_NAME).exists()


def is_refused_elsewhere(python: WarmPython, directory: pathlib.Path) -> bool:
    """Whether another process finds the directory in use."""
    return "DirectoryInUseError" in python.run(HOLD, str(directory)).stderr


def test_who_reads_the_directory_in_the_same_process_does_not_open_it_to_others(
    tmp_path: pathlib.Path, warm_python: WarmPython
) -> None:
    one = taken(str(tmp_path / "out"))
    shutil.copytree(tmp_path / "out", tmp_path / "copy")
    assert is_refused_elsewhere(warm_python, tmp_path / "out")
    one.release()
    assert not is_refused_elsewhere(warm_python, tmp_path / "out")


def test_a_forked_child_neither_keeps_the_lock_nor_gives_it_away(tmp_path: pathlib.Path) -> None:
    one = taken(str(tmp_path))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover
        try:
            one.release()
            taken(str(tmp_path))
        except DirectoryInUseError as error:
            os.write(writer, str(error.pid).encode())
            os.close(writer)
            signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    try:
        assert os.read(reader, 100) == str(os.getpid()).encode()
        assert (tmp_path / ROOT_LOCK_NAME).exists()
        one.release()
        taken(str(tmp_path)).release()
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_full_disk_keeps_nobody_from_the_lock(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, warm_python: WarmPython
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    one = taken(str(tmp_path))
    assert is_refused_elsewhere(warm_python, tmp_path)
    one.release()


def test_a_lock_that_its_holder_removes_while_it_is_opened_is_taken_anew(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, paths = os.open, list[str]()

    def open_and_remove(path: str, *rest: int) -> int:
        fd = opened(path, *rest)
        paths.append(path)
        if len(paths) == 1:
            os.unlink(path)
        return fd

    monkeypatch.setattr(os, "open", open_and_remove)
    one = taken(str(tmp_path))
    assert len(paths) == 2 and (tmp_path / ROOT_LOCK_NAME).exists()
    one.release()


def test_where_it_cannot_be_known_the_training_goes_on_and_it_is_said(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ROOT_LOCK_NAME).symlink_to(tmp_path / "elsewhere")
    taken(str(tmp_path)).release()
    assert "cannot be locked, so another training may save there too" in caplog.text
    assert os.listdir(tmp_path) == [ROOT_LOCK_NAME]


# ---- where the file system has no locks ----


@pytest.fixture(params=[errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def no_locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without file locks, on which leases are renewed and expire quickly."""

    def refused(fd: int, command: int, argument: object) -> None:
        assert command == fcntl.F_OFD_SETLK
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(root_lock.fcntl, "fcntl", refused)
    monkeypatch.setattr(root_lock, "SETTLE_S", 0.05)
    monkeypatch.setattr(root_lock, "RENEW_S", 0.05)
    monkeypatch.setattr(root_lock, "LEASE_S", 30.0)


def written_by(directory: pathlib.Path, pid: int) -> pathlib.Path:
    """A lease of another process, as it has left it."""
    lease = directory / ROOT_LOCK_NAME
    lease.write_text(json.dumps({"pid": pid, "host": "elsewhere", "token": "of it", "renewed": "000000000007"}))
    return lease


def test_a_lease_that_is_renewed_keeps_others_out_by_name(tmp_path: pathlib.Path, no_locks: None) -> None:
    one = taken(str(tmp_path))
    with pytest.raises(DirectoryInUseError, match="close what saves there first"):
        taken(str(tmp_path))
    other = written_by(tmp_path / ".." / tmp_path.name, 4711)  # it has taken ours: we had been asleep for too long
    wait_until(lambda: one.is_lost, "it is noticed")
    assert not one.renew()
    renewing = threading.Event()

    def renew() -> None:
        while not renewing.wait(0.05):
            with other.open("r+b", buffering=0) as file:  # in place, as a holder does: an emptied file is nobody's
                said = json.loads(file.read())
                file.seek(0)
                file.write(json.dumps({**said, "renewed": f"{int(said['renewed']) + 1:012d}"}).encode())

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(DirectoryInUseError) as raised:
            one.take()
        assert (raised.value.pid, raised.value.host, raised.value.path) == (4711, "elsewhere", str(tmp_path))
        with pytest.raises(DirectoryInUseError, match="process 4711 on elsewhere"):
            taken(str(tmp_path))
    finally:
        renewing.set()
        thread.join()
    one.release()
    assert other.exists(), "it is another one's"


def test_a_lease_that_is_read_while_it_is_written_is_not_taken_from_its_holder(
    tmp_path: pathlib.Path, no_locks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = json.loads(written_by(tmp_path, 4711).read_text())
    reads = iter([lease, lease, {}, {**lease, "renewed": "000000000008"}])
    monkeypatch.setattr(root_lock, "_read", lambda path: next(reads))
    with pytest.raises(DirectoryInUseError, match="process 4711 on elsewhere"):
        taken(str(tmp_path))
    assert json.loads((tmp_path / ROOT_LOCK_NAME).read_text()) == lease


def test_a_lease_of_a_dead_one_is_taken_when_it_has_run_out(
    tmp_path: pathlib.Path, no_locks: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(root_lock, "LEASE_S", 0.5)
    written_by(tmp_path, 4711)
    began = time.monotonic()
    one = taken(str(tmp_path))
    assert time.monotonic() - began >= 0.5 and not one.is_lost
    assert "process 4711 on elsewhere has a lease of it; waiting up to" in caplog.text
    assert json.loads((tmp_path / ROOT_LOCK_NAME).read_text())["pid"] == os.getpid()
    one.release()
    assert os.listdir(tmp_path) == []


def test_a_lease_that_its_holder_gives_back_is_taken_at_once(tmp_path: pathlib.Path, no_locks: None) -> None:
    lease = written_by(tmp_path, 4711)
    timer = threading.Timer(0.3, lease.unlink)
    timer.start()
    taken(str(tmp_path)).release()  # the fixture's lease lasts longer than a test may
    timer.join()


def test_of_two_that_take_a_lease_at_once_one_has_it(
    tmp_path: pathlib.Path, no_locks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    barrier, replaced = threading.Barrier(2), os.replace

    def together(source: str, target: str) -> None:
        barrier.wait(60)
        replaced(source, target)

    monkeypatch.setattr(os, "replace", together)
    monkeypatch.setattr(root_lock, "SETTLE_S", 1.0)
    found: list[object] = []

    def take() -> None:
        try:
            found.append(taken(str(tmp_path)))
        except DirectoryInUseError as error:
            found.append(error)

    threads = [threading.Thread(target=take) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    locks = [one for one in found if isinstance(one, RootLock)]
    assert len(locks) == 1 and len(found) == 2 and not locks[0].is_lost
    locks[0].release()
    assert os.listdir(tmp_path) == []


def test_a_directory_that_is_removed_and_made_again_is_taken_again(
    tmp_path: pathlib.Path, warm_python: WarmPython
) -> None:
    one = taken(str(tmp_path / "runs"))
    shutil.rmtree(tmp_path / "runs")
    assert one.is_lost
    one.take()
    assert not one.is_lost and (tmp_path / "runs" / ROOT_LOCK_NAME).exists()
    shutil.rmtree(tmp_path / "runs")
    with warm_python.talking(HOLD, str(tmp_path / "runs")) as (other, _, said):
        assert said.readline() == "held\n"
        with pytest.raises(DirectoryInUseError, match=f"process {other.pid} on "):
            one.take()
        one.release()
        assert (tmp_path / "runs" / ROOT_LOCK_NAME).exists(), "it is another one's"


def test_a_lock_that_nobody_holds_any_more_in_this_process_is_free(tmp_path: pathlib.Path) -> None:
    taken(str(tmp_path))
    gc.collect()
    taken(str(tmp_path)).release()
