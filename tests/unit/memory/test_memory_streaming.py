"""Slots that are written while they are filled: how an image is cut into segments, and how the two sides count."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator

import pytest

from asyncckpt.format.checksums import BLOCK_NBYTES
from asyncckpt.memory.arena import SlotMemory
from asyncckpt.memory.slot import (
    COUNTERS_GENERATIONS,
    COUNTERS_OFFSET,
    PAGE_NBYTES,
    STATE_SEALED,
    STATE_STREAMED,
    SlotError,
)
from asyncckpt.memory.streaming import Counters, Segment, StreamLayout
from asyncckpt.protocol.request import RING_UNIT_NBYTES


@pytest.fixture
def memory() -> Iterator[SlotMemory]:
    made = SlotMemory.create(8 * PAGE_NBYTES)
    yield made
    made.close()


@pytest.fixture
def other(memory: SlotMemory) -> Iterator[SlotMemory]:
    """The same slot as another process maps it."""
    found = SlotMemory.attach(os.getpid(), memory.fd, memory.nbytes, memory.token)
    yield found
    found.close()


PARTS = [(4096, 10_000), (16_384, 4096), (20_480, 1)]


def test_segments_are_whole_blocks_of_a_file() -> None:
    assert RING_UNIT_NBYTES == BLOCK_NBYTES


def test_parts_are_cut_one_after_the_other() -> None:
    ring = StreamLayout(PARTS, 4096, 2)
    assert ring.segments == (
        Segment(0, 0, 4096),
        Segment(0, 4096, 8192),
        Segment(0, 8192, 10_000),
        Segment(1, 0, 4096),
        Segment(2, 0, 1),
    )
    assert [ring.offset_of(n) for n in range(5)] == [4096, 8192, 4096, 8192, 4096]
    assert (ring.image_nbytes, ring.end) == (20_480, 12_288)


def test_in_a_slot_with_room_for_everything_segments_lie_where_they_do_in_the_image() -> None:
    whole = StreamLayout(PARTS, 4096)
    assert whole.segments == StreamLayout(PARTS, 4096, 2).segments
    assert [whole.offset_of(n) for n in range(5)] == [4096, 8192, 12_288, 16_384, 20_480]
    assert (whole.image_nbytes, whole.end) == (20_480, 24_576)


@pytest.mark.parametrize("n_cells", [0, 2])
def test_a_segment_counts_once_its_last_byte_is_filled_and_no_sooner(n_cells: int) -> None:
    layout = StreamLayout(PARTS, 4096, n_cells)
    assert [layout.end_of(n) for n in range(6)] == [0, 4096, 8192, 10_000, 16_384, 16_385]
    for count in range(1, 6):
        assert layout.count_in(layout.end_of(count)) == count
        assert layout.count_in(layout.end_of(count) - 1) == count - 1
    assert layout.count_in(layout.image_nbytes) == 5


def test_every_byte_of_random_parts_lies_in_one_segment(rng: random.Random) -> None:
    for _ in range(50):
        lengths = [rng.randrange(1, 60_000) for _ in range(rng.randrange(1, 8))]
        parts, offset = [], PAGE_NBYTES
        for nbytes in lengths:
            parts.append((offset, nbytes))
            offset += -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES
        ring = StreamLayout(parts, rng.randrange(1, 5) * PAGE_NBYTES, rng.randrange(2, 9))
        for number, segment in enumerate(ring.segments):
            assert 0 < segment.end - segment.start <= ring.segment_nbytes
            assert {ring.number_of(segment.part, at) for at in (segment.start, segment.end - 1)} == {number}
            offset = parts[segment.part][0] + segment.start
            assert ring.image_offset_of(number) == offset
            assert ring.number_at(offset) == ring.number_at(offset + segment.end - segment.start - 1) == number
            assert PAGE_NBYTES <= ring.offset_of(number) <= PAGE_NBYTES + ring.cells_nbytes - ring.segment_nbytes
        for part, nbytes in enumerate(lengths):
            cut = [(s.start, s.end) for s in ring.segments if s.part == part]
            assert [start for start, _ in cut] == [0, *(end for _, end in cut[:-1])]
            assert cut[-1][1] == nbytes


def test_each_side_sees_what_the_other_has_counted(memory: SlotMemory, other: SlotMemory) -> None:
    trainer, worker = Counters(memory, 5), Counters(other, 5)
    trainer.reset()
    assert (worker.filled, trainer.freed) == (0, 0)
    trainer.filled, worker.freed = 7, 3
    assert (worker.filled, trainer.freed) == (7, 3)
    trainer.reset()
    assert (worker.filled, trainer.freed) == (0, 0)


def test_generations_count_apart(memory: SlotMemory) -> None:
    counters = [Counters(memory, generation) for generation in range(COUNTERS_GENERATIONS)]
    for n, one in enumerate(counters):
        one.filled, one.freed = 2 * n, n
    assert [(one.filled, one.freed) for one in counters] == [(2 * n, n) for n in range(COUNTERS_GENERATIONS)]


def test_a_counter_that_is_damaged_is_told(memory: SlotMemory) -> None:
    counters = Counters(memory, 0)
    counters.reset()
    os.pwrite(memory.fd, b"\x01", COUNTERS_OFFSET)
    with pytest.raises(SlotError, match="damaged"):
        _ = counters.filled


def test_a_counter_is_never_seen_half_written(memory: SlotMemory, other: SlotMemory) -> None:
    values = [0, (1 << 64) - 1, 0x00000000FFFFFFFF, 0xFFFFFFFF00000000]
    writer, reader, ended = Counters(memory, 1), Counters(other, 1), threading.Event()
    writer.reset()

    def write() -> None:
        for n in range(20_000):
            writer.filled = values[n % len(values)]
        ended.set()

    thread = threading.Thread(target=write)
    thread.start()
    seen = set()
    while not ended.is_set():
        seen.add(reader.filled)
    thread.join()
    assert seen <= set(values)


# ---- the slot's states


def test_a_ring_is_written_from_its_request_on_and_is_a_snapshot_only_when_it_is_sealed(memory: SlotMemory) -> None:
    control = memory.control
    control.open(4)
    assert not control.is_written(4)
    control.stream(b"request", PAGE_NBYTES)
    assert control.state == STATE_STREAMED
    assert (control.is_written(4), control.is_sealed(4), control.is_written(3)) == (True, False, False)
    assert control.read_streamed() == ((4, b"request"), True)
    with pytest.raises(SlotError, match="STREAMED"):
        control.read_request()
    control.finish()
    assert control.state == STATE_SEALED
    assert (control.is_written(4), control.is_sealed(4)) == (True, True)
    assert control.read_streamed() == ((4, b"request"), False)
    assert control.read_request() == (4, b"request")


@pytest.mark.parametrize("sealed", [False, True])
def test_a_ring_that_is_given_up_or_opened_again_is_not_written_any_more(memory: SlotMemory, *, sealed: bool) -> None:
    control = memory.control
    for give_up in (control.discard, lambda: control.open(9)):
        control.open(8)
        control.stream(b"request", PAGE_NBYTES)
        if sealed:
            control.finish()
        give_up()
        assert not control.is_written(8)
        with pytest.raises(SlotError, match="not SEALED"):
            control.read_streamed()


def test_a_ring_whose_request_is_damaged_is_refused(memory: SlotMemory) -> None:
    memory.control.open(1)
    memory.control.stream(b"request", PAGE_NBYTES)
    os.pwrite(memory.fd, b"R", PAGE_NBYTES)
    with pytest.raises(SlotError, match="checksum"):
        memory.control.read_streamed()


def test_a_request_that_does_not_fit_behind_the_cells_is_refused(memory: SlotMemory) -> None:
    memory.control.open(1)
    with pytest.raises(SlotError, match="a request of"):
        memory.control.stream(b"r" * PAGE_NBYTES, 7 * PAGE_NBYTES - 1)
