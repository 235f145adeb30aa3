"""A slot's control pages: states, order, and every refusal. Plain memory stands in for the memfd."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable

import pytest

from asyncckpt.memory import slot as slots
from asyncckpt.memory.slot import (
    PAGE_NBYTES,
    SLOT_VERSION,
    STATE_EMPTY,
    STATE_OPEN,
    STATE_SEALED,
    SlotControl,
    SlotError,
)

NBYTES = 4 * PAGE_NBYTES
TOKEN = b"0123456789abcdef"


class Memory:
    """Bytes of a slot that a test may damage."""

    def __init__(self) -> None:
        self.raw = (ctypes.c_char * NBYTES)()
        self.control = SlotControl(ctypes.addressof(self.raw), NBYTES)
        self.control.initialise(TOKEN)

    def put(self, offset: int, word: int) -> None:
        self.raw[offset : offset + 8] = word.to_bytes(8, "little")


@pytest.fixture
def memory() -> Memory:
    """A new slot."""
    return Memory()


def _sealed(memory: Memory, generation: int = 1, request: bytes = b"request") -> SlotControl:
    memory.control.open(generation)
    memory.control.seal(request, 2 * PAGE_NBYTES)
    return memory.control


def test_snapshot_goes_through_its_states(memory: Memory) -> None:
    control = memory.control
    assert control.state == STATE_EMPTY
    control.open(1)
    assert (control.state, control.generation) == (STATE_OPEN, 1)
    assert not control.is_sealed(1)
    control.seal(b"request", PAGE_NBYTES)
    assert control.state == STATE_SEALED
    assert control.is_sealed(1)
    assert not control.is_sealed(2)
    assert control.read_request() == (1, b"request")
    control.discard()
    assert control.state == STATE_EMPTY


def test_opening_again_takes_the_old_snapshot_away_before_anything_is_written(memory: Memory) -> None:
    control = _sealed(memory)
    control.open(2)
    assert not control.is_sealed(1)
    with pytest.raises(SlotError, match="OPEN"):
        control.read_request()


def test_stores_are_in_the_order_of_the_spec(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    stored: list[int] = []
    base = ctypes.addressof(memory.raw)
    monkeypatch.setattr(SlotControl, "_store", staticmethod(lambda address, value: stored.append(address - base)))
    memory.control.open(1)
    memory.control.seal(b"x", PAGE_NBYTES)
    assert stored == [
        slots.STATE_OFFSET,
        slots.STAGED_OFFSET,
        NBYTES - PAGE_NBYTES + slots.TAIL_GENERATION_OFFSET,
        slots.GENERATION_OFFSET,
        slots.REQUEST_OFFSET_OFFSET,
        slots.REQUEST_NBYTES_OFFSET,
        slots.REQUEST_CHECKSUM_OFFSET,
        slots.STATE_OFFSET,
    ]


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [(0, 1), (PAGE_NBYTES - 1, 1), (NBYTES - PAGE_NBYTES, 1), (2 * PAGE_NBYTES, PAGE_NBYTES + 1), (-8, 1)],
)
def test_request_outside_the_body_is_refused(memory: Memory, offset: int, nbytes: int) -> None:
    memory.control.open(1)
    with pytest.raises(SlotError, match="request"):
        memory.control.seal(b"x" * nbytes, offset)
    assert memory.control.state == STATE_OPEN


def test_request_may_fill_the_body(memory: Memory) -> None:
    memory.control.open(1)
    memory.control.seal(b"x" * (NBYTES - 2 * PAGE_NBYTES), PAGE_NBYTES)
    assert len(memory.control.read_request().request) == NBYTES - 2 * PAGE_NBYTES


TAIL = NBYTES - PAGE_NBYTES
DAMAGE: dict[str, Callable[[Memory], None]] = {
    "unknown state": lambda m: m.put(slots.STATE_OFFSET, 7),
    "empty state": lambda m: m.put(slots.STATE_OFFSET, STATE_EMPTY),
    "ends of two generations": lambda m: m.put(TAIL + slots.TAIL_GENERATION_OFFSET, 2),
    "request before the body": lambda m: m.put(slots.REQUEST_OFFSET_OFFSET, 8),
    "request beyond the body": lambda m: m.put(slots.REQUEST_OFFSET_OFFSET, TAIL),
    "request of an absurd length": lambda m: m.put(slots.REQUEST_NBYTES_OFFSET, (1 << 64) - 1),
    "request of another length": lambda m: m.put(slots.REQUEST_NBYTES_OFFSET, 6),
    "request changed": lambda m: m.put(2 * PAGE_NBYTES, 0),
    "another checksum": lambda m: m.put(slots.REQUEST_CHECKSUM_OFFSET, 1),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_slot_gives_no_request(memory: Memory, damage: Callable[[Memory], None]) -> None:
    control = _sealed(memory)
    damage(memory)
    with pytest.raises(SlotError):
        control.read_request()


IDENTITY: dict[str, Callable[[Memory], None]] = {
    "head magic": lambda m: m.put(0, 0),
    "version": lambda m: m.put(8, SLOT_VERSION + 1),
    "head token": lambda m: m.put(16, 0),
    "size": lambda m: m.put(32, NBYTES + PAGE_NBYTES),
    "tail magic": lambda m: m.put(TAIL, 0),
    "tail token": lambda m: m.put(TAIL + 8, 0),
}


@pytest.mark.parametrize("damage", IDENTITY.values(), ids=IDENTITY)
def test_slot_of_another_identity_is_refused(memory: Memory, damage: Callable[[Memory], None]) -> None:
    memory.control.check(TOKEN)
    damage(memory)
    with pytest.raises(SlotError):
        memory.control.check(TOKEN)


def test_slot_with_another_token_is_refused(memory: Memory) -> None:
    with pytest.raises(SlotError, match="token"):
        memory.control.check(b"f" * 16)


@pytest.mark.parametrize("nbytes", [0, PAGE_NBYTES, 2 * PAGE_NBYTES, 3 * PAGE_NBYTES + 1])
def test_size_that_cannot_be_a_slots_is_refused(nbytes: int) -> None:
    with pytest.raises(SlotError, match="bytes"):
        SlotControl(0, nbytes)


def test_token_of_another_length_is_refused(memory: Memory) -> None:
    with pytest.raises(SlotError, match="token"):
        memory.control.initialise(b"short")


def test_reader_notices_a_slot_that_is_opened_while_it_reads(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    control = _sealed(memory)
    digest = slots.xxhash.xxh3_64_intdigest

    def opened_meanwhile(data: bytes) -> int:
        control.open(2)
        return int(digest(data))

    monkeypatch.setattr(slots.xxhash, "xxh3_64_intdigest", opened_meanwhile)
    with pytest.raises(SlotError, match="reopened"):
        control.read_request()


def test_random_damage_gives_the_request_or_a_refusal(memory: Memory, rng: random.Random) -> None:
    control = _sealed(memory, request=b"r" * 100)
    good = bytes(memory.raw)
    for _ in range(3000):
        ctypes.memmove(memory.raw, good, NBYTES)
        for _ in range(rng.randrange(1, 4)):
            page = rng.choice((0, 0, 2 * PAGE_NBYTES, TAIL))
            memory.raw[page + rng.randrange(112)] = rng.randrange(256)
        try:
            assert control.read_request().request == b"r" * 100
            control.check(TOKEN)
        except SlotError:
            continue


def test_slot_size_has_room_for_everything() -> None:
    assert slots.slot_nbytes(0, 1) == 3 * PAGE_NBYTES
    assert slots.slot_nbytes(2 * PAGE_NBYTES, PAGE_NBYTES + 1) == 6 * PAGE_NBYTES


def test_how_much_is_staged_is_told_of_the_generation_that_is(memory: Memory) -> None:
    memory.control.open(1)
    assert memory.control.staged_nbytes(1) == 0
    memory.control.note_staged(5)
    assert (memory.control.staged_nbytes(1), memory.control.staged_nbytes(2)) == (5, 0)
    memory.control.open(2)
    assert (memory.control.staged_nbytes(1), memory.control.staged_nbytes(2)) == (0, 0)


def test_what_counts_is_the_request_of_the_seal(memory: Memory) -> None:
    control = memory.control
    control.open(1)
    control.stream(b"first", PAGE_NBYTES)
    assert control.read_streamed() == ((1, b"first"), True)
    control.ask_again(b"second", 2 * PAGE_NBYTES)
    assert control.read_streamed() == ((1, b"second"), True)
    control.finish()
    assert control.read_streamed() == ((1, b"second"), False)
    assert control.read_request() == (1, b"second")


@pytest.mark.parametrize("ends", ["sealed", "never", "given up"])
def test_a_reader_between_the_words_of_another_request_and_its_seal_looks_again(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    control, looks = memory.control, []
    control.open(1)
    control.stream(b"first", PAGE_NBYTES)
    memory.put(slots.REQUEST_OFFSET_OFFSET, 2 * PAGE_NBYTES)  # the first of the three words

    def pause(_: float) -> None:
        looks.append(control.state)
        if len(looks) == 3 and ends == "sealed":
            control.seal(b"second", 2 * PAGE_NBYTES)
        elif len(looks) == 3 and ends == "given up":
            control.discard()

    monkeypatch.setattr(slots.time, "sleep", pause)
    if ends == "sealed":
        assert control.read_streamed() == ((1, b"second"), False)
    else:
        with pytest.raises(SlotError):
            control.read_streamed()
    assert len(looks) == (slots._READS if ends == "never" else 3)
