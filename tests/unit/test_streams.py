"""A stream between two workers: every record arrives once, in order, whatever the network does with its pieces."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from asyncckpt.protocol.fields import MAX_PIECE_NBYTES
from asyncckpt.protocol.relay import Piece
from asyncckpt_worker import streams
from asyncckpt_worker.streams import BEAT_S, RESEND_S, WINDOW, Stream

NAME, ONE, TWO = "0" * 16, "1" * 16, "2" * 16


def pair() -> tuple[Stream, Stream]:
    return Stream(NAME, ONE), Stream(NAME, TWO)


@pytest.mark.parametrize("chaos", [0.0, 0.2, 0.6])
def test_records_arrive_once_and_in_order_over_a_network_that_loses_doubles_and_reorders(
    chaos: float, rng: random.Random
) -> None:
    sides, wire, now = pair(), list[tuple[int, Piece]](), 0.0
    posted: list[list[bytes]] = [[], []]
    taken: list[list[bytes]] = [[], []]
    for turn in range(4000):
        now += 0.1
        side = rng.randrange(2)
        if turn < 1000 and rng.random() < 0.1:
            record = rng.randbytes(4) * rng.choice((0, 1, 100, MAX_PIECE_NBYTES // 2))
            posted[side].append(record)
            sides[side].post(record)
        for piece in sides[side].due(now):
            wire += [(1 - side, piece)] * (1 + (rng.random() < chaos / 2))
        while wire and rng.random() < 0.9:
            to, piece = wire.pop(rng.randrange(len(wire)) if rng.random() < chaos else 0)
            if rng.random() >= chaos:
                found = sides[to].take(piece, now)
                taken[to] += [] if found is None else [found]
    assert taken == [posted[1], posted[0]]
    assert [side.untaken_nbytes for side in sides] == [0, 0]


def test_a_record_longer_than_a_piece_is_put_together() -> None:
    one, two = pair()
    record = bytes(range(256)) * (MAX_PIECE_NBYTES // 100)
    one.post(record)
    found = [two.take(piece, 0.0) for piece in one.due(0.0)]
    assert [f for f in found if f is not None] == [record] and len(found) >= 3


def test_no_more_than_a_window_is_under_way() -> None:
    one, two = pair()
    for _ in range(3 * WINDOW):
        one.post(b"x")
    sent = [p for p in one.due(0.0) if p.number]
    assert [p.number for p in sent] == list(range(1, WINDOW + 1))
    assert [p for p in one.due(0.1) if p.number] == []
    two.take(sent[0], 0.2)
    (answer,) = two.due(0.2)
    one.take(answer, 0.2)
    assert [p.number for p in one.due(0.2)] == [WINDOW + 1]


def test_what_is_not_acknowledged_is_sent_again_and_only_after_a_while() -> None:
    one, _ = pair()
    one.post(b"x")
    assert [p.number for p in one.due(0.0)] == [1]
    assert [p.number for p in one.due(RESEND_S / 2)] == []
    assert [p.number for p in one.due(RESEND_S)] == [1]
    assert one.wakes_at <= 2 * RESEND_S


def test_each_side_says_that_it_lives() -> None:
    one, _ = pair()
    assert [p.number for p in one.due(0.0)] == [0]
    assert list(one.due(BEAT_S / 2)) == []
    assert [p.number for p in one.due(BEAT_S)] == [0]


def test_an_acknowledgement_of_what_was_never_sent_is_refused() -> None:
    one, _ = pair()
    one.post(b"x")
    piece = Piece(stream=NAME, sender=TWO, number=0, first=1, more=False, data=b"", taken=2)
    with pytest.raises(ValueError, match="acknowledged"):
        one.take(piece, 0.0)


def test_a_record_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_RECORD_NBYTES", 10)
    _, two = pair()
    with pytest.raises(ValueError, match="more than 10"):
        for number in (1, 2, 3):
            two.take(Piece(stream=NAME, sender=ONE, number=number, first=1, more=True, data=b"xxxx", taken=0), 0.0)


def test_a_record_of_pieces_without_end_that_hold_nothing_costs_no_memory() -> None:
    _, two = pair()
    tracemalloc.start()
    try:
        for number in range(1, 20_001):
            two.take(Piece(stream=NAME, sender=ONE, number=number, first=1, more=True, data=b"", taken=0), 0.0)
        assert tracemalloc.get_traced_memory()[0] < 50_000
    finally:
        tracemalloc.stop()


def test_a_stream_is_quiet_as_long_as_it_was_told_to() -> None:
    one = Stream(NAME, ONE, quiet_until=3.0)
    one.post(b"x")
    assert list(one.due(2.9)) == [] and one.wakes_at == 3.0
    assert [p.number for p in one.due(3.0)] == [1]


def test_a_stream_that_nobody_reads_says_that_it_overflows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_UNTAKEN_NBYTES", 10)
    one, _ = pair()
    one.post(b"x" * 10)
    assert not one.overflows
    one.post(b"x")
    assert one.overflows
