"""Save under one kind of parallelism, load under another: parameters and AdamW's state are the same, bit for bit."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import rank_processes
import real_worker
import torch

from asyncckpt import AsyncCheckpointer, load, plan_load
from tests.arrangements import LOADED, SAVED, job, state_of, train, whole

EXPECTED = ".expected"
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


def _load(rank: int, name: str, paths: dict[str, str]) -> dict[str, list[str]]:
    """Return, for each checkpoint, the names of all that came back otherwise than it was saved."""
    return {saved: _differing(rank, name, path) for saved, path in paths.items()}


def _differing(rank: int, name: str, path: str) -> list[str]:
    expected = torch.load(path + EXPECTED)
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


class Matrix:
    """What was saved under each kind of parallelism, and how it came back: made when it is first wanted.

    Args:
        root: For the checkpoints.
        endpoint: Of the worker.
        cells: The pairs that will be asked for: all that one arrangement loads, it loads in one go.
    """

    def __init__(self, root: pathlib.Path, endpoint: str, cells: set[tuple[str, str]]) -> None:
        self._root, self._endpoint, self._cells = root, endpoint, cells
        self._saved: dict[str, dict[str, Any]] = {}
        self._loaded: dict[str, list[dict[str, list[str]]]] = {}

    def path(self, name: str) -> str:
        """Return where a kind of parallelism saved."""
        self.expected(name)
        return str(self._root / name)

    def expected(self, name: str) -> dict[str, Any]:
        """Return all that it saved, whole."""
        if name not in self._saved:
            path = str(self._root / name)
            environ = {"ASYNCCKPT_ENDPOINT": self._endpoint}
            self._saved[name] = {}
            for part in rank_processes.run(SAVED[name].world_size, _save, name, path, environ=environ):
                self._saved[name] |= part
            torch.save(self._saved[name], path + EXPECTED)
        return self._saved[name]

    def differing(self, saved: str, loaded: str) -> list[list[str]]:
        """Return, for each rank, the names of what came back otherwise."""
        if loaded not in self._loaded:
            paths = {name: self.path(name) for name in SAVED if (name, loaded) in self._cells}
            ranks = LOADED[loaded].world_size
            self._loaded[loaded] = rank_processes.run(ranks or 1, _load, loaded, paths, group=ranks > 0)
        return [found[saved] for found in self._loaded[loaded]]


@pytest.fixture(scope="module")
def matrix(
    tmp_path_factory: pytest.TempPathFactory, shared_worker: real_worker.RealWorker, request: pytest.FixtureRequest
) -> Matrix:
    cells = {
        (item.callspec.params["saved"], item.callspec.params["loaded"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and "loaded" in getattr(item, "fixturenames", ())
    }
    return Matrix(tmp_path_factory.mktemp("matrix"), shared_worker.endpoint, cells)


def some(*quick: str) -> list[Any]:
    """Return all kinds to save, those but `quick` on demand only."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.matrix) for name in SAVED]


@pytest.mark.parametrize(("saved", "loaded"), CELLS)
def test_what_one_arrangement_saves_another_loads_bit_for_bit(matrix: Matrix, saved: str, loaded: str) -> None:
    assert matrix.differing(saved, loaded) == [[]] * (LOADED[loaded].world_size or 1)


@pytest.mark.parametrize("saved", some("pp2", "fsdp-tp"))
def test_a_new_dict_has_the_whole_tensors_of_all_ranks(matrix: Matrix, saved: str) -> None:
    found, expected = dict(whole(load(matrix.path(saved)))), matrix.expected(saved)
    assert found.keys() == expected.keys()
    assert [fqn for fqn, value in expected.items() if not same(found[fqn], value)] == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("saved", some("hsdp", "fsdp-tp"))
def test_torch_s_huggingface_reader_gives_the_same_bytes(matrix: Matrix, saved: str) -> None:
    for module in ("numpy", "fsspec", "safetensors"):
        pytest.importorskip(module)
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    path, expected = matrix.path(saved), matrix.expected(saved)
    tensors = {fqn: value for fqn, value in expected.items() if isinstance(value, torch.Tensor)}
    target = {fqn: torch.zeros_like(value) for fqn, value in tensors.items()}
    dcp.load(target, storage_reader=dcp.HuggingFaceStorageReader(path), no_dist=True)
    assert [fqn for fqn, value in tensors.items() if not same(target[fqn], value)] == []
