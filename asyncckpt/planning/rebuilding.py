"""From tree, tensors and objects back to a nested state dict."""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from asyncckpt.format.keys import python_key
from asyncckpt.format.tree import Node
from asyncckpt.per_rank import PerRank
from asyncckpt.planning.containers import form_in, mapping_of, sequence_of
from asyncckpt.planning.numpy_values import array_of


def unflatten(tree: Node, tensors: Sequence[torch.Tensor], objects_: Sequence[Any], *, marks: bool = False) -> Any:
    """Rebuild the state dict: containers, order, key types and aliases as saved.

    Args:
        tree: The skeleton.
        tensors: By tensor number.
        objects_: Python values by object number.
        marks: Whether what belongs to its rank comes in a `PerRank`; else its bare value.
    """
    return Rebuilding(tensors, objects_, marks=marks).of(tree)


class Rebuilding:
    """Rebuilds one tree, or several that share tensors; arguments as `unflatten`'s."""

    def __init__(self, tensors: Sequence[torch.Tensor], objects_: Sequence[Any], *, marks: bool = False) -> None:
        self._tensors, self._objects, self._marks = tensors, objects_, marks
        self._arrays: dict[int, Any] = {}

    def of(self, node: Node) -> Any:
        """Return the value of a node."""
        kind = node[0]
        if kind == "T":
            return self._tensors[node[1]]
        if kind == "O":
            return self._objects[node[1]]
        if kind in ("d", "o"):
            return self._mapping(node)
        if kind == "r":
            value = self.of(node[1])
            return PerRank(value) if self._marks else value
        if kind in ("l", "t"):
            members = [self.of(child) for child in node[1]]
            return sequence_of(form_in(node), members) if kind == "l" else tuple(members)
        if kind == "N":
            return self._array(node[1])
        hoisted = self._tensors[node[1]].contiguous()
        return ctypes.string_at(hoisted.data_ptr(), hoisted.numel())

    def _mapping(self, node: Node) -> Any:
        items = node[1]
        pairs = ((python_key(items[i]), self.of(items[i + 1])) for i in range(0, len(items), 2))
        if node[0] == "d":
            return mapping_of(form_in(node), pairs)
        ordered = OrderedDict(pairs)
        if node[2] is not None:
            metadata = self._objects[node[2]]
            ordered._metadata = OrderedDict(metadata) if isinstance(metadata, dict) else metadata  # type: ignore[attr-defined]
        return ordered

    def _array(self, number: int) -> Any:
        if number not in self._arrays:
            self._arrays[number] = array_of(self._tensors[number])
        return self._arrays[number]
