"""Stock `dcp.async_save` through `StorageWriter` in one process: failing, staged once, and one save at a time."""

from __future__ import annotations

import errno
import os
import signal
import threading
import types
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import dcp_calls
import pytest
import storage_samples
import torch
import torch.distributed.checkpoint as dcp
from in_process_writer import StorageWriter
from torch.distributed.checkpoint import staging
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils._python_dispatch import TorchDispatchMode

import asyncckpt
from asyncckpt.dcp.storage_writer import SaveLock, Stager
from asyncckpt.errors import CommitUnknownError, SaveFailedError
from asyncckpt.storage.files import Files

DEADLINE_S = 60


@pytest.fixture(autouse=True)
def without_ranks() -> Iterator[None]:
    """As `no_dist=True` is said to be: the warning about it comes from another thread, too."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def begin(state: dict[str, Any], writer: StorageWriter, path: Path | None = None) -> Future[Any]:
    future: Future[Any] = dcp.async_save(state, storage_writer=writer, checkpoint_id=path, no_dist=True)
    return future


def test_what_is_saved_is_the_state_at_the_call(tmp_path: Path) -> None:
    state = {"a": torch.arange(100_000.0), "n": [1, {"b": torch.ones(3)}], "step": 5}
    future = begin(state, StorageWriter(tmp_path / "step-5"))
    state["a"].zero_()
    state["n"][1]["b"].zero_()
    metadata = future.result(DEADLINE_S)
    assert metadata.storage_meta.checkpoint_id == str(tmp_path / "step-5")
    found = asyncckpt.load(tmp_path / "step-5")
    assert torch.equal(found["a"], torch.arange(100_000.0))
    assert torch.equal(found["n"][1]["b"], torch.ones(3)) and found["step"] == 5
    target = dcp_calls.load({"a": torch.zeros(100_000), "step": 0}, asyncckpt.dcp.StorageReader(tmp_path / "step-5"))
    assert torch.equal(target["a"], torch.arange(100_000.0)) and target["step"] == 5


@pytest.mark.parametrize(
    ("method", "at", "code", "kind"),
    [
        ("pwrite", "", errno.ENOSPC, SaveFailedError),
        ("fsync", "", errno.EIO, SaveFailedError),
        ("open", ".index", errno.ENOSPC, SaveFailedError),
        ("open", "manifest", errno.EIO, SaveFailedError),
        ("link", "manifest", errno.EIO, CommitUnknownError),
    ],
)
def test_a_failure_is_the_future_s_and_nothing_is_listed(
    tmp_path: Path, method: str, at: str, code: int, kind: type[Exception]
) -> None:
    writer = StorageWriter(tmp_path / "step-1")
    writer._files = files = storage_samples.failing(method, code, at=at)
    error = begin({"a": torch.ones(1000)}, writer).exception(DEADLINE_S)
    assert files.failed == method
    assert isinstance(error, CheckpointException)
    reason: Any = dcp_calls.reason(error)
    assert type(reason) is kind and reason.path == str(tmp_path / "step-1")
    if kind is SaveFailedError:
        assert reason.code == errno.errorcode[code]
        assert asyncckpt.latest_checkpoint(tmp_path) is None
    writer._files = Files()
    begin({"a": torch.zeros(1000)}, writer).result(DEADLINE_S)
    assert asyncckpt.latest_checkpoint(tmp_path) == str(tmp_path / "step-1")
    assert torch.equal(asyncckpt.load(tmp_path / "step-1")["a"], torch.zeros(1000))


# ---- the stager


class Copies(TorchDispatchMode):
    """Counts the elements that are copied into another tensor."""

    n_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.copy_.default, torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            self.n_elements += args[0].numel()
        return func(*args, **(kwargs or {}))


def state(value: float) -> dict[str, Any]:
    return {"a": torch.full((30, 40), value), "b": [{"c": torch.full((7,), value)}, value], "s": torch.tensor(value)}


def assert_is(staged: dict[str, Any], value: float) -> None:
    assert torch.equal(staged["a"], state(value)["a"])
    assert torch.equal(staged["b"][0]["c"], state(value)["b"][0]["c"])
    assert (staged["b"][1], staged["s"].item()) == (value, value)


@pytest.mark.parametrize("cached", [False, True])
def test_a_state_is_copied_once(cached: bool) -> None:
    stager = Stager(cache_staged_state_dict=cached)
    kept = []
    for value in (1.0, 2.0):
        given = state(value)
        with Copies() as copies:
            staged = stager.stage(given)
        assert copies.n_elements == 30 * 40 + 7 + 1
        given["a"].zero_()
        assert_is(staged, value)
        kept.append(staged["a"].data_ptr())
    assert (kept[0] == kept[1]) or not cached


def test_a_torch_without_the_name_that_allocates_stages_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    stock: Any = staging.BlockingAsyncStager.stage
    with_the_name = types.FunctionType(stock.__code__, dict(vars(staging)))
    monkeypatch.setattr(staging.BlockingAsyncStager, "stage", with_the_name)
    monkeypatch.delattr(staging, "_create_cpu_state_dict")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    stager = Stager(cache_staged_state_dict=True)
    for value in (1.0, 2.0):
        assert_is(stager.stage(state(value)), value)


# ---- one save of a writer at a time


class Interrupted:
    """A lock at whose taking, or giving back, Ctrl-C comes once."""

    def __init__(self, before: bool) -> None:
        self._lock, self._before, self._came = threading.Lock(), before, False

    def _interrupt(self) -> None:
        if not self._came:
            self._came = True
            signal.raise_signal(signal.SIGINT)

    def acquire(self, blocking: bool = True) -> bool:
        if self._before:
            self._interrupt()
        taken = self._lock.acquire(blocking)
        self._interrupt()
        return taken

    def release(self) -> None:
        self._lock.release()


@pytest.mark.parametrize("before", [True, False])
def test_an_interrupt_where_a_step_begins_leaves_nobody_in_it(before: bool) -> None:
    one = SaveLock()
    one._at_work = Interrupted(before)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt), one.begin_save():
        pytest.fail("not reached")
    with one.begin_save():
        pass
    with one.step_of_save():
        pass


def test_a_forked_child_does_not_go_on_with_its_parent_s_save() -> None:
    one = SaveLock()
    with one.begin_save():
        if not (pid := os.fork()):
            code = 1
            try:
                with one.begin_save():
                    pass
                with one.step_of_save():
                    code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
