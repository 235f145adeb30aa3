"""Programs that know nothing of us read our checkpoints: safetensors, and PyTorch's own HuggingFace reader."""

from __future__ import annotations

import pathlib

import pytest
import states
import torch
from real_worker import DEADLINE_S, RealWorker

from asyncckpt import AsyncCheckpointer
from asyncckpt.dtypes import DTYPES, stored_as
from asyncckpt.storage.contents import read_contents
from asyncckpt.storage.files import Files


@pytest.fixture(scope="module")
def checkpoint(shared_worker: RealWorker, tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, dict]:  # type: ignore[type-arg]
    path = tmp_path_factory.mktemp("stock") / "a"
    state = states.every_leaf()
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, files_per_rank=3) as checkpointer:
        checkpointer.save(state, path).written.result(DEADLINE_S)
    return path, state


def test_safetensors_opens_every_shard_and_finds_every_tensor(checkpoint: tuple[pathlib.Path, dict]) -> None:  # type: ignore[type-arg]
    safetensors = pytest.importorskip("safetensors")
    path, state = checkpoint
    shards = sorted(path.glob("*.safetensors"))
    assert len(shards) == 3
    found = {}
    for shard in shards:
        with safetensors.safe_open(shard, framework="pt") as file:
            assert "DCP_SHARDING_INFO" in file.metadata()
            for key in file.keys():  # noqa: SIM118
                assert key not in found
                found[key] = file.get_tensor(key)
    saved = read_contents(str(path), Files()).tensors
    assert set(found) == set(saved)
    for name, tensor in states.every_tensor().items():
        key = f"tensors.{name}"
        dtype_name = str(tensor.dtype).removeprefix("torch.")
        assert tuple(found[key].shape) == stored_as(dtype_name, tuple(tensor.shape))[1]
        if name not in ("parameter", "large") and DTYPES[dtype_name].safetensors is not None:
            states.assert_same(found[key], state["tensors"][name])


@pytest.mark.filterwarnings("ignore")
def test_torch_s_huggingface_reader_loads_the_tensors(checkpoint: tuple[pathlib.Path, dict]) -> None:  # type: ignore[type-arg]
    for module in ("numpy", "fsspec", "safetensors"):
        pytest.importorskip(module)
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    path, state = checkpoint
    names = ["large", "transposed", "strided", "zero_dim", "parameter", "dtype_bfloat16", "dtype_int64", "dtype_bool"]
    expected = {f"tensors.{name}": state["tensors"][name].detach().contiguous() for name in names}
    expected |= {f"model.{key}": value for key, value in state["model"].items()}
    target = {key: torch.zeros_like(value) for key, value in expected.items()}
    dcp.load(target, storage_reader=dcp.HuggingFaceStorageReader(str(path)), no_dist=True)
    states.assert_same(target, expected)
