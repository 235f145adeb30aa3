"""A nested state dict -> its tree, its tensors and its objects. `unflatten` is the reverse.

`flatten` runs in the training thread at every save, so it does only work whose result depends on the values. Names,
checks for duplicates and layouts belong to the plan, which is made once per structure.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from asyncckpt.errors import OverlappingShardsError, UnsupportedLeafError
from asyncckpt.format.state_tree import (
    ARRAY,
    BYTES,
    COMPOSITE,
    DICT,
    LIST,
    MAX_DEPTH,
    MAX_KEY_DEPTH,
    OBJECT,
    ORDERED_DICT,
    PER_RANK,
    TENSOR,
    TUPLE,
    Key,
    Node,
    Path,
    composite_nodes,
    fqn_of,
    is_storable,
    key_of,
    leaves,
    mapping_nodes,
    per_rank_nodes,
    python_key,
)
from asyncckpt.format.structure import Box
from asyncckpt.per_rank import PerRank
from asyncckpt.sharding.dtensor import describe_dtensor
from asyncckpt.sharding.mesh_layout import Grid
from asyncckpt.sharding.registry import Describe, describer_of
from asyncckpt.sharding.shard_claims import ShardClaim
from asyncckpt.sharding.shard_types import (
    Sharded,
    boxes_of,
    identity_of,
    sources_of,
    unsupported_shard,
    with_fqn,
    with_leaf,
)
from asyncckpt.state_dict.composite_tensors import Composite, decompose
from asyncckpt.state_dict.numpy_values import is_array, is_scalar, tensor_of
from asyncckpt.state_dict.stateful import StateDictCache, StateDictError, is_stateful
from asyncckpt.state_dict.unflatten import deque_form, mapping_form
from asyncckpt.torch_tensors import (
    NO_ADDRESS_BELOW,
    NO_MEMORY,
    SHRUNK,
    address_of,
    dtype_name,
    fits_in_storage,
    plain_parameter,
    why_no_memory,
)


class ShardLeaf(NamedTuple):
    """A tensor of which this process holds parts, in a flattened state dict.

    Attributes:
        global_shape: Shape of the whole tensor, in elements.
        grid: The same as in `Sharded`.
        boxes: The boxes that this process holds.
        sources: Aligned with `boxes`: index of each part into `Flattened.tensors`.
        is_first: The same as in `Sharded`.
    """

    global_shape: tuple[int, ...]
    grid: Grid | None
    boxes: tuple[Box, ...]
    sources: tuple[int, ...]
    is_first: bool

    def claim(self, fqn: str, dtype: str) -> ShardClaim:
        """Return the claim that this rank sends to the others."""
        boxes = () if self.grid is not None else self.boxes
        return ShardClaim(fqn, dtype, self.global_shape, self.grid, boxes, self.is_first)


def typed_key(key: Any) -> Key | None:
    """Return the tree's key for a key of a state dict, with numpy scalars as Python's; None: it cannot be stored."""
    return key_of(_without_numpy(key, 0))


def _without_numpy(key: Any, depth: int) -> Any:
    if is_scalar(key):
        return key.item()
    if isinstance(key, tuple) and depth < MAX_KEY_DEPTH:
        return tuple(_without_numpy(member, depth + 1) for member in key)
    return key


def check_keys(tree: Node) -> None:
    """Check that the index can hold all keys of a tree, and all names of components. Called when a plan is made.

    Raises:
        UnsupportedLeafError: It cannot hold a key; names its FQN.
    """
    for path, node in (*mapping_nodes(tree), *composite_nodes(tree)):
        for key in node[1][::2]:
            if not is_storable(key):
                leaf = fqn_of((*path, key))
                raise UnsupportedLeafError(
                    f"state dict leaf {leaf[:200]!r}: the key {python_key(key)!r:.80} is out of range, "
                    "too long or not valid text",
                    leaf=leaf,
                    type_name=type(python_key(key)).__name__,
                )


class Flattened:
    """A flattened state dict. Nothing in it is a copy.

    Attributes:
        tree: The tree (`format.state_tree`), whose leaves are tensor numbers and object numbers.
        tensors: Tensors by number; a tensor with several paths occurs once. For a shard, the first part is at its
            number; further parts follow after the last number.
        objects: The other leaves by object number.
        allow_pickle: Whether objects of any type may be stored.
        shards: By tensor number, the tensors of which this process holds parts.
        n_numbers: Number of tensor numbers.
        types: Of a result of `flatten`, by full name, the types that `composite_tensors.compose` needs.
    """

    __slots__ = ("allow_pickle", "n_numbers", "objects", "shards", "tensors", "tree", "types")

    def __init__(
        self,
        tree: Node,
        tensors: list[torch.Tensor],
        objects_: list[Any],
        *,
        allow_pickle: bool = False,
        shards: Mapping[int, ShardLeaf] | None = None,
        n_numbers: int | None = None,
        types: Mapping[str, type] | None = None,
    ) -> None:
        self.types: Mapping[str, type] = types or {}
        self.tree, self.tensors, self.objects, self.allow_pickle = tree, tensors, objects_, allow_pickle
        self.shards: Mapping[int, ShardLeaf] = shards or {}
        self.n_numbers = len(tensors) if n_numbers is None else n_numbers

    @property
    def fqns(self) -> list[str]:
        """FQN of each tensor by its first path."""
        names: list[str | None] = [None] * len(self.tensors)
        for path, node in leaves(self.tree):
            if node[0] != OBJECT and names[node[1]] is None:
                names[node[1]] = fqn_of(path)
        return [n for n in names if n is not None]

    @property
    def per_rank(self) -> frozenset[int]:
        """Numbers of the tensors of which a path is in a `PerRank`."""
        return frozenset(
            leaf[1] for _, node in per_rank_nodes(self.tree) for _, leaf in leaves(node) if leaf[0] != OBJECT
        )

    @property
    def common(self) -> list[int]:
        """Numbers of the tensors that are neither shards nor `PerRank`, ascending."""
        own = self.per_rank
        return [n for n in range(self.n_numbers) if n not in own and n not in self.shards]

    def name_of(self, source: int) -> str:
        """Return the FQN of the tensor at index `source` of `tensors`."""
        if source >= self.n_numbers:
            source = next(n for n, leaf in self.shards.items() if source in leaf.sources)
        return self.fqns[source]


def object_fqn(tree: Node, number: int) -> str:
    """Return the FQN of an object by its number: a leaf, `_metadata` of an OrderedDict, or a composite tensor."""
    for path, node in leaves(tree):
        if node == (OBJECT, number):
            return fqn_of(path)
    for path, node in composite_nodes(tree):
        if node[2] == number:
            return fqn_of(path)
    return next((fqn_of((*path, "_metadata")) for path, node in mapping_nodes(tree) if node[2:] == (number,)), "")


def composite_kind(tree: Node, number: int) -> str | None:
    """Return the kind of the composite tensor that has an object, by the object's number; None: there is none."""
    found = (node[3] for _, node in composite_nodes(tree) if node[2] == number)
    return next(found, None)


HOIST_NBYTES = 64 * 1024
"""Values of type bytes of at least this size are stored as tensors, not as objects in JSON. Chosen, not measured."""

PLAIN_TENSORS = frozenset(
    {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer if hasattr(torch.nn, "Buffer") else torch.Tensor}
)
SCALARS = frozenset({int, float, bool, str, type(None), complex})
StateOf = Callable[[Any, Path], Any]
"""(object with a `state_dict()`, its path) -> its state; or the object itself, which makes it a leaf."""


def check_mapping(state_dict: Any) -> None:
    """Check that a state dict is a mapping.

    Raises:
        UnsupportedLeafError: It is not.
    """
    if not isinstance(state_dict, Mapping):
        raise UnsupportedLeafError(
            f"the state dict is a {type(state_dict).__name__}, expected a dict, such as {{'model': model}}",
            leaf="",
            type_name=type(state_dict).__name__,
        )


def flatten(
    state_dict: Any, state_of: StateOf | None = None, *, allow_pickle: bool = False, is_target: bool = False
) -> Flattened:
    """Return the tree, tensors and objects of `state_dict`.

    Args:
        state_dict: Nested dicts, lists and tuples of leaves.
        state_of: Called for every object with a `state_dict()`; None: its `state_dict()` is called.
        allow_pickle: Whether a tensor that cannot be stored as a tensor becomes an object leaf; else it is refused.
        is_target: Whether the state dict will be filled, not stored. Tensors without memory (meta, fake) are then
            accepted, and the caller must handle them.

    Raises:
        UnsupportedLeafError: It is not a mapping, or a leaf cannot be stored, or filled; `leaf` is its FQN.
    """
    check_mapping(state_dict)
    walk = _Walk(state_of or StateDictCache(), allow_pickle, is_target)
    tree = walk.mapping(state_dict)
    tensors, shards = walk.tensors_and_shards()
    n_numbers = len(walk.tensors)
    return Flattened(
        tree, tensors, walk.objects, allow_pickle=allow_pickle, shards=shards, n_numbers=n_numbers, types=walk.types
    )


class _Walk:
    """One pass over a state dict; `keys` is the path of the current value."""

    __slots__ = (
        "_allow_pickle",
        "_by_components",
        "_is_target",
        "_kept_alive",
        "_per_rank",
        "_seen",
        "_shards",
        "_state_of",
        "keys",
        "objects",
        "tensors",
        "types",
    )

    def __init__(self, state_of: StateOf, allow_pickle: bool, is_target: bool) -> None:
        self._state_of, self._allow_pickle, self._is_target = state_of, allow_pickle, is_target
        self._per_rank = False
        self.tensors: list[torch.Tensor] = []
        self.objects: list[Any] = []
        self.keys: list[Any] = []
        self._seen: dict[Any, int] = {}
        self._kept_alive: list[torch.Tensor] = []
        self._by_components: dict[Any, tuple[Node, dict[str, Any]]] = {}
        self.types: dict[str, type] = {}
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
            form = None if type(value) is dict else mapping_form(value)
            return (DICT, tuple(out)) if form is None else (DICT, tuple(out), form)
        metadata = getattr(value, "_metadata", None)
        return (ORDERED_DICT, tuple(out), None if metadata is None else self._object(plain_metadata(metadata)))

    def other(self, value: Any) -> Node:
        kind = type(value)
        if kind in SCALARS:
            return (OBJECT, self._object(value))
        if kind is dict or kind is OrderedDict:
            return self.mapping(value)
        describe = describer_of(kind)
        if describe is not None:
            return self._shard(value, describe)
        if is_stateful(value):
            return self._stateful(value)
        if isinstance(value, Mapping):
            return self.mapping(value)
        if isinstance(value, PerRank):
            return self._per_rank_value(value)
        if isinstance(value, torch.Tensor):
            return self._subclass(value)
        if kind is list or (isinstance(value, tuple) and kind is not torch.Size):
            if is_plain_sequence(value):
                return (OBJECT, self._object(value))
            return self._sequence(LIST if kind is list else TUPLE, value)
        if isinstance(value, deque):
            return (
                (OBJECT, self._object(value))
                if is_plain_sequence(value)
                else (*self._sequence(LIST, value), deque_form(value))
            )
        if kind is bytes and len(value) >= HOIST_NBYTES:
            self.tensors.append(as_uint8_tensor(value))
            return (BYTES, len(self.tensors) - 1)
        if is_array(value) and (elements := tensor_of(value)) is not None:
            return (ARRAY, self.tensor(elements)[1])
        return (OBJECT, self._object(value))

    def _subclass(self, value: torch.Tensor) -> Node:
        plain = plain_parameter(value)
        if plain is not None:
            return self.tensor(plain)
        if torch.nn.parameter.is_lazy(value):
            return self._unsupported_tensor(value, "it is not initialised yet; run the module once")
        found = self._decomposed(value)
        if found is not None:
            return self._composite(value, found)
        why = why_no_memory(value)
        if why is None:
            return self._unsupported_tensor(
                value, "its class does not have __tensor_flatten__ and __tensor_unflatten__; pass a plain tensor"
            )
        return self._without_memory(value, why)

    def _decomposed(self, value: torch.Tensor) -> Composite | None:
        try:
            return decompose(value)
        except UnsupportedLeafError as error:
            raise self._refused(value, error.message) from error.__cause__

    def _composite(self, value: torch.Tensor, found: Composite) -> Node:
        if len(self.keys) > MAX_DEPTH - 2:
            raise self._refused(value, f"nested deeper than {MAX_DEPTH} levels, or inside itself")
        members: list[Any] = []
        for name, component in found.tensors.items():
            self.keys.append(name)
            node = self.tensor(component) if type(component) in PLAIN_TENSORS else self.other(component)
            if node[0] not in (TENSOR, COMPOSITE):  # with allow_pickle
                raise self._refused(component, "a component of a tensor cannot be pickled")
            members += (name, node)
            self.keys.pop()
        self._kept_alive += found.tensors.values()
        # Two names of one tensor get one node: the names differ in nothing, and become one tensor again.
        node, rest = self._by_components.setdefault((found.kind, tuple(members)), ((), found.rest))
        if node and is_equal(rest, found.rest):
            return node
        made = (COMPOSITE, tuple(members), self._object(found.rest), found.kind)
        self._by_components[found.kind, tuple(members)] = made, found.rest
        self.types.update(found.types)
        return made

    def _without_memory(self, value: torch.Tensor, why: str) -> Node:
        if not self._is_target:
            return self._unsupported_tensor(value, why)
        number = self._seen.setdefault(id(value), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(value)
        return (TENSOR, number)

    def _stateful(self, value: Any) -> Node:
        try:
            state = self._state_of(value, tuple(self.keys))
        except StateDictError as error:
            raise self._refused(value, str(error)) from error.__cause__
        if state is value:
            return (OBJECT, self._object(value))
        if isinstance(state, Mapping):
            return self.mapping(state)
        return self.tensor(state) if type(state) in PLAIN_TENSORS else self.other(state)

    def _shard(self, value: Any, describe: Describe) -> Node:
        if describe is describe_dtensor and type(value._local_tensor) not in PLAIN_TENSORS:
            parts = self._decomposed(value)
            if parts is not None:
                return self._composite(value, parts)
        try:
            found = describe(value)
            if isinstance(found, torch.Tensor):
                return self.tensor(found) if type(found) in PLAIN_TENSORS else self.other(found)
            if self._per_rank:
                raise unsupported_shard(found.type_name, "it is in a PerRank, which can hold whole tensors only")
            sources = sources_of(found, is_target=self._is_target)
        except OverlappingShardsError as error:
            raise with_fqn(error, fqn_of(tuple(self.keys))) from None
        except UnsupportedLeafError as error:
            leaf = fqn_of(tuple(self.keys))
            text = f"state dict leaf {leaf!r}: {error}"
            raise with_leaf(error, leaf, text) from error.__cause__
        number = self._seen.setdefault(identity_of(found, value), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(sources[0])
            self._shards[number] = (found, sources)
        return (TENSOR, number)

    def tensors_and_shards(self) -> tuple[list[torch.Tensor], dict[int, ShardLeaf]]:
        """Return all tensors, with the further parts of shards at the end, and the shards by tensor number."""
        tensors, shards = list(self.tensors), {}
        for number, (found, sources) in self._shards.items():
            sources_at = (number, *range(len(tensors), len(tensors) + len(sources) - 1))
            tensors += sources[1:]
            boxes = boxes_of(found)
            shards[number] = ShardLeaf(found.global_shape, found.grid, boxes, sources_at[: len(boxes)], found.is_first)
        return tensors, shards

    def _unsupported_tensor(self, value: torch.Tensor, why: str) -> Node:
        if self._allow_pickle:
            return (OBJECT, self._object(value))
        raise self._refused(value, why)

    def _per_rank_value(self, mark: PerRank) -> Node:
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
        return node if outer else (PER_RANK, node)

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
            found = self._decomposed(value)
            if found is not None:
                return self._composite(value, found)
            nested = "nested " if value.is_nested else ""
            return self._unsupported_tensor(
                value, f"a {nested}tensor of layout {value.layout}, dtype {value.dtype} on {value.device}"
            )
        # The same elements under several names are stored once: same address, shape, strides and dtype.
        try:
            address = value.data_ptr()
        except RuntimeError:  # for example inside vmap
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
            if not fits_in_storage(value):
                raise self._refused(value, SHRUNK)
            if value.is_conj() or value.is_neg():
                # IMPORTANT: keep a reference until the walk ends. The original may be a temporary of `to_shards` or of
                # a mapping, and the next tensor at its address would be taken for the same tensor.
                self._kept_alive.append(value)
                value = value.resolve_conj().resolve_neg()
            self.tensors.append(value)
        return (TENSOR, number)

    def _object(self, value: Any) -> int:
        self.objects.append(value)
        return len(self.objects) - 1

    def _typed_key(self, key: Any) -> Key:
        found = typed_key(key)
        if found is None:
            try:
                self.keys.append(f"{key!r:.80}")
            except ValueError:  # an integer with more digits than Python converts to text
                self.keys.append(f"<{type(key).__name__}>")
            raise self._refused(
                key,
                f"a key of type {type(key).__name__}; a key must be a str, an int of 63 bits, a float except NaN, a "
                "bool, bytes, None, or a tuple of these",
            )
        return found

    def _refused(self, value: Any, why: str) -> UnsupportedLeafError:
        leaf = fqn_of(tuple(self.keys))
        kind = type(value).__name__
        done = "filled" if self._is_target else "stored"
        return UnsupportedLeafError(
            f"state dict leaf {leaf!r} of type {kind} cannot be {done}: {why}", leaf=leaf, type_name=kind
        )


def is_equal(one: Any, other: Any) -> bool:
    """Whether two values are equal; False if that cannot be determined."""
    try:
        return bool(one == other)
    except Exception:  # raised by values of a tensor's class
        return False


def as_uint8_tensor(value: bytes) -> torch.Tensor:
    """Return a copy of `value` as a flat uint8 tensor."""
    return torch.frombuffer(bytearray(value), dtype=torch.uint8)


def is_plain_sequence(value: Sequence[Any], depth: int = 0) -> bool:
    """Whether a list, tuple or deque holds only scalars, and plain lists and tuples of them, so that it is one leaf."""
    if depth > MAX_DEPTH // 2:
        return False
    return set(map(type, value)) <= SCALARS or all(
        type(v) in SCALARS or (type(v) in (list, tuple) and is_plain_sequence(v, depth + 1)) or is_scalar(v)
        for v in value
    )


def plain_metadata(metadata: Any) -> Any:
    """Return the `_metadata` of `nn.Module.state_dict()`, an OrderedDict of dicts, as plain dicts."""
    return (
        {k: dict(v) if isinstance(v, Mapping) else v for k, v in metadata.items()}
        if isinstance(metadata, Mapping)
        else metadata
    )
