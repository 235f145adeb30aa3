"""`WorkerSession`: the connection of a `StorageWriter` to its worker. `WorkerInfo`, `SaveTask`: what ranks exchange."""

from __future__ import annotations

import os
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asyncckpt import __version__
from asyncckpt.basics import process_lifecycle
from asyncckpt.client.connection import CLOSE_TIMEOUT_S
from asyncckpt.client.save_outcomes import Run, SaveOutcomes
from asyncckpt.client.worker_client import WorkerClient
from asyncckpt.client.worker_links import Build, WorkerAccess, WorkerLinks
from asyncckpt.config import CheckpointerConfig, RankInfo
from asyncckpt.format.names import SaveId
from asyncckpt.protocol import messages
from asyncckpt.protocol.endpoint import default_endpoint, socket_path


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerInfo:
    """What a rank tells the coordinator with its plan.

    Attributes:
        rank: The rank.
        instance: ID of its worker; "": it has none.
        why: Why it has no worker.
    """

    rank: int
    instance: str
    why: str

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive_worker_info, (self.rank, self.instance, self.why)


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveTask:
    """A rank's part in one save.

    Attributes:
        save_id: ID of the save.
        rank: The rank in the save; if `by_worker`, the coordinator is rank 0.
        world_size: Number of ranks.
        by_worker: Whether the workers write.
        workers: IDs of all ranks' workers, if there are several workers.
        told: The message of rank 0 with which the other workers connect to its worker, if there are several.
    """

    save_id: SaveId
    rank: int
    world_size: int
    by_worker: bool = False
    workers: tuple[str, ...] = ()
    told: bytes = b""

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, (str(self.save_id), self.rank, self.world_size, self.by_worker, self.workers, self.told)


class _ReceivedByThread(threading.local):
    """What this thread has unpickled since `forget_received`: torch's collectives pass plans as pickles."""

    def __init__(self) -> None:
        self.task: SaveTask | None = None
        self.worker_infos: dict[int, WorkerInfo] = {}


_received = _ReceivedByThread()


def _receive(
    save_id: str, rank: int, world_size: int, by_worker: bool, workers: tuple[str, ...], told: bytes
) -> SaveTask:
    _received.task = task = SaveTask(
        save_id=SaveId.parse(save_id),
        rank=rank,
        world_size=world_size,
        by_worker=by_worker,
        workers=workers,
        told=told,
    )
    return task


def _receive_worker_info(rank: int, instance: str, why: str) -> WorkerInfo:
    worker_info = WorkerInfo(rank=rank, instance=instance, why=why)
    record_worker_info(worker_info)
    return worker_info


def record_worker_info(worker_info: WorkerInfo) -> None:
    """Record a `WorkerInfo` as received by this thread."""
    _received.worker_infos[worker_info.rank] = worker_info


def forget_received() -> None:
    """Forget what this thread has received; called when a save begins."""
    _received.task = None
    _received.worker_infos = {}


def received_task() -> SaveTask | None:
    """Return the task that this thread has received since `forget_received`."""
    return _received.task


def received_worker_infos() -> dict[int, WorkerInfo]:
    """Return the descriptions of workers, by rank, that this thread has received since `forget_received`."""
    return _received.worker_infos


POLL_S = 0.01
"""How often to check whether an earlier save has ended. Chosen, not measured: a commit takes longer."""


class DcpRun(Run):
    """The ranks of stock saves. They exchange everything through the process group, so this run never has meetings."""

    alone = False
    """Also for a single rank: a failed save is withdrawn at once, not when the next save begins."""

    knows_run = True
    must_meet = False

    def __init__(self, rank: RankInfo, links: WorkerLinks) -> None:
        self.rank, self.links = rank, links
        self.run_id = ""
        self.outcomes = SaveOutcomes()

    def aligned(self, own: int) -> int:
        """Return `own`: the coordinator gives all ranks the same sequence number."""
        return own

    def refuse(self, sequence: int, path: str, reason: str) -> None:
        """Do nothing: other ranks wait for this one only in the process group."""

    def differs(self, fqn: str) -> None:
        """Do nothing: replicas are not compared."""


class _SessionWorker(WorkerAccess):
    """Access to the worker through `client`, which is set after this is created."""

    client: WorkerClient

    def instance(self) -> str:
        return self.client.connect().worker.instance

    def call(self, build: Build, timeout_s: float) -> messages.Message:
        return self.client.call(build, timeout_s)


class WorkerSession:
    """Connection of a `StorageWriter` to its worker, and the run of its saves.

    One thread at a time may save; `close` and `abandon` may be called from any thread.

    Args:
        endpoint: The endpoint that the user gave, where a worker must answer. None: this user's worker of this job,
            which is started if there is none.

    Raises:
        ConfigError: The endpoint is malformed.
    """

    def __init__(self, endpoint: str | None) -> None:
        self._named = endpoint is not None
        self.endpoint = endpoint or default_endpoint(
            os.environ, uid=os.geteuid(), package=__version__, interpreter=sys.prefix
        )
        socket_path(self.endpoint)
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._client: WorkerClient | None = None
        self._run: DcpRun | None = None
        self._linked: tuple[object, ...] = ()
        self._told = b""
        self._saves = 0
        process_lifecycle.register(self)

    @property
    def is_inherited(self) -> bool:
        """Whether this object was inherited by a forked child, which must not use it."""
        return os.getpid() != self._pid

    def instance(self, rank: RankInfo, config: CheckpointerConfig) -> str:
        """Connect to the worker; return its ID.

        Args:
            rank: Rank of this process, as far as it is known; `join` corrects it.
            config: Settings.

        Raises:
            WorkerUnavailableError: There is no worker, and none could be started.
            CheckpointerClosedError: The session was closed.

        Blocks: up to `worker_start_timeout_s`.
        """
        with self._lock:
            found = self._client
            if found is None or found.config != config:
                found = self._open(rank, config)
        return found.connect(start=not self._named).worker.instance

    def lead(
        self, instances: Sequence[str], config: CheckpointerConfig, epoch: int, ranks: Sequence[int]
    ) -> list[SaveTask]:
        """Return the tasks of the ranks of a new save. Called on the coordinator.

        Args:
            instances: IDs of the workers, by rank in the save; this process is rank 0.
            config: Settings.
            epoch: Epoch of the save.
            ranks: The ranks in the save, in the order of the returned tasks.

        Raises:
            AsyncCkptError: The workers of several nodes cannot be connected.

        Blocks: up to `worker_timeout_s` for the workers.
        """
        world_size = len(instances)
        run = self._as(RankInfo(0, world_size), config)
        several = len(set(instances)) > 1
        if not run.run_id:
            run.run_id = secrets.token_hex(6)
        if several and self._linked != (run.run_id, *instances):
            told: list[bytes] = []

            def gather(mine: bytes) -> list[bytes]:
                told.append(mine)
                return told

            run.links.link(run.run_id, instances, gather)
            self._linked, self._told = (run.run_id, *instances), told[0]
        save_id = SaveId(epoch, self._saves, run.run_id)
        self._saves += 1
        return [
            SaveTask(
                save_id=save_id,
                rank=rank,
                world_size=world_size,
                by_worker=True,
                workers=tuple(instances) if several else (),
                told=self._told if several else b"",
            )
            for rank in ranks
        ]

    def join(self, task: SaveTask, config: CheckpointerConfig) -> WorkerClient:
        """Register this process at its worker as the rank of the task; return the client of the worker.

        Raises:
            WorkerUnavailableError: It is another worker than the one that the coordinator knows, or cannot be connected
                to the others.
            AsyncCkptError: See `instance` and `lead`. The save has ended on all ranks.

        Blocks: up to `worker_timeout_s` for the workers.
        """
        try:
            return self._join(task, config)
        except BaseException as error:
            if self._client is not None:
                self._client.withdraw(task.save_id, f"its worker cannot be used: {error!r}")
            raise

    def _join(self, task: SaveTask, config: CheckpointerConfig) -> WorkerClient:
        run = self._as(RankInfo(task.rank, task.world_size), config)
        assert self._client is not None
        if run.run_id != task.save_id.run_id:
            run.run_id = task.save_id.run_id
            self._client.handled.clear()  # sequences of another run
        self._client.connect(start=not self._named)
        if task.workers and task.rank and self._linked != (run.run_id, *task.workers):
            run.links.link(run.run_id, task.workers, lambda mine: [task.told])
            self._linked = (run.run_id, *task.workers)
        return self._client

    def _as(self, rank: RankInfo, config: CheckpointerConfig) -> DcpRun:
        with self._lock:
            if self._run is None or self._client is None or self._run.rank != rank or self._client.config != config:
                self._open(rank, config)
            assert self._run is not None
            return self._run

    def _open(self, rank: RankInfo, config: CheckpointerConfig) -> WorkerClient:
        if self._client is not None:
            self._client.close()
        worker = _SessionWorker()
        self._run = DcpRun(rank, WorkerLinks(rank, worker, config.worker_timeout_s))
        self._linked, self._told, self._saves = (), b"", 0
        worker.client = self._client = WorkerClient(
            config, self._run, endpoint=self.endpoint, named=self._named, package=__version__
        )
        return self._client

    def withdraw(self, save_id: SaveId, reason: str) -> None:
        """End a save on all ranks, unless this rank has sealed its slot. Does not wait."""
        client = None if self.is_inherited else self._client
        if client is not None and save_id.sequence not in client.handled:
            client.withdraw(save_id, reason)

    def await_end(self, save_id: SaveId, timeout_s: float) -> None:
        """Wait until the worker has reported the end of a save; at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while self._client is not None and self._client.is_pending(save_id) and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def await_withdrawals(self, timeout_s: float) -> None:
        """Wait until the worker has ended the saves from which this rank has withdrawn; at most `timeout_s`.

        If the worker is lost, this returns: the next one hears of the withdrawals when this rank connects to it.
        """
        deadline = time.monotonic() + timeout_s
        while self._client is not None and self._client.awaits_withdrawals and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def leave(self, timeout_s: float, *, at_exit: bool) -> None:
        """Close the connection. `at_exit`: the interpreter is ending."""
        if self._client is not None and not self.is_inherited:
            self._client.close(timeout_s, at_exit=at_exit)

    def close(self) -> None:
        """Disconnect. The worker frees the memory when the saves in it have ended. Idempotent.

        Blocks: a few seconds at most, if the worker does not answer.
        """
        process_lifecycle.unregister(self)
        self.leave(CLOSE_TIMEOUT_S, at_exit=False)

    def abandon(self) -> None:
        """Disconnect without waiting; for destructors."""
        if self._client is not None and not self.is_inherited:
            self._client.abandon()

    def close_inherited_fds(self) -> None:
        """In a forked child, close the inherited file descriptors."""
        if self._client is not None:
            self._client.close_inherited_fds()
