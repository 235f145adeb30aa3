"""Saves that could not be published yet, as the trainer sees them: tried again, removed, taken over."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import pytest

from asyncckpt.format.names import SaveId
from asyncckpt.handle import SaveHandle, SaveReport
from asyncckpt.integrations.pending_saves import MAX_TRIES, PendingSave, PendingSaves
from asyncckpt.integrations.spool import AGAIN, Job, job_for


class Exporter:
    """Stands for the process: who has it is alive until it is killed."""

    def __init__(self) -> None:
        self.pid, self.told = 1, list[str]()

    def is_alive(self, pid: int | None) -> bool:
        return pid == self.pid

    def submit(self, job: Job) -> int:
        self.told.append(os.path.basename(job.target))
        return self.pid


@pytest.fixture
def exporter() -> Exporter:
    """One that lives."""
    return Exporter()


def committed(tmp_path: pathlib.Path, name: str, exporter: Exporter) -> PendingSave:
    """Return a save that is committed, and whose job is on disk."""
    job = job_for(str(tmp_path / name), f"{name}.x.1", is_directory=True)
    os.makedirs(job.native)
    job.write()
    save_id = SaveId(1, 2, "0" * 12)
    handle = SaveHandle(save_id=save_id, step=1, path=job.native)
    handle.staged.set_result(SaveReport(save_id=str(save_id), nbytes=1))
    handle.written.set_result(SaveReport(save_id=str(save_id), nbytes=1))
    return PendingSave(job.target, handle, job, exporter.pid)


def late(tmp_path: pathlib.Path, name: str, exporter: Exporter, said: str = f"no room{AGAIN}") -> Any:
    """Return a table, and its one save, which a full disk keeps from being published."""
    table, one = PendingSaves(exporter), committed(tmp_path, name, exporter)  # type: ignore[arg-type]
    assert one.job is not None
    pathlib.Path(one.job.failure_path).write_text(said)
    table.saves.append(one)
    assert table.poll() == []
    return table, one


def publish(one: PendingSave) -> None:
    """Do what the exporter does in the end."""
    os.makedirs(one.target)
    assert one.job is not None
    one.job.close()


def test_one_that_comes_late_is_told_of_once(tmp_path: pathlib.Path, exporter: Exporter) -> None:
    table, one = late(tmp_path, "a", exporter)
    assert table.pending() == [one.target] and table.saves == []
    publish(one)
    assert table.poll() == [one.target] and table.poll() == [] and table.pending() == []


def test_one_whose_reason_found_no_room_on_the_disk_is_late_too(tmp_path: pathlib.Path, exporter: Exporter) -> None:
    table, one = late(tmp_path, "a", exporter, said="")
    assert table.pending() == [one.target]


def test_one_that_is_to_be_removed_goes_when_it_comes_late(tmp_path: pathlib.Path, exporter: Exporter) -> None:
    table, one = late(tmp_path, "a", exporter)
    table.discard(one.target)
    publish(one)
    table.poll()
    assert not os.path.exists(one.target)


def test_one_that_is_saved_again_stays_when_it_comes_late(tmp_path: pathlib.Path, exporter: Exporter) -> None:
    table, one = late(tmp_path, "a", exporter)
    table.discard(one.target)
    table.keep(one.target)
    publish(one)
    table.poll()
    assert os.path.isdir(one.target)


def test_another_exporter_tries_what_a_killed_one_wanted_to_try_again(
    tmp_path: pathlib.Path, exporter: Exporter
) -> None:
    table, one = late(tmp_path, "a", exporter)
    exporter.pid = 2
    table.poll()
    table.poll()
    assert exporter.told == ["a"] and table.pending() == [one.target]
    publish(one)
    assert table.poll() == [one.target]


def test_one_that_kills_its_exporters_is_left_to_the_next_start(tmp_path: pathlib.Path, exporter: Exporter) -> None:
    table, _ = late(tmp_path, "a", exporter)
    for _ in range(MAX_TRIES + 1):
        exporter.pid += 1
        table.poll()
    assert exporter.told == ["a"] * (MAX_TRIES - 1) and table.pending() == []
