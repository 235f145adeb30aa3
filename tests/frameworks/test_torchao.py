"""torchao's low-bit optimizers and quantized weights: saved, loaded, and trained on as if nothing had happened."""

from __future__ import annotations

import contextlib
import os
import pathlib
from typing import Any

import dcp_calls
import pytest
import rank_processes
import real_worker
import torch
import torch.distributed as dist
import trainings

import asyncckpt
from tests.composite_samples import same

pytest.importorskip("torchao", reason="`make test-frameworks` installs torchao")
pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]  # of torchao and torch.compile

OPTIMIZERS = ["AdamW8bit", "AdamW4bit", "AdamWFp8", "Adam8bit"]


def _uncompiled(function: Any, **_: Any) -> Any:
    return function


@pytest.fixture(autouse=True)
def not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the optimizers' steps run as they are: torch.compile takes a minute for each."""
    monkeypatch.setattr(torch, "compile", _uncompiled)


def _job(name: str, dtype: torch.dtype, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    from torchao import optim

    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(128, 64), torch.nn.ReLU(), torch.nn.Linear(64, 128)).to(dtype)
    return model, getattr(optim, name)(model.parameters(), lr=1e-2)


def _train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    for seed in seeds:
        x = torch.randn(8, 128, generator=torch.Generator().manual_seed(seed))
        model(x.to(next(model.parameters()).dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": dict(model.state_dict()), "optim": optimizer.state_dict()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_steps_after_a_resume_are_those_that_would_have_come(
    name: str, dtype: torch.dtype, worker: real_worker.RealWorker, tmp_path: pathlib.Path
) -> None:
    model, optimizer = _job(name, dtype, 0)
    _train(model, optimizer, range(2))
    saved = {"model": model, "optim": optimizer}
    assert any(hasattr(value, "__tensor_flatten__") for value in optimizer.state[model[0].weight].values())
    with asyncckpt.SyncCheckpointer() as checkpointer:
        checkpointer.save(saved, tmp_path / "sync")
    with asyncckpt.AsyncCheckpointer(endpoint=worker.endpoint) as checkpointer:
        handles = [checkpointer.save(saved, tmp_path / "async")]
        checkpointer.attach(optimizer)
        handles.append(checkpointer.save(saved, tmp_path / "overlap"))
        _train(model, optimizer, range(2, 4))
        for handle in handles:
            handle.written.result(60)
    for path in ("sync", "async", "overlap"):
        for has_state in (False, True):
            other, resumed = _job(name, dtype, 5)
            if has_state:
                _train(other, resumed, range(9, 10))
            asyncckpt.load(tmp_path / path, {"model": other, "optim": resumed})
            _train(other, resumed, range(2, 4))
            assert same(_state(other, resumed), _state(model, optimizer)), (path, has_state)
    found = asyncckpt.load(tmp_path / "sync")
    other, resumed = _job(name, dtype, 5)
    other.load_state_dict(found["model"])
    resumed.load_state_dict(found["optim"])
    _train(other, resumed, range(2, 4))
    assert same(_state(other, resumed), _state(model, optimizer))


def _weights() -> dict[str, Any]:
    from torchao import quantization as q

    return {
        "int8": q.Int8WeightOnlyConfig,
        "int8 dynamic": q.Int8DynamicActivationInt8WeightConfig,
        "float8": q.Float8WeightOnlyConfig,
    }


@pytest.mark.parametrize("what", ["int8", "int8 dynamic", "float8"])
def test_quantized_weights_are_loaded_into_a_model_and_into_a_new_state(what: str, tmp_path: pathlib.Path) -> None:
    from torchao.quantization import quantize_

    def model(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        made = torch.nn.Sequential(torch.nn.Linear(128, 64), torch.nn.Linear(64, 32)).to(torch.bfloat16)
        quantize_(made, _weights()[what]())
        return made

    first, x = model(0), torch.randn(3, 128, dtype=torch.bfloat16)
    assert hasattr(first[0].weight, "__tensor_flatten__")
    with asyncckpt.SyncCheckpointer() as checkpointer:
        checkpointer.save({"model": first}, tmp_path / "c")
    second = model(1)
    weight = second[0].weight
    asyncckpt.load(tmp_path / "c", {"model": second})
    assert second[0].weight is weight and torch.equal(first(x), second(x))
    third = torch.nn.Sequential(torch.nn.Linear(128, 64), torch.nn.Linear(64, 32)).to(torch.bfloat16)
    third.load_state_dict(asyncckpt.load(tmp_path / "c")["model"], assign=True)
    assert torch.equal(first(x), third(x))


def _sharded(rank: int, path: str, load: bool) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.compile = _uncompiled  # type: ignore[assignment]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, _ = _job("AdamW8bit", torch.float32, 5 if load else 0)
    fully_shard(model, mesh=mesh)
    from torchao.optim import AdamW8bit

    optimizer = AdamW8bit(model.parameters(), lr=1e-2)
    state = {"model": model, "optim": optimizer}
    if load:
        asyncckpt.load(path, state)
    else:
        _train(model, optimizer, range(2))
        with asyncckpt.SyncCheckpointer() as checkpointer:
            checkpointer.save(state, path)
    _train(model, optimizer, range(2, 4))
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


@pytest.mark.filterwarnings("ignore")
def test_ranks_resume_a_sharded_training_with_as_many_ranks_and_with_one(tmp_path: pathlib.Path) -> None:
    path, options = str(tmp_path / "c"), {"timeout_s": trainings.TIMEOUT_S}
    expected = rank_processes.run(2, _sharded, path, False, **options)
    assert same(rank_processes.run(2, _sharded, path, True, **options)[0], expected[0])
    alone = rank_processes.run(1, _sharded, path, True, **options)[0]
    for name, value in expected[0].items():
        torch.testing.assert_close(alone[name], value, rtol=1e-3, atol=1e-4)  # gradients are summed in another order


def _dcp_save(way: str, state: Any, writer: Any) -> None:
    import torch.distributed.checkpoint as dcp

    if way == "async":
        dcp.async_save(state, storage_writer=writer, no_dist=True).result(60)
    else:
        dcp.save(state, storage_writer=writer, no_dist=True)


@pytest.mark.parametrize("way", ["sync", "async"])
def test_stock_dcp_with_our_writer_refuses_them_by_name_before_anything_is_staged(
    way: str, worker: real_worker.RealWorker, tmp_path: pathlib.Path
) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torchao.optim import AdamW8bit

    from asyncckpt.dcp import StorageReader, StorageWriter

    layer = torch.nn.Linear(128, 64)
    optimizer = AdamW8bit(layer.parameters())
    layer(torch.ones(2, 128)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    with contextlib.closing(StorageWriter(tmp_path / "c", endpoint=worker.endpoint)) as writer:
        with pytest.raises(CheckpointException) as caught:
            _dcp_save(way, state, writer)
        error = dcp_calls.reason(caught.value)
        assert isinstance(error, asyncckpt.errors.UnsupportedLeafError)
        assert (error.leaf, error.type_name) == ("state.0.exp_avg", "OptimState8bit")
        assert "save it with AsyncCheckpointer" in str(error)
        assert not os.listdir(tmp_path) and writer.save_id is None
    with asyncckpt.SyncCheckpointer() as checkpointer:
        checkpointer.save(state, tmp_path / "ours")
    failed = dcp_calls.failed_load(state, StorageReader(tmp_path / "ours"))
    assert isinstance(failed, asyncckpt.errors.UnsupportedLeafError) and failed.leaf == "state.0.exp_avg"
