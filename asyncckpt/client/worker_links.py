"""The workers of a run's ranks: one on each node, linked in the first save so that the one beside rank 0 commits.

Only where the ranks have several workers is anything said of it; then rank 0's worker listens, and the others connect.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import msgpack

from asyncckpt.basics.failpoints import reach
from asyncckpt.config import RankInfo
from asyncckpt.errors import AsyncCkptError, RanksDisagreeError, WorkerUnavailableError
from asyncckpt.protocol import messages
from asyncckpt.protocol.dealer import curve_keys

FOLLOW_TIMEOUT_S = 15.0
"""How long a worker tries to reach the one beside rank 0 in the first save. Chosen: some retries of a lost packet."""

Build = Callable[[int], messages.Message]
_log = logging.getLogger("asyncckpt")


class Worker:
    """What a rank without a worker has: none."""

    def instance(self) -> str:
        """Return what tells the worker from others; "" while none can be reached."""
        return ""

    def call(self, build: Build, timeout_s: float) -> messages.Message:
        """Send a request, and return the reply.

        Raises:
            WorkerUnavailableError: No answer in time.
            AsyncCkptError: What the worker refused with.
        """
        raise WorkerUnavailableError("there is no worker")


class Links:
    """See the module. `settle` in the training thread; `say_again` anywhere.

    Args:
        rank: Of this process.
        worker: Of this process.
        timeout_s: For requests that the worker answers by itself.

    """

    def __init__(self, rank: RankInfo, worker: Worker, timeout_s: float) -> None:
        self._rank, self._worker, self._timeout_s = rank, worker, timeout_s
        self._again: Callable[[], Build] | None = None
        self._server_public = self._address = ""
        self._attempts = itertools.count(1)
        self._keys: dict[str, tuple[str, str]] = {}

    @property
    def several(self) -> bool:
        """Whether the run's ranks have several workers."""
        return self._again is not None

    @property
    def leads(self) -> bool:
        """Whether the workers of other nodes wait for this rank to have one."""
        return self.several and self._rank.rank == 0

    def start_options(self) -> tuple[str, ...]:
        """Return how to start a worker in the place of this rank's: where the other nodes look for it."""
        host = self._address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        return ("--advertise", host) if host else ()

    def instance(self) -> str:
        """Return what tells this rank's worker from others; "" while none can be reached."""
        return self._worker.instance()

    def settle(self, run_id: str, workers: Sequence[str], gather: Callable[[bytes], list[bytes]]) -> None:
        """Link the workers, if there are several; every rank of the run calls it.

        Args:
            run_id: Of all ranks.
            workers: The ranks' `instance()`s.
            gather: Exchanges bytes: this rank's for everybody's.

        Raises:
            EndpointError: Rank 0's worker cannot listen.
            WorkerUnavailableError: A rank has no worker, or the one beside rank 0 cannot be reached from here.
            RanksDisagreeError: What rank 0 says makes no sense.
            AsyncCkptError: From `gather`.

        Blocks: until the worker beside rank 0 has answered, at most `FOLLOW_TIMEOUT_S` and `timeout_s`.
        """
        reach("ranks: exchanged")
        mine = workers[self._rank.rank]
        several = len({w for w in workers if w}) > 1
        if not several:
            return
        if "" in workers:
            nobody = workers.index("")
            raise WorkerUnavailableError(f"rank {nobody} has no worker; there must be one on every node", detail="none")
        found = gather(self._lead(run_id) if self._rank.rank == 0 else b"")
        if mine != workers[0]:
            self._follow(run_id, found[0])
        else:
            self._address = _told(found[0])[0]

    def _lead(self, run_id: str) -> bytes:
        if run_id not in self._keys:
            self._keys = {run_id: curve_keys("rank 0")}
        client_public, client_secret = self._keys[run_id]
        build = partial(_lead, run_id, client_public, 0, "")
        reach("ranks: leading")
        leading = self._worker.call(build, self._timeout_s)
        assert isinstance(leading, messages.Leading)
        port = int(leading.address.rpartition(":")[2])
        self._server_public = leading.server_public
        again = partial(_lead, run_id, client_public, port, leading.server_secret)
        self._again = lambda: again
        return bytes(msgpack.packb([leading.address, leading.server_public, client_public, client_secret]))

    def _follow(self, run_id: str, told: bytes) -> None:
        try:
            address, server_public, client_public, client_secret = _told(told)
            make = partial(_follow, run_id, address, server_public, client_public, client_secret)
            make(0, 0)
        except RanksDisagreeError:
            raise
        except (ValueError, TypeError, AsyncCkptError) as error:
            raise _nonsense(error) from error
        self._again = lambda: partial(make, next(self._attempts))
        reach("ranks: following")
        self._worker.call(self._again(), FOLLOW_TIMEOUT_S + self._timeout_s)

    def say_again(self, send: Callable[[Build], Future[messages.Message] | None]) -> None:
        """There is another session, perhaps with another worker: it must be linked too. Does not wait."""
        if self._again is None:
            return
        reach("ranks: linking again")
        asked = send(self._again())
        if asked is not None:
            asked.add_done_callback(self._linked_again)

    def _linked_again(self, done: Future[messages.Message]) -> None:
        error = done.exception()
        if error is not None:
            _log.warning("this worker cannot be linked with those of the other nodes: %s", error)
            return
        reply = done.result()
        if isinstance(reply, messages.Leading) and reply.server_public != self._server_public:
            _log.warning(
                "this worker leads another run with other keys, and the workers of the other nodes cannot find it: no "
                "save will succeed until the job is started again"
            )


def _told(data: bytes) -> tuple[Any, Any, Any, Any]:
    """Return what rank 0 says of its worker: address, server's key, client's key and secret."""
    try:
        address, *keys = msgpack.unpackb(data)
        if not isinstance(address, str) or len(keys) != 3:
            raise ValueError(f"an address of type {type(address).__name__}, {len(keys)} keys")
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise _nonsense(error) from error
    return address, keys[0], keys[1], keys[2]


def _nonsense(error: Exception) -> RanksDisagreeError:
    return RanksDisagreeError(f"what rank 0 says of its worker makes no sense: {error!r}", detail="worker")


def _lead(run_id: str, client_public: str, port: int, secret: str, number: int) -> messages.Message:
    return messages.Lead(id=number, run=run_id, port=port, server_secret=secret, client_public=client_public)


def _follow(
    run_id: str, address: Any, server_public: Any, client_public: Any, client_secret: Any, attempt: int, number: int
) -> messages.Message:
    return messages.Follow(
        id=number,
        run=run_id,
        address=address,
        server_public=server_public,
        client_public=client_public,
        client_secret=client_secret,
        attempt=attempt,
        timeout_s=FOLLOW_TIMEOUT_S,
    )
