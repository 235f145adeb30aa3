"""Two checkpoints leaf by leaf, slab by slab."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from asyncckpt.conversion.long_bytes import are_same_bytes, nbytes_at
from asyncckpt.conversion.opened_values import alike_when_opened, is_same_value
from asyncckpt.conversion.outline import Outline, outline_of
from asyncckpt.conversion.payloads import SLAB_NBYTES, slab_slices
from asyncckpt.errors import MissingKeysError
from asyncckpt.foreign.kinds import read_any
from asyncckpt.format.objects import decode_value
from asyncckpt.format.tree import Node
from asyncckpt.loading.slicing import read_tensor
from asyncckpt.planning.torch_types import torch_dtype
from asyncckpt.storage.block_reader import DEFAULT_THREADS
from asyncckpt.storage.contents import SavedTensor
from asyncckpt.storage.files import Files
from asyncckpt.storage.unread import Unread

_SHOWN_CHARS = 60
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One leaf that differs: how, what it is on both sides, and of numbers the largest absolute difference.

    `what`: `only in A`, `only in B`, `kind`, `dtype`, `shape`, `value`, `bits` (equal numbers, such as -0.0 and 0.0).
    """

    fqn: str
    what: str
    first: str | None = None
    second: str | None = None
    max_abs_difference: float | None = None

    def described(self) -> dict[str, Any]:
        """Return it for tables and JSON."""
        return {
            "fqn": self.fqn,
            "what": self.what,
            "a": self.first,
            "b": self.second,
            "max_abs_difference": self.max_abs_difference,
        }


@dataclass(slots=True)
class Comparison:
    """How many leaves there are on either side, and those that differ.

    `unread`: by FQN the class of those that neither side has read, and of which only that was compared.
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
        keys: FQNs and prefixes; None takes everything. A key must be there on one side at least.
        data: Whether the elements of tensors are read and compared.
        files: The storage seam.

    Raises:
        AsyncCkptError: One of them cannot be read; as `open_checkpoint`.
        MissingKeysError: A key is on neither side.
        OSError: The files cannot be read.

    Blocks: for reading both. Memory: a few slabs of 32 MiB.
    """
    files = files or Files()
    names = None if keys is None else list(keys)
    ours, theirs = _outlines(first, second, names, files)
    mine, others = dict(ours.leaves()), dict(theirs.leaves())
    found = Comparison(leaves=len(mine.keys() | others.keys()))
    on_one_side = mine.keys() ^ others.keys()
    alike = on_one_side & alike_when_opened(ours, theirs) if on_one_side else set()
    for fqn in [*mine, *(name for name in others if name not in mine)]:
        if fqn in alike:
            continue
        if fqn not in others:
            found.differences.append(Difference(fqn=fqn, what="only in A", first=_shown(ours, mine[fqn])))
        elif fqn not in mine:
            found.differences.append(Difference(fqn=fqn, what="only in B", second=_shown(theirs, others[fqn])))
        elif (kind := _alike_unread(ours, mine[fqn], theirs, others[fqn])) is not None:
            found.unread[fqn] = kind
        else:
            difference = _compared(fqn, ours, mine[fqn], theirs, others[fqn], files, data)
            if difference is not None:
                found.differences.append(difference)
    return found


def _outlines(first: str, second: str, keys: list[str] | None, files: Files) -> tuple[Outline, Outline]:
    contents = [read_any(path, files) for path in (first, second)]
    if keys is None:
        return outline_of(contents[0], files), outline_of(contents[1], files)
    found, missing = [], []
    for one in contents:
        wanted = list(keys)
        while True:
            try:
                found.append(outline_of(one, files, keys=wanted))
                break
            except MissingKeysError as error:
                wanted = [key for key in wanted if key not in error.keys]
        missing.append(set(keys) - set(wanted))
    nowhere = missing[0] & missing[1]
    if nowhere:
        raise MissingKeysError(f"neither {first} nor {second} has {', '.join(sorted(nowhere))}", keys=sorted(nowhere))
    return found[0], found[1]


def _shown(outline: Outline, node: Node) -> str:
    if node[0] == "O":
        return _short(outline.objects[node[1]])
    tensor = outline.tensors[node[1]]
    if node[0] == "B":
        return f"bytes[{outline.nbytes_of(node[1])}]"
    return f"{tensor.dtype}{list(tensor.global_shape)}"


def _alike_unread(ours: Outline, mine: Node, theirs: Outline, other: Node) -> str | None:
    """Return the class of a leaf that neither side has read, if it is the same; else None."""
    if (mine[0], other[0]) != ("O", "O"):
        return None
    a, b = ours.objects[mine[1]], theirs.objects[other[1]]
    return a.kind if isinstance(a, Unread) and isinstance(b, Unread) and a.kind == b.kind else None


def _short(raw: Any) -> str:
    if isinstance(raw, Unread):
        return raw.described()
    try:
        text = repr(decode_value(raw))
    except ValueError:
        text = repr(raw)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."


def _compared(
    fqn: str, ours: Outline, mine: Node, theirs: Outline, other: Node, files: Files, data: bool
) -> Difference | None:
    first, second = _shown(ours, mine), _shown(theirs, other)
    has_long_bytes, lengths = "B" in (mine[0], other[0]), (nbytes_at(ours, mine), nbytes_at(theirs, other))
    if has_long_bytes and None not in lengths:
        same = lengths[0] == lengths[1] and (not data or are_same_bytes(ours, mine, theirs, other, files))
        return None if same else Difference(fqn=fqn, what="value", first=first, second=second)
    if has_long_bytes or (mine[0] == "O") != (other[0] == "O"):
        return Difference(fqn=fqn, what="kind", first=first, second=second)
    if mine[0] == "O":
        if is_same_value(ours.objects[mine[1]], theirs.objects[other[1]]):
            return None
        apart = _apart(ours, mine, theirs, other)
        alike = type(ours.objects[mine[1]]) is type(theirs.objects[other[1]])
        return Difference(
            fqn=fqn,
            what="bits" if apart == 0.0 and alike else "value",
            first=first,
            second=second,
            max_abs_difference=apart,
        )
    a, b = ours.tensors[mine[1]], theirs.tensors[other[1]]
    if a.global_shape != b.global_shape:
        return Difference(fqn=fqn, what="shape", first=first, second=second)
    if not data:
        return None if a.dtype == b.dtype else Difference(fqn=fqn, what="dtype", first=first, second=second)
    equal_bits, apart = _tensors(ours, a, theirs, b, files)
    if a.dtype != b.dtype:
        return Difference(fqn=fqn, what="dtype", first=first, second=second, max_abs_difference=apart)
    if equal_bits:
        return None
    return Difference(
        fqn=fqn, what="bits" if apart == 0.0 else "value", first=first, second=second, max_abs_difference=apart
    )


def _apart(ours: Outline, mine: Node, theirs: Outline, other: Node) -> float | None:
    a, b = ours.objects[mine[1]], theirs.objects[other[1]]
    numbers = all(type(value) in (int, float) for value in (a, b))
    return float(abs(a - b)) if numbers else None


def _tensors(ours: Outline, a: SavedTensor, theirs: Outline, b: SavedTensor, files: Files) -> tuple[bool, float | None]:
    """Return whether all bits are equal, and the largest absolute difference; NaN where one side alone is NaN."""
    equal, apart = True, 0.0
    first_dtype, second_dtype = torch_dtype(a.dtype), torch_dtype(b.dtype)
    limit = max(1, SLAB_NBYTES // max(first_dtype.itemsize, second_dtype.itemsize))
    for slices in slab_slices(a.global_shape, limit):
        x = read_tensor(ours.contents, a, slices, files, threads=DEFAULT_THREADS, verify=True)
        y = read_tensor(theirs.contents, b, slices, files, threads=DEFAULT_THREADS, verify=True)
        if first_dtype == second_dtype and _same_bits(x, y):
            continue
        equal = False
        apart = max(apart, _largest(x, y), key=lambda value: (math.isnan(value), value))
    return equal, apart


def _same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    carrier = _CARRIERS[x.itemsize]
    if x.itemsize == 16:
        return bool(torch.equal(torch.view_as_real(x).view(torch.int64), torch.view_as_real(y).view(torch.int64)))
    return bool(torch.equal(x.reshape(-1).view(carrier), y.reshape(-1).view(carrier)))


def _largest(x: torch.Tensor, y: torch.Tensor) -> float:
    """Return the largest absolute difference of two slabs; equal infinities and NaN on both sides count as none."""
    wide = torch.complex128 if x.is_complex() or y.is_complex() else torch.float64
    left, right = x.reshape(-1).to(wide), y.reshape(-1).to(wide)
    same = (left == right) | (left.isnan() & right.isnan())
    difference = torch.where(same, torch.zeros((), dtype=torch.float64), (left - right).abs())
    return float(difference.max()) if difference.numel() else 0.0
