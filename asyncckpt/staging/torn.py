"""Finds out whether tensors changed while they were copied behind the training.

A version counter changes with every in-place operation that torch knows of, but not with writes through `.data`, raw
pointers, fused optimizers outside their `step()` and CUDA graphs. Digests find such writes in the bytes that they
cover: `overlap_check="sample"` covers one window of each tensor, another one at each save; `"hash"` covers every byte.
The digest of `save()` is compared with the slot after the copy, and with the tensor itself, since a write that comes
after the copy of this window may have come before the copy of another.

An operation that still runs when the copy ends is not seen by the counters either: torch increments them at its end, up
to some milliseconds later. A fence, as in the hooks of `step()`, keeps it from beginning; digests find it if it has
written by then. A storage that gets other memory (`share_memory_()`, `resize_()`) is found by its address.
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
"""Within this many saves of one structure every byte of up to `MOST` tensors is digested, at each save less than 1 % of
them. Of `n` tensors every byte is digested within fewer than `SAVES + n / MOST` saves."""

MOST = 1024
"""How many tensors in host memory are sampled at one save; of more tensors, each save takes an equal share in turn.
Chosen: 1.3 us each where no cache holds them, and for tensors larger than 4 KiB the time to read 1 % of them."""

MOST_ON_DEVICES = 256
"""`MOST` for tensors on devices: a view and a part of a copy cost the training thread some 10 us each."""

_UNCOUNTED = "a write that bumps no version counter"
_MOVED = "share_memory_() or a resize of its storage"


def windows_of(n_tensors: int, turn: int, most: int) -> list[tuple[int, int, int]]:
    """Return what is sampled at a save: (position of the tensor, number of the piece, number of pieces).

    Args:
        n_tensors: How many tensors there are.
        turn: The number of the save; successive turns reach every piece.
        most: The most tensors that are sampled at one save.
    """
    period = max(1, -(-n_tensors // most))
    pieces = -(-SAVES // period)
    stride = stride_of(pieces)
    first = turn // period
    return [(n, (first + n) * stride % pieces, pieces) for n in range(turn % period, n_tensors, period)]


def window_in(n_elements: int, piece: int, pieces: int) -> Window:
    """Return a piece of a tensor; one element of a tensor that has fewer elements than there are pieces."""
    start, end = n_elements * piece // pieces, n_elements * (piece + 1) // pieces
    if start == end and n_elements:
        start, end = piece % n_elements, piece % n_elements + 1
    return Window(start, end - start)


class Turns:
    """Counts the saves of each structure, so that each reaches all its windows, also if several alternate."""

    def __init__(self) -> None:
        self._counts: OrderedDict[int, tuple[object, int]] = OrderedDict()
        self._latest = -1

    def next(self, plan: object) -> int:
        """Return the turn of a save with `plan`. A structure that is new may begin at any turn."""
        _, count = self._counts.pop(id(plan), (plan, self._latest))
        self._counts[id(plan)] = plan, count + 1  # it is kept, so that no other one gets its id
        if len(self._counts) > PlanCache.MAX_PLANS:
            self._counts.popitem(last=False)
        self._latest = max(self._latest, count + 1)
        return count + 1


class Source(NamedTuple):
    """One copy: the tensor's number in the state, what is copied, and its place; None: freed before the check."""

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
        """Digest all bytes of `sources` now; `check` compares with these digests."""
        self._digested = [_Digested(source, None, tensor_digest(source.tensor)) for source in sources]

    def sample(self, sources: Sequence[tuple[Source, Window]]) -> None:
        """Digest windows of `sources`, which lie in host memory, now; `check` compares with these digests."""
        self._digested = [_Digested(source, w, _window_digest(source.tensor, w)) for source, w in sources]

    def sample_on_devices(self, sources: Sequence[tuple[Source, Window]]) -> list[torch.Tensor]:
        """Return windows of `sources`, which lie row-major on devices, as bytes, for `Transfer` to read.

        `check_on_devices` compares what it has read.
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
