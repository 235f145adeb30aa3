"""How the ranks tell each other what each of them has: meetings, where every rank gives bytes and gets everybody's.

Only a checkpointer's first save, and what a user asks for as a collective, meets. There are two places:
torch.distributed (`process_group`), and a board of the worker (`board`) where no process group has been initialised.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

from asyncckpt.errors import PlanTimeoutError, SaveFailedError

POLL_S = 0.01
"""How often a rank looks whether the others have come. Chosen: far below what a first save takes."""


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
    def meet(self, name: str) -> Meeting:
        """Return the meeting called `name`, which is the same on all ranks and used once."""


def refused(rank: int, reason: str) -> SaveFailedError:
    """Return the error of a meeting that a rank does not come to."""
    return SaveFailedError(
        f"rank {rank} does not take part in this save: {reason}", code="withdrawn", rank=rank, detail=reason
    )


def too_late(missing: Sequence[int], since: float, *, first: bool = True) -> PlanTimeoutError:
    """Return the error of a meeting that began at `since` and that `missing` ranks have not come to.

    `first`: this was its first round; ranks that miss a later one have come, and are too slow or gone.
    """
    waited = time.monotonic() - since
    shown = f"{list(missing[:20])}" + (f" and {len(missing) - 20} more" if len(missing) > 20 else "")
    if not first:
        return PlanTimeoutError(
            f"waited {waited:.1f} s for ranks {shown}, which have begun to agree on the save and not gone on: they are "
            "too slow, or gone. plan_timeout_s may be raised",
            missing_ranks=list(missing),
            timeout_s=waited,
        )
    return PlanTimeoutError(
        f"waited {waited:.1f} s for ranks {shown}, which have not called save(). Every rank must call it, since each "
        "writes its own part; where only rank 0 is to save, pass rank_info=RankInfo(0, 1) there",
        missing_ranks=list(missing),
        timeout_s=waited,
    )
