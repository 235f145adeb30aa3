"""From a value that was unpickled to a tree of leaves: its tensors and objects are added to an `Assembly`.

A leaf that holds what cannot be read, such as a `Stranger`, is an `Unread` among the objects; the others are as ever.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from asyncckpt.dtypes import DTYPES
from asyncckpt.foreign.as_saved import Met, view_of
from asyncckpt.foreign.assembly import Assembly
from asyncckpt.foreign.long_values import LONG_NBYTES, LongBytes, LongText
from asyncckpt.foreign.numpy_globals import dtype_text
from asyncckpt.foreign.pickle_values import (
    ATTRIBUTES,
    OF_ORDERED,
    PARAMETER,
    READ_AS,
    REQUIRES_GRAD,
    ROW_MAJOR,
    UNORDERED,
    Defaulting,
    LayoutText,
    Maker,
    PathText,
    Tally,
)
from asyncckpt.foreign.refusals import UnpicklingError
from asyncckpt.foreign.strangers import Stranger, members_of
from asyncckpt.foreign.torch_globals import TensorRef, size_of
from asyncckpt.format.keys import MAX_KEY_CHARS, key_of
from asyncckpt.format.objects import Opaque, UnknownTypeError, encode_value
from asyncckpt.format.records import Record
from asyncckpt.format.structure import MAX_TENSORS, Chunk
from asyncckpt.format.tree import MAX_DEPTH, Node, Path, fqn_of
from asyncckpt.storage.source import Inline, Latin1, Strided
from asyncckpt.storage.unread import Unread

Locate = Callable[[TensorRef | LongBytes], "tuple[int, int] | Strided"]
"""Says where a tensor lies: (part, offset), or strided in a part; and where long bytes do, or their text."""

_NUMPY = {
    **{"|b1": "bool", "|u1": "uint8", "|i1": "int8", "<u2": "uint16", "<i2": "int16", "<u4": "uint32", "<i4": "int32"},
    **{"<u8": "uint64", "<i8": "int64", "<f2": "float16", "<f4": "float32", "<f8": "float64", "<c8": "complex64"},
    "<c16": "complex128",
}

_LENGTHS = frozenset({str, bytes, bytearray, LongBytes})
_HELD_PER_BYTE, _HELD_ANYWAY = 16, 64 << 20
"""Of texts and bytes that are held, for each byte of the files: a pickle may name one many times over. Chosen."""

_Held = bytes | bytearray | LongBytes
_SCALARS = frozenset({int, float, bool, str, type(None), complex})
_SHOWN_CHARS = 80
_MAX_LOOKS = 1 << 20
"""At values in leaves that are not read. Chosen: half a second."""


class Growth:
    """The values of one checkpoint.

    Args:
        assembly: Takes the leaves.
    """

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self._by_ref: dict[Any, int] = {}
        self._by_array: dict[int, tuple[Record, Node]] = {}
        self._by_bytes: dict[int, tuple[bytes | LongBytes, Node]] = {}
        self._as_saved = assembly.source.as_saved
        self._met = Met(self._as_saved)
        self._is_plainer, self._is_leaf = False, True
        self._n_nodes = self._n_looks = self._n_held = 0

    def node_of(self, value: Any, path: Path, locate: Locate) -> Node:
        """Add everything in a value that was unpickled.

        Args:
            value: Of the kinds that `torch_globals` makes.
            path: Where it stands.
            locate: As it says.

        Raises:
            UnsupportedFormatError: Too many values, nested too deeply, or keys that are one text; names the leaf.
            CorruptCheckpointError: A tensor lies outside of its file.
        """
        self._count(path)
        self._met.note(value, path)
        saved, form = value, _form_of(value)
        value = dict(value) if form and self._keys_fit(value) else self._read_as(value, path)
        if len(path) > MAX_DEPTH - 2:
            raise self._assembly.unsupported(f"nested deeper than {MAX_DEPTH} levels, at {fqn_of(path)[:200]!r}")
        kind = type(value)
        if kind is TensorRef:
            return self._tensor_of(value, path, locate)
        if kind in (dict, OrderedDict) and any(type(key) is PathText for key in value):
            value = self._with_text_keys(value, path)
        if kind in (dict, OrderedDict) and self._keys_fit(value):
            members = tuple(
                part
                for number, (key, child) in enumerate(value.items())
                for part in self._member(number, key, child, value, path, locate)
            )
            if kind is dict:
                return ("d", members, *form)
            metadata = getattr(value, "_metadata", None)
            return ("o", members, None if metadata is None else self._versions(metadata, path))
        if kind in (list, tuple) and not self._is_flat(value, path):
            children = tuple(self.node_of(child, (*path, n), locate) for n, child in enumerate(value))
            return ("l" if kind is list else "t", children)
        if kind is Record and value.kind == "numpy.ndarray":
            return self._array(value, path, locate)
        if getattr(value, "kind", kind) is bytes and len(value) >= LONG_NBYTES:  # as in saves of ours
            if id(value) not in self._by_bytes:
                node = ("B", self._elements(value, "uint8", (len(value),), path, locate))
                self._by_bytes[id(value)] = (value, node)
            return self._by_bytes[id(value)][1]
        return self._object(saved, path)

    def _keys_fit(self, value: dict[Any, Any]) -> bool:
        """Whether all keys of a dict have a form in a tree."""
        return all(type(key) in (int, str, PathText) or key_of(key) is not None for key in value)

    def _member(
        self, number: int, key: Any, child: Any, among: dict[Any, Any], path: Path, locate: Locate
    ) -> tuple[Any, Node]:
        """Return a member of a dict. One whose key is too long to be stored is not read: it has the key's beginning."""
        key = key_of(key)
        if len(str(key)) <= MAX_KEY_CHARS:
            return key, self.node_of(child, (*path, key), locate)
        short = f"{str(key)[:_SHOWN_CHARS]}... (key {number}, {len(str(key))} characters)"
        while short in among:
            short += "'"
        return short, self._unread("a key that is too long", f"more than {MAX_KEY_CHARS} characters", child)

    def _read_as(self, value: Any, path: Path) -> Any:
        """Return a value with a plain type, and note what it is not any more."""
        others = getattr(value, "_others", "") if type(value) is OrderedDict else ""
        if others:
            self._note(OF_ORDERED, path, f" ({others})")
        if type(value) not in READ_AS:
            return value.text() if type(value) is LongText else value
        plain, said = READ_AS[type(value)]
        self._note(said, path)
        self._is_plainer |= type(value) in (Tally, LayoutText)  # which a pickle for `weights_only` may hold
        return plain(value)

    def _with_text_keys(self, value: Any, path: Path) -> Any:
        found: dict[Any, Any] = OrderedDict() if type(value) is OrderedDict else {}
        found.update((self._read_as(key, path), child) for key, child in value.items())
        if len(found) != len(value):
            raise self._assembly.unsupported(f"two keys of {fqn_of(path)!r} are one text")
        if hasattr(value, "_metadata"):
            found._metadata = value._metadata  # type: ignore[attr-defined]
        return found

    def _note(self, said: str, path: Path, more: str = "") -> None:
        self._assembly.source.changed.setdefault(said, {}).setdefault(fqn_of(path), more)

    def _object(self, value: Any, path: Path, *, is_leaf: bool = True) -> Node:
        """Add a leaf that is no tensor, or what belongs to a container."""
        self._is_plainer, self._is_leaf = False, is_leaf
        plain = self._plain(value, path)
        try:
            raw = encode_value(plain, lambda v: (v.tag, v.payload) if isinstance(v, Opaque) else None)
        except UnknownTypeError as error:
            inside = f"inside a {type(plain).__name__}" if error.value is not plain else ""
            return self._unread(_kind_of(error.value), inside, value)
        self._assembly.source.objects.append(raw)
        if self._is_plainer and is_leaf:
            self._as_saved.values[fqn_of(path)] = value
        return ("O", len(self._assembly.source.objects) - 1)

    def _unread(self, kind: str, why: str, value: Any) -> Node:
        self._assembly.source.objects.append(Unread(kind, why, self._tensors_in(value)))
        return ("O", len(self._assembly.source.objects) - 1)

    def _versions(self, metadata: Any, path: Path) -> int | None:
        """Add the `_metadata` of an OrderedDict; without it the rest of that is worth as much."""
        plain = dict(metadata) if type(metadata) is OrderedDict else metadata  # as all of torch's are
        objects, number = self._assembly.source.objects, self._object(plain, (*path, "_metadata"), is_leaf=False)[1]
        if type(objects[number]) is not Unread:
            return int(number)
        self._note(
            "the _metadata of modules' state dicts, their versions, were not read", path, f" ({objects.pop().kind})"
        )
        return None

    def _tensors_in(self, value: Any) -> int | None:
        """Count the tensors in what is not read; None when a million values have been looked at for all leaves."""
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
        """A pickle may name one list many times over, and so grow without end."""
        self._n_nodes += 1
        if self._n_nodes > MAX_TENSORS:
            raise self._assembly.unsupported(f"more than {MAX_TENSORS} values, at {fqn_of(path)[:200]!r}")

    def _is_flat(self, value: Any, path: Path, depth: int = 0) -> bool:
        """Whether a list or tuple holds scalars only, or flat ones of them: one leaf, as in a checkpoint of ours."""
        self._count(path)
        return depth <= MAX_DEPTH // 2 and all(
            type(v) in _SCALARS
            or type(v) in (PathText, LayoutText)
            or (type(v) in (list, tuple) and self._is_flat(v, path, depth + 1))
            or (type(v) is Opaque and v.tag == "numpy.scalar")
            for v in value
        )

    def _plain(self, value: Any, path: Path, depth: int = 0) -> Any:
        """Return an object leaf with plain dicts in place of OrderedDicts; counts what is in it."""
        self._count(path)
        if depth and self._is_leaf:
            self._met.note(value, path, is_inside=True)
        value = self._read_as(value, path)
        kind = type(value)
        if depth > MAX_DEPTH:
            raise self._assembly.unsupported(f"nested deeper than {MAX_DEPTH} levels, at {fqn_of(path)[:200]!r}")
        if kind in (dict, OrderedDict):
            if kind is OrderedDict:
                self._note(UNORDERED, path)
                self._is_plainer = True
                if getattr(value, "_metadata", None) is not None:
                    self._note(OF_ORDERED, path, " (_metadata)")
            pairs = value.items()
            return {self._plain(k, path, depth + 1): self._plain(v, path, depth + 1) for k, v in pairs}
        if kind in (list, tuple, set, frozenset):
            return kind(self._plain(member, path, depth + 1) for member in value)
        if kind in _LENGTHS:
            value = value.whole() if kind is LongBytes else value
            self._n_held += len(value)
            beyond = self._n_held - _HELD_ANYWAY
            if beyond > 0 and beyond > _HELD_PER_BYTE * self._assembly.files_nbytes:
                raise self._assembly.unsupported("what its leaves hold is out of proportion to its length")
        return value

    def _tensor_of(self, ref: TensorRef, path: Path, locate: Locate) -> Node:
        place = locate(ref)
        self._as_saved.tensors[fqn_of(path)] = view_of(ref, place)
        if ref.attributes:
            self._note(ATTRIBUTES, path, f" ({', '.join(name[:80] for name in ref.attributes)})")
        if ref.is_parameter or ref.requires_grad:
            self._note(PARAMETER if ref.is_parameter else REQUIRES_GRAD, path)
        if isinstance(place, Strided):
            self._note(ROW_MAJOR, path)
        key = (place, ref.dtype, ref.size)
        if key not in self._by_ref:
            nbytes = math.prod(ref.size) * DTYPES[ref.dtype].itemsize
            part, offset = (self._assembly.place(place.part, nbytes, place), 0) if isinstance(place, Strided) else place
            chunk = Chunk(part=part, offset_bytes=offset, nbytes=nbytes, offsets=(0,) * len(ref.size), sizes=ref.size)
            self._by_ref[key] = self._assembly.tensor(fqn_of(path), ref.dtype, ref.size, [chunk])[1]
        return ("T", self._by_ref[key])

    def _array(self, array: Record, path: Path, locate: Locate) -> Node:
        """Add a numpy array: (version, shape, dtype, whether by columns, bytes). One that is met again is the same."""
        if id(array) in self._by_array:
            return self._by_array[id(array)][1]
        try:
            _, shape, dtype, by_columns, data = array.state
            name, sizes = _NUMPY.get(dtype_text(dtype)), size_of(shape)
            if name is None or not isinstance(data, _Held) or (by_columns and len(sizes) > 1 and 0 not in sizes):
                raise UnpicklingError("an array of objects, of texts, or stored by columns")
        except (UnpicklingError, TypeError, ValueError, AttributeError) as error:
            return self._unread("numpy.ndarray", str(error), array)
        self._by_array[id(array)] = (array, ("N", self._elements(data, name, sizes, path, locate)))
        return self._by_array[id(array)][1]

    def _elements(self, data: _Held, dtype: str, sizes: tuple[int, ...], path: Path, locate: Locate) -> int:
        """Add elements that lie in the pickle; return their number. Short ones the assembly keeps."""
        if isinstance(data, LongBytes):
            where = locate(data)
            assert not isinstance(where, Strided)
            part, offset = where
            if data.firsts is not None:
                text = Latin1(part, offset, data.held_nbytes, data.step, data.firsts)
                part, offset = self._assembly.place(part, len(data), text), 0
            self._assembly.source.in_pickles.setdefault(part, {})[offset] = len(data), data.crc
        else:
            part, offset = self._assembly.place(-1, len(data), Inline(bytes(data))), 0
        chunk = Chunk(part=part, offset_bytes=offset, nbytes=len(data), offsets=(0,) * len(sizes), sizes=sizes)
        return int(self._assembly.tensor(fqn_of(path), dtype, sizes, [chunk])[1])


def _form_of(value: Any) -> tuple[tuple[Any, ...], ...]:
    """Return what a dict of another type has behind its members."""
    if type(value) is Tally:
        return (("Counter",),)
    return (("defaultdict", value.factory),) if type(value) is Defaulting else ()


def _kind_of(value: Any) -> str:
    if isinstance(value, (Stranger, Maker)):
        return value.name
    if isinstance(value, TensorRef):
        return "tensor"
    return value.kind if isinstance(value, Record) else type(value).__name__
