"""Views in a state that is saved: lazily conjugated and negated ones, alone and in shards, each by its values."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dcp_calls
import pytest
import states
import torch
import torch.distributed as dist
import views
from in_process_writer import StorageWriter

import asyncckpt
from asyncckpt import RankInfo, SyncCheckpointer
from asyncckpt.dcp import ShardedLoadPlanner, ShardedSavePlanner, StorageReader
from asyncckpt.sharding import registry


@pytest.fixture(autouse=True)
def types(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Registrations of this test alone."""
    monkeypatch.setattr(registry, "_registered", {})
    views.register_types()
    yield


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """A process group of one rank."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def dtensor(local: torch.Tensor) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(local, init_device_mesh("cpu", (1,)), [Shard(0)], run_check=False)


def expected_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: views.value_of(leaf) for name, leaf in state.items()}


def check(path: Path, expected: dict[str, torch.Tensor]) -> None:
    """Each name has its own values, in a new dict and in a target."""
    found = asyncckpt.load(path)
    target = {name: torch.zeros_like(value) for name, value in expected.items()}
    asyncckpt.load(path, target)
    for name, value in expected.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        assert states.bits_of(found[name]) == states.bits_of(value), name
        assert states.bits_of(target[name]) == states.bits_of(value), name


def save(state: dict[str, Any], path: Path, **fields: Any) -> Path:
    with SyncCheckpointer(fsync=False, rank_info=RankInfo(0, 1), **fields) as checkpointer:
        checkpointer.save(state, path)
    return path


def save_twice(state: dict[str, Any], path: Path) -> None:
    """Save, and again with the plan of the first save."""
    expected = expected_of(state)
    with SyncCheckpointer(fsync=False, rank_info=RankInfo(0, 1)) as checkpointer:
        for n in range(2):
            checkpointer.save(state, path / str(n))
            check(path / str(n), expected)


WRAPPERS: dict[str, Callable[[torch.Tensor], Any]] = {
    **views.WRAPPERS,
    "DTensor": dtensor,
    "ShardedTensor": views.sharded_tensor,
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_each_name_of_a_lazy_view_has_its_own_values(
    tmp_path: Path, group: None, wrap: Callable[[torch.Tensor], Any]
) -> None:
    state = views.lazy_state(wrap)
    save_twice(state, tmp_path)


def test_the_same_lazy_view_under_two_names_is_stored_once(tmp_path: Path) -> None:
    z = torch.randn(9, dtype=torch.complex64)
    state = {"one": z.conj(), "same": z.conj(), "in": views.WRAPPERS["slice"](z.conj()), "z": z}
    state["in_too"] = views.WRAPPERS["slice"](z.conj())
    save_twice(state, tmp_path)
    found = asyncckpt.load(tmp_path / "1")
    assert found["one"] is found["same"] and found["in"] is found["in_too"] and found["one"] is not found["z"]


def test_empty_lazy_views_come_back_with_their_shapes(tmp_path: Path) -> None:
    z = torch.zeros(4, 0, dtype=torch.complex64)
    state = {"a": z.conj(), "b": z.conj()[:2], "c": z.imag, "d": views.WRAPPERS["slice"](z.conj())}
    save(state, tmp_path / "c")
    found = asyncckpt.load(tmp_path / "c")
    assert [(tuple(v.shape), v.dtype) for v in found.values()] == [
        ((4, 0), torch.complex64),
        ((2, 0), torch.complex64),
        ((4, 0), torch.float32),
        ((4, 0), torch.complex64),
    ]


@pytest.mark.parametrize("numel", [64, 100_000])
def test_lazy_temporaries_of_a_registered_type_are_not_taken_for_one_another(tmp_path: Path, numel: int) -> None:
    """Were each freed once it is resolved, the next one would lie at its address."""
    save_twice({str(n): views.Computed(torch.full((numel,), complex(n, n))) for n in range(8)}, tmp_path)


def test_lazy_views_of_numpy_s_memory_have_their_own_values(tmp_path: Path) -> None:
    np = pytest.importorskip("numpy")
    array = (np.arange(6) + 1j * np.arange(6, 12)).astype(np.complex64)
    tensor = torch.from_numpy(array)
    state = {"array": array, "same": tensor, "conj": tensor.conj(), "imag": tensor.conj().imag, "part": array[::-1]}
    save(state, tmp_path / "c")
    found = asyncckpt.load(tmp_path / "c")
    assert found["array"].tolist() == array.tolist() == found["same"].tolist()
    assert found["conj"].tolist() == array.conj().tolist() and found["imag"].tolist() == array.conj().imag.tolist()
    assert found["part"].tolist() == array[::-1].tolist()


@pytest.mark.parametrize("wrap", views.WRAPPERS.values(), ids=views.WRAPPERS)
def test_saves_that_differ_in_what_is_conjugated_each_store_their_own_values(
    tmp_path: Path, rng: random.Random, wrap: Callable[[torch.Tensor], Any]
) -> None:
    """The structure is the same each time, so that the plan of the save before is at hand."""
    z = torch.randn(9, dtype=torch.complex64, generator=torch.Generator().manual_seed(rng.randrange(1 << 30)))
    made = (lambda: z, z.conj, lambda: torch._neg_view(z), lambda: torch._neg_view(z).conj(), z.clone)
    with SyncCheckpointer(fsync=False, rank_info=RankInfo(0, 1)) as checkpointer:
        for n in range(12):
            state = {name: wrap(rng.choice(made)()) for name in ("a", "b", "c")}
            expected = expected_of(state)
            checkpointer.save(state, tmp_path / str(n))
            check(tmp_path / str(n), expected)


def test_any_views_of_some_tensors_are_each_saved_by_their_values(tmp_path: Path, rng: random.Random) -> None:
    with SyncCheckpointer(fsync=False, rank_info=RankInfo(0, 1)) as checkpointer:
        for n in range(20):
            bases = [torch.randn(4, 6), torch.randn(12, dtype=torch.complex64), torch.arange(10, dtype=torch.int16)]
            state: dict[str, Any] = {}
            for number in range(rng.randrange(1, 9)):
                view = views.random_view(rng, rng.choice(bases))
                wrap = rng.choice(["plain", "slice", "per_rank"])
                state[str(number)] = views.WRAPPERS[wrap](view)
            expected = expected_of(state)
            checkpointer.save(state, tmp_path / str(n))
            check(tmp_path / str(n), expected)


@pytest.mark.parametrize("planner", [None, ShardedSavePlanner], ids=["stock", "ours"])
def test_stock_saves_store_the_values_of_lazy_views_and_of_single_elements(tmp_path: Path, planner: Any) -> None:
    wrap = views.WRAPPERS["plain" if planner is None else "slice"]
    state = {**views.lazy_state(wrap), **{name: wrap(t) for name, t in single_elements().items()}}
    expected = expected_of(state)
    options = {} if planner is None else {"planner": planner()}
    dcp_calls.save(state, StorageWriter(tmp_path / "c", sync_files=False), **options)
    check(tmp_path / "c", expected)
    target = {name: torch.zeros_like(value) for name, value in expected.items()}
    dcp_calls.load(target, StorageReader(tmp_path / "c"), planner=ShardedLoadPlanner())
    assert {n: states.bits_of(t) for n, t in target.items()} == {n: states.bits_of(t) for n, t in expected.items()}


def single_elements() -> dict[str, torch.Tensor]:
    """Single elements of larger tensors, which are contiguous and may have any stride."""
    matrix, z = torch.arange(12.0).view(3, 4), torch.full((1,), 3 + 4j)
    return {
        "of_a_slice": torch.arange(8.0)[1::2][:1],
        "of_a_matrix": matrix[1:2, 2:3],
        "of_a_column": matrix.t()[3:, :1],
        "real": z.real,
        "imag": z.imag,
        "lazy": torch._neg_view(z.imag),
        "conj": z.conj(),
        "half": torch.ones(9, dtype=torch.bfloat16)[::3][1:2],
    }


@pytest.mark.parametrize("layout", ["safetensors", "dcp"])
def test_single_elements_of_any_stride_are_saved_and_filled(tmp_path: Path, layout: str) -> None:
    state = single_elements()
    expected = expected_of(state)
    save(state, tmp_path / "c", layout=layout)
    check(tmp_path / "c", expected)
    target = {name: value.zero_() for name, value in single_elements().items()}
    asyncckpt.load(tmp_path / "c", target)
    assert {n: states.bits_of(t) for n, t in target.items()} == {n: states.bits_of(t) for n, t in expected.items()}
