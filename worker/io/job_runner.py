"""Turns the state machine's actions into jobs, and results of jobs into events. The jobs run in `lanes`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

from asyncckpt.basics.failpoints import reach
from asyncckpt.errors import CommitUnknownError, MirrorError, SaveFailedError, to_wire
from asyncckpt.memory.slot import PAGE_NBYTES, STATE_OPEN, STATE_STREAMED
from asyncckpt.protocol.request import decode_request
from asyncckpt.storage.locate import with_storage_options
from asyncckpt_worker.core import actions as ac
from asyncckpt_worker.core import events as ev
from asyncckpt_worker.io.content_digest import digests_of
from asyncckpt_worker.io.coverage_check import Prover, coverage_error
from asyncckpt_worker.io.lanes import Job, Lanes, NoThreadError, Work
from asyncckpt_worker.io.slot_store import SlotStore
from asyncckpt_worker.io.writer import Writer
from asyncckpt_worker.mirrors.jobs import Mirrorer, cannot_succeed

FREE_TIMEOUT_S = 10.0
"""How long a freed slot may still be populated. Chosen: far above the time for POPULATE_NBYTES."""

_logger = logging.getLogger("asyncckpt.worker")


class JobRunner:
    """Turns actions into jobs.

    Args:
        lanes: Run the jobs.
        slots: Slots of this worker.
        writer: Jobs that touch storage.
        mirrorer: Copies checkpoints to their mirrors.
        count: Adds a number to the named counter.
    """

    def __init__(
        self,
        lanes: Lanes,
        slots: SlotStore,
        writer: Writer,
        mirrorer: Mirrorer,
        count: Callable[[str, int], None],
    ) -> None:
        self._lanes, self._slots, self._writer, self._count = lanes, slots, writer, count
        self._mirrorer = mirrorer
        self._prover = Prover()

    def submit(self, action: ac.Action) -> None:
        """Submit the action's job to its lane.

        Raises:
            RuntimeError: The system cannot start a thread for it.
        """
        match action:
            case ac.ReadSlot():
                self._run("memory", action, lambda _: self._read_slot(action.slot))
            case ac.AdoptSlot():
                self._run("memory", action, lambda _: self._adopt(action))
            case ac.FreeSlot():
                self._run("free", action, lambda _: self._free(action.slot))
            case ac.Prepare():
                self._run("prepare", action, lambda _: self._prepare(action), action.path)
            case ac.Write():
                lane = "stream" if action.early or action.request.ring_segments else "write"
                self._run(lane, action, lambda pool: self._write(action, pool), action.request.path)
            case ac.CutOff():
                self._slots.cut_off(action.slot, action.generation)
            case ac.Commit():
                self._run("commit", action, lambda _: self._commit(action), action.requests[0].path)
            case ac.Remove():
                self._run("commit", action, lambda _: self._remove(action), action.path)
            case ac.ScanLineage():
                self._run("prepare", action, lambda _: self._lineage(action), action.path)
            case ac.CopyToMirror():
                # In the lane of the destination, so that a destination that hangs does not block other lanes.
                self._run("mirror", action, lambda _: self._copy(action), action.mirror)
            case ac.CheckMirrored():
                self._run("mirror", action, lambda _: self._check(action), action.path)
            case ac.ScanUnmirrored():
                self._run("mirror", action, lambda _: self._unmirrored(action), action.root)
            case _:
                raise AssertionError(f"no job for {action}")

    def _run(self, lane: str, action: ac.Action, work: Work, path: str = "") -> None:
        def run(pool: Executor) -> Any:
            with with_storage_options(getattr(action, "storage", None)):
                return work(pool)

        self._lanes.submit(lane, Job(run, lambda error: failed_result(action, error), path))

    def populate(self, number: int) -> None:
        """Fault in the pages of a new slot.

        Raises:
            RuntimeError: The system cannot start a thread for it.
        """
        self._lanes.submit("populate", Job(lambda _: self._populate(number)))

    # ---- in the threads of the lanes

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
        opened = opened and streamed  # the seal may have come between the two reads
        now = time.monotonic()
        return ev.SlotRead(
            now=now, slot=number, generation=generation, request=request, opened=opened, streamed=streamed
        )

    def _adopt(self, action: ac.AdoptSlot) -> ev.SlotAdopted:
        try:
            reach("worker: slot handed over")
            memory = self._slots.adopt(action.slot, action.nbytes, action.pid, action.fd, action.token)
        except Exception as error:
            text = f"the worker cannot open fd {action.fd} of process {action.pid}: {error}"
            wire = to_wire(SaveFailedError(text, code="slot", detail=str(error)))
            return ev.SlotAdopted(now=time.monotonic(), slot=action.slot, error=wire)
        return ev.SlotAdopted(now=time.monotonic(), slot=action.slot, fd=memory.fd, token=memory.token)

    def _free(self, number: int) -> ev.SlotFreed:
        error = _error_of(lambda: self._slots.free(number))
        if error is not None:
            _logger.error("slot %d was not freed: %r", number, error)
        else:
            self._slots.wait_freed(number, FREE_TIMEOUT_S)  # a populate job may still use the slot, and then closes it
        return ev.SlotFreed(now=time.monotonic(), slot=number)

    def _populate(self, number: int) -> None:
        try:
            reach("worker: filling pages")
            self._slots.populate(number)
        except OSError as error:  # the trainer's first write then faults in the pages, or fails
            _logger.warning("cannot fault in the pages of slot %d: %s", number, error)

    def _prepare(self, action: ac.Prepare) -> ev.Prepared:
        committed = checked = False
        error_wire = None
        try:
            committed = self._writer.was_committed(action)
            checked = action.resumed
            if not committed:
                self._writer.prepare(action)
        except BaseException as error:
            error_wire = to_wire(error)
        return ev.Prepared(
            now=time.monotonic(),
            key=action.key,
            error=error_wire,
            committed=committed,
            known_uncommitted=checked and error_wire is not None,
            directory_identity=self._writer.directory_identity(action.path),
        )

    def _write(self, action: ac.Write, pool: Executor) -> ev.Written:
        begun = time.perf_counter()
        try:
            result, kept = self._writer.write(action, pool, self._prover.check)
        except BaseException as error:
            return ev.Written(now=time.monotonic(), key=action.key, error=to_wire(error))
        report: dict[str, Any] = {f"seconds_{name}": value for name, value in result.seconds.items()}
        report |= {
            "seconds_write": time.perf_counter() - begun,  # the whole write, not only the shards
            "nbytes": result.nbytes,
            "direct": result.direct,
        }
        if action.request.reuse:
            report["reused_nbytes"] = result.reused_nbytes
        if action.request.ring_segments:
            report["ring_nbytes"] = action.request.ring_segments * action.request.ring_segment_nbytes
        if action.resumed:
            report["kept"] = kept
        self._count("written_nbytes", 0 if kept else result.nbytes - result.reused_nbytes)
        return ev.Written(now=time.monotonic(), key=action.key, result=result, report=report)

    def _commit(self, action: ac.Commit) -> ev.Published:
        try:
            tallies = [result.tally for result in action.results]
            faults = self._prover.faults(action.requests, tallies, self._writer.structures(action))
            if faults:
                error_wire = to_wire(coverage_error(action.requests[0], faults))
                return ev.Published(now=time.monotonic(), save_id=action.save_id, error=error_wire)
            report = self._writer.commit(action)
        except BaseException as error:
            unknown = isinstance(error, CommitUnknownError)
            return ev.Published(now=time.monotonic(), save_id=action.save_id, error=to_wire(error), unknown=unknown)
        digests = None
        try:  # IMPORTANT: apart from the commit: whatever fails from here on, the save is committed
            digests = digests_of(action.requests, action.results)
        except Exception:
            text = "save to %s: it is not compared with the one before: a bug in the worker"
            _logger.exception(text, action.requests[0].path, extra={"save_id": action.save_id})
        return ev.Published(now=time.monotonic(), save_id=action.save_id, report=report, digests=digests)

    def _remove(self, action: ac.Remove) -> ev.Removed:
        _error_of(lambda: self._writer.remove(action.save_id, action.path))
        return ev.Removed(now=time.monotonic(), save_id=action.save_id)

    def _lineage(self, action: ac.ScanLineage) -> ev.LineageScanned:
        try:
            epoch = self._writer.lineage(action)
        except BaseException as error:
            return _scanned(action, error=to_wire(error))
        return _scanned(action, epoch=epoch)

    def _copy(self, action: ac.CopyToMirror) -> ev.Copied:
        try:
            report = self._mirrorer.copy(action)
        except Exception as error:
            return _not_copied(action, error)
        return ev.Copied(now=time.monotonic(), save_id=action.save_id, is_done=True, report=report)

    def _check(self, action: ac.CheckMirrored) -> ev.Copied:
        try:
            is_done = self._mirrorer.is_copied(action)
        except Exception as error:
            return _not_copied(action, error)
        return ev.Copied(now=time.monotonic(), save_id=action.save_id, is_done=is_done)

    def _unmirrored(self, action: ac.ScanUnmirrored) -> ev.UnmirroredFound:
        try:
            found = self._mirrorer.unmirrored(action.root)
        except Exception as error:
            return ev.UnmirroredFound(now=time.monotonic(), root=action.root, error=to_wire(error))
        return ev.UnmirroredFound(now=time.monotonic(), root=action.root, found=tuple(found), storage=action.storage)


def _not_copied(action: ac.CopyToMirror | ac.CheckMirrored, error: Exception) -> ev.Copied:
    wire = to_wire(
        MirrorError(
            f"{action.path} was not copied to its mirror {action.mirror}: {error}",
            save_id=str(action.save_id),
            path=action.path,
            mirror=action.mirror,
            detail=str(error),
        )
    )
    return ev.Copied(now=time.monotonic(), save_id=action.save_id, error=wire, is_final=cannot_succeed(error))


def _scanned(action: ac.ScanLineage, **found: Any) -> ev.LineageScanned:
    return ev.LineageScanned(now=time.monotonic(), run=action.run, path=action.path, **found)


def failed_result(action: ac.Action, error: Exception) -> ev.Event | None:
    """Return the result of an action whose job could not run, so that the core does not wait for it forever."""
    text, code = f"the worker failed: {error!r}", "internal"
    if isinstance(error, NoThreadError):
        text, code = f"{error}; nothing was published; check these file systems, or save to another one", "no_thread"
    now, wire = time.monotonic(), to_wire(SaveFailedError(text, code=code, detail=str(error)))
    match action:
        case ac.ReadSlot():
            return ev.SlotRead(now=now, slot=action.slot, reason=text)
        case ac.FreeSlot():
            return ev.SlotFreed(now=now, slot=action.slot)
        case ac.AdoptSlot():
            return ev.SlotAdopted(now=now, slot=action.slot, error=wire)
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
        case ac.CopyToMirror() | ac.CheckMirrored():
            return _not_copied(action, error)
        case ac.ScanUnmirrored():
            return ev.UnmirroredFound(now=now, root=action.root, error=wire)
    return None


def _error_of(call: Callable[[], None]) -> BaseException | None:
    try:
        call()
    except BaseException as error:
        return error
    return None
