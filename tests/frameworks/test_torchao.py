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
from tests.composite_samples import bits, contexts, parts, same

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
        x = torch.randn(8, model[0].in_features, generator=torch.Generator().manual_seed(seed))
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


Shards = dict[str, tuple[Any, ...]]
"""What one rank has: by name the contexts and the bits of the local tensor."""


def _sharded(
    rank: int, name: str, path: str, first: str, shape: tuple[int, int] | None = None
) -> tuple[str, Shards, Shards]:
    """Train four steps under FSDP2: `first` is "save" after two, or "load", by an optimizer "with state" or without.

    `shape`: of the only parameter; None: of each of two layers 128 by 128, with biases.

    Returns the error of the load, what the rank had after it (or the save), and at the end.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torchao import optim

    torch.compile = _uncompiled  # type: ignore[assignment]
    torch.manual_seed(0 if first == "save" else 5)
    model = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.ReLU(), torch.nn.Linear(128, 128))
    if shape is not None:
        model = torch.nn.Sequential(torch.nn.Linear(shape[1], shape[0], bias=False))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = getattr(optim, name)(model.parameters(), lr=1e-2)

    def shards() -> Shards:
        found = {}
        for parameter, tensor in model.named_parameters():
            for key, value in {"": tensor, **optimizer.state[tensor]}.items():
                local = value.to_local() if hasattr(value, "to_local") else value
                found[f"{parameter}.{key}"] = (contexts(local), [bits(part).clone() for part in parts(local)])
        return found

    state = {"model": model, "optim": optimizer}
    if first == "save":
        _train(model, optimizer, range(2))
        with asyncckpt.SyncCheckpointer() as checkpointer:
            try:
                checkpointer.save(state, path)
            except asyncckpt.errors.RanksDisagreeError as error:
                return str(error), {}, {}
    else:
        if first == "load with state":
            _train(model, optimizer, range(9, 10))
        before = shards()
        try:
            asyncckpt.load(path, state)
        except asyncckpt.errors.UnsupportedLeafError as error:
            assert same(shards(), before), "nothing was changed"
            assert error.leaf == "optim.state.0.exp_avg", error
            return str(error), {}, {}
    loaded = shards()
    _train(model, optimizer, range(2, 4))
    return "", loaded, shards()


def _run_sharded(world_size: int, *arguments: Any) -> tuple[list[str], list[Shards], list[Shards]]:
    results = rank_processes.run(world_size, _sharded, *arguments, timeout_s=trainings.TIMEOUT_S)
    errors, loaded, ends = map(list, zip(*results, strict=True))
    return errors, loaded, ends


def _joined(ranks: list[Shards]) -> dict[str, list[torch.Tensor]]:
    """Return the bits of the whole tensors. All ranks have the same step and the same map of codes to values."""
    found = {}
    for name in ranks[0]:
        is_sharded = not name.endswith(".step")
        pieces = zip(*(rank[name][1] for rank in ranks), strict=True)
        found[name] = [
            torch.cat(of_ranks) if is_sharded and number < 2 else of_ranks[0] for number, of_ranks in enumerate(pieces)
        ]
    return found


SHARDED = ["AdamW8bit", "AdamWFp8", "AdamW4bit"]


@pytest.mark.parametrize("name", SHARDED)
def test_as_many_ranks_resume_a_sharded_training_bit_by_bit(name: str, tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "c")
    _, saved, ends = _run_sharded(2, name, path, "save")
    assert all(len(one["0.weight.exp_avg"][1]) > 1 for one in saved), "it is quantized"
    for first in ("load", "load with state"):
        assert same(_run_sharded(2, name, path, first), (["", ""], saved, ends)), first


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("name", SHARDED)
def test_other_numbers_of_ranks_resume_it_where_shards_have_whole_blocks_except_adamw4bits(
    name: str, world_size: int, tmp_path: pathlib.Path
) -> None:
    path = str(tmp_path / "c")
    _, saved, ends = _run_sharded(2, name, path, "save")
    for first in ("load", "load with state"):
        errors, loaded, later = _run_sharded(world_size, name, path, first)
        if name == "AdamW4bit":
            assert all("'optim.state.0.exp_avg', a torchao.optim.subclass_4bit.Opt" in error for error in errors), first
            continue
        assert errors == [""] * world_size
        assert same(_joined(loaded), _joined(saved)), first
        # the ranks train on the same data, so the mean of their gradients has no rounding errors
        assert same(_joined(later), _joined(ends)), first


@pytest.mark.parametrize("first", ["load", "load with state"])
@pytest.mark.parametrize("name", SHARDED)
def test_a_shard_that_ends_within_a_block_is_refused(name: str, first: str, tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "c")
    _run_sharded(2, name, path, "save")
    # ranks 0 and 1 have 43 rows of 128, 21.5 blocks; rank 2, which has 21, cannot train alone
    with rank_processes.running(3, _sharded, name, path, first) as ranks:
        for rank in (0, 1):
            error, *_ = ranks.receive(rank, trainings.TIMEOUT_S)
            assert "'optim.state.0.exp_avg', a torchao.optim.subclass_" in error
            assert "Load it with as many ranks as saved it" in error


@pytest.mark.parametrize(("name", "shape"), [("AdamW8bit", (4, 4096)), ("AdamW4bit", (2, 4096))], ids=str)
def test_a_rank_without_rows_resumes_with_the_others(name: str, shape: tuple[int, int], tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "c")
    errors, saved, ends = _run_sharded(3, name, path, "save", shape)
    assert errors == [""] * 3
    n_parts = [3, 3, 1]
    assert [len(one["0.weight.exp_avg"][1]) for one in saved] == n_parts, "rank 2 has a plain tensor"
    for first in ("load", "load with state"):
        assert same(_run_sharded(3, name, path, first, shape), ([""] * 3, saved, ends)), first
    if name == "AdamW8bit":
        errors, loaded, _ = _run_sharded(1, name, path, "load", shape)
        assert errors == [""] and same(_joined(loaded), _joined(saved[:2]))


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamWFp8"])
def test_ranks_of_one_row_resume_and_their_rows_are_not_joined(name: str, tmp_path: pathlib.Path) -> None:
    path, shape = str(tmp_path / "c"), (2, 4096)
    errors, saved, ends = _run_sharded(2, name, path, "save", shape)
    assert errors == ["", ""] and all(len(one["0.weight.exp_avg"][1]) > 1 for one in saved), "it is quantized"
    for first in ("load", "load with state"):
        assert same(_run_sharded(2, name, path, first, shape), (["", ""], saved, ends)), first
    with pytest.raises(asyncckpt.errors.PerRankUnavailableError, match=r"'optim.state.0.exp_avg', a .*, cannot be"):
        asyncckpt.load(path)


def test_shards_of_which_some_are_too_small_to_be_quantized_are_refused_on_all_ranks(tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "c")
    # ranks 0 and 1 have 43 rows of 128, 21.5 blocks of 256; rank 2 has 42, 21 blocks
    errors, _, _ = _run_sharded(3, "AdamW8bit", path, "save", (128, 128))
    for error in errors:
        assert "'optim.state.0.exp_avg' is a plain tensor on ranks [0, 1], and a subclass with components" in error
        assert "on ranks [2]; all ranks with elements of it must hold the same class" in error
    assert not os.path.exists(os.path.join(path, "manifest.json"))


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
