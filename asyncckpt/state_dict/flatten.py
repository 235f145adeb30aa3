"""A nested state dict -> its tree, its tensors and its objects. The way back is `unflatten`.

`flatten` runs on every save in the training thread, so it does only what a changed value could alter; names, duplicate
checks and layouts belong to the plan, which is made once per structure.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from asyncckpt.errors import OverlappingShardsError, UnsupportedLeafError
from asyncckpt.format.state_tree import (
    MAX_DEPTH,
    MAX_KEY_DEPTH,
    Key,
    Node,
    Path,
    fqn_of,
    is_storable,
    key_of,
    leaves,
    per_rank_nodes,
    python_key,
)
from asyncckpt.per_rank import PerRank
from asyncckpt.sharding.mesh_layout import Box, Grid
from asyncckpt.sharding.registry import Describe, describer
from asyncckpt.sharding.shard_claims import ShardClaim
from asyncckpt.sharding.shard_types import Sharded, boxes_of, identity_of, named, refused, refused_by_name, sources_of
from asyncckpt.state_dict.numpy_values import is_array, is_scalar, tensor_of
from asyncckpt.state_dict.stateful import OpeningError, Openings, is_stateful
from asyncckpt.state_dict.unflatten import deque_form, form_of
from asyncckpt.torch_tensors import (
    NO_ADDRESS_BELOW,
    NO_MEMORY,
    SHRUNK,
    address_of,
    dtype_name,
    is_whole,
    plain_parameter,
    why_no_memory,
)


class ShardLeaf(NamedTuple):
    """A tensor of which this process holds parts.

    Attributes:
        global_shape: In elements.
        grid: As of `Sharded`.
        boxes: The parts.
        sources: Aligned with `boxes`: where in `Flattened.tensors` each lies.
        is_first: As of `Sharded`.
    """

    global_shape: tuple[int, ...]
    grid: Grid | None
    boxes: tuple[Box, ...]
    sources: tuple[int, ...]
    is_first: bool

    def claim(self, fqn: str, dtype: str) -> ShardClaim:
        """Return what the other ranks are told."""
        boxes = () if self.grid is not None else self.boxes
        return ShardClaim(fqn, dtype, self.global_shape, self.grid, boxes, self.is_first)


def typed_key(key: Any) -> Key | None:
    """Return the key of a tree for one of a state, numpy's scalars as Python's; None: it has no form."""
    return key_of(_without_numpy(key, 0))


def _without_numpy(key: Any, depth: int) -> Any:
    if is_scalar(key):
        return key.item()
    if isinstance(key, tuple) and depth < MAX_KEY_DEPTH:
        return tuple(_without_numpy(member, depth + 1) for member in key)
    return key


def check_keys(tree: Node) -> None:
    """Refuse keys that the index cannot hold; part of making a plan.

    Raises:
        UnsupportedLeafError: Naming the path.
    """
    for path, node in mappings(tree):
        for key in node[1][::2]:
            if not is_storable(key):
                leaf = fqn_of((*path, key))
                raise UnsupportedLeafError(
                    f"state dict leaf {leaf[:200]!r}: the key {python_key(key)!r:.80} is out of range, "
                    "too long or no valid text",
                    leaf=leaf,
                    type_name=type(python_key(key)).__name__,
                )


def mappings(node: Node, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Yield (typed path, node) of `node` and everything below it that is a mapping."""
    if node[0] in ("d", "o"):
        yield path, node
        for key, child in zip(node[1][::2], node[1][1::2], strict=True):
            yield from mappings(child, (*path, key))
    elif node[0] in ("l", "t"):
        for i, child in enumerate(node[1]):
            yield from mappings(child, (*path, i))
    elif node[0] == "r":
        yield from mappings(node[1], path)


class Flattened:
    """A state dict taken apart.

    Attributes:
        tree: The skeleton (`format.state_tree`).
        tensors: By tensor number; a tensor reachable by several paths is there once. Not copies. Of a shard the first
            part; the others follow behind the last number.
        objects: By object number: the leaves that are not tensors. Not copies.
        allow_pickle: Whether objects of any type may be stored.
        shards: By tensor number: those of which this process holds parts.
        n_numbers: How many tensor numbers there are.
    """

    __slots__ = ("allow_pickle", "n_numbers", "objects", "shards", "tensors", "tree")

    def __init__(
        self,
        tree: Node,
        tensors: list[torch.Tensor],
        objects_: list[Any],
        *,
        allow_pickle: bool = False,
        shards: Mapping[int, ShardLeaf] | None = None,
        n_numbers: int | None = None,
    ) -> None:
        self.tree, self.tensors, self.objects, self.allow_pickle = tree, tensors, objects_, allow_pickle
        self.shards: Mapping[int, ShardLeaf] = shards or {}
        self.n_numbers = len(tensors) if n_numbers is None else n_numbers

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
        """Numbers of the tensors that are whole here and do not belong to this rank alone, ascending."""
        own = self.per_rank
        return [n for n in range(self.n_numbers) if n not in own and n not in self.shards]

    def name_of(self, source: int) -> str:
        """Return the FQN of what lies at `source` of `tensors`."""
        if source >= self.n_numbers:
            source = next(n for n, leaf in self.shards.items() if source in leaf.sources)
        return self.fqns[source]


def object_fqn(tree: Node, number: int) -> str:
    """Return the name of an object by its number: a leaf, or the `_metadata` of an OrderedDict."""
    for path, node in leaves(tree):
        if node == ("O", number):
            return fqn_of(path)
    return next((fqn_of((*path, "_metadata")) for path, node in mappings(tree) if node[2:] == (number,)), "")


HOIST_NBYTES = 64 * 1024
"""Bytes values of this size and above are stored in the shard files, not in JSON. Chosen, not measured."""

PLAIN_TENSORS = frozenset(
    {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer if hasattr(torch.nn, "Buffer") else torch.Tensor}
)
SCALARS = frozenset({int, float, bool, str, type(None), complex})
Open = Callable[[Any, Path], Any]
"""What stands for an object with a `state_dict()` at a path: its state, or itself, which makes it an object leaf."""


def flatten(
    state_dict: Any, open_: Open | None = None, *, allow_pickle: bool = False, is_target: bool = False
) -> Flattened:
    """Take `state_dict` apart.

    Args:
        state_dict: Nested dicts, lists and tuples of leaves.
        open_: Asked for every object with a `state_dict()`; None: takes their states.
        allow_pickle: Makes an object leaf of a tensor that cannot be stored as one; else it is refused.
        is_target: It is not stored, but filled: tensors without memory (meta, fake) are taken for tensors. Whoever
            fills them looks for that.

    Raises:
        UnsupportedLeafError: Not a mapping, or something inside cannot be stored, or filled; `leaf` is the path to it.
    """
    if not isinstance(state_dict, Mapping):
        raise UnsupportedLeafError(
            f"the state dict is a {type(state_dict).__name__}, expected a dict, such as {{'model': model}}",
            leaf="",
            type_name=type(state_dict).__name__,
        )
    walk = _Walk(open_ or Openings(), allow_pickle, is_target)
    tree = walk.mapping(state_dict)
    tensors, shards = walk.placed()
    n_numbers = len(walk.tensors)
    return Flattened(tree, tensors, walk.objects, allow_pickle=allow_pickle, shards=shards, n_numbers=n_numbers)


class _Walk:
    """One pass over a state dict; `keys` is the path to where it stands."""

    __slots__ = (
        "_allow_pickle",
        "_is_target",
        "_lazy",
        "_open",
        "_per_rank",
        "_seen",
        "_shards",
        "keys",
        "objects",
        "tensors",
    )

    def __init__(self, open_: Open, allow_pickle: bool, is_target: bool) -> None:
        self._open, self._allow_pickle, self._is_target = open_, allow_pickle, is_target
        self._per_rank = False
        self.tensors: list[torch.Tensor] = []
        self.objects: list[Any] = []
        self.keys: list[Any] = []
        self._seen: dict[Any, int] = {}
        self._lazy: list[torch.Tensor] = []
        self._shards: dict[int, tuple[Sharded, list[torch.Tensor]]] = {}

    def mapping(self, value: Mapping[Any, Any]) -> Node:
        if len(self.keys) > MAX_DEPTH - 2:
            raise self._refused(value, f"nested deeper than {MAX_DEPTH} levels, or inside itself")
        out: list[Any] = []
        keys = self.keys
        for key, child in value.items():
            if type(key) is not str and (type(key) is not int or key.bit_length() > 63):
                key = self._typed_key(key)
            keys.append(key)
            out.append(key)
            out.append(self.tensor(child) if type(child) in PLAIN_TENSORS else self.other(child))
            keys.pop()
        if not isinstance(value, OrderedDict):
            form = None if type(value) is dict else form_of(value)
            return ("d", tuple(out)) if form is None else ("d", tuple(out), form)
        metadata = getattr(value, "_metadata", None)
        return ("o", tuple(out), None if metadata is None else self._object(plain_metadata(metadata)))

    def other(self, value: Any) -> Node:
        kind = type(value)
        if kind in SCALARS:
            return ("O", self._object(value))
        if kind is dict or kind is OrderedDict:
            return self.mapping(value)
        describe = describer(kind)
        if describe is not None:
            return self._shard(value, describe)
        if is_stateful(value):
            return self._opened(value)
        if isinstance(value, Mapping):
            return self.mapping(value)
        if isinstance(value, PerRank):
            return self._of_rank(value)
        if isinstance(value, torch.Tensor):
            return self._subclass(value)
        if kind is list or (isinstance(value, tuple) and kind is not torch.Size):
            if is_flat(value):
                return ("O", self._object(value))
            return self._sequence("l" if kind is list else "t", value)
        if isinstance(value, deque):
            return ("O", self._object(value)) if is_flat(value) else (*self._sequence("l", value), deque_form(value))
        if kind is bytes and len(value) >= HOIST_NBYTES:
            self.tensors.append(hoisted(value))
            return ("B", len(self.tensors) - 1)
        if is_array(value) and (elements := tensor_of(value)) is not None:
            return ("N", self.tensor(elements)[1])
        return ("O", self._object(value))

    def _subclass(self, value: torch.Tensor) -> Node:
        plain = plain_parameter(value)
        if plain is not None:
            return self.tensor(plain)
        if torch.nn.parameter.is_lazy(value):
            return self._odd_tensor(value, "it is not initialised yet; run the module once")
        why = why_no_memory(value)
        if why is None:
            return self._odd_tensor(value, "tensor subclasses cannot be stored yet; pass a plain tensor")
        return self._without_memory(value, why)

    def _without_memory(self, value: torch.Tensor, why: str) -> Node:
        if not self._is_target:
            return self._odd_tensor(value, why)
        number = self._seen.setdefault(id(value), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(value)
        return ("T", number)

    def _opened(self, value: Any) -> Node:
        try:
            state = self._open(value, tuple(self.keys))
        except OpeningError as error:
            raise self._refused(value, str(error)) from error.__cause__
        if state is value:
            return ("O", self._object(value))
        if isinstance(state, Mapping):
            return self.mapping(state)
        return self.tensor(state) if type(state) in PLAIN_TENSORS else self.other(state)

    def _shard(self, value: Any, describe: Describe) -> Node:
        try:
            found = describe(value)
            if isinstance(found, torch.Tensor):
                return self.tensor(found) if type(found) in PLAIN_TENSORS else self.other(found)
            if self._per_rank:
                raise refused(found.type_name, "it lies in a PerRank, whose values belong to one rank whole")
            sources = sources_of(found, is_target=self._is_target)
        except OverlappingShardsError as error:
            raise named(error, fqn_of(tuple(self.keys))) from None
        except UnsupportedLeafError as error:
            leaf = fqn_of(tuple(self.keys))
            text = f"state dict leaf {leaf!r}: {error}"
            raise refused_by_name(error, leaf, text) from error.__cause__
        number = self._seen.setdefault(identity_of(found, value), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(sources[0])
            self._shards[number] = (found, sources)
        return ("T", number)

    def placed(self) -> tuple[list[torch.Tensor], dict[int, ShardLeaf]]:
        """Return all tensors, the further parts of shards behind the others, and where each part lies."""
        tensors, shards = list(self.tensors), {}
        for number, (found, sources) in self._shards.items():
            where = (number, *range(len(tensors), len(tensors) + len(sources) - 1))
            tensors += sources[1:]
            boxes = boxes_of(found)
            shards[number] = ShardLeaf(found.global_shape, found.grid, boxes, where[: len(boxes)], found.is_first)
        return tensors, shards

    def _odd_tensor(self, value: torch.Tensor, why: str) -> Node:
        if self._allow_pickle:
            return ("O", self._object(value))
        raise self._refused(value, why)

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
        if value.layout is not torch.strided or dtype_name(value.dtype) is None or value.is_nested:
            nested = "nested " if value.is_nested else ""
            return self._odd_tensor(
                value, f"a {nested}tensor of layout {value.layout}, dtype {value.dtype} on {value.device}"
            )
        # The same elements under several names are stored once: same address, shape, strides and dtype.
        try:
            address = value.data_ptr()
        except RuntimeError:  # inside vmap, say
            return self._without_memory(value, why_no_memory(value) or NO_MEMORY)
        if address < NO_ADDRESS_BELOW:
            why = why_no_memory(value)
            if why is not None:
                return self._without_memory(value, why)
            address = address_of(value)
        key = (
            (address, value.dtype, value.shape, value.stride(), value.is_conj(), value.is_neg())
            if address
            else id(value)
        )
        if not address and value.numel():
            raise self._refused(value, NO_MEMORY)
        number = self._seen.setdefault(key, len(self.tensors))
        if number == len(self.tensors):
            if not is_whole(value):
                raise self._refused(value, SHRUNK)
            if value.is_conj() or value.is_neg():
                # IMPORTANT: kept until the walk ends. The original may be a temporary of `to_shards` or of a mapping,
                # and the next one at its address would be taken for the same tensor.
                self._lazy.append(value)
                value = value.resolve_conj().resolve_neg()
            self.tensors.append(value)
        return ("T", number)

    def _object(self, value: Any) -> int:
        self.objects.append(value)
        return len(self.objects) - 1

    def _typed_key(self, key: Any) -> Key:
        found = typed_key(key)
        if found is None:
            try:
                self.keys.append(f"{key!r:.80}")
            except ValueError:  # a number of more digits than Python writes out
                self.keys.append(f"<{type(key).__name__}>")
            raise self._refused(
                key,
                f"a key of type {type(key).__name__}; keys are str, int of 63 bits, float but NaN, bool, bytes, None, "
                "and tuples of these",
            )
        return found

    def _refused(self, value: Any, why: str) -> UnsupportedLeafError:
        leaf = fqn_of(tuple(self.keys))
        kind = type(value).__name__
        done = "filled" if self._is_target else "stored"
        return UnsupportedLeafError(
            f"state dict leaf {leaf!r} of type {kind} cannot be {done}: {why}", leaf=leaf, type_name=kind
        )


def hoisted(value: bytes) -> torch.Tensor:
    """Return `value` as a uint8 tensor: a copy."""
    return torch.frombuffer(bytearray(value), dtype=torch.uint8)


def is_flat(value: Sequence[Any], depth: int = 0) -> bool:
    """Whether a list, tuple or deque holds scalars only, or flat ones of them: then it is one object leaf."""
    if depth > MAX_DEPTH // 2:
        return False
    return set(map(type, value)) <= SCALARS or all(
        type(v) in SCALARS or (type(v) in (list, tuple) and is_flat(v, depth + 1)) or is_scalar(v) for v in value
    )


def plain_metadata(metadata: Any) -> Any:
    """`nn.Module.state_dict()._metadata` is an OrderedDict of dicts; a plain copy keeps what matters."""
    return (
        {k: dict(v) if isinstance(v, Mapping) else v for k, v in metadata.items()}
        if isinstance(metadata, Mapping)
        else metadata
    )
