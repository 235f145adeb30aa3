"""A nested state dict <-> its tree, its tensors and its objects.

`flatten` runs on every save in the training thread, so it does only what a changed value could alter; names, duplicate
checks and layouts belong to the plan, which is made once per structure.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from asyncckpt.errors import UnsupportedLeafError
from asyncckpt.format.tree import MAX_DEPTH, MAX_KEY_CHARS, Node, Path, fqn_of, leaves, per_rank_nodes
from asyncckpt.per_rank import PerRank
from asyncckpt.planning.torch_types import dtype_name

HOIST_NBYTES = 64 * 1024
"""Bytes values of this size and above are stored in the shard files, not in JSON. Chosen, not measured."""

PLAIN_TENSORS = frozenset(
    {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer if hasattr(torch.nn, "Buffer") else torch.Tensor}
)
SCALARS = frozenset({int, float, bool, str, type(None), complex})
_MAX_KEY = (1 << 63) - 1


class Flattened:
    """A state dict taken apart.

    Attributes:
        tree: The skeleton (`format.tree`).
        tensors: By tensor number; a tensor reachable by several paths is there once. Not copies.
        objects: By object number: the leaves that are not tensors. Not copies.
    """

    __slots__ = ("objects", "tensors", "tree")

    def __init__(self, tree: Node, tensors: list[torch.Tensor], objects_: list[Any]) -> None:
        self.tree, self.tensors, self.objects = tree, tensors, objects_

    @property
    def fqns(self) -> list[str]:
        """FQN of each tensor by its first path."""
        names: list[str | None] = [None] * len(self.tensors)
        for path, node in leaves(self.tree):
            if node[0] != "O" and names[node[1]] is None:
                names[node[1]] = fqn_of(path)
        return [n for n in names if n is not None]

    @property
    def per_rank(self) -> frozenset[int]:
        """Numbers of the tensors that belong to this rank: any of their paths lies in a `PerRank`."""
        return frozenset(leaf[1] for _, node in per_rank_nodes(self.tree) for _, leaf in leaves(node) if leaf[0] != "O")

    @property
    def common(self) -> list[int]:
        """Numbers of the tensors that do not belong to this rank alone, ascending."""
        own = self.per_rank
        return [n for n in range(len(self.tensors)) if n not in own]

    def object_path(self, number: int) -> Path:
        """Return the typed path of an object: a leaf, or the `_metadata` of an OrderedDict."""
        of_leaves = (path for path, node in leaves(self.tree) if node == ("O", number))
        of_metadata = ((*path, "_metadata") for path, node in _mappings(self.tree) if node[2:] == (number,))
        return next(of_leaves, None) or next(of_metadata, ())


def flatten(state_dict: Any) -> Flattened:
    """Take `state_dict` apart.

    Raises:
        UnsupportedLeafError: Not a mapping, or something inside cannot be stored; `leaf` is the path to it.
    """
    if not isinstance(state_dict, Mapping):
        raise UnsupportedLeafError(
            f"the state dict is a {type(state_dict).__name__}, expected a dict",
            leaf="",
            type_name=type(state_dict).__name__,
        )
    walk = _Walk()
    tree = walk.mapping(state_dict)
    return Flattened(tree, walk.tensors, walk.objects)


class _Walk:
    """One pass over a state dict; `keys` is the path to where it stands."""

    __slots__ = ("_per_rank", "_seen", "keys", "objects", "tensors")

    def __init__(self) -> None:
        self._per_rank = False
        self.tensors: list[torch.Tensor] = []
        self.objects: list[Any] = []
        self.keys: list[Any] = []
        self._seen: dict[Any, int] = {}

    def mapping(self, value: Mapping[Any, Any]) -> Node:
        if len(self.keys) > MAX_DEPTH - 2:
            raise self._refused(value, f"nested deeper than {MAX_DEPTH} levels, or inside itself")
        out: list[Any] = []
        keys = self.keys
        for key, child in value.items():
            keys.append(key)
            if type(key) is not str and type(key) is not int:
                key = self._plain_key(key)
            out.append(key)
            out.append(self.tensor(child) if type(child) in PLAIN_TENSORS else self.other(child))
            keys.pop()
        if not isinstance(value, OrderedDict):
            return ("d", tuple(out))
        metadata = getattr(value, "_metadata", None)
        return ("o", tuple(out), None if metadata is None else self._object(plain_metadata(metadata)))

    def other(self, value: Any) -> Node:
        kind = type(value)
        if kind in SCALARS:
            return ("O", self._object(value))
        if isinstance(value, Mapping):
            return self.mapping(value)
        if isinstance(value, PerRank):
            return self._of_rank(value)
        if isinstance(value, torch.Tensor):
            raise self._refused(value, "tensor subclasses cannot be stored yet; pass a plain tensor")
        if kind is list or (isinstance(value, tuple) and kind is not torch.Size):
            if is_flat(value):
                return ("O", self._object(value))
            return self._sequence("l" if kind is list else "t", value)
        if kind is bytes and len(value) >= HOIST_NBYTES:
            self.tensors.append(hoisted(value))
            return ("B", len(self.tensors) - 1)
        return ("O", self._object(value))

    def _of_rank(self, mark: PerRank) -> Node:
        value: Any = mark
        for _ in range(MAX_DEPTH):
            if not isinstance(value, PerRank):
                break
            value = value.value
        else:
            raise self._refused(mark, f"nested deeper than {MAX_DEPTH} levels, or inside itself")
        outer, self._per_rank = self._per_rank, True
        node = self.tensor(value) if type(value) in PLAIN_TENSORS else self.other(value)
        self._per_rank = outer
        return node if outer else ("r", node)

    def _sequence(self, kind: str, value: Sequence[Any]) -> Node:
        if len(self.keys) > MAX_DEPTH - 2:
            raise self._refused(value, f"nested deeper than {MAX_DEPTH} levels, or inside itself")
        out = []
        for i, child in enumerate(value):
            self.keys.append(i)
            out.append(self.tensor(child) if type(child) in PLAIN_TENSORS else self.other(child))
            self.keys.pop()
        return (kind, tuple(out))

    def tensor(self, value: torch.Tensor) -> Node:
        if value.layout is not torch.strided or dtype_name(value.dtype) is None or value.is_meta or value.is_nested:
            nested = "nested " if value.is_nested else ""
            raise self._refused(
                value, f"a {nested}tensor of layout {value.layout}, dtype {value.dtype} on {value.device}"
            )
        # The same elements under several names are stored once: same address, shape, strides and dtype.
        address = value.data_ptr()
        key = (
            (address, value.dtype, value.shape, value.stride(), value.is_conj(), value.is_neg())
            if address
            else id(value)
        )
        if not address and value.numel():
            raise self._refused(value, "it has elements and no memory: its storage was freed or never allocated")
        number = self._seen.setdefault(key, len(self.tensors))
        if number == len(self.tensors):
            if value.is_conj() or value.is_neg():
                value = value.resolve_conj().resolve_neg()
            self.tensors.append(value)
        return ("T", number)

    def _object(self, value: Any) -> int:
        self.objects.append(value)
        return len(self.objects) - 1

    def _plain_key(self, key: Any) -> str | int:
        if isinstance(key, str):
            return str.__str__(key)
        if isinstance(key, int) and not isinstance(key, bool):
            return int(key)
        raise self._refused(key, f"a key of type {type(key).__name__}; keys are str or int")

    def _refused(self, value: Any, why: str) -> UnsupportedLeafError:
        leaf = fqn_of(tuple(self.keys))
        kind = type(value).__name__
        return UnsupportedLeafError(
            f"state dict leaf {leaf!r} of type {kind} cannot be stored: {why}", leaf=leaf, type_name=kind
        )


def hoisted(value: bytes) -> torch.Tensor:
    """Return `value` as a uint8 tensor: a copy."""
    return torch.frombuffer(bytearray(value), dtype=torch.uint8)


def is_flat(value: Sequence[Any], depth: int = 0) -> bool:
    """Whether a list or tuple holds scalars only, or flat ones of them: then it is one object leaf."""
    if depth > MAX_DEPTH // 2:
        return False
    return set(map(type, value)) <= SCALARS or all(
        type(v) in SCALARS or (type(v) in (list, tuple) and is_flat(v, depth + 1)) for v in value
    )


def plain_metadata(metadata: Any) -> Any:
    """`nn.Module.state_dict()._metadata` is an OrderedDict of dicts; a plain copy keeps what matters."""
    return (
        {k: dict(v) if isinstance(v, Mapping) else v for k, v in metadata.items()}
        if isinstance(metadata, Mapping)
        else metadata
    )


def check_keys(tree: Node) -> None:
    """Refuse keys that the index cannot hold; part of making a plan.

    Raises:
        UnsupportedLeafError: Naming the path.
    """
    for path, node in _mappings(tree):
        for key in node[1][::2]:
            fits = -_MAX_KEY <= key <= _MAX_KEY if isinstance(key, int) else len(key) <= MAX_KEY_CHARS and _is_text(key)
            if not fits:
                leaf = fqn_of((*path, key))
                raise UnsupportedLeafError(
                    f"state dict leaf {leaf[:200]!r}: the key {str(key)[:80]!r} is out of range, "
                    "too long or no valid text",
                    leaf=leaf,
                    type_name=type(key).__name__,
                )


def _mappings(node: Node, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Yield (typed path, node) of `node` and everything below it that is a mapping."""
    if node[0] in ("d", "o"):
        yield path, node
        for key, child in zip(node[1][::2], node[1][1::2], strict=True):
            yield from _mappings(child, (*path, key))
    elif node[0] in ("l", "t"):
        for i, child in enumerate(node[1]):
            yield from _mappings(child, (*path, i))
    elif node[0] == "r":
        yield from _mappings(node[1], path)


def _is_text(key: str) -> bool:
    try:
        key.encode()
    except UnicodeEncodeError:
        return False
    return True


def unflatten(tree: Node, tensors: Sequence[torch.Tensor], objects_: Sequence[Any], *, marks: bool = False) -> Any:
    """Rebuild the state dict: containers, order, key types and aliases as saved.

    Args:
        tree: The skeleton.
        tensors: By tensor number.
        objects_: Python values by object number.
        marks: Whether what belongs to its rank comes in a `PerRank`; else its bare value.
    """
    kind = tree[0]
    if kind == "r":
        value = unflatten(tree[1], tensors, objects_, marks=marks)
        return PerRank(value) if marks else value
    if kind in ("d", "o"):
        items = tree[1]
        pairs = ((items[i], unflatten(items[i + 1], tensors, objects_, marks=marks)) for i in range(0, len(items), 2))
        if kind == "d":
            return dict(pairs)
        ordered = OrderedDict(pairs)
        if tree[2] is not None:
            metadata = objects_[tree[2]]
            ordered._metadata = OrderedDict(metadata) if isinstance(metadata, dict) else metadata  # type: ignore[attr-defined]
        return ordered
    if kind in ("l", "t"):
        members = [unflatten(child, tensors, objects_, marks=marks) for child in tree[1]]
        return members if kind == "l" else tuple(members)
    if kind == "B":
        hoisted = tensors[tree[1]].contiguous()
        return ctypes.string_at(hoisted.data_ptr(), hoisted.numel())
    return tensors[tree[1]] if kind == "T" else objects_[tree[1]]
