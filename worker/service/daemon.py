"""The daemon: connects the core with socket, clock, processes, memory and jobs.

One control loop turns messages, results of jobs, deaths of processes and time into events, and performs the core's
actions. It does no file I/O: whatever may wait for a disk is a job.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

import zmq

from asyncckpt import __version__
from asyncckpt.errors import AsyncCkptError, SaveFailedError, to_wire
from asyncckpt.protocol.identity import start_ticks
from asyncckpt.protocol.messages import PROTOCOL_VERSION, Refused, StatusReport
from asyncckpt.storage.files import Files
from asyncckpt_worker.bandwidth import RateLimiter, files_for
from asyncckpt_worker.config import WorkerConfig, core_config
from asyncckpt_worker.core import actions as ac
from asyncckpt_worker.core import events as ev
from asyncckpt_worker.core.machine import Core
from asyncckpt_worker.core.model import Slot
from asyncckpt_worker.core.status import with_progress
from asyncckpt_worker.io.job_runner import JobRunner, failed_result
from asyncckpt_worker.io.lanes import Lanes
from asyncckpt_worker.io.node_sockets import NodeSockets
from asyncckpt_worker.io.slot_store import SlotStore
from asyncckpt_worker.io.writer import Writer
from asyncckpt_worker.mirrors.jobs import Mirrorer
from asyncckpt_worker.mirrors.schedule import with_copied
from asyncckpt_worker.service import log
from asyncckpt_worker.service.memory_pressure import MemoryPressure
from asyncckpt_worker.service.metrics import Metrics
from asyncckpt_worker.service.observers import Observers
from asyncckpt_worker.service.process_watch import Liveness
from asyncckpt_worker.service.resources import LocalResources
from asyncckpt_worker.service.server import Server

MAX_WAIT_S = 1.0
"""Maximum time between two Ticks, for deadlines that `wakes_at` does not include."""

CLOSE_TIMEOUT_S = 5.0
"""How long an exit waits for jobs that are still running."""

OWNER = "owner"
"""The name under which the owner, the process `while_pid`, is watched, like a session."""

POLL_FAILED_S = 0.05
"""How long the loop sleeps if it cannot poll its sockets, so that it does not spin. Chosen, not measured."""


class Daemon:
    """One worker. `run` is called in one thread, `stop` from any; tests run it in their own process.

    Args:
        config: Settings.
        files: File calls; by default those of `config`.
        claimed: Result of `endpoint_lock.claim`, if the caller has the lock already.
        liveness: Process watch, for tests.

    Raises:
        EndpointError: Another worker has the endpoint, or its directory is not safe. Nothing is left open.
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
        ticks = start_ticks(config.while_pid) if config.while_pid else None
        self._has_owner = ticks is not None and self._liveness.watch(OWNER, config.while_pid, ticks)
        self._is_memory_short = False
        self._next_tick_at = 0.0
        self._memory_pressure = MemoryPressure()
        self._writer = Writer(files or files_for(config.max_write_bandwidth), self._slots, config.roots, config.threads)
        self._mirrorer = Mirrorer(files or Files(), config.roots, RateLimiter(config.max_mirror_bandwidth).wait)
        self._lanes = Lanes(self._writer.threads)
        self._jobs = JobRunner(self._lanes, self._slots, self._writer, self._mirrorer, self.metrics.count)
        self._started = time.monotonic()
        self._exit: ac.Exit | None = None
        self._closed = False
        self._failing: dict[str, str] = {}
        self._node_sockets = NodeSockets(config.advertise, config.port, self._run_of_key, self.metrics.count)
        resources = LocalResources(self._slots, self._liveness, self._node_sockets, self._jobs, self._bug)
        self.core = Core(core_config(config), time.monotonic(), resources)
        self._steps: dict[str, Callable[[], object]] = {
            "messages": self._take_messages,
            "workers": self._take_node_messages,
            "results": self._take_results,
            "deaths": self._take_deaths,
            "memory": self._check_memory,
            "tick": self._tick,
            "observers": self._update_observers,
        }
        """Step by its name, in the order in which a turn takes them.

        IMPORTANT: `deaths` and `memory` before `tick`, which tells the core what they found."""

        self._due: Collection[str] = ()
        """The steps that the current turn of the loop takes."""

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> bool:
        """Serve until the worker is drained or idle, or the drain timeout has passed; then close.

        Returns:
            Whether every submitted save has ended.
        """
        log.write("info", f"worker {os.getpid()} of asyncckpt {__version__} listens on {self.config.endpoint}")
        try:
            self._do("tick", self._tick)
            self._do("observers", self._observers.ready, self.config.endpoint)
            self._do("observers", self._update_observers)
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
        """Wait, then take the steps whose sources are ready; all of them if a Tick is due or the wait failed."""
        self._due = self._steps  # `_poll` leaves fewer
        if not self._do("poll", self._poll):
            time.sleep(POLL_FAILED_S)
        for step, call in self._steps.items():
            if step in self._due:
                self._do(step, call)

    def _do(self, step: str, call: Callable[..., object], *args: object) -> bool:
        """Take a step. A failure is counted, and logged unless the step failed in the same way last time.

        IMPORTANT: an exception (no descriptor, no thread, a bug) must not leave this method: the later steps still run,
        and the worker keeps all snapshots.

        Returns:
            Whether it succeeded.
        """
        try:
            call(*args)
        except Exception as error:
            self.metrics.count("internal_errors")
            if self._failing.get(step) != repr(error):
                self._failing[step] = repr(error)
                log.write("error", f"a step of the control loop failed: {step}: {error!r}", error=error)
            return False
        self._failing.pop(step, None)
        return True

    def _poll(self) -> None:
        """Wait, and choose the steps of this turn: those whose sources are ready; at a Tick all of them.

        What no descriptor reports, such as the death of a process without a pidfd, is noticed at the next Tick.
        """
        # IMPORTANT: a deadline stays until its Tick; that it passes while events are handled must not lose it.
        if (wakes_at := self.core.wakes_at) is not None:
            self._next_tick_at = min(self._next_tick_at, wakes_at)
        if (poll_s := self._liveness.poll_s) is not None:
            self._next_tick_at = min(self._next_tick_at, time.monotonic() + poll_s)
        sources: dict[int | zmq.Socket[bytes], str] = {self._lanes.fd: "results"}
        sources |= dict.fromkeys(self._liveness.fds, "deaths")
        sources |= dict.fromkeys(self._node_sockets.sockets(), "workers")
        ready = self._server.poll("messages", sources, self._next_tick_at - time.monotonic())
        if time.monotonic() < self._next_tick_at:
            self._due = ready

    def _take_messages(self) -> None:
        for peer, message in self._server.receive():
            self._handle(ev.Received(now=time.monotonic(), peer=peer, message=message))

    def _take_node_messages(self) -> None:
        for run, route, message in self._node_sockets.receive():
            self._handle(ev.Relayed(now=time.monotonic(), run=run, route=route, message=message))

    def _take_results(self) -> None:
        for event in self._lanes.results():
            self._handle(event)

    def _take_deaths(self) -> None:
        dead = self._liveness.dead()
        if dead:  # their last messages first, up to `BATCH`: they may have the reason of a failure
            self._do("messages", self._take_messages)
        for session in dead:
            if session == OWNER:
                self._has_owner = False
                self._next_tick_at = time.monotonic()  # so that a Tick tells the core
                text = f"process {self.config.while_pid}, which this worker was started for, has ended"
                log.write("info", text)
            else:
                self._handle(ev.Died(now=time.monotonic(), session=session))

    def _check_memory(self) -> None:
        self._is_memory_short = False
        self._is_memory_short = self.core.snapshot_registry.has_kept and self._memory_pressure.check(time.monotonic())

    def _tick(self) -> None:
        now = time.monotonic()
        self._next_tick_at = now + min(MAX_WAIT_S, self._observers.wait_s)
        self._handle(ev.Tick(now=now, has_owner=self._has_owner, memory_short=self._is_memory_short))

    def _update_observers(self) -> None:
        def report() -> dict[str, Any]:
            return self._report(self.core.report(has_all_mirrors=True))

        self._observers.update(time.monotonic(), time.time(), report)

    def _handle(self, event: ev.Event) -> None:
        """Pass an event to the core, and perform its actions.

        IMPORTANT: nothing is raised. A bug at one event must not lose the snapshots of all trainers.
        """
        self._do(type(event).__name__, self._decide_and_perform, event)

    def _decide_and_perform(self, event: ev.Event) -> None:
        todo = deque([event])
        while todo:
            current = todo.popleft()
            try:
                actions = self.core.handle(current)
            except Exception as error:
                actions = []
                todo.extend(self._failed_at(current, error))
            if self.core.phase_changes:
                self._observers.handle_phase_changes(self.core.phase_changes)
            for action in actions:
                try:
                    answer = self._perform(action)
                except Exception as error:
                    self._bug(type(action).__name__, error)
                    answer = failed_result(action, error)
                if answer is not None:
                    todo.append(answer)

    def _failed_at(self, event: ev.Event, error: Exception) -> list[ev.Event]:
        """Log an internal error of the core, answer the waiting client, and return the event that ends the save."""
        self._bug(type(event).__name__, error)
        if isinstance(event, ev.StopRequested) and event.immediately:
            self._exit = ac.Exit(complete=False, reason="an internal error")
        if isinstance(event, ev.Received):
            refused = SaveFailedError(f"the worker failed: {error!r}; see its log", code="internal", detail=repr(error))
            answer = Refused(id=getattr(event.message, "id", 0), error=to_wire(refused))
            self._do("answer", self._server.send, event.peer, answer)
        save_id = _save_of(event, self.core.tables.slots)
        if save_id is None or isinstance(event, ev.InternalFault):
            return []
        return [_internal_fault(save_id, error)]

    def _run_of_key(self, client_public: str) -> str | None:
        return self.core.run_of_key(client_public)

    def _bug(self, where: str, error: Exception) -> None:
        self.metrics.count("internal_errors")
        log.write("error", f"a bug in the worker, at {where}: {error!r}", error=error)

    def close(self) -> bool:
        """Close everything. Idempotent.

        Blocks: for running jobs, at most `CLOSE_TIMEOUT_S`.

        Returns:
            Whether all threads have ended.
        """
        if self._closed:
            return True
        self._closed = True
        reason = self._exit.reason if self._exit else "closed"
        self._do("closing observers", self._observers.close, reason)
        for part in (self._server, self._node_sockets, self._liveness, self._slots):
            self._do(f"closing {type(part).__name__}", part.close)
        ended: list[bool] = []
        self._do("closing threads", lambda: ended.append(self._lanes.close(CLOSE_TIMEOUT_S)))
        return ended == [True]

    # ---- actions ----------------------------------------------------------------------------------------------------

    def _perform(self, action: ac.Action) -> ev.Event | None:
        match action:
            case ac.Send():
                self._server.send(action.peer, action.message)
            case ac.Log():
                self._log(action)
            case ac.LogFault():
                self._bug(f"save {action.save_id}" if action.save_id else "the core", action.error)
                return _internal_fault(action.save_id, action.error) if action.save_id else None
            case ac.SendStatus():
                self._server.send(action.peer, StatusReport(id=action.id, report=self._report(action.report)))
            case ac.Unwatch():
                self._liveness.unwatch(action.session)
            case ac.Relay():
                self._node_sockets.send(action.run, action.route, action.message)
            case ac.Draining():
                self._observers.draining()
            case ac.Exit():
                self._exit = action
            case _:
                self._jobs.submit(action)
        return None

    def _log(self, action: ac.Log) -> None:
        if action.count is not None:
            self.metrics.count(action.count)
        log.write(action.level, action.text, save_id=action.save_id, session=action.session, facts=dict(action.facts))

    def _report(self, of_core: Mapping[str, Any]) -> dict[str, Any]:
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
            **of_core,
            "ranks": with_progress(of_core["ranks"], self._writer.written(), self._slots.staged_nbytes),
            "mirrors": with_copied(of_core["mirrors"], self._mirrorer.copied()),
        }


def _internal_fault(save_id: str, error: Exception) -> ev.InternalFault:
    return ev.InternalFault(
        now=time.monotonic(), save_id=save_id, reason=f"a bug in the worker, {error!r}: see its log"
    )


def _save_of(event: ev.Event, slots: Mapping[int, Slot]) -> str | None:
    """Return the ID of the save that an event belongs to, so that a bug at the event ends only that save."""
    match event:
        case ev.Prepared() | ev.Written():
            return event.key[0]
        case ev.Published() | ev.Removed() | ev.InternalFault():
            return event.save_id
        case ev.SlotRead() if event.request is not None:
            return event.request.save_id
        case ev.SlotRead() if (slot := slots.get(event.slot)) is not None and slot.key is not None:
            return slot.key[0]
        case ev.Received():
            return getattr(event.message, "save_id", None)
    return None
