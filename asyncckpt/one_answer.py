"""One answer for all ranks of a checkpointer: rank 0 finds it, the others are told."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgpack

from asyncckpt.coordination import Coordination
from asyncckpt.errors import SaveFailedError


def same_answer(ranks: Coordination, ask: Callable[[], str | None], timeout_s: float, call: str) -> str | None:
    """Return rank 0's answer on every rank; a collective.

    Args:
        ranks: The ranks.
        ask: Called on rank 0 only.
        timeout_s: How long rank 0 may take, and how long to wait for the other ranks.
        call: What the ranks call, for messages.

    Raises:
        PlanTimeoutError: Some ranks did not call.
        SaveFailedError: Rank 0's `ask` failed (on the others), or the exchange broke down.
        Exception: Whatever `ask` raises, on rank 0.

    Blocks: at most twice `timeout_s`.
    """
    if ranks.alone:
        return ask()
    meeting = ranks.meet(f"answer/{next(ranks.answers)}", call)
    first = ranks.rank.rank == 0
    deadline = time.monotonic() + (1 if first else 2) * timeout_s  # rank 0 may take so long for its answer
    try:
        try:
            mine = msgpack.packb(ask() if first else None)
        except Exception as error:
            meeting.refuse(repr(error))
            raise
        if first:
            deadline = time.monotonic() + timeout_s
        found = msgpack.unpackb(meeting.gather(mine, deadline)[0])
    finally:
        meeting.close()
    if found is not None and not isinstance(found, str):
        raise SaveFailedError("rank 0 answered with something else than a path", code="exchange", rank=0)
    return found
