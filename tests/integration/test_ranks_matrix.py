"""Save under one kind of parallelism, load under another: parameters and AdamW's state are the same, bit for bit."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import rank_processes
import real_worker
import torch

from asyncckpt import AsyncCheckpointer, load, plan_load
from tests.arrangements import LOADED, SAVED, job, state_of, train, whole

QUICK = {
    ("ddp2", "fsdp3"),
    ("fsdp2", "alone"),
    ("fsdp2", "fsdp3"),
    ("fsdp4", "fsdp2"),
    ("fsdp4", "tp2"),
    ("tp2", "fsdp2"),
    ("tp2", "alone"),
    ("fsdp-tp", "fsdp3"),
    ("fsdp-tp", "alone"),
    ("hsdp", "fsdp2"),
    ("pp2", "fsdp2"),
    ("pp2", "alone"),
    ("ep2", "alone"),
    ("ep2", "tp2"),
}
"""What `make test` runs; `make test-matrix` runs all."""

CELLS = [
    pytest.param(saved, loaded, marks=() if (saved, loaded) in QUICK else pytest.mark.matrix, id=f"{saved}-{loaded}")
    for saved in SAVED
    for loaded in LOADED
]


def _save(rank: int, name: str, path: str) -> dict[str, Any]:
    made = job(SAVED[name], rank, seed=1)
    train(made, 2)
    with AsyncCheckpointer() as checkpointer:
        checkpointer.save(state_of(made, 2), path).written.result(60)
    return dict(whole(state_of(made, 2)))


def _load(rank: int, name: str, path: str, expected: dict[str, Any]) -> list[str]:
    """Return the names of all that came back otherwise than it was saved."""
    made = job(LOADED[name], rank, seed=2 + rank)
    target = state_of(made, 0)
    plan = plan_load(path, target)
    assert plan.fits and not plan.unexpected, plan
    assert load(path, target, strict=True) is target
    found = dict(whole(target))
    again = dict(whole(state_of(made, 2)))  # the optimizer itself was filled
    assert found.keys() == expected.keys() == again.keys()
    return [fqn for fqn, value in expected.items() if not (same(found[fqn], value) and same(again[fqn], value))]


def same(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor):
        return bool(a == b)
    return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(a, b))


class Checkpoints:
    """What was saved under each kind of parallelism, made when it is first wanted."""

    def __init__(self, root: pathlib.Path, endpoint: str) -> None:
        self._root, self._endpoint = root, endpoint
        self._made: dict[str, tuple[str, dict[str, Any]]] = {}

    def __getitem__(self, name: str) -> tuple[str, dict[str, Any]]:
        if name not in self._made:
            path = str(self._root / name)
            environ = {"ASYNCCKPT_ENDPOINT": self._endpoint}
            found = rank_processes.run(SAVED[name].world_size, _save, name, path, environ=environ)
            expected: dict[str, Any] = {}
            for part in found:
                assert all(same(part[fqn], expected[fqn]) for fqn in part if fqn in expected)
                expected |= part
            self._made[name] = path, expected
        return self._made[name]


@pytest.fixture(scope="module")
def checkpoints(
    tmp_path_factory: pytest.TempPathFactory, shared_worker: real_worker.RealWorker
) -> Iterator[Checkpoints]:
    yield Checkpoints(tmp_path_factory.mktemp("matrix"), shared_worker.endpoint)


@pytest.mark.parametrize(("saved", "loaded"), CELLS)
def test_what_one_arrangement_saves_another_loads_bit_for_bit(
    checkpoints: Checkpoints, saved: str, loaded: str
) -> None:
    path, expected = checkpoints[saved]
    world_size = LOADED[loaded].world_size
    found = rank_processes.run(world_size or 1, _load, loaded, path, expected, group=world_size > 0)
    assert found == [[]] * (world_size or 1)


@pytest.mark.parametrize(
    "saved", [name if name in ("pp2", "fsdp-tp") else pytest.param(name, marks=pytest.mark.matrix) for name in SAVED]
)
def test_a_new_dict_has_the_whole_tensors_of_all_ranks(checkpoints: Checkpoints, saved: str) -> None:
    path, expected = checkpoints[saved]
    found = dict(whole(load(path)))
    assert found.keys() == expected.keys()
    assert [fqn for fqn, value in expected.items() if not same(found[fqn], value)] == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "saved", [name if name in ("hsdp", "fsdp-tp") else pytest.param(name, marks=pytest.mark.matrix) for name in SAVED]
)
def test_torch_s_huggingface_reader_gives_the_same_bytes(checkpoints: Checkpoints, saved: str) -> None:
    for module in ("numpy", "fsspec", "safetensors"):
        pytest.importorskip(module)
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    path, expected = checkpoints[saved]
    tensors = {fqn: value for fqn, value in expected.items() if isinstance(value, torch.Tensor)}
    target = {fqn: torch.zeros_like(value) for fqn, value in tensors.items()}
    dcp.load(target, storage_reader=dcp.HuggingFaceStorageReader(path), no_dist=True)
    assert [fqn for fqn, value in tensors.items() if not same(target[fqn], value)] == []
