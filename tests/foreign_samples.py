"""Checkpoints of other formats for tests, written by their own tools; and what is expected of reading them."""

from __future__ import annotations

import pathlib
import warnings
from collections import OrderedDict
from typing import Any

import states
import torch

from asyncckpt.dtypes import DTYPES

KINDS = ("torch", "legacy", "dcp", "safetensors", "hf")


def model() -> dict[str, torch.Tensor]:
    """Tensors of every dtype that safetensors and this torch have, and of every shape."""
    found = {name: t.detach() for name, t in states.every_tensor().items() if not (t.is_conj() or t.is_neg())}
    return {name: t for name, t in found.items() if DTYPES[str(t.dtype).removeprefix("torch.")].safetensors}


def training_state() -> dict[str, Any]:
    """A state as a training script has it: a tied module's state with its versions, an optimizer's, counters."""
    weights: Any = OrderedDict(model())
    weights["tied"] = weights["large"]
    weights._metadata = OrderedDict({"": {"version": 1}, "bn": {"version": 2}})
    return {
        "model": weights,
        "optim": {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(7, 3)}, 1: {}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0, 1], "foreach": None}],
        },
        "step": 7,
        "name": "grüße\n",
        "big": 1 << 70,
        "half": torch.float16,
        "device": torch.device("cpu"),
        "size": torch.Size([2, 0]),
        "raw": b"a\x00\xff",
        "array": bytearray(b"xyz"),
        "complex": 1 - 2j,
        "members": {1, "a"},
        "mixed": [1, torch.ones(2), {"deep": (torch.zeros(1), "x")}],
    }


def plain(state: Any) -> Any:
    """The state as it comes back: parameters are tensors, and every tensor is contiguous."""
    if isinstance(state, torch.Tensor):
        return state.detach().contiguous()
    if isinstance(state, dict):
        return type(state)((key, plain(value)) for key, value in state.items())
    return (
        type(state)(map(plain, state)) if isinstance(state, (list, tuple)) and type(state) in (list, tuple) else state
    )


def write(kind: str, directory: pathlib.Path) -> pathlib.Path:
    """Write a checkpoint of `kind` by stock tools; return its path."""
    if kind in ("torch", "legacy"):
        path = directory / f"{kind}.pt"
        torch.save(training_state(), path, _use_new_zipfile_serialization=kind == "torch")
    elif kind == "dcp":
        path = directory / "dcp"
        save_dcp(training_state(), path)
    elif kind == "safetensors":
        path = directory / "model.safetensors"
        save_safetensors(model(), path)
    else:
        path = directory / "hf"
        path.mkdir()
        names = list(model())
        weight_map = {}
        for n, part in enumerate((names[::2], names[1::2])):
            file = f"model-{n + 1:05d}-of-00002.safetensors"
            save_safetensors({name: model()[name] for name in part}, path / file)
            weight_map |= dict.fromkeys(part, file)
        import json

        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        (path / "config.json").write_text('{"model_type": "none"}')
    return path


def save_dcp(state: dict[str, Any], path: pathlib.Path, **more: Any) -> None:
    """`dcp.save` without a process group; `more`: for its `FileSystemWriter`."""
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path, **more), no_dist=True)


def load_dcp(state: dict[str, Any], path: pathlib.Path) -> None:
    """`dcp.load` without a process group."""
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=str(path), no_dist=True)


def save_safetensors(tensors: dict[str, torch.Tensor], path: pathlib.Path) -> None:
    """safetensors' own writer; every tensor in memory of its own."""
    from safetensors.torch import save_file

    save_file({name: t.detach().clone().contiguous() for name, t in tensors.items()}, path, metadata={"format": "pt"})


def expected(kind: str) -> dict[str, Any]:
    """What `asyncckpt.load` gives of `write(kind, ...)`."""
    if kind in ("safetensors", "hf"):
        return plain(model())  # type: ignore[no-any-return]
    state = plain(training_state())
    if kind == "dcp":  # dicts only, nothing that is empty
        state["model"] = dict(state["model"])
        del state["optim"]["state"][1]
    return state  # type: ignore[no-any-return]
