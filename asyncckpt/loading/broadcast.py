"""One rank reads, the others get: loads that ranks share, in bounded memory, and which end on all when one fails.

`Broadcast` is the engine. `SharedReads` is `load(..., redundant_reads="broadcast")` over it: the ranks tell each other
what they want, so that it does not matter whether they hold the same keys. Each reads what it alone wants and its part
of the rest; when all have, they pass it on. The other user is `dcp.broadcast_reader`.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from asyncckpt.basics.failpoints import reach
from asyncckpt.config import RankInfo
from asyncckpt.distributed.process_group import GroupMeeting, find_exchange
from asyncckpt.distributed.rendezvous import all_or_none, failed_part
from asyncckpt.errors import AsyncCkptError, ConfigError, SaveFailedError, SharedLoadError
from asyncckpt.format.structure import row_major
from asyncckpt.loading.broadcast_plan import (
    Box,
    Message,
    Part,
    Transfer,
    Wish,
    balance_reads,
    by_rank,
    decode_wish,
    encode_wish,
    messages,
)
from asyncckpt.loading.byte_ranges import Placement, box_of
from asyncckpt.loading.tensor_writers import BoxWriter, takes_bytes
from asyncckpt.memory.mapping import copy_bytes
from asyncckpt.torch_tensors import flat_bytes, torch_dtype

ARRIVE_TIMEOUT_S = 60.0
"""For the last rank to call `load`; as `plan_timeout_s` has it."""

READ_TIMEOUT_S = 1800.0
"""For the slowest rank's reads, and for all messages of a stream; as torch.distributed has it for gloo."""

MESSAGE_NBYTES = 16 << 20
"""No message is longer. Chosen, not measured."""

_SLACK_NBYTES = 64
_GOOD, _BAD = 1, 0
"""The last byte of a message: whether the reader could fill it."""

_CALL = "load(..., redundant_reads='broadcast')"


class Carrier(Protocol):
    """What connects the ranks of a broadcast: `GroupMeeting`, `UserGroup`. All raise SaveFailedError if they fail."""

    def gather(self, payload: bytes, deadline: float) -> list[bytes]:
        """Return every rank's payload, by rank; `deadline` as of `time.monotonic()`."""

    def broadcast(
        self, message: torch.Tensor, ranks: Sequence[int], root: int, deadline: float
    ) -> Callable[[], None] | None:
        """Send bytes from `root` to the other `ranks`. These call it, in one order on all of them.

        Args:
            message: Contiguous bytes, as many on all ranks; on the root on the CPU.
            ranks: Ascending.
            root: The rank that has the message.
            deadline: Of `time.monotonic()`.

        Returns:
            None; or, on the root, what waits until `message` may be changed again.
        """

    def abort(self, reason: str) -> None:
        """End the waits of the others for this rank, which has failed; nothing where only messages can do that."""


class Broadcast:
    """What ranks do together in one load: steps that count for all or for none, and streams of boxes.

    At most two messages are in memory at a time.

    Args:
        carrier: What connects the ranks.
        rank: This one among them.
        path: Of the checkpoint, for messages.
        device: Where messages arrive; they are sent from the CPU.
    """

    def __init__(self, carrier: Carrier, rank: int, path: str, device: torch.device | None = None) -> None:
        self._carrier, self._rank, self._path = carrier, rank, path
        self._device = device or torch.device("cpu")
        self._rooms: dict[tuple[torch.device, int], torch.Tensor] = {}
        self._sent: list[Callable[[], None] | None] = [None, None]
        self._turn = 0  # which of the two is used next
        self._deadline = 0.0

    def gather(self, payload: bytes, timeout_s: float = READ_TIMEOUT_S) -> list[bytes]:
        """Return every rank's bytes, by rank.

        Raises:
            SharedLoadError: Another rank has failed, or the ranks lost each other.
            PlanTimeoutError: Some ranks have not come.

        Blocks: for the slowest rank, at most `timeout_s`.
        """
        try:
            return self._carrier.gather(payload, time.monotonic() + timeout_s)
        except SaveFailedError as error:
            raise self._lost(error) from error

    def agree(self, step: Callable[[], Any]) -> list[Any]:
        """Take a step, and go on if all ranks have.

        Args:
            step: This rank's; what it returns must pack as msgpack.

        Returns:
            What it returned, by rank.

        Raises:
            SharedLoadError: It failed on another rank, or the ranks lost each other.
            BaseException: Whatever `step` raises.

        Blocks: for the slowest rank.
        """

        def contained() -> Any:
            try:
                return step()
            except BaseException as error:
                if not isinstance(error, Exception):  # KeyboardInterrupt: `all_or_none` would tell nobody
                    self._carrier.abort(_said(error))
                    with contextlib.suppress(AsyncCkptError):
                        self.gather(failed_part(error))
                raise

        def failed(rank: int, error: AsyncCkptError) -> SharedLoadError:
            return shared_load_error(self._path, rank, str(error))

        return all_or_none(self.gather, contained, failed, SharedLoadError)

    def stream(
        self,
        transfers: Iterable[Transfer],
        itemsizes: Mapping[str, int],
        read: Callable[[Part, torch.Tensor], None],
        take: Callable[[Part, torch.Tensor], None],
    ) -> None:
        """Read and send, or take, everything in `transfers`.

        A rank that fails leaves nobody waiting for it: the carrier tells the others; where it cannot, a reader sends
        each of them one message that says so, and a taker goes on to take what is sent to it, and drops it.

        Args:
            transfers: Those in which this rank takes part, in the common order.
            itemsizes: Bytes of an element, by name; boxes of other names are left out, on all ranks.
            read: Fills a tensor of bytes on the CPU with a part that this rank reads.
            take: Gets each part in a tensor of bytes, which are gone afterwards; also those that this rank reads.

        Raises:
            SharedLoadError: Another rank has failed, or the ranks lost each other.
            BaseException: Whatever `read` and `take` raise.

        Blocks: for the reads and for the other ranks.
        """
        self._deadline = time.monotonic() + READ_TIMEOUT_S
        failure: BaseException | None = None

        def contain(step: Callable[..., None], *arguments: Any) -> None:
            nonlocal failure
            if failure is not None:
                return
            try:
                step(*arguments)
            except BaseException as error:
                failure = error
                self._carrier.abort(_said(error))

        rest = messages(transfers, itemsizes, MESSAGE_NBYTES)
        try:
            for message in rest:
                sends = message.transfer.reader == self._rank
                room = self._room(torch.device("cpu") if sends else self._device)
                contain(lambda: reach("load: passing on"))
                if not sends:
                    self._receive(message, room)
                    contain(_for_parts, take, message, room)
                    continue
                contain(_for_parts, read, message, room)
                contain(_for_parts, take, message, room)
                if failure is not None:
                    self._tell(itertools.chain([message], rest))
                    break
                self._send(message, room, message.transfer.takers, _GOOD)
            for n in range(2):
                self._wait(n)
        except SharedLoadError:
            if failure is None:
                raise
        except BaseException as error:  # an interrupt while messages are under way
            self._carrier.abort(_said(error))
            raise
        try:
            if failure is not None:
                raise failure
        finally:
            failure = None  # its traceback holds this frame, and with it what is in the messages

    def pass_bytes(self, data: bytearray, reader: int, takers: tuple[int, ...]) -> None:
        """Fill `data` with the reader's.

        Args:
            data: At least one byte; as long on all ranks.
            reader, takers: The ranks, as of `Transfer`.

        Raises:
            SharedLoadError, BaseException: As `stream`.

        Blocks: for the other ranks.
        """
        whole = torch.frombuffer(data, dtype=torch.uint8)

        def read(part: Part, room: torch.Tensor) -> None:
            room.copy_(whole[part.position : part.position + part.nbytes])

        def take(part: Part, found: torch.Tensor) -> None:
            if reader != self._rank:
                whole[part.position : part.position + part.nbytes].copy_(found)

        self.stream([Transfer(reader, takers, (("", (0,), (len(data),)),))], {"": 1}, read, take)

    def _room(self, device: torch.device) -> torch.Tensor:
        """Return memory for a message that nothing is sent from any more."""
        if self._sent[self._turn] is not None:
            self._turn = 1 - self._turn
            self._wait(self._turn)
        place = device, self._turn
        if place not in self._rooms:
            self._rooms[place] = torch.empty(MESSAGE_NBYTES + _SLACK_NBYTES, dtype=torch.uint8, device=device)
        return self._rooms[place]

    def _wait(self, n: int) -> None:
        sent, self._sent[n] = self._sent[n], None
        if sent is not None:
            try:
                sent()
            except SaveFailedError as error:
                raise self._lost(error) from error

    def _tell(self, rest: Iterable[Message]) -> None:
        """Tell everybody who still waits for this rank's messages that it has failed: each rank once."""
        told: set[int] = set()
        for message in rest:
            waiting = tuple(rank for rank in message.transfer.takers if rank not in told)
            if message.transfer.reader == self._rank:
                self._send(message, self._room(torch.device("cpu")), waiting, _BAD)
                told.update(waiting)

    def _send(self, message: Message, room: torch.Tensor, takers: tuple[int, ...], status: int) -> None:
        if takers:
            room[message.nbytes] = status
            self._sent[self._turn] = self._broadcast(message, room, takers)

    def _receive(self, message: Message, room: torch.Tensor) -> None:
        self._broadcast(message, room, message.transfer.takers)
        if room[message.nbytes].item() != _GOOD:
            reader = message.transfer.reader
            raise shared_load_error(self._path, reader, "it could not read what it passes on")

    def _broadcast(self, message: Message, room: torch.Tensor, takers: tuple[int, ...]) -> Callable[[], None] | None:
        root, with_status = message.transfer.reader, room[: message.nbytes + 1]
        ranks = sorted((root, *takers))
        try:
            return self._carrier.broadcast(with_status, ranks, root, self._deadline)
        except SaveFailedError as error:
            raise self._lost(error) from error

    def _lost(self, error: SaveFailedError) -> SharedLoadError:
        return shared_load_error(self._path, error.rank, str(error.detail or error.message))


def _for_parts(step: Callable[[Part, torch.Tensor], None], message: Message, room: torch.Tensor) -> None:
    for part in message.parts:
        step(part, room[part.start : part.start + part.nbytes])


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def shared_load_error(path: str, rank: int | None, detail: str) -> SharedLoadError:
    """Return the error for a load that ends because of another rank; None: nobody knows which."""
    who = "the ranks lost each other" if rank is None else f"rank {rank} of the group failed"
    return SharedLoadError(
        f"{path or 'load'}: a load that ranks share ends on all of them, as {who}: {detail}",
        path=path,
        rank=rank,
        detail=detail,
    )


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
        try:
            self._meeting: GroupMeeting = exchange.meet_next("load", _CALL)
        except SaveFailedError as error:
            raise shared_load_error("", None, error.message) from error

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
        wanted: dict[Box, list[Placement]] = {}
        for placement in placements:
            saved, offsets, sizes = box_of(placement)
            wanted.setdefault((saved.fqn, offsets, sizes), []).append(placement)
        wish = Wish(save_id, {box: (found[0].saved.dtype, _giver(found) is not None) for box, found in wanted.items()})
        broadcast = Broadcast(self._meeting, self._rank, path)
        self._arrived = True
        wishes = [decode_wish(data) for data in broadcast.gather(encode_wish(wish), ARRIVE_TIMEOUT_S)]
        for rank, other in enumerate(wishes):
            if other.save_id != save_id:
                raise shared_load_error(path, rank, f"it loads save {other.save_id}, rank {self._rank} loads {save_id}")
        transfers = balance_reads(wishes)
        mine = by_rank(transfers, len(wishes))[self._rank]
        given = {box for transfer in mine if transfer.reader != self._rank for box in transfer.boxes}
        broadcast.agree(lambda: read([p for box, found in wanted.items() if box not in given for p in found]))
        if transfers:
            broadcast.agree(lambda: self._pass_on(broadcast, mine, wanted))

    def _pass_on(
        self, broadcast: Broadcast, transfers: Sequence[Transfer], wanted: Mapping[Box, Sequence[Placement]]
    ) -> None:
        takers = {
            box: [_taker(placement) for placement in wanted[box]] if transfer.reader != self._rank else []
            for transfer in transfers
            for box in transfer.boxes
        }

        def take(part: Part, data: torch.Tensor) -> None:
            for put in takers[part.box]:
                put(part.position, data.data_ptr(), part.nbytes)

        itemsizes = {box[0]: torch_dtype(wanted[box][0].saved.dtype).itemsize for box in takers}
        broadcast.stream(transfers, itemsizes, lambda part, room: _give(wanted[part.box], part, room), take)

    def __enter__(self) -> SharedReads:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not self._arrived:
            self._meeting.refuse(_said(error) if error else "it has nothing to load")
        self._meeting.close()


def _giver(placements: Sequence[Placement]) -> Placement | None:
    """Return a placement whose target holds the very bytes that were saved."""
    for placement in placements:
        target = placement.target
        plain = target.is_contiguous() and not target.is_conj() and not target.is_neg()
        if plain and target.dtype == torch_dtype(placement.saved.dtype):
            return placement
    return None


def _give(placements: Sequence[Placement], part: Part, room: torch.Tensor) -> None:
    placement = _giver(placements)
    assert placement is not None
    target = placement.target.detach()
    if target.device.type == "cpu":
        copy_bytes(room.data_ptr(), target.data_ptr() + part.position, part.nbytes)
        return
    room.copy_(flat_bytes(target)[part.position : part.position + part.nbytes])


def _taker(placement: Placement) -> Callable[[int, int, int], None]:
    """Return what puts bytes that come at a position of a box to their place: (position, address, nbytes)."""
    target, dtype = placement.target, torch_dtype(placement.saved.dtype)
    if takes_bytes(target, dtype):
        start = target.data_ptr()
        return lambda position, address, nbytes: copy_bytes(start + position, address, nbytes)
    sizes = tuple(target.shape)
    nbytes = target.numel() * dtype.itemsize
    return BoxWriter(target, (0,) * len(sizes), sizes, dtype, nbytes, row_major(sizes)).deliver
