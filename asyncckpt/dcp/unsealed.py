"""The coordinator's part of a save by workers: staged, and sealed once all ranks have said what they have."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from asyncckpt.client.pending_saves import StagedSnapshot, WriteFuture
from asyncckpt.client.worker_client import WorkerClient
from asyncckpt.dcp.committing import Saved, ending_of
from asyncckpt.dcp.seal_room import SealRoom
from asyncckpt.errors import InsufficientMemoryError, SaveFailedError, SlotBusyError
from asyncckpt.format.names import SaveId
from asyncckpt.memory.mapping import copy_bytes
from asyncckpt.memory.slot import PAGE_NBYTES, slot_nbytes
from asyncckpt.protocol.request import SaveRequest, check_metadata, encode_request
from asyncckpt.staging.lent_slot import LentSlot
from asyncckpt.staging.segmented_copy import REQUEST_SLACK_NBYTES
from asyncckpt.staging.streaming import SlotStream


@dataclass(kw_only=True, slots=True)
class Unsealed:
    """The coordinator's part, staged: its slot is sealed by `seal`, or given up by `WorkerClient.withdraw`.

    Attributes:
        slot: Open, or streamed if `begun`.
        seal_room: Learns how long the request was.
        offset: Where the request of the seal belongs in it.
        stream: Of the slot, where it is streamed.
    """

    process: WorkerClient
    saved: Saved
    seal_room: SealRoom
    request: SaveRequest
    slot: LentSlot
    offset: int
    body_nbytes: int
    begun: bool
    stream: SlotStream | None
    began_at: float

    def seal(self, metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> WriteFuture:
        """Say what only the coordinator knows, and hand the save over.

        Args:
            metadata, results: As `StorageWriter.finish` gets them.

        Returns:
            A future of the commit.

        Raises:
            SaveFailedError: As `ending_of`; or code `request`: it is too long for its place beside what is streamed.
            UnsupportedLeafError: As there.
            InsufficientMemoryError: It is too long for its place, and there is no room for a larger slot.
            AsyncCkptError: There is no worker any more.
        """
        ending = ending_of(self.saved, metadata, results)
        try:
            check_metadata(ending.metadata)
        except ValueError as error:
            raise self._failed("metadata", f"what the planner keeps with it cannot be stored: {error}") from error
        asked = replace(
            self.request,
            structure=ending.structure,
            objects=ending.objects,
            step=ending.step,
            metadata=ending.metadata,
        )
        request = encode_request(asked)
        self.seal_room.last_nbytes = len(request) + REQUEST_SLACK_NBYTES
        if self.offset + len(request) > self.slot.memory.nbytes - PAGE_NBYTES:
            if self.begun:
                raise self._failed(
                    "request",
                    f"names and objects of all ranks take {len(request)} bytes, for which no room was left beside the "
                    "state, which is being written already; the next save with this StorageWriter leaves it, as far as "
                    "arena_limit_bytes allows; use_worker=False needs none",
                )
            self._move(len(request))
        if not self.begun:
            begin(self.process, self.slot, self.request, len(request))
        if self.stream is None:
            self.slot.memory.control.seal(request, self.offset)
        else:
            self.stream.finish(request, self.offset)
        return hand_over(self.process, self.slot, asked, self.began_at)

    def _move(self, request_nbytes: int) -> None:
        """Take a slot that is large enough, and give this one up. Nobody has heard of it yet."""
        before, saved, save_id = self.slot, self.saved, self.saved.save_id
        nbytes = slot_nbytes(self.body_nbytes, request_nbytes)
        try:
            slot = self.process.pool.acquire(nbytes, None, save_id, step=None, path=saved.path, may_wait=False)
        except (InsufficientMemoryError, SlotBusyError) as error:
            # IMPORTANT: to wait would be to wait for the very slot that this save has.
            raise InsufficientMemoryError(
                f"save {save_id} to {saved.path}: names and objects of all ranks take {request_nbytes} bytes, more "
                f"than was left for them, and a slot of {nbytes} bytes has no room beside the one of "
                f"{before.memory.nbytes} (arena_limit_bytes={self.process.config.arena_limit_bytes}); nothing was "
                "published; the next save with this StorageWriter leaves it from its beginning, as far as "
                "arena_limit_bytes allows; use_worker=False needs no memory for it",
                nbytes=nbytes,
                limit=self.process.config.arena_limit_bytes,
            ) from error
        slot.generation += 1
        slot.is_ring = False
        slot.memory.control.open(slot.generation)
        copy_bytes(
            slot.memory.mapping.address + PAGE_NBYTES, before.memory.mapping.address + PAGE_NBYTES, self.body_nbytes
        )
        self.slot = slot
        self.process.pool.free(save_id, before)

    def _failed(self, code: str, detail: str) -> SaveFailedError:
        saved = self.saved
        return SaveFailedError(
            f"save {saved.save_id} to {saved.path}: {detail}; nothing was published",
            code=code,
            path=saved.path,
            detail=detail,
            save_id=str(saved.save_id),
        )


def begin(process: WorkerClient, slot: LentSlot, request: SaveRequest, request_nbytes: int) -> None:
    """Announce a save whose request will be about so long; its step is not known yet."""
    process.begin(
        SaveId.parse(request.save_id),
        slot,
        step=None,
        path=request.path,
        nbytes=sum(part.nbytes for part in request.parts) + request_nbytes,
        umask=request.umask,
    )


def hand_over(process: WorkerClient, slot: LentSlot, request: SaveRequest, began_at: float) -> WriteFuture:
    """Ring the doorbell for a slot that is sealed. Does not wait.

    Args:
        process: The worker.
        slot: See above.
        request: Of the seal.
        began_at: `time.perf_counter()` when its staging began.
    """
    snapshot = StagedSnapshot(
        save_id=SaveId.parse(request.save_id),
        step=request.step or 0,
        path=request.path,
        slot=slot,
        nbytes=sum(part.nbytes for part in request.parts),
        seconds={"stage": time.perf_counter() - began_at},
        began=began_at,
        extra={},
    )
    return process.write(snapshot, request.path)
