"""How far a slot is filled: never further than the first piece that may still be written to."""

from __future__ import annotations

import random
import threading

import pytest

from asyncckpt.client import slot_stream
from asyncckpt.client.slot_stream import Watermark


def marked(start: int, end: int) -> tuple[Watermark, list[int]]:
    told: list[int] = []
    return Watermark(start, end, told.append), told


@pytest.fixture(autouse=True)
def _each_byte_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_stream, "STEP_NBYTES", 1)


@pytest.mark.parametrize(("pieces", "filled"), [([150, 120], 20), ([], 100)])
def test_what_lies_before_the_first_piece_is_there_at_once(pieces: list[int], filled: int) -> None:
    mark, told = marked(100, 200)
    mark.expect(pieces)
    assert told == [filled]


def test_a_piece_counts_once_all_before_it_are_copied() -> None:
    mark, told = marked(100, 200)
    mark.expect([120, 150])
    mark.done(150)
    assert told == [20]
    mark.done(120)
    assert told == [20, 100]


def test_little_news_is_not_told_but_the_end_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_stream, "STEP_NBYTES", 40)
    mark, told = marked(100, 200)
    mark.expect([110, 120, 160, 170])
    for piece in (110, 120, 160, 170):
        mark.done(piece)
    assert told == [60, 100]


def test_by_several_threads_in_any_order_nothing_is_told_that_is_not_copied(rng: random.Random) -> None:
    for _ in range(20):
        pieces = sorted(rng.sample(range(1000, 9000), rng.randint(1, 60)))
        copied: set[int] = set()
        wrong: list[int] = []

        def tell(filled: int, pieces: list[int] = pieces, copied: set[int] = copied, wrong: list[int] = wrong) -> None:
            wrong.extend(p for p in pieces if p < 1000 + filled and p not in copied)

        mark = Watermark(1000, 9000, tell)
        mark.expect(pieces)
        order = pieces.copy()
        rng.shuffle(order)

        def work(todo: list[int] = order, copied: set[int] = copied, mark: Watermark = mark) -> None:
            while todo:
                try:
                    piece = todo.pop()
                except IndexError:
                    return
                copied.add(piece)
                mark.done(piece)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert copied == set(pieces)
