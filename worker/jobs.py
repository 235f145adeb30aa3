"""The jobs behind the brain's actions: each runs in a lane of the scheduler, returns an event and never raises."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from asyncckpt.errors import CommitUnknownError, SaveFailedError, to_wire
from asyncckpt.failpoints import reach
from asyncckpt.memory.slot import PAGE_NBYTES, STATE_OPEN, STATE_STREAMED
from asyncckpt.protocol.request import decode_request
from asyncckpt_worker import actions as ac
from asyncckpt_worker import events as ev
from asyncckpt_worker import logs
from asyncckpt_worker.changes import MAX_NAMES
from asyncckpt_worker.freshness import contents_of
from asyncckpt_worker.metrics import Metrics
from asyncckpt_worker.provers import Prover, hole
from asyncckpt_worker.scheduler import Scheduler
from asyncckpt_worker.slots import SlotStore
from asyncckpt_worker.writer import Writer

FREE_TIMEOUT_S = 10.0
"""How long a slot that is being freed may still be populated. Chosen: far above one piece of POPULATE_NBYTES."""


class Jobs:
    """Turns actions into jobs.

    Args:
        scheduler: Runs them.
        slots: Where the snapshots lie.
        writer: Touches storage.
        metrics: Counts what was written.
    """

    def __init__(self, scheduler: Scheduler, slots: SlotStore, writer: Writer, metrics: Metrics) -> None:
        self._scheduler, self._slots, self._writer, self._metrics = scheduler, slots, writer, metrics
        self._prover = Prover()

    def submit(self, action: ac.Action) -> None:
        """Hand the action's job to its lane."""
        match action:
            case ac.ReadSlot():
                self._scheduler.submit("memory", lambda: self._read_slot(action.slot))
            case ac.AdoptSlot():
                self._scheduler.submit("memory", lambda: self._adopt(action))
            case ac.FreeSlot():
                self._scheduler.submit("free", lambda: self._free(action.slot))
            case ac.Prepare():
                self._scheduler.submit("prepare", lambda: self._prepare(action))
            case ac.Write():
                lane = "stream" if action.early or action.request.ring_segments else "write"
                self._scheduler.submit(lane, lambda: self._write(action))
            case ac.CutOff():
                self._slots.cut_off(action.slot, action.generation)
            case ac.Commit():
                self._scheduler.submit("commit", lambda: self._commit(action))
            case ac.Remove():
                self._scheduler.submit("commit", lambda: self._remove(action))
            case ac.ScanLineage():
                self._scheduler.submit("prepare", lambda: self._lineage(action))
            case _:
                raise AssertionError(f"no performer for {action}")

    def populate(self, number: int) -> None:
        """Fault in the pages of a new slot."""
        self._scheduler.submit("populate", lambda: self._populate(number))

    # ---- in the scheduler's threads

    def _read_slot(self, number: int) -> ev.SlotRead:
        opened = False
        try:
            with self._slots.use(number) as memory:
                opened = memory.control.state in (STATE_OPEN, STATE_STREAMED)
                (generation, data), streamed = memory.control.read_streamed()
                reach("worker: request found")
            request = decode_request(data, memory.nbytes - PAGE_NBYTES)
        except Exception as error:
            return ev.SlotRead(now=time.monotonic(), slot=number, reason=str(error), opened=opened)
        opened = opened and streamed  # a seal may have come between the two
        now = time.monotonic()
        return ev.SlotRead(
            now=now, slot=number, generation=generation, request=request, opened=opened, streamed=streamed
        )

    def _adopt(self, action: ac.AdoptSlot) -> ev.SlotCreated:
        try:
            reach("worker: slot handed over")
            memory = self._slots.adopt(action.slot, action.nbytes, action.pid, action.fd, action.token)
        except Exception as error:
            text = f"the worker cannot open fd {action.fd} of process {action.pid}: {error}"
            wire = to_wire(SaveFailedError(text, code="slot", detail=str(error)))
            return ev.SlotCreated(now=time.monotonic(), slot=action.slot, error=wire)
        return ev.SlotCreated(now=time.monotonic(), slot=action.slot, fd=memory.fd, token=memory.token)

    def _free(self, number: int) -> ev.SlotFreed:
        error = _error_of(lambda: self._slots.free(number))
        if error is not None:
            logs.write("error", f"slot {number} was not freed: {error!r}")
        else:
            self._slots.wait_freed(number, FREE_TIMEOUT_S)  # populating may have been under way, and closes it
        return ev.SlotFreed(now=time.monotonic(), slot=number)

    def _populate(self, number: int) -> None:
        try:
            reach("worker: filling pages")
            self._slots.populate(number)
        except OSError as error:  # the trainer's own first touch then pays, or fails, for the pages
            logs.write("warning", f"cannot fault in the pages of slot {number}: {error}")

    def _prepare(self, action: ac.Prepare) -> ev.Prepared:
        try:
            committed = self._writer.prepare(action)
        except BaseException as error:
            home = self._writer.home(action.path)
            return ev.Prepared(now=time.monotonic(), key=action.key, error=to_wire(error), home=home)
        home = self._writer.home(action.path)
        return ev.Prepared(now=time.monotonic(), key=action.key, committed=committed, home=home)

    def _write(self, action: ac.Write) -> ev.Written:
        begun = time.perf_counter()
        try:
            tally = self._prover.check(action.request)
            written, kept = self._writer.write(action, self._prover.check)
            # IMPORTANT: of the structure that was sealed, which is another one than was streamed where that was open.
            result = written if written.tally is not None else replace(written, tally=tally)
        except BaseException as error:
            return ev.Written(now=time.monotonic(), key=action.key, error=to_wire(error))
        report: dict[str, Any] = {f"seconds_{name}": value for name, value in result.seconds.items()}
        report |= {
            "seconds_write": time.perf_counter() - begun,  # all of it, not only the shards
            "nbytes": result.nbytes,
            "direct": result.direct,
        }
        if action.request.ring_segments:
            report["ring_nbytes"] = action.request.ring_segments * action.request.ring_segment_nbytes
        if action.resumed:
            report["kept"] = kept
        self._metrics.count("written_nbytes", 0 if kept else result.nbytes)
        return ev.Written(now=time.monotonic(), key=action.key, result=result, report=report)

    def _commit(self, action: ac.Commit) -> ev.Published:
        try:
            faults = self._prover.faults(action.requests, [result.tally for result in action.results])
            if faults:
                error_wire, names = to_wire(hole(action.requests[0], faults)), tuple(name for name, _ in faults)
                return ev.Published(
                    now=time.monotonic(), save_id=action.save_id, error=error_wire, uncovered=names[:MAX_NAMES]
                )
            report = self._writer.commit(action)
        except BaseException as error:
            unknown = isinstance(error, CommitUnknownError)
            return ev.Published(now=time.monotonic(), save_id=action.save_id, error=to_wire(error), unknown=unknown)
        contents = contents_of(action.requests, action.results)
        return ev.Published(now=time.monotonic(), save_id=action.save_id, report=report, contents=contents)

    def _remove(self, action: ac.Remove) -> ev.Removed:
        _error_of(lambda: self._writer.remove(action.save_id, action.path))
        return ev.Removed(now=time.monotonic(), save_id=action.save_id)

    def _lineage(self, action: ac.ScanLineage) -> ev.LineageScanned:
        try:
            epoch = self._writer.lineage(action.path)
        except BaseException as error:
            return _scanned(action, error=to_wire(error))
        return _scanned(action, epoch=epoch)


def _scanned(action: ac.ScanLineage, **found: Any) -> ev.LineageScanned:
    return ev.LineageScanned(
        now=time.monotonic(), peer=action.peer, id=action.id, run=action.run, path=action.path, **found
    )


def gave_up(action: ac.Action, error: Exception) -> ev.Event | None:
    """Return what the brain hears of a job that could not be begun: nobody else would ever answer for it."""
    now, wire = time.monotonic(), to_wire(SaveFailedError(f"the worker failed: {error!r}", code="internal"))
    match action:
        case ac.ReadSlot():
            return ev.SlotRead(now=now, slot=action.slot, reason=f"the worker failed: {error!r}")
        case ac.FreeSlot():
            return ev.SlotFreed(now=now, slot=action.slot)
        case ac.CreateSlot() | ac.AdoptSlot():
            return ev.SlotCreated(now=now, slot=action.slot, error=wire)
        case ac.Prepare():
            return ev.Prepared(now=now, key=action.key, error=wire)
        case ac.Write():
            return ev.Written(now=now, key=action.key, error=wire)
        case ac.Commit():
            return ev.Published(now=now, save_id=action.save_id, error=wire)
        case ac.Remove():
            return ev.Removed(now=now, save_id=action.save_id)
        case ac.ScanLineage():
            return _scanned(action, error=wire)
        case ac.Listen():
            return ev.Listening(now=now, error=wire)
        case ac.Connect():
            return ev.Unconnected(now=now, run=action.run, error=wire)
        case ac.Watch():
            return ev.Watched(now=now, session=action.session, alive=False)
    return None


def _error_of(call: Callable[[], None]) -> BaseException | None:
    try:
        call()
    except BaseException as error:
        return error
    return None
