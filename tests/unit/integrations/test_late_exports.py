"""Saves that could not be published yet, as the trainer sees them: tried again, removed, taken over."""

from __future__ import annotations

import os
import types
from pathlib import Path
from typing import Any

import pytest

from asyncckpt.config import CheckpointerConfig, RankInfo
from asyncckpt.format.names import SaveId
from asyncckpt.integrations import _background_saver
from asyncckpt.integrations._background_saver import MAX_TRIES, BackgroundSaver
from asyncckpt.integrations._export_queue import WILL_RETRY, ExportJob
from asyncckpt.save_handle import SaveHandle, SaveReport


class Exporter:
    """Stands for the process: who has it is alive until it is killed."""

    def __init__(self) -> None:
        self.pid, self.told = 1, list[ExportJob]()

    def is_alive(self, pid: int | None) -> bool:
        return pid == self.pid

    def submit(self, job: ExportJob, fd: int, *, timeout_s: float) -> int:
        os.close(fd)
        self.told.append(job)
        return self.pid

    def close(self, timeout_s: float = 0.0) -> None:
        pass

    def fail(self, said: str = f"no room{WILL_RETRY}") -> None:
        """Say why the newest job cannot be done."""
        Path(self.told[-1].failure_path).write_text(said)

    def publish(self) -> None:
        """Do the newest job."""
        os.makedirs(self.told[-1].target, exist_ok=True)
        self.told[-1].close()

    @property
    def names(self) -> list[str]:
        return [os.path.basename(job.target) for job in self.told]


def _committed(state: Any, path: str, *, step: int) -> SaveHandle:
    save_id = SaveId(1, 2, "0" * 12)
    handle = SaveHandle(save_id=save_id, step=step, path=path)
    handle.staged.set_result(SaveReport(save_id=str(save_id), nbytes=1))
    handle.written.set_result(SaveReport(save_id=str(save_id), nbytes=1))
    return handle


@pytest.fixture
def exporter() -> Exporter:
    """One that lives."""
    return Exporter()


@pytest.fixture
def saver(exporter: Exporter, monkeypatch: pytest.MonkeyPatch) -> BackgroundSaver:
    """A saver whose saves are committed at once, and whose jobs the exporter has."""
    checkpointer = types.SimpleNamespace(
        save=_committed, config=CheckpointerConfig(), rank_info=RankInfo(0, 1), _coordination=None, attach=lambda: None
    )
    monkeypatch.setattr(_background_saver, "AsyncCheckpointer", lambda **_: checkpointer)
    monkeypatch.setattr(_background_saver, "ExporterProcess", lambda: exporter)
    return BackgroundSaver()


@pytest.fixture
def late(saver: BackgroundSaver, exporter: Exporter, tmp_path: Path) -> str:
    """The target of a save that a full disk keeps from being published."""
    target = str(tmp_path / "a")
    saver.save(target, {}, step=1)
    exporter.fail()
    assert saver.poll() == []
    return target


def test_one_that_comes_late_is_reported_once(saver: BackgroundSaver, exporter: Exporter, late: str) -> None:
    assert saver.pending() == [late] and saver.wait() == []
    exporter.publish()
    assert saver.poll() == [late] and saver.poll() == [] and saver.pending() == []


def test_one_whose_reason_found_no_room_on_the_disk_is_late_too(
    saver: BackgroundSaver, exporter: Exporter, tmp_path: Path
) -> None:
    saver.save(tmp_path / "a", {}, step=1)
    exporter.fail("")
    assert saver.poll() == [] and saver.wait() == [] and saver.pending() == [str(tmp_path / "a")]


def test_one_that_is_to_be_removed_goes_when_it_comes_late(
    saver: BackgroundSaver, exporter: Exporter, late: str
) -> None:
    saver.discard(late)
    exporter.publish()
    saver.poll()
    assert not os.path.exists(late)


def test_one_that_is_saved_again_stays_when_it_comes_late(
    saver: BackgroundSaver, exporter: Exporter, late: str
) -> None:
    saver.discard(late)
    saver.save(late, {}, step=2)
    exporter.publish()
    saver.poll()
    assert os.path.isdir(late)


def test_what_is_published_stays_while_what_is_to_replace_it_is_late(
    saver: BackgroundSaver, exporter: Exporter, tmp_path: Path
) -> None:
    saver.save(tmp_path / "old", {}, step=1)
    exporter.publish()
    assert saver.poll() == [str(tmp_path / "old")]
    saver.save(tmp_path / "new", {}, step=2)
    saver.discard(tmp_path / "old")
    exporter.fail()
    saver.poll()
    assert (tmp_path / "old").is_dir()
    exporter.publish()
    assert saver.poll() == [str(tmp_path / "new")]
    assert not (tmp_path / "old").exists()


def test_another_exporter_tries_what_a_killed_one_wanted_to_try_again(
    saver: BackgroundSaver, exporter: Exporter, late: str
) -> None:
    exporter.pid = 2
    saver.poll()
    saver.poll()
    assert exporter.names == ["a", "a"] and saver.pending() == [late]
    exporter.publish()
    assert saver.poll() == [late]


def test_one_that_kills_its_exporters_is_left_to_the_next_start(
    saver: BackgroundSaver, exporter: Exporter, late: str
) -> None:
    for _ in range(MAX_TRIES + 1):
        exporter.pid += 1
        saver.poll()
    assert exporter.names == ["a"] * MAX_TRIES and saver.pending() == []
