"""Finds out whether tensors changed while they were copied behind the training.

Version counters tell of every in-place operation that torch knows of. `.data`, raw pointers, fused optimizers outside
their `step()` and CUDA graphs count nothing; digests (`overlap_check="hash"`) find these too, and cost a pass over the
bytes each. Nor is an operation seen that still runs when the copy ends: torch counts it at its own end, up to some
milliseconds later (a fence, as the hooks of `step()` have it, keeps it from beginning; digests find it if it has
written by then). A storage that is given other memory (`share_memory_()`, `resize_()`) counts nothing either: addresses
do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncckpt.errors import SnapshotTornError
from asyncckpt.format.names import SaveId
from asyncckpt.planning.digests import tensor_digest
from asyncckpt.planning.flattened import Flattened
from asyncckpt.staging.ownership import storages

Source = tuple[int, torch.Tensor, torch.Tensor]
"""(Number of the state's tensor, what is copied of it, its place in the slot)"""


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
        self._sources: Sequence[Source] = ()
        self._digests: list[bytes] = []

    def digest(self, sources: Sequence[Source]) -> None:
        """Digest `sources` now, to compare with at `check`. Reads all of them."""
        self._sources = sources
        self._digests = [tensor_digest(tensor) for _, tensor, _ in sources]

    @property
    def digests_sources(self) -> bool:
        """Whether `check` reads the sources, so that they must not change before it."""
        return bool(self._sources)

    def _found_addresses(self) -> list[int]:
        # Not the optimizers' own: `parameter.data = other` takes nothing away from what is copied.
        return [self._flat.tensors[n].data_ptr() for n in self._numbers]

    def check(self) -> None:
        """Prove, after the copy, that nothing has changed.

        Raises:
            SnapshotTornError: Something has.
        """
        self.check_cheaply()
        for (number, tensor, target), digest in zip(self._sources, self._digests, strict=True):
            if tensor_digest(target) != digest:
                raise self._torn(number, "a write that bumps no version counter")
            if tensor_digest(tensor) != digest:
                raise self._torn(number, "a write that bumps no version counter, after its copy,")

    def check_cheaply(self) -> None:
        """Prove that nothing has changed as far as counters and addresses tell. Reads no tensor.

        Raises:
            SnapshotTornError: Something has.
        """
        versions, addresses = _versions(self._watched), self._found_addresses()
        if addresses != self._addresses:
            moved = next(n for n, one in enumerate(addresses) if one != self._addresses[n])
            raise self._torn(self._numbers[moved], "share_memory_() or a resize of its storage")
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
