"""Stock `dcp.async_save` through `StorageWriter` in one process: alone, failing, and again with the same writer."""

from __future__ import annotations

import errno
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
from torch.distributed.checkpoint.api import CheckpointException

import asyncckpt
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


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.__getitem__)
@pytest.mark.parametrize(("method", "at"), [("pwrite", ""), ("fsync", ""), ("open", ".index"), ("open", "manifest")])
def test_a_failure_is_the_future_s_and_nothing_is_listed(tmp_path: Path, method: str, at: str, code: int) -> None:
    writer = StorageWriter(tmp_path / "step-1")
    writer._files = files = storage_samples.failing(method, code, at=at)
    error = begin({"a": torch.ones(1000)}, writer).exception(DEADLINE_S)
    assert files.failed == method
    assert isinstance(error, CheckpointException)
    reason = dcp_calls.reason(error)
    assert isinstance(reason, SaveFailedError) and reason.code == errno.errorcode[code]
    assert reason.path == str(tmp_path / "step-1")
    assert asyncckpt.latest_checkpoint(tmp_path) is None
    writer._files = Files()
    begin({"a": torch.zeros(1000)}, writer).result(DEADLINE_S)
    assert asyncckpt.latest_checkpoint(tmp_path) == str(tmp_path / "step-1")
    assert torch.equal(asyncckpt.load(tmp_path / "step-1")["a"], torch.zeros(1000))


def test_a_manifest_that_nobody_knows_of_is_the_future_s_error(tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path / "step-1")
    writer._files = storage_samples.failing("link", errno.EIO, at="manifest")
    error = begin({"a": torch.ones(3)}, writer).exception(DEADLINE_S)
    assert isinstance(error, CheckpointException) and isinstance(dcp_calls.reason(error), CommitUnknownError)


def test_one_writer_with_its_staged_copies_serves_several_saves(tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path / "elsewhere", cache_staged_state_dict=True)
    state = {"a": torch.zeros(50_000), "inner": {"b": torch.zeros(7, dtype=torch.bfloat16)}, "step": 0}
    places = set()
    for number in range(1, 4):
        state["a"].fill_(number)
        state["inner"]["b"].fill_(number)
        state["step"] = number
        future = begin(state, writer, tmp_path / f"step-{number}")
        state["a"].zero_()
        assert writer.state_dict_cache is not None
        places.add(writer.state_dict_cache["a"].data_ptr())
        future.result(DEADLINE_S)
    assert len(places) == 1
    for number in range(1, 4):
        found = asyncckpt.load(tmp_path / f"step-{number}")
        assert found["step"] == number and bool((found["a"] == number).all())
        assert bool((found["inner"]["b"] == number).all())
    assert asyncckpt.latest_checkpoint(tmp_path) == str(tmp_path / "step-3")
