"""A manager that exports behind the training: with a real worker, and an exporter in a process of its own."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import object_servers
import psutil
import pytest
import torch
from real_worker import DEADLINE_S, RealWorker, wait_until

import asyncckpt
from asyncckpt import CheckpointManager, SyncCheckpointer
from asyncckpt.manager.export_queue import QUEUE_NAME, ExportQueue
from tests.warm_python import WarmPython

pytest.importorskip("safetensors")

object_servers.start_runtime()

Managers = Callable[..., CheckpointManager]


class Model(torch.nn.Linear):
    config: Any = {"model_type": "small"}  # noqa: RUF012


def model_of(step: int) -> Model:
    model = Model(8, 8)
    torch.nn.init.constant_(model.weight, float(step))
    return model


def save(manager: CheckpointManager, *steps: int) -> None:
    for step in steps:
        handle = manager.save(step, {"model": model_of(step), "step": step})
        assert handle is not None
        handle.written.result(DEADLINE_S)


def exporters() -> list[psutil.Process]:
    """Return the exporters of this process."""
    found = psutil.Process().children()
    return [one for one in found if "asyncckpt.manager.exporter" in " ".join(one.cmdline())]


def exports_in(root: Path) -> list[int]:
    """Return the steps of the exports, each of which must be complete."""
    found = []
    for name in sorted(os.listdir(root / "hf")):
        if name != QUEUE_NAME:
            state = asyncckpt.load(root / "hf" / name)
            found.append(int(state["weight"][0, 0]))
            assert name == f"step-{found[-1]:08d}" and (root / "hf" / name / "config.json").exists()
    return found


@pytest.fixture
def manager(shared_worker: RealWorker, tmp_path: Path) -> Iterator[Managers]:
    """Makes managers of the test's root that export, and closes them."""
    made: list[CheckpointManager] = []

    def make(**options: Any) -> CheckpointManager:
        options.setdefault("export_every", 10)
        made.append(CheckpointManager(tmp_path / "runs", endpoint=shared_worker.endpoint, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_every_tenth_step_is_exported_and_found_beside_the_checkpoints(
    manager: Managers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "asyncckpt")
    one = manager(max_to_keep=2)
    for step in (5, 10, 15, 20, 25):
        save(one, step)
        assert one.wait_exports(DEADLINE_S)
    assert exports_in(tmp_path / "runs") == [10, 20]
    one.wait()
    assert one.all_steps() == [20, 25]
    assert f"exported step 20 to {tmp_path}/runs/hf/step-00000020" in caplog.text
    (process,) = exporters()
    assert process.nice() >= 10
    one.close()
    assert not exporters(), "it has ended"
    again = manager()
    state = {"model": model_of(0), "step": 0}
    assert again.restore(state) is not None and state["step"] == 25
    save(again, 30)
    assert again.wait_exports(DEADLINE_S) and exports_in(tmp_path / "runs") == [10, 20, 30]


def test_retention_keeps_what_is_exported_and_saves_go_on_meanwhile(manager: Managers, tmp_path: Path) -> None:
    one = manager(max_to_keep=1)
    lock = ExportQueue(str(tmp_path / "runs" / "hf")).lock()  # as if an earlier exporter were at work
    assert lock is not None
    with open(lock, "rb"):
        save(one, 10, 11, 12)
        one.wait()
        assert one.all_steps() == [10, 12] and exports_in(tmp_path / "runs") == []
        assert not one.wait_exports(0.0)
    assert one.wait_exports(DEADLINE_S) and exports_in(tmp_path / "runs") == [10]
    one.wait()
    assert one.all_steps() == [12]


def test_an_exporter_without_jobs_ends_with_its_training_also_while_another_is_at_work(
    manager: Managers, tmp_path: Path
) -> None:
    one = manager(export_every=1000)
    lock = ExportQueue(str(tmp_path / "runs" / "hf")).lock()
    assert lock is not None
    with open(lock, "rb"):
        save(one, 10)
        (process,) = exporters()
        one.close()
        process.wait(DEADLINE_S)


def test_an_exporter_that_is_killed_is_started_again(manager: Managers, tmp_path: Path) -> None:
    one = manager()
    lock = ExportQueue(str(tmp_path / "runs" / "hf")).lock()
    assert lock is not None
    with open(lock, "rb"):
        save(one, 10)
        (process,) = exporters()
        process.send_signal(signal.SIGKILL)
        process.wait(DEADLINE_S)
    assert one.wait_exports(DEADLINE_S) and exports_in(tmp_path / "runs") == [10]


def test_a_failed_export_is_logged_with_step_and_path_and_the_next_one_is_made(
    manager: Managers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = manager(export_options={"key": "model", "rules": [asyncckpt.TensorRule(["weight", "extra"], "both")]})
    save(one, 10)
    assert one.wait_exports(DEADLINE_S)
    (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    text = record.getMessage()
    assert f"export of step 10, {tmp_path}/runs/step-00000010, to {tmp_path}/runs/hf/step-00000010 failed" in text
    assert "UnmatchedTensorsError" in text and exports_in(tmp_path / "runs") == []
    one.close()
    two = manager()
    two.restore({"model": model_of(0), "step": 0})
    save(two, 20)
    assert two.wait_exports(DEADLINE_S) and exports_in(tmp_path / "runs") == [20]


def test_the_save_after_one_that_failed_is_exported_in_its_place(
    manager: Managers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = manager(on_error="warn")
    save(one, 9)
    (tmp_path / "runs" / "step-00000010").write_text("in the way")
    handle = one.save(10, {"model": model_of(10), "step": 10})
    assert handle is not None and handle.written.exception(DEADLINE_S) is not None
    save(one, 11)
    assert one.wait_exports(DEADLINE_S) and exports_in(tmp_path / "runs") == [11]
    assert "export" not in caplog.text


TRAINED = """
import os, signal, sys, torch
import asyncckpt
class Model(torch.nn.Linear):
    config = {"model_type": "small"}
model = Model(8, 8)
torch.nn.init.constant_(model.weight, 10.0)
manager = asyncckpt.CheckpointManager(sys.argv[1], export_every=10)
manager.save(10, {"model": model, "step": 10}).staged.result(60)
if sys.argv[2] == "all":
    os.kill(manager._exports._process.pid, signal.SIGKILL)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("who", ["trainer", "all"])
def test_a_killed_training_s_exports_are_made_by_its_exporter_or_by_the_next_training(
    who: str, manager: Managers, shared_worker: RealWorker, tmp_path: Path, warm_python: WarmPython
) -> None:
    root = tmp_path / "runs"
    environ = {**os.environ, "ASYNCCKPT_ENDPOINT": shared_worker.endpoint}
    done = warm_python.run(TRAINED, str(root), who, env=environ, timeout_s=DEADLINE_S)
    assert done.returncode == -signal.SIGKILL
    if who == "all":
        wait_until((root / "step-00000010" / "manifest.json").exists, "the worker commits")
        one = manager()
        assert one.restore({"model": model_of(0), "step": 0}) is not None
        save(one, 11)
        assert one.wait_exports(DEADLINE_S)
    wait_until(lambda: not ExportQueue(str(root / "hf")).names(), "the export has ended")
    assert exports_in(root) == [10]
    wait_until(lambda: not exporters() or who == "all", "its end")


LEAVES = """
import os, signal, sys, torch
from asyncckpt.manager.exports import ManagerExports
one = ManagerExports(1, sys.argv[1], None, {"config": {"model_type": "old"}, "key": "m"}, is_leader=True,
    timeout_s=float(sys.argv[2]), storage_options=None)
one.prepare({}, is_due=True)
one._queue.add("step-1", step=1, call="killed between the request and the commit")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_exporter_of_a_killed_training_ends_and_frees_its_pipes_and_the_next_training_at_once(
    tmp_path: Path,
) -> None:
    root = tmp_path / "runs"
    began = time.monotonic()
    command = [sys.executable, "-c", LEAVES, str(root), str(10 * DEADLINE_S)]  # its exporter waits for so long
    done = subprocess.run(command, capture_output=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == -signal.SIGKILL and time.monotonic() - began < DEADLINE_S
    queue = ExportQueue(str(root / "hf"))
    assert queue.names() == {"step-1"}, "its exporter is still there, and has not kept the pipes"
    options: dict[str, Any] = {"export_options": {"config": {"model_type": "new"}, "key": "m"}}
    with CheckpointManager(
        root, checkpointer=SyncCheckpointer(fsync=False), export_every=1, step_format="step-{step}", **options
    ) as one:
        one.save(2, {"m": {"w": torch.ones(3)}})
        assert one.wait_exports(DEADLINE_S)
    assert json.loads((root / "hf" / "step-2" / "config.json").read_text())["model_type"] == "new"
    assert not queue.names()


def test_checkpoints_in_an_object_store_are_exported_to_files(shared_worker: RealWorker, tmp_path: Path) -> None:
    with object_servers.running("s3") as server:
        options = {**server.options(), **object_servers.NO_CONNECTION_STAYS}
        with CheckpointManager(
            f"{server.root}/runs",
            endpoint=shared_worker.endpoint,
            storage_options=options,
            max_to_keep=2,
            export_every=10,
            export_to=tmp_path / "hf",
        ) as one:
            save(one, 10)
            assert one.wait_exports(DEADLINE_S)
    assert exports_in(tmp_path) == [10]
    queued = [path for path in (tmp_path / "hf" / QUEUE_NAME).iterdir() if path.is_file()]
    assert not any(options["secret_access_key"].encode() in path.read_bytes() for path in queued)


def test_a_synchronous_checkpointer_exports_too_and_to_another_directory(tmp_path: Path) -> None:
    words = tmp_path / "words"
    words.mkdir()
    (words / "tokenizer.json").write_text("{}")
    given = {"config": {"model_type": "other"}, "tokenizer": words, "key": "m"}
    with CheckpointManager(
        tmp_path / "runs",
        checkpointer=SyncCheckpointer(fsync=False),
        export_every=1,
        export_to=tmp_path / "hub",
        export_options=given,
    ) as one:
        one.save(1, {"m": {"w": torch.ones(3)}, "optim": {"lr": 0.1}})
        assert one.wait_exports(DEADLINE_S)
        assert sorted(os.listdir(tmp_path / "hub" / "step-00000001")) == [
            *("config.json", "model.safetensors", "tokenizer.json")
        ]
    found = json.loads((tmp_path / "hub" / "step-00000001" / "config.json").read_text())
    assert found == {"model_type": "other", "dtype": "float32"}
