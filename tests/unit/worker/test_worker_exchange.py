"""The worker's boards: ranks lay down bytes for each other, piece by piece, and everything is bounded."""

from __future__ import annotations

from typing import Any

import pytest
from worker_bench import Bench, code

from asyncckpt.protocol import messages as m
from asyncckpt.protocol.fields import MAX_PIECE_NBYTES
from asyncckpt_worker.core import events as ev
from asyncckpt_worker.core import exchange
from asyncckpt_worker.core.exchange import MAX_SHARED_NBYTES


class Meeting(Bench):
    """A core with one session per rank; peers are b"0", b"1", ...."""

    def __init__(self, world_size: int = 2) -> None:
        super().__init__()
        self.world_size = world_size
        for rank in range(world_size):
            self.hello(str(rank).encode(), f"{rank + 1:016x}", rank, world_size)

    def share(
        self, rank: int | bytes, data: bytes, board: str = "plan", *, offset: int = 0, total: int | None = None
    ) -> Any:
        peer = rank if isinstance(rank, bytes) else str(rank).encode()
        total = offset + len(data) if total is None else total
        return self.say(m.Share, peer, board=board, offset=offset, total=total, data=data)

    def fetch(self, by: int | bytes, of: int, board: str = "plan", offset: int = 0) -> Any:
        peer = by if isinstance(by, bytes) else str(by).encode()
        return self.say(m.Fetch, peer, board=board, rank=of, offset=offset)

    @property
    def registry(self) -> exchange.BoardRegistry:
        return self.core._boards


@pytest.fixture
def meeting() -> Meeting:
    return Meeting()


def test_nothing_is_given_out_before_all_ranks_have_shared(meeting: Meeting) -> None:
    assert meeting.fetch(0, 1).missing == (0, 1)
    assert isinstance(meeting.share(0, b"zero"), m.Ok)
    reply = meeting.fetch(0, 0)
    assert (reply.missing, reply.total, reply.data) == ((1,), 0, b"")
    meeting.share(1, b"")
    assert [meeting.fetch(by, of).data for by in range(2) for of in range(2)] == [b"zero", b""] * 2
    assert meeting.fetch(0, 1) == m.Fetched(id=meeting.ids, missing=(), total=0, data=b"")


def test_pieces_are_put_together_and_given_out_in_pieces(meeting: Meeting) -> None:
    data = bytes(range(256)) * 5000
    total, found = len(data), b""
    meeting.share(1, b"one")
    for offset in range(0, total, MAX_PIECE_NBYTES):
        assert meeting.fetch(1, 0).missing == (0,)
        for _ in range(2):  # the answer was lost
            piece = data[offset : offset + MAX_PIECE_NBYTES]
            assert isinstance(meeting.share(0, piece, offset=offset, total=total), m.Ok)
    while len(found) < total:
        reply = meeting.fetch(1, 0, offset=len(found))
        assert reply.total == total and 0 < len(reply.data) <= MAX_PIECE_NBYTES
        found += reply.data
    assert found == data and meeting.fetch(1, 0, offset=total).data == b""


@pytest.mark.parametrize(
    ("offset", "data", "total", "wanted"),
    [
        (5, b"x", 20, "protocol"),  # a gap
        (0, b"other", 20, "protocol"),  # what was shared is changed
        (4, b"x", 21, "protocol"),  # another length
        (18, b"xxx", 20, "protocol"),  # beyond the end
        (2, b"ta..", 20, None),  # an overlap that agrees
    ],
)
def test_piece_that_does_not_fit_is_refused(
    meeting: Meeting, offset: int, data: bytes, total: int, wanted: str | None
) -> None:
    meeting.share(0, b"data", total=20)
    reply = meeting.share(0, data, offset=offset, total=total)
    assert (isinstance(reply, m.Ok) and wanted is None) or code(reply) == wanted


def test_what_cannot_be_on_a_board_is_refused(meeting: Meeting) -> None:
    assert code(meeting.share(0, b"x", offset=4, total=8)) == "unknown_save", "it is told to start again"
    assert code(meeting.share(0, b"x", total=MAX_SHARED_NBYTES + 1)) == "protocol"
    assert code(meeting.fetch(0, 2)) == "protocol", "a rank beyond the world"


def test_missing_ranks_are_cut_to_a_table() -> None:
    meeting = Bench()
    meeting.hello(b"0", "1" * 16, 0, 5000)
    assert len(meeting.say(m.Fetch, b"0", board="plan", rank=0, offset=0).missing) == 1024


def test_second_living_session_of_a_rank_is_told_that_two_groups_meet(meeting: Meeting) -> None:
    meeting.share(0, b"zero")
    meeting.hello(b"twin", "9" * 16, 0, 2)
    reply = meeting.share(b"twin", b"zero")
    assert code(reply) == "protocol" and "two process groups" in reply.error["text"]
    assert "ASYNCCKPT_JOB" in reply.error["text"]


def test_world_of_another_size_is_refused(meeting: Meeting) -> None:
    meeting.share(0, b"zero")
    meeting.hello(b"z", "9" * 16, 1, 3)
    assert code(meeting.share(b"z", b"x")) == code(meeting.fetch(b"z", 0)) == "ranks_disagree"


@pytest.mark.parametrize("by", ["death", "goodbye"])
def test_incomplete_board_forgets_a_rank_whose_session_ends(meeting: Meeting, by: str) -> None:
    meeting.share(0, b"old")
    if by == "death":
        meeting.feed(ev.Died, session=f"{1:016x}")
    else:
        meeting.say(m.Goodbye, b"0")
    assert meeting.registry.nbytes == 0
    meeting.hello(b"again", "9" * 16, 0, 2)
    meeting.share(1, b"one")
    assert meeting.fetch(1, 0).missing == (0,)
    meeting.share(b"again", b"new")
    assert meeting.fetch(1, 0).data == b"new"


def test_rank_that_died_is_missing_and_the_others_need_not_share_again() -> None:
    meeting = Meeting(3)
    meeting.share(0, b"zero")
    meeting.share(1, b"one")
    meeting.feed(ev.Died, session=f"{1:016x}")
    assert meeting.fetch(1, 0).missing == (0, 2)
    meeting.hello(b"again", "9" * 16, 0, 3)
    meeting.share(b"again", b"new")
    meeting.share(2, b"two")
    assert [meeting.fetch(1, of).data for of in range(3)] == [b"new", b"one", b"two"]


def test_replaced_session_leaves_what_it_shared_to_the_next(meeting: Meeting) -> None:
    meeting.share(0, b"ze", total=4)
    meeting.hello(b"again", "9" * 16, 0, 2, replaces=f"{1:016x}")
    assert isinstance(meeting.share(b"again", b"ro", offset=2), m.Ok)
    meeting.share(1, b"one")
    assert meeting.fetch(1, 0).data == b"zero"


def test_complete_board_outlives_one_of_its_sessions_and_goes_with_the_last(meeting: Meeting) -> None:
    for rank in range(2):
        meeting.share(rank, b"data")
    meeting.feed(ev.Died, session=f"{1:016x}")
    assert meeting.fetch(1, 0).data == b"data"
    meeting.hello(b"new0", "9" * 16, 0, 2)
    meeting.share(b"new0", b"new")
    assert meeting.fetch(b"new0", 1).missing == (1,), "the next job of this name gets nothing of the last one"
    meeting.say(m.Goodbye, b"new0")
    meeting.feed(ev.Died, session=f"{2:016x}")
    assert meeting.registry.nbytes == 0


def test_oldest_complete_boards_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "MAX_BOARDS", 3)
    meeting = Meeting(1)
    for number in range(5):
        assert isinstance(meeting.share(0, b"x", f"plan-{number}"), m.Ok)
    assert [n for n in range(5) if not meeting.fetch(0, 0, f"plan-{n}").missing] == [2, 3, 4]


def test_boards_that_are_incomplete_stay_and_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "MAX_BOARDS", 3)
    monkeypatch.setattr(exchange, "MAX_BOARDS_NBYTES", 100)
    meeting = Meeting()
    meeting.share(0, b"x", "a", total=60)
    assert code(meeting.share(0, b"x", "b", total=41)) == "insufficient_memory"
    assert isinstance(meeting.share(1, b"x", "a", total=40), m.Ok)
    assert meeting.registry.nbytes == 100
    assert isinstance(meeting.share(0, b"", "b"), m.Ok) and isinstance(meeting.share(0, b"", "c"), m.Ok)
    assert isinstance(meeting.share(0, b"", "d"), m.Refused), "there are three"
