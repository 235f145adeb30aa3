"""Links the workers of a run's ranks, one per node, in the first save. The leader, rank 0's worker, commits.

If all ranks have one worker, nothing is linked. Else the leader listens, and the other nodes' workers connect to it.
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
"""How long a worker tries to reach the leader in the first save. Chosen: some retries of a lost packet."""

Build = Callable[[int], messages.Message]
"""Builds a request from its id."""

_log = logging.getLogger("asyncckpt")


class WorkerAccess:
    """How a rank reaches its worker. This base class is for a rank without a worker."""

    def instance(self) -> str:
        """Return the worker's instance id, different for each worker; "" if none can be reached."""
        return ""

    def call(self, build: Build, timeout_s: float) -> messages.Message:
        """Send a request, and return the reply.

        Raises:
            WorkerUnavailableError: No answer in time.
            AsyncCkptError: The error with which the worker refused.
        """
        raise WorkerUnavailableError("there is no worker")


class WorkerLinks:
    """The links between the workers of one run. Call `link` in the training thread, `relink` in any.

    Args:
        rank: Rank of this process.
        worker: Worker of this process.
        timeout_s: Timeout of requests that the worker answers without another worker.
    """

    def __init__(self, rank: RankInfo, worker: WorkerAccess, timeout_s: float) -> None:
        self._rank, self._worker, self._timeout_s = rank, worker, timeout_s
        self._build_link: Callable[[], Build] | None = None
        self._server_public = self._address = ""
        self._attempts = itertools.count(1)
        self._keys: dict[str, tuple[str, str]] = {}

    @property
    def has_several_workers(self) -> bool:
        """Whether the run's ranks have several workers."""
        return self._build_link is not None

    @property
    def is_leader(self) -> bool:
        """Whether the workers of other nodes connect to this rank's worker."""
        return self.has_several_workers and self._rank.rank == 0

    def start_options(self) -> tuple[str, ...]:
        """Return options for a worker that replaces this rank's: the host at which the other nodes look for it."""
        host = self._address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        return ("--advertise", host) if host else ()

    def instance(self) -> str:
        """Return the instance id of this rank's worker; "" if none can be reached."""
        return self._worker.instance()

    def link(self, run_id: str, workers: Sequence[str], gather: Callable[[bytes], list[bytes]]) -> None:
        """Link the workers, if there are several; every rank of the run calls it.

        Args:
            run_id: ID of the run.
            workers: `instance()` of each rank.
            gather: All-gathers bytes: takes this rank's, returns all ranks'.

        Raises:
            EndpointError: The leader cannot listen.
            WorkerUnavailableError: A rank has no worker, or the leader cannot be reached from this node.
            RanksDisagreeError: What rank 0 sends cannot be decoded.
            AsyncCkptError: From `gather`.

        Blocks: until the leader has answered, at most `FOLLOW_TIMEOUT_S` + `timeout_s`.
        """
        reach("ranks: exchanged")
        mine = workers[self._rank.rank]
        several = len({w for w in workers if w}) > 1
        if not several:
            return
        if "" in workers:
            without = workers.index("")
            raise WorkerUnavailableError(
                f"rank {without} has no worker; every node needs one, which each rank of it can reach", detail="none"
            )
        found = gather(self._lead(run_id) if self._rank.rank == 0 else b"")
        if mine != workers[0]:
            self._follow(run_id, found[0])
        else:
            self._address = _decode_leader(found[0])[0]

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
        self._build_link = lambda: again
        return bytes(msgpack.packb([leading.address, leading.server_public, client_public, client_secret]))

    def _follow(self, run_id: str, told: bytes) -> None:
        try:
            address, server_public, client_public, client_secret = _decode_leader(told)
            make = partial(_follow, run_id, address, server_public, client_public, client_secret)
            make(0, 0)
        except RanksDisagreeError:
            raise
        except (ValueError, TypeError, AsyncCkptError) as error:
            raise _invalid_leader(error) from error
        self._build_link = lambda: partial(make, next(self._attempts))
        reach("ranks: following")
        self._worker.call(self._build_link(), FOLLOW_TIMEOUT_S + self._timeout_s)

    def relink(self, send: Callable[[Build], Future[messages.Message] | None]) -> None:
        """Link the worker of a new session, which may be another worker. Does not wait."""
        if self._build_link is None:
            return
        reach("ranks: linking again")
        asked = send(self._build_link())
        if asked is not None:
            asked.add_done_callback(self._on_relinked)

    def _on_relinked(self, done: Future[messages.Message]) -> None:
        error = done.exception()
        if error is not None:
            _log.warning("this node's worker cannot be linked with those of the other nodes: %s", error)
            return
        reply = done.result()
        if isinstance(reply, messages.Leading) and reply.server_public != self._server_public:
            _log.warning(
                "rank 0's worker already leads another run with other keys, so the workers of the other nodes cannot "
                "connect to it: no save will succeed until the job is restarted"
            )


def _decode_leader(data: bytes) -> tuple[Any, Any, Any, Any]:
    """Return what rank 0 sends about the leader: address, server's key, client's key and secret."""
    try:
        address, *keys = msgpack.unpackb(data)
        if not isinstance(address, str) or len(keys) != 3:
            raise ValueError(f"expected an address and 3 keys, got a {type(address).__name__} and {len(keys)} keys")
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise _invalid_leader(error) from error
    return address, keys[0], keys[1], keys[2]


def _invalid_leader(error: Exception) -> RanksDisagreeError:
    return RanksDisagreeError(f"what rank 0 sent about its worker cannot be decoded: {error!r}", detail="worker")


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
