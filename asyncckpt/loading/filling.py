"""Filling targets: directly as the bytes are read, or from a copy of all of them.

Directly, a load needs no memory beside its targets but the readers' buffers. By way of a copy (`low_memory=False`),
which takes as much memory again as the targets that are there, all that is read has been verified before the first of
these targets changes; and what goes to a GPU is copied from pinned memory, at the speed of its bus. Targets that share
memory are filled last, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncckpt.errors import InsufficientMemoryError
from asyncckpt.failpoints import reach
from asyncckpt.loading.fetching import read_files
from asyncckpt.loading.placements import Placement, ranges_by_file
from asyncckpt.loading.shared_memory import ONE_TENSOR, Tie, check_ties, fill_shared, overlapping
from asyncckpt.loading.shared_reads import SharedReads
from asyncckpt.loading.sinks import fill_box, new_tensor
from asyncckpt.loading.target_tensors import Filling, names_of, placements_of, tell_types
from asyncckpt.storage.contents import Contents
from asyncckpt.storage.files import Files
from asyncckpt.torch_tensors import torch_dtype

_ALIGN_NBYTES = 64


class Filler:
    """Reads saved tensors into targets.

    Args:
        contents: The checkpoint.
        files: The storage seam.
        threads: Reading threads; None: as many as the device wants.
        verify: As `storage.reader.read_shards` has it.
        low_memory: See the module.
        shared: The ranks that read once what several of them want; None: each reads for itself.
    """

    def __init__(
        self,
        contents: Contents,
        files: Files,
        *,
        threads: int | None,
        verify: bool,
        low_memory: bool,
        shared: SharedReads | None = None,
    ) -> None:
        self._contents, self._files, self._shared = contents, files, shared
        self._threads, self._verify, self._low_memory = threads, verify, low_memory

    def check_ties(self, ties: Sequence[Tie], how: str = ONE_TENSOR) -> None:
        """Check that targets with two names can hold what was saved under each; changes nothing.

        Raises:
            AliasMismatchError: One cannot.
            CorruptCheckpointError, OSError: As `storage.reader.read_shards`.
        """
        check_ties(ties, self._read_files, self._contents.path, how)

    def fill(
        self,
        existing: Sequence[Filling],
        new: Sequence[Filling],
        plain: Sequence[Placement] = (),
        *,
        alone: bool = False,
    ) -> None:
        """Fill targets, tell autograd which tensors changed, and registered types that all their shards are in.

        Args:
            existing: What the user has.
            new: What was made for this load, and nobody has seen yet.
            plain: What the user has in plain tensors that are filled whole.
            alone: This rank reads for itself, whatever the others do.

        Raises:
            CorruptCheckpointError, OSError: As `storage.reader.read_shards`.
            InsufficientMemoryError: There is no room for the copy.
            AliasMismatchError: Two targets share memory, and their values differ.
            StateLoadError: A registered type refused its shards.
            SharedLoadError, PlanTimeoutError: As `SharedReads.read`.
        """
        changed, fresh = [*plain, *placements_of(existing)], placements_of(new)
        watched = [target for _, target, _, _ in changed if not target.is_inference()]
        placed = changed + fresh
        shared = overlapping([p.target for p in placed]) if changed else []
        if shared:
            changed, fresh = _without(changed, shared, 0), _without(fresh, shared, len(changed))
        if self._low_memory:
            # Before too: a snapshot that is copied out of a target learns of the change only if it comes first.
            tell_of_change(watched)
            self._read(changed + fresh, alone=alone)
        else:
            copied = changed + [p for p in fresh if p.target.device.type != "cpu"]
            staged = _copies(copied)
            self._read(staged + [p for p in fresh if p.target.device.type == "cpu"], alone=alone)
            reach("load: copies verified")
            tell_of_change(watched)
            _copy_over(staged, copied)
        if shared:
            names = names_of(plain, [*existing, *new])
            fill_shared([placed[n] for n in shared], [names[n] for n in shared], self._read_files, self._contents.path)
        tell_of_change(watched)
        reach("load: tensors filled")
        tell_types([*existing, *new], self._contents.path)

    def _read(self, placements: Sequence[Placement], *, alone: bool) -> None:
        if self._shared is None or alone:
            self._read_files(placements)
        else:
            save_id = str(self._contents.manifest.save_id)
            self._shared.read(self._contents.path, save_id, placements, self._read_files)

    def _read_files(self, placements: Sequence[Placement]) -> None:
        ranges = ranges_by_file(self._contents, placements, self._verify)
        read_files(self._contents, ranges, self._files, threads=self._threads, verify=self._verify)


def _without(placements: Sequence[Placement], numbers: Sequence[int], first: int) -> list[Placement]:
    """Return `placements`, which are counted from `first` on, without some of them."""
    left_out = set(numbers)
    return [placement for n, placement in enumerate(placements, first) if n not in left_out]


def tell_of_change(changed: Sequence[torch.Tensor]) -> None:
    """Tell autograd that tensors change, none of them of inference mode."""
    try:
        torch.autograd.graph.increment_version(changed)
    except (TypeError, RuntimeError):  # a torch that takes them one by one
        for tensor in changed:
            torch.autograd.graph.increment_version(tensor)


def _copies(placements: Sequence[Placement]) -> list[Placement]:
    """Return the same placements in one new piece of host memory, pinned where something goes to a GPU."""
    starts, at = [], 0
    for saved, target, _, _ in placements:
        starts.append(at)
        at += -(-target.numel() * torch_dtype(saved.dtype).itemsize // _ALIGN_NBYTES) * _ALIGN_NBYTES
    try:
        if any(placement.target.device.type == "cuda" for placement in placements):
            room = torch.empty(at, dtype=torch.uint8, device="cpu", pin_memory=True)
        else:
            room = new_tensor((at,), torch.uint8, torch.device("cpu"))
    except RuntimeError as error:
        raise InsufficientMemoryError(
            f"low_memory=False copies {at} bytes first, and there is no room for them; use low_memory=True: {error}",
            nbytes=at,
        ) from error
    staged = []
    for start, (saved, target, offsets, _) in zip(starts, placements, strict=True):
        dtype = torch_dtype(saved.dtype)
        flat = room[start : start + target.numel() * dtype.itemsize].view(dtype)
        staged.append(Placement(saved, flat.view(target.shape), offsets))
    return staged


def _copy_over(staged: Sequence[Placement], placements: Sequence[Placement]) -> None:
    for source, placement in zip(staged, placements, strict=True):
        pinned = placement.target.device.type == "cuda"
        fill_box(placement.target, (0,) * placement.target.dim(), source.target, non_blocking=pinned)
    for device in {p.target.device for p in placements if p.target.device.type == "cuda"}:
        torch.cuda.synchronize(device)  # the copies read memory that is about to be freed
