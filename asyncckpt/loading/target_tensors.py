"""Tensors of a target, whatever their type: which plain tensors in them are filled, and which of them share memory.

A tie is one tensor with two names. It is filled from one saved tensor, or from two with equal values, which are
compared before anything changes. Other views that share memory (transposed, reshaped, a slice of a fused tensor, the
imaginary part of a complex one) are filled one after the other; then each is compared with what was saved under its
name. Tensors that interleave without sharing an element, such as the columns of one matrix, are recognised by their
strides.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from asyncckpt.basics.libc import read_only
from asyncckpt.errors import (
    AliasMismatchError,
    AsyncCkptError,
    ConfigError,
    OverlappingShardsError,
    StateLoadError,
    UnsupportedLeafError,
)
from asyncckpt.format.names import split_per_rank_name
from asyncckpt.loading.byte_ranges import Placement
from asyncckpt.loading.tensor_writers import fill_box, new_tensor
from asyncckpt.sharding.registry import notify_filled, shards_of
from asyncckpt.sharding.shard_types import LocalShard, Sharded, with_fqn, with_leaf
from asyncckpt.state_dict.flatten import PLAIN_TENSORS
from asyncckpt.storage.contents import SavedTensor
from asyncckpt.torch_tensors import flat_bytes, plain_parameter, torch_dtype, why_no_memory


class TargetTensor(NamedTuple):
    """A tensor leaf of a target: its global shape, and the plain tensors in it that are filled.

    Attributes:
        value: The leaf.
        fqn: Its name in the target; "" where nobody has named it.
        dtype, global_shape: Dtype and shape of the whole tensor.
        shards: What this process holds of it; may be empty.
    """

    value: Any
    fqn: str
    dtype: torch.dtype
    global_shape: tuple[int, ...]
    shards: tuple[LocalShard, ...]

    @property
    def is_whole(self) -> bool:
        """Whether the value itself is what is filled."""
        return len(self.shards) == 1 and self.shards[0].tensor is self.value

    def takes(self, saved: SavedTensor) -> bool:
        """Whether `saved` can be filled in as it is: shape and dtype are the same."""
        return (self.dtype, self.global_shape) == (getattr(torch, saved.dtype, None), saved.global_shape)

    def holds_values_of(self, saved: SavedTensor) -> bool:
        """Whether the dtype is of a kind that can hold the values of `saved`, if with fewer digits."""
        return torch.can_cast(torch_dtype(saved.dtype), self.dtype)


def target_tensor(value: Any, fqn: str) -> TargetTensor:
    """Return what is filled of `value`.

    Args:
        value: A tensor, or a value of a type that has shards.
        fqn: Its name, for messages; "" if it has none.

    Raises:
        UnsupportedLeafError: Its shards cannot be what they say.
        OverlappingShardsError: They share elements.
    """
    if type(value) in PLAIN_TENSORS:
        shape = tuple(value.shape)
        return TargetTensor(value, fqn, value.dtype, shape, (LocalShard(value, (0,) * len(shape)),))
    try:
        found = shards_of(value)
    except UnsupportedLeafError as error:
        raise with_leaf(error, fqn, f"target {fqn!r} cannot be filled: {error.message}") from error
    except OverlappingShardsError as error:
        raise with_fqn(error, fqn) from None
    if isinstance(found, Sharded):
        return TargetTensor(value, fqn, found.dtype, tuple(found.global_shape), tuple(found.shards))
    if found is None:
        plain = plain_parameter(value)
        return _whole(value, fqn, value) if plain is None else _whole(plain, fqn, plain)
    return _whole(value, fqn, found)


def _whole(value: Any, fqn: str, tensor: torch.Tensor) -> TargetTensor:
    shape = tuple(tensor.shape)
    return TargetTensor(value, fqn, tensor.dtype, shape, (LocalShard(tensor, (0,) * len(shape)),))


def refuse_without_memory(tensors: Iterable[tuple[str, torch.Tensor]], path: str) -> None:
    """Refuse to load into tensors that have no memory.

    Args:
        tensors: FQN, and what is filled.
        path: The checkpoint's path, for messages.

    Raises:
        UnsupportedLeafError: One is a meta or fake tensor, or belongs to a torch.func transform; names the first.
    """
    for fqn, tensor in tensors:
        why = why_no_memory(tensor)
        if why is not None:
            kind = type(tensor).__name__
            raise UnsupportedLeafError(
                f"{path}: nothing can be loaded into target tensor {fqn!r}: {why}; nothing was changed. Give the "
                "target memory first (module.to_empty(device=...)), or load without a target and take the new tensors "
                "(module.load_state_dict(asyncckpt.load(path)[...], assign=True)). plan_load takes such targets",
                leaf=fqn,
                type_name=kind,
            )


def refuse_read_only(placements: Sequence[Placement], names: Callable[[], Sequence[str]], path: str) -> None:
    """Refuse to load into tensors over memory that is mapped read-only, where a write ends the process.

    Args:
        placements: What is read into which plain tensor.
        names: Returns their FQNs.
        path: The checkpoint's path, for messages.

    Raises:
        UnsupportedLeafError: One is; names it.
    """
    by_page: dict[int, tuple[int, int]] = {}  # one tensor of each page: memory is protected by pages
    for number, (_, tensor, _, _) in enumerate(placements):
        if tensor.is_cpu and tensor.numel():  # tensors of some other devices have no address to be asked for
            address = tensor.data_ptr()
            by_page.setdefault(address // mmap.PAGESIZE, (address, number))
    closed = read_only(address for address, _ in by_page.values())
    if refused := [number for address, number in by_page.values() if address in closed]:
        fqn = names()[min(refused)]
        raise UnsupportedLeafError(
            f"{path}: nothing can be loaded into target tensor {fqn!r}: its memory is mapped read-only, such as a "
            "file by numpy.memmap(mode='r'); nothing was changed. Map it with mode 'c' or 'r+', or pass a clone()",
            leaf=fqn,
            type_name="Tensor",
        )


def check_fillable(target: TargetTensor, fqn: str) -> None:
    """Refuse a tensor whose elements share memory.

    Raises:
        ConfigError: It is expanded, or is a view in which elements lie upon each other (`unfold`, `as_strided`).
    """
    for tensor, _ in target.shards:
        if shares_own_memory(tensor):
            raise ConfigError(
                f"target tensor {fqn!r} is expanded: its elements share memory, so it cannot be filled; pass a clone()",
                field="state_dict",
                value=fqn,
            )


def shares_own_memory(tensor: torch.Tensor) -> bool:
    """Whether elements of a tensor lie upon each other, so that it cannot hold one value for each."""
    if tensor.is_contiguous() or not tensor.numel():
        return False
    reach, overlaps = 0, False  # in elements: how far the dimensions of smaller strides reach
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride == 0:
            return True
        overlaps |= stride <= reach
        reach += stride * (size - 1)
    return overlaps and _has_doubles(tensor)


def _has_doubles(tensor: torch.Tensor) -> bool:
    """Whether two elements have one place; in a view whose dimensions are interleaved they need not."""
    places = torch.zeros((), dtype=torch.int64, device="cpu")
    for stride, size in zip(tensor.stride(), tensor.shape, strict=True):
        places = places.unsqueeze(-1) + torch.arange(size, device="cpu") * stride
    ordered = places.flatten().sort().values
    return bool((ordered[1:] == ordered[:-1]).any())


Filling = tuple[SavedTensor, TargetTensor]
"""A saved tensor, and what it fills."""


def placements_of(fillings: Iterable[Filling]) -> list[Placement]:
    """Return what is read into which plain tensor; parts without elements are left out."""
    return [
        Placement(saved, tensor, offsets)
        for saved, target in fillings
        for tensor, offsets in target.shards
        if tensor.numel()
    ]


def placement_names(plain: Iterable[Placement], fillings: Iterable[Filling]) -> list[str]:
    """Return the target's names of `plain`, which have those that were saved, and of what `placements_of` returns."""
    parts = [target.fqn or saved.fqn for saved, target in fillings for tensor, _ in target.shards if tensor.numel()]
    owned = ((saved.fqn, split_per_rank_name(saved.fqn)) for saved, _, _, _ in plain)
    return [*(fqn if own is None else own[0] for fqn, own in owned), *parts]


def converted_storages(fillings: Iterable[Filling]) -> dict[int, bool]:
    """Return by address of its storage, for each value that is filled, whether what was saved has another dtype."""
    return {
        at: target.dtype != torch_dtype(saved.dtype) for saved, target in fillings for at in storages_of(target.value)
    }


def notify_shard_types(fillings: Iterable[Filling], path: str) -> None:
    """Tell the values of registered types, once each, that all their shards are filled.

    Args:
        fillings: What was filled.
        path: The checkpoint's path, for messages.

    Raises:
        StateLoadError: A type's `from_shards` raised.
    """
    for saved, target in fillings:
        if target.is_whole:
            continue
        try:
            notify_filled(target.value, target.shards)
        except Exception as error:
            kind, detail = type(target.value).__name__, f"{type(error).__name__}: {error}"
            raise StateLoadError(
                f"{path}: from_shards() of {saved.fqn!r}, a {kind}, refused what was saved: {detail}",
                path=path,
                fqn=saved.fqn,
                type_name=kind,
                detail=detail,
            ) from error


def storages_of(value: Any) -> set[int]:
    """Return the addresses of the storages that a tensor of any type lies in; none for what has no elements here."""
    try:
        tensors = [tensor for tensor, _ in target_tensor(value, "").shards]
    except AsyncCkptError:
        return set()
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}


WINDOW_NBYTES = 16 << 20
"""How much is compared at once. It takes a few times as much host memory, whatever the tensors' sizes."""

MAX_PAIRS = 100_000
"""How many pairs of tensors are compared by their strides, which takes 0.5 s. Further pairs are treated as if they
shared memory: they are compared with what was saved."""

Read = Callable[[Sequence[Placement]], None]
"""Reads boxes of saved tensors into plain ones."""

Window = tuple[int, Placement]
"""A box of one of several targets, by its number."""

_CPU = torch.device("cpu")


# ---- which targets share memory


class MemoryExtent(NamedTuple):
    """The addresses of a tensor's elements: from `start` to before `end`, `itemsize` bytes at each of `steps`.

    `steps`: (stride in bytes, number of indices) of each dimension with more than one index and a stride other than 0.
    """

    start: int
    end: int
    itemsize: int
    steps: tuple[tuple[int, int], ...]


def memory_extent_of(tensor: torch.Tensor) -> MemoryExtent:
    """Return the extent of a tensor that is not empty."""
    start, width = tensor.data_ptr(), tensor.itemsize
    steps = tuple((s * width, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1 and s)
    return MemoryExtent(start, start + width + sum(step * (n - 1) for step, n in steps), width, steps)


def find_aliased(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the positions of the tensors that may share memory with another one, ascending.

    Tensors that certainly share none are left out: those whose address ranges are disjoint, and slices of one tensor
    that have no element in common.
    """
    spans = [
        (t.data_ptr(), t.data_ptr() + t.nbytes if t.is_contiguous() else memory_extent_of(t).end, n)
        for n, t in enumerate(tensors)
    ]
    spans.sort()
    reach = 0
    for start, end, _ in spans:
        if start < reach:
            break
        if start:
            reach = end
    else:
        return []
    return sorted(
        _aliased_numbers([(memory_extent_of(tensors[n]), n) for start, _, n in spans if start and tensors[n].numel()])
    )


def _aliased_numbers(extents: Iterable[tuple[MemoryExtent, int]]) -> set[int]:
    """Return the numbers of those of the ascending `extents` that may share memory."""
    found: set[int] = set()
    reaching: list[tuple[MemoryExtent, int]] = []  # those that reach beyond where the current one begins
    n_pairs = 0
    for extent, number in extents:
        reaching = [one for one in reaching if one[0].end > extent.start]
        for other, earlier in reaching:
            if number not in found or earlier not in found:
                n_pairs += 1
                if n_pairs > MAX_PAIRS or not are_disjoint(other, extent):
                    found |= {number, earlier}
        reaching.append((extent, number))
    return found


def are_disjoint(one: MemoryExtent, other: MemoryExtent) -> bool:
    """Whether two tensors certainly share no byte.

    The outer dimensions of both repeat with a common period. Within one period, the bytes that the inner dimensions of
    one tensor span must be disjoint from those of the other.
    """
    if one.end <= other.start or other.end <= one.start:
        return True
    steps = {step for step, _ in one.steps + other.steps}
    for least in steps:
        period = math.gcd(*(step for step in steps if step >= least))
        at = (other.start - one.start) % period
        if at >= one.itemsize and at >= _inner_nbytes(one, least) and at + _inner_nbytes(other, least) <= period:
            return True
    return False


def _inner_nbytes(extent: MemoryExtent, least: int) -> int:
    """Return the bytes that an extent spans without the dimensions whose step is `least` or more."""
    return extent.itemsize + sum(step * (n - 1) for step, n in extent.steps if step < least)


# ---- whether these can hold what was saved


class Tie(NamedTuple):
    """A tensor of the target with two names under which two tensors were saved.

    Attributes:
        fqn, other_fqn: The names, as the target has them.
        saved, other: What was saved under them, of one global shape.
        shards: What this process holds of the target: plain tensors with their offsets, whose memory is not looked at.
    """

    fqn: str
    other_fqn: str
    saved: SavedTensor
    other: SavedTensor
    shards: Sequence[tuple[torch.Tensor, tuple[int, ...]]]


ONE_TENSOR = "are one tensor in the target"
ONE_OBJECT = "are one object, or lie in one container, of the target"


def check_ties(ties: Sequence[Tie], read: Read, path: str, how: str = ONE_TENSOR) -> None:
    """Check that what was saved under both names of each tie is equal, bit by bit, in the target's dtype.

    Args:
        ties: What is compared, as far as this process holds it.
        read: Reads boxes of saved tensors.
        path: The checkpoint's path, for messages.
        how: In which way the two names are one, for messages.

    Raises:
        AliasMismatchError: Two differ.

    Blocks: for the reads.
    """
    parts = [(n, Placement(tie.saved, *shard)) for n, tie in enumerate(ties) for shard in tie.shards]
    for batch in _batches(parts):
        others = [(n, window._replace(saved=ties[n].other)) for n, window in batch]
        for (n, _), one, other in zip(batch, _values(batch, read, _CPU), _values(others, read, _CPU), strict=True):
            if not torch.equal(flat_bytes(one), flat_bytes(other)):
                tie = ties[n]
                raise alias_mismatch(tie.fqn, tie.other_fqn, path, how, "nothing was changed")


def fill_aliased(placements: Sequence[Placement], names: Sequence[str], read: Read, path: str) -> None:
    """Fill targets that share memory, one after the other, and check that each holds what was saved under its name.

    Args:
        placements: What is filled.
        names: The FQN of each, as the target has them.
        read: Reads boxes of saved tensors.
        path: The checkpoint's path, for messages.

    Raises:
        AliasMismatchError: A target does not, since another one with other values shares its memory.

    Blocks: for the reads; everything is read twice.
    """
    parts, targets = list(enumerate(placements)), [placement.target for placement in placements]
    for batch in _batches(parts):
        for (_, window), value in zip(batch, _values(batch, read), strict=True):
            fill_box(window.target, (0,) * value.dim(), value)
    for batch in _batches(parts):
        for (n, window), value in zip(batch, _values(batch, read), strict=True):
            other = find_overwriter(n, window.target, value, targets)
            if other is not None:
                one, two = (names[m] for m in sorted((n, other)))
                left = "the tensors of the target are filled, these with values of both; its objects are as they were"
                raise alias_mismatch(one, two, path, "share memory in the target", left)


def find_overwriter(
    number: int, target: torch.Tensor, value: torch.Tensor, filled: Sequence[torch.Tensor]
) -> int | None:
    """Return the number of the tensor that has overwritten another one of several.

    Args:
        number: Position in `filled` of the tensor that is checked.
        target: That tensor, or a box of it.
        value: What was filled in.
        filled: All of them, in the order in which they were filled.

    Returns:
        The position of the last tensor in `filled` that has an element at the first byte that differs; None: `target`
        holds `value`.
    """
    place = _first_difference(target, value)
    if place is None:
        return None
    return max(
        (n for n, one in enumerate(filled) if n != number and _contains_byte(memory_extent_of(one), place)),
        default=number,
    )


def _batches(parts: Iterable[Window]) -> Iterator[list[Window]]:
    """Cut targets into boxes, and group these so that no group has more than `WINDOW_NBYTES`."""
    batch: list[Window] = []
    left = WINDOW_NBYTES
    for number, part in parts:
        width = max(part.target.itemsize, torch_dtype(part.saved.dtype).itemsize)
        for window in _cut_to_windows(part._replace(target=part.target.detach()), WINDOW_NBYTES // width):
            nbytes = window.target.numel() * width
            if nbytes > left:
                yield batch
                batch, left = [], WINDOW_NBYTES
            batch.append((number, window))
            left -= nbytes
    if batch:
        yield batch


def _cut_to_windows(part: Placement, limit: int) -> Iterator[Placement]:
    """Cut a target into boxes of at most `limit` elements."""
    saved, target, offsets, _ = part
    if not target.numel():
        return
    if target.numel() <= limit:
        yield Placement(saved, target, offsets)
        return
    dim = next(d for d, n in enumerate(target.shape) if n > 1)
    n = target.shape[dim]
    step = max(1, limit * n // target.numel())
    for at in range(0, n, step):
        moved = (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :])
        yield from _cut_to_windows(Placement(saved, target.narrow(dim, at, min(step, n - at)), moved), limit)


def _values(batch: Sequence[Window], read: Read, device: torch.device | None = None) -> list[torch.Tensor]:
    """Read what was saved in boxes, and return it in the dtypes of their targets, and on their devices or on one."""
    found = [new_tensor(tuple(w.target.shape), torch_dtype(w.saved.dtype), _CPU) for _, w in batch]
    read([Placement(w.saved, value, w.offsets) for (_, w), value in zip(batch, found, strict=True)])
    return [
        _converted(value, w.target.dtype, device or w.target.device) for (_, w), value in zip(batch, found, strict=True)
    ]


def _converted(value: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if (value.dtype, value.device) == (dtype, device):
        return value
    made = new_tensor(tuple(value.shape), dtype, device)
    fill_box(made, (0,) * value.dim(), value)
    return made


def _first_difference(target: torch.Tensor, value: torch.Tensor) -> int | None:
    """Return the address of the first byte of `target` that differs from `value`; None: none does."""
    found, wanted = flat_bytes(target), flat_bytes(value)
    if torch.equal(found, wanted):
        return None
    at, byte = divmod(int((found != wanted).view(torch.uint8).argmax()), target.itemsize)
    place = target.data_ptr() + byte
    for size, step in zip(reversed(target.shape), reversed(target.stride()), strict=True):
        at, index = divmod(at, size)
        place += index * step * target.itemsize
    return place


def _contains_byte(extent: MemoryExtent, address: int) -> bool:
    """Whether the byte at `address` belongs to an element of the extent."""
    if not extent.steps:
        return extent.start <= address < extent.end
    step, n = max(extent.steps)
    inner = list(extent.steps)
    inner.remove((step, n))
    end = extent.end - step * (n - 1)  # of what lies at the first index
    first, last = max(0, -(-(address + 1 - end) // step)), min(n - 1, (address - extent.start) // step)
    return any(
        _contains_byte(MemoryExtent(extent.start + step * i, end + step * i, extent.itemsize, tuple(inner)), address)
        for i in range(first, last + 1)
    )


def alias_mismatch(fqn: str, other_fqn: str, path: str, how: str, left: str) -> AliasMismatchError:
    """Return the error for two names of the target whose saved values differ; `left`: what became of the target."""
    return AliasMismatchError(
        f"{path}: {fqn!r} and {other_fqn!r} {how}, and the values that were saved under them differ; {left}. Give each "
        "memory of its own in the target, or leave one of them out by keys",
        path=path,
        fqn=fqn,
        other_fqn=other_fqn,
    )
