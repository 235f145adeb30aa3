"""A target that is exactly what was saved: the same tree of plain containers and tensors, as most restarts have it.

Then the numbers of the leaves are the same on both sides, and no name has to be looked up. Whatever is not so, and
everything that is refused, is left to `matching`, which looks at each leaf.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from asyncckpt.format.tree import Node, Path
from asyncckpt.loading.saved_tree import SavedTree
from asyncckpt.loading.target_tensors import Filling, TargetTensor, shares_own_memory
from asyncckpt.planning.flattened import Flattened
from asyncckpt.planning.sharding.shards import LocalShard
from asyncckpt.planning.state_dict import PLAIN_TENSORS, SCALARS
from asyncckpt.planning.torch_types import torch_dtype

_MAPPINGS, _SEQUENCES = frozenset({dict, OrderedDict}), frozenset({list, tuple})
_KNOWN = PLAIN_TENSORS | SCALARS | _MAPPINGS | _SEQUENCES


def alike_fillings(state_dict: Any, flat: Flattened, saved: SavedTree) -> list[Filling] | None:
    """Return what is read into which tensor; None where the target is not exactly what was saved.

    Args:
        state_dict: The target.
        flat: The same, taken apart.
        saved: The checkpoint.
    """
    if flat.tree != saved.tree or len(flat.tensors) != len(saved.tensors):
        return None
    members = _plain_members(state_dict)
    # What was resolved, a conjugated view say, was copied: it is none of the target's own tensors.
    if members is None or not members.issuperset(map(id, flat.tensors)):
        return None
    dtypes = {name: torch_dtype(name) for name in {tensor.dtype for tensor in saved.tensors}}
    found: list[Filling] = []
    for tensor, value in zip(saved.tensors, flat.tensors, strict=True):
        shape = tuple(value.shape)
        if shape != tensor.global_shape or value.dtype != dtypes[tensor.dtype] or shares_own_memory(value):
            return None
        found.append((tensor, TargetTensor(value, value.dtype, shape, (LocalShard(value, (0,) * len(shape)),))))
    return found


def _plain_members(state_dict: Any) -> set[int] | None:
    """Return the `id` of everything in nested containers; None if something is neither plain tensor nor scalar."""
    found: set[int] = set()
    left = [state_dict]
    while left:
        container = left.pop()
        kind = type(container)
        if kind not in _MAPPINGS and kind not in _SEQUENCES:
            return None
        members = container.values() if kind in _MAPPINGS else container
        kinds = set(map(type, members))
        if not kinds <= _KNOWN:
            return None
        found.update(map(id, members))
        if not kinds.isdisjoint(_MAPPINGS) or not kinds.isdisjoint(_SEQUENCES):
            left += [m for m in members if type(m) in _MAPPINGS or type(m) in _SEQUENCES]
    return found


def object_leaves(node: Node, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Yield (typed path, node) of the leaves that are no tensors."""
    kind = node[0]
    if kind in ("d", "o"):
        items = node[1]
        for i in range(0, len(items), 2):
            if items[i + 1][0] != "T":
                yield from object_leaves(items[i + 1], (*path, items[i]))
    elif kind in ("l", "t"):
        for i, child in enumerate(node[1]):
            if child[0] != "T":
                yield from object_leaves(child, (*path, i))
    else:
        yield path, node
