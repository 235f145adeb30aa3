"""Messages of a load over a process group of the user's, which must work after the load, even if the load fails."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from asyncckpt.errors import SaveFailedError


class UserGroup:
    """Implements `loading.shared.broadcast.Transport` over the group's own backend (gloo, NCCL, ...).

    The group's own timeout bounds every call; the `deadline` arguments are ignored. A rank ends the wait of another one
    only by a message: it must not close the user's connections, and NCCL cannot cancel a receive.

    Args:
        group: The process group; None: this rank is alone.

    Attributes:
        rank, world_size: Rank in that group, and its size.
        device: Device of its messages.
    """

    def __init__(self, group: Any | None) -> None:
        self._group = group
        self.rank, self.world_size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        self.device = torch.device("cpu") if group is None else _device_of(group)

    def gather(self, payload: bytes, deadline: float) -> list[bytes]:
        """As `Transport.gather`.

        Raises:
            SaveFailedError: The connection to another rank is lost, or one is too late.
        """
        if self._group is None:
            return [payload]
        found: list[Any] = [None] * self.world_size
        with _lost():
            dist.all_gather_object(found, payload, group=self._group)
        return found

    def broadcast(
        self, message: torch.Tensor, ranks: Sequence[int], root: int, deadline: float
    ) -> Callable[[], None] | None:
        """As `Transport.broadcast`: one collective for the whole group, else one send per rank.

        Receivers must pass a `message` on `device`.

        Raises:
            SaveFailedError: The connection to another rank is lost, or one is too late.
        """
        to_all = len(ranks) == self.world_size
        group, root_globally = self._group, dist.get_global_rank(self._group, root)  # type: ignore[arg-type]
        with _lost():
            if self.rank == root:
                there = message.to(self.device)
                if to_all:
                    works = [dist.broadcast(there, root_globally, group=group, async_op=True)]
                else:
                    others = [dist.get_global_rank(group, rank) for rank in ranks if rank != root]  # type: ignore[arg-type]
                    works = [dist.isend(there, rank, group=group) for rank in others]
                return lambda: _wait(works, there)
            if to_all:
                dist.broadcast(message, root_globally, group=group)
            else:
                dist.recv(message, root_globally, group=group)
        return None

    def abort(self, reason: str) -> None:
        """Do nothing: the messages that the other ranks wait for report the failure."""


def _wait(works: Sequence[Any], sent: torch.Tensor) -> None:
    """Wait until every send has ended. `sent` is the tensor that is sent: the argument keeps it alive until then."""
    with _lost():
        for work in works:
            work.wait()


@contextlib.contextmanager
def _lost() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # DistError, its subclasses, and errors of gloo
        text = f"{type(error).__name__}: {error}"[:1000]
        raise SaveFailedError(f"the ranks lost each other: {text}", code="exchange", detail=text) from error


def _device_of(group: Any) -> torch.device:
    kinds = [device.type for device in group._device_types]
    if "cpu" in kinds or not kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())
