"""What dead workers leave beside an endpoint is bounded; what lives, and what is not ours, stays."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator

import pytest

from asyncckpt.protocol import endpoint as endpoint_module
from asyncckpt.protocol.endpoint import acquire_lock
from asyncckpt_worker.service import endpoint_lock
from asyncckpt_worker.service.endpoint_lock import claim

MINE = "f" * 16


@pytest.fixture
def directory(short_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The directory of made-up endpoints, with only three of them kept."""
    monkeypatch.setattr(endpoint_lock, "MAX_KEPT", 3)
    found = short_path / f"asyncckpt-{os.geteuid()}"
    found.mkdir(mode=0o700)
    return found


def leave(directory: pathlib.Path, stem: str, at: int, *endings: str) -> None:
    for ending in endings or ("sock", "sock.lock", "log", "log.1"):
        (directory / f"{stem}.{ending}").touch()
        os.utime(directory / f"{stem}.{ending}", (at, at))


def stems(directory: pathlib.Path) -> set[str]:
    return {p.name.partition(".")[0] for p in directory.iterdir()}


@contextlib.contextmanager
def claimed(directory: pathlib.Path) -> Iterator[None]:
    _, fd = claim(f"ipc://{directory}/{MINE}.sock")
    yield
    os.close(fd)


def test_a_new_worker_leaves_the_files_of_the_last_ones_only(directory: pathlib.Path) -> None:
    for number in range(6):
        leave(directory, f"{number:016x}", 1000 + number)
    leave(directory, f"{1:016x}", 2000, "log")  # an endpoint counts by its last file
    leave(directory, "run-0a1b2c", 1, "log")
    with claimed(directory):
        assert stems(directory) == {f"{1:016x}", f"{5:016x}", MINE}
    assert (directory / f"{MINE}.sock.lock").exists()


def test_the_files_of_a_living_worker_stay_however_old(directory: pathlib.Path) -> None:
    for number in range(6):
        leave(directory, f"{number:016x}", 1000 + number)
    held = acquire_lock(f"{directory}/{0:016x}.sock")
    assert held is not None
    os.utime(directory / f"{0:016x}.sock.lock", (1, 1))
    with claimed(directory):
        assert stems(directory) == {f"{0:016x}", f"{4:016x}", f"{5:016x}", MINE}
        assert len(list(directory.glob(f"{0:016x}.*"))) == 4
    os.close(held)


def test_files_of_other_names_stay(directory: pathlib.Path) -> None:
    for name in ("mine.sock", "mine.log", "ABCDEF0123456789.log", "run-x.txt", f"{0:017x}.log"):
        (directory / name).touch()
        os.utime(directory / name, (1, 1))
    before = {p.name for p in directory.iterdir()}
    for number in range(6):
        leave(directory, f"{number:016x}", 1000 + number)
    with claimed(directory):
        assert before <= {p.name for p in directory.iterdir()}


def test_nothing_is_removed_in_a_directory_that_a_user_chose(
    short_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_lock, "MAX_KEPT", 1)
    (short_path / "sockets").mkdir(mode=0o700)
    leave(short_path / "sockets", "0" * 16, 1)
    with claimed(short_path / "sockets"):
        assert stems(short_path / "sockets") == {"0" * 16, MINE}


def test_a_directory_that_cannot_be_tidied_does_not_keep_a_worker_from_starting(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(directory, "0" * 16, 1)

    def refused(path: str) -> int | None:
        if MINE in path:
            return acquire_lock(path)
        raise PermissionError(13, "no")

    monkeypatch.setattr(endpoint_lock, "MAX_KEPT", 1)
    monkeypatch.setattr(endpoint_lock, "acquire_lock", refused)
    with claimed(directory):
        assert stems(directory) == {"0" * 16, MINE}


def test_a_lock_whose_file_was_removed_is_taken_on_the_next_one(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real, raced = f"{directory}/w.sock", endpoint_module.fcntl.flock, []

    def flock(fd: int, how: int) -> None:
        if not raced:
            raced.append(os.unlink(f"{path}.lock"))
        real(fd, how)

    monkeypatch.setattr(endpoint_module.fcntl, "flock", flock)
    fd = acquire_lock(path)
    assert fd is not None and os.path.samestat(os.fstat(fd), os.stat(f"{path}.lock"))
    assert acquire_lock(path) is None
    os.close(fd)
