"""Where the state of an optimizer of the target is read to, before the optimizer is given it.

The tensors of one that has a state are filled where they are, which saves the memory of a second state. One without a
state gets a new one; what it keeps of a sharded parameter must be sharded likewise, so that is made here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from asyncckpt.format.state_tree import Node, Path, leaves, python_key
from asyncckpt.loading.object_states import may_ask
from asyncckpt.loading.target_tensors import TargetTensor, memory_of, target_tensor
from asyncckpt.sharding.registry import sharded
from asyncckpt.state_dict.flatten import flatten
from asyncckpt.storage.contents import SavedTensor


def standing_tensors(holder: Any, saved: Iterable[tuple[Path, SavedTensor]]) -> dict[Path, TargetTensor]:
    """Return what of an object's saved state is read into tensors that stand already.

    Args:
        holder: The object. Nothing stands of any but an optimizer.
        saved: The tensors of its saved state, by their path in it.

    Returns:
        By path: tensors of the saved shape and dtype. What shares memory with a parameter or another entry is not
        among them.
    """
    if not isinstance(holder, torch.optim.Optimizer):
        return {}
    found = list(saved)
    try:
        state = holder.state_dict() if may_ask(holder) else {}
        own = _own_tensors(
            holder, [(path, _value_at(state, path)) for path, _ in _tensor_leaves(flatten(state, is_target=True).tree)]
        )
    except Exception:  # nothing stands in the way of a new state
        return {}
    standing = {path: own[path] for path, tensor in found if path in own and own[path].takes(tensor)}
    parameters = [p for group in holder.param_groups for p in group["params"]]
    for path, tensor in found:
        index = path[1] if len(path) == 3 and path[0] == "state" and path not in own else None
        if type(index) is int and 0 <= index < len(parameters):
            made = _like(parameters[index], tensor)
            if made is not None:
                standing[path] = made
    return standing


def _own_tensors(holder: torch.optim.Optimizer, values: list[tuple[Path, Any]]) -> dict[Path, TargetTensor]:
    places = [memory_of(value) for _, value in values]
    shared = {at for group in holder.param_groups for p in group["params"] for at in memory_of(p)}
    shared |= {at for at, n in Counter(at for memory in places for at in memory).items() if n > 1}
    return {
        path: target_tensor(value, "")
        for (path, value), memory in zip(values, places, strict=True)
        if memory and not memory & shared
    }


def _tensor_leaves(tree: Node) -> list[tuple[Path, Node]]:
    return [(path, node) for path, node in leaves(tree) if node[0] == "T"]


def _value_at(state: Any, path: Path) -> Any:
    for key in path:
        state = state[python_key(key)]
    return state


def _like(parameter: torch.Tensor, saved: SavedTensor) -> TargetTensor | None:
    """Return a new tensor that lies as a sharded parameter does, if `saved` has its shape."""
    if sharded(parameter) is None or tuple(parameter.shape) != saved.global_shape:
        return None
    dtype = getattr(torch, saved.dtype, None)
    if dtype is None:
        return None
    with torch.no_grad():
        return target_tensor(torch.empty_like(parameter, dtype=dtype, requires_grad=False), "")
