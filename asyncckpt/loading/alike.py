"""A target that is exactly what was saved: the same tree of plain containers and tensors, as most restarts have it.

Then the numbers of the leaves are the same on both sides, and no name has to be looked up. Whatever is not so, and
everything that is refused, is left to `matching`, which looks at each leaf.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from asyncckpt.format.state_tree import Node, Path
from asyncckpt.loading.placements import Placement
from asyncckpt.loading.saved_tree import SavedTree
from asyncckpt.loading.target_tensors import shares_own_memory
from asyncckpt.state_dict.flatten import PLAIN_TENSORS, SCALARS, is_flat
from asyncckpt.torch_tensors import NO_ADDRESS_BELOW, address_of, torch_dtype

_KINDS = {"d": dict, "o": OrderedDict, "l": list, "t": tuple}


def alike_placements(state_dict: Any, saved: SavedTree) -> list[Placement] | None:
    """Return what is read into which tensor; None where the target is not exactly what was saved.

    Args:
        state_dict: The target.
        saved: The checkpoint.
    """
    numbers: list[int] = []
    values: list[torch.Tensor] = []
    if not _walk(saved.tree, state_dict, numbers, values, set()):
        return None
    if numbers != list(range(len(saved.tensors))):
        first = _first_ones(numbers, values)
        if len(first) != len(saved.tensors) or first.keys() != set(range(len(first))):
            return None
        values = [first[number] for number in range(len(first))]
    return _placements(values, saved)


def _walk(node: Node, value: Any, numbers: list[int], values: list[torch.Tensor], seen: set[int]) -> bool:
    """Collect the tensors of a target in step with the saved tree; says whether the two are the same.

    Args:
        node, value: The saved tree and the target, or a part of both.
        numbers, values: What is collected.
        seen: Ids of the containers of the target so far; one that stands in two places is looked at more closely.
    """
    kind = node[0]
    if kind == "T":
        numbers.append(node[1])
        values.append(value)
        return type(value) in PLAIN_TENSORS
    if kind == "O" and len(node) == 2:
        return type(value) in SCALARS or (type(value) in (list, tuple) and is_flat(value))
    if type(value) is not _KINDS.get(kind) or len(node) > (3 if kind == "o" else 2):
        return False  # a form of its own among them: `matching` asks no target for its type
    if id(value) in seen and value != ():
        return False
    seen.add(id(value))
    if kind in ("l", "t"):
        nodes, members = node[1], value
        if len(nodes) != len(members) or is_flat(value):
            return False
    else:
        nodes, members = node[1][1::2], value.values()
        if tuple(value) != node[1][::2] or not set(map(type, value)) <= {str, int}:
            return False
        if kind == "o" and (getattr(value, "_metadata", None) is None) is not (node[2] is None):
            return False
    if set(map(itemgetter(0), nodes)) == {"T"} and PLAIN_TENSORS.issuperset(map(type, members)):
        numbers += map(itemgetter(1), nodes)
        values += members
        return True
    return all(_walk(inner, member, numbers, values, seen) for inner, member in zip(nodes, members, strict=True))


def _first_ones(numbers: list[int], values: list[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return the tensors by number; none where one number has two of them."""
    found: dict[int, torch.Tensor] = {}
    for number, value in zip(numbers, values, strict=True):
        if found.setdefault(number, value) is not value:
            return {}
    return found


def _placements(values: list[torch.Tensor], saved: SavedTree) -> list[Placement] | None:
    """Look at each tensor once; None where one cannot be filled as it stands, or two of them are one."""
    dtypes = {name: torch_dtype(name) for name in {tensor.dtype for tensor in saved.tensors}}
    origins = {shape: (0,) * len(shape) for shape in {tensor.global_shape for tensor in saved.tensors}}
    placed = partial(tuple.__new__, Placement)  # as `Placement(...)`, for half of its time
    found: list[Placement] = []
    places: set[int] = set()
    empty: set[int] = set()
    for tensor, value in zip(saved.tensors, values, strict=True):
        _, name, shape, _ = tensor
        if value.layout is not torch.strided or value.is_nested or value.dtype is not dtypes[name]:
            return None
        if value.shape != shape or value.is_neg() or (value.dtype.is_complex and value.is_conj()):
            return None
        try:
            address, is_row_major = value.data_ptr(), value.is_contiguous()
        except RuntimeError:  # it has none, inside vmap, say
            return None
        if address < NO_ADDRESS_BELOW:
            address = address_of(value)
        if not is_row_major and shares_own_memory(value):
            return None
        if address:
            places.add(address)
            found.append(placed((tensor, value, origins[shape], address if is_row_major and value.is_cpu else None)))
        elif value.numel() or value.is_meta:
            return None
        else:
            empty.add(id(value))
    return found if len(places) + len(empty) == len(values) else None


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
