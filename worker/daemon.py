"""The daemon: ties the brain to socket, clock, processes, memory and jobs.

One control loop turns messages, results, deaths and time into events, and performs the actions that the brain answers
with. It does no file I/O: whatever may wait for a disk is a job.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from asyncckpt import __version__
from asyncckpt.errors import AsyncCkptError, EndpointError, SaveFailedError, WorkerUnavailableError, to_wire
from asyncckpt.failpoints import reach
from asyncckpt.memory.headroom import check_memory
from asyncckpt.memory.slot import SlotError
from asyncckpt.protocol.endpoint import socket_path
from asyncckpt.protocol.messages import PROTOCOL_VERSION, Refused, StatusReport
from asyncckpt.storage.files import Files
from asyncckpt.storage.pace_file import DevicePaces
from asyncckpt_worker import actions as ac
from asyncckpt_worker import events as ev
from asyncckpt_worker import logs
from asyncckpt_worker.bandwidth import files_for
from asyncckpt_worker.blame import concerned
from asyncckpt_worker.brain_config import brain_config
from asyncckpt_worker.config import WorkerConfig
from asyncckpt_worker.huge_pages import HugePages
from asyncckpt_worker.jobs import Jobs, gave_up
from asyncckpt_worker.keeper import Keeper
from asyncckpt_worker.liveness import Liveness
from asyncckpt_worker.metrics import Metrics
from asyncckpt_worker.moves import with_progress
from asyncckpt_worker.peers import Peers
from asyncckpt_worker.scheduler import Scheduler
from asyncckpt_worker.server import Server
from asyncckpt_worker.shortage import Shortage, slot_refused
from asyncckpt_worker.slots import SlotStore
from asyncckpt_worker.state import Brain
from asyncckpt_worker.witness import Witness
from asyncckpt_worker.writer import WRITE_PACES, Writer

MAX_WAIT_S = 1.0
"""The loop turns at least once in this time: for deadlines that the brain does not announce."""

CLOSE_TIMEOUT_S = 5.0
"""How long an exit waits for jobs that were given up."""


class Daemon:
    """One worker. `run` in one thread, `stop` from any; both also serve tests, in process.

    Args:
        config: Settings.
        files: The storage seam.
        claimed: What `claim.claim` returned, when the caller has taken the lock already.
        liveness: For tests.

    Raises:
        EndpointError: The endpoint is taken or unsafe. Nothing is left open.
    """

    def __init__(
        self,
        config: WorkerConfig,
        files: Files | None = None,
        *,
        claimed: tuple[str, int] | None = None,
        liveness: Liveness | None = None,
    ) -> None:
        self.config = config
        self.metrics = Metrics()
        self._server = Server(config.endpoint, self.metrics.count, claimed)
        try:
            self._witness = Witness(config, os.environ, self.metrics.count)
        except AsyncCkptError:
            self._server.close()
            raise
        self._scheduler = Scheduler()
        self._slots = SlotStore()
        self._liveness = liveness or Liveness()
        self._keeper = Keeper(config.while_pid)
        self._shortage = Shortage()
        directory = os.path.dirname(socket_path(config.endpoint))
        paces = None if config.max_write_bandwidth else DevicePaces(directory, "write", WRITE_PACES)
        self._writer = Writer(
            files or files_for(config.max_write_bandwidth), self._slots, config.roots, config.threads, paces
        )
        self._jobs = Jobs(self._scheduler, self._slots, self._writer, self.metrics)
        self.huge_pages = HugePages(self._scheduler, self._slots)
        self._started = time.monotonic()
        self._exit: ac.Exit | None = None
        self._closed = False
        self.brain = Brain(brain_config(config), time.monotonic())
        self._peers = Peers(config.advertise, config.port, self.brain.run_of_key, self.metrics.count)

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> bool:
        """Serve until drained, idle or out of time; then close.

        Returns:
            Whether every save that was submitted has ended.
        """
        logs.write("info", f"worker {os.getpid()} of asyncckpt {__version__} listens on {self.config.endpoint}")
        try:
            self._tick()
            self._witness.ready(self.config.endpoint)
            while self._exit is None:
                self._turn()
        finally:
            closed = self.close()
        logs.write("info", f"worker {os.getpid()} exits: {self._exit.reason}")
        return self._exit.complete and closed

    def stop(self, *, immediately: bool = False) -> None:
        """Drain, then return from `run`; `immediately`: without waiting for saves. Safe in a signal handler."""
        self._scheduler.post(ev.StopRequested(now=time.monotonic(), immediately=immediately))

    def _turn(self) -> None:
        fds = [self._scheduler.fd, *self._liveness.fds(), *self._keeper.fds()]
        self._server.poll(fds, self._wait_s(), self._peers.sockets())
        # Messages before deaths: what a trainer said with its last breath makes better error messages.
        for peer, message in self._server.receive():
            self._handle(ev.Received(now=time.monotonic(), peer=peer, message=message))
        for run, route, said in self._peers.receive():
            self._handle(ev.Relayed(now=time.monotonic(), run=run, route=route, message=said))
        for result in self._scheduler.results():
            self._handle(result)
        for session in self._liveness.dead():
            self._handle(ev.Died(now=time.monotonic(), session=session))
        self._tick()
        self.huge_pages.turn(time.monotonic(), self.brain.tables)
        drains = self.brain.tables.draining
        self._witness.turned(time.monotonic(), time.time(), lambda: self._report(self.brain.report()), drains=drains)

    def _tick(self) -> None:
        short = self.brain.keeping.any and self._shortage.is_there(time.monotonic())
        self._handle(ev.Tick(now=time.monotonic(), kept=self._keeper.lives(), memory_short=short))

    def _wait_s(self) -> float:
        waits = [
            MAX_WAIT_S,
            self._witness.wait_s,
            self._liveness.poll_s or MAX_WAIT_S,
            self._keeper.poll_s or MAX_WAIT_S,
        ]
        if self.brain.wakes_at is not None:
            waits.append(self.brain.wakes_at - time.monotonic())
        return max(0.0, min(waits))

    def _handle(self, event: ev.Event) -> None:
        """Let the brain decide and perform what it says; answers that come at once are further events.

        IMPORTANT: nothing is raised. A bug that one event brings to light must not cost every trainer its snapshots.
        """
        todo = deque([event])
        while todo:
            current = todo.popleft()
            try:
                actions = self.brain.handle(current)
            except Exception as error:
                actions = []
                todo.extend(self._failed_at(current, error))
            self._witness.saw(self.brain.moves)
            for action in actions:
                try:
                    answer = self._perform(action)
                except Exception as error:
                    self._bug(type(action).__name__, error)
                    answer = gave_up(action, error)
                if answer is not None:
                    todo.append(answer)

    def _failed_at(self, event: ev.Event, error: Exception) -> list[ev.Event]:
        """Log a bug of the brain's, answer whoever waits, and return the end of the save that is concerned."""
        self._bug(type(event).__name__, error)
        if isinstance(event, ev.StopRequested) and event.immediately:
            self._exit = ac.Exit(complete=False, reason="an internal error")
        if isinstance(event, ev.Received):
            refused = SaveFailedError(f"the worker failed: {error!r}; see its log", code="internal", detail=repr(error))
            self._server.send(event.peer, Refused(id=getattr(event.message, "id", 0), error=to_wire(refused)))
        save_id = concerned(event, self.brain.tables.slots)
        if save_id is None or isinstance(event, ev.Broken):
            return []
        return [ev.Broken(now=time.monotonic(), save_id=save_id, reason=f"a bug in the worker, {error!r}: see its log")]

    def _bug(self, where: str, error: Exception) -> None:
        self.metrics.count("internal_errors")
        logs.write("error", f"our own bug, at {where}: {error!r}", exc_info=True)

    def close(self) -> bool:
        """Close everything; later calls do nothing.

        Blocks: for jobs that were given up, at most `CLOSE_TIMEOUT_S`.

        Returns:
            Whether nothing hangs.
        """
        if self._closed:
            return True
        self._closed = True
        self._witness.close(self._exit.reason if self._exit else "closed")
        self._server.close()
        self._peers.close()
        self._liveness.close()
        self._keeper.close()
        self.huge_pages.close()
        self._slots.close()
        self._writer.close()
        return self._scheduler.close(CLOSE_TIMEOUT_S)

    # ---- actions ----------------------------------------------------------------------------------------------------

    def _perform(self, action: ac.Action) -> ev.Event | None:
        match action:
            case ac.Send():
                self._server.send(action.peer, action.message)
            case ac.Log():
                self._log(action)
            case ac.SendStatus():
                self._server.send(action.peer, StatusReport(id=action.id, report=self._report(action.report)))
            case ac.Watch():
                alive = self._liveness.watch(action.session, action.pid, action.pid_start)
                return ev.Watched(now=time.monotonic(), session=action.session, alive=alive)
            case ac.Unwatch():
                self._liveness.unwatch(action.session)
            case ac.CreateSlot():
                return self._create_slot(action)
            case ac.Relay():
                self._peers.send(action.run, action.route, action.message)
            case ac.Listen():
                return self._listen(action)
            case ac.Connect():
                return self._connect(action)
            case ac.Disconnect():
                with contextlib.suppress(OSError):  # it is closed in any case
                    self._peers.disconnect(action.run)
            case ac.Exit():
                self._exit = action
            case _:
                self._jobs.submit(action)
        return None

    def _log(self, action: ac.Log) -> None:
        if action.count is not None:
            self.metrics.count(action.count)
        logs.write(action.level, action.text, save_id=action.save_id, session=action.session, facts=dict(action.facts))

    def _create_slot(self, action: ac.CreateSlot) -> ev.SlotCreated:
        try:
            reach("worker: slot asked for")
            check_memory(action.nbytes, self._slots.promised_nbytes())
            memory = self._slots.create(action.slot, action.nbytes)
        except (AsyncCkptError, OSError, SlotError) as error:
            wrapped = error if isinstance(error, AsyncCkptError) else slot_refused(error, action.nbytes)
            return ev.SlotCreated(now=time.monotonic(), slot=action.slot, error=to_wire(wrapped))
        if action.populate:
            self._jobs.populate(action.slot)
        return ev.SlotCreated(now=time.monotonic(), slot=action.slot, fd=memory.fd, token=memory.token)

    def _listen(self, action: ac.Listen) -> ev.Listening:
        try:
            reach("peers: listening")
            address, public, secret = self._peers.listen(action.port, action.secret)
        except (EndpointError, OSError) as error:
            return ev.Listening(now=time.monotonic(), error=to_wire(error))
        return ev.Listening(now=time.monotonic(), address=address, public=public, secret=secret)

    def _connect(self, action: ac.Connect) -> ev.Unconnected | None:
        try:
            reach("peers: connecting")
            self._peers.connect(action)
        except (WorkerUnavailableError, OSError) as error:
            return ev.Unconnected(now=time.monotonic(), run=action.run, error=to_wire(error))
        return None

    def _report(self, brains: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "package": __version__,
            "protocol": PROTOCOL_VERSION,
            "pid": os.getpid(),
            "endpoint": self.config.endpoint,
            "uptime_s": time.monotonic() - self._started,
            "pidfd": self._liveness.uses_pidfd,
            "roots": list(self.config.roots),
            "counters": {**self.metrics.counters(), "events_dropped": self._witness.events_dropped},
            "metrics_port": self._witness.metrics_port,
            "process": dict(self.metrics.process()),
            **brains,
            "ranks": with_progress(brains["ranks"], self._writer.written(), self._slots.staged_nbytes),
        }
