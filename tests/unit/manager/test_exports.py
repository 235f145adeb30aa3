"""Exports of a manager: which checkpoints, in which order, what a kill leaves; without the exporter's own process."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt import CheckpointManager, RankInfo, SyncCheckpointer, TensorRule
from asyncckpt.errors import ConfigError, SaveFailedError, UnsupportedPathError
from asyncckpt.format.manifest import decode_manifest
from asyncckpt.format.names import MANIFEST_NAME, SaveId, converting_name
from asyncckpt.interop import convert
from asyncckpt.interop.hf.config_files import companion_files
from asyncckpt.interop.hf.model_outline import outline_of_model
from asyncckpt.manager.export_queue import QUEUE_NAME, ExportQueue
from asyncckpt.manager.exporter import MAX_ATTEMPTS, Exporter, ExportSettings, encoded_files
from asyncckpt.manager.exports import ManagerExports
from asyncckpt.save_handle import SaveFuture, SaveHandle, SaveReport
from tests.warm_python import WarmPython

pytest.importorskip("safetensors")

CONFIG = {"model_type": "small"}


class Model(torch.nn.Module):
    """The second weight is tied to the first."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, width)
        self.head = torch.nn.Linear(width, 6, bias=False)
        self.head.weight = self.embed.weight
        self.config = dict(CONFIG)


def saved(root: Path, step: int, value: float | None = None) -> str:
    """Save the model of a step, all of it that number; return the call of its save."""
    model = Model()
    torch.nn.init.constant_(model.embed.weight, step if value is None else value)
    with SyncCheckpointer(rank_info=RankInfo(0, 1), fsync=False, overwrite=True) as checkpointer:
        checkpointer.save({"model": model.state_dict(), "step": step}, root / f"s{step}", step=step)
    data = (root / f"s{step}" / MANIFEST_NAME).read_bytes()
    return decode_manifest(data, MANIFEST_NAME).save_id.call


def settings(root: Path, **options: Any) -> ExportSettings:
    return ExportSettings(
        root=str(root),
        exports=str(root / "hf"),
        timeout_s=60.0,
        run="",
        adopted=[],
        options={"key": "model", **options},
        storage_options={},
        files=encoded_files(companion_files(config=Model())),
        model=asdict(outline_of_model(Model())),
    )


def exported(root: Path) -> dict[str, float]:
    """Return the first number of each export; each must be complete."""
    found = {}
    for name in sorted(os.listdir(root / "hf")):
        if name != QUEUE_NAME:
            assert sorted(os.listdir(root / "hf" / name)) == ["config.json", "model.safetensors"]
            assert json.loads((root / "hf" / name / "config.json").read_text())["architectures"] == ["Model"]
            state = asyncckpt.load(root / "hf" / name)
            assert list(state) == ["embed.weight"], "the tied one is written once"
            found[name] = float(state["embed.weight"][0, 0])
    return found


# ---- which checkpoints ----------------------------------------------------------------------------------------------


def exports(tmp_path: Path, every: int = 1000, **changes: Any) -> ManagerExports:
    arguments = {"to": None, "options": None, "is_leader": False, "timeout_s": 60.0, "storage_options": None, **changes}
    return ManagerExports(every, str(tmp_path), **arguments)


@pytest.mark.parametrize(
    ("steps", "due"),
    [
        ([0, 500, 1000, 1500, 2000], [1000, 2000]),
        ([370, 740, 1110, 1480, 1850, 2220], [1110, 2220]),
        ([3500, 3600, 4100], [3500, 4100]),
        ([1000, 100, 1000], [1000, 1000]),
    ],
)
def test_the_first_save_at_or_after_each_multiple_is_exported(steps: list[int], due: list[int], tmp_path: Path) -> None:
    one = exports(tmp_path)
    assert [now for last, now in zip([None, *steps], steps, strict=False) if one.is_due(now, last)] == due


# ---- the exporter ---------------------------------------------------------------------------------------------------


def test_the_newest_committed_checkpoint_is_exported_and_older_requests_are_given_up(tmp_path: Path) -> None:
    queue, exporter = ExportQueue(str(tmp_path / "hf")), Exporter(settings(tmp_path))
    for step in (1, 2, 3):
        queue.add(f"s{step}", step=step, call=saved(tmp_path, step) if step < 3 else "a save in progress")
    assert queue.names() == {"s1", "s2", "s3"}
    assert exporter.step(), "the third is left"
    assert exported(tmp_path) == {"s2": 2.0} and queue.names() == {"s3"}
    ((key, reason),) = queue.take_failures().items()
    assert key.startswith("s1.") and "step 2 is newer" in reason
    assert queue.take_failures() == {}


def test_only_the_save_that_was_requested_is_exported_and_replaces_the_earlier_export(tmp_path: Path) -> None:
    queue, exporter = ExportQueue(str(tmp_path / "hf")), Exporter(settings(tmp_path))
    queue.add("s1", step=1, call=saved(tmp_path, 1))
    assert not exporter.step()
    queue.add("s1", step=1, call="of the branch after a rollback")
    assert exporter.step() and exported(tmp_path) == {"s1": 1.0}
    queue.add("s1", step=1, call=saved(tmp_path, 1, 7.0))
    exporter.step()
    assert exported(tmp_path) == {"s1": 7.0}


def test_a_checkpoint_that_cannot_be_exported_is_named_and_the_next_one_is_exported(tmp_path: Path) -> None:
    queue, exporter = ExportQueue(str(tmp_path / "hf")), Exporter(settings(tmp_path))
    with SyncCheckpointer(rank_info=RankInfo(0, 1), fsync=False) as checkpointer:
        checkpointer.save({"model": {"other": torch.ones(2)}}, tmp_path / "s1", step=1)
    queue.add("s1", step=1, call="")
    assert not exporter.step()
    assert "UnmatchedTensorsError" in next(iter(queue.take_failures().values()))
    queue.add("s2", step=2, call=saved(tmp_path, 2))
    assert not exporter.step() and exported(tmp_path) == {"s2": 2.0}


@pytest.mark.parametrize("what", ["shard", "all"])
def test_a_checkpoint_that_is_removed_while_it_is_exported_leaves_no_export_and_the_next_one_is_made(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, exporter = ExportQueue(str(tmp_path / "hf")), Exporter(settings(tmp_path))
    queue.add("s1", step=1, call=saved(tmp_path, 1))
    write_files = convert.write_files

    def removed(*arguments: Any, **kw: Any) -> Any:
        for file in (tmp_path / "s1").iterdir():
            if what == "all" or file.suffix == ".safetensors":
                file.unlink()
        return write_files(*arguments, **kw)

    monkeypatch.setattr(convert, "write_files", removed)
    assert not exporter.step()
    (reason,) = queue.take_failures().values()
    assert "Error: " in reason and str(tmp_path / "s1") in reason
    assert exported(tmp_path) == {} and os.listdir(tmp_path / "hf") == [QUEUE_NAME]
    monkeypatch.setattr(convert, "write_files", write_files)
    queue.add("s2", step=2, call=saved(tmp_path, 2))
    assert not exporter.step() and exported(tmp_path) == {"s2": 2.0}


def test_what_an_earlier_training_has_requested_and_never_committed_is_given_up_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = ExportQueue(str(tmp_path / "hf"))
    queue.add("s1", step=1, call="never committed")
    exporter = Exporter(dataclasses.replace(settings(tmp_path), adopted=queue.adopt()))
    assert exporter.step()
    now = time.time_ns() + 61 * 10**9
    monkeypatch.setattr(time, "time_ns", lambda: now)
    assert not exporter.step()
    assert "no committed checkpoint" in next(iter(queue.take_failures().values()))


def test_what_a_training_that_has_ended_never_committed_is_given_up_in_time_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, exporter = ExportQueue(str(tmp_path / "hf")), Exporter(settings(tmp_path))
    queue.add("s1", step=1, call="never committed")
    assert exporter.step() and exporter.step(is_alone=True), "the worker may still be writing it"
    now = time.time_ns() + 61 * 10**9
    monkeypatch.setattr(time, "time_ns", lambda: now)
    assert exporter.step() and not exporter.step(is_alone=True)
    assert "no committed checkpoint" in next(iter(queue.take_failures().values()))


@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_checkpoint_that_was_committed_and_is_gone_is_not_waited_for(is_replaced: bool, tmp_path: Path) -> None:
    queue, exporter = ExportQueue(str(tmp_path / "hf")), Exporter(settings(tmp_path))
    job = queue.add("s1", step=1, call="of another save")
    if is_replaced:
        saved(tmp_path, 1)
    assert exporter.step()
    queue.committed(job.key)
    queue.add("s2", step=2, call="")
    assert not exporter.step()
    assert ["removed or replaced" in reason for reason in queue.take_failures().values()] == [True, True]
    queue.committed(job.key)
    assert not queue.names(), "a job that has ended does not come back"


def test_an_exporter_leaves_the_jobs_of_a_later_run_alone_which_does_those_it_has_found(tmp_path: Path) -> None:
    place = str(tmp_path / "hf")
    ours = settings(tmp_path)
    old, new = ExportQueue(place, "0a"), ExportQueue(place, "0b")
    old.add("s1", step=1, call=saved(tmp_path, 1))
    found = new.adopt()
    new.add("s2", step=2, call=saved(tmp_path, 2))
    old.add("s3", step=3, call=saved(tmp_path, 3))
    earlier = Exporter(dataclasses.replace(ours, run="0a"))
    later = Exporter(dataclasses.replace(ours, run="0b", adopted=found))
    assert not later.step() and exported(tmp_path) == {"s2": 2.0}, "step 1 is older"
    assert not earlier.step() and exported(tmp_path) == {"s2": 2.0, "s3": 3.0}


def test_an_export_that_failed_on_a_full_disk_is_not_reported_as_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "asyncckpt")
    one, queue = leader(tmp_path), ExportQueue(str(tmp_path / "hf"))
    for step in (1, 2):
        one.request(f"s{step}", step, None)
    first, second = queue.jobs()
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", refused)
        queue.fail(first.key, "SaveFailedError: ENOSPC")
    queue.end(second.key)
    assert not one.poll() and "exported" not in caplog.text
    assert "export of step 1" in caplog.text and "why is unknown" in caplog.text
    assert "export of step 2" in caplog.text and "it is not there" in caplog.text


def test_rules_and_a_dtype_reach_the_exporter(tmp_path: Path) -> None:
    rule = {"sources": "embed.weight", "targets": ["left", "right"], "dim": 1}
    queue = ExportQueue(str(tmp_path / "hf"))
    exporter = Exporter(settings(tmp_path, rules=[rule], dtype="bfloat16", key_map={"none": "none"}))
    queue.add("s1", step=1, call=saved(tmp_path, 1))
    exporter.step()
    found = asyncckpt.load(tmp_path / "hf" / "s1")
    assert found.keys() == {"left", "right"} and found["left"].dtype == torch.bfloat16


KILLED = """
import importlib, os, signal, sys
from asyncckpt.manager.exporter import Exporter, ExportSettings
import json
module, step = importlib.import_module(sys.argv[2]), sys.argv[3]
def killed(*arguments, **kw):
    os.kill(os.getpid(), signal.SIGKILL)
owner, _, name = step.rpartition(".")
setattr(getattr(module, owner) if owner else module, name, killed)
Exporter(ExportSettings(**json.load(open(sys.argv[1])))).step()
"""


@pytest.mark.parametrize(
    ("module", "step", "is_there"),
    [
        ("asyncckpt.interop.hf.export", "config_of", False),
        ("asyncckpt.interop.convert", "verify_structure", False),
        ("asyncckpt.interop.convert", "verify_bytes", False),
        ("asyncckpt.interop.convert", "put_into_place", False),
        ("asyncckpt.interop.publish", "fsync_directory", True),
        ("asyncckpt.manager.export_queue", "ExportQueue.end", True),
    ],
)
def test_a_kill_leaves_no_export_or_a_complete_one_and_the_next_exporter_goes_on(
    module: str, step: str, is_there: bool, tmp_path: Path, warm_python: WarmPython
) -> None:
    queue, ours = ExportQueue(str(tmp_path / "hf")), settings(tmp_path)
    queue.add("s1", step=1, call=saved(tmp_path, 1))
    (tmp_path / "settings.json").write_bytes(ours.encode())
    done = warm_python.run(KILLED, str(tmp_path / "settings.json"), module, step, timeout_s=60.0)
    assert done.returncode == -signal.SIGKILL
    visible = [name for name in os.listdir(tmp_path / "hf") if not name.startswith(".")]
    assert visible == (["s1"] if is_there else []) and queue.names() == {"s1"}
    if is_there:
        assert asyncckpt.load(tmp_path / "hf" / "s1")["embed.weight"][0, 0] == 1
    assert not Exporter(ours).step()
    assert exported(tmp_path) == {"s1": 1.0} and queue.take_failures() == {}


def test_a_checkpoint_whose_export_kills_is_given_up(tmp_path: Path) -> None:
    queue, exporter = ExportQueue(str(tmp_path / "hf")), Exporter(settings(tmp_path))
    queue.add("s1", step=1, call=saved(tmp_path, 1))
    for _ in range(MAX_ATTEMPTS):
        (job,) = queue.jobs()
        assert queue.begin(job)
    assert not exporter.step()
    assert f"killed {MAX_ATTEMPTS} times" in next(iter(queue.take_failures().values()))
    assert exported(tmp_path) == {}


@pytest.mark.parametrize("why", ["killed too often", "a newer one", "never committed"])
def test_what_a_killed_export_has_left_goes_with_its_job(why: str, tmp_path: Path) -> None:
    queue = ExportQueue(str(tmp_path / "hf"))
    exporter = Exporter(dataclasses.replace(settings(tmp_path), timeout_s=0.0))
    job = queue.add("s1", step=1, call=saved(tmp_path, 1) if why != "never committed" else "none")
    (tmp_path / "hf" / converting_name("s1", "0" * 12)).mkdir()
    if why == "a newer one":
        queue.add("s2", step=2, call=saved(tmp_path, 2))
    for _ in range(MAX_ATTEMPTS if why == "killed too often" else 0):
        queue.begin(job)
    assert not exporter.step(is_alone=True) and queue.take_failures()
    assert sorted(os.listdir(tmp_path / "hf")) == [QUEUE_NAME, *(["s2"] if why == "a newer one" else [])]


@pytest.mark.parametrize("what", ["a checkpoint", "something else"])
def test_only_an_earlier_export_is_replaced(what: str, tmp_path: Path) -> None:
    queue, exporter = ExportQueue(str(tmp_path / "hf")), Exporter(settings(tmp_path))
    queue.add("s1", step=1, call=saved(tmp_path, 1))
    if what == "a checkpoint":
        shutil.copytree(tmp_path / "s1", tmp_path / "hf" / "s1")
    else:
        (tmp_path / "hf" / "s1").mkdir()
        (tmp_path / "hf" / "s1" / "x").write_text("of the user")
    before = sorted(os.listdir(tmp_path / "hf" / "s1"))
    assert not exporter.step()
    assert "CheckpointExistsError" in next(iter(queue.take_failures().values()))
    assert sorted(os.listdir(tmp_path / "hf" / "s1")) == before


def test_checkpoints_of_two_roots_are_not_exported_to_one_directory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = leader(tmp_path / "a", to=tmp_path / "hf"), leader(tmp_path / "b", to=tmp_path / "hf")
    for exporting in (one, two):
        exporting.request("s1", 1, None)
    assert len(ExportQueue(str(tmp_path / "hf")).open_keys()) == 1 and one.poll() and not two.poll()
    assert f"has the exports of another root, '{tmp_path}/a'" in caplog.text


def test_a_root_may_be_moved_with_its_exports(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    leader(tmp_path / "a").request("s1", 1, None)
    os.rename(tmp_path / "a", tmp_path / "b")
    leader(tmp_path / "b").request("s2", 2, None)
    assert ExportQueue(str(tmp_path / "b" / "hf")).names() == {"s1", "s2"} and not caplog.records


def test_only_leftovers_of_the_same_checkpoint_are_removed(tmp_path: Path) -> None:
    queue, exporter = ExportQueue(str(tmp_path / "hf")), Exporter(settings(tmp_path))
    queue.add("s1", step=1, call=saved(tmp_path, 1))
    other = converting_name("s1.5", "0" * 12)
    for name in (converting_name("s1", "0" * 12), other):
        (tmp_path / "hf" / name).mkdir()
    exporter.step()
    assert sorted(os.listdir(tmp_path / "hf")) == [QUEUE_NAME, other, "s1"]


def test_one_exporter_works_at_a_time(tmp_path: Path) -> None:
    queue = ExportQueue(str(tmp_path / "hf"))
    fd = queue.lock()
    assert fd is not None and queue.lock() is None
    os.close(fd)
    again = queue.lock()
    assert again is not None
    os.close(again)


def test_files_that_are_no_jobs_fail_and_lead_nowhere(tmp_path: Path) -> None:
    queue = ExportQueue(str(tmp_path / "hf"))
    queue.make()
    place = tmp_path / "hf" / QUEUE_NAME
    job = json.dumps({"step": 1, "call": "", "created_ns": 1})
    for name, text in {
        "...job": job,
        "a.0.job": "{",
        "b.0.job": "[]",
        "c.0.job": "{}",
        "d.0.job": "",
        ".job": job,
    }.items():
        (place / name).write_text(text)
    assert queue.jobs() == [] and not queue.names(), "retention keeps nothing for them"
    assert all("unreadable" in reason for reason in queue.take_failures().values())
    assert list(place.iterdir()) == [] and os.listdir(tmp_path) == ["hf"]


# ---- what must not disturb the training ------------------------------------------------------------------------------


class NoProcess:
    """In the place of an exporter: none can be started, or it ends at once."""

    is_running = False

    def start(self, *arguments: Any, **kw: Any) -> None:
        pass

    def wake(self) -> None:
        pass

    def close(self, timeout_s: float) -> None:
        pass


def leader(tmp_path: Path, **changes: Any) -> ManagerExports:
    """Return the exports of a manager on rank 0, that has begun; its exporter ends at once."""
    one = exports(tmp_path, 1, is_leader=True, options={"config": CONFIG, "key": "model"}, **changes)
    one._process = NoProcess()  # type: ignore[assignment]
    one.prepare({}, is_due=True)
    return one


def refused(*arguments: Any, **kw: Any) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_while_one_is_exported_only_the_newest_waits_so_that_the_disk_does_not_fill_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, queue = leader(tmp_path), ExportQueue(str(tmp_path / "hf"))
    lock = queue.lock()
    assert lock is not None
    with open(lock, "rb"):  # as if an exporter were at work
        one.request("s1", 1, None)
        (job,) = queue.jobs()
        assert queue.begin(job)
        for step in (2, 3, 4):
            one.request(f"s{step}", step, None)
        assert one.poll()
        assert queue.names() == one.busy() == {"s1", "s4"}
        assert caplog.text.count("step 4 is newer") == 2


def test_a_queue_that_became_read_only_fails_neither_a_save_nor_the_end_of_the_manager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = leader(tmp_path)
    one.request("s1", 1, None)
    with monkeypatch.context() as broken:
        for call in ("unlink", "replace", "rename"):
            broken.setattr(os, call, refused)
        for _ in range(4 * MAX_ATTEMPTS):
            one.prepare({}, is_due=True)
        one._ended("s1.0", failed_save())
        one.close(0.0)
    assert "Read-only" in caplog.text and one.poll()
    for _ in range(2 * MAX_ATTEMPTS):
        one.prepare({}, is_due=True)
    assert not one.poll() and "the exporter has ended 4 times" in caplog.text


def failed_save() -> SaveFuture:
    future = SaveFuture()
    future.set_exception(SaveFailedError("of no disk", code="EIO"))
    return future


def test_a_save_that_has_failed_is_made_up_for_before_its_callbacks_have_run(tmp_path: Path) -> None:
    one = exports(tmp_path, 10, is_leader=True, options={"config": CONFIG, "key": "model"})
    one._process = NoProcess()  # type: ignore[assignment]
    one.prepare({}, is_due=True)
    handles = [SaveHandle(step=n, path=f"/r/s{n}", save_id=SaveId(1, n, "0" * 12)) for n in (10, 11)]
    seen = list[bool]()
    handles[0].written.add_done_callback(lambda _: seen.append(one.is_due(11, 10)))  # before that of the request
    one.request("s10", 10, handles[0])
    assert not one.is_due(11, 10)
    handles[0].written.set_exception(SaveFailedError("of no disk", code="EIO"))
    assert seen == [True] and one.busy() == set()
    one.request("s11", 11, handles[1])
    handles[1].written.set_result(SaveReport(save_id="", nbytes=0))
    assert not one.is_due(12, 11) and one.busy() == {"s11"}


class SavedConfig:
    """A config as that of transformers, which writes itself into a directory."""

    def save_pretrained(self, directory: str) -> None:
        Path(directory, "config.json").write_text(json.dumps(CONFIG))


@pytest.mark.parametrize("is_leader", [True, False])
def test_without_room_for_temporary_files_saves_go_on_and_exports_begin_with_the_next_one_that_is_due(
    is_leader: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = exports(tmp_path, is_leader=is_leader)
    one._process = NoProcess()  # type: ignore[assignment]
    model = Model()
    model.config = SavedConfig()  # type: ignore[assignment]
    with monkeypatch.context() as broken:
        broken.setattr(tempfile, "tempdir", "/nonexistent")
        one.prepare({"model": model}, is_due=False)
        one.prepare({"model": model}, is_due=False)
        assert ("are off until the next save that is due" in caplog.text) == is_leader
        assert caplog.text.count("are off") == is_leader, "tried once"
        one.request("s1", 1, None)
        assert one.is_due(2, 1) == is_leader, "the next save is exported in its place"
    collective: list[int] = []
    monkeypatch.setattr(model, "state_dict", lambda: collective.append(1))
    one.prepare({"model": model}, is_due=True)
    one.request("s2", 2, None)
    assert one.busy() == ({"s2"} if is_leader else set()) and not collective, "other ranks would not take part"


def test_retention_knows_what_is_exported_while_the_queue_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ExportQueue(str(tmp_path / "hf")).add("s0", step=0, call="of an earlier training")
    one = leader(tmp_path)
    assert one.busy() == {"s0"}
    one.request("s1", 1, None)
    with monkeypatch.context() as broken:
        broken.setattr(os, "listdir", refused)
        assert one.busy() == one.busy() == {"s0", "s1"}
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert one.busy() == {"s0", "s1"}


def test_an_interrupt_while_the_exporter_ends_leaves_the_root_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: ManagerExports, timeout_s: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ManagerExports, "close", interrupted)
    one = named(tmp_path, export_every=1)
    one.restore({})
    one._claim_root()
    with pytest.raises(KeyboardInterrupt):
        one.close()
    monkeypatch.undo()
    with named(tmp_path) as two:
        two._claim_root()


# ---- arguments ------------------------------------------------------------------------------------------------------


def named(tmp_path: Path, **options: Any) -> CheckpointManager:
    return CheckpointManager(tmp_path / "runs", checkpointer=SyncCheckpointer(rank_info=RankInfo(0, 1)), **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"export_every": 0}, "export_every=0"),
        ({"export_every": True}, "export_every=True"),
        ({"export_to": "x"}, "give export_every="),
        ({"export_every": 1, "export_options": {"overwrite": True}}, "export_options has no 'overwrite'"),
        ({"export_every": 1, "export_options": {"key": ""}}, "expected an FQN"),
        ({"export_every": 1, "export_options": {"key_map": str.lower}}, "key_map is a function"),
        ({"export_every": 1, "export_options": {"rules": [3]}}, "expected objects of TensorRule"),
        ({"export_every": 1, "export_options": {"dtype": "int8"}}, "dtype='int8'"),
        ({"export_every": 1, "export_options": {"max_shard_bytes": 0}}, "max_shard_bytes=0"),
    ],
)
def test_arguments_without_sense_are_refused(options: Mapping[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        named(tmp_path, **options)


def test_exports_go_to_a_directory_beside_the_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    for to in (tmp_path, tmp_path / "link"):
        with pytest.raises(ConfigError, match="is the root"):
            exports(tmp_path, to=to)
    for to in (tmp_path / "copy", tmp_path / "link" / "copy"):
        with pytest.raises(ConfigError, match="is the mirror"):
            named(tmp_path, mirror=tmp_path / "copy", export_every=1, export_to=to)
    with pytest.raises(UnsupportedPathError) as caught:
        exports(tmp_path, to="s3://user:secret@bucket/x")
    assert "secret" not in str(caught.value)
    with pytest.raises(ConfigError, match="give export_to="):
        ManagerExports(1, "s3://b/x", None, None, is_leader=True, timeout_s=1.0, storage_options=None)


def test_the_model_that_is_saved_gives_the_config_and_without_one_that_is_said_before_the_save(tmp_path: Path) -> None:
    one = exports(tmp_path, is_leader=True, options={"rules": [TensorRule("a", "b")]})
    one._process = NoProcess()  # type: ignore[assignment]
    one.prepare({"net": torch.nn.parallel.DataParallel(Model()).module, "step": 1}, is_due=True)
    assert one._settings is not None
    found = json.loads(one._settings)
    assert found["options"] == {"key": "net", "rules": [{"sources": ["a"], "targets": ["b"], "dim": 0, "stack_dim": 0}]}
    assert found["model"]["tied"] == {"head.weight": "embed.weight"} and list(found["files"]) == ["config.json"]
    for state in ({}, {"a": torch.nn.Linear(1, 1)}, {"a": Model(), "b": Model()}):
        with pytest.raises(ConfigError, match="models that have a config"):
            exports(tmp_path).prepare(state, is_due=True)
    with named(tmp_path, export_every=1) as manager, pytest.raises(ConfigError, match="models that have a config"):
        manager.save(1, {"step": 1})
    assert not (tmp_path / "runs" / "step-00000001").exists()
