"""BackgroundSaver with a real worker and real exporters: published whole or not at all, whoever dies."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import mounts
import pytest
import rank_processes
import real_worker
import torch

import asyncckpt
from asyncckpt.errors import UnsupportedLeafError
from asyncckpt.integrations._background_saver import BackgroundSaver
from asyncckpt.integrations._capture import Pieces, capture_torch_save
from asyncckpt.integrations._export import ExporterProcess, export
from asyncckpt.integrations._export_queue import ExportJob, Kind, jobs_in


@pytest.fixture
def saver(shared_worker: real_worker.RealWorker) -> Iterator[BackgroundSaver]:
    """A saver of this test alone."""
    found = BackgroundSaver(endpoint=shared_worker.endpoint)
    yield found
    found.close(real_worker.DEADLINE_S)


def files(value: float) -> dict[str, Pieces]:
    """Return a checkpoint of a framework."""
    state = {"w": torch.full((1000,), value), "b": torch.full((3,), value, dtype=torch.int64)}
    return {"state.pt": capture_torch_save(state), "log.json": (json.dumps(value).encode(),), "sub/empty": (b"",)}


def value_at(path: Path) -> float:
    """Return what a checkpoint of `files` was made of; fails unless it is whole."""
    state = torch.load(path / "state.pt", weights_only=True)
    found = float(state["w"][0])
    assert torch.equal(state["w"], torch.full((1000,), found)) and float(state["b"][2]) == found
    assert json.loads((path / "log.json").read_text()) == found and (path / "sub" / "empty").read_bytes() == b""
    return found


def test_what_was_staged_is_published_with_its_values_of_then(saver: BackgroundSaver, tmp_path: Path) -> None:
    tensor = torch.ones(100_000)
    saver.save(tmp_path / "one", {"x.pt": capture_torch_save(tensor)}, step=1)
    tensor.zero_()
    assert saver.pending() == [str(tmp_path / "one")]
    assert saver.wait(real_worker.DEADLINE_S) == [str(tmp_path / "one")]
    assert torch.load(tmp_path / "one" / "x.pt").sum() == 100_000
    saver.close()
    assert os.listdir(tmp_path) == ["one"]


def test_a_target_is_replaced_by_the_last_save(saver: BackgroundSaver, tmp_path: Path) -> None:
    for value in range(4):
        saver.save(tmp_path / "same", files(value), step=value)
    saver.wait(real_worker.DEADLINE_S)
    assert value_at(tmp_path / "same") == 3


@pytest.mark.parametrize("name", ["x.ckpt", "é" * 120, "x" * 255])
def test_a_file_or_a_directory_is_replaced_whatever_its_name(name: str, saver: BackgroundSaver, tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        if name == "x.ckpt":
            saver.save(tmp_path / name, {"x": capture_torch_save({"v": value})}, step=1, kind="file")
        else:
            saver.save(tmp_path / name, files(value), step=1)
        path = tmp_path / name
        assert saver.wait(real_worker.DEADLINE_S) == [str(path)]
        assert torch.load(path) == {"v": value} if name == "x.ckpt" else value_at(path) == value
    saver.discard(tmp_path / name)
    assert not (tmp_path / name).exists()


def kill_exporters(monkeypatch: pytest.MonkeyPatch, times: int) -> list[int]:
    """Kill the exporter each time that it is told of a job, so many times; return the process of each job."""
    told, pids = ExporterProcess.submit, list[int]()

    def tell_and_kill(self: ExporterProcess, job: ExportJob, fd: int | None, *, timeout_s: float) -> int | None:
        pids.append(told(self, job, fd, timeout_s=timeout_s) or 0)
        if len(pids) <= times:
            os.kill(pids[-1], signal.SIGKILL)
            real_worker.wait_until(lambda: not self.is_alive(pids[-1]), "the exporter is gone")
        return pids[-1]

    monkeypatch.setattr(ExporterProcess, "submit", tell_and_kill)
    return pids


def test_killed_exporters_leave_nothing_under_the_name_and_the_next_start_publishes(
    saver: BackgroundSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kill_exporters(monkeypatch, 100)
    real_worker.written(saver.save(tmp_path / "one", files(1.0), step=1))
    assert saver.wait(real_worker.DEADLINE_S) == []
    assert "was not published" in caplog.text and not (tmp_path / "one").exists()
    assert saver.recover(tmp_path) == [str(tmp_path / "one")]
    assert value_at(tmp_path / "one") == 1.0 and os.listdir(tmp_path) == ["one"]


def test_an_exporter_that_is_killed_is_followed_by_another_that_publishes_what_it_was_told(
    saver: BackgroundSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pids = kill_exporters(monkeypatch, 1)
    saver.save(tmp_path / "one", files(1.0), step=1)
    assert saver.wait(real_worker.DEADLINE_S) == [str(tmp_path / "one")]
    assert value_at(tmp_path / "one") == 1.0 and len(set(pids)) == 2
    assert not any(record.levelname == "ERROR" for record in caplog.records)


def test_an_older_save_that_could_not_be_published_is_never_put_over_a_newer_one(
    saver: BackgroundSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_exporters(monkeypatch, 1)
    for value in (1.0, 2.0):
        saver.save(tmp_path / "same", files(value), step=1)
    saver.wait(real_worker.DEADLINE_S)
    assert value_at(tmp_path / "same") == 2.0
    saver.recover(tmp_path)
    assert value_at(tmp_path / "same") == 2.0 and os.listdir(tmp_path) == ["same"]


def test_a_save_that_fails_leaves_no_job_and_the_next_one_works(saver: BackgroundSaver, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"."):
        saver.save("/proc/nowhere/one", files(1.0), step=1)
    with pytest.raises(UnsupportedLeafError):
        saver.save(tmp_path / "one", {}, step=1, kind="dcp", state={"x": object()})
    assert not jobs_in(str(tmp_path / ".asyncckpt"))
    saver.save(tmp_path / "two", files(2.0), step=2)
    saver.wait(real_worker.DEADLINE_S)
    assert value_at(tmp_path / "two") == 2.0


def test_a_checkpoint_that_cannot_be_published_is_said_and_those_after_it_are_published(
    saver: BackgroundSaver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saver.save(tmp_path / "one", {"a": (b"1",), "a/b": (b"2",)}, step=1)  # a file, and a directory of its name
    saver.save(tmp_path / "two", files(2.0), step=2)
    assert saver.wait(real_worker.DEADLINE_S) == [str(tmp_path / "two")]
    assert value_at(tmp_path / "two") == 2.0 and not (tmp_path / "one").exists()
    assert f"{tmp_path / 'one'} was not published" in caplog.text
    for job in jobs_in(str(tmp_path / ".asyncckpt")):
        job.close()


@mounts.needs_root
def test_what_a_full_disk_kept_from_being_published_is_published_when_there_is_room(
    saver: BackgroundSaver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = torch.arange(500_000.0)
    with mounts.tmpfs(tmp_path / "disk", "size=8m") as disk:
        (disk / "other").write_bytes(bytes(4 << 20))  # 4 MB are left: enough for the snapshot, not for both
        saver.save(disk / "one", {"state.pt": capture_torch_save({"w": weights})}, step=1)
        assert saver.wait(real_worker.DEADLINE_S) == [] and saver.pending() == [str(disk / "one")]
        assert "was not published" in caplog.text and "tried again while the training lives" in caplog.text
        (disk / "other").unlink()
        found: list[str] = []
        real_worker.wait_until(lambda: bool(found.extend(saver.poll()) or found), "its publication", 90)
        assert found == [str(disk / "one")] and saver.pending() == []
        assert torch.equal(torch.load(disk / "one" / "state.pt")["w"], weights)
        saver.close(real_worker.DEADLINE_S)
        assert os.listdir(disk) == ["one"]


@mounts.needs_root
def test_a_disk_that_is_too_full_for_anything_costs_that_save_and_not_the_training(
    saver: BackgroundSaver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with mounts.tmpfs(tmp_path / "disk", "size=8m") as disk:
        with open(disk / "other", "wb", buffering=0) as other, contextlib.suppress(OSError):
            while True:
                other.write(bytes(4096))
        saver.save(disk / "one", files(1.0), step=1)
        assert saver.wait(real_worker.DEADLINE_S) == [] and saver.pending() == []
        assert f"save of step 1 to {disk / 'one'} cannot be exported: [Errno 28]" in caplog.text
        (disk / "other").unlink()
        saver.save(disk / "two", files(2.0), step=2)
        assert saver.wait(real_worker.DEADLINE_S) == [str(disk / "two")] and value_at(disk / "two") == 2.0
        saver.close(real_worker.DEADLINE_S)
        assert os.listdir(disk) == ["two"]


def _saves_and_hangs(rank: int, endpoint: str, target: str) -> None:
    saver = BackgroundSaver(endpoint=endpoint)
    saver.save(target, files(5.0), step=5)
    rank_processes.talk().say("staged")
    rank_processes.talk().hear()


def test_a_trainer_that_is_killed_right_after_staging_has_its_checkpoint_published(
    shared_worker: real_worker.RealWorker, tmp_path: Path
) -> None:
    with rank_processes.running(
        1, _saves_and_hangs, shared_worker.endpoint, str(tmp_path / "one"), group=False
    ) as ranks:
        assert ranks.receive(0) == "staged"
        ranks.kill()
    real_worker.wait_until((tmp_path / "one").exists, "the exporter publishes")
    assert value_at(tmp_path / "one") == 5.0
    real_worker.wait_until(lambda: os.listdir(tmp_path) == ["one"], "nothing else stays that stock tools may trip over")


def test_discarded_is_what_was_published_before_and_only_after_the_next_one_is(
    saver: BackgroundSaver, tmp_path: Path
) -> None:
    saver.save(tmp_path / "one", files(1.0), step=1)
    saver.wait(real_worker.DEADLINE_S)
    saver.save(tmp_path / "two", files(2.0), step=2)
    saver.discard(tmp_path / "one")
    assert (tmp_path / "one").exists() or (tmp_path / "two").exists()
    saver.wait(real_worker.DEADLINE_S)
    assert not (tmp_path / "one").exists() and value_at(tmp_path / "two") == 2.0
    saver.save(tmp_path / "three", files(3.0), step=3)
    saver.discard(tmp_path / "three")
    saver.wait(real_worker.DEADLINE_S)
    saver.poll()
    assert not (tmp_path / "three").exists() and (tmp_path / "two").exists()


def _both_save(rank: int, endpoint: str, target: str) -> list[str]:
    saver = BackgroundSaver(endpoint=endpoint)
    content = {f"rng_{rank}.json": (str(rank).encode(),)} | (dict(files(4.0)) if rank == 0 else {})
    saver.save(target, content, step=4)
    saver.close()
    return sorted(os.listdir(target)) if rank == 0 else []


def test_each_rank_adds_its_own_files(shared_worker: real_worker.RealWorker, tmp_path: Path) -> None:
    found = rank_processes.run(2, _both_save, shared_worker.endpoint, str(tmp_path / "one"))
    assert found[0] == ["log.json", "rng_0.json", "rng_1.json", "state.pt", "sub"]
    assert value_at(tmp_path / "one") == 4.0 and (tmp_path / "one" / "rng_1.json").read_text() == "1"


def _settle(rank: int, endpoint: str, target: str) -> bool:
    saver = BackgroundSaver(endpoint=endpoint)
    saver.save(target, dict(files(6.0)) if rank == 0 else {}, step=6)
    exporter = saver._saves[-1].exporter
    if exporter is not None:
        os.kill(exporter, signal.SIGSTOP)
        rank_processes.talk().say("stopped")
        rank_processes.talk().hear()
        threading.Timer(1.0, os.kill, (exporter, signal.SIGCONT)).start()
    saver.wait_all_ranks()
    is_there = os.path.isdir(target)
    saver.close()
    return is_there


def test_no_rank_goes_on_before_rank_0_has_published(shared_worker: real_worker.RealWorker, tmp_path: Path) -> None:
    with rank_processes.running(2, _settle, shared_worker.endpoint, str(tmp_path / "one")) as ranks:
        assert ranks.receive(0) == "stopped" and not (tmp_path / "one").exists()
        ranks.send(0, "go on")
        assert ranks.results() == [True, True]


@pytest.mark.parametrize("kind", ["directory", "dcp"])
@pytest.mark.parametrize("can_exchange", [True, False])
def test_an_export_that_is_killed_after_its_rename_is_not_undone_by_the_next_start(
    saver: BackgroundSaver, kind: Kind, can_exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class KilledError(Exception):
        """What stands for a SIGKILL."""

    def killed(job: ExportJob) -> None:
        raise KilledError

    if not can_exchange:
        monkeypatch.setattr("asyncckpt.interop.publish.exchange", lambda *_: False)
    monkeypatch.setattr(ExporterProcess, "submit", lambda self, job, fd, **_: os.close(fd) or 0)
    for value in (1, 2):
        state = {"value": torch.full((10,), value)} if kind == "dcp" else None
        real_worker.written(saver.save(tmp_path / "last", files(value), step=value, kind=kind, state=state))
        (job,) = jobs_in(str(tmp_path / ".asyncckpt"))
        with monkeypatch.context() as patched, pytest.raises(KilledError):
            patched.setattr(ExportJob, "close", killed)
            export(job, umask=0o077)
        assert value_at(tmp_path / "last") == value
        saver.leave()
        assert saver.recover(tmp_path) == [str(tmp_path / "last")]
        assert value_at(tmp_path / "last") == value and os.listdir(tmp_path) == ["last"]
        if kind == "dcp":
            assert asyncckpt.load(tmp_path / "last")["value"].tolist() == [value] * 10
