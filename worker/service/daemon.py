"""The daemon: ties the brain to socket, clock, processes, memory and jobs.

One control loop turns messages, results, deaths and time into events, and performs the actions that the brain answers
with. It does no file I/O: whatever may wait for a disk is a job.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from asyncckpt import __version__
from asyncckpt.errors import AsyncCkptError, SaveFailedError, to_wire
from asyncckpt.protocol.messages import PROTOCOL_VERSION, Refused, StatusReport
from asyncckpt.storage.files import Files
from asyncckpt_worker.bandwidth import files_for
from asyncckpt_worker.brain_config import brain_config
from asyncckpt_worker.config import WorkerConfig
from asyncckpt_worker.core import actions as ac
from asyncckpt_worker.core import events as ev
from asyncckpt_worker.core.machine import Brain
from asyncckpt_worker.core.model import Slot
from asyncckpt_worker.core.status import with_progress
from asyncckpt_worker.io.job_runner import JobRunner, Lanes, gave_up
from asyncckpt_worker.io.node_sockets import NodeSockets
from asyncckpt_worker.io.slot_store import SlotStore
from asyncckpt_worker.io.writer import Writer
from asyncckpt_worker.service import log
from asyncckpt_worker.service.memory_pressure import MemoryPressure
from asyncckpt_worker.service.metrics import Metrics
from asyncckpt_worker.service.observers import Observers
from asyncckpt_worker.service.process_watch import Keeper, Liveness
from asyncckpt_worker.service.resources import LocalResources
from asyncckpt_worker.service.server import Server

MAX_WAIT_S = 1.0
"""The loop turns at least once in this time: for deadlines that the brain does not announce."""

CLOSE_TIMEOUT_S = 5.0
"""How long an exit waits for jobs that were given up."""

POLL_FAILED_S = 0.05
"""How long the loop sleeps where it cannot wait for its sockets, so that it does not spin. Chosen, not measured."""

T = TypeVar("T")


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
            self._observers = Observers(config, os.environ, self.metrics.count)
        except AsyncCkptError:
            self._server.close()
            raise
        self._slots = SlotStore()
        self._liveness = liveness or Liveness()
        self._keeper = Keeper(config.while_pid)
        self._memory_pressure = MemoryPressure()
        self._writer = Writer(files or files_for(config.max_write_bandwidth), self._slots, config.roots, config.threads)
        self._lanes = Lanes(self._writer.threads)
        self._jobs = JobRunner(self._lanes, self._slots, self._writer, self.metrics.count)
        self._started = time.monotonic()
        self._exit: ac.Exit | None = None
        self._closed = False
        self._failing: dict[str, str] = {}
        self._peers = NodeSockets(config.advertise, config.port, self._run_of_key, self.metrics.count)
        resources = LocalResources(self._slots, self._liveness, self._peers, self._jobs, self._bug)
        self.brain = Brain(brain_config(config), time.monotonic(), resources)

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> bool:
        """Serve until drained, idle or out of time; then close.

        Returns:
            Whether every save that was submitted has ended.
        """
        log.write("info", f"worker {os.getpid()} of asyncckpt {__version__} listens on {self.config.endpoint}")
        try:
            self._tick()
            self._contained("observers", lambda: self._observers.ready(self.config.endpoint), None)
            while self._exit is None:
                self._turn()
        finally:
            closed = self.close()
        log.write("info", f"worker {os.getpid()} exits: {self._exit.reason}")
        return self._exit.complete and closed

    def stop(self, *, immediately: bool = False) -> None:
        """Drain, then return from `run`; `immediately`: without waiting for saves. Safe in a signal handler."""
        self._lanes.post(ev.StopRequested(now=time.monotonic(), immediately=immediately))

    def _turn(self) -> None:
        """Wait, then handle what has happened.

        IMPORTANT: every step is contained. One that fails (no descriptor, no thread, a bug) costs what it was doing;
        the steps after it still run, and the worker keeps every trainer's snapshots.
        """
        if not self._contained("poll", self._poll, False):
            time.sleep(POLL_FAILED_S)
        # Messages before deaths: what a trainer said with its last breath makes better error messages.
        self._contained("messages", lambda: self._handle_all(self._received()), None)
        self._contained("workers", lambda: self._handle_all(self._relayed()), None)
        self._contained("results", lambda: self._handle_all(self._lanes.results()), None)
        self._contained("deaths", lambda: self._handle_all(self._died()), None)
        self._tick()
        self._contained("observers", self._tell_observers, None)

    def _contained(self, step: str, call: Callable[[], T], otherwise: T) -> T:
        """Return what `call` returns, or `otherwise` where it raises.

        Each failure is counted; it is logged when the step begins to fail, or fails in another way.
        """
        try:
            found = call()
        except Exception as error:
            self.metrics.count("internal_errors")
            if self._failing.get(step) != repr(error):
                self._failing[step] = repr(error)
                log.write("error", f"a step of the control loop failed: {step}: {error!r}", error=error)
            return otherwise
        self._failing.pop(step, None)
        return found

    def _poll(self) -> bool:
        fds = [self._lanes.fd, *self._liveness.fds(), *self._keeper.fds()]
        self._server.poll(fds, self._wait_s(), self._peers.sockets())
        return True

    def _received(self) -> Iterable[ev.Event]:
        for peer, message in self._server.receive():
            yield ev.Received(now=time.monotonic(), peer=peer, message=message)

    def _relayed(self) -> Iterable[ev.Event]:
        for run, route, said in self._peers.receive():
            yield ev.Relayed(now=time.monotonic(), run=run, route=route, message=said)

    def _died(self) -> Iterable[ev.Event]:
        for session in self._liveness.dead():
            yield ev.Died(now=time.monotonic(), session=session)

    def _tick(self) -> None:
        short = self._contained("memory", self._is_memory_short, False)
        kept = self._contained("keeper", self._keeper.lives, True)
        self._handle(ev.Tick(now=time.monotonic(), kept=kept, memory_short=short))

    def _is_memory_short(self) -> bool:
        return self.brain.keeping.any and self._memory_pressure.is_there(time.monotonic())

    def _tell_observers(self) -> None:
        drains = self.brain.tables.draining
        self._observers.turned(time.monotonic(), time.time(), lambda: self._report(self.brain.report()), drains=drains)

    def _wait_s(self) -> float:
        waits = [
            MAX_WAIT_S,
            self._observers.wait_s,
            self._liveness.poll_s or MAX_WAIT_S,
            self._keeper.poll_s or MAX_WAIT_S,
        ]
        if self.brain.wakes_at is not None:
            waits.append(self.brain.wakes_at - time.monotonic())
        return max(0.0, min(waits))

    def _handle_all(self, events: Iterable[ev.Event]) -> None:
        for event in events:
            self._handle(event)

    def _handle(self, event: ev.Event) -> None:
        self._contained(type(event).__name__, lambda: self._decide_and_perform(event), None)

    def _decide_and_perform(self, event: ev.Event) -> None:
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
            self._observers.saw(self.brain.moves)
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
            answer = Refused(id=getattr(event.message, "id", 0), error=to_wire(refused))
            self._contained("answer", lambda: self._server.send(event.peer, answer), None)
        save_id = _concerned(event, self.brain.tables.slots)
        if save_id is None or isinstance(event, ev.Broken):
            return []
        return [_broken(save_id, error)]

    def _run_of_key(self, client_public: str) -> str | None:
        return self.brain.run_of_key(client_public)

    def _bug(self, where: str, error: Exception) -> None:
        self.metrics.count("internal_errors")
        log.write("error", f"our own bug, at {where}: {error!r}", error=error)

    def close(self) -> bool:
        """Close everything; later calls do nothing.

        Blocks: for jobs that were given up, at most `CLOSE_TIMEOUT_S`.

        Returns:
            Whether nothing hangs.
        """
        if self._closed:
            return True
        self._closed = True
        reason = self._exit.reason if self._exit else "closed"
        self._contained("observers", lambda: self._observers.close(reason), None)
        parts = (self._server, self._peers, self._liveness, self._keeper, self._slots)
        for part in parts:
            self._contained(f"closing {type(part).__name__}", part.close, None)
        return self._contained("closing threads", lambda: self._lanes.close(CLOSE_TIMEOUT_S), False)

    # ---- actions ----------------------------------------------------------------------------------------------------

    def _perform(self, action: ac.Action) -> ev.Event | None:
        match action:
            case ac.Send():
                self._server.send(action.peer, action.message)
            case ac.Log():
                self._log(action)
            case ac.Fault():
                self._bug(f"save {action.save_id}" if action.save_id else "a timer", action.error)
                return _broken(action.save_id, action.error) if action.save_id else None
            case ac.SendStatus():
                self._server.send(action.peer, StatusReport(id=action.id, report=self._report(action.report)))
            case ac.Unwatch():
                self._liveness.unwatch(action.session)
            case ac.Relay():
                self._peers.send(action.run, action.route, action.message)
            case ac.Exit():
                self._exit = action
            case _:
                self._jobs.submit(action)
        return None

    def _log(self, action: ac.Log) -> None:
        if action.count is not None:
            self.metrics.count(action.count)
        log.write(action.level, action.text, save_id=action.save_id, session=action.session, facts=dict(action.facts))

    def _report(self, brains: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "package": __version__,
            "protocol": PROTOCOL_VERSION,
            "pid": os.getpid(),
            "endpoint": self.config.endpoint,
            "uptime_s": time.monotonic() - self._started,
            "pidfd": self._liveness.uses_pidfd,
            "roots": list(self.config.roots),
            "counters": {**self.metrics.counters(), "events_dropped": self._observers.events_dropped},
            "metrics_port": self._observers.metrics_port,
            "process": dict(self.metrics.process()),
            **brains,
            "ranks": with_progress(brains["ranks"], self._writer.written(), self._slots.staged_nbytes),
        }


def _broken(save_id: str, error: Exception) -> ev.Broken:
    return ev.Broken(now=time.monotonic(), save_id=save_id, reason=f"a bug in the worker, {error!r}: see its log")


def _concerned(event: ev.Event, slots: Mapping[int, Slot]) -> str | None:
    """Return the id of the save that an event is about, so that a bug that it brings to light ends that one only."""
    match event:
        case ev.Prepared() | ev.Written():
            return event.key[0]
        case ev.Published() | ev.Removed() | ev.Broken():
            return event.save_id
        case ev.SlotRead() if event.request is not None:
            return event.request.save_id
        case ev.SlotRead() if (slot := slots.get(event.slot)) is not None and slot.key is not None:
            return slot.key[0]
        case ev.Received():
            return getattr(event.message, "save_id", None)
    return None
