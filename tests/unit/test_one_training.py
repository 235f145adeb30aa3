"""One training at a time in an output directory: refused while the other one lives, and only then."""

from __future__ import annotations

import os
import pathlib
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
