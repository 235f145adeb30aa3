"""Reading once what several ranks want, and passing it on: `redundant_reads="broadcast"`.

The ranks tell each other what they want, so that it does not matter whether they hold the same keys. Then each reads
what it alone wants and its part of the rest; when all have, they broadcast among those who want the same. Each step
ends with every rank knowing how the others fared, so that one that fails ends the load on all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from asyncckpt.basics.failpoints import reach
from asyncckpt.config import RankInfo
from asyncckpt.distributed.process_group import GroupMeeting, find_exchange
from asyncckpt.distributed.rendezvous import all_or_none
from asyncckpt.errors import AsyncCkptError, ConfigError, SaveFailedError, SharedLoadError
from asyncckpt.format.structure import row_major
from asyncckpt.loading.byte_ranges import Placement, box_of
from asyncckpt.loading.sharing import Box, Segment, SharePlan, Wish, decode_wish, encode_wish, messages, plan_sharing
from asyncckpt.loading.tensor_writers import BoxWriter, takes_bytes
from asyncckpt.memory.mapping import copy_bytes
from asyncckpt.torch_tensors import flat_bytes, torch_dtype

ARRIVE_TIMEOUT_S = 60.0
"""For the last rank to call `load`; as `plan_timeout_s` has it."""

READ_TIMEOUT_S = 1800.0
"""For the slowest rank's reads, and for all broadcasts; as torch.distributed has it for gloo."""

MESSAGE_NBYTES = 16 << 20
_ALIGN_NBYTES = 64
_CALL = "load(..., redundant_reads='broadcast')"


class SharedReads:
    """One load that the ranks of the default process group share. A context manager: leaving it tells the others.

    Args:
        reader: This rank.

    Raises:
        ConfigError: There is no process group of just these ranks.
        SharedLoadError: The process group's store is gone.
    """

    def __init__(self, reader: RankInfo) -> None:
        exchange = find_exchange(reader)
        if exchange is None:
            raise ConfigError(
                "redundant_reads='broadcast' needs torch.distributed: initialise the default process group first",
                field="redundant_reads",
                value="broadcast",
            )
        self._rank = reader.rank
        self._arrived = False
        self._path = ""
        try:
            self._meeting: GroupMeeting = exchange.meet_next("load", _CALL)
        except SaveFailedError as error:
            raise self._failed(None, error.message) from error

    def read(
        self, path: str, save_id: str, placements: Sequence[Placement], read: Callable[[Sequence[Placement]], None]
    ) -> None:
        """Fill all placements, having some of them read by other ranks.

        Args:
            path, save_id: Of the checkpoint.
            placements: What this rank wants.
            read: Reads placements from the files.

        Raises:
            SharedLoadError: Another rank failed, or loads another checkpoint; or the ranks lost each other.
            PlanTimeoutError: Some ranks do not load.
            Exception: Whatever `read` raises.

        Blocks: for the slowest rank.
        """
        self._path = path
        wanted: dict[Box, list[Placement]] = {}
        for placement in placements:
            saved, offsets, sizes = box_of(placement)
            wanted.setdefault((saved.fqn, offsets, sizes), []).append(placement)
        wish = Wish(save_id, {box: (found[0].saved.dtype, _giver(found) is not None) for box, found in wanted.items()})
        self._arrived = True
        wishes = [decode_wish(data) for data in self._gather(encode_wish(wish), ARRIVE_TIMEOUT_S)]
        for rank, other in enumerate(wishes):
            if other.save_id != save_id:
                raise self._failed(rank, f"it loads save {other.save_id}, rank {self._rank} loads {save_id}")
        plan = plan_sharing(wishes)
        mine = [p for box, found in wanted.items() if plan.readers.get(box, self._rank) == self._rank for p in found]
        self._together(lambda: read(mine))
        if plan.groups:
            self._together(lambda: self._pass_on(plan, wanted))

    def _together(self, step: Callable[[], None]) -> None:
        """Take a step, and go on if all ranks have."""

        def failed(rank: int, error: AsyncCkptError) -> SharedLoadError:
            return self._failed(rank, str(error))

        all_or_none(self._gather, step, failed, SharedLoadError)

    def _pass_on(self, plan: SharePlan, wanted: dict[Box, list[Placement]]) -> None:
        buffer = torch.empty(MESSAGE_NBYTES, dtype=torch.uint8, device="cpu")
        deadline = time.monotonic() + READ_TIMEOUT_S
        try:
            for ranks, by_reader in plan.groups.items():
                if self._rank in ranks:
                    reach("load: passing on")
                    for reader, boxes in by_reader.items():
                        self._stream(ranks, reader, [wanted[box] for box in boxes], buffer, deadline)
        except SaveFailedError as error:
            raise self._failed(error.rank, str(error.detail or error.message)) from error
        except BaseException as error:
            self._meeting.abort(f"{type(error).__name__}: {error}")  # else those that wait for this rank would go on
            raise

    def _stream(
        self,
        ranks: Sequence[int],
        reader: int,
        items: Sequence[list[Placement]],
        buffer: torch.Tensor,
        deadline: float,
    ) -> None:
        lengths = [found[0].target.numel() * torch_dtype(found[0].saved.dtype).itemsize for found in items]
        takers = [[] if reader == self._rank else [_taker(p) for p in found] for found in items]
        for message in messages(lengths, MESSAGE_NBYTES, _ALIGN_NBYTES):
            part = buffer[: message[-1].at + message[-1].nbytes]
            if reader == self._rank:
                for segment in message:
                    _give(items[segment.number], segment, buffer)
            self._meeting.broadcast(part, ranks, reader, deadline)
            for segment in message:
                for take in takers[segment.number]:
                    take(segment.position, buffer.data_ptr() + segment.at, segment.nbytes)

    def _gather(self, payload: bytes, timeout_s: float = READ_TIMEOUT_S) -> list[bytes]:
        try:
            return self._meeting.gather(payload, time.monotonic() + timeout_s)
        except SaveFailedError as error:
            raise self._failed(error.rank, str(error.detail or error.message)) from error

    def _failed(self, rank: int | None, detail: str) -> SharedLoadError:
        who = "the ranks lost each other" if rank is None else f"rank {rank} failed"
        return SharedLoadError(
            f"{self._path or 'load'}: a load that shares its reads ends on all ranks, as {who}: {detail}",
            path=self._path,
            rank=rank,
            detail=detail,
        )

    def __enter__(self) -> SharedReads:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not self._arrived:
            self._meeting.refuse(f"{type(error).__name__}: {error}" if error else "it has nothing to load")
        self._meeting.close()


def _giver(placements: Sequence[Placement]) -> Placement | None:
    """Return a placement whose target holds the very bytes that were saved."""
    for placement in placements:
        target = placement.target
        plain = target.is_contiguous() and not target.is_conj() and not target.is_neg()
        if plain and target.dtype == torch_dtype(placement.saved.dtype):
            return placement
    return None


def _give(placements: Sequence[Placement], segment: Segment, buffer: torch.Tensor) -> None:
    placement = _giver(placements)
    assert placement is not None
    target = placement.target.detach()
    if target.device.type == "cpu":
        copy_bytes(buffer.data_ptr() + segment.at, target.data_ptr() + segment.position, segment.nbytes)
        return
    flat = flat_bytes(target)
    buffer[segment.at : segment.at + segment.nbytes].copy_(flat[segment.position : segment.position + segment.nbytes])


def _taker(placement: Placement) -> Callable[[int, int, int], None]:
    """Return what puts bytes that come at a position of a box to their place: (position, address, nbytes)."""
    target, dtype = placement.target, torch_dtype(placement.saved.dtype)
    if takes_bytes(target, dtype):
        start = target.data_ptr()
        return lambda position, address, nbytes: copy_bytes(start + position, address, nbytes)
    sizes = tuple(target.shape)
    nbytes = target.numel() * dtype.itemsize
    return BoxWriter(target, (0,) * len(sizes), sizes, dtype, nbytes, row_major(sizes)).deliver
