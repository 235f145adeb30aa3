"""Proofs of coverage: each rank's worker sums up its structure's chunks; the leader compares the sums of all ranks."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import replace

from asyncckpt.basics.gc_control import gc_paused
from asyncckpt.errors import SaveFailedError
from asyncckpt.format.coverage import Tally, seed_of, tally_of, uncovered
from asyncckpt.format.names import SaveId
from asyncckpt.format.structure import decode_structure
from asyncckpt.memory.heap import LARGE_NBYTES, trim_heap
from asyncckpt.protocol.request import SaveRequest

MAX_PROOFS = 256
"""Maximum sets of tallies that are remembered as proved."""

MAX_DECODED = 4096
"""Maximum structures whose tallies are remembered."""

MAX_TALLIES_NBYTES = 256 << 20
"""Maximum size of these tallies: enough for 4,096 structures with 5,000 tensors each."""

MAX_DETAIL_CHARS = 2000
"""Maximum length of the detail of a failed proof."""


class Prover:
    """Proves coverage, and remembers proofs. Safe to call from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._proved: dict[bytes, None] = {}
        self._decoded: dict[tuple[bytes, int, int], Tally] = {}
        self._nbytes = 0

    def check(self, request: SaveRequest) -> Tally:
        """Check a rank's structure before its files are written, and return its tally.

        Raises:
            CorruptCheckpointError, UnsupportedFormatError: The structure does not decode.
        """
        seed = seed_of(SaveId.parse(request.save_id))
        key = hashlib.blake2b(request.structure, digest_size=32).digest(), request.rank, seed
        with self._lock:
            known = self._decoded.get(key)
        if known is not None:
            return known
        with gc_paused():  # a garbage collection would take CPU time from the training
            decode_structure(request.structure)
            tally = tally_of(request.structure, request.rank, seed)
        with self._lock:
            self._keep(key, tally)
        if len(request.structure) >= LARGE_NBYTES:
            trim_heap(collect=True)
        return tally

    def _keep(self, key: tuple[bytes, int, int], tally: Tally) -> None:
        if key not in self._decoded:
            self._decoded[key] = tally
            self._nbytes += len(tally.sums)
        while len(self._decoded) > MAX_DECODED or (self._nbytes > MAX_TALLIES_NBYTES and len(self._decoded) > 1):
            self._nbytes -= len(self._decoded.pop(next(iter(self._decoded))).sums)

    def faults(
        self,
        requests: Sequence[SaveRequest],
        tallies: Sequence[Tally | None] | None = None,
        structures: Sequence[bytes] | None = None,
    ) -> list[tuple[str, str]]:
        """Return the names of tensors that are not covered exactly once, each with a description.

        Args:
            requests: Requests of all ranks of a save, by rank.
            tallies: Results of `check` for them, here or in the worker of the rank's node; None: not known.
            structures: Structures of all ranks, if requests of other nodes have none.

        Raises:
            CorruptCheckpointError, UnsupportedFormatError: A structure does not decode.
        """
        given = tallies or [None] * len(requests)
        known = structures if structures is not None else [request.structure for request in requests]
        found = [
            tally or self.check(replace(request, structure=known[request.rank]))
            for tally, request in zip(given, requests, strict=True)
        ]
        digest = hashlib.blake2b(digest_size=32)
        for tally in found:
            digest.update(tally.kinds + len(tally.sums).to_bytes(8, "little"))
            digest.update(tally.sums)
        key = digest.digest()
        with self._lock:
            if key in self._proved:
                return []
        seed = seed_of(SaveId.parse(requests[0].save_id))
        faults = uncovered(known, found, seed=seed)
        if not faults:
            with self._lock:
                self._proved[key] = None
                for old in list(self._proved)[:-MAX_PROOFS]:
                    del self._proved[old]
        return faults


def coverage_error(request: SaveRequest, faults: Sequence[tuple[str, str]]) -> SaveFailedError:
    """Return the error of a save whose structures do not cover every tensor exactly once."""
    detail = f"tensor {faults[0][0]!r}: {faults[0][1]}"
    if len(detail) > MAX_DETAIL_CHARS:
        detail = detail[: MAX_DETAIL_CHARS - 3] + "..."
    if len(faults) > 1:
        detail += f" (and {len(faults) - 1} more tensors)"
    return SaveFailedError(
        f"save {request.save_id} (step {request.step}) to {request.path}: the ranks together do not store every tensor "
        f"exactly once: {detail}; nothing was published; the ranks meet again in one of the "
        "next saves; all shards of a tensor must be saved, and have the same shape and dtype on all ranks",
        code="coverage",
        path=request.path,
        detail=detail,
        save_id=request.save_id,
        step=request.step,
    )
