"""DTensors whose local tensors are of a subclass: which components are cut, and which locals are refused."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import rank_processes
import torch
import torch.distributed as dist

import asyncckpt
from asyncckpt.errors import UnsupportedLeafError
from tests.composite_samples import Sample, same


def _mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (dist.get_world_size(),))


def _rows(rank: int, rows: int) -> tuple[int, int]:
    step = rows // dist.get_world_size()
    return rank * step, (rank + 1) * step


def _dtensor(local: Any, mesh: Any, rows: int) -> Any:
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size((rows, 8)), stride=(8, 1))


def _save_to(path: str, state: Any) -> None:
    with asyncckpt.SyncCheckpointer(fsync=False) as checkpointer:
        checkpointer.save(state, path)


class Axis(Sample):
    """Codes with a scale for each row or for each column."""

    components = ("codes", "scale")
    context = ("axis",)

    def slice(self, dim: int, start: int, end: int) -> Axis:
        if dim:
            raise ValueError("only rows")
        return Axis(self.codes[start:end], self.scale if self.axis else self.scale[start:end], self.axis)


def _axes(rank: int, seed: float) -> dict[str, Any]:
    """Return tensors of 16 rows: each of two ranks has parts of 8 by 8."""
    first, end = _rows(rank, 16)
    codes = torch.arange(128.0).reshape(16, 8) + seed
    columns, rows = Axis(codes, torch.arange(8.0) + seed, 1), Axis(codes, torch.arange(16.0) - seed, 0)
    made = {"columns": columns, "rows": rows}
    return {name: _dtensor(one.slice(0, first, end).changed(torch.clone), _mesh(), 16) for name, one in made.items()}


def _save_axes(rank: int, path: str) -> None:
    _save_to(path, _axes(rank, 0))


def _load_axes(rank: int, path: str) -> bool:
    target = _axes(rank, 50)
    asyncckpt.load(path, target)
    return all(same(target[k]._local_tensor, v._local_tensor) for k, v in _axes(rank, 0).items())


def test_which_components_are_cut_depends_on_the_context(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    rank_processes.run(2, _save_axes, path)
    assert rank_processes.run(1, _load_axes, path) == [True]


def _local_of(what: str) -> torch.Tensor:
    whole = torch.eye(3, 8)
    if what == "sparse_coo":
        return whole.to_sparse()
    if what == "sparse_csr":
        return whole.to_sparse_csr()
    if what == "per_tensor_affine":
        return torch.quantize_per_tensor(whole, 0.1, 0, torch.qint8)
    return torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)], layout=torch.jagged)


def _refuse_locals(rank: int, path: str) -> list[str]:
    warnings.simplefilter("ignore")  # torch's, of sparse and quantized tensors
    _save_to(path, {"a": {"w": _dtensor(torch.ones(3, 8), _mesh(), 6)}})
    errors = []
    for what in ("sparse_coo", "sparse_csr", "per_tensor_affine", "jagged"):
        state = {"a": {"w": _dtensor(torch.ones(3, 8), _mesh(), 6)}}
        state["a"]["w"]._local_tensor = _local_of(what)
        for refused in (lambda state: _save_to(path + "2", state), lambda state: asyncckpt.load(path, state)):
            with pytest.raises(UnsupportedLeafError) as caught:
                refused(state)
            assert caught.value.leaf == "a.w" and "DTensor" in str(caught.value)
            errors.append(str(caught.value))
    return errors


def test_sparse_quantized_and_jagged_parts_of_dtensors_are_refused_by_name(tmp_path: Path) -> None:
    for errors in rank_processes.run(2, _refuse_locals, str(tmp_path / "c")):
        assert len(errors) == 8
    assert not os.path.exists(tmp_path / "c2")
