"""Proofs of coverage, remembered: structures change rarely, and a proof takes the longer the more tensors there are."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence

from asyncckpt.errors import SaveFailedError
from asyncckpt.format.structure import decode_structure
from asyncckpt.protocol.request import SaveRequest
from asyncckpt.storage.proof import uncovered

MAX_PROOFS = 256
"""Sets of structures that are remembered as proved."""

MAX_DECODED = 4096
"""Structures that are remembered as sound."""


class Prover:
    """Safe to call from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._proved: dict[bytes, None] = {}
        self._decoded: dict[bytes, None] = {}

    def check(self, request: SaveRequest) -> None:
        """Check, before a rank's files are written, that its structure is one.

        Raises:
            CorruptCheckpointError, UnsupportedFormatError: It does not decode.
        """
        key = hashlib.blake2b(request.structure, digest_size=32).digest()
        with self._lock:
            if key in self._decoded:
                return
        decode_structure(request.structure)
        with self._lock:
            self._decoded[key] = None
            for old in list(self._decoded)[:-MAX_DECODED]:
                del self._decoded[old]

    def faults(self, requests: Sequence[SaveRequest]) -> list[tuple[str, str]]:
        """Return the stored names that the requests' structures do not cover, and how.

        Raises:
            CorruptCheckpointError, UnsupportedFormatError: A structure does not decode.
        """
        digest = hashlib.blake2b(digest_size=32)
        for request in requests:
            digest.update(len(request.structure).to_bytes(8, "little"))
            digest.update(request.structure)
        key = digest.digest()
        with self._lock:
            if key in self._proved:
                return []
        found = uncovered([request.structure for request in requests])
        if not found:
            with self._lock:
                self._proved[key] = None
                for old in list(self._proved)[:-MAX_PROOFS]:
                    del self._proved[old]
        return found


def hole(request: SaveRequest, faults: Sequence[tuple[str, str]]) -> SaveFailedError:
    """Return the error for structures that do not cover what they name."""
    detail = f"tensor {faults[0][0]!r}: {faults[0][1]}"
    if len(faults) > 1:
        detail += f" (and {len(faults) - 1} more tensors)"
    return SaveFailedError(
        f"save {request.save_id} (step {request.step}) to {request.path}: the ranks together do not store every tensor "
        f"exactly once: {detail}; nothing was published; from one of the next saves on each rank stores its own, if it "
        "is whole on each; all shards of a tensor must be saved, and be described alike on all ranks",
        code="coverage",
        path=request.path,
        detail=detail,
        save_id=request.save_id,
        step=request.step,
    )
