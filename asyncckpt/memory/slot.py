"""The bytes of a slot: two control pages around the file images and the request.

    offset 0                head page    magic, layout version, token, generation, state, position of the request
    4096                    body         part 0, padded to 4096 | part 1 ... | request
    nbytes - 4096           tail page    magic, token, generation

Table of states (one aligned 64-bit word, `STATE_OFFSET`):

    EMPTY       the slot holds no snapshot
    OPEN        the trainer is writing to it; no other process may read it
    SEALED      the snapshot of `generation` is complete; the trainer does not write to it until the save has ended
    STREAMED    the request is complete; the worker may write the body as far as it is filled (memory/streaming.py)

The trainer's order of writes (SPEC.md section 3): state OPEN, tail generation, head generation, body, request, request
fields, state SEALED. A reader checks state SEALED and head generation == tail generation, uses the snapshot, and then
checks both again.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
import time
from collections.abc import Callable
from typing import NamedTuple

import xxhash

from asyncckpt.basics.failpoints import reach

PAGE_NBYTES = 4096
SLOT_VERSION = 6
HEAD_MAGIC = b"ACKPSLOT"
TAIL_MAGIC = b"ACKPTAIL"
TOKEN_NBYTES = 16

STATE_EMPTY = 0
STATE_OPEN = 1
STATE_SEALED = 2
STATE_STREAMED = 3
STATES = {STATE_EMPTY: "EMPTY", STATE_OPEN: "OPEN", STATE_SEALED: "SEALED", STATE_STREAMED: "STREAMED"}

MIN_SLOT_NBYTES = 3 * PAGE_NBYTES
MAX_SLOT_NBYTES = 1 << 46
"""64 TiB, more than any node's memory: absurd lengths are refused before they are multiplied."""

_HEAD = struct.Struct("<8sQ16sQ")  # magic, version, token, slot nbytes
_TAIL = struct.Struct("<8s16s")  # magic, token
STATE_OFFSET = 64
GENERATION_OFFSET = 72
REQUEST_OFFSET_OFFSET = 80
REQUEST_NBYTES_OFFSET = 88
REQUEST_CHECKSUM_OFFSET = 96
STAGED_OFFSET = 104
TAIL_GENERATION_OFFSET = 64
COUNTERS_OFFSET = 1024
COUNTERS_NBYTES = 64
COUNTERS_GENERATIONS = 32
"""Number of generations whose counters have separate places, so that a worker that is late with an old generation does
not overwrite the counters of later ones."""

_READS, _READ_AGAIN_S = 50, 0.001
"""Number of reads of a request that is being replaced, and seconds between them: the stores from then to the seal take
microseconds. Chosen."""


class SlotError(ValueError):
    """A slot does not have the expected contents; the message says which field is wrong."""


class SealedRequest(NamedTuple):
    """The request in a sealed or streamed slot: the slot's generation and the request's bytes."""

    generation: int
    request: bytes


def slot_nbytes(body_nbytes: int, request_nbytes: int) -> int:
    """Return the size of a slot for `body_nbytes` of file images (whole pages) and a request of that length."""
    return 2 * PAGE_NBYTES + _round_up(body_nbytes) + _round_up(request_nbytes)


def _round_up(nbytes: int) -> int:
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


class SlotControl:
    """Reads and writes the control pages of one mapped slot. The mapping must outlive it.

    Generation and state are aligned 64-bit words, each read and written by one access, so that no reader sees half of
    one.

    Args:
        address: Address of the mapped slot.
        nbytes: Its size, control pages included.

    Raises:
        SlotError: `nbytes` is not a possible size.
    """

    def __init__(self, address: int, nbytes: int) -> None:
        if nbytes < MIN_SLOT_NBYTES or nbytes % PAGE_NBYTES:
            raise SlotError(f"a slot has {nbytes} bytes, expected whole pages and at least {MIN_SLOT_NBYTES}")
        self.nbytes = nbytes
        self._address = address
        self._tail = address + nbytes - PAGE_NBYTES
        word = ctypes.c_uint64.from_address
        self._state, self._generation = word(address + STATE_OFFSET), word(address + GENERATION_OFFSET)
        self._tail_generation = word(self._tail + TAIL_GENERATION_OFFSET)
        self._request_offset = word(address + REQUEST_OFFSET_OFFSET)
        self._request_nbytes = word(address + REQUEST_NBYTES_OFFSET)
        self._request_checksum = word(address + REQUEST_CHECKSUM_OFFSET)
        self._staged = word(address + STAGED_OFFSET)

    def initialise(self, token: bytes) -> None:
        """Write both control pages of a new slot. Called once, by its creator."""
        if len(token) != TOKEN_NBYTES:
            raise SlotError(f"the token has {len(token)} bytes, expected {TOKEN_NBYTES}")
        ctypes.memmove(self._address, _HEAD.pack(HEAD_MAGIC, SLOT_VERSION, token, self.nbytes), _HEAD.size)
        ctypes.memmove(self._tail, _TAIL.pack(TAIL_MAGIC, token), _TAIL.size)
        self._store(self._address + STATE_OFFSET, STATE_EMPTY)

    def check(self, token: bytes) -> None:
        """Check that this is the expected slot.

        Raises:
            SlotError: It has another magic, version, token or size.
        """
        magic, version, found, nbytes = _HEAD.unpack(ctypes.string_at(self._address, _HEAD.size))
        tail_magic, tail_token = _TAIL.unpack(ctypes.string_at(self._tail, _TAIL.size))
        if magic != HEAD_MAGIC or tail_magic != TAIL_MAGIC:
            raise SlotError("the memory is not a slot: its magic number is wrong")
        if version != SLOT_VERSION:
            raise SlotError(f"the slot has version {version}, expected {SLOT_VERSION}")
        if found != token or tail_token != token:
            raise SlotError("the memory is another slot: its token differs")
        if nbytes != self.nbytes:
            raise SlotError(f"the slot's head page says {nbytes} bytes, but {self.nbytes} are mapped")

    @property
    def state(self) -> int:
        """The state, one of `STATES`."""
        return self._state.value

    @property
    def generation(self) -> int:
        """The generation in the head page."""
        return self._generation.value

    @property
    def staged_address(self) -> int:
        """Address of the number of bytes that the trainer has copied, for observers. No decision depends on it."""
        return self._address + STAGED_OFFSET

    def staged_nbytes(self, generation: int) -> int:
        """Return about how many bytes of `generation` have been copied; 0 if the slot holds another generation."""
        found = self._staged.value
        return found if self._generation.value == generation == self._tail_generation.value else 0

    def note_staged(self, nbytes: int) -> None:
        """Publish how many bytes of the snapshot have been copied, for observers."""
        self._store(self.staged_address, nbytes)

    def open(self, generation: int) -> None:
        """Begin the snapshot of `generation`. Readers of the last snapshot will notice that it is overwritten."""
        self._store(self._address + STATE_OFFSET, STATE_OPEN)
        self._store(self.staged_address, 0)
        # IMPORTANT: change the tail before the body. A reader of the old snapshot compares both generations after its
        # last read, and so notices that the body has changed.
        self._store(self._tail + TAIL_GENERATION_OFFSET, generation)
        self._store(self._address + GENERATION_OFFSET, generation)
        reach("slot: opened")

    def seal(self, request: bytes, offset: int) -> None:
        """Write the request at `offset` and publish the snapshot.

        Raises:
            SlotError: The request does not fit between `offset` and the tail page.
        """
        reach("slot: filled")
        self._write_request(request, offset)
        reach("slot: request written")
        self.finish()

    def ask_again(self, request: bytes, offset: int) -> None:
        """Replace the request of a streamed slot, before `finish`. `offset` must not overlap the old request.

        IMPORTANT: make a system call on the memfd, as `Counters` does, between this and `finish`. It orders the stores
        for a worker that polls the state; there is no message that would.

        Raises:
            SlotError: As `seal`.
        """
        self._write_request(request, offset)

    def stream(self, request: bytes, offset: int) -> None:
        """Write the request at `offset`, and let the worker write the body as far as it is filled.

        Raises:
            SlotError: As `seal`.
        """
        self._write_request(request, offset)
        self._store(self._address + STATE_OFFSET, STATE_STREAMED)
        reach("slot: streamed")

    def finish(self) -> None:
        """Publish the snapshot: seal the slot, which is filled."""
        # IMPORTANT: this must be the last store. From now on the snapshot outlives the trainer. If the state were
        # SEALED before the request is complete, the worker could commit by another request, or by half of one.
        self._store(self._address + STATE_OFFSET, STATE_SEALED)
        reach("slot: sealed")

    def _write_request(self, request: bytes, offset: int) -> None:
        if not PAGE_NBYTES <= offset <= offset + len(request) <= self.nbytes - PAGE_NBYTES:
            raise SlotError(
                f"a request of {len(request)} bytes does not fit at offset {offset} of a slot of {self.nbytes} bytes"
            )
        ctypes.memmove(self._address + offset, request, len(request))
        self._store(self._address + REQUEST_OFFSET_OFFSET, offset)
        self._store(self._address + REQUEST_NBYTES_OFFSET, len(request))
        self._store(self._address + REQUEST_CHECKSUM_OFFSET, xxhash.xxh3_64_intdigest(request))

    def discard(self) -> None:
        """Discard the snapshot: the slot is EMPTY."""
        self._store(self._address + STATE_OFFSET, STATE_EMPTY)

    def is_sealed(self, generation: int) -> bool:
        """Whether the slot still holds the sealed snapshot of `generation`, by head and tail page."""
        is_sealed = self._state.value == STATE_SEALED
        return is_sealed and self._generation.value == generation == self._tail_generation.value

    def is_written(self, generation: int) -> bool:
        """Whether the slot still holds `generation`, streamed or sealed, by head and tail page."""
        is_written = self._state.value in (STATE_STREAMED, STATE_SEALED)
        return is_written and self._generation.value == generation == self._tail_generation.value

    def read_request(self) -> SealedRequest:
        """Return the sealed request.

        Raises:
            SlotError: The slot is not sealed, or its request is out of bounds or damaged.
        """
        return self._read_request(self.is_sealed)

    def read_streamed(self) -> tuple[SealedRequest, bool]:
        """Return the request of a sealed or streamed slot, and whether the slot is streamed.

        Raises:
            SlotError: The slot is neither, or its request is out of bounds or damaged.

        Blocks: while the trainer replaces the request, at most 0.05 s.
        """
        for _ in range(_READS):
            if self.state == STATE_SEALED:  # read the state once: it may become SEALED meanwhile
                return self.read_request(), False
            with contextlib.suppress(SlotError):
                return self._read_request(self.is_written), True
            if self.state != STATE_STREAMED:
                break
            time.sleep(_READ_AGAIN_S)  # the request is being replaced: offset, length and checksum are three stores
        return self._read_request(self.is_written), True

    def _read_request(self, holds: Callable[[int], bool]) -> SealedRequest:
        generation = self.generation
        if not holds(generation):
            raise SlotError(f"the slot is {STATES.get(self.state, f'in unknown state {self.state}')}, not SEALED")
        offset, nbytes = self._request_offset.value, self._request_nbytes.value
        if not PAGE_NBYTES <= offset <= offset + nbytes <= self.nbytes - PAGE_NBYTES:
            raise SlotError(
                f"the request, {nbytes} bytes at offset {offset}, lies outside a slot of {self.nbytes} bytes"
            )
        request = ctypes.string_at(self._address + offset, nbytes)
        if xxhash.xxh3_64_intdigest(request) != self._request_checksum.value:
            raise SlotError("the request's checksum does not match")
        if not holds(generation):
            raise SlotError("the slot was reopened while its request was read")
        return SealedRequest(generation, request)

    @staticmethod
    def _store(address: int, value: int) -> None:
        ctypes.c_uint64.from_address(address).value = value
