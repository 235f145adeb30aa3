"""Digests of tensors: whole ones for the first exchange, windows for the samples of each save."""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
import xxhash

from asyncckpt.format.checksums import DIGEST_NBYTES, block_digest
from asyncckpt.planning.assignment import row_dimension
from asyncckpt.planning.contributions import as_claim
from asyncckpt.planning.flattened import Flattened
from asyncckpt.planning.plan import SavePlan
from asyncckpt.planning.sampling import Window, window_of
from asyncckpt.planning.torch_types import flat_bytes
from asyncckpt.protocol.samples import encode_samples

MAX_THREADS = 4
"""Memory bandwidth is the limit, as with copies (staging/copy_cpu.py)."""

THREADED_NBYTES = 16 << 20
"""From here on several threads pay. Chosen, not measured: one thread digests it in a millisecond or two."""

TEMPORARY_NBYTES = 64 << 20
"""What lies elsewhere, or not in row-major order, is brought over in pieces of about this size."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bits move as integers: copy kernels of rarer dtypes are missing or partial in some torch versions."""


class Samples(NamedTuple):
    """Digests of windows of replicas at one save: names, one byte each that says whether it is split, 8 bytes each.

    `apart`: positions, and bytes, of windows that were left to the caller; their digests are zeros until `completed`.
    """

    names: list[str]
    split: bytes
    digests: bytes
    apart: Sequence[tuple[int, torch.Tensor]] = ()

    def completed(self, windows: Sequence[bytes]) -> Samples:
        """Return these samples with the digests of what was apart, in the same order."""
        digests = bytearray(self.digests)
        for (n, _), raw in zip(self.apart, windows, strict=True):
            digests[DIGEST_NBYTES * n : DIGEST_NBYTES * (n + 1)] = block_digest(raw)
        return self._replace(digests=bytes(digests), apart=())

    def encode(self) -> bytes:
        """Return the request's field (protocol/SPEC.md): b"" without any."""
        each = range(0, len(self.digests), DIGEST_NBYTES)
        digests = (self.digests[i : i + DIGEST_NBYTES] for i in each)
        return encode_samples(zip(self.names, map(bool, self.split), digests, strict=True))


NO_SAMPLES = Samples([], b"", b"")


def digests_for(flat: Flattened, positions: Sequence[int]) -> bytes:
    """Return 8 bytes for each of the tensors at `positions` of `contribution_of(flat).tensors`.

    Blocks for reading those tensors; several threads share large ones.

    Raises:
        RuntimeError: From torch, when a tensor cannot be read.
    """
    common = flat.common
    return _digests([flat.tensors[common[position]] for position in positions])


def shard_digests_for(flat: Flattened, compared: Sequence[tuple[int, int | None]]) -> bytes:
    """Return 8 bytes for each of `ShardBook.compared`'s positions of `contribution_of(flat).shards`.

    Blocks for reading them.

    Raises:
        RuntimeError: From torch, when one cannot be read.
    """
    leaves = list(flat.shards.values())
    sources = [leaves[at].sources if box is None else (leaves[at].sources[box],) for at, box in compared]
    raw = _digests([flat.tensors[source] for part in sources for source in part], tensor_digest)
    found, begin = [], 0
    for part in sources:
        end = begin + DIGEST_NBYTES * len(part)
        found.append(raw[begin:end] if len(part) == 1 else block_digest(raw[begin:end]))
        begin = end
    return b"".join(found)


def sample_digests(
    plan: SavePlan, flat: Flattened, sequence: int, apart: Callable[[torch.Tensor], bool] = lambda tensor: False
) -> Samples:
    """Digest the windows that every rank compares at save `sequence`.

    Args:
        plan: Of this rank; without other ranks there is nothing to compare.
        flat: The state, as `PlanCache.take` gave it with `plan`; not changed since.
        sequence: Of the save id.
        apart: Says of which tensors the windows are left to the caller: to bring them over waits for their device.

    Raises:
        RuntimeError: From torch, when a tensor cannot be read.
    """
    names: list[str] = []
    split, digests = bytearray(), []
    elsewhere: list[tuple[int, torch.Tensor]] = []
    left: list[tuple[int, torch.Tensor]] = []
    due = [shared for turn, shared in plan.shared.items() if sequence % turn.period == turn.position]
    for shared in itertools.chain.from_iterable(due):
        window = window_of(shared.turn, shared.n_elements, shared.itemsize, sequence)
        if window is None:
            continue
        tensor = flat.tensors[shared.number]
        if apart(tensor):
            left.append((len(names), _elements(tensor, window)))
            digests.append(bytes(DIGEST_NBYTES))
        elif tensor.is_cpu and tensor.is_contiguous():
            address = tensor.data_ptr() + window.start * shared.itemsize
            digests.append(block_digest(_memory(address, window.n * shared.itemsize)))
        else:
            elsewhere.append((len(names), _elements(tensor, window)))
            digests.append(b"")
        names.append(shared.fqn)
        split.append(shared.split)
    for n, raw in _fetched(elsewhere):
        digests[n] = block_digest(raw)
    return Samples(names, bytes(split), b"".join(digests), left)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of `tensor` as integers of the same width, where there are such."""
    integer = _INTEGERS.get(tensor.element_size())
    return tensor.detach() if integer is None else tensor.detach().view(integer)


_INITIALISED = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
_INITIALISED += [torch.float16, torch.bfloat16, torch.float32, torch.float64]
_ONES = {dtype: int(bits_of(torch.ones((), dtype=dtype, device="cpu"))) for dtype in _INITIALISED}
"""The bits of one, as an integer of the same width, in the dtypes that are initialised with ones."""


def claim_digest(tensor: torch.Tensor) -> bytes:
    """Return the digest by which a tensor is claimed to be a replica; see `contributions.is_weak`.

    Raises:
        RuntimeError: From torch, when it cannot be read.
    """
    return as_claim(tensor_digest(tensor), weak=_as_initialised(tensor))


def _as_initialised(tensor: torch.Tensor) -> bool:
    """Whether all elements are zero, or all are one."""
    with torch.no_grad():
        if not tensor.numel():
            return False
        bits = bits_of(tensor)
        if bits.is_complex():
            return False
        first = int(bits[(0,) * bits.dim()])
        if first not in (0, _ONES.get(tensor.dtype, 0)):
            return False
        few = bits.select(0, bits.shape[0] - 1) if bits.dim() else bits  # of a large tensor that has been trained
        return bool((few == first).all()) and bool((bits == first).all())


def _digests(tensors: Sequence[torch.Tensor], digest: Callable[[torch.Tensor], bytes] = claim_digest) -> bytes:
    nbytes = sum(t.numel() * t.element_size() for t in tensors)
    threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
    if nbytes < THREADED_NBYTES or threads < 2 or len(tensors) < 2:
        return b"".join(map(digest, tensors))
    with ThreadPoolExecutor(threads, thread_name_prefix="asyncckpt-digest") as pool:
        return b"".join(pool.map(digest, tensors))


def tensor_digest(tensor: torch.Tensor) -> bytes:
    """Return the 8-byte checksum of all elements in row-major order, wherever and however they lie.

    Raises:
        RuntimeError: From torch, when they cannot be read.
    """
    with torch.no_grad():  # it is per thread
        bits = bits_of(tensor)
        if bits.device.type == "cpu" and bits.is_contiguous():
            return block_digest(_memory(bits.data_ptr(), bits.numel() * bits.element_size()))
        digest, dimension = xxhash.xxh3_64(), row_dimension(bits.shape)
        n_rows = 1 if dimension is None else bits.shape[dimension]
        step = max(1, TEMPORARY_NBYTES * n_rows // max(1, bits.numel() * bits.element_size()))
        for first in range(0, n_rows, step):
            rows = bits if dimension is None else bits.narrow(dimension, first, min(step, n_rows - first))
            here = rows.cpu().contiguous()
            digest.update(_memory(here.data_ptr(), here.numel() * here.element_size()))
    return digest.intdigest().to_bytes(DIGEST_NBYTES, "little")


def _memory(address: int, nbytes: int) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * nbytes).from_address(address) if nbytes else (ctypes.c_char * 0)()


def _elements(tensor: torch.Tensor, window: Window) -> torch.Tensor:
    """Return the window's bytes, where the tensor is."""
    with torch.no_grad():
        bits = bits_of(tensor)
        if bits.is_contiguous():
            found = bits.view(-1)[window.start : window.start + window.n]
        else:
            numbers = torch.arange(window.start, window.start + window.n, device=bits.device)
            found = bits[torch.unravel_index(numbers, bits.shape)]
        return flat_bytes(found)


def _fetched(elsewhere: Sequence[tuple[int, torch.Tensor]]) -> list[tuple[int, bytes]]:
    """Bring windows over, those of one device together: a transfer waits for the device."""
    by_device: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for n, window in elsewhere:
        by_device.setdefault(window.device, []).append((n, window))
    found = []
    for windows in by_device.values():
        here = torch.cat([window for _, window in windows]).cpu()
        at = 0
        for n, window in windows:
            found.append((n, ctypes.string_at(here.data_ptr() + at, window.numel())))
            at += window.numel()
    return found
