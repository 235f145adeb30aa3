"""One checkpoint, or answer, for all ranks: rank 0 says what there is, and they take the first that all can."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgpack

from asyncckpt.coordination import Coordination
from asyncckpt.errors import SaveFailedError
from asyncckpt.recall.newest import Offer


def same_choice(
    ranks: Coordination,
    look: Callable[[], list[Offer]],
    usable: Callable[[list[Offer]], list[bool]],
    timeout_s: float,
    call: str,
) -> Offer | None:
    """Return, on every rank, the first of rank 0's offers that each of them can use; a collective.

    Args:
        ranks: The ranks.
        look: Called on rank 0 only.
        usable: Says on each rank which of rank 0's offers it can use; not called where the first one is on disk.
        timeout_s: How long rank 0 may look, and how long to wait for the other ranks.
        call: What the ranks call, for messages.

    Raises:
        PlanTimeoutError: Some ranks did not call.
        SaveFailedError: Rank 0's `look` failed (on the others), or the exchange broke down.
        Exception: Whatever `look` raises, on rank 0.

    Blocks: at most three times `timeout_s`.
    """
    if ranks.alone:
        return next(iter(look()), None)
    meeting = ranks.meet(f"answer/{next(ranks.answers)}", call)
    first = ranks.rank.rank == 0
    deadline = time.monotonic() + (1 if first else 2) * timeout_s  # rank 0 may take so long for its answer
    try:
        try:
            mine = msgpack.packb([list(offer) for offer in look()] if first else None)
        except Exception as error:
            meeting.refuse(repr(error))
            raise
        if first:
            deadline = time.monotonic() + timeout_s
        offers = _offers(meeting.gather(mine, deadline)[0])
        if not offers or not offers[0].save_id:
            return next(iter(offers), None)
        votes = meeting.gather(bytes(usable(offers)), time.monotonic() + timeout_s)
    finally:
        meeting.close()
    if any(len(vote) != len(offers) for vote in votes):
        raise SaveFailedError("a rank answered with something else than which checkpoints it can load", code="exchange")
    return next((offer for n, offer in enumerate(offers) if all(vote[n] for vote in votes)), None)


def same_answer(ranks: Coordination, ask: Callable[[], str], timeout_s: float, call: str) -> str:
    """Return rank 0's answer on every rank; a collective.

    Args:
        ranks: The ranks.
        ask: Called on rank 0 only.
        timeout_s, call, Raises, Blocks: As for `same_choice`.
    """
    found = same_choice(ranks, lambda: [Offer(ask())], lambda offers: [True] * len(offers), timeout_s, call)
    if found is None:
        raise SaveFailedError("rank 0 answered with nothing", code="exchange", rank=0)
    return found.path


def _offers(data: bytes) -> list[Offer]:
    try:
        return [Offer(str(path), str(save_id), int(step)) for path, save_id, step in msgpack.unpackb(data)]
    except (ValueError, TypeError) as error:
        text = "rank 0 answered with something else than checkpoints"
        raise SaveFailedError(text, code="exchange", rank=0) from error
