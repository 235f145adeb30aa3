"""How the ranks tell each other what each of them has: meetings, where every rank gives bytes and gets everybody's.

A checkpointer's first save meets, one of those after a structure has changed, and what a user asks for as a collective.
There are two places: torch.distributed (`process_group`), and a board of the worker (`client.worker_board`) where there
is no process group.
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
SAY_AFTER_S = 1.0
POLL_S = 0.01
"""How often a rank looks whether the others have come. Chosen: far below what a first save takes."""

_log = logging.getLogger("asyncckpt")


class Meeting(ABC):
    """One meeting, by name. Every rank calls `gather` equally often, or `refuse` once."""

    @abstractmethod
    def gather(self, payload: bytes, deadline: float) -> list[bytes]:
        """Give `payload`, and get every rank's in the order of the ranks.

        Args:
            payload: This rank's.
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
    """Where meetings take place."""

    @abstractmethod
    def meet_next(self, series: str, call: str, about: Save | None = None) -> Meeting:
        """Return the next meeting of a series, as this rank counts.

        Args:
            series: Its name. Ranks meet if their series have the same name and they have come equally often.
            call: What the ranks must call to come to it, for messages.
            about: The save that it is about, if it is about one.

        Raises:
            SaveFailedError: The place is gone.
        """

    @abstractmethod
    def say_absent(self, sequence: int, reason: str) -> None:
        """Tell ranks that wait for this one in save `sequence`, or an earlier one, wherever that is, not to wait."""


def named_by(path: str) -> str:
    """Return a short name that ranks have in common which have the path of a directory in common."""
    return hashlib.sha256(path.encode(errors="surrogateescape")).hexdigest()[:24]


class Save(NamedTuple):
    """What ranks that meet for a save have in common: its path, by which they find each other, and its number."""

    path: str
    sequence: int

    @property
    def series(self) -> str:
        """Name of the meetings for saves to this path."""
        return f"save/{named_by(self.path)}"


def all_or_none(
    gather: Callable[[bytes], list[bytes]],
    work: Callable[[], Any],
    failed: Callable[[int, AsyncCkptError], Exception],
    told: type[Exception] | tuple[()] = (),
) -> list[Any]:
    """Do `work` on every rank, and return what it returned on each; it counts for all ranks or for none.

    Args:
        gather: Exchanges bytes: this rank's for everybody's, in the order of the ranks.
        work: This rank's part; what it returns must pack as msgpack.
        failed: Makes the error for this rank of another rank's.
        told: Errors by which a rank says that another one has failed: that one's own error goes first.

    Raises:
        Exception: What `work` raised here; else what `failed` makes of the first rank at which it raised.
        AsyncCkptError: From `gather`.
    """
    failure: Exception | None = None
    try:
        said = msgpack.packb({"value": work()}, unicode_errors="surrogateescape")
        reach("ranks: telling")
    except Exception as error:
        failure, said = error, failed_part(error, told)
    try:
        everybody = gather(said)
    except AsyncCkptError as lost:
        named = isinstance(failure, told) and getattr(lost, "rank", None) is not None
        if failure is None or named:
            raise
        raise failure from None
    if failure is not None and not isinstance(failure, told):
        raise failure
    found = [msgpack.unpackb(data, strict_map_key=False, unicode_errors="surrogateescape") for data in everybody]
    errors = sorted((other["told"], rank) for rank, other in enumerate(found) if "error" in other)
    if errors:
        rank = errors[0][1]
        raise failed(rank, from_wire(found[rank]["error"])) from failure
    return [other["value"] for other in found]


def failed_part(error: BaseException, told: type[Exception] | tuple[()] = ()) -> bytes:
    """Return what a rank gives to the `gather` of an `all_or_none` in which its own work has failed."""
    wire = {"error": dict(to_wire(error)), "told": isinstance(error, told)}
    return bytes(msgpack.packb(wire, unicode_errors="surrogateescape"))


def ranks_disagree(what: str, first: tuple[int, Any], second: tuple[int, Any], path: str) -> RanksDisagreeError:
    """Return the error of ranks that save something else: (rank, what it saves with) of two, by rank."""
    return RanksDisagreeError(
        f"rank {second[0]} saves with {what} {second[1]!r}, rank {first[0]} with {first[1]!r}; every rank must save "
        "the same step to the same path, with the same settings",
        detail=what,
        ranks=[first[0], second[0]],
        path=path,
    )


def refused(rank: int, reason: str) -> SaveFailedError:
    """Return the error of a meeting that a rank does not come to."""
    return SaveFailedError(
        f"rank {rank} does not take part in this save: {reason}", code="withdrawn", rank=rank, detail=reason
    )


class Patience:
    """How long a rank has waited for the others, and what it says about that.

    Args:
        call: What the others must call.
        deadline: `time.monotonic()` after which to give up.
        first: It is the meeting's first round; ranks that miss a later one have come, and are too slow or gone.
    """

    def __init__(self, call: str, deadline: float, *, first: bool) -> None:
        self._call, self._deadline, self._first = call, deadline, first
        self._began = time.monotonic()
        self._said = False

    @property
    def waited_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._began

    def wait(self, missing: Callable[[], Sequence[int]]) -> None:
        """Wait a moment.

        Args:
            missing: Returns the ranks that have not come.

        Raises:
            PlanTimeoutError: The deadline is over.
        """
        if time.monotonic() >= self._deadline:
            raise self.too_late(list(missing()))
        if not self._said and self.waited_s > SAY_AFTER_S:
            self._said = True
            left = self._deadline - time.monotonic()
            _log.warning("waiting up to %.0f s for ranks %s to call %s", left, list(missing())[:20], self._call)
        time.sleep(POLL_S)

    def too_late(self, missing: list[int]) -> PlanTimeoutError:
        """Return the error for ranks that have been waited for in vain."""
        shown = f"{missing[:20]}" + (f" and {len(missing) - 20} more" if len(missing) > 20 else "")
        if self._first:
            text = f"which have not called {self._call}. Every rank must call it"
            if self._call == SAVE:
                text += (
                    ", since each writes its own part; where only rank 0 is to save, give it a checkpointer of its own "
                    "with rank_info=RankInfo(0, 1)"
                )
        else:
            text = "which have begun to agree and not gone on: they are too slow, or gone. plan_timeout_s may be raised"
        return PlanTimeoutError(
            f"waited {self.waited_s:.1f} s for ranks {shown}, {text}", missing_ranks=missing, timeout_s=self.waited_s
        )
