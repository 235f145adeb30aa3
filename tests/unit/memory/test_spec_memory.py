"""memory/SPEC.md says what the code does."""

from __future__ import annotations

import ctypes

import pytest
from spec_markdown import spec, table

from asyncckpt.memory import slot

SPEC = spec("memory")
NBYTES = slot.MIN_SLOT_NBYTES
TOKEN = b"0123456789abcdef"


@pytest.mark.parametrize(("name", "value"), table(SPEC, "constant", "value"))
def test_constant_equals_the_codes(name: str, value: str) -> None:
    assert getattr(slot, name) == int(value)


def test_states_are_those_of_the_spec() -> None:
    assert {int(value): name for name, value, _ in table(SPEC, "state", "value", "the slot")} == slot.STATES


@pytest.mark.parametrize(
    ("offset", "word"),
    [
        (offset, word)
        for _, offset, _, word in table(SPEC, "page", "offset", "bytes", "word")
        if word.endswith("_OFFSET")
    ],
)
def test_offset_of_a_word_equals_the_codes(offset: str, word: str) -> None:
    assert getattr(slot, word) == int(offset)


def test_every_offset_of_the_code_is_in_the_spec() -> None:
    named = {word for _, _, _, word in table(SPEC, "page", "offset", "bytes", "word")}
    assert {n for n in vars(slot) if n.endswith("_OFFSET")} <= named


def test_words_do_not_overlap_and_stay_in_their_page() -> None:
    for wanted in ("head", "tail"):
        end = 0
        for page, offset, nbytes, _ in table(SPEC, "page", "offset", "bytes", "word"):
            if page == wanted:
                assert int(offset) >= end
                end = int(offset) + int(nbytes)
        assert end <= slot.PAGE_NBYTES


def test_a_new_slot_holds_the_bytes_of_the_spec() -> None:
    memory = (ctypes.c_char * NBYTES)()
    control = slot.SlotControl(ctypes.addressof(memory), NBYTES)
    control.initialise(TOKEN)
    wanted = {
        ("head", "HEAD_MAGIC"): b"ACKPSLOT",
        ("head", "SLOT_VERSION"): slot.SLOT_VERSION.to_bytes(8, "little"),
        ("head", "token"): TOKEN,
        ("head", "slot nbytes"): NBYTES.to_bytes(8, "little"),
        ("tail", "TAIL_MAGIC"): b"ACKPTAIL",
        ("tail", "token"): TOKEN,
    }
    for page, offset, nbytes, word in table(SPEC, "page", "offset", "bytes", "word"):
        begin = int(offset) + (NBYTES - slot.PAGE_NBYTES if page == "tail" else 0)
        assert memory.raw[begin : begin + int(nbytes)] == wanted.get((page, word), bytes(int(nbytes)))
