"""A snapshot in the worker's memory, mapped for reading while the worker keeps it unchanged."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from types import TracebackType

from asyncckpt.basics.failpoints import reach
from asyncckpt.errors import CorruptCheckpointError, ProtocolError, SnapshotUnavailableError
from asyncckpt.memory.arena import SlotMemory
from asyncckpt.memory.slot import PAGE_NBYTES, SlotError
from asyncckpt.protocol.request import SaveRequest, decode_request
from asyncckpt.recall.memory_overlay import SlotShard, StagedCheckpoint, StagedRank
from asyncckpt.recall.snapshots import HeldSnapshot, SnapshotPart


class MappedSnapshot:
    """The mapped parts of a snapshot. A context manager; all reads must have ended before it is closed.

    Args:
        snapshot: Snapshot that the worker keeps for this process.
        pid: Process ID of the worker, which must be alive.

    Attributes:
        staged: The checkpoint that the ranks have staged.

    Raises:
        SnapshotUnavailableError: A part cannot be mapped, or its slot holds something else.
    """

    def __init__(self, snapshot: HeldSnapshot, pid: int) -> None:
        self.snapshot = snapshot
        self._mapped: list[tuple[SnapshotPart, SlotMemory]] = []
        try:
            reach("recall: held")
            requests = [self._map(snapshot.parts[rank], pid) for rank in snapshot.ranks]
            self.staged = self._staged(requests)
            reach("recall: mapped")
        except (SlotError, ProtocolError, OSError) as error:
            self.close()
            raise self._unavailable(str(error)) from error
        except BaseException:
            self.close()
            raise

    def _map(self, part: SnapshotPart, pid: int) -> SaveRequest:
        memory = SlotMemory.attach(pid, part.fd, part.nbytes, part.token, writable=False)
        self._mapped.append((part, memory))
        generation, data = memory.control.read_request()
        request = decode_request(data, memory.nbytes - PAGE_NBYTES)
        if request.ring_segments:
            raise SlotError(f"the slot of rank {part.rank} holds only the end of its snapshot")
        wanted = self.snapshot
        found = (generation, request.save_id, request.path, request.rank, request.world_size)
        if found != (part.generation, str(wanted.save_id), wanted.path, part.rank, wanted.world_size):
            raise SlotError(
                f"the slot of rank {part.rank} holds another snapshot by now: generation, save ID, path, rank and "
                f"number of ranks are {found}"
            )
        return request

    def _staged(self, requests: list[SaveRequest]) -> StagedCheckpoint:
        first, ranks = requests[0], []
        if first.step is None:
            raise SlotError("the request of rank 0 has no step")
        for request, (_, memory) in zip(requests, self._mapped, strict=True):
            if request.layout != first.layout or request.step not in (first.step, None):
                raise SlotError(
                    f"rank {request.rank} has staged step {request.step} in layout {request.layout!r}, and rank "
                    f"{first.rank} step {first.step} in layout {first.layout!r}"
                )
            ranks.append(
                StagedRank(
                    rank=request.rank,
                    images=tuple(SlotShard(memory.fd, p.offset, p.nbytes) for p in request.parts),
                    structure=request.structure,
                    objects=request.objects,
                    n_tensors=request.n_tensors,
                )
            )
        return StagedCheckpoint(
            path=first.path,
            save_id=self.snapshot.save_id,
            step=first.step,
            world_size=first.world_size,
            layout=first.layout,
            package=first.package,
            metadata=json.loads(first.metadata),
            ranks=ranks,
        )

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Check that the slots were not reused while the `with` block read from them.

        Raises:
            SnapshotUnavailableError: A slot was reused; discard the data that were read.
        """
        self._check()
        try:
            yield
        except CorruptCheckpointError:
            self._check()  # a slot that was reused looks damaged
            raise
        reach("recall: read")
        # IMPORTANT: check after the last read. A block may have been overwritten after it was verified, and before it
        # was copied.
        self._check()

    def _check(self) -> None:
        """Check that no slot was reused since it was mapped.

        Raises:
            SnapshotUnavailableError: A live trainer has begun its next save in one.
        """
        for part, memory in self._mapped:
            if not memory.control.is_sealed(part.generation):
                raise self._unavailable(f"rank {part.rank} has used its slot for another save meanwhile")

    def _unavailable(self, detail: str) -> SnapshotUnavailableError:
        return SnapshotUnavailableError(
            f"{self.snapshot.path}: save {self.snapshot.save_id} cannot be loaded from the worker's memory: {detail}",
            path=self.snapshot.path,
            save_id=str(self.snapshot.save_id),
            detail=detail,
        )

    def close(self) -> None:
        """Unmap all slots. Idempotent."""
        for _, memory in self._mapped:
            memory.close()

    def __enter__(self) -> MappedSnapshot:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
