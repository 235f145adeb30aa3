"""Converts an unpickled value into a tree of leaves, and adds its tensors and objects to a `ContentsBuilder`.

A leaf that cannot be read, for example because it holds an `OpaqueGlobal`, becomes an `UnreadLeaf`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from asyncckpt.format.objects import Opaque, Record, UnknownTypeError, encode_value
from asyncckpt.format.state_tree import (
    ARRAY,
    BYTES,
    DICT,
    LIST,
    MAX_DEPTH,
    MAX_KEY_CHARS,
    OBJECT,
    ORDERED_DICT,
    TENSOR,
    TUPLE,
    Node,
    Path,
    fqn_of,
    key_of,
)
from asyncckpt.format.structure import MAX_TENSORS
from asyncckpt.interop.sources.pickle_globals import StorageRef, TensorRef, dtype_text, size_of
from asyncckpt.interop.sources.source import ContentsBuilder
from asyncckpt.interop.sources.unpickler import DICTS, READ_AS, Maker, OpaqueGlobal, UnpicklingError, members_of
from asyncckpt.interop.sources.unread_leaves import UnreadLeaf
from asyncckpt.storage.contents import Inline, Strided

Locate = Callable[[StorageRef], tuple[int, int]]
"""Returns where the bytes of a storage begin: (part, offset)."""

LONG_NBYTES = 64 * 1024
"""A `bytes` leaf of at least this length is stored like a tensor, as in asyncckpt saves."""

_NUMPY = {
    **{"|b1": "bool", "|u1": "uint8", "|i1": "int8", "<u2": "uint16", "<i2": "int16", "<u4": "uint32", "<i4": "int32"},
    **{"<u8": "uint64", "<i8": "int64", "<f2": "float16", "<f4": "float32", "<f8": "float64", "<c8": "complex64"},
    "<c16": "complex128",
}

_OF_ORDERED = "attributes of OrderedDicts are not kept"
_SHARED = "containers that were one object are stored apart"

_LENGTHS = frozenset({str, bytes, bytearray})
_SHAREABLE = frozenset({*DICTS, list, set, bytearray})
"""Mutable types: a change of an object is seen through all references to it, so two equal objects are not the same."""
_HELD_PER_BYTE, _HELD_ANYWAY = 16, 64 << 20
"""Limit of texts and bytes in memory: so many for each byte of the files, and so many in any case. A pickle may refer
to one text many times. Chosen, not measured."""

_SCALARS = frozenset({int, float, bool, str, type(None), complex})
_SHOWN_CHARS = 80
_MAX_LOOKS = 1 << 20
"""Values that are visited in leaves that cannot be read, to count tensors: half a second. Chosen, not measured."""


class TreeBuilder:
    """Builds the tree of one checkpoint.

    Args:
        builder: Gets the tensors and objects.
        shards: Adds a tensor of which the value is a part, and returns its node; None: it is no such part.
    """

    def __init__(self, builder: ContentsBuilder, shards: Callable[[Any, Path], Node | None] | None = None) -> None:
        self._builder, self._shards = builder, shards
        self._by_ref: dict[Any, int] = {}
        self._by_id: dict[int, tuple[Any, Node]] = {}  # with the object, so that its id stays its own
        self._met: dict[int, tuple[Any, Path]] = {}
        self._extents: list[tuple[int, int, int, int, str]] = []
        self._n_nodes = self._n_looks = self._n_held = 0

    def add(self, value: Any, path: Path, locate: Locate) -> Node:
        """Add all leaves of an unpickled value; return its node.

        Args:
            value: A value of the types that `pickle_globals` creates.
            path: Path of the value.
            locate: Returns where the bytes of a storage begin.

        Raises:
            UnsupportedFormatError: There are too many values or levels, or two keys of a dict are the same text; names
                the leaf.
            CorruptCheckpointError: A tensor is outside of its file.
        """
        node = self._node_of(value, path, locate)
        self._note_views()
        return node

    def _node_of(self, value: Any, path: Path, locate: Locate) -> Node:
        self._count(path)
        self._note_shared(value, path)
        if len(path) > MAX_DEPTH - 2:
            raise self._builder.unsupported(f"nested deeper than {MAX_DEPTH} levels, at {fqn_of(path)[:200]!r}")
        kind = type(value)
        if kind is TensorRef:
            return self._tensor_of(value, path, locate)
        if self._shards is not None and (whole := self._shards(value, path)) is not None:
            return whole
        if kind in DICTS:
            keys = [key_of(self._read_as(key, path)) for key in value]
            if None not in keys:
                return self._mapping(value, keys, path, locate)
        if kind in (list, tuple) and not self._is_flat(value, path):
            children = tuple(self._node_of(child, (*path, n), locate) for n, child in enumerate(value))
            return (LIST if kind is list else TUPLE, children)
        is_array = kind is Record and value.kind == "numpy.ndarray"
        if is_array or (kind is bytes and len(value) >= LONG_NBYTES):
            if id(value) not in self._by_id:
                added = (
                    self._array(value, path) if is_array else self._elements(BYTES, value, "uint8", (len(value),), path)
                )
                self._by_id[id(value)] = (value, added)
            return self._by_id[id(value)][1]
        return self._object(value, path)

    def _mapping(self, value: Any, keys: list[Any], path: Path, locate: Locate) -> Node:
        """Add a dict whose keys can be keys of a tree. A member whose key is too long becomes an `UnreadLeaf`."""
        if len(set(keys)) != len(keys):
            raise self._builder.unsupported(f"two keys of {fqn_of(path)!r} are one text")
        members: list[Any] = []
        for number, (key, child) in enumerate(zip(keys, value.values(), strict=True)):
            if len(str(key)) <= MAX_KEY_CHARS:
                members += (key, self._node_of(child, (*path, key), locate))
                continue
            short = f"{str(key)[:_SHOWN_CHARS]}... (key {number}, {len(str(key))} characters)"
            while short in value:
                short += "'"
            members += (short, self._unread("a key that is too long", f"more than {MAX_KEY_CHARS} characters", child))
        if type(value) is OrderedDict:
            self._note_others(value, path)
            metadata = getattr(value, "_metadata", None)
            return (ORDERED_DICT, tuple(members), None if metadata is None else self._versions(metadata, path))
        return (DICT, tuple(members)) if type(value) is dict else (DICT, tuple(members), value.form)

    def _note_others(self, value: OrderedDict[Any, Any], path: Path) -> None:
        if others := getattr(value, "_others", ""):
            self._note(_OF_ORDERED, path, f" ({others})")

    def _read_as(self, value: Any, path: Path) -> Any:
        """Return a value with a plain type, and record the type that it loses."""
        if type(value) not in READ_AS:
            return value
        plain, said = READ_AS[type(value)]
        self._note(said, path)
        return plain(value)

    def _note(self, said: str, path: Path, more: str = "") -> None:
        self._builder.source.changed.setdefault(said, {}).setdefault(fqn_of(path), more)

    def _note_shared(self, value: Any, path: Path) -> None:
        """Record a mutable container that occurs twice: it is stored twice. Held, so that its ID is not reused."""
        if id(value) in self._met:
            self._note(_SHARED, self._met[id(value)][1])
            self._note(_SHARED, path)
        elif type(value) in _SHAREABLE:
            self._met[id(value)] = (value, path)

    def _note_views(self) -> None:
        """Record tensors of one pickle whose elements overlap, except tied ones, which are the same tensor."""
        shared: set[int] = set()
        furthest = (-1, -1, -1)
        for part, start, stop, number, _ in sorted(self._extents):
            if (part, start) < furthest[:2] and number != furthest[2]:
                shared |= {number, furthest[2]}
            furthest = max(furthest, (part, stop, number))
        for name in sorted(fqn for *_, number, fqn in self._extents if number in shared):
            self._builder.source.changed.setdefault("views of the same elements are stored apart", {})[name] = ""
        self._extents.clear()

    def _object(self, value: Any, path: Path) -> Node:
        """Add an object: a leaf that is no tensor, or the `_metadata` of a container."""
        plain = self._plain(value, path)
        try:
            raw = encode_value(plain, lambda v: (v.tag, v.payload) if isinstance(v, Opaque) else None)
        except UnknownTypeError as error:
            inside = f"inside a {type(plain).__name__}" if error.value is not plain else ""
            return self._unread(_kind_of(error.value), inside, value)
        self._builder.source.objects.append(raw)
        return (OBJECT, len(self._builder.source.objects) - 1)

    def _unread(self, kind: str, why: str, value: Any) -> Node:
        self._builder.source.objects.append(UnreadLeaf(kind, why, self._tensors_in(value)))
        return (OBJECT, len(self._builder.source.objects) - 1)

    def _versions(self, metadata: Any, path: Path) -> int | None:
        """Add the `_metadata` of an OrderedDict. If it cannot be read, it is left out: the rest is usable without."""
        plain = dict(metadata) if type(metadata) is OrderedDict else metadata  # as all of torch's are
        objects, number = self._builder.source.objects, self._object(plain, (*path, "_metadata"))[1]
        if type(objects[number]) is not UnreadLeaf:
            return int(number)
        self._note(
            "the _metadata of modules' state dicts, their versions, were not read", path, f" ({objects.pop().kind})"
        )
        return None

    def _tensors_in(self, value: Any) -> int | None:
        """Count the tensors in a value that cannot be read; None after `_MAX_LOOKS` values in all leaves."""
        todo, met, count = [value], set(), 0
        while todo:
            found = todo.pop()
            if id(found) in met:
                continue
            met.add(id(found))
            count += type(found) is TensorRef
            members = members_of(found)
            self._n_looks += 1 + len(members)  # also of those that were met before
            if self._n_looks > _MAX_LOOKS:
                return None
            todo += members
        return count

    def _count(self, path: Path) -> None:
        """Count a value, and refuse too many: a pickle may refer to one list many times."""
        self._n_nodes += 1
        if self._n_nodes > MAX_TENSORS:
            raise self._builder.unsupported(f"more than {MAX_TENSORS} values, at {fqn_of(path)[:200]!r}")

    def _is_flat(self, value: Any, path: Path, depth: int = 0) -> bool:
        """Whether a list or tuple holds only scalars, or lists and tuples of scalars: it is one leaf, as in saves."""
        self._count(path)
        return depth <= MAX_DEPTH // 2 and all(
            type(v) in _SCALARS
            or (type(v) in READ_AS and isinstance(v, str))
            or (type(v) in (list, tuple) and self._is_flat(v, path, depth + 1))
            or (type(v) is Opaque and v.tag == "numpy.scalar")
            for v in value
        )

    def _plain(self, value: Any, path: Path, depth: int = 0) -> Any:
        """Return an object leaf with dicts in place of OrderedDicts, and count its values."""
        self._count(path)
        if depth:
            self._note_shared(value, path)
        value = self._read_as(value, path)
        kind = type(value)
        if depth > MAX_DEPTH:
            raise self._builder.unsupported(f"nested deeper than {MAX_DEPTH} levels, at {fqn_of(path)[:200]!r}")
        if kind in (dict, OrderedDict):
            if kind is OrderedDict:
                self._note_others(value, path)
                self._note("an OrderedDict became a dict", path)
                if getattr(value, "_metadata", None) is not None:
                    self._note(_OF_ORDERED, path, " (_metadata)")
            pairs = value.items()
            return {self._plain(k, path, depth + 1): self._plain(v, path, depth + 1) for k, v in pairs}
        if kind in (list, tuple, set, frozenset):
            return kind(self._plain(member, path, depth + 1) for member in value)
        if kind in _LENGTHS:
            self._n_held += len(value)
            beyond = self._n_held - _HELD_ANYWAY
            if beyond > 0 and beyond > _HELD_PER_BYTE * self._builder.files_nbytes:
                raise self._builder.unsupported("what its leaves hold is out of proportion to its length")
        return value

    def _tensor_of(self, ref: TensorRef, path: Path, locate: Locate) -> Node:
        place = ref.place(*locate(ref.storage))
        if ref.attributes:
            self._note(
                "attributes of tensors are not kept", path, f" ({', '.join(name[:80] for name in ref.attributes)})"
            )
        if ref.is_parameter or ref.requires_grad:
            self._note("a Parameter became a tensor" if ref.is_parameter else "requires_grad is not kept", path)
        part, offset, span = place.part, place.offset, ref.nbytes
        if isinstance(place, Strided):
            self._note("a tensor that was strided otherwise became row-major", path)
            span = place.nbytes
        key = (place, ref.dtype, ref.size)
        if key not in self._by_ref:
            at = (self._builder.place(part, ref.nbytes, place), 0) if isinstance(place, Strided) else (part, offset)
            self._by_ref[key] = self._builder.whole_tensor(fqn_of(path), ref.dtype, ref.size, *at, ref.nbytes)
        if span:
            self._extents.append((part, offset, offset + span, self._by_ref[key], fqn_of(path)))
        return (TENSOR, self._by_ref[key])

    def _array(self, array: Record, path: Path) -> Node:
        """Add a numpy array. Its state is (version, shape, dtype, whether column-major, bytes)."""
        try:
            _, shape, dtype, by_columns, data = array.state
            name, sizes = _NUMPY.get(dtype_text(dtype)), size_of(shape)
            by_columns = by_columns and len(sizes) > 1 and 0 not in sizes
            if name is None or by_columns or not isinstance(data, (bytes, bytearray)):
                raise UnpicklingError("an array of objects, of texts, or stored by columns")
        except (UnpicklingError, TypeError, ValueError, AttributeError) as error:
            return self._unread("numpy.ndarray", str(error), array)
        return self._elements(ARRAY, data, name, sizes, path)

    def _elements(self, kind: str, data: bytes | bytearray, dtype: str, sizes: tuple[int, ...], path: Path) -> Node:
        """Add a tensor whose elements are in the pickle; the builder keeps them in memory."""
        part = self._builder.place(-1, len(data), Inline(bytes(data)))
        return (kind, self._builder.whole_tensor(fqn_of(path), dtype, sizes, part, 0, len(data)))


def _kind_of(value: Any) -> str:
    if isinstance(value, (OpaqueGlobal, Maker)):
        return value.name
    if isinstance(value, TensorRef):
        return "tensor"
    return value.kind if isinstance(value, Record) else type(value).__name__
