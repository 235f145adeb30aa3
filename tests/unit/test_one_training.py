"""One training at a time in an output directory: refused while the other one lives, and only then."""

from __future__ import annotations

import errno
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest

from asyncckpt.errors import DirectoryInUseError
from asyncckpt.integrations.one_training import LOCK_NAME, OneTraining

HOLD = """
import sys
from asyncckpt.integrations.one_training import OneTraining
held = OneTraining(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_one_is_refused_in_the_same_process_until_the_first_has_ended(tmp_path: pathlib.Path) -> None:
    first = OneTraining(str(tmp_path / "out"))
    with pytest.raises(DirectoryInUseError) as raised:
        OneTraining(f"{tmp_path}/./out/")
    assert (raised.value.pid, raised.value.path) == (os.getpid(), str(tmp_path / "out"))
    OneTraining(str(tmp_path / "other")).release()
    first.release()
    first.release()
    assert list((tmp_path / "out").iterdir()) == []
    OneTraining(str(tmp_path / "out")).release()


def test_another_process_is_named_and_keeps_nobody_out_once_it_was_killed(tmp_path: pathlib.Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        try:
            assert other.stdout is not None and other.stdout.readline() == b"held\n"
            with pytest.raises(DirectoryInUseError, match=f"process {other.pid} on ") as raised:
                OneTraining(str(tmp_path))
            assert raised.value.pid == other.pid
        finally:
            other.kill()
    assert (tmp_path / LOCK_NAME).exists()
    OneTraining(str(tmp_path)).release()
    assert not (tmp_path / LOCK_NAME).exists()


def is_refused_elsewhere(directory: pathlib.Path) -> bool:
    """Whether another process finds the directory in use."""
    found = subprocess.run(
        [sys.executable, "-c", HOLD, str(directory)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
    )
    return b"DirectoryInUseError" in found.stderr


def test_who_reads_the_directory_in_the_same_process_does_not_open_it_to_others(tmp_path: pathlib.Path) -> None:
    one = OneTraining(str(tmp_path / "out"))
    shutil.copytree(tmp_path / "out", tmp_path / "copy")
    assert is_refused_elsewhere(tmp_path / "out")
    one.release()
    assert not is_refused_elsewhere(tmp_path / "out")


def test_a_forked_child_neither_keeps_the_lock_nor_gives_it_away(tmp_path: pathlib.Path) -> None:
    one = OneTraining(str(tmp_path))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover
        try:
            one.release()
            OneTraining(str(tmp_path))
        except DirectoryInUseError as error:
            os.write(writer, str(error.pid).encode())
            os.close(writer)
            signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    try:
        assert os.read(reader, 100) == str(os.getpid()).encode()
        assert (tmp_path / LOCK_NAME).exists()
        one.release()
        OneTraining(str(tmp_path)).release()
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_full_disk_keeps_nobody_from_the_lock(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    one = OneTraining(str(tmp_path))
    assert is_refused_elsewhere(tmp_path)
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
    one = OneTraining(str(tmp_path))
    assert len(paths) == 2 and (tmp_path / LOCK_NAME).exists()
    one.release()


def test_where_it_cannot_be_known_the_training_goes_on_and_it_is_said(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / LOCK_NAME).symlink_to(tmp_path / "elsewhere")
    OneTraining(str(tmp_path)).release()
    assert "whether another training saves there is not known" in caplog.text
    assert os.listdir(tmp_path) == [LOCK_NAME]
