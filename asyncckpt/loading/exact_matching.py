"""Matches a target that has exactly the saved structure: one walk along both trees, in which no name is looked up.

Most restarts load into such a target. `asyncckpt/loading/matching.py` matches all other targets by name.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from asyncckpt.format.state_tree import DICT, LIST, OBJECT, ORDERED_DICT, SEQUENCES, TENSOR, TUPLE, Node, Path
from asyncckpt.loading.byte_ranges import Placement
from asyncckpt.loading.saved_state import SavedTree
from asyncckpt.loading.target_tensors import shares_own_memory
from asyncckpt.state_dict.flatten import PLAIN_TENSORS, SCALARS, is_plain_sequence
from asyncckpt.torch_tensors import NO_ADDRESS_BELOW, address_of, torch_dtype

_KINDS = {DICT: dict, ORDERED_DICT: OrderedDict, LIST: list, TUPLE: tuple}
ObjectLeaves = list[tuple[Path, Node]]
"""Path and saved node of object leaves."""


def exact_placements(state_dict: Any, saved: SavedTree) -> tuple[list[Placement], ObjectLeaves] | None:
    """Match a target that has exactly the saved structure, so that leaves have the same numbers on both sides.

    Args:
        state_dict: The target.
        saved: The checkpoint.

    Returns:
        The placements of all tensors, and path and saved node of each object leaf. None: the structure differs, or a
        leaf cannot be filled without conversion: the target has to be matched by name.
    """
    walk = _ParallelWalk()
    if not walk.is_same(saved.tree, state_dict, ()):
        return None
    numbers, values = walk.numbers, walk.values
    if numbers != list(range(len(saved.tensors))):
        first = _first_values(numbers, values)
        if len(first) != len(saved.tensors) or first.keys() != set(range(len(first))):
            return None
        values = [first[number] for number in range(len(first))]
    placements = _placements(values, saved)
    return None if placements is None else (placements, walk.objects)


class _ParallelWalk:
    """One walk along a saved tree and a target at the same time.

    Attributes:
        numbers, values: The saved number and the target's value of each tensor so far.
        objects: Path and saved node of each object leaf so far.
    """

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.values: list[torch.Tensor] = []
        self.objects: ObjectLeaves = []
        self._seen: set[int] = set()  # IDs of containers; a container that occurs twice is matched by name

    def is_same(self, node: Node, value: Any, path: Path) -> bool:
        """Return whether the saved `node` and the target's `value`, both at `path`, have the same structure."""
        kind = node[0]
        if kind == TENSOR:
            self.numbers.append(node[1])
            self.values.append(value)
            return type(value) in PLAIN_TENSORS
        if kind == OBJECT and len(node) == 2:
            self.objects.append((path, node))
            return type(value) in SCALARS or (type(value) in (list, tuple) and is_plain_sequence(value))
        if type(value) is not _KINDS.get(kind) or len(node) > (3 if kind == ORDERED_DICT else 2):
            return False  # a container with a form, such as a Counter, is always matched by name
        if id(value) in self._seen and value != ():
            return False
        self._seen.add(id(value))
        keys: Any
        if kind in SEQUENCES:
            nodes, inner, keys = node[1], value, range(len(value))
            if len(nodes) != len(inner) or is_plain_sequence(value):
                return False
        else:
            nodes, inner, keys = node[1][1::2], value.values(), node[1][::2]
            if tuple(value) != keys or not set(map(type, value)) <= {str, int}:
                return False
            if kind == ORDERED_DICT and (getattr(value, "_metadata", None) is None) is not (node[2] is None):
                return False
        if set(map(itemgetter(0), nodes)) == {TENSOR} and PLAIN_TENSORS.issuperset(map(type, inner)):
            self.numbers += map(itemgetter(1), nodes)
            self.values += inner
            return True
        for child, member, key in zip(nodes, inner, keys, strict=True):
            if child[0] == OBJECT and type(member) in SCALARS:
                self.objects.append(((*path, key), child))
            elif not self.is_same(child, member, (*path, key)):
                return False
        return True


def _first_values(numbers: list[int], values: list[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return the tensors by number; empty if a number has two tensors."""
    found: dict[int, torch.Tensor] = {}
    for number, value in zip(numbers, values, strict=True):
        if found.setdefault(number, value) is not value:
            return {}
    return found


def _placements(values: list[torch.Tensor], saved: SavedTree) -> list[Placement] | None:
    """Return the placement of each tensor; None if one cannot be filled without conversion, or two share an address."""
    dtypes = {name: torch_dtype(name) for name in {tensor.dtype for tensor in saved.tensors}}
    origins = {shape: (0,) * len(shape) for shape in {tensor.global_shape for tensor in saved.tensors}}
    placed = partial(tuple.__new__, Placement)  # the same as `Placement(...)` in half the time
    found: list[Placement] = []
    addresses: set[int] = set()
    empty: set[int] = set()
    for tensor, value in zip(saved.tensors, values, strict=True):
        _, name, shape, _ = tensor
        if value.layout is not torch.strided or value.is_nested or value.dtype is not dtypes[name]:
            return None
        if value.shape != shape or value.is_neg() or (value.dtype.is_complex and value.is_conj()):
            return None
        try:
            address, is_row_major = value.data_ptr(), value.is_contiguous()
        except RuntimeError:  # it has no address, for example inside vmap
            return None
        if address < NO_ADDRESS_BELOW:
            address = address_of(value)
        if not is_row_major and shares_own_memory(value):
            return None
        if address:
            addresses.add(address)
            found.append(placed((tensor, value, origins[shape], address if is_row_major and value.is_cpu else None)))
        elif value.numel() or value.is_meta:
            return None
        else:
            empty.add(id(value))
    return found if len(addresses) + len(empty) == len(values) else None
