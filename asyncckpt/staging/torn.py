"""Finds out whether tensors changed while they were copied behind the training.

A version counter changes with every in-place operation that torch knows of, but not with writes through `.data`, raw
pointers, fused optimizers outside their `step()` and CUDA graphs. Such writes are found in the bytes that are compared:
`overlap_check="sample"` compares one window of each tensor, another one at each save (`staging/windows.py`); `"hash"`
compares digests of every byte.
What was there at `save()` is compared with the slot after the copy, and with the tensor itself, since a write that
comes after the copy of this window may have come before the copy of another.

An operation that still runs when the copy ends is not seen by the counters either: torch increments them at its end, up
to some milliseconds later. A fence, as in the hooks of `step()`, keeps it from beginning; the comparison finds it if it
has written by then. A storage that gets other memory (`share_memory_()`, `resize_()`) is found by its address.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from asyncckpt.errors import SnapshotTornError
from asyncckpt.format.names import SaveId
from asyncckpt.planning.planner import PlanCache
from asyncckpt.planning.replica_checks import tensor_digest
from asyncckpt.staging.ownership import storages
from asyncckpt.staging.windows import PIECES, Place, Windows, choose, windows_of
from asyncckpt.state_dict.flatten import Flattened

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
