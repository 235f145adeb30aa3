"""The section "What a state may hold" of the guide to saving: a state with everything that it lists comes back."""

from __future__ import annotations

import datetime
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import states
import torch

import asyncckpt
from asyncckpt.dtypes import DTYPES
from asyncckpt.errors import UnsupportedLeafError
from tests.composite_samples import blocks, pair, same

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC) tensor support:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantize"),
    pytest.mark.filterwarnings("ignore:Failed to initialize NumPy:UserWarning"),
]

GUIDE = (Path(__file__).resolve().parents[3] / "docs/guides/saving.md").read_text()


def _layouts() -> dict[str, Any]:
    dense = torch.arange(24.0).reshape(4, 6)
    found = {name: dense.to_sparse(layout=getattr(torch, f"sparse_{name}")) for name in ("coo", "csr", "csc")}
    for name in ("bsr", "bsc"):
        found[name] = dense.to_sparse(layout=getattr(torch, f"sparse_{name}"), blocksize=(2, 2))
    found["quantized"] = torch.quantize_per_tensor(dense, 0.5, 1, torch.qint8)
    found["jagged"] = torch.nested.nested_tensor_from_jagged(dense, torch.tensor([0, 1, 4]))
    return found


def _dense(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _dense(one) for key, one in value.items()}
    if value.layout is torch.jagged:
        return [value.values(), value.offsets()]
    return value.dequantize() if value.is_quantized else value.to_dense()


def _model() -> Any:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {"model": model, "optim": optimizer, "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 3)}


LISTED = {
    "tensors of any shape and every dtype": lambda: {
        **{name: states.tensor_of(getattr(torch, name), (3, 5)) for name in DTYPES if hasattr(torch, name)},
        "shard": asyncckpt.ShardedSlice(torch.ones(2, 3), (2, 3), (0, 0)),
    },
    "sparse tensors": _layouts,
    "tensor subclasses": lambda: {"a": blocks(0), "b": torch.nn.Parameter(pair(1), requires_grad=False)},
    "modules, optimizers": _model,
    "numbers, strings": lambda: {
        "a": [1, 1.5, "x", b"y", None, 1j, {1, 2}, slice(1, 2), datetime.date(2026, 1, 2)],
        "b": (torch.float32, torch.device("cpu"), torch.Size([1, 2])),
        "arrays": states.every_array(),
        "scalars": states.every_scalar(),
    },
}


def test_the_list_is_the_one_of_the_guide() -> None:
    section = GUIDE.partition("## What a state may hold")[2].partition("\n## ")[0]
    items = [line.removeprefix("- ") for line in section.splitlines() if line.startswith("- ")]
    assert len(items) == len(LISTED)
    assert all(item.startswith(start) for item, start in zip(items, LISTED, strict=True))


def test_a_state_with_all_of_it_comes_back(tmp_path: Path, registered: None) -> None:
    state = {name: make() for name, make in LISTED.items()}
    with asyncckpt.SyncCheckpointer(fsync=False) as checkpointer:
        checkpointer.save(state, tmp_path / "c")
    found = asyncckpt.load(tmp_path / "c")
    tensors = found["tensors of any shape and every dtype"]
    assert torch.equal(tensors.pop("shard"), torch.ones(2, 3))
    assert same(tensors, {k: v for k, v in state["tensors of any shape and every dtype"].items() if k != "shard"})
    assert same(_dense(found["sparse tensors"]), _dense(_layouts()))
    assert same(found["tensor subclasses"], {"a": blocks(0), "b": pair(1)})
    states.assert_same(found["numbers, strings"], state["numbers, strings"])
    held = state["modules, optimizers"]
    target = _model()
    asyncckpt.load(tmp_path / "c", {"modules, optimizers": target})
    assert all(same(dict(target[name].state_dict()), dict(held[name].state_dict())) for name in held)


@pytest.fixture
def mesh() -> Iterator[Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        torch.distributed.destroy_process_group()


def test_dtensors_of_every_dtype_and_of_subclasses_come_back(mesh: Any, tmp_path: Path, registered: None) -> None:
    from torch.distributed.tensor import DTensor, Shard

    def made() -> dict[str, Any]:
        dtypes = [getattr(torch, name) for name in DTYPES if hasattr(torch, name)]
        local = {str(one): states.tensor_of(one, (4, 8)) for one in dtypes} | {"blocks": blocks(0)}
        return {name: DTensor.from_local(one, mesh, [Shard(0)], run_check=False) for name, one in local.items()}

    state = made()
    with asyncckpt.SyncCheckpointer(fsync=False) as checkpointer:
        checkpointer.save(state, tmp_path / "c")
    found = asyncckpt.load(tmp_path / "c")
    expected = {name: one.to_local() for name, one in state.items()}
    assert same(found, expected)


def test_containers_come_back_as_the_guide_says(tmp_path: Path) -> None:
    state = {
        **{
            "dict": {"a": 1},
            "ordered": OrderedDict(b=2),
            "counter": Counter("aab"),
            "default": defaultdict(list, c=[]),
        },
        **{"list": [torch.ones(1)], "tuple": (torch.ones(1), 2), "deque": deque([1, {}], 3), (0, 1): {None: 1, 0.5: 2}},
    }
    with asyncckpt.SyncCheckpointer(fsync=False) as checkpointer:
        checkpointer.save(state, tmp_path / "c")
    found = asyncckpt.load(tmp_path / "c")
    assert [type(value) for value in found.values()] == [type(value) for value in state.values()]
    assert found.keys() == state.keys() and found["counter"] == state["counter"]


@pytest.mark.parametrize("leaf", [torch.ones(2).as_subclass(type("Plain", (torch.Tensor,), {})), object(), print])
def test_any_other_leaf_is_refused_by_its_path(leaf: Any, tmp_path: Path) -> None:
    with asyncckpt.SyncCheckpointer(fsync=False) as checkpointer, pytest.raises(UnsupportedLeafError) as caught:
        checkpointer.save({"a": [{"b": leaf}]}, tmp_path / "c")
    assert caught.value.leaf.startswith("a.0.b") and not (tmp_path / "c").exists()
