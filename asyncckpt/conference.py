"""One save that all ranks take together: each step is done by every rank, and succeeds for all or for none."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgpack

from asyncckpt.errors import AsyncCkptError, SaveFailedError, from_wire, to_wire
from asyncckpt.exchange import Meeting
from asyncckpt.failpoints import reach


class Conference:
    """See the module.

    Args:
        meeting: Of the ranks; closed at the end.
    """

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting

    def together(self, work: Callable[[], Any], timeout_s: float) -> list[Any]:
        """Do `work`, and return what it returned on every rank.

        Args:
            work: This rank's part; what it returns must pack as msgpack.
            timeout_s: How long to wait for the other ranks, once it is done.

        Raises:
            Exception: What `work` raised.
            SaveFailedError: It raised on another rank, which is named; or a rank was lost.
            PlanTimeoutError: Ranks have not come.
        """
        failure: Exception | None = None
        outcome: dict[str, Any] = {}
        try:
            outcome = {"value": work()}
            reach("ranks: telling")
        except Exception as error:
            failure, outcome = error, {"error": dict(to_wire(error))}
        try:
            everybody = self.gather(msgpack.packb(outcome), timeout_s)
        except AsyncCkptError:
            if failure is not None:
                raise failure from None
            raise
        if failure is not None:
            raise failure
        found = [msgpack.unpackb(data, strict_map_key=False) for data in everybody]
        for rank, other in enumerate(found):
            if "error" in other:
                raise _failed_on(rank, from_wire(other["error"]))
        return [other["value"] for other in found]

    def gather(self, payload: bytes, timeout_s: float) -> list[bytes]:
        """As `Meeting.gather`, with a timeout."""
        return self._meeting.gather(payload, time.monotonic() + timeout_s)

    def close(self) -> None:
        """End it."""
        self._meeting.close()


def _failed_on(rank: int, error: AsyncCkptError) -> SaveFailedError:
    return SaveFailedError(
        f"the save failed on rank {rank}: {error}",
        code=str(error.facts().get("code") or error.wire_code),
        rank=rank,
        detail=str(error)[:1000],
    )
