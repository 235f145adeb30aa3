"""All ranks of a framework's training stop after the same step once one of them is told to: as a manager's do."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterable
from types import TracebackType

import torch.distributed as dist

from asyncckpt.config import RankInfo
from asyncckpt.errors import SaveFailedError
from asyncckpt.exchange import Exchange
from asyncckpt.managing.preemption import Preemption
from asyncckpt.managing.rendezvous import Rendezvous
from asyncckpt.process_group import find_exchange

GRACE_S = 25.0
"""How long ranks wait for each other once they are told to stop; as `CheckpointManager` has it."""

_NUMBERS = itertools.count()
"""Of the trainings of several ranks in this process; all ranks make them in the same order."""


class ToldToStop:
    """See the module. Around one training, in the main thread; the ranks are those of the default process group.

    No step has a collective, and none waits for another rank, before one is told.

    Args:
        signals: What tells.

    Raises:
        SignalHandlerError: This is not the main thread.
        ConfigError: No signal.
    """

    def __init__(self, signals: signal.Signals | int | Iterable[int]) -> None:
        is_group = dist.is_available() and dist.is_initialized()
        rank = RankInfo(dist.get_rank(), dist.get_world_size()) if is_group else RankInfo(0, 1)

        def find() -> Exchange:
            found = find_exchange(rank)
            if found is None:
                raise SaveFailedError("the process group has no store to agree in", code="exchange")
            return found

        self._together = Rendezvous(rank, find, f"training-{next(_NUMBERS) if rank.world_size > 1 else 0}")
        self._preemption = Preemption(signals, GRACE_S, rank.world_size, self._together.hurry)
        self._together.prepare(self._preemption.stopping, None)

    def at(self, step: int) -> bool:
        """Whether the ranks stop after `step`, or have stopped before it. Every rank asks, after every step.

        Raises:
            PlanTimeoutError: A rank was told to stop, and others do not say how far they are.

        Blocks: as `CheckpointManager.reached_preemption`.
        """
        self._together.start()
        return self._preemption.at(step)

    def __enter__(self) -> ToldToStop:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self._together.close()
        finally:
            self._preemption.close()
