"""The brain's saves: from the sealed slot to the commit, and every way in which one ends.

A save is keyed by its id and has one entry per rank. Its phases are those of `asyncckpt.protocol.lifecycle`, moved by
`advance` only. It commits when all ranks of its world are durable and their hooks have consented; one rank that fails
ends it on all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncckpt.protocol.fields import MAX_TEXT_CHARS
from asyncckpt.protocol.lifecycle import (
    ABANDONED,
    BEGUN,
    COMMITTED,
    DURABLE,
    ENDED,
    FAILED,
    IN_FLIGHT,
    SUBMITTED,
    UNKNOWN,
    WRITING,
    advance,
)
from asyncckpt.protocol.relay import GaveUp, Left
from asyncckpt_worker.actions import Commit
from asyncckpt_worker.changes import ChangeBook
from asyncckpt_worker.comparing import compare
from asyncckpt_worker.deadlines import deadline
from asyncckpt_worker.doubt import estranged, late_refusal, look_first
from asyncckpt_worker.entries import prepare_of, steps_to_durable
from asyncckpt_worker.events import Broken, Prepared, Published, Removed, Wire, Written
from asyncckpt_worker.keeping import speaks_against
from asyncckpt_worker.leftovers import clean_up
from asyncckpt_worker.order import has_elder
from asyncckpt_worker.records import RankSave, Save
from asyncckpt_worker.run_record import Run
from asyncckpt_worker.runs import RunBook
from asyncckpt_worker.starting import start_writing, stop_streams, write_again
from asyncckpt_worker.tables import Tables
from asyncckpt_worker.verdicts import OUTCOME_EVENTS, count, failed, timed_out


class SaveBook:
    """Changes `tables.saves` and adds the actions that follow."""

    def __init__(self, tables: Tables, runs: RunBook, changes: ChangeBook) -> None:
        self._t, self._runs, self._changes = tables, runs, changes
        self._held_back = False

    # ---- what its jobs report ---------------------------------------------------------------------------------------

    def prepared(self, event: Prepared) -> None:
        save, entry = self._t.saves.get(event.key[0]), self._t.entry(event.key)
        if save is None or entry is None or not entry.preparing:
            return
        entry.preparing, entry.prepared, entry.home = False, event.error is None, event.home
        if save.outcome is not None:
            clean_up(self._t, save)
            return
        save.looked = save.looked or (entry.resumed and event.error is None and not event.committed)
        refusal = late_refusal(self._t, self._runs, save, entry) if entry.resumed else None
        if event.error is not None:
            self.end(save, *(save.objection or (FAILED, event.error)))
        elif event.committed and not save.committing:
            self.was_committed(save, {})
        elif save.objection is not None and not save.given_up:
            self.end(save, *save.objection)
        elif refusal is not None:
            self.end(save, *refusal)
        elif entry.phase == SUBMITTED and not save.given_up:
            self.write(save, entry)
        elif entry.stream is not None and not save.given_up:
            start_writing(self._t, save, entry, entry.stream)

    def written(self, event: Written) -> None:
        save, entry = self._t.saves.get(event.key[0]), self._t.entry(event.key)
        if save is None or entry is None or not entry.writing:
            return
        entry.writing, self._t.touched[event.key] = False, None
        slot = self._t.slots.get(entry.slot)
        if slot is not None:
            slot.writes.discard(event.key)
        entry.report.update(event.report)
        if event.error is None:
            entry.result, entry.written_at = event.result, self._t.now
        if save.outcome is not None:
            clean_up(self._t, save)
        elif event.error is not None and entry.streaming and not entry.ring:
            write_again(self._t, save, entry, event.error)
        elif event.error is not None:
            self.end(save, FAILED, event.error)
        elif entry.phase == WRITING:  # else its seal was not seen yet
            self._is_durable(save, entry)

    def delivered(self, save: Save, entry: RankSave, result: Any, report: Mapping[str, Any]) -> None:
        """A follower has written a rank's files, or one that took them over has found them whole.

        IMPORTANT: a commit under way has what was delivered first, and is left alone: the files are the same.
        """
        if save.outcome is not None or save.committing or entry.phase == BEGUN:
            return
        entry.result = result
        entry.report.update(report)
        if entry.phase == WRITING:  # else it is durable already, or is looked for on disk first
            self._is_durable(save, entry)

    def _is_durable(self, save: Save, entry: RankSave) -> None:
        self.move(save, entry, "finish")
        entry.durable_at = self._t.now
        save.waiting_since = self._t.now if save.waiting_since is None else save.waiting_since
        self.commit_when_complete(save)

    def published(self, event: Published) -> None:
        save = self._t.saves.get(event.save_id)
        if save is None or not save.committing:
            return
        save.committing = False
        for entry in save.ranks.values():
            entry.report.update(event.report)
        if event.error is not None:
            self._changes.note(save, event.uncovered)
            self.end(save, UNKNOWN if event.unknown else FAILED, event.error)
            return
        found = compare(self._t, save, event.contents)
        for entry in save.ranks.values():
            entry.report.update(found)
        self.committed(save, {**event.report, **found})

    def committed(self, save: Save, report: Mapping[str, Any]) -> None:
        """The manifest stands."""
        save.outcome = COMMITTED
        for entry in save.ranks.values():
            self.move(save, entry, "commit" if entry.phase == DURABLE else "fail")
            entry.result = None
        entry = save.ranks[min(save.ranks)]
        facts = {**report, "step": entry.step, "path": entry.path}
        self._t.log("info", "committed", save_id=save.save_id, session=entry.session, count="saves_committed", **facts)
        self._commit_next(save)

    def was_committed(self, save: Save, report: Mapping[str, Any]) -> None:
        """Another worker has put the manifest."""
        self._was_durable(save)
        self.committed(save, report)

    def _was_durable(self, save: Save) -> None:
        """All ranks were, or may have been, with a worker that is dead, whatever is known of them here."""
        for entry in save.ranks.values():
            for step in steps_to_durable(entry) if entry.phase in IN_FLIGHT or entry.resumed else ():
                self.move(save, entry, step)

    def removed(self, event: Removed) -> None:
        save = self._t.saves.get(event.save_id)
        if save is not None:
            save.removing = False
            clean_up(self._t, save)  # of ranks that have come since

    # ---- gone ranks, and time ---------------------------------------------------------------------------------------

    def gone(self, run: Run, rank: int) -> None:
        """A rank of the run will say nothing more: end the saves that need it."""
        if run.followed:
            return self._t.told.append((run.run_id, Left(rank=rank, why=run.gone[rank][:MAX_TEXT_CHARS])))
        for save in [s for s in self._t.saves.values() if s.save_id.endswith(run.run_id)]:
            if save.outcome is not None or save.committing or save.doubtful:
                continue
            verdict = self._runs.verdict(save)
            if verdict is not None:
                self.end(save, ABANDONED, verdict)
            elif (silent := self._runs.silent_for_good(save)) is not None:
                self.end(save, FAILED, silent)
        return None

    def tick(self) -> None:
        """End saves whose other ranks, or hooks, have not spoken in time; let go those that waited for earlier ones."""
        for save in list(self._t.saves.values()):
            until, silent = deadline(self._t, save)
            if self._t.now < until:
                if save.outcome is None and not save.committing and save.waiting_since is not None:
                    self.commit_when_complete(save)
            elif silent is not None and silent.request is not None:
                detail = f"its pre_commit hook said nothing for {silent.request.hook_timeout_s:g} s"
                self.end(save, FAILED, failed(save, silent, "vetoed", detail))
            else:
                late = [e.rank for e in save.ranks.values() if e.link and (e.phase != DURABLE or e.needs_consent)]
                self.end(save, FAILED, timed_out(save, save.missing or sorted(late)))

    # ---- how it ends ------------------------------------------------------------------------------------------------

    def end(self, save: Save, outcome: str, error: Wire) -> None:
        """End a save on all of its ranks, without a commit; one that another worker leads is given up."""
        assert save.outcome is None and not save.committing, f"{save.save_id} ends twice"
        if not self._t.is_followed(save.save_id):
            if not look_first(self._t, save):
                return self.end_here(save, *estranged(self._t, save, outcome, error))
            # IMPORTANT: it may be committed. The look that is under way says so, or ends it by this.
            save.objection = save.objection or (outcome, error)
            return None
        if not save.given_up:
            save.given_up, save.objection = True, (outcome, error)
            record = GaveUp(save_id=save.save_id, outcome=outcome, error=error)
            self._t.told.append((save.save_id[-12:], record))
        return None

    def end_here(self, save: Save, outcome: str, error: Wire) -> None:
        """As `end`, also where another worker decides: it has."""
        self._changes.publish(save, complete=False)
        save.outcome, save.error, save.objected = outcome, error, speaks_against(error)
        at_begun, at_durable = OUTCOME_EVENTS[outcome]
        if outcome == UNKNOWN:
            self._was_durable(save)
        for entry in save.ranks.values():
            event = at_begun if entry.phase == BEGUN else at_durable if entry.phase == DURABLE else "fail"
            self.move(save, entry, event, error)
        entry = next(iter(save.ranks.values()))
        facts = {"step": entry.step, "path": entry.path, "code": error.get("code")}
        count(self._t.failures, error)
        level = "warning" if outcome == ABANDONED else "error"
        text = f"{outcome}: {error.get('text', '')}"
        self._t.log(level, text, save_id=save.save_id, session=entry.session, count=f"saves_{outcome}", **facts)
        stop_streams(self._t, save)
        clean_up(self._t, save)
        self._commit_next(save)

    def broken(self, event: Broken) -> None:
        """End the save at which our own code failed; one that is being committed ends with its commit."""
        save = self._t.saves.get(event.save_id)
        if save is not None and save.outcome is None and not save.committing:
            self.end(save, FAILED, failed(save, next(iter(save.ranks.values())), "internal", event.reason))

    # ---- steps ------------------------------------------------------------------------------------------------------

    def prepare(self, save: Save, entry: RankSave, *, fsync: bool) -> None:
        if entry.link and not entry.resumed:
            return
        entry.preparing = True
        self._t.actions.append(prepare_of(save.save_id, entry, fsync=fsync))

    def write(self, save: Save, entry: RankSave) -> None:
        assert entry.request is not None
        self.move(save, entry, "write")
        if not entry.link and not entry.streaming:
            start_writing(self._t, save, entry, entry.request)
        elif entry.result is not None:  # it was written to its end before its seal was seen
            self._is_durable(save, entry)

    def _commit_next(self, ended: Save) -> None:
        """A save has ended: those that were held back for it may be due."""
        self._held_back = True
        for save in self._t.saves.values():
            if save.outcome is None and save.save_id[16:] == ended.save_id[16:] and save.save_id > ended.save_id:
                save.turn_since = self._t.now

    def commit_what_was_held_back(self) -> None:
        """At the end of an event: the one that ends a save may begin another that goes first."""
        if not self._held_back:
            return
        self._held_back = False
        for save in sorted(self._t.saves.values(), key=lambda s: s.save_id):
            if save.outcome is None and not save.committing and save.waiting_since is not None:
                self.commit_when_complete(save)

    def commit_when_complete(self, save: Save) -> bool:
        """Commit when every rank is durable and consents, and no earlier save of the run is in flight or time is up.

        Returns:
            Whether it is committing now.
        """
        # IMPORTANT: every rank of the world, each durable: a manifest that names one that is not would list a torn
        # checkpoint.
        entries = [save.ranks[r] for r in sorted(save.ranks)]
        if self._t.is_followed(save.save_id) or save.objection is not None:
            return False
        if len(entries) != save.world_size or any(e.phase != DURABLE for e in entries):
            return False
        if any(e.needs_consent for e in entries):
            return False
        overdue = save.waiting_since is not None and self._t.now - save.waiting_since >= save.timeout_s
        if has_elder(save, self._t.saves) and not overdue:
            return False
        requests = tuple(e.request for e in entries if e.request is not None)
        assert len(requests) == save.world_size
        save.committing = True
        remote = tuple(e.rank for e in entries if e.link)
        results = tuple(e.result for e in entries)
        self._t.actions.append(Commit(save_id=save.save_id, requests=requests, results=results, remote=remote))
        return True

    def move(self, save: Save, entry: RankSave, event: str, error: Wire | None = None) -> None:
        if entry.phase in ENDED:
            return
        entry.phase = advance(entry.phase, event)
        self._t.touched[(save.save_id, entry.rank)] = None
        entry.error = error
        if entry.phase in ENDED:
            entry.request = entry.stream = None
        if entry.phase in ENDED or entry.phase == DURABLE:
            self._t.changed[(save.save_id, entry.rank)] = None
