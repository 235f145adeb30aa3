"""Finds out whether tensors changed while they were copied behind the training.

A version counter changes with every in-place operation that torch knows of, but not with writes through `.data`, raw
pointers, fused optimizers outside their `step()` and CUDA graphs. Such writes are found in the bytes that are compared:
`overlap_check="sample"` compares one window of each tensor, another one at each save (`Windows`); `"hash"`
compares digests of every byte.
What was there at `save()` is compared with the slot after the copy, and with the tensor itself, since a write that
comes after the copy of this window may have come before the copy of another.

An operation that still runs when the copy ends is not seen by the counters either: torch increments them at its end, up
to some milliseconds later. A fence, as in the hooks of `step()`, keeps it from beginning; the comparison finds it if it
has written by then. A storage that gets other memory (`share_memory_()`, `resize_()`) is found by its address.
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
from asyncckpt.staging.memcopy import careful_gather
from asyncckpt.staging.optimizer_ownership import storages
from asyncckpt.state_dict.flatten import Flattened

WINDOW_NBYTES = 1024
"""The most that a window covers, and what is kept of a tensor until its copy has ended. With it each of the layouts in
`python -m benchmarks sampling` costs `save()` less than 3 us a tensor that no cache holds."""

PIECES = 2
"""The most pieces of a window. More would find shorter writes at once; but after the copy the kernel looks for each
piece in the page tables, since the memory may have gone (`staging/memcopy.py`): 1.1 us each."""

FRACTION = 128
"""A window is at most this part of its tensor, or one element."""

SMALL_SAVES = 256
"""Every byte of a row-major tensor is in one of `max(SMALL_SAVES, nbytes / WINDOW_NBYTES + 2)` successive windows. Of
another one, whose pieces may be shorter, in `Windows.count`."""


Place = tuple[int, int, int]
"""Where a window lies: how many pieces it has, the first element of the first one in the tensor's memory, and in the
tensor's row-major copy."""


class _Dimension(NamedTuple):
    size: int
    stride: int
    copied_stride: int


_ONE = _Dimension(1, 1, 1)


class _Lengths(dict[int, type[ctypes.Array[ctypes.Array[ctypes.c_char]]]]):
    """By number: the type of so many arrays of `nbytes` in a row. To make one takes longer than to read a window."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self._of_one = ctypes.c_char * nbytes

    def __missing__(self, n: int) -> type[ctypes.Array[ctypes.Array[ctypes.c_char]]]:
        self[n] = made = self._of_one * n
        return made


class Windows:
    """The windows of tensors of one layout: `count` successive turns reach every element.

    The pieces of a window lie along one dimension, the elements of a piece along the dimension that is contiguous in
    memory, which may be the same. Where none is, as in `tensor[:, ::2]`, pieces are single elements.

    Args:
        shape: Of a tensor.
        strides: Of its dimensions, in elements; 0 where it is expanded.
        itemsize: In bytes.
        fraction: A window is at most this part of the tensor, or one element.
        n_pieces: At most so many pieces.

    Attributes:
        layout: The arguments.
        count: How many windows there are; 0 where there are no elements.
        run: The elements of a piece.
        step: From the begin of a piece to that of the next, in elements of the tensor's memory: a multiple of `run`.
        copied_step, copied_stride: In its row-major copy, from piece to piece, and from element to element of a piece.
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
                dimensions[-1] = inner._replace(size=inner.size * size)  # both are one dimension in either memory
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
            # One more for the elements behind the last whole block.
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
        self._apart = self.step // self.run
        self._lengths = _Lengths(self.run * itemsize)

    def _aligned(self, run: int, pieces: int) -> int:
        """Return the least step along `_along` with which pieces of `run` are whole multiples of `run` apart."""
        unit = run // math.gcd(run, self._along.stride)
        return -(-self._along.size // pieces // unit) * unit

    def _counted(self, run: int, pieces: int) -> int:
        return min(self._aligned(run, pieces), self._along.size) * -(-self._fast.size // run)

    def at(self, turn: int) -> Place:
        """Return the window of a turn; successive ones lie far from one another."""
        rest, number = divmod(turn * self._stride % self.count, self._count)
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

    def read(self, address: int, place: Place) -> bytes:
        """Return a window of the tensor at `address` in the host's memory.

        All pieces in one call: piece by piece, the waits for memory that no cache holds would add up.
        """
        n_pieces, start, _ = place
        lengths = self._lengths[(n_pieces - 1) * self._apart + 1].from_address(address + start * self._itemsize)
        return memoryview(lengths)[:: self._apart].tobytes()

    def read_carefully(self, address: int, place: Place) -> bytes:
        """As `read`; memory that has gone is an error and no crash.

        Raises:
            OSError: It has gone.
        """
        n_pieces, nbytes, apart = place[0], self.run * self._itemsize, self.step * self._itemsize
        first = address + place[1] * self._itemsize
        copied = (ctypes.c_char * (n_pieces * nbytes))()
        careful_gather(ctypes.addressof(copied), range(first, first + n_pieces * apart, apart), nbytes)
        return copied.raw

    def read_copied(self, copied: torch.Tensor, place: Place) -> bytes:
        """Return the same elements of a row-major copy of the tensor."""
        n_pieces, at = place[0], place[2]
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
"""The same windows for tensors of the same layout: to work them out takes some microseconds."""


def choose(n_tensors: int, turn: int, most: int) -> tuple[range, int, int]:
    """Return which tensors are looked at at a save: positions, the turn of their windows, and a window's `fraction`.

    Tensor `n` is looked at in turn `turn + n` of its windows, so that not all lie at the same place. A window of one
    that waits for its turn is larger, so that all together 1/`FRACTION` of the bytes are looked at, if it is not more
    than `WINDOW_NBYTES`.

    Args:
        n_tensors: How many tensors there are.
        turn: The number of the save; successive turns reach every byte.
        most: The most tensors that are looked at at one save.
    """
    period = max(1, -(-n_tensors // most))
    return range(turn % period, n_tensors, period), turn // period, -(-FRACTION // period)


MOST = 1024
"""How many tensors in host memory are sampled at one save; of more tensors, each save takes an equal share in turn."""

MOST_ON_DEVICES = 256
"""`MOST` for tensors on devices: a view and a part of a copy cost the training thread some 10 us each."""

_UNCOUNTED = "a write that bumps no version counter"
_MOVED = "share_memory_() or a resize of its storage"


class Turn(NamedTuple):
    """The number of a save of one structure; and, by number of what is copied, the windows of the layout that it had at
    the last look: to find them again among those of all layouts takes longer."""

    number: int
    known: dict[int, Windows]


class Turns:
    """Counts the saves of each structure, so that each reaches all its windows, also if several alternate."""

    def __init__(self) -> None:
        self._turns: OrderedDict[int, tuple[object, Turn]] = OrderedDict()
        self._latest = -1

    def next(self, plan: object) -> Turn:
        """Return the turn of a save with `plan`. A structure that is new may begin at any turn."""
        _, (number, known) = self._turns.pop(id(plan), (plan, Turn(self._latest, {})))
        turn = Turn(number + 1, known)
        self._turns[id(plan)] = plan, turn  # it is kept, so that no other one gets its id
        if len(self._turns) > PlanCache.MAX_PLANS:
            self._turns.popitem(last=False)
        self._latest = max(self._latest, turn.number)
        return turn


class Source(NamedTuple):
    """One copy: the tensor's number in the state, what is copied, and its place; None: freed before the check."""

    number: int
    tensor: torch.Tensor
    target: torch.Tensor | None


_UNKNOWN = Windows((0,), (1,), 1, 1, 1)

Chosen = tuple[Source, Windows, Place]
"""What is looked at of a copy."""


def sampled(
    copies: Sequence[int],
    turn: Turn,
    most: int,
    sources_of: Callable[[Sequence[int]], Iterable[Source]],
    n_pieces: int = PIECES,
) -> list[Chosen]:
    """Choose what is looked at at a save, as `windows.choose` says.

    Args:
        copies: Their numbers, which are the same in every save of the structure.
        turn: Of the save.
        most: At most so many copies.
        sources_of: Returns what these numbers stand for.
        n_pieces: A window has at most so many pieces.
    """
    positions, number, fraction = choose(len(copies), turn.number, most)
    chosen, found = [copies[at] for at in positions], list[Chosen]()
    number += positions.start
    for n, source in zip(chosen, sources_of(chosen), strict=True):
        tensor = source.tensor
        layout = tensor.shape, tensor.stride(), tensor.element_size(), fraction, n_pieces
        windows = turn.known.get(n, _UNKNOWN)
        if windows.layout != layout:  # windows of another layout would lie outside of the tensor's memory
            turn.known[n] = windows = windows_of(*layout)
        if windows.count:
            found.append((source, windows, windows.at(number)))
        number += positions.step
    return found


class SourceWatch:
    """Watches the sources of one save from when it is made.

    Args:
        flat: The state.
        numbers: The tensors of it that are copied later.
        owners: Tensors of optimizers in the same storages: a state dict may hold `.data`, with a counter of its own.
        save_id, step, path: Of the save.
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
        self._sampled: list[tuple[Source, Windows, Place, bytes]] = []
        self._on_devices: list[Chosen] = []

    def digest(self, sources: Sequence[Source]) -> None:
        """Digest all bytes of `sources` now; `check` compares with these digests."""
        self._digested = [(source, tensor_digest(source.tensor)) for source in sources]

    def sample(self, chosen: Sequence[Chosen]) -> None:
        """Read windows of what lies in host memory, now; `check` compares with them."""
        self._sampled = [(s, w, place, w.read(s.tensor.data_ptr(), place)) for s, w, place in chosen]

    def sample_on_devices(self, chosen: Sequence[Chosen]) -> list[torch.Tensor]:
        """Return windows of one piece of what lies row-major on devices, as bytes, for `Transfer` to read.

        `check_on_devices` compares what it has read.
        """
        self._on_devices = list(chosen)
        with torch.no_grad():
            return [s.tensor.detach().view(-1)[at : at + w.run].view(torch.uint8) for s, w, (_, at, _) in chosen]

    @property
    def digests_sources(self) -> bool:
        """Whether `check` reads all of the sources, on devices too, so that they must not change before it."""
        return bool(self._digested)

    def _found_addresses(self) -> list[int]:
        # Not the optimizers' own: `parameter.data = other` takes nothing away from what is copied.
        return [self._flat.tensors[n].data_ptr() for n in self._numbers]

    def check(self) -> None:
        """Prove, after the copy, that nothing has changed.

        Raises:
            SnapshotTornError: Something has.
        """
        self.check_cheaply()
        for source, digest in self._digested:
            after_copy = digest if source.target is None else tensor_digest(source.target)
            self._compare(source, digest, after_copy, tensor_digest(source.tensor))
        for source, windows, place, before in self._sampled:
            after_copy = before if source.target is None else windows.read_copied(source.target, place)
            try:
                after = windows.read_carefully(source.tensor.data_ptr(), place)
            except OSError as error:
                raise self._torn(source.number, _MOVED) from error
            self._compare(source, before, after_copy, after)

    def _compare(self, source: Source, before: object, copied: object, after: object) -> None:
        if copied != before:
            raise self._torn(source.number, _UNCOUNTED)
        if after != before:
            raise self._torn(source.number, f"{_UNCOUNTED}, after its copy,")

    def check_on_devices(self, read: Sequence[tuple[bytes, bytes]]) -> None:
        """Compare what lies in the slot with what was in the windows of `sample_on_devices`, once all is copied.

        Args:
            read: The windows as they were at `save()`, and after the copies.

        Raises:
            SnapshotTornError: Something has changed.
        """
        for (source, windows, place), (before, after) in zip(self._on_devices, read, strict=True):
            assert source.target is not None
            width = source.target.element_size()
            copied = ctypes.string_at(source.target.data_ptr() + place[2] * width, windows.run * width)
            self._compare(source, before, copied, after)

    def check_cheaply(self) -> None:
        """Prove that nothing has changed as far as counters and addresses tell. Reads no tensor.

        Raises:
            SnapshotTornError: Something has.
        """
        versions, addresses = _versions(self._watched), self._found_addresses()
        if addresses != self._addresses:
            moved = next(n for n, one in enumerate(addresses) if one != self._addresses[n])
            raise self._torn(self._numbers[moved], _MOVED)
        if versions != self._versions:
            changed = next(n for n, one in enumerate(versions) if one != self._versions[n])
            raise self._torn(self._number(changed), "an operation in place")

    def places(self) -> set[int]:
        """Return the addresses of the storages that are watched."""
        return set(storages(self._watched))

    def _number(self, watched: int) -> int | None:
        """Return the number of the state's tensor that a watched one is, or shares its storage with."""
        if watched < len(self._numbers):
            return self._numbers[watched]
        place = self._watched[watched].untyped_storage().data_ptr()
        return next((n for n in self._numbers if self._flat.tensors[n].untyped_storage().data_ptr() == place), None)

    def _torn(self, number: int | None, how: str) -> SnapshotTornError:
        fqn = None if number is None else self._flat.name_of(number)
        return SnapshotTornError(
            f"step {self._step}: the tensor {fqn!r} was changed between save() and the end of its copy, by {how} that "
            "no hook of an attached optimizer saw; call fence() before such a write, or use staging='blocking'",
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
