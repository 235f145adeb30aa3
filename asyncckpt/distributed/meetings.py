"""Meetings: exchanges in which every rank gives bytes and gets those of all ranks.

The ranks of a checkpointer meet in its first save, in a save after a structure has changed, and in calls that are
documented as collectives. Meetings use torch.distributed (`process_group`), or boards of the worker
(`client.worker_board`) if there is no process group.
"""

from __future__ import annotations

import hashlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgpack

from asyncckpt.basics.failpoints import reach
from asyncckpt.errors import (
    AsyncCkptError,
    PlanTimeoutError,
    RanksDisagreeError,
    SaveFailedError,
    from_wire,
    to_wire,
)

SAVE = "save()"
LOG_WAIT_AFTER_S = 1.0
POLL_S = 0.01
"""How often a rank checks whether the others have come. Chosen: far below what a first save takes."""

_log = logging.getLogger("asyncckpt")


class Meeting(ABC):
    """One meeting. Every rank calls `gather` equally often, or `refuse` once."""

    @abstractmethod
    def gather(self, payload: bytes, deadline: float) -> list[bytes]:
        """All-gather: give this rank's `payload`, and return those of all ranks, by rank.

        Args:
            payload: This rank's bytes.
            deadline: `time.monotonic()` after which to give up.

        Raises:
            PlanTimeoutError: Some ranks have not come; `missing_ranks` names them.
            SaveFailedError: A rank has refused (code "withdrawn", its rank and reason), or the exchange broke down.

        Blocks: until all ranks have come, at most until `deadline`.
        """

    @abstractmethod
    def refuse(self, reason: str) -> None:
        """Tell the others that this rank does not come. Does not wait for them."""

    @abstractmethod
    def close(self) -> None:
        """End the connections of this meeting."""


class Exchange(ABC):
    """Makes meetings: the means by which ranks exchange bytes."""

    @abstractmethod
    def meet_next(self, series: str, call: str, about: Save | None = None) -> Meeting:
        """Return the next meeting of a series, as this rank counts.

        Args:
            series: Name of the series. Ranks meet each other if they call this equally often with the same name.
            call: The function that the ranks must call to come to it, for error messages.
            about: The save that the meeting belongs to, if any.

        Raises:
            SaveFailedError: The exchange can no longer be reached.
        """

    @abstractmethod
    def announce_absence(self, sequence: int, reason: str) -> None:
        """Tell ranks that wait for this one in save `sequence` or an earlier one, of any path, not to wait."""


def path_digest(path: str) -> str:
    """Return a short digest of a path, by which ranks with the same path find each other."""
    return hashlib.sha256(path.encode(errors="surrogateescape")).hexdigest()[:24]


class Save(NamedTuple):
    """A save that ranks meet in: its path, by which they find each other, and its sequence."""

    path: str
    sequence: int

    @property
    def series(self) -> str:
        """Name of the series of meetings for saves to this path."""
        return f"save/{path_digest(self.path)}"


def all_or_none(
    gather: Callable[[bytes], list[bytes]],
    work: Callable[[], Any],
    failed: Callable[[int, AsyncCkptError], Exception],
    secondary: type[Exception] | tuple[()] = (),
) -> list[Any]:
    """Do `work` on every rank, and return the results of all ranks; fail on all ranks if it fails on one.

    Args:
        gather: All-gathers bytes: takes this rank's, returns those of all ranks, by rank.
        work: This rank's part; its result must be packable as msgpack.
        failed: Makes this rank's error from another rank's number and error.
        secondary: Errors that only report the failure of another rank: an error of another type is raised first.

    Raises:
        Exception: The error of `work` on this rank; else `failed` for the first rank on which `work` failed.
        AsyncCkptError: From `gather`.
    """
    failure: Exception | None = None
    try:
        payload = msgpack.packb({"value": work()}, unicode_errors="surrogateescape")
        reach("ranks: telling")
    except Exception as error:
        failure, payload = error, encode_failure(error, secondary)
    try:
        payloads = gather(payload)
    except AsyncCkptError as lost:
        names_the_cause = isinstance(failure, secondary) and getattr(lost, "rank", None) is not None
        if failure is None or names_the_cause:
            raise
        raise failure from None
    if failure is not None and not isinstance(failure, secondary):
        raise failure
    found = [msgpack.unpackb(data, strict_map_key=False, unicode_errors="surrogateescape") for data in payloads]
    errors = sorted((other["told"], rank) for rank, other in enumerate(found) if "error" in other)
    if errors:
        rank = errors[0][1]
        raise failed(rank, from_wire(found[rank]["error"])) from failure
    return [other["value"] for other in found]


def encode_failure(error: BaseException, secondary: type[Exception] | tuple[()] = ()) -> bytes:
    """Return the payload for the `gather` of `all_or_none` of a rank whose `work` has failed."""
    wire = {"error": dict(to_wire(error)), "told": isinstance(error, secondary)}
    return bytes(msgpack.packb(wire, unicode_errors="surrogateescape"))


def ranks_disagree(what: str, first: tuple[int, Any], second: tuple[int, Any], path: str) -> RanksDisagreeError:
    """Return the error of two ranks that save with different values of `what`: (rank, value) of each, by rank."""
    return RanksDisagreeError(
        f"rank {second[0]} saves with {what} {second[1]!r}, rank {first[0]} with {first[1]!r}; every rank must save "
        "the same step to the same path, with the same settings",
        detail=what,
        ranks=[first[0], second[0]],
        path=path,
    )


def refused(rank: int, reason: str) -> SaveFailedError:
    """Return the error of a meeting that a rank has refused."""
    return SaveFailedError(
        f"rank {rank} does not take part in this save: {reason}", code="withdrawn", rank=rank, detail=reason
    )


class WaitTimer:
    """Polls, logs and times out while a rank waits for the others.

    Args:
        call: The function that the others must call, for messages.
        deadline: `time.monotonic()` after which to give up.
        first: This is the meeting's first round. Ranks that are missing in a later round have come, and are too slow
            or have ended.
    """

    def __init__(self, call: str, deadline: float, *, first: bool) -> None:
        self._call, self._deadline, self._first = call, deadline, first
        self._began = time.monotonic()
        self._is_logged = False

    @property
    def waited_s(self) -> float:
        """Seconds since the wait began."""
        return time.monotonic() - self._began

    def wait(self, missing: Callable[[], Sequence[int]]) -> None:
        """Sleep `POLL_S`; log once after `LOG_WAIT_AFTER_S`.

        Args:
            missing: Returns the ranks that have not come.

        Raises:
            PlanTimeoutError: The deadline is over.
        """
        if time.monotonic() >= self._deadline:
            raise self.too_late(list(missing()))
        if not self._is_logged and self.waited_s > LOG_WAIT_AFTER_S:
            self._is_logged = True
            left = self._deadline - time.monotonic()
            _log.warning("waiting up to %.0f s for ranks %s to call %s", left, list(missing())[:20], self._call)
        time.sleep(POLL_S)

    def too_late(self, missing: list[int]) -> PlanTimeoutError:
        """Return the error for ranks that did not come by the deadline."""
        shown = f"{missing[:20]}" + (f" and {len(missing) - 20} more" if len(missing) > 20 else "")
        if self._first:
            text = f"which have not called {self._call}. Every rank must call it"
            if self._call == SAVE:
                text += (
                    ", since each writes its own part; where only rank 0 is to save, give it a checkpointer of its own "
                    "with rank_info=RankInfo(0, 1)"
                )
        else:
            text = (
                "which joined the meeting but did not finish it: they are too slow, or have ended; if they are slow, "
                "raise plan_timeout_s"
            )
        return PlanTimeoutError(
            f"waited {self.waited_s:.1f} s for ranks {shown}, {text}", missing_ranks=missing, timeout_s=self.waited_s
        )
