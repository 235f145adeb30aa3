"""The life of a save: from the first rank's begin to its end, by commit, failure, abandonment or loss.

A save has one part for each rank, whose phases the table in `model` defines. It commits when all ranks of its world are
durable and their hooks have consented; the failure of one rank ends it on all ranks. Below the class: the jobs of a
rank's part, and the deadlines of a save.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from asyncckpt.basics.storage_options import NO_OPTIONS
from asyncckpt.protocol.request import SaveRequest
from asyncckpt.protocol.save_phases import (
    ABANDONED,
    COMMITTED,
    DURABLE,
    ENDED,
    FAILED,
    OPEN,
    RECOVERING,
    SEALED,
    UNKNOWN,
    WRITING,
)
from asyncckpt.storage.files import COPY_UNKNOWN
from asyncckpt_worker.core.actions import Commit, CutOff, Prepare, Remove, Write
from asyncckpt_worker.core.consistency import disagreement, settle_step, unequal_samples
from asyncckpt_worker.core.events import (
    ContentDigests,
    InternalFault,
    Prepared,
    Published,
    Removed,
    SaveKey,
    Wire,
    Written,
)
from asyncckpt_worker.core.failures import (
    count,
    disagree,
    failed,
    kind_of,
    leader_lost,
    mismatch,
    path_in_use,
    requires_meeting,
    timed_out,
    unchecked,
)
from asyncckpt_worker.core.model import (
    ADMIT,
    COMMIT,
    COMPARE,
    COMPLETE,
    ENDS,
    PREPARE,
    PROCEED,
    REMOVE,
    STREAM,
    TABLE,
    WRITE,
    Committed,
    RankSave,
    Run,
    Save,
)
from asyncckpt_worker.core.runs import RunRegistry
from asyncckpt_worker.core.tables import Tables
from asyncckpt_worker.mirrors.schedule import MirrorCopy, MirrorRegistry


class SaveRegistry:
    """Moves saves through their phases, commits them, and ends them."""

    def __init__(self, tables: Tables, runs: RunRegistry, mirrors: MirrorRegistry) -> None:
        self._t, self._runs, self._mirrors = tables, runs, mirrors
        self.commits_waiting = False
        self._steps = {
            ADMIT: self._admit,
            PREPARE: self._prepare,
            COMPARE: self._compare,
            PROCEED: self._proceed,
            STREAM: self._stream,
            WRITE: self._write,
            COMPLETE: self._complete,
        }

    # ---- the table --------------------------------------------------------------------------------------------------

    def advance(self, save: Save, part: RankSave, event: str, error: Wire | None = None) -> None:
        """Move a rank's part by one event, and take the steps of the cell; an ended part stays as it is.

        A missing cell is a bug in the worker, and ends the save.
        """
        was = part.phase
        if was in ENDED:
            return
        cell = TABLE[was].get(event)
        if cell is None:
            text = f"rank {part.rank} of save {save.save_id} cannot {event!r} in phase {was!r}"
            return self._t.fault(save.save_id, ValueError(text))
        part.phase, steps = cell
        if part.phase in ENDED:
            part.request, part.stream, part.error = None, None, error
        if part.phase in ENDED or part.phase == DURABLE:
            self._t.changed[(save.save_id, part.rank)] = None
        save.count_phase(part, was)
        self._t.touched[(save.save_id, part.rank)] = None
        for step in steps:
            if part.phase not in ENDED:
                self._steps[step](save, part)
        return None

    def _admit(self, save: Save, part: RankSave) -> None:
        """End a save that can never commit; if a dead worker may have committed it, `prepared` checks that later."""
        same_call = self._t.of_call(save.save_id.call)
        twins = [s for s in same_call if s.save_id != save.save_id and s.world_size > 1]
        if twins:
            detail = f"rank {part.rank} saves it as {save.save_id}, others as {twins[0].save_id}"
            open_twins = [t for t in twins if isinstance(t, Save) and t.outcome is None and not t.committing]
            for one in [save, *open_twins]:
                ranks = {*save.ranks, *twins[0].ranks}
                self.end(one, FAILED, disagree(one.save_id, part.path, detail, ranks))
        elif part.from_dead_worker:
            pass
        elif part.is_open and (why := self._runs.why_impossible(save)) is not None:
            self.end(save, *why)
        elif not self._t.is_followed(save.save_id):  # else the leader checks it for all ranks
            other = open_save_at_path(part.path, save.save_id, self._t.saves)
            if other is not None:
                self.end(save, FAILED, path_in_use(save, part, other.save_id))

    def _prepare(self, save: Save, part: RankSave) -> None:
        if save.failed_locally or (part.follower and not part.from_dead_worker):
            return
        part.job = PREPARE
        save.jobs += 1
        self._t.actions.append(prepare_of(save.save_id, part))

    def _compare(self, save: Save, part: RankSave) -> None:
        """End a save whose ranks disagree, or that a rank can no longer join."""
        if part.is_open:
            return
        problem = self._problem(save, part)
        settle_step(save, part)
        if problem is not None:
            self.end(save, FAILED, problem)
        elif not part.from_dead_worker and (why := self._runs.why_impossible(save)) is not None:
            self.end(save, *why)
        else:
            save.complete = not save.awaits_seals
            if save.complete:
                self._t.review_closing_slots = True
                self.update_deadline(save)

    def _problem(self, save: Save, part: RankSave) -> Wire | None:
        """Compare a rank that has just sealed with its session and the other ranks; after the last rank, samples."""
        if part.contradiction:
            return failed(save, part, "disagree", part.contradiction)
        found = disagreement(save, part)
        if found is not None:
            return disagree(save.save_id, part.path, found[0], [part.rank, found[1]], found[2])
        if save.awaits_seals:
            return None
        for fqn, split, groups in unequal_samples(save):
            # IMPORTANT: also where one rank writes the whole tensor. The writer differs from tensor to tensor, so the
            # checkpoint would be a state that no rank ever had.
            return mismatch(save, part.path, fqn, groups, split=split)
        return None

    def _proceed(self, save: Save, part: RankSave) -> None:
        if not part.preparing and save.pending_failure is None:
            self.advance(save, part, "prepared")

    def _stream(self, save: Save, part: RankSave) -> None:
        if part.stream is not None and not part.job:
            start_writing(self._t, save, part, part.stream)

    def _write(self, save: Save, part: RankSave) -> None:
        assert part.request is not None
        if not part.follower and not part.streaming:
            start_writing(self._t, save, part, part.request)
        elif part.result is not None:  # all files were written before the seal was read
            self.advance(save, part, "written")

    def _complete(self, save: Save, part: RankSave) -> None:
        part.durable_at = self._t.now
        save.waiting_since = self._t.now if save.waiting_since is None else save.waiting_since
        self.commit_when_complete(save)

    # ---- results of jobs --------------------------------------------------------------------------------------------

    def prepared(self, event: Prepared) -> None:
        found = self._whose_job(event.key, PREPARE)
        if found is None:
            return
        save, part = found
        part.directory_identity = event.directory_identity
        checked = event.error is None or event.known_uncommitted
        if checked and not event.committed and part.phase == RECOVERING:
            self._resume(save)
        part.job = ""
        save.jobs -= 1
        refusal = deferred_refusal(self._t, self._runs, save, part) if part.from_dead_worker else None
        if save.outcome is not None:
            clean_up(self._t, save)
        elif event.error is not None:
            earlier = save.pending_failure if save.known_uncommitted else None
            self.end(save, *(earlier or (FAILED, event.error)))
        elif event.committed and not save.committing:
            self.found_committed(save, {})
        elif save.failed_locally:
            pass
        elif save.pending_failure is not None:
            self.end(save, *save.pending_failure)
        elif refusal is not None:
            self.end(save, *refusal)
        else:
            self.advance(save, part, "prepared")

    def _resume(self, save: Save) -> None:
        """Continue a save of a dead worker that was not committed; from now on only this worker can commit it."""
        save.known_uncommitted = True
        for part in save.ranks.values():
            if part.phase == RECOVERING:
                self.advance(save, part, "resume_open" if part.is_open else "resume_sealed")

    def written(self, event: Written) -> None:
        found = self._whose_job(event.key, WRITE)
        if found is None:
            return
        save, part = found
        part.job, self._t.touched[event.key] = "", None
        save.jobs -= 1
        slot = self._t.slots.get(part.slot)
        if slot is not None:
            slot.writes.discard(event.key)
            self._t.review_closing_slots = self._t.review_closing_slots or slot.closing
        part.report.update(event.report)
        if event.error is None:
            part.result, part.written_at = event.result, self._t.now
        if save.outcome is not None:
            clean_up(self._t, save)
        elif event.error is not None and part.streaming and not part.ring and kind_of(event.error) != COPY_UNKNOWN:
            write_again(self._t, save, part, event.error)
        elif event.error is not None:
            self.end(save, FAILED, event.error)
        else:
            self.advance(save, part, "written")

    def _whose_job(self, key: SaveKey, job: str) -> tuple[Save, RankSave] | None:
        save = self._t.saves.get(key[0])
        part = save.ranks.get(key[1]) if save is not None else None
        return None if save is None or part is None or part.job != job else (save, part)

    def written_remotely(self, save: Save, part: RankSave, result: Any, report: Mapping[str, Any]) -> None:
        """Handle a follower's report that a rank's files are written, or were complete after a failover.

        IMPORTANT: a commit that is in progress keeps the first result; the files are the same.
        """
        if save.outcome is not None or save.committing or part.phase == OPEN:
            return
        part.result, part.wrote = result, True
        part.report.update(report)
        if part.phase not in (DURABLE, RECOVERING):  # else it is durable already, or the directory is checked first
            self.advance(save, part, "written")

    def published(self, event: Published) -> None:
        save = self._t.saves.get(event.save_id)
        if save is None or not save.committing:
            return
        save.job = ""
        save.jobs -= 1
        for part in save.ranks.values():
            part.report.update(event.report)
        if event.error is not None:
            self.end(save, UNKNOWN if event.unknown else FAILED, event.error)
            return
        found: dict[str, Any] = {}
        # IMPORTANT: guarded without the save's ID: it is committed, and a bug in what follows must not end it.
        self._t.run_guarded("", lambda: found.update(compare(self._t, save, event.digests)))
        for part in save.ranks.values():
            part.report.update(found)
        self._committed(save, {**event.report, **found})

    def removed(self, event: Removed) -> None:
        save = self._t.saves.get(event.save_id)
        if save is not None and save.job == REMOVE:
            save.job = ""
            save.jobs -= 1
            clean_up(self._t, save)  # files at another path, or of ranks that came since

    # ---- departed ranks and deadlines -------------------------------------------------------------------------------

    def rank_departed(self, run: Run, rank: int) -> None:
        """A rank has left the run: end the saves that need it."""
        if run.followed:
            return self._t.to_report.add(run.run_id)
        for save in self._t.open_saves(run.run_id):
            if not (save.committing or save.is_recovering):
                self._t.run_guarded(save.save_id, self._end_if_impossible, save)
        return None

    def _end_if_impossible(self, save: Save) -> None:
        why = self._runs.why_impossible(save)
        if why is not None:
            self.end(save, *why)

    def tick(self) -> None:
        """End saves whose ranks or hooks have missed a deadline; commit saves that no longer wait for earlier ones."""
        for save in list(self._t.saves.values()):
            self._t.run_guarded(save.save_id, self._on_time, save)

    def _on_time(self, save: Save) -> None:
        silent = None
        if self._t.now >= save.next_deadline_at:
            save.next_deadline_at, silent = deadline(self._t, save)
        if self._t.now < save.next_deadline_at:
            if save.outcome is None and not save.committing and save.waiting_since is not None:
                self.commit_when_complete(save)
        elif silent is not None and silent.request is not None:
            detail = f"its pre_commit hook did not answer for {silent.request.hook_timeout_s:g} s"
            self.end(save, FAILED, failed(save, silent, "vetoed", detail))
        else:
            late = [e.rank for e in save.ranks.values() if e.follower and (e.phase != DURABLE or e.needs_consent)]
            self.end(save, FAILED, timed_out(save, save.missing or sorted(late)))

    # ---- the end ----------------------------------------------------------------------------------------------------

    def end(self, save: Save, outcome: str, error: Wire) -> None:
        """End a save on all of its ranks, without a commit. If another worker leads it, report the failure there."""
        assert save.outcome is None and not save.committing, f"{save.save_id} ends twice"
        if not self._t.is_followed(save.save_id):
            if not save.is_recovering:
                return self.end_here(save, *outcome_or_unknown(self._t, save, outcome, error))
            # IMPORTANT: a dead worker may have committed it. The PREPARE job finds out; if not, the save ends by this.
            save.pending_failure = save.pending_failure or (outcome, error)
            return None
        if not save.failed_locally:
            save.failed_locally, save.pending_failure = True, (outcome, error)
            self._t.to_report.add(save.save_id.run_id)
        return None

    def end_here(self, save: Save, outcome: str, error: Wire) -> None:
        """End a save as `outcome`. If another worker leads it, that one has decided."""
        save.outcome, save.error = outcome, error
        self._runs.record_outcome(save.save_id, meet=save.meet or requires_meeting(error))
        if outcome == UNKNOWN:
            self._recover_open(save)
        for part in save.ranks.values():
            self.advance(save, part, ENDS[outcome], error)
        part = next(iter(save.ranks.values()))
        facts = {"step": part.step, "path": part.path, "code": error.get("code")}
        count(self._t.failures, error)
        level = "warning" if outcome == ABANDONED else "error"
        text = f"{outcome}: {error.get('text', '')}"
        self._t.log(level, text, save_id=save.save_id, session=part.session, count=f"saves_{outcome}", **facts)
        stop_streams(self._t, save)
        clean_up(self._t, save)
        self._commit_next(save)

    def _recover_open(self, save: Save) -> None:
        """Move open parts that a dead worker may have made durable to `recovering`: they end like durable ones."""
        for part in save.ranks.values():
            if part.phase == OPEN and part.from_dead_worker:
                self.advance(save, part, "recover")

    def found_committed(self, save: Save, report: Mapping[str, Any]) -> None:
        """End a save that another worker has committed."""
        self._recover_open(save)
        self._committed(save, report)

    def _committed(self, save: Save, report: Mapping[str, Any]) -> None:
        save.outcome = COMMITTED
        self._t.run_guarded("", self._mirror, save)  # as above: a bug in it must not keep the ranks waiting
        self._runs.record_outcome(save.save_id, meet=save.meet)
        run = self._t.runs.get(save.save_id.run_id)
        if run is not None and run.followed:
            run.found_committed[save.save_id.sequence] = (save.meet, self._t.now)
        for part in save.ranks.values():
            error = None
            if part.phase == OPEN:
                error = failed(save, part, "not_sealed", "it was committed before, without this rank's snapshot")
            self.advance(save, part, ENDS[COMMITTED], error)
            part.result = None
        part = save.ranks[min(save.ranks)]
        facts = {**report, "step": part.step, "path": part.path}
        self._t.log("info", "committed", save_id=save.save_id, session=part.session, count="saves_committed", **facts)
        self._commit_next(save)

    def _mirror(self, save: Save) -> None:
        """Schedule the copy of a committed save that this worker leads.

        IMPORTANT: call before `advance` clears the requests, which hold the mirror.
        """
        first = save.ranks[min(save.ranks)]
        if first.request is not None and first.request.mirror and not self._t.is_followed(save.save_id):
            nbytes = sum(int(part.report.get("nbytes", part.nbytes)) for part in save.ranks.values())
            self._mirrors.committed(
                MirrorCopy(
                    save.save_id,
                    first.path,
                    first.request.mirror,
                    self._t.now,
                    step=first.step,
                    nbytes=nbytes,
                    storage=first.storage,
                )
            )

    def internal_fault(self, event: InternalFault) -> None:
        """End the save at which a bug was met; a commit that is in progress ends it instead."""
        save = self._t.saves.get(event.save_id)
        if save is not None and save.outcome is None and not save.committing:
            self.end(save, FAILED, failed(save, next(iter(save.ranks.values())), "internal", event.reason))

    # ---- the commit -------------------------------------------------------------------------------------------------

    def _commit_next(self, ended: Save) -> None:
        """A save has ended: later saves of the run may be able to commit."""
        self.commits_waiting = self._t.review_closing_slots = True
        for save in self._t.open_saves(ended.save_id.run_id):
            if save.save_id > ended.save_id:
                save.hooks_since = self._t.now
                self._t.run_guarded(save.save_id, self.update_deadline, save)

    def update_deadline(self, save: Save) -> None:
        """Compute the next deadline of a save."""
        save.next_deadline_at = deadline(self._t, save)[0]

    def commit_waiting(self) -> None:
        """Commit saves that waited for an earlier one; at the end of an event, which may have begun an earlier save."""
        self.commits_waiting = False
        for save in sorted(self._t.saves.values(), key=lambda s: s.save_id):
            if save.outcome is None and not save.committing and save.waiting_since is not None:
                self._t.run_guarded(save.save_id, self.commit_when_complete, save)

    def commit_when_complete(self, save: Save) -> bool:
        """Commit if every rank is durable and consents, and no earlier save of the run is open (or its timeout passed).

        Returns:
            Whether the commit was started.
        """
        # IMPORTANT: every rank of the world must be durable; else the manifest would publish an incomplete checkpoint.
        if self._t.is_followed(save.save_id) or save.pending_failure is not None or save.n_durable != save.world_size:
            return False
        parts = [save.ranks[r] for r in sorted(save.ranks)]
        assert len(parts) == save.world_size and all(e.phase == DURABLE for e in parts)
        if any(e.needs_consent for e in parts):
            return False
        overdue = save.waiting_since is not None and self._t.now - save.waiting_since >= save.timeout_s
        if has_earlier_open_save(save, self._t.saves) and not overdue:
            return False
        requests = tuple(e.request for e in parts if e.request is not None)
        assert len(requests) == save.world_size
        save.job = COMMIT
        save.jobs += 1
        remote = tuple(e.rank for e in parts if e.follower)
        results = tuple(e.result for e in parts)
        storage = next((e.storage for e in parts if not e.follower), NO_OPTIONS)
        self._t.actions.append(
            Commit(save_id=save.save_id, requests=requests, results=results, remote=remote, storage=storage)
        )
        return True


def deferred_refusal(t: Tables, runs: RunRegistry, save: Save, part: RankSave) -> tuple[str, Wire] | None:
    """Return why a save of a dead worker, found not committed, cannot continue: outcome and error, or None."""
    if t.is_followed(save.save_id):
        return None  # the leader checks it for all ranks, and knows consents that were lost with the dead worker
    if (why := runs.why_impossible(save)) is not None:
        return why
    other = open_save_at_path(part.path, save.save_id, t.saves)
    return None if other is None else (FAILED, path_in_use(save, part, other.save_id))


def outcome_or_unknown(t: Tables, save: Save, outcome: str, error: Wire) -> tuple[str, Wire]:
    """Return outcome and error of a save: `unknown` if a dead worker or the leader may have committed it all the same.

    IMPORTANT: what may be committed must not be called failed. A dead worker may have committed it if the check of its
    directory has failed for every rank. A leader that cannot be followed may commit it if a dead worker has reported to
    it that all of these ranks are durable.
    """
    if save.may_be_committed:
        return UNKNOWN, unchecked(save, error)
    run = t.runs.get(save.save_id.run_id)
    if run is None or not run.leader_unreachable or not any(e.from_dead_worker for e in save.ranks.values()):
        return outcome, error
    why = f"it cannot be followed from here; {error.get('text', '')}"
    return UNKNOWN, leader_lost(save, why, unknown=True)


def compare(t: Tables, save: Save, digests: ContentDigests | None) -> Mapping[str, Any]:
    """Compare a save that was just committed with the run's last one, and remember it; return the report's figures.

    A warning is logged if nothing has changed. After a save without digests, the next save is not compared.
    """
    saved = save.save_id
    run = t.runs.get(saved.run_id)
    if run is None:
        return {}
    part = save.ranks[min(save.ranks)]
    before = run.committed
    now = None if digests is None else Committed(saved.sequence, part.step or 0, digests)
    if before is not None and before.sequence >= saved.sequence:
        return {}  # a later save was committed before it
    run.committed = now
    found = unchanged(before, now) if before is not None and now is not None else {}
    if found.get("unchanged"):
        text = f"step {part.step} is bit for bit what step {found['same_tensors_as_step']} was"
        t.log("warning", text, save_id=save.save_id, count="saves_unchanged", path=part.path)
    return found


def unchanged(last: Committed, save: Committed) -> dict[str, Any]:
    """Return the report's figures of a save whose tensors equal those of the save before; else none.

    Args:
        last: The save that the run committed before.
        save: The save that it has just committed.

    Returns:
        `same_tensors_as_step`: the step of the save before; and `unchanged`: True, if the rest is equal too, except the
        step.
    """
    if last.step == save.step or last.digests.tensors != save.digests.tensors:
        return {}
    same = {"same_tensors_as_step": last.step}
    return same | ({"unchanged": True} if last.digests.rest == save.digests.rest else {})


def start_writing(t: Tables, save: Save, part: RankSave, request: SaveRequest) -> None:
    """Start the job that writes the files of a rank, whose directory exists."""
    key = (save.save_id, part.rank)
    early = part.phase == OPEN
    assert not part.job
    part.job, part.wrote, part.streaming = WRITE, True, early or part.ring
    save.jobs += 1
    t.slots[part.slot].writes.add(key)
    t.touched[key] = None
    t.actions.append(
        Write(
            key=key,
            slot=part.slot,
            generation=part.generation,
            request=request,
            resumed=part.from_dead_worker,
            early=early,
            storage=part.storage,
        )
    )


def write_again(t: Tables, save: Save, part: RankSave, error: Wire) -> None:
    """Handle the failure of a write that started before the seal.

    IMPORTANT: not for `COPY_UNKNOWN`: a late copy would replace what is written to the same name. Any other failure
    must not end the save, not even when the seal was read meanwhile: it may have failed only because the trainer staged
    nothing for too long. Once sealed, the snapshot is written again, and that error ends the save. A sealed snapshot
    can be loaded from memory even if it cannot be written.
    """
    part.streaming = False
    text = f"the write before the seal failed; the sealed snapshot is written again: {error.get('text', '')}"
    t.log("info", text, save_id=save.save_id, session=part.session, count="early_failed")
    if part.phase == WRITING and not save.failed_locally:
        assert part.request is not None
        start_writing(t, save, part, part.request)


def stop_early_writes(t: Tables) -> None:
    """Stop writes of unsealed slots, except of rings: the drain does not wait for their trainers any longer."""
    for _, part in t.parts():
        if part.phase == OPEN and part.streaming and part.writing and not part.ring:
            t.actions.append(CutOff(slot=part.slot, generation=part.generation))


def stop_streams(t: Tables, save: Save) -> None:
    """Stop writes of an ended save that wait for their trainers to fill the slots."""
    for part in save.ranks.values():
        if part.streaming and part.writing:
            t.actions.append(CutOff(slot=part.slot, generation=part.generation))


def prepare_of(save_id: str, part: RankSave) -> Prepare:
    """Return the job that creates the directory of a rank's part."""
    return Prepare(
        key=(save_id, part.rank),
        path=part.path,
        step=part.step,
        nbytes=part.nbytes,
        umask=part.umask,
        fsync=part.fsync,
        overwrite=part.overwrite,
        resumed=part.from_dead_worker,
        storage=part.storage,
    )


def clean_up(t: Tables, save: Save) -> None:
    """Remove the files of a failed save, once no job of this worker writes to it; one path after the other.

    IMPORTANT: also the files of a rank whose write has failed, since the write job may leave some of them.
    """
    left = [e for e in save.ranks.values() if e.wrote or (e.from_dead_worker and not e.follower)]
    # IMPORTANT: never after `unknown`: the manifest may exist, and these would be its files.
    if save.outcome in (FAILED, ABANDONED) and left and not save.jobs:
        t.actions.append(Remove(save_id=save.save_id, path=left[0].path, storage=left[0].storage))
        save.job = REMOVE
        save.jobs += 1
        for part in [e for e in left if e.path == left[0].path]:
            part.result, part.wrote, part.from_dead_worker = None, False, False


def _overdue(save: Save, since: float) -> float:
    """Return the deadline of ranks that have not sealed; infinity if there are none.

    A rank whose ring is being written has no deadline here: its write job fails if a segment takes longer.
    """
    missing, timeout_s = save.missing, save.timeout_s
    if not missing:
        return float("inf")
    streaming = {rank: part for rank, part in save.ranks.items() if part.streaming}
    if any(rank not in streaming for rank in missing):
        return since + timeout_s
    idle = [streaming[rank].written_at for rank in missing if not streaming[rank].writing]
    return max(since, min(idle)) + timeout_s if idle else float("inf")


def deadline(t: Tables, save: Save) -> tuple[float, RankSave | None]:
    """Return the next deadline of a save (infinity: none), and the rank whose hook it is for, if it is for a hook."""
    since = save.sealed_since
    waits = save.outcome is None and not save.committing and not save.is_recovering
    if not waits or since is None or t.is_followed(save.save_id):
        return float("inf"), None
    found: tuple[float, RankSave | None] = (_overdue(save, since), None)
    for part in save.ranks.values() if t.last_message_at else ():  # only with followers
        writes_ring = part.phase == OPEN and part.streaming and part.written_at == float("inf")
        awaited = part.phase in (SEALED, WRITING) or writes_ring or part.needs_consent
        if part.follower and awaited:
            last_message_at = t.last_message_at.get(part.follower, since)
            found = min(found, (max(since, last_message_at) + save.timeout_s, None), key=lambda pair: pair[0])
    run, turn = t.runs.get(save.save_id.run_id), save.hooks_since
    answered_at = run.hook_answered_at if run is not None else {}
    if save.waiting_since is not None and has_earlier_open_save(save, t.saves):
        turn = save.waiting_since + save.timeout_s  # as the commit, which waits for earlier saves until then
    for part in save.ranks.values():
        if part.request is not None and part.needs_consent and part.durable_at is not None:
            asked_at = max(part.durable_at, turn, answered_at.get(part.rank, 0.0))
            silent_until = asked_at + part.request.hook_timeout_s
            found = min(found, (silent_until, part), key=lambda pair: pair[0])
    return found


def bring_deadline_forward(save: Save, part: RankSave, now: float) -> None:
    """Lower `next_deadline_at` after a phase change of a rank, without the loop over all ranks in `deadline`.

    IMPORTANT: never set it later than `deadline` would: the save would end too late. Too early only costs a check.
    """
    if save.sealed_since is not None and (save.awaits_seals or part.follower):
        save.next_deadline_at = min(save.next_deadline_at, save.sealed_since + save.timeout_s)
    if part.request is not None and part.durable_at is not None and part.needs_consent:
        save.next_deadline_at = min(
            save.next_deadline_at, max(part.durable_at, save.hooks_since) + part.request.hook_timeout_s
        )


def forget_inactive_followers(t: Tables, followers: Set[str]) -> None:
    """Forget the last message of followers that are not in `followers` and have no rank in an open save."""
    over = t.last_message_at.keys() - followers
    if over:
        for name in over - {e.follower for s, e in t.parts() if s.outcome is None}:
            del t.last_message_at[name]


def open_save_at_path(path: str, save_id: str, saves: Mapping[str, Save]) -> Save | None:
    """Return another open save to `path`, or None."""
    for save in saves.values():
        if save.outcome is None and save.save_id != save_id and path in save.paths:
            return save
    return None


def has_earlier_open_save(save: Save, saves: Mapping[str, Save]) -> bool:
    """Whether an earlier save of the same run is open.

    Readers may rely on checkpoints appearing in order, so a small save must not overtake a large one. A save that is
    being staged counts too; it ends with its session at the latest.
    """
    own = save.save_id
    return any(
        s.outcome is None and s.save_id.run_id == own.run_id and s.save_id.sequence < own.sequence
        for s in saves.values()
    )
