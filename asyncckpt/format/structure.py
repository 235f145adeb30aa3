"""One rank's structure: the tree of its state dict, and for each chunk of a tensor its shard file and byte range there.

It depends on keys, shapes, dtypes and the agreement of the ranks, not on values. So it is computed once, and each save
stores the same bytes, except for the digests of the contexts of sharded tensors (`encoded_with_digests`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import add, itemgetter, le
from typing import Any, NamedTuple

import msgpack

from asyncckpt.basics.limits import MAX_PARTS
from asyncckpt.basics.safe_msgpack import unpack_strict
from asyncckpt.dtypes import DTYPES
from asyncckpt.errors import CorruptCheckpointError, UnsupportedFormatError
from asyncckpt.format import state_tree
from asyncckpt.format.manifest import check_version, list_of

STRUCTURE_VERSION = 1
MAX_STRUCTURE_NBYTES = 1 << 30
MAX_TENSORS = 4_000_000
MAX_DIMS = 64
MAX_INT = (1 << 63) - 1

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offsets, sizes) of a box of a tensor, in elements."""


class Chunk(NamedTuple):
    """A stored box of a global tensor. A tuple, because a checkpoint has tens of thousands.

    Attributes:
        part: Number of this rank's shard file.
        offset_bytes: Offset in that file, header included.
        nbytes: Length in bytes; the elements are row-major and contiguous.
        offsets: Start of the box in the global tensor, in elements.
        sizes: Shape of the box, in elements.
    """

    part: int
    offset_bytes: int
    nbytes: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def find_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Return the positions of two boxes of one tensor that share an element; None if all are disjoint.

    Sweeps along the dimension in which the boxes have the most different offsets.
    """
    filled = [n for n, (_, sizes) in enumerate(boxes) if 0 not in sizes]
    if len(filled) < 2:
        return None
    n_dims = len(boxes[filled[0]][0])
    if n_dims == 0:
        return filled[0], filled[1]
    sweep = max(range(n_dims), key=lambda d: len({boxes[n][0][d] for n in filled}))
    active: list[int] = []
    for n in sorted(filled, key=lambda n: boxes[n][0][sweep]):
        box = boxes[n]
        start = box[0][sweep]
        active = [a for a in active if boxes[a][0][sweep] + boxes[a][1][sweep] > start]
        for a in active:
            if all(o < p + t and p < o + s for o, s, p, t in zip(*boxes[a], *box, strict=True)):
                return a, n
        active.append(n)
    return None


class TensorEntry(NamedTuple):
    """One global tensor: FQN of its first path, dtype name, shape in elements, and the chunks that this rank writes.

    The FQN of a tensor that belongs to its rank ends in `@rank{n}`. Without chunks, other ranks write the tensor.
    """

    fqn: str
    dtype: str
    global_shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Structure:
    """What one rank saved.

    Attributes:
        tree: The tree of its state dict. A leaf is the position of a tensor in `tensors`, or the number of an object.
        tensors: Its tensors.
        n_objects: Number of object leaves.
        part_nbytes: Exact length of each of its shard files, in bytes.
    """

    tree: state_tree.Node
    tensors: tuple[TensorEntry, ...]
    n_objects: int
    part_nbytes: tuple[int, ...]


def encode_structure(structure: Structure) -> bytes:
    """Return the msgpack of `structure` (format/SPEC.md section 4)."""
    packer = msgpack.Packer(autoreset=False)
    packer.pack_map_header(5)
    for value in ("structure", STRUCTURE_VERSION, "parts", structure.part_nbytes, "tensors"):
        packer.pack(value)
    packer.pack_array_header(len(structure.tensors))
    for t in structure.tensors:  # one at a time: packing all at once takes ten times the memory
        packer.pack((t.fqn, t.dtype, t.global_shape, [_pack_chunk(c, t) for c in t.chunks]))
    for value in ("n_objects", structure.n_objects, "tree", structure.tree):
        packer.pack(value)
    return bytes(packer.bytes())


def encoded_with_digests(data: bytes, digests: Mapping[int, bytes]) -> bytes:
    """Return an encoded structure in whose tree composite tensors have digests of their contexts.

    Args:
        data: Result of `encode_structure`, without digests.
        digests: The digests, by number of the tensor's object.
    """
    tree = msgpack.unpackb(data, strict_map_key=False, use_list=False)["tree"]
    packed = msgpack.packb(tree)
    assert data.endswith(packed)  # `encode_structure` packs it last
    return data[: -len(packed)] + bytes(msgpack.packb(state_tree.with_context_digests(tree, digests)))


def _pack_chunk(chunk: Chunk, entry: TensorEntry) -> list[Any]:
    where: list[Any] = [chunk.part, chunk.offset_bytes, chunk.nbytes]
    if chunk.sizes != entry.global_shape:
        where += [chunk.offsets, chunk.sizes]
    return where


def decode_structure(data: bytes) -> Structure:
    """Decode and check the bytes of `encode_structure`.

    Raises:
        UnsupportedFormatError: A newer version wrote it, or it requires a field that this version does not know.
        CorruptCheckpointError: It violates format/SPEC.md section 4: overlapping ranges, boxes outside their tensor,
            lengths that do not match shapes, unknown dtypes, numbers out of range, and so on.
    """
    try:
        if len(data) > MAX_STRUCTURE_NBYTES:
            raise ValueError(f"it has {len(data)} bytes, the limit is {MAX_STRUCTURE_NBYTES}")
        raw = unpack_strict(data)
        if not isinstance(raw, dict):
            raise ValueError(f"expected a map, found {type(raw).__name__}")
        check_version(raw, "structure", STRUCTURE_VERSION, what="structure")
        return _checked_structure(raw)
    except (
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        RecursionError,
        OverflowError,
        msgpack.UnpackException,
    ) as error:
        if isinstance(error, (UnsupportedFormatError, CorruptCheckpointError)):
            raise
        raise CorruptCheckpointError(f"the structure of a rank does not decode: {error}", detail=str(error)) from error


def _checked_structure(raw: dict[str, Any]) -> Structure:
    parts = tuple(_uint(n) for n in list_of(raw["parts"]))
    if len(parts) > MAX_PARTS or len(list_of(raw["tensors"])) > MAX_TENSORS:
        raise ValueError(
            f"{len(parts)} shard files and {len(raw['tensors'])} tensors, the limits are {MAX_PARTS} and {MAX_TENSORS}"
        )
    tensors = _plain_tensors(raw["tensors"], parts)
    if tensors is None:
        tensors = tuple(map(_checked_tensor, raw["tensors"]))
        _check_ranges(tensors, parts)
    if len(set(map(itemgetter(0), tensors))) != len(tensors):
        raise ValueError("an FQN occurs twice")
    n_objects = _uint(raw["n_objects"])
    return Structure(
        tree=state_tree.checked(raw["tree"], len(tensors), n_objects),
        tensors=tensors,
        n_objects=n_objects,
        part_nbytes=parts,
    )


def _plain_tensors(raw: Any, parts: tuple[int, ...]) -> tuple[TensorEntry, ...] | None:
    """Decode tensors that have one chunk each, which is the whole tensor: the usual case, in a third of the time.

    Checks by the same rules as `_checked_tensor` and `_check_ranges`. Returns None for other tensors, and if something
    is wrong; these functions then say what.
    """
    if not _are_tuples(raw, 4):
        return None
    fqns, dtypes, shapes, listed = ([entry[n] for entry in raw] for n in range(4))
    if set(map(type, fqns)) != {str} or set(map(type, dtypes)) != {str} or not _are_tuples(listed, 1):
        return None
    placed = [chunk for (chunk,) in listed]
    if not _are_tuples(placed, 3) or set(map(type, shapes)) != {tuple}:
        return None
    numbers, starts, lengths = ([chunk[n] for chunk in placed] for n in range(3))
    if set(map(type, itertools.chain(numbers, starts, lengths, itertools.chain.from_iterable(shapes)))) != {int}:
        return None
    nbytes = {kind: _whole_nbytes(*kind) for kind in set(zip(dtypes, shapes, strict=True))}
    if -1 in nbytes.values() or lengths != list(map(nbytes.__getitem__, zip(dtypes, shapes, strict=True))):
        return None
    if (
        min(numbers) < 0
        or max(numbers) >= len(parts)
        or min(starts) < 0
        or not _are_apart(numbers, starts, lengths, parts)
    ):
        return None
    origins = {shape: (0,) * len(shape) for _, shape in nbytes}
    offsets = map(origins.__getitem__, shapes)
    chunks = map(partial(tuple.__new__, Chunk), zip(numbers, starts, lengths, offsets, shapes, strict=True))
    return tuple(map(partial(tuple.__new__, TensorEntry), zip(fqns, dtypes, shapes, zip(chunks), strict=True)))


def _are_tuples(values: Any, length: int) -> bool:
    return set(map(type, values)) == {tuple} and set(map(len, values)) == {length}


def _whole_nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor, or -1 if the dtype or the shape is invalid."""
    known = dtype in DTYPES and len(shape) <= MAX_DIMS and all(0 <= n <= MAX_INT for n in shape)
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize if known else -1
    return nbytes if nbytes <= MAX_INT else -1


def _are_apart(numbers: list[int], starts: list[int], lengths: list[int], parts: tuple[int, ...]) -> bool:
    """Whether no two ranges share a byte, and each lies inside its file."""
    if len(parts) > 1 or any(map(le, starts[1:], starts)):
        numbers, starts, lengths = map(list, zip(*sorted(zip(numbers, starts, lengths, strict=True)), strict=True))
    ends = list(map(add, starts, lengths))
    if not all(map(le, ends, map(parts.__getitem__, numbers))):
        return False
    neighbours = zip(numbers, numbers[1:], ends, starts[1:], strict=False)
    return all(end <= start or number != other for number, other, end, start in neighbours)


def _checked_tensor(raw: Any) -> TensorEntry:
    fqn, dtype, shape, chunks = list_of(raw)
    if type(fqn) is not str or type(dtype) is not str or dtype not in DTYPES:
        raise ValueError(f"tensor {fqn!r} of unknown dtype {dtype!r}")
    global_shape, itemsize = _box(shape), DTYPES[dtype].itemsize
    if len(chunks) == 1 and type(chunks) is tuple:  # the usual case
        return TensorEntry(fqn, dtype, global_shape, (_checked_chunk(chunks[0], fqn, itemsize, global_shape),))
    return TensorEntry(
        fqn, dtype, global_shape, tuple([_checked_chunk(c, fqn, itemsize, global_shape) for c in list_of(chunks)])
    )


def _checked_chunk(raw: Any, fqn: str, itemsize: int, global_shape: tuple[int, ...]) -> Chunk:
    if len(list_of(raw)) == 3:
        offsets, sizes = (0,) * len(global_shape), global_shape
    elif len(raw) == 5:
        offsets, sizes = _box(raw[3]), _box(raw[4])
        if not len(offsets) == len(sizes) == len(global_shape):
            raise ValueError(f"a chunk of {fqn} has {len(sizes)} dimensions, the tensor has {len(global_shape)}")
        if any(o + s > g for o, s, g in zip(offsets, sizes, global_shape, strict=True)):
            raise ValueError(f"chunk {offsets}+{sizes} of {fqn} lies outside its shape {global_shape}")
    else:
        raise ValueError(f"a chunk of {fqn} has {len(raw)} members, expected 3 or 5")
    part, offset_bytes, nbytes = raw[:3]
    for n in (part, offset_bytes, nbytes):
        if type(n) is not int or not 0 <= n <= MAX_INT:
            raise _number_error(n)
    if nbytes != math.prod(sizes) * itemsize:
        raise ValueError(f"a chunk of {fqn} has {nbytes} bytes, its shape {sizes} has {math.prod(sizes) * itemsize}")
    return Chunk(part, offset_bytes, nbytes, offsets, sizes)


def _check_ranges(tensors: tuple[TensorEntry, ...], parts: tuple[int, ...]) -> None:
    ranges = sorted((c.part, c.offset_bytes, c.nbytes, t.fqn) for t in tensors for c in t.chunks)
    last_part, last_end = -1, 0
    for part, start, nbytes, fqn in ranges:
        if part >= len(parts) or start + nbytes > parts[part]:
            raise ValueError(f"bytes {start} to {start + nbytes}, of {fqn}, lie outside shard file {part}")
        if part == last_part and start < last_end:
            raise ValueError(f"bytes {start} to {start + nbytes}, of {fqn}, overlap those of another tensor")
        last_part, last_end = part, start + nbytes


def row_major(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor."""
    strides, stride = [], 1
    for size in reversed(sizes):
        strides.append(stride)
        stride *= size
    return tuple(reversed(strides))


def _uint(raw: Any) -> int:
    if type(raw) is not int or not 0 <= raw <= MAX_INT:
        raise _number_error(raw)
    return raw


def _number_error(raw: Any) -> ValueError:
    return ValueError(f"{raw!r} is not an integer from 0 to 2**63 - 1")


def _box(raw: Any) -> tuple[int, ...]:
    if not isinstance(raw, tuple) or len(raw) > MAX_DIMS:
        raise ValueError(f"{raw!r} is not a shape")
    for n in raw:
        if type(n) is not int or not 0 <= n <= MAX_INT:
            raise _number_error(n)
    return raw
