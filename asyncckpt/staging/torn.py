"""Finds out whether tensors changed while they were copied behind the training.

Version counters tell of every in-place operation that torch knows of. `.data`, raw pointers, fused optimizers outside
their `step()` and CUDA graphs count nothing. Digests find these too, as far as they look: `overlap_check="sample"`
looks at a window of each tensor, another one at each save, `"hash"` at every byte. What was looked at at `save()` is
compared with the slot after the copy, and with the tensor itself: a write that comes after the copy of the one window
may have come before the copy of another.

Nor is an operation seen that still runs when the copy ends: torch counts it at its own end, up to some milliseconds
later (a fence, as the hooks of `step()` have it, keeps it from beginning; digests find it if it has written by then). A
storage that is given other memory (`share_memory_()`, `resize_()`) counts nothing either: addresses do.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import torch

from asyncckpt.errors import SnapshotTornError
from asyncckpt.format.names import SaveId
from asyncckpt.planning.digests import bits_of, memory_digest, tensor_digest
from asyncckpt.planning.flattened import Flattened
from asyncckpt.planning.planner import PlanCache
from asyncckpt.planning.sampling import Window, stride_of
from asyncckpt.staging.cutting import runs
from asyncckpt.staging.moving import careful_move
from asyncckpt.staging.ownership import storages

SAVES = 128
"""Within so many saves of one structure every byte of up to `MOST` tensors is looked at, each time less than 1 % of
them; with `n` tensors within fewer than `SAVES + n / MOST`."""

MOST = 1024
"""Tensors in the host's memory that are looked at at one save; of more, every so manieth. Chosen: 1.3 us each where no
cache holds them, and beyond 4 KiB what it takes to read 1 % of them."""

MOST_ON_DEVICES = 256
"""As `MOST`, for tensors on devices: a view and a share of a copy cost the training thread some 10 us each."""

_UNCOUNTED = "a write that bumps no version counter"
_MOVED = "share_memory_() or a resize of its storage"


def windows_of(n_tensors: int, turn: int, most: int) -> list[tuple[int, int, int]]:
    """Return what is looked at at a save: positions of tensors, and which of how many pieces of each.

    Args:
        n_tensors: How many there are to look at.
        turn: Of the save; successive turns come to every piece.
        most: Look at so many tensors at most.
    """
    period = max(1, -(-n_tensors // most))
    pieces = -(-SAVES // period)
    stride = stride_of(pieces)
    first = turn // period
    return [(n, (first + n) * stride % pieces, pieces) for n in range(turn % period, n_tensors, period)]


def window_in(n_elements: int, piece: int, pieces: int) -> Window:
    """Return a piece of a tensor: of one that has fewer elements than there are pieces, one element."""
    start, end = n_elements * piece // pieces, n_elements * (piece + 1) // pieces
    if start == end and n_elements:
        start, end = piece % n_elements, piece % n_elements + 1
    return Window(start, end - start)


class Turns:
    """Counts the saves of each structure, so that structures that are saved in turn come to all their windows."""

    def __init__(self) -> None:
        self._counts: OrderedDict[int, tuple[object, int]] = OrderedDict()
        self._latest = -1

    def next(self, plan: object) -> int:
        """Return the turn of a save with `plan`; that of a structure that was not known is any."""
        _, count = self._counts.pop(id(plan), (plan, self._latest))
        self._counts[id(plan)] = plan, count + 1  # it is kept, so that no other one gets its id
        if len(self._counts) > PlanCache.MAX_PLANS:
            self._counts.popitem(last=False)
        self._latest = max(self._latest, count + 1)
        return count + 1


class Source(NamedTuple):
    """What is copied: the number of the state's tensor, what of it, and its place; None: that is gone by the check."""

    number: int
    tensor: torch.Tensor
    target: torch.Tensor | None


class _Digested(NamedTuple):
    source: Source
    window: Window | None
    digest: bytes


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
        self._digested: list[_Digested] = []
        self._on_devices: list[tuple[Source, Window]] = []

    def digest(self, sources: Sequence[Source]) -> None:
        """Digest `sources` now, all of each, to compare with at `check`."""
        self._digested = [_Digested(source, None, tensor_digest(source.tensor)) for source in sources]

    def sample(self, sources: Sequence[tuple[Source, Window]]) -> None:
        """Digest windows of `sources`, which lie in the host's memory, now, to compare with at `check`."""
        self._digested = [_Digested(source, w, _window_digest(source.tensor, w)) for source, w in sources]

    def sample_on_devices(self, sources: Sequence[tuple[Source, Window]]) -> list[torch.Tensor]:
        """Return windows of `sources`, which lie row-major on devices, as bytes: `Transfer` takes them.

        What it has read of them is compared at `check_on_devices`.
        """
        self._on_devices = list(sources)
        with torch.no_grad():
            return [s.tensor.detach().view(-1)[w.start : w.start + w.n].view(torch.uint8) for s, w in sources]

    @property
    def digests_sources(self) -> bool:
        """Whether `check` reads all of the sources, on devices too, so that they must not change before it."""
        return any(one.window is None for one in self._digested)

    def _found_addresses(self) -> list[int]:
        # Not the optimizers' own: `parameter.data = other` takes nothing away from what is copied.
        return [self._flat.tensors[n].data_ptr() for n in self._numbers]

    def check(self) -> None:
        """Prove, after the copy, that nothing has changed.

        Raises:
            SnapshotTornError: Something has.
        """
        self.check_cheaply()
        for source, window, digest in self._digested:
            if source.target is not None and _window_digest(source.target, window) != digest:
                raise self._torn(source.number, _UNCOUNTED)
            try:
                after = _window_digest(source.tensor, window, careful=True)
            except OSError as error:
                raise self._torn(source.number, _MOVED) from error
            if after != digest:
                raise self._torn(source.number, f"{_UNCOUNTED}, after its copy,")

    def check_on_devices(self, read: Sequence[tuple[bytes, bytes]]) -> None:
        """Compare what lies in the slot with what was in the windows of `sample_on_devices`, once all is copied.

        Args:
            read: The windows as they were at `save()`, and after the copies.

        Raises:
            SnapshotTornError: Something has changed.
        """
        for (source, window), (before, after) in zip(self._on_devices, read, strict=True):
            assert source.target is not None
            width = source.target.element_size()
            staged = ctypes.string_at(source.target.data_ptr() + window.start * width, window.n * width)
            if staged != before:
                raise self._torn(source.number, _UNCOUNTED)
            if after != before:
                raise self._torn(source.number, f"{_UNCOUNTED}, after its copy,")

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


def _window_digest(tensor: torch.Tensor, window: Window | None, *, careful: bool = False) -> bytes:
    """Return the digest of elements in the host's memory, or of all, wherever they are.

    Args:
        tensor: See above.
        window: Of it; None: all.
        careful: Memory that has gone is an error and no crash, as far as it is read row-major.

    Raises:
        OSError: `careful`, and it has gone.
    """
    if window is None:
        return tensor_digest(tensor)
    if not tensor.is_contiguous():
        with torch.no_grad():
            found = [run.reshape(-1) for run in runs(bits_of(tensor), window.start, window.start + window.n)]
            return tensor_digest(torch.cat(found) if len(found) > 1 else found[0])
    width = tensor.element_size()
    address, nbytes = tensor.data_ptr() + window.start * width, window.n * width
    if careful:
        copied = (ctypes.c_char * nbytes)()
        careful_move(ctypes.addressof(copied), address, nbytes)
        return memory_digest(ctypes.addressof(copied), nbytes)
    return memory_digest(address, nbytes)
