"""Detects torn snapshots: tensors that were changed while they were copied behind the training.

A version counter changes with every in-place operation that torch knows of, but not with writes through `.data`, raw
pointers, fused optimizers outside their `step()` and CUDA graphs. Such writes are found by comparing bytes:
`overlap_check="sample"` compares one window of each tensor, another one at each save; `"hash"` compares digests of all
bytes. The bytes at `save()` are compared with the slot after the copy, and with the tensor itself: a write that comes
after the copy of this window may have come before the copy of another.

A window is up to 2 pieces, spaced evenly over the tensor, together 1 KiB at most, so that it costs the same for every
tensor, however large. Any contiguous half of a row-major tensor contains a piece of every window, give or take a piece.
A piece is contiguous in memory, so that transposed and channels_last tensors need not be gathered.

The counters do not show an operation that still runs when the copy ends: torch increments them at its end, up to some
milliseconds later. A fence, as in the hooks of `step()`, keeps such an operation from starting; the comparison of bytes
finds it if it has written by then. If a storage gets other memory (`share_memory_()`, `resize_()`), its address shows
that.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from asyncckpt.errors import SnapshotTornError
from asyncckpt.format.names import SaveId
from asyncckpt.planning.planner import PlanCache
from asyncckpt.planning.replica_checks import bits_of, tensor_digest
from asyncckpt.planning.sample_schedule import stride_of
from asyncckpt.staging.memcopy import fault_safe_gather
from asyncckpt.staging.optimizer_ownership import storage_ptrs
from asyncckpt.state_dict.flatten import Flattened

WINDOW_NBYTES = 1024
"""The largest window, and so what is kept of a tensor until its copy has ended. With this size, `save()` took less than
3 us for a tensor of any layout that is in no cache, as measured when it was chosen."""

PIECES = 2
"""The most pieces of a window. With more, shorter writes would be found in one save; but each costs 1.1 us after the
copy, since the kernel must check that its memory is still mapped (`staging/memcopy.py`)."""

FRACTION = 128
"""A window is at most 1/`FRACTION` of its tensor, or one element."""

SMALL_SAVES = 256
"""Every byte of a row-major tensor is in one of `max(SMALL_SAVES, nbytes / WINDOW_NBYTES + 2)` successive windows. For
other layouts, whose pieces may be shorter, in one of `Windows.count`."""


WindowPosition = tuple[int, int, int]
"""Number of pieces of a window; first element of its first piece in the tensor's memory; the same in the tensor's
row-major copy."""


MAX_SAMPLED_TENSORS = 1024
"""How many tensors in host memory are sampled in one save. If there are more, each save samples an equal share."""

MAX_SAMPLED_DEVICE_TENSORS = 256
"""The same for tensors on devices, for which a view and a part of a copy cost the training thread some 10 us each."""

_UNCOUNTED = "a write that increments no version counter"
_MOVED = "share_memory_() or a resize of its storage"
"""How a tensor was changed, for the error."""


class _Dimension(NamedTuple):
    size: int
    stride: int
    copied_stride: int


_ONE = _Dimension(1, 1, 1)


class _Lengths(dict[int, type[ctypes.Array[ctypes.Array[ctypes.c_char]]]]):
    """Cache of ctypes array types, by `n`: `n` arrays of `nbytes`. To make one takes longer than to read a window."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self._of_one = ctypes.c_char * nbytes

    def __missing__(self, n: int) -> type[ctypes.Array[ctypes.Array[ctypes.c_char]]]:
        self[n] = made = self._of_one * n
        return made


class Windows:
    """The windows of tensors of one layout: `count` successive rounds reach every element.

    The pieces of a window lie along one dimension, the elements of a piece along the dimension that is contiguous in
    memory, which may be the same one. If no dimension is, as in `tensor[:, ::2]`, pieces are single elements.

    Args:
        shape: Shape of a tensor.
        strides: Strides of its dimensions, in elements; 0 for an expanded one.
        itemsize: Bytes of an element.
        fraction: A window is at most 1/`fraction` of the tensor, or one element.
        n_pieces: The most pieces of a window.

    Attributes:
        layout: The arguments.
        count: Number of windows; 0 if the tensor has no elements.
        run: Number of elements of a piece.
        step: Distance of pieces in the tensor's memory, in elements: a multiple of `run`.
        copied_step, copied_stride: In its row-major copy, distance of pieces, and of elements of a piece, in elements.
    """

    def __init__(
        self, shape: Sequence[int], strides: Sequence[int], itemsize: int, fraction: int, n_pieces: int
    ) -> None:
        self.layout = shape, strides, itemsize, fraction, n_pieces
        self.count = 0
        if 0 in shape:
            return
        dimensions, copied_stride = list[_Dimension](), 1
        for size, stride in zip(reversed(shape), reversed(strides), strict=True):
            inner = dimensions[-1] if dimensions else _ONE
            if (stride, copied_stride) == (inner.size * inner.stride, inner.size * inner.copied_stride) and dimensions:
                dimensions[-1] = inner._replace(size=inner.size * size)  # merge: one dimension in either memory
            elif size > 1:
                dimensions.append(_Dimension(size, stride, copied_stride))
            copied_stride *= size
        n_elements = max(1, min(math.prod(shape) // fraction, WINDOW_NBYTES // itemsize))
        fast = next((d for d in dimensions if d.stride == 1), _ONE)
        others = [d for d in dimensions if d is not fast and d.stride]
        along = max(others, key=lambda d: d.size, default=fast)
        pieces = min(n_pieces, n_elements, along.size)
        self._fast, self._along = fast, along
        self._others = [d for d in dimensions if d is not fast and d is not along]
        if along is fast:
            self.run = min(fast.size, n_elements // pieces)
            self._n_blocks = fast.size // self.run
            self._n_steps = -(-self._n_blocks // pieces)
            step = self._n_steps * self.run
            # One more window for the elements behind the last whole block.
            self._count = self._n_steps + (fast.size % self.run > 0)
        else:
            longest = min(fast.size, n_elements // pieces)
            runs = {1 << n for n in range(longest.bit_length())} | {longest}
            self.run = min(runs, key=lambda run: (self._counted(run, pieces), run))
            step = self._aligned(self.run, pieces)
            self._n_steps = min(step, along.size)
            self._count = self._counted(self.run, pieces)
        self.step, self.copied_step, self.copied_stride = (
            step * along.stride,
            step * along.copied_stride,
            fast.copied_stride,
        )
        self._step, self._itemsize = step, itemsize
        last = fast.size - self.run
        self._lattice = self._n_steps, step, last, along.size, along.stride, along.copied_stride, fast.copied_stride
        self.count = self._count * math.prod(d.size for d in self._others)
        self._stride = stride_of(self.count)
        self._piece_stride = self.step // self.run
        self._lengths = _Lengths(self.run * itemsize)

    def _aligned(self, run: int, pieces: int) -> int:
        """Return the least step along `_along` with which pieces of `run` are whole multiples of `run` apart."""
        unit = run // math.gcd(run, self._along.stride)
        return -(-self._along.size // pieces // unit) * unit

    def _counted(self, run: int, pieces: int) -> int:
        return min(self._aligned(run, pieces), self._along.size) * -(-self._fast.size // run)

    def at(self, round_number: int) -> WindowPosition:
        """Return the window of a round. Windows of successive rounds lie far from each other."""
        rest, number = divmod(round_number * self._stride % self.count, self._count)
        run = self.run
        if self._along is self._fast:
            fast = self._fast
            if number < self._n_steps:
                at, n_pieces = number * run, -((number - self._n_blocks) // self._n_steps)
            else:  # up to the end
                n_pieces, at = divmod(fast.size - run, self._step)
                n_pieces += 1
            if not self._others:
                return n_pieces, at, at * fast.copied_stride
            start, copied_at = at, at * fast.copied_stride
        else:
            n_steps, step, last, size, stride, copied_stride, fast_copied_stride = self._lattice
            at_run, at = divmod(number, n_steps)
            n_pieces = -((at - size) // step)
            first = at_run * run
            first = min(first, last)
            start, copied_at = at * stride + first, at * copied_stride + first * fast_copied_stride
            if not self._others:
                return n_pieces, start, copied_at
        for size, stride, copied_stride in self._others:
            rest, at = divmod(rest, size)
            start += at * stride
            copied_at += at * copied_stride
        return n_pieces, start, copied_at

    def read(self, address: int, position: WindowPosition) -> bytes:
        """Return the bytes of a window of the tensor at `address` in host memory.

        All pieces are read by one call, so that cache misses overlap.
        """
        n_pieces, start, _ = position
        lengths = self._lengths[(n_pieces - 1) * self._piece_stride + 1].from_address(address + start * self._itemsize)
        return memoryview(lengths)[:: self._piece_stride].tobytes()

    def read_fault_safe(self, address: int, position: WindowPosition) -> bytes:
        """As `read`, but fault-safe.

        Raises:
            OSError: The memory was unmapped.
        """
        n_pieces, nbytes, apart = position[0], self.run * self._itemsize, self.step * self._itemsize
        first = address + position[1] * self._itemsize
        copied = (ctypes.c_char * (n_pieces * nbytes))()
        fault_safe_gather(ctypes.addressof(copied), range(first, first + n_pieces * apart, apart), nbytes)
        return copied.raw

    def read_copied(self, copied: torch.Tensor, position: WindowPosition) -> bytes:
        """Return the bytes of a window, read from a row-major copy of the tensor."""
        n_pieces, at = position[0], position[2]
        step = self.copied_step if n_pieces > 1 else self.run
        if step % self.run == 0 and (self.run == 1 or self.copied_stride == 1):
            apart = step // self.run
            lengths = self._lengths[(n_pieces - 1) * apart + 1].from_address(copied.data_ptr() + at * self._itemsize)
            return memoryview(lengths)[::apart].tobytes()
        strides = (self.copied_step, self.copied_stride)
        with torch.no_grad():
            bits = bits_of(copied)
            found = bits.as_strided((n_pieces, self.run), strides, bits.storage_offset() + at).contiguous()
        return ctypes.string_at(found.data_ptr(), found.nbytes)


windows_of = functools.lru_cache(maxsize=4096)(Windows)
"""`Windows`, cached by layout: to compute them takes some microseconds."""


def sampled_positions(n_tensors: int, round_number: int, max_tensors: int) -> tuple[range, int, int]:
    """Return which tensors are sampled in a save: positions, the round of their windows, and a window's `fraction`.

    Tensor `n` is in round `round_number + n` of its windows, so that these do not all lie at the same offset. If a
    tensor is not sampled in every save, its window is larger, up to `WINDOW_NBYTES`, so that each save still samples
    1/`FRACTION` of all bytes.

    Args:
        n_tensors: Number of tensors.
        round_number: Number of the save; successive rounds reach every byte.
        max_tensors: The most tensors that are sampled in one save.
    """
    period = max(1, -(-n_tensors // max_tensors))
    return range(round_number % period, n_tensors, period), round_number // period, -(-FRACTION // period)


class SamplingRound(NamedTuple):
    """One save's round of sampling.

    Attributes:
        number: Number of the save among those of its structure.
        windows_by_copy: For each copy, by number, the windows of its layout in the last round: a cache in front of
            `windows_of`, which is slower.
    """

    number: int
    windows_by_copy: dict[int, Windows]


class SamplingRounds:
    """Counts the saves of each structure, so that each reaches all its windows, even if structures alternate."""

    def __init__(self) -> None:
        self._rounds: OrderedDict[int, tuple[object, SamplingRound]] = OrderedDict()
        self._latest = -1

    def next(self, plan: object) -> SamplingRound:
        """Return the round of a save with `plan`. A new structure may begin with any round."""
        _, (number, windows_by_copy) = self._rounds.pop(id(plan), (plan, SamplingRound(self._latest, {})))
        new = SamplingRound(number + 1, windows_by_copy)
        self._rounds[id(plan)] = plan, new  # keeps the plan alive, so that its id is not reused
        if len(self._rounds) > PlanCache.MAX_PLANS:
            self._rounds.popitem(last=False)
        self._latest = max(self._latest, new.number)
        return new


class Source(NamedTuple):
    """One copy of a tensor or a box of it.

    Attributes:
        number: Number of the tensor in the state.
        tensor: The source of the copy.
        target: The copy in the slot; None: the slot no longer holds it when it is checked.
    """

    number: int
    tensor: torch.Tensor
    target: torch.Tensor | None


_NO_WINDOWS = Windows((0,), (1,), 1, 1, 1)

Sample = tuple[Source, Windows, WindowPosition]
"""A copy, and the window of it that is compared."""


def choose_samples(
    copies: Sequence[int],
    sampling_round: SamplingRound,
    max_tensors: int,
    sources_of: Callable[[Sequence[int]], Iterable[Source]],
    n_pieces: int = PIECES,
) -> list[Sample]:
    """Choose which windows of which copies are compared in a save, as `sampled_positions` says.

    Args:
        copies: Numbers of the copies, which are the same in every save of the structure.
        sampling_round: Round of the save.
        max_tensors: The most copies to choose.
        sources_of: Returns the copies of these numbers.
        n_pieces: The most pieces of a window.
    """
    positions, number, fraction = sampled_positions(len(copies), sampling_round.number, max_tensors)
    chosen, found = [copies[at] for at in positions], list[Sample]()
    number += positions.start
    for n, source in zip(chosen, sources_of(chosen), strict=True):
        tensor = source.tensor
        layout = tensor.shape, tensor.stride(), tensor.element_size(), fraction, n_pieces
        windows = sampling_round.windows_by_copy.get(n, _NO_WINDOWS)
        if windows.layout != layout:  # windows of another layout may lie outside of the tensor's memory
            sampling_round.windows_by_copy[n] = windows = windows_of(*layout)
        if windows.count:
            found.append((source, windows, windows.at(number)))
        number += positions.step
    return found


class MutationCheck:
    """Detects changes of the sources of one save from the time when this object is made.

    Args:
        flat: The state.
        numbers: Numbers of its tensors that are copied behind the training.
        owners: Tensors of optimizers in the same storages, whose counters are checked too: a state dict may hold
            `.data` of them, which has a counter of its own.
        save_id, step, path: ID, step and directory of the save.
    """

    def __init__(
        self,
        flat: Flattened,
        numbers: frozenset[int],
        owners: Sequence[torch.Tensor],
        *,
        save_id: SaveId,
        step: int,
        path: str,
    ) -> None:
        self._flat, self._numbers = flat, sorted(numbers)
        self._watched = [*(flat.tensors[n] for n in self._numbers), *owners]
        self._save_id, self._step, self._path = save_id, step, path
        self._versions, self._addresses = _versions(self._watched), self._found_addresses()
        self._digested: list[tuple[Source, bytes]] = []
        self._sampled: list[tuple[Source, Windows, WindowPosition, bytes]] = []
        self._on_devices: list[Sample] = []

    def digest(self, sources: Sequence[Source]) -> None:
        """Digest all bytes of `sources` now; `check` compares with these digests."""
        self._digested = [(source, tensor_digest(source.tensor)) for source in sources]

    def sample(self, chosen: Sequence[Sample]) -> None:
        """Read windows of tensors in host memory now; `check` compares with them."""
        self._sampled = [(s, w, position, w.read(s.tensor.data_ptr(), position)) for s, w, position in chosen]

    def sample_devices(self, chosen: Sequence[Sample]) -> list[torch.Tensor]:
        """Return windows of row-major tensors on devices, as flat views of one piece each, for `Transfer` to read.

        `check_device_samples` compares the bytes that `Transfer` has read.
        """
        self._on_devices = list(chosen)
        with torch.no_grad():
            found = [s.tensor.as_strided((w.run,), (1,), s.tensor.storage_offset() + at) for s, w, (_, at, _) in chosen]
            # As bytes, which every device copies as they are: so it does with float32, without another view of each.
            return [one if one.dtype is torch.float32 else one.view(torch.uint8) for one in found]

    @property
    def digests_sources(self) -> bool:
        """Whether `check` reads the whole sources, also those on devices: they must not change before it."""
        return bool(self._digested)

    def _found_addresses(self) -> list[int]:
        # Without the owners: `parameter.data = other` gives them another address, and leaves the copied memory alone.
        return [self._flat.tensors[n].data_ptr() for n in self._numbers]

    def check(self) -> None:
        """Check, after the copy, that no source has changed.

        Raises:
            SnapshotTornError: A source has changed.
        """
        self.check_counters()
        for source, digest in self._digested:
            after_copy = digest if source.target is None else tensor_digest(source.target)
            self._compare(source, digest, after_copy, tensor_digest(source.tensor))
        for source, windows, position, before in self._sampled:
            after_copy = before if source.target is None else windows.read_copied(source.target, position)
            try:
                after = windows.read_fault_safe(source.tensor.data_ptr(), position)
            except OSError as error:
                raise self._torn(source.number, _MOVED) from error
            self._compare(source, before, after_copy, after)

    def _compare(self, source: Source, before: object, copied: object, after: object) -> None:
        if copied != before:
            raise self._torn(source.number, _UNCOUNTED)
        if after != before:
            raise self._torn(source.number, f"{_UNCOUNTED}, after its copy,")

    def check_device_samples(self, read: Sequence[tuple[bytes, bytes]]) -> None:
        """Compare the slot with the windows of `sample_devices`, once everything is copied.

        Args:
            read: Bytes of the windows at `save()`, and after the copies.

        Raises:
            SnapshotTornError: A source has changed.
        """
        for (source, windows, position), (before, after) in zip(self._on_devices, read, strict=True):
            assert source.target is not None
            width = source.target.element_size()
            copied = ctypes.string_at(source.target.data_ptr() + position[2] * width, windows.run * width)
            self._compare(source, before, copied, after)

    def check_counters(self) -> None:
        """Check that no version counter or address has changed. Reads no tensor.

        Raises:
            SnapshotTornError: One has changed.
        """
        versions, addresses = _versions(self._watched), self._found_addresses()
        if addresses != self._addresses:
            moved = next(n for n, one in enumerate(addresses) if one != self._addresses[n])
            raise self._torn(self._numbers[moved], _MOVED)
        if versions != self._versions:
            changed = next(n for n, one in enumerate(versions) if one != self._versions[n])
            raise self._torn(self._number(changed), "an in-place operation")

    def source_storage_ptrs(self) -> set[int]:
        """Return the addresses of the storages that are watched."""
        return set(storage_ptrs(self._watched))

    def _number(self, watched: int) -> int | None:
        """Return the number in the state of a watched tensor, or of one that shares its storage."""
        if watched < len(self._numbers):
            return self._numbers[watched]
        ptr = self._watched[watched].untyped_storage().data_ptr()
        return next((n for n in self._numbers if self._flat.tensors[n].untyped_storage().data_ptr() == ptr), None)

    def _torn(self, number: int | None, how: str) -> SnapshotTornError:
        fqn = None if number is None else self._flat.name_of(number)
        return SnapshotTornError(
            f"save of step {self._step} to {self._path}: tensor {fqn!r} was changed between save() and the end of its "
            f"copy, by {how} that no hook of an attached optimizer saw; call fence() before such a write, or use "
            "staging='blocking'",
            fqn=fqn,
            save_id=str(self._save_id),
            step=self._step,
            path=self._path,
        )


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # inference tensors have no counter
        return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]
