"""The states that are saved: shapes of real models, random values."""

from __future__ import annotations

from typing import Any

import torch


def gpt(width: int = 768, layers: int = 12, vocabulary: int = 50304, context: int = 1024) -> dict[str, Any]:
    """Return model and AdamW state of a GPT-2 of about 124 M parameters: 1.49 GB."""
    shapes = {
        "wte.weight": (vocabulary, width),
        "wpe.weight": (context, width),
        "ln_f.weight": (width,),
        "ln_f.bias": (width,),
    }
    for n in range(layers):
        for name, shape in {
            "ln_1.weight": (width,),
            "ln_1.bias": (width,),
            "attn.c_attn.weight": (3 * width, width),
            "attn.c_attn.bias": (3 * width,),
            "attn.c_proj.weight": (width, width),
            "attn.c_proj.bias": (width,),
            "ln_2.weight": (width,),
            "ln_2.bias": (width,),
            "mlp.c_fc.weight": (4 * width, width),
            "mlp.c_fc.bias": (4 * width,),
            "mlp.c_proj.weight": (width, 4 * width),
            "mlp.c_proj.bias": (width,),
        }.items():
            shapes[f"h.{n}.{name}"] = shape
    return _with_adamw({name: torch.randn(shape) for name, shape in shapes.items()})


def large() -> dict[str, Any]:
    """Return model and AdamW state of a transformer of about 350 M parameters: 4.2 GB."""
    return gpt(width=1024, layers=24)


def small(count: int = 20_000, nbytes: int = 16 * 1024) -> dict[str, Any]:
    """Return `count` tensors of `nbytes` each: 0.33 GB."""
    return {"model": {f"layer.{n}.weight": torch.randn(nbytes // 4) for n in range(count)}, "step": 0}


def _with_adamw(model: dict[str, torch.Tensor]) -> dict[str, Any]:
    state = {
        n: {"step": torch.tensor(1.0), "exp_avg": torch.randn_like(p), "exp_avg_sq": torch.rand_like(p)}
        for n, p in enumerate(model.values())
    }
    groups = [{"lr": 3e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "params": list(range(len(model)))}]
    return {"model": model, "optim": {"state": state, "param_groups": groups}, "step": 0}


def tensors(state: Any) -> list[torch.Tensor]:
    """Return every tensor of a nested state."""
    if isinstance(state, torch.Tensor):
        return [state]
    members = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ()
    return [tensor for member in members for tensor in tensors(member)]


def nbytes(state: Any) -> int:
    """Return the bytes of all tensors."""
    return sum(t.numel() * t.element_size() for t in tensors(state))
