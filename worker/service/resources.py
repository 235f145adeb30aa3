"""Watches, slots and sockets for the core: the implementation of `core.actions.Resources`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

from asyncckpt.basics.failpoints import reach
from asyncckpt.errors import AsyncCkptError, SaveFailedError, from_wire, to_wire
from asyncckpt.memory.headroom import check_memory
from asyncckpt.memory.slot import SlotError
from asyncckpt_worker.core.actions import LeaderAddress, Listener
from asyncckpt_worker.io.job_runner import JobRunner
from asyncckpt_worker.io.node_sockets import NodeSockets
from asyncckpt_worker.io.slot_store import SlotStore
from asyncckpt_worker.service.process_watch import Liveness

T = TypeVar("T")


class LocalResources:
    """The `Resources` of this process.

    Args:
        slots, liveness, node_sockets: Slots, watches and sockets of this process.
        jobs: Faults in the pages of new slots.
        bug: Logs where an unexpected error was met, and the error.
    """

    def __init__(
        self,
        slots: SlotStore,
        liveness: Liveness,
        node_sockets: NodeSockets,
        jobs: JobRunner,
        bug: Callable[[str, Exception], None],
    ) -> None:
        self._slots, self._liveness, self._node_sockets, self._jobs, self._bug = (
            slots,
            liveness,
            node_sockets,
            jobs,
            bug,
        )

    def watch(self, session: str, pid: int, pid_start: int) -> bool:
        """See `Resources`."""
        try:
            return self._liveness.watch(session, pid, pid_start)
        except Exception as error:
            raise self._internal("a watch", error) from error

    def create_slot(self, number: int, nbytes: int, *, populate: bool) -> tuple[int, bytes]:
        """See `Resources`."""
        try:
            reach("worker: slot asked for")
            check_memory(nbytes, self._slots.promised_nbytes())
            memory = self._slots.create(number, nbytes)
        except AsyncCkptError:
            raise
        except (OSError, SlotError) as error:
            text = f"the worker cannot create a slot of {nbytes:,} bytes: {error}"
            raise SaveFailedError(text, code="slot", detail=str(error)) from error
        except Exception as error:
            raise self._internal("a slot", error) from error
        if populate:  # without it, only the first use of the slot is slower
            try:
                self._jobs.populate(number)
            except Exception as error:
                self._bug("population of slots", error)
        return memory.fd, memory.token

    def listen(self, port: int, secret: str) -> Listener:
        """See `Resources`."""

        def listening() -> Listener:
            reach("peers: listening")
            address, public, key = self._node_sockets.listen(port, secret)
            return Listener(address=address, public=public, secret=key)

        return self._socket("listening", listening)

    def connect(self, leader: LeaderAddress) -> None:
        """See `Resources`."""

        def connecting() -> None:
            reach("peers: connecting")
            self._node_sockets.connect(leader)

        self._socket("connecting", connecting)

    def disconnect(self, run: str) -> None:
        """See `Resources`."""
        with contextlib.suppress(OSError):  # the socket is closed all the same
            self._node_sockets.disconnect(run)

    def _socket(self, what: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except AsyncCkptError:
            raise
        except OSError as error:
            raise from_wire(to_wire(error)) from error
        except Exception as error:
            raise self._internal(what, error) from error

    def _internal(self, what: str, error: Exception) -> SaveFailedError:
        self._bug(what, error)
        return SaveFailedError(f"the worker failed: {error!r}", code="internal")
