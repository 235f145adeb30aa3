"""Loads in which one rank reads what several ranks need and sends it to them. If one rank fails, all fail.

`Broadcast` runs the steps and the transfers, in bounded memory. `SharedReads` uses it for
`load(..., redundant_reads="broadcast")`: the ranks first exchange what they need, so they need not hold the same keys.
Then each rank reads what it alone needs and its share of the rest. When all have done so, they send the shared bytes.
`dcp.broadcast_reader` uses `Broadcast` too.
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
from asyncckpt.distributed.meetings import all_or_none, encode_failure
from asyncckpt.distributed.process_group import GroupMeeting, find_exchange
from asyncckpt.errors import AsyncCkptError, ConfigError, SaveFailedError, SharedLoadError
from asyncckpt.format.structure import row_major
from asyncckpt.loading.byte_ranges import Placement, box_of
from asyncckpt.loading.shared.broadcast_plan import (
    Box,
    Message,
    MessagePart,
    ReadRequest,
    Transfer,
    balance_reads,
    cut_into_messages,
    decode_request,
    encode_request,
    transfers_by_rank,
)
from asyncckpt.loading.tensor_writers import BoxWriter, takes_bytes
from asyncckpt.memory.mapping import copy_bytes
from asyncckpt.torch_tensors import flat_bytes, torch_dtype

JOIN_TIMEOUT_S = 60.0
"""How long ranks wait for the last rank to call `load`. The same as the default of `plan_timeout_s`."""

READ_TIMEOUT_S = 1800.0
"""How long ranks wait for the slowest rank's reads, and for all messages of a stream: the default of gloo groups."""

MESSAGE_NBYTES = 16 << 20
"""Maximum length of a message. Chosen, not measured."""

_TRAILER_NBYTES = 64
"""Room behind a message; its first byte is the status."""

_FILLED, _FAILED = 1, 0
"""Values of the status: whether the reader could fill the message."""

_CALL = "load(..., redundant_reads='broadcast')"


class Transport(Protocol):
    """Connects the ranks of a broadcast: `GroupMeeting`, `UserGroup`. Its methods raise SaveFailedError on failure."""

    def gather(self, payload: bytes, deadline: float) -> list[bytes]:
        """Return every rank's payload, by rank; `deadline` is a time of `time.monotonic()`."""

    def broadcast(
        self, message: torch.Tensor, ranks: Sequence[int], root: int, deadline: float
    ) -> Callable[[], None] | None:
        """Send bytes from `root` to the other `ranks`. All of `ranks` call it, in the same order.

        Args:
            message: Contiguous bytes, the same number on all ranks; on the root in CPU memory.
            ranks: Root and receivers, ascending.
            root: The rank that sends the message.
            deadline: A time of `time.monotonic()`.

        Returns:
            On the root, a function that waits until `message` may be changed again, if that is not yet so. Else None.
        """

    def abort(self, reason: str) -> None:
        """End the other ranks' waits for this rank, which has failed. Does nothing if only messages can do that."""


class Broadcast:
    """The steps of one load that ranks take together: each succeeds on all ranks or fails on all.

    At most two messages are in memory at a time.

    Args:
        transport: Connects the ranks.
        rank: This process's rank in `transport`.
        path: The checkpoint's path, for messages.
        device: Device on which messages are received; they are sent from the CPU.
    """

    def __init__(self, transport: Transport, rank: int, path: str, device: torch.device | None = None) -> None:
        self._transport, self._rank, self._path = transport, rank, path
        self._device = device or torch.device("cpu")
        self._buffers: dict[tuple[torch.device, int], torch.Tensor] = {}
        self._unfinished_sends: list[Callable[[], None] | None] = [None, None]  # one for each of two buffers
        self._turn = 0  # the buffer that is used next
        self._deadline = 0.0

    def gather(self, payload: bytes, timeout_s: float = READ_TIMEOUT_S) -> list[bytes]:
        """Return every rank's bytes, by rank.

        Raises:
            SharedLoadError: Another rank has failed, or the connection between ranks is lost.
            PlanTimeoutError: Some ranks have not called it in time.

        Blocks: for the slowest rank, at most `timeout_s`.
        """
        try:
            return self._transport.gather(payload, time.monotonic() + timeout_s)
        except SaveFailedError as error:
            raise self._lost(error) from error

    def agree(self, step: Callable[[], Any]) -> list[Any]:
        """Run a step on all ranks, and return only if it succeeded on all of them.

        Args:
            step: This rank's step. Its result must be packable as msgpack.

        Returns:
            The results, by rank.

        Raises:
            SharedLoadError: It failed on another rank, or the connection between ranks is lost.
            BaseException: Any error of `step`.

        Blocks: for the slowest rank.
        """

        def run() -> Any:
            try:
                return step()
            except BaseException as error:
                if not isinstance(error, Exception):  # `all_or_none` tells the other ranks of an Exception only
                    self._transport.abort(_description(error))
                    with contextlib.suppress(AsyncCkptError):
                        self.gather(encode_failure(error))
                raise

        def failed(rank: int, error: AsyncCkptError) -> SharedLoadError:
            return shared_load_error(self._path, rank, str(error))

        return all_or_none(self.gather, run, failed, SharedLoadError)

    def stream(
        self,
        transfers: Iterable[Transfer],
        itemsizes: Mapping[str, int],
        read: Callable[[MessagePart, torch.Tensor], None],
        receive: Callable[[MessagePart, torch.Tensor], None],
    ) -> None:
        """Process `transfers`: read and send, or receive.

        No rank waits for a rank that has failed: the transport tells the others. If the transport cannot, a reader
        sends each receiver one message with status `_FAILED`, and a receiver continues to receive and drops the bytes.

        Args:
            transfers: The transfers in which this rank takes part, in the order common to all ranks.
            itemsizes: Bytes of an element by stored name; boxes of other names are left out, on all ranks.
            read: Called with a part that this rank reads, and the byte tensor on the CPU to fill with it.
            receive: Called with each part and its bytes, also for parts that this rank reads. The bytes are overwritten
                after the call.

        Raises:
            SharedLoadError: Another rank has failed, or the connection between ranks is lost.
            BaseException: Any error of `read` and `receive`.

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
                self._transport.abort(_description(error))

        rest = cut_into_messages(transfers, itemsizes, MESSAGE_NBYTES)
        try:
            for message in rest:
                sends = message.transfer.reader == self._rank
                buffer = self._buffer(torch.device("cpu") if sends else self._device)
                contain(lambda: reach("load: passing on"))
                if not sends:
                    self._receive(message, buffer)
                    contain(_for_parts, receive, message, buffer)
                    continue
                contain(_for_parts, read, message, buffer)
                contain(_for_parts, receive, message, buffer)
                if failure is not None:
                    self._send_failure(itertools.chain([message], rest))
                    break
                self._send(message, buffer, message.transfer.receivers, _FILLED)
            for n in range(2):
                self._wait(n)
        except SharedLoadError:
            if failure is None:
                raise
        except BaseException as error:  # an interrupt while messages are in flight
            self._transport.abort(_description(error))
            raise
        try:
            if failure is not None:
                raise failure
        finally:
            failure = None  # its traceback references this frame, which references the messages

    def broadcast_bytes(self, data: bytearray, reader: int, receivers: tuple[int, ...]) -> None:
        """Fill `data` with the reader's bytes.

        Args:
            data: At least one byte; the same length on all ranks.
            reader, receivers: The ranks, as in `Transfer`.

        Raises:
            SharedLoadError, BaseException: The same as from `stream`.

        Blocks: for the other ranks.
        """
        whole = torch.frombuffer(data, dtype=torch.uint8)

        def read(part: MessagePart, buffer: torch.Tensor) -> None:
            buffer.copy_(whole[part.position : part.position + part.nbytes])

        def receive(part: MessagePart, found: torch.Tensor) -> None:
            if reader != self._rank:
                whole[part.position : part.position + part.nbytes].copy_(found)

        self.stream([Transfer(reader, receivers, (("", (0,), (len(data),)),))], {"": 1}, read, receive)

    def _buffer(self, device: torch.device) -> torch.Tensor:
        """Return memory for a message. Waits until the message that it held before has been sent."""
        if self._unfinished_sends[self._turn] is not None:
            self._turn = 1 - self._turn
            self._wait(self._turn)
        key = device, self._turn
        if key not in self._buffers:
            self._buffers[key] = torch.empty(MESSAGE_NBYTES + _TRAILER_NBYTES, dtype=torch.uint8, device=device)
        return self._buffers[key]

    def _wait(self, n: int) -> None:
        """Wait until the message in buffer `n` has been sent."""
        finish, self._unfinished_sends[n] = self._unfinished_sends[n], None
        if finish is not None:
            try:
                finish()
            except SaveFailedError as error:
                raise self._lost(error) from error

    def _send_failure(self, rest: Iterable[Message]) -> None:
        """Send each rank that still waits for messages of this rank one message that says that this rank has failed."""
        told: set[int] = set()
        for message in rest:
            waiting = tuple(rank for rank in message.transfer.receivers if rank not in told)
            if message.transfer.reader == self._rank:
                self._send(message, self._buffer(torch.device("cpu")), waiting, _FAILED)
                told.update(waiting)

    def _send(self, message: Message, buffer: torch.Tensor, receivers: tuple[int, ...], status: int) -> None:
        if receivers:
            buffer[message.nbytes] = status
            self._unfinished_sends[self._turn] = self._broadcast(message, buffer, receivers)

    def _receive(self, message: Message, buffer: torch.Tensor) -> None:
        self._broadcast(message, buffer, message.transfer.receivers)
        if buffer[message.nbytes].item() != _FILLED:
            reader = message.transfer.reader
            raise shared_load_error(self._path, reader, "it could not read the bytes that it was to send")

    def _broadcast(
        self, message: Message, buffer: torch.Tensor, receivers: tuple[int, ...]
    ) -> Callable[[], None] | None:
        root, with_status = message.transfer.reader, buffer[: message.nbytes + 1]
        ranks = sorted((root, *receivers))
        try:
            return self._transport.broadcast(with_status, ranks, root, self._deadline)
        except SaveFailedError as error:
            raise self._lost(error) from error

    def _lost(self, error: SaveFailedError) -> SharedLoadError:
        return shared_load_error(self._path, error.rank, str(error.detail or error.message))


def _for_parts(step: Callable[[MessagePart, torch.Tensor], None], message: Message, buffer: torch.Tensor) -> None:
    for part in message.parts:
        step(part, buffer[part.start : part.start + part.nbytes])


def _description(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def shared_load_error(path: str, rank: int | None, detail: str) -> SharedLoadError:
    """Return the error for a load that ends because another rank failed; `rank` None: it is not known which."""
    why = "the connection between the ranks is lost" if rank is None else f"rank {rank} of the group failed"
    return SharedLoadError(
        f"{path or 'load'}: this load is shared by several ranks and has failed on all of them: {why}: {detail}",
        path=path,
        rank=rank,
        detail=detail,
    )


class SharedReads:
    """One load that the ranks of the default process group share.

    A context manager: if this rank leaves it without a call of `read`, it tells the others, which then fail.

    Args:
        reader: This process's rank.

    Raises:
        ConfigError: There is no process group of just these ranks.
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
        self._has_joined = False
        self._meeting: GroupMeeting = exchange.meet_next("load", _CALL)

    def read(
        self, path: str, save_id: str, placements: Sequence[Placement], read: Callable[[Sequence[Placement]], None]
    ) -> None:
        """Fill all placements; some of them are read by other ranks.

        Args:
            path, save_id: Path and save ID of the checkpoint.
            placements: The placements that this rank needs.
            read: Reads placements from the files.

        Raises:
            SharedLoadError: Another rank failed, or loads another checkpoint; or the connection between ranks is lost.
            PlanTimeoutError: Some ranks have not called `load` within `JOIN_TIMEOUT_S`.
            Exception: Any error of `read`.

        Blocks: for the slowest rank.
        """
        wanted: dict[Box, list[Placement]] = {}
        for placement in placements:
            saved, offsets, sizes = box_of(placement)
            wanted.setdefault((saved.fqn, offsets, sizes), []).append(placement)
        boxes = {box: (found[0].saved.dtype, _sendable(found) is not None) for box, found in wanted.items()}
        broadcast = Broadcast(self._meeting, self._rank, path)
        self._has_joined = True
        gathered = broadcast.gather(encode_request(ReadRequest(save_id, boxes)), JOIN_TIMEOUT_S)
        requests = [decode_request(data) for data in gathered]
        for rank, other in enumerate(requests):
            if other.save_id != save_id:
                raise shared_load_error(path, rank, f"it loads save {other.save_id}, rank {self._rank} loads {save_id}")
        transfers = balance_reads(requests)
        mine = transfers_by_rank(transfers, len(requests))[self._rank]
        received = {box for transfer in mine if transfer.reader != self._rank for box in transfer.boxes}
        broadcast.agree(lambda: read([p for box, found in wanted.items() if box not in received for p in found]))
        if transfers:
            broadcast.agree(lambda: self._transfer(broadcast, mine, wanted))

    def _transfer(
        self, broadcast: Broadcast, transfers: Sequence[Transfer], wanted: Mapping[Box, Sequence[Placement]]
    ) -> None:
        writers = {
            box: [_writer(placement) for placement in wanted[box]] if transfer.reader != self._rank else []
            for transfer in transfers
            for box in transfer.boxes
        }

        def receive(part: MessagePart, data: torch.Tensor) -> None:
            for write in writers[part.box]:
                write(part.position, data.data_ptr(), part.nbytes)

        def read(part: MessagePart, buffer: torch.Tensor) -> None:
            _copy_part(wanted[part.box], part, buffer)

        itemsizes = {box[0]: torch_dtype(wanted[box][0].saved.dtype).itemsize for box in writers}
        broadcast.stream(transfers, itemsizes, read, receive)

    def __enter__(self) -> SharedReads:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not self._has_joined:
            self._meeting.refuse(_description(error) if error else "it has nothing to load")
        self._meeting.close()


def _sendable(placements: Sequence[Placement]) -> Placement | None:
    """Return a placement whose target, once filled, holds the saved bytes unchanged; None: there is none."""
    for placement in placements:
        target = placement.target
        plain = target.is_contiguous() and not target.is_conj() and not target.is_neg()
        if plain and target.dtype == torch_dtype(placement.saved.dtype):
            return placement
    return None


def _copy_part(placements: Sequence[Placement], part: MessagePart, buffer: torch.Tensor) -> None:
    """Copy a part of a box, which this rank has read into its target, into a message."""
    placement = _sendable(placements)
    assert placement is not None
    target = placement.target.detach()
    if target.device.type == "cpu":
        copy_bytes(buffer.data_ptr(), target.data_ptr() + part.position, part.nbytes)
        return
    buffer.copy_(flat_bytes(target)[part.position : part.position + part.nbytes])


def _writer(placement: Placement) -> Callable[[int, int, int], None]:
    """Return a function (position in the box, address, nbytes) that writes received bytes into the target."""
    target, dtype = placement.target, torch_dtype(placement.saved.dtype)
    if takes_bytes(target, dtype):
        start = target.data_ptr()
        return lambda position, address, nbytes: copy_bytes(start + position, address, nbytes)
    sizes = tuple(target.shape)
    nbytes = target.numel() * dtype.itemsize
    return BoxWriter(target, (0,) * len(sizes), sizes, dtype, nbytes, row_major(sizes)).deliver
