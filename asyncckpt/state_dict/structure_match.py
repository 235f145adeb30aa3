"""Flattens a state dict along the tree of a plan, if it has the same structure: the fast path of a save.

It allocates almost nothing, where `flatten` builds a tree: a run of the garbage collector during a save would take ten
times as long as this check. If equality is not obvious, `flatten` has to decide.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Any

import torch

from asyncckpt.errors import AsyncCkptError
from asyncckpt.format.state_tree import (
    ARRAY,
    BYTES,
    COMPOSITE,
    MAPPINGS,
    OBJECT,
    ORDERED_DICT,
    PER_RANK,
    TENSOR,
    TUPLE,
    Node,
    form_in,
)
from asyncckpt.per_rank import PerRank
from asyncckpt.sharding.dtensor import local_tensor_on_grid
from asyncckpt.sharding.registry import Describe, describer_of
from asyncckpt.sharding.shard_types import Sharded, boxes_of, sources_of
from asyncckpt.state_dict.composite_tensors import decompose
from asyncckpt.state_dict.flatten import (
    HOIST_NBYTES,
    PLAIN_TENSORS,
    SCALARS,
    Flattened,
    ShardLeaf,
    as_uint8_tensor,
    is_equal,
    is_plain_sequence,
    plain_metadata,
    typed_key,
)
from asyncckpt.state_dict.numpy_values import is_array, tensor_of
from asyncckpt.state_dict.stateful import StateDictCache, StateDictError, is_stateful
from asyncckpt.state_dict.unflatten import deque_form, mapping_form
from asyncckpt.torch_tensors import NO_ADDRESS_BELOW, address_of, plain_parameter


class _Mismatch(Exception):
    """The structure differs from the plan's, or `flatten` must decide whether it does."""


def flatten_along(
    tree: Node,
    shapes: tuple[Any, ...],
    shards: tuple[Any, ...],
    state_dict: Any,
    state_dicts: StateDictCache | None = None,
    *,
    allow_pickle: bool = False,
) -> Flattened | None:
    """Flatten `state_dict` along `tree`.

    Args:
        tree: Tree of the plan's signature.
        shapes: (dtype, shape) of every tensor, of the signature.
        shards: `ShardLeaf` or None by tensor number, of the signature; empty without shards.
        state_dict: State to flatten.
        state_dicts: Cache of this save; None: the state dict is walked only once.
        allow_pickle: Value for `Flattened.allow_pickle`.

    Returns:
        The result that `flatten` would return, with `tree` itself as its tree. None: the structure differs, or
        `flatten` must decide.
    """
    walk = _Walk(shapes, shards, state_dicts or StateDictCache())
    try:
        walk.mapping(tree, state_dict)
    except (_Mismatch, RuntimeError):  # a tensor without an address raises a RuntimeError
        return None
    if not shards:
        return Flattened(tree, walk.tensors, walk.objects, allow_pickle=allow_pickle)
    leaves = {number: leaf for number, leaf in enumerate(shards) if leaf is not None}
    tensors = walk.tensors + walk.parts
    return Flattened(tree, tensors, walk.objects, allow_pickle=allow_pickle, shards=leaves, n_numbers=len(shards))


class _Walk:
    __slots__ = ("_seen", "_shapes", "_shards", "_state_dicts", "objects", "parts", "tensors")

    def __init__(self, shapes: tuple[Any, ...], shards: tuple[Any, ...], state_dicts: StateDictCache) -> None:
        self._shapes, self._shards, self._state_dicts = shapes, shards, state_dicts
        self._seen: dict[Any, int] = {}
        self.tensors: list[torch.Tensor] = []
        self.parts: list[torch.Tensor] = []
        self.objects: list[Any] = []

    def mapping(self, node: Node, value: Any) -> None:
        if type(value) is not dict and type(value) is not OrderedDict:
            value = self._mapping_of(value)
        items, ordered = node[1], node[0] == ORDERED_DICT
        if not ordered and form_in(node) != (None if type(value) is dict else mapping_form(value)):
            raise _Mismatch
        if isinstance(value, OrderedDict) is not ordered or 2 * len(value) != len(items):
            raise _Mismatch
        i = 0
        for key, child in value.items():
            if (key != items[i] or type(key) is not type(items[i])) and typed_key(key) != items[i]:
                raise _Mismatch
            inner = items[i + 1]
            if inner[0] == TENSOR:
                self.tensor(inner[1], child)
            elif inner[0] == OBJECT and type(child) in SCALARS:
                self.objects.append(child)
            else:
                self.other(inner, child)
            i += 2
        if ordered:
            metadata = getattr(value, "_metadata", None)
            if (metadata is None) is not (node[2] is None):
                raise _Mismatch
            if metadata is not None:
                self.objects.append(plain_metadata(metadata))

    def _mapping_of(self, value: Any) -> Any:
        if is_stateful(value):
            try:
                value = self._state_dicts(value)
            except StateDictError:
                raise _Mismatch from None
        if not isinstance(value, Mapping):
            raise _Mismatch
        return value

    def tensor(self, number: int, value: Any) -> None:
        if self._shards and self._shards[number] is not None:
            self._shard(number, self._shards[number], value)
            return
        if type(value) not in PLAIN_TENSORS:
            value = self._whole(value)
        dtype, shape = self._shapes[number]
        if value.is_nested:  # it has no shape
            raise _Mismatch
        if value.dtype is not dtype or value.shape != shape or value.layout is not torch.strided or value.is_meta:
            raise _Mismatch
        if value.is_neg() or value.is_conj():
            raise _Mismatch
        known = len(self.tensors)
        if number < known:
            first = self.tensors[number]
            if value is not first and (
                not value.data_ptr() or value.data_ptr() != first.data_ptr() or value.stride() != first.stride()
            ):
                raise _Mismatch
            return
        address = value.data_ptr()
        if address < NO_ADDRESS_BELOW and not address_of(value):
            if value.numel():
                raise _Mismatch
            address = id(value)  # an empty tensor under two names is one
        # Two tensors with the same address may be one tensor or two: `flatten` decides.
        if number != known or self._seen.setdefault(address, number) != number:
            raise _Mismatch
        self.tensors.append(value)

    def _whole(self, value: Any) -> torch.Tensor:
        """Return the plain tensor of a shard type's value that is whole here, or of a parameter subclass."""
        describe = describer_of(type(value))
        found = plain_parameter(value) if describe is None else self._described(describe, value)
        if type(found) not in PLAIN_TENSORS:
            raise _Mismatch
        return found  # type: ignore[return-value]

    def _described(self, describe: Describe, value: Any) -> Any:
        try:
            return describe(value)
        except AsyncCkptError:
            raise _Mismatch from None

    def _shard(self, number: int, leaf: ShardLeaf, value: Any) -> None:
        local = local_tensor_on_grid(value, leaf.grid, leaf.global_shape) if len(leaf.boxes) == 1 else None
        if local is not None:  # the usual DTensor
            dtype, shape = self._shapes[number]
            if local.dtype is not dtype or local.shape != shape or local.is_neg() or local.is_conj():
                raise _Mismatch
            if local.numel() and not address_of(local):
                raise _Mismatch
            self._same_or_new(number, [local], (local.data_ptr(), local.stride()) if local.numel() else None)
            return
        describe = describer_of(type(value))
        found = None if describe is None else self._described(describe, value)
        if not isinstance(found, Sharded):
            raise _Mismatch
        if (found.global_shape, found.grid, found.is_first) != (leaf.global_shape, leaf.grid, leaf.is_first):
            raise _Mismatch
        if boxes_of(found) != leaf.boxes or found.dtype is not self._shapes[number][0]:
            raise _Mismatch
        try:
            sources = sources_of(found)
        except AsyncCkptError:
            raise _Mismatch from None
        self._same_or_new(number, sources, None)

    def _same_or_new(self, number: int, sources: list[torch.Tensor], key: Any) -> None:
        known = len(self.tensors)
        if number < known:
            if sources[0] is not self.tensors[number] and (
                key is None or key != (self.tensors[number].data_ptr(), self.tensors[number].stride())
            ):
                raise _Mismatch  # a tensor of several parts under two names: `flatten` decides
            return
        address = sources[0].data_ptr() or id(sources[0])
        if number != known or self._seen.setdefault(address, number) != number:
            raise _Mismatch
        self.tensors.append(sources[0])
        self.parts += sources[1:]

    def other(self, node: Node, value: Any) -> None:
        kind = node[0]
        if kind == OBJECT:
            self._object(value)
        elif kind in MAPPINGS:
            self.mapping(node, value)
        elif kind == TENSOR:
            self.tensor(node[1], value)
        elif kind == BYTES:
            if type(value) is not bytes or (len(value),) != tuple(self._shapes[node[1]][1]):
                raise _Mismatch
            self.tensors.append(as_uint8_tensor(value))
        elif kind == ARRAY:
            elements = tensor_of(value) if is_array(value) else None
            if elements is None:
                raise _Mismatch
            self.tensor(node[1], elements)
        elif kind == PER_RANK:
            if not isinstance(value, PerRank):
                raise _Mismatch
            self.other(node[1], value.value)
        elif kind == COMPOSITE:
            self._components(node, value)
        else:
            self._sequence(node, value)

    def _components(self, node: Node, value: Any) -> None:
        try:
            found = decompose(value) if isinstance(value, torch.Tensor) else None
        except AsyncCkptError:
            raise _Mismatch from None
        if found is None or found.kind != node[3] or tuple(found.tensors) != node[1][::2]:
            raise _Mismatch
        for inner, component in zip(node[1][1::2], found.tensors.values(), strict=True):
            self.other(inner, component)
        if node[2] == len(self.objects):
            self.objects.append(found.rest)
        elif node[2] > len(self.objects) or not is_equal(found.rest, self.objects[node[2]]):
            raise _Mismatch  # one tensor under two names has one object

    def _object(self, value: Any) -> None:
        kind = type(value)
        if kind not in SCALARS:
            if isinstance(value, (Mapping, torch.Tensor, PerRank)) or (kind is bytes and len(value) >= HOIST_NBYTES):
                raise _Mismatch
            if (
                describer_of(kind) is not None
                or is_stateful(value)
                or (is_array(value) and tensor_of(value) is not None)
            ):
                raise _Mismatch
            is_sequence = isinstance(value, (tuple, deque)) or kind is list
            if is_sequence and kind is not torch.Size and not is_plain_sequence(value):
                raise _Mismatch
        self.objects.append(value)

    def _sequence(self, node: Node, value: Any) -> None:
        if node[0] == TUPLE:
            fits = isinstance(value, tuple) and type(value) is not torch.Size
        elif len(node) > 2:
            fits = isinstance(value, deque) and deque_form(value) == node[2]
        else:
            fits = type(value) is list
        if not fits or len(value) != len(node[1]) or is_plain_sequence(value):
            raise _Mismatch
        for inner, child in zip(node[1], value, strict=True):
            self.other(inner, child)
