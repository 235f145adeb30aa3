"""Tensors of a target, of any type: which plain tensors in them are filled, and which of them share memory.

A tie is one tensor with two names. It is filled from one saved tensor, or from two with equal values, which are
compared before anything changes. Other views that share memory (transposed, reshaped, a slice of a fused tensor, the
imaginary part of a complex tensor) are filled one after the other; then each is compared with the value that was saved
under its name. Tensors that interleave without sharing an element, such as the columns of a matrix, are recognised by
their strides.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from asyncckpt.basics.libc import read_only
from asyncckpt.dtypes import UNCONVERTED
from asyncckpt.errors import (
    AliasMismatchError,
    AsyncCkptError,
    ConfigError,
    OverlappingShardsError,
    StateLoadError,
    UnsupportedLeafError,
)
from asyncckpt.format.names import split_per_rank_name
from asyncckpt.format.state_tree import Node
from asyncckpt.loading.byte_ranges import Placement
from asyncckpt.loading.tensor_writers import fill_box, new_tensor
from asyncckpt.sharding.registry import describer_of, is_dtensor, notify_filled, shards_of
from asyncckpt.sharding.shard_types import LocalShard, Sharded, with_fqn, with_leaf
from asyncckpt.state_dict.composite_tensors import decompose
from asyncckpt.state_dict.flatten import PLAIN_TENSORS
from asyncckpt.storage.contents import SavedTensor
from asyncckpt.torch_tensors import dtype_name, flat_bytes, plain_parameter, torch_dtype, why_no_memory


class TargetTensor(NamedTuple):
    """A tensor leaf of a target: its global shape, and the plain tensors in it that are filled.

    Attributes:
        value: The leaf.
        fqn: FQN of the leaf in the target; "" if it has none.
        dtype, global_shape: Dtype and shape of the whole tensor.
        shards: The parts that this process holds; may be empty.
    """

    value: Any
    fqn: str
    dtype: torch.dtype
    global_shape: tuple[int, ...]
    shards: tuple[LocalShard, ...]

    @property
    def has_no_local_elements(self) -> bool:
        """Whether the tensor has elements, but none on this process."""
        return 0 not in self.global_shape and not any(part.numel() for part, _ in self.shards)

    @property
    def is_whole(self) -> bool:
        """Whether `value` itself is the plain tensor that is filled."""
        return len(self.shards) == 1 and self.shards[0].tensor is self.value

    def takes(self, saved: SavedTensor) -> bool:
        """Whether it has the shape and dtype of `saved`."""
        return (self.dtype, self.global_shape) == (getattr(torch, saved.dtype, None), saved.global_shape)

    def holds_values_of(self, saved: SavedTensor) -> bool:
        """Whether the dtype can hold the values of `saved`, possibly with less precision."""
        if saved.dtype in UNCONVERTED or dtype_name(self.dtype) in UNCONVERTED:
            return False
        return torch.can_cast(torch_dtype(saved.dtype), self.dtype)


class Reused(NamedTuple):
    """Existing tensors that new values are read into.

    Attributes:
        tensors: By saved tensor number.
        composites: By saved node, tensors whose components are all in `tensors`.
    """

    tensors: dict[int, TargetTensor]
    composites: dict[Node, Any]


def target_tensor(value: Any, fqn: str) -> TargetTensor:
    """Return the plain tensors of `value` that are filled.

    Args:
        value: A tensor, or a value of a type that has shards.
        fqn: Its FQN, for messages; "" if it has none.

    Raises:
        UnsupportedLeafError: Its shards are inconsistent.
        OverlappingShardsError: Its shards share elements.
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
        tensors: (FQN, tensor) of the tensors that are to be filled.
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
        UnsupportedLeafError: One is; names the first.
    """
    by_page: dict[int, tuple[int, int]] = {}  # one tensor per page: memory is protected by pages
    for number, (_, tensor, _, _) in enumerate(placements):
        if tensor.is_cpu and tensor.numel():  # tensors on some other devices have no address
            address = tensor.data_ptr()
            by_page.setdefault(address // mmap.PAGESIZE, (address, number))
    closed = read_only(address for address, _ in by_page.values())
    if refused := [number for address, number in by_page.values() if address in closed]:
        fqn = names()[min(refused)]
        raise UnsupportedLeafError(
            f"{path}: nothing can be loaded into target tensor {fqn!r}: its memory is mapped read-only, for example by "
            "numpy.memmap(mode='r'); nothing was changed. Map it with mode 'c' or 'r+', or pass a clone()",
            leaf=fqn,
            type_name="Tensor",
        )


def check_fillable(target: TargetTensor, fqn: str) -> None:
    """Refuse a tensor whose elements share memory with each other.

    Raises:
        ConfigError: It is expanded, or a view with overlapping elements (`unfold`, `as_strided`).
    """
    for tensor, _ in target.shards:
        if shares_own_memory(tensor):
            raise ConfigError(
                f"target tensor {fqn!r} is expanded: its elements share memory, so it cannot be filled; pass a clone()",
                field="state_dict",
                value=fqn,
            )


def shares_own_memory(tensor: torch.Tensor) -> bool:
    """Whether elements of a tensor share memory with each other, so that it cannot hold arbitrary values."""
    if tensor.is_contiguous() or not tensor.numel():
        return False
    reach, overlaps = 0, False  # reach: distance to the last element of all dimensions with smaller strides
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride == 0:
            return True
        overlaps |= stride <= reach
        reach += stride * (size - 1)
    return overlaps and _has_equal_offsets(tensor)


def _has_equal_offsets(tensor: torch.Tensor) -> bool:
    """Whether two elements have the same offset. Overlapping ranges of dimensions alone do not prove it."""
    offsets = torch.zeros((), dtype=torch.int64, device="cpu")
    for stride, size in zip(tensor.stride(), tensor.shape, strict=True):
        offsets = offsets.unsqueeze(-1) + torch.arange(size, device="cpu") * stride
    ordered = offsets.flatten().sort().values
    return bool((ordered[1:] == ordered[:-1]).any())


Filling = tuple[SavedTensor, TargetTensor]
"""A saved tensor, and what it fills."""


def placements_of(fillings: Iterable[Filling]) -> list[Placement]:
    """Return a placement for each plain tensor of the fillings; tensors without elements are left out."""
    return [
        Placement(saved, tensor, offsets)
        for saved, target in fillings
        for tensor, offsets in target.shards
        if tensor.numel()
    ]


def placement_names(plain: Iterable[Placement], fillings: Iterable[Filling]) -> list[str]:
    """Return the FQNs in the target of `plain`, which are the saved FQNs, and of `placements_of(fillings)`."""
    parts = [target.fqn or saved.fqn for saved, target in fillings for tensor, _ in target.shards if tensor.numel()]
    owned = ((saved.fqn, split_per_rank_name(saved.fqn)) for saved, _, _, _ in plain)
    return [*(fqn if own is None else own[0] for fqn, own in owned), *parts]


def converted_storages(fillings: Iterable[Filling]) -> dict[int, bool]:
    """Return, by address of the storages of each filled value, whether the saved tensor has another dtype."""
    return {
        at: target.dtype != torch_dtype(saved.dtype) for saved, target in fillings for at in storages_of(target.value)
    }


def notify_shard_types(fillings: Iterable[Filling], path: str) -> None:
    """Call `from_shards` of each filled value of a registered type, once.

    Args:
        fillings: The fillings of the load.
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
                f"{path}: from_shards() of {saved.fqn!r}, a {kind}, raised {detail}",
                path=path,
                fqn=saved.fqn,
                type_name=kind,
                detail=detail,
            ) from error


def parts_of(value: Any) -> list[torch.Tensor]:
    """Return the plain tensors of this process in a tensor of any type, those of its components included.

    Raises:
        UnsupportedLeafError, OverlappingShardsError: As from `target_tensor`.
    """
    is_plain = type(value) in PLAIN_TENSORS and value.layout is torch.strided and not value.is_quantized
    if isinstance(value, torch.Tensor) and not is_plain and (is_dtensor(value) or describer_of(type(value)) is None):
        found = decompose(value)
        if found is not None:
            return [part for tensor in found.tensors.values() for part in parts_of(tensor)]
    return [tensor for tensor, _ in target_tensor(value, "").shards]


def storages_of(value: Any) -> set[int]:
    """Return the addresses of the storages of a tensor of any type; empty if it has no elements in this process."""
    try:
        tensors = parts_of(value)
    except AsyncCkptError:
        return set()
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}


BATCH_NBYTES = 16 << 20
"""Bytes that are compared at once. It takes a few times as much host memory, whatever the tensors' sizes."""

MAX_PAIRS = 100_000
"""Maximum number of pairs of tensors whose strides are compared, which takes 0.5 s. Further pairs are treated as if
they shared memory: they are read again and compared."""

Read = Callable[[Sequence[Placement]], None]
"""Reads boxes of saved tensors into plain ones."""

NumberedBox = tuple[int, Placement]
"""(number of a target, a box of that target)"""

_CPU = torch.device("cpu")


# ---- Which targets share memory


class MemoryExtent(NamedTuple):
    """The addresses of a tensor's elements.

    Attributes:
        start, end: Address of the first byte, and address behind the last byte.
        itemsize: Bytes of an element.
        steps: (stride in bytes, size) of each dimension whose size is above 1 and whose stride is not 0.
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

    Tensors that share none are left out if this can be proven: their address ranges are disjoint, or they are slices of
    one tensor without a common element.
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
    """Return the numbers of those extents that may share memory; `extents` are sorted by start."""
    found: set[int] = set()
    reaching: list[tuple[MemoryExtent, int]] = []  # earlier extents that end behind the start of the current one
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
    """Whether it is proven that two tensors share no byte.

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
    """Return the bytes that an extent spans in the dimensions whose step is below `least`."""
    return extent.itemsize + sum(step * (n - 1) for step, n in extent.steps if step < least)


# ---- Whether targets that share memory can hold the saved values


class Tie(NamedTuple):
    """A tensor of the target with two names under which two tensors were saved.

    Attributes:
        fqn, other_fqn: The two FQNs in the target.
        saved, other: The tensors that were saved under them; their global shapes are equal.
        shards: The parts of the target that this process holds: plain tensors with their offsets. Only shapes and
            dtypes are used, not the memory.
    """

    fqn: str
    other_fqn: str
    saved: SavedTensor
    other: SavedTensor
    shards: Sequence[tuple[torch.Tensor, tuple[int, ...]]]


ONE_TENSOR = "are one tensor in the target"
ONE_OBJECT = "are one object, or lie in one container, of the target"


def check_ties(ties: Sequence[Tie], read: Read, path: str, how: str = ONE_TENSOR) -> None:
    """Check that the two saved tensors of each tie are equal, bit by bit, in the target's dtype.

    Args:
        ties: The ties. Only the parts that this process holds are compared.
        read: Reads boxes of saved tensors.
        path: The checkpoint's path, for messages.
        how: How the two names are related, for messages.

    Raises:
        AliasMismatchError: Two tensors differ.

    Blocks: for the reads.
    """
    parts = [(n, Placement(tie.saved, *shard)) for n, tie in enumerate(ties) for shard in tie.shards]
    for batch in _batches(parts):
        others = [(n, box._replace(saved=ties[n].other)) for n, box in batch]
        for (n, _), one, other in zip(batch, _values(batch, read, _CPU), _values(others, read, _CPU), strict=True):
            if not torch.equal(flat_bytes(one), flat_bytes(other)):
                tie = ties[n]
                raise alias_mismatch(tie.fqn, tie.other_fqn, path, how, "nothing was changed")


def fill_aliased(placements: Sequence[Placement], names: Sequence[str], read: Read, path: str) -> None:
    """Fill targets that share memory, one after the other, and check that each holds its saved value afterwards.

    Args:
        placements: The placements to fill.
        names: FQN of each in the target.
        read: Reads boxes of saved tensors.
        path: The checkpoint's path, for messages.

    Raises:
        AliasMismatchError: Two targets share memory, and their saved values differ.

    Blocks: for the reads; everything is read twice.
    """
    parts, targets = list(enumerate(placements)), [placement.target for placement in placements]
    for batch in _batches(parts):
        for (_, box), value in zip(batch, _values(batch, read), strict=True):
            fill_box(box.target, (0,) * value.dim(), value)
    for batch in _batches(parts):
        for (n, box), value in zip(batch, _values(batch, read), strict=True):
            other = find_overwriter(n, box.target, value, targets)
            if other is not None:
                one, two = (names[m] for m in sorted((n, other)))
                left = "the target's tensors have been filled, these two with a mix of both; its objects are unchanged"
                raise alias_mismatch(one, two, path, "share memory in the target", left)


def find_overwriter(
    number: int, target: torch.Tensor, value: torch.Tensor, filled: Sequence[torch.Tensor]
) -> int | None:
    """Return the number of the tensor that has overwritten a part of `target`.

    Args:
        number: Position of `target` in `filled`.
        target: The tensor that is checked, or a box of it.
        value: The value that it was filled with.
        filled: All filled tensors, in the order in which they were filled.

    Returns:
        Position of the last tensor in `filled` that has an element at the first byte that differs. None: `target` holds
        `value`.
    """
    address = _first_difference(target, value)
    if address is None:
        return None
    return max(
        (n for n, one in enumerate(filled) if n != number and _contains_byte(memory_extent_of(one), address)),
        default=number,
    )


def _batches(targets: Iterable[NumberedBox]) -> Iterator[list[NumberedBox]]:
    """Cut targets into boxes, and yield groups of boxes of at most `BATCH_NBYTES` each."""
    batch: list[NumberedBox] = []
    left = BATCH_NBYTES
    for number, whole in targets:
        width = max(whole.target.itemsize, torch_dtype(whole.saved.dtype).itemsize)
        for box in _cut_to_boxes(whole._replace(target=whole.target.detach()), BATCH_NBYTES // width):
            nbytes = box.target.numel() * width
            if nbytes > left:
                yield batch
                batch, left = [], BATCH_NBYTES
            batch.append((number, box))
            left -= nbytes
    if batch:
        yield batch


def _cut_to_boxes(whole: Placement, limit: int) -> Iterator[Placement]:
    """Cut a target into boxes of at most `limit` elements."""
    saved, target, offsets, _ = whole
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
        yield from _cut_to_boxes(Placement(saved, target.narrow(dim, at, min(step, n - at)), moved), limit)


def _values(batch: Sequence[NumberedBox], read: Read, device: torch.device | None = None) -> list[torch.Tensor]:
    """Read the saved values of boxes. Returns them in the targets' dtypes, on `device` or on the targets' devices."""
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
    """Return the address of the first byte of `target` that differs from `value`; None: they are equal."""
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
    end = extent.end - step * (n - 1)  # end of the elements at the first index of this dimension
    first, last = max(0, -(-(address + 1 - end) // step)), min(n - 1, (address - extent.start) // step)
    return any(
        _contains_byte(MemoryExtent(extent.start + step * i, end + step * i, extent.itemsize, tuple(inner)), address)
        for i in range(first, last + 1)
    )


def alias_mismatch(fqn: str, other_fqn: str, path: str, how: str, left: str) -> AliasMismatchError:
    """Return the error for two names of the target whose saved values differ; `left` says what has been changed."""
    return AliasMismatchError(
        f"{path}: {fqn!r} and {other_fqn!r} {how}, and the values saved under these names differ; {left}. Make them "
        "separate tensors or objects in the target, or leave one of them out by keys",
        path=path,
        fqn=fqn,
        other_fqn=other_fqn,
    )
