"""What we write is read where nothing of ours is installed: one process of stock tools reads everything.

`tests/stock_reading.py` is that process; each of its ways of reading is a test here.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import in_process_writer
import pytest
import rank_processes
import states
import torch

import asyncckpt
from asyncckpt import dtypes
from asyncckpt.dtypes import stored_as
from asyncckpt.storage.contents import read_contents
from asyncckpt.storage.files import Files

stock_reading = pytest.importorskip(
    "stock_reading", reason="torch.distributed.checkpoint needs numpy", exc_type=ImportError
)
for _module in ("numpy", "safetensors", "fsspec"):
    pytest.importorskip(_module)

TESTS = pathlib.Path(__file__).resolve().parents[1]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8, torch.float8_e4m3fn)
SHARDED = {"rows": torch.arange(70.0).reshape(10, 7), "columns": torch.arange(60, dtype=torch.int32).reshape(5, 12)}


def training_state() -> dict[str, Any]:
    """A state of what every target can hold in some way."""
    model = {f"d{n}": torch.arange(24).reshape(4, 6).to(dtype) for n, dtype in enumerate(DTYPES)}
    model |= {"large": torch.randn(300, 1000), "scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3)}
    return {
        "model": model,
        "optim": {"state": {"w": torch.randn(7)}, "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]},
        "step": 7,
        "name": "grüße",
    }


def save_sharded(rank: int, path: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    state = {name: distribute_tensor(whole, mesh, [Shard(n)]) for n, (name, whole) in enumerate(SHARDED.items())}
    with asyncckpt.SyncCheckpointer() as checkpointer:
        checkpointer.save(state, f"{path}/ours-2")
        checkpointer.save({"rows": state["rows"]}, f"{path}/floats-2")


def write_everything(root: pathlib.Path) -> None:
    import dcp_calls

    state = training_state()
    torch.save(state, root / "expected.pt")
    torch.save(SHARDED, root / "sharded.pt")
    with asyncckpt.SyncCheckpointer(rank_info=asyncckpt.RankInfo(0, 1)) as checkpointer:
        checkpointer.save(state, root / "ours")
        # What consolidate_safetensors_files of torch 2.13 takes: no integers; of 0-d tensors it makes zeros.
        floats = {
            name: tensor for name, tensor in state["model"].items() if tensor.is_floating_point() and tensor.dim()
        }
        checkpointer.save(floats, root / "floats")
    for name, saved in (("", state), ("-floats", floats)):
        dcp_calls.save(saved, in_process_writer.StorageWriter(root / f"by-dcp-save{name}"))
        torch.save(saved, root / "source.pt")
        asyncckpt.convert(root / "source.pt", root / f"converted{name}", to="asyncckpt")
        (root / "source.pt").unlink()
    rank_processes.run(2, save_sharded, str(root))
    weights: dict[str, Any] = {"keys": ["model"], "key_map": lambda fqn: fqn.removeprefix("model.")}
    asyncckpt.convert(root / "ours", root / "dcp", to="dcp")
    asyncckpt.convert(root / "ours", root / "a.pt", to="torch")
    asyncckpt.convert(root / "ours", root / "a.safetensors", to="safetensors", **weights)
    asyncckpt.convert(root / "ours", root / "hf", to="hf", max_shard_bytes=500_000, **weights)
    write_pretrained(root)


PRETRAINED = """
import sys, pathlib, torch, transformers
root = pathlib.Path(sys.argv[1])
for name, tied, dtype in (("plain", False, "float32"), ("tied", True, "float32"), ("bfloat16", False, "bfloat16"),
        ("tied-bfloat16", True, "bfloat16")):
    config = transformers.LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=32, bos_token_id=1, eos_token_id=2, tie_word_embeddings=tied)
    model = transformers.LlamaForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(root / "models" / name)
    torch.save(dict(model.state_dict()), root / "models" / f"{name}.pt")
"""


def write_pretrained(root: pathlib.Path) -> None:
    """Tiny random models of transformers: into checkpoints of ours, and from there into sharded directories.

    Of `save_pretrained`, which keeps one of two tied tensors, and of state dicts, which have both names.
    """
    if subprocess.run([sys.executable, "-c", "import transformers"], capture_output=True, check=False).returncode:
        return
    subprocess.run([sys.executable, "-c", PRETRAINED, str(root)], capture_output=True, check=True, timeout=100)
    for source in sorted((root / "models").iterdir()):
        ours = root / "ours-models" / source.name
        ours.parent.mkdir(exist_ok=True)
        asyncckpt.convert(source, ours, to="asyncckpt")
        path = root / "pretrained" / source.name
        path.parent.mkdir(exist_ok=True)
        asyncckpt.convert(ours, path, to="hf", max_shard_bytes=5000)
        assert len(list(path.glob("*.safetensors"))) > 1
        shutil.copy(source.with_suffix("") / "config.json", path)
    one = root / "pretrained" / "one"
    one.mkdir()
    asyncckpt.convert(root / "models" / "plain.pt", one / "model.safetensors", to="safetensors")
    shutil.copy(root / "models" / "plain" / "config.json", one)


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each way of reading gave."""
    root = tmp_path_factory.mktemp("stock-tools")
    torch.manual_seed(0)
    write_everything(root)
    environ = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(TESTS / "stock_reading.py"), str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110, env=environ)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize("way", stock_reading.WAYS)
def test_stock_tools_alone_read_every_bit(way: str, read: dict[str, str]) -> None:
    if read[way].startswith("skip: "):
        pytest.skip(read[way].removeprefix("skip: "))
    assert read[way] == "same"


def test_safetensors_opens_every_shard_and_finds_every_tensor(tmp_path: pathlib.Path) -> None:
    from safetensors import safe_open

    state, path = states.every_leaf(), tmp_path / "a"
    with asyncckpt.SyncCheckpointer(rank_info=asyncckpt.RankInfo(0, 1), files_per_rank=3) as checkpointer:
        checkpointer.save(state, path)
    shards, found = sorted(path.glob("*.safetensors")), {}
    assert len(shards) == 3
    for shard in shards:
        with safe_open(shard, framework="pt") as file:
            assert "DCP_SHARDING_INFO" in file.metadata()
            for key in file.keys():  # noqa: SIM118
                assert key not in found
                found[key] = file.get_tensor(key)
    assert set(found) == set(read_contents(str(path), Files()).tensors)
    for name, tensor in states.every_tensor().items():
        dtype_name = str(tensor.dtype).removeprefix("torch.")
        assert tuple(found[f"tensors.{name}"].shape) == stored_as(dtype_name, tuple(tensor.shape))[1]
        if name not in ("parameter", "large") and dtypes.DTYPES[dtype_name].safetensors is not None:
            states.assert_same(found[f"tensors.{name}"], state["tensors"][name])
