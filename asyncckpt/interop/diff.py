"""Compares two checkpoints of any kinds leaf by leaf, and their tensors in slabs of 32 MiB.

A value may be one leaf in one checkpoint and a container of leaves in the other; both are equal if they hold the same.
For example, torch's planners do not flatten tuples, so a tuple that holds a set is one leaf in a save through
`asyncckpt.dcp.StorageWriter`; in a file of `torch.save` the same tuple is read as a container.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from asyncckpt.dtypes import DTYPES
from asyncckpt.errors import MissingKeysError
from asyncckpt.format.objects import decode_value, encode_value
from asyncckpt.format.state_tree import (
    ARRAY,
    BYTES,
    MAPPINGS,
    OBJECT,
    ORDERED_DICT,
    TENSOR,
    TUPLE,
    Node,
    Path,
    composite_nodes,
    fqn_of,
    leaves,
    members,
    python_key,
)
from asyncckpt.interop.outline import Outline, containers, outline_of
from asyncckpt.interop.sources.detect import read_any
from asyncckpt.interop.sources.unread_leaves import UnreadLeaf
from asyncckpt.interop.statistics import numbers_of
from asyncckpt.loading.byte_ranges import slab_slices
from asyncckpt.loading.fetch import SLAB_NBYTES, bytes_of, read_tensor
from asyncckpt.storage.contents import SavedTensor
from asyncckpt.storage.files import Files
from asyncckpt.storage.reader import DEFAULT_THREADS

_SHOWN_CHARS = 60
_PACKED = "float4_e2m1fn_x2"
"""Each element holds two numbers: a tensor of another dtype with the same shape has half as many numbers."""

_INTEGERS = frozenset(
    {torch.bool, torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.uint8, torch.uint16, torch.uint32, torch.uint64}
)
_LOWER = (1 << 32) - 1
_PART_ELEMENTS = 1 << 20
"""Elements of a slab that are subtracted at a time: the subtraction needs several 8-byte numbers for each. Chosen, not
measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One leaf that differs.

    Attributes:
        fqn: FQN of the leaf.
        what: `only in A`, `only in B`, `kind`, `dtype`, `shape`, `value`, or `bits` (equal numbers with different bits,
            such as -0.0 and 0.0).
        a, b: Description of the leaf in the first and the second checkpoint; None: it is not there.
        max_abs_difference: Largest absolute difference of numbers; NaN if an element is NaN in only one of them.
    """

    fqn: str
    what: str
    a: str | None = None
    b: str | None = None
    max_abs_difference: float | None = None


@dataclass(slots=True)
class Comparison:
    """The result of a comparison.

    Attributes:
        leaves: Number of leaves that at least one of the checkpoints has.
        differences: The leaves that differ.
        unread: By FQN, the class of leaves that cannot be read in either checkpoint; only the class was compared.
    """

    leaves: int = 0
    differences: list[Difference] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)


def compare(
    first: str, second: str, *, keys: Iterable[str] | None = None, data: bool = True, files: Files | None = None
) -> Comparison:
    """Compare two checkpoints of any kinds.

    Args:
        first, second: Their absolute paths.
        keys: FQNs and prefixes to compare; None compares everything.
        data: Whether the elements of tensors are read and compared.
        files: The storage seam.

    Returns:
        The leaves that differ.

    Raises:
        AsyncCkptError: One of the checkpoints cannot be read: the errors of `open_checkpoint`.
        MissingKeysError: A key selects nothing in either checkpoint.
        OSError: The files cannot be read.

    Blocks: until both are read. Memory: a few slabs of 32 MiB.
    """
    files = files or Files()
    left, right = _outlines(first, second, None if keys is None else list(keys), files)
    mine, others = dict(left.leaves()), dict(right.leaves())
    found = Comparison(leaves=len(mine.keys() | others.keys()))
    on_one_side = mine.keys() ^ others.keys()
    alike = on_one_side & equal_to_containers(left, right) if on_one_side else set()
    for fqn in [*mine, *(name for name in others if name not in mine)]:
        node, other = mine.get(fqn), others.get(fqn)
        a = None if node is None else _shown(left, node)
        b = None if other is None else _shown(right, other)
        if fqn in alike:
            continue
        if node is None or other is None:
            what: tuple[str, float | None] | None = ("only in B" if node is None else "only in A"), None
        elif (kind := _alike_unread(left, node, right, other)) is not None:
            found.unread[fqn] = kind
            continue
        else:
            what = _compared(left, node, right, other, files, data)
        if what is not None:
            found.differences.append(Difference(fqn=fqn, what=what[0], a=a, b=b, max_abs_difference=what[1]))
    found.differences += _composite_differences(left, right)
    return found


def _composite_differences(left: Outline, right: Outline) -> Iterator[Difference]:
    """Yield the composite tensors of both checkpoints that differ in their kind, or in more than their components."""
    mine, others = ({fqn_of(path): node for path, node in composite_nodes(one.tree)} for one in (left, right))
    for fqn, node in mine.items():
        other = others.get(fqn)
        if other is None:
            continue
        if node[3] != other[3]:
            yield Difference(fqn=fqn, what="kind", a=node[3], b=other[3])
        elif not is_same_value(left.objects[node[2]], right.objects[other[2]]):
            a, b = (_shown(one, (OBJECT, at[2])) for one, at in ((left, node), (right, other)))
            yield Difference(fqn=fqn, what="value", a=a, b=b)


def _outlines(first: str, second: str, keys: list[str] | None, files: Files) -> tuple[Outline, Outline]:
    """Return the outlines of both checkpoints, with only the leaves that `keys` select."""
    nowhere, found = set(keys or ()), []
    for path in (first, second):
        contents, wanted = read_any(path, files), keys
        try:
            outline = outline_of(contents, files, keys=wanted)
        except MissingKeysError as error:
            wanted = [key for key in keys or () if key not in error.keys]
            outline = outline_of(contents, files, keys=wanted)
        nowhere -= set(wanted or ())
        found.append(outline)
    if nowhere:
        raise MissingKeysError(f"neither {first} nor {second} has {', '.join(sorted(nowhere))}", keys=sorted(nowhere))
    return found[0], found[1]


def _shown(outline: Outline, node: Node) -> str:
    if node[0] == BYTES:
        return f"bytes[{outline.nbytes_of(node[1])}]"
    if node[0] != OBJECT:
        tensor = outline.tensors[node[1]]
        return f"{tensor.dtype}{list(tensor.global_shape)}"
    raw = outline.objects[node[1]]
    if isinstance(raw, UnreadLeaf):
        return raw.described()
    try:
        text = repr(decode_value(raw))
    except ValueError:
        text = repr(raw)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."


def _alike_unread(left: Outline, mine: Node, right: Outline, other: Node) -> str | None:
    """Return the class of a leaf that cannot be read in either checkpoint, if the class is the same; else None."""
    if (mine[0], other[0]) != (OBJECT, OBJECT):
        return None
    a, b = left.objects[mine[1]], right.objects[other[1]]
    return a.kind if isinstance(a, UnreadLeaf) and isinstance(b, UnreadLeaf) and a.kind == b.kind else None


def _compared(
    left: Outline, mine: Node, right: Outline, other: Node, files: Files, data: bool
) -> tuple[str, float | None] | None:
    """Return `what` and `max_abs_difference` of a `Difference`; None if the leaves are equal."""
    if not data and mine[0] == other[0] == BYTES:
        return None if left.nbytes_of(mine[1]) == right.nbytes_of(other[1]) else ("value", None)
    if BYTES in (mine[0], other[0]):
        values = bytes_at(left, mine, files), bytes_at(right, other, files)
        return None if values[0] == values[1] else ("kind" if None in values else "value", None)
    if (mine[0] == OBJECT) != (other[0] == OBJECT):
        return "kind", None
    if mine[0] == OBJECT:
        one, another = left.objects[mine[1]], right.objects[other[1]]
        if is_same_value(one, another):
            return None
        difference = _difference_of(one, another)
        return "bits" if difference == 0.0 and type(one) is type(another) else "value", difference
    a, b = left.saved(mine[1]), right.saved(other[1])
    if a.global_shape != b.global_shape:
        return "shape", None
    if not data or (a.dtype != b.dtype and _PACKED in (a.dtype, b.dtype)):
        return None if a.dtype == b.dtype else ("dtype", None)
    equal, difference = _tensors(left, a, right, b, files)
    if a.dtype != b.dtype:
        return "dtype", difference
    return None if equal else ("bits" if difference == 0.0 else "value", difference)


def _difference_of(one: Any, another: Any) -> float | None:
    """Return the absolute difference of two numbers; None for other values, or if it is too large for a float."""
    if isinstance(one, UnreadLeaf) or isinstance(another, UnreadLeaf):
        return None
    try:
        a, b = decode_value(one), decode_value(another)
        return float(abs(a - b)) if {type(a), type(b)} <= {int, float} else None
    except (ValueError, OverflowError):
        return None


def _tensors(left: Outline, a: SavedTensor, right: Outline, b: SavedTensor, files: Files) -> tuple[bool, float]:
    """Return whether all bits are equal, and the largest absolute difference; NaN if one element alone is NaN."""
    equal, difference = True, 0.0
    limit = SLAB_NBYTES // max(DTYPES[one.dtype].itemsize for one in (a, b))
    for slices in slab_slices(a.global_shape, limit):
        x = read_tensor(left.contents, a, slices, files, threads=DEFAULT_THREADS, verify=True).reshape(-1)
        y = read_tensor(right.contents, b, slices, files, threads=DEFAULT_THREADS, verify=True).reshape(-1)
        if x.dtype == y.dtype and torch.equal(_bits(x), _bits(y)):
            continue
        equal = False
        for pair in zip(torch.split(x, _PART_ELEMENTS), torch.split(y, _PART_ELEMENTS), strict=True):
            difference = max(difference, _largest_difference(*pair), key=lambda value: (math.isnan(value), value))
    return equal, difference


def _bits(x: torch.Tensor) -> torch.Tensor:
    """Return a slab as int64 if its length is a multiple of 8 bytes, which compares three times as fast; else uint8."""
    flat = x.view(torch.uint8)
    return flat if flat.numel() % 8 else flat.view(torch.int64)


def _largest_difference(x: torch.Tensor, y: torch.Tensor) -> float:
    """Return the largest absolute difference of two slabs; two equal infinities and two NaN do not differ."""
    if x.dtype in _INTEGERS and y.dtype in _INTEGERS:
        (high, low), (other_high, other_low) = _halves(x), _halves(y)
        difference = ((high - other_high).to(torch.float64) * 2.0**32 + (low - other_low)).abs()
    else:
        left, right = numbers_of(x), numbers_of(y)
        same = (left == right) | (left.isnan() & right.isnan())
        difference = torch.where(same, torch.zeros((), dtype=torch.float64), (left - right).abs())
    return float(difference.max()) if difference.numel() else 0.0


def _halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the upper and lower 32 bits of integers: as float64, which has 53 bits, unequal ones might be equal."""
    wide = x.view(torch.int64) if x.dtype == torch.uint64 else x.to(torch.int64)
    upper = wide >> 32
    return upper & _LOWER if x.dtype == torch.uint64 else upper, wide & _LOWER


def is_same_value(a: Any, b: Any) -> bool:
    """Whether two leaves, given in JSON form, have the same value and type: True is not 1, and -0.0 is not 0.0.

    Sets are compared without order. An `UnreadLeaf` equals no value.
    """
    return not (isinstance(a, UnreadLeaf) or isinstance(b, UnreadLeaf)) and _as_text(a) == _as_text(b)


def _as_text(raw: Any) -> str:
    return json.dumps(_ordered(raw))


def _ordered(raw: Any) -> Any:
    if isinstance(raw, list):
        return [_ordered(member) for member in raw]
    if not isinstance(raw, dict):
        return raw
    payload = raw.get("v")
    if raw.get("$") in ("set", "frozenset") and isinstance(payload, list):
        payload = sorted(map(_as_text, payload))
    return {**raw, "v": _ordered(payload)}


def bytes_at(outline: Outline, node: Node, files: Files) -> bytes | None:
    """Return the value of a leaf that is `bytes`; None for any other leaf. Long `bytes` are stored like tensors.

    Raises:
        CorruptCheckpointError: The stored bytes differ from those that were saved.
        OSError: The file cannot be read.
    """
    if node[0] == BYTES:
        saved = outline.saved(node[1])
        return bytes_of(read_tensor(outline.contents, saved, (...,), files, threads=DEFAULT_THREADS, verify=True))
    raw = outline.objects[node[1]] if node[0] == OBJECT else None
    return base64.b64decode(raw["v"]) if isinstance(raw, dict) and raw.get("$") == "bytes" else None


def equal_to_containers(one: Outline, other: Outline) -> set[str]:
    """Return the names of leaves that equal a container of leaves in the other checkpoint.

    Args:
        one: A checkpoint.
        other: Another one.

    Returns:
        The FQN of each such leaf, and the FQNs of all leaves in the container that it equals. A container that lacks an
        empty container of the leaf does not equal it.

    Raises:
        CorruptCheckpointError, OSError: Long `bytes` cannot be read.
    """
    return _leaves_equal_to_containers(one, other) | _leaves_equal_to_containers(other, one)


def _leaves_equal_to_containers(with_leaves: Outline, with_containers: Outline) -> set[str]:
    """Return the FQNs, in both checkpoints, of leaves of the first that equal a container of the second."""
    places: dict[str, list[tuple[Path, Node]]] = {}
    for path, container in containers(with_containers.tree):  # two may have one FQN: "a.b", and "b" in "a"
        places.setdefault(fqn_of(path), []).append((path, container))
    found: set[str] = set()
    for fqn, node in with_leaves.leaves():
        for path, container in places.get(fqn, ()) if node[0] == OBJECT else ():
            try:
                value = _value_of(container, with_containers)
            except _NotOneLeafError:
                continue
            if is_same_value(value, with_leaves.objects[node[1]]):
                found |= {fqn, *(fqn_of(at) for at, _ in leaves(container, path))}
                break
    return found


class _NotOneLeafError(Exception):
    """A container holds tensors or unread leaves, so that it cannot be one leaf."""


def _value_of(node: Node, outline: Outline) -> Any:
    """Return the JSON form of the leaf that holds the same as a container."""
    kind, inner, *form = node
    if kind == OBJECT and not isinstance(outline.objects[inner], UnreadLeaf):
        return outline.objects[inner]
    if kind == BYTES:
        return encode_value(bytes_at(outline, node, Files()))
    if kind in (TENSOR, ARRAY, OBJECT) or (kind == ORDERED_DICT and form[0] is not None):
        raise _NotOneLeafError
    values = [(key, _value_of(child, outline)) for key, child in members(node)]
    if kind in MAPPINGS:
        return {"$": "dict", "v": [[encode_value(python_key(key)), value] for key, value in values]}
    sequence = [value for _, value in values]
    if kind == TUPLE:
        return {"$": "tuple", "v": sequence}
    return {"$": "deque", "v": [form[0][1], sequence]} if form else sequence
