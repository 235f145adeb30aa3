"""The brain's saves: from Begin or a sealed slot to the commit, and every way in which one ends.

A save is keyed by its id and has one entry per rank. Its phases are those of `asyncckpt.protocol.lifecycle`, moved by
`advance` only. It commits when all ranks of its world are durable; one rank that fails ends it on all of them.
"""

from __future__ import annotations

from asyncckpt.protocol.lifecycle import (
    ABANDONED,
    BEGUN,
    COMMITTED,
    DURABLE,
    ENDED,
    FAILED,
    SUBMITTED,
    UNKNOWN,
    advance,
)
from asyncckpt.protocol.messages import Begin
from asyncckpt.protocol.request import SaveRequest
from asyncckpt_worker.actions import Commit, Remove, Write
from asyncckpt_worker.agreement import disagreement, other_world
from asyncckpt_worker.entries import entry_of_begin, entry_of_request, prepare_of
from asyncckpt_worker.events import Broken, Prepared, Published, Removed, Wire, Written
from asyncckpt_worker.order import has_elder, rival
from asyncckpt_worker.records import RankSave, Save, Session, Slot, Tables
from asyncckpt_worker.verdicts import failed, timed_out

_OUTCOME_EVENTS = {ABANDONED: ("abandon", "fail"), FAILED: ("fail", "fail"), UNKNOWN: ("fail", "lose")}
"""Outcome of a save -> lifecycle event of a rank that has only begun, and of one that is durable."""


class SaveBook:
    """Changes `tables.saves` and adds the actions that follow."""

    def __init__(self, tables: Tables, commit_timeout_s: float) -> None:
        self._t = tables
        self._commit_timeout_s = commit_timeout_s

    # ---- how a save comes to be -------------------------------------------------------------------------------------

    def begin(self, session: Session, message: Begin) -> Wire | None:
        """Add the entry of a rank that stages. The caller has checked slot and generation.

        Returns:
            Why the save has failed at once, or None.
        """
        save = self._open(message.save_id, session.world_size)
        entry = entry_of_begin(session, message, self._t.now)
        self._add(save, entry)
        error = self._refuse_rival(save, entry)
        if not entry.ended:
            self._prepare(save, entry, fsync=message.fsync)
            self._t.log("debug", "staging", save_id=save.save_id, session=session.name, count="saves_begun")
        return error

    def take_up(self, slot: Slot, generation: int, request: SaveRequest) -> bool:
        """Take a sealed snapshot over: from here its slot is in flight until the save has ended.

        Returns:
            Whether it was new.
        """
        slot.taken = max(slot.taken, generation)
        problem = other_world(self._t.saves.get(request.save_id), request)
        if problem:
            # IMPORTANT: before it gets an entry: a rank beyond the world would spoil a commit that is under way.
            self._break(self._t.saves[request.save_id], problem, slot.session)
            return False
        save = self._open(request.save_id, request.world_size)
        entry = save.ranks.get(request.rank)
        if entry is None:
            entry = entry_of_request(slot, generation, request, self._t.now)
            self._add(save, entry)
            self._refuse_rival(save, entry)
        if entry.session != slot.session:
            text = f"two sessions, {entry.session} and this one, save as rank {entry.rank}; the second was ignored"
            self._t.log("error", text, save_id=save.save_id, session=slot.session, count="protocol_errors")
            return False
        if entry.phase != BEGUN:
            return False  # it has ended, or the same snapshot came twice
        self.supersede(slot, save.save_id)
        entry.slot, entry.generation, entry.request = slot.number, generation, request
        slot.key = (save.save_id, entry.rank)
        self._move(save, entry, "submit")
        self._t.log("info", "snapshot taken up", save_id=save.save_id, session=slot.session, count="saves_submitted")
        problem = disagreement(save, entry, slot)
        if problem:
            self.end(save, FAILED, failed(save, entry, "disagree", problem))
        elif entry.prepared:
            self._write(save, entry)
        elif not entry.preparing:
            self._prepare(save, entry, fsync=request.fsync)
        return True

    def withdraw(self, session: Session, save_id: str, reason: str) -> None:
        """End a save that will not be sealed; one that was never heard of is remembered as abandoned."""
        known = self._t.saves.get(save_id)
        if known is not None and known.world_size != session.world_size:
            text = f"a session of {session.world_size} ranks withdrew a save of {known.world_size}; that was ignored"
            self._t.log("error", text, save_id=save_id, session=session.name, count="protocol_errors")
            return
        save = self._open(save_id, session.world_size)
        entry = save.ranks.get(session.rank)
        if entry is None:
            entry = RankSave(session.rank, session.name, 0, 0, "", 0, 0, 0, self._t.now)
            self._add(save, entry)
        if entry.phase == BEGUN and entry.session == session.name:
            self.abandon(save, entry, "withdrawn", f"staging failed: {reason}")

    def supersede(self, slot: Slot, save_id: str) -> None:
        """End a save that was begun in `slot` and never sealed, now that the slot is used for `save_id`."""
        entry = self._t.entry(slot.key)
        if slot.key is not None and slot.key[0] != save_id and entry is not None and entry.phase == BEGUN:
            self.abandon(self._t.saves[slot.key[0]], entry, "withdrawn", "its slot was used for the next save")

    def abandon(self, save: Save, entry: RankSave, code: str, detail: str) -> None:
        """End a save because one of its ranks will never seal it."""
        self.end(save, ABANDONED, failed(save, entry, code, detail))

    def _refuse_rival(self, save: Save, entry: RankSave) -> Wire | None:
        """Fail a save to a path that an earlier one still uses: which of the two wins must not be chance."""
        other = None if entry.ended else rival(entry.path, save.save_id, self._t.saves)
        if other is None:
            return None
        error = failed(save, entry, "path_in_use", f"save {other.save_id} to the same path has not ended")
        self.end(save, FAILED, error)
        return error

    def _break(self, save: Save, problem: str, session: str) -> None:
        """End a save that a rank contradicts, unless it is too late for that."""
        self._t.log("error", problem, save_id=save.save_id, session=session, count="protocol_errors")
        self.broken(Broken(now=self._t.now, save_id=save.save_id, reason=problem), "disagree")

    def broken(self, event: Broken, code: str = "internal") -> None:
        """End the save at which our own code failed; one that is being committed ends with its commit."""
        save = self._t.saves.get(event.save_id)
        if save is not None and save.outcome is None and not save.committing:
            self.end(save, FAILED, failed(save, next(iter(save.ranks.values())), code, event.reason))

    def _open(self, save_id: str, world_size: int) -> Save:
        save = self._t.saves.get(save_id)
        if save is None:
            save = self._t.saves[save_id] = Save(save_id, world_size)
        return save

    def _add(self, save: Save, entry: RankSave) -> None:
        save.ranks[entry.rank] = entry
        if save.outcome is not None:  # another rank has ended it already
            self._move(save, entry, "fail", save.error or failed(save, entry, "disagree", "it has ended before"))

    # ---- what its jobs report ---------------------------------------------------------------------------------------

    def prepared(self, event: Prepared) -> None:
        save, entry = self._t.saves.get(event.key[0]), self._t.entry(event.key)
        if save is None or entry is None or not entry.preparing:
            return
        entry.preparing, entry.prepared = False, event.error is None
        if save.outcome is not None:
            self._clean_up(save)
            return
        if event.error is not None:
            self.end(save, FAILED, event.error)
        elif entry.phase == SUBMITTED:
            self._write(save, entry)

    def written(self, event: Written) -> None:
        save, entry = self._t.saves.get(event.key[0]), self._t.entry(event.key)
        if save is None or entry is None or not entry.writing:
            return
        entry.writing = False
        slot = self._t.slots.get(entry.slot)
        if slot is not None:
            slot.writes.discard(event.key)
        entry.report.update(event.report)
        if event.error is None:
            entry.result = event.result
        if save.outcome is not None:
            self._clean_up(save)
        elif event.error is not None:
            self.end(save, FAILED, event.error)
        else:
            self._move(save, entry, "finish")
            save.waiting_since = self._t.now if save.waiting_since is None else save.waiting_since
            self._commit_when_complete(save)

    def published(self, event: Published) -> None:
        save = self._t.saves.get(event.save_id)
        if save is None or not save.committing:
            return
        save.committing = False
        for entry in save.ranks.values():
            entry.report.update(event.report)
        if event.error is not None:
            self.end(save, UNKNOWN if event.unknown else FAILED, event.error)
            return
        save.outcome = COMMITTED
        for entry in save.ranks.values():
            self._move(save, entry, "commit")
            entry.result = None
        entry = save.ranks[min(save.ranks)]
        facts = {**event.report, "step": entry.step, "path": entry.path}
        self._t.log("info", "committed", save_id=save.save_id, session=entry.session, count="saves_committed", **facts)
        self._commit_next()

    def removed(self, event: Removed) -> None:
        save = self._t.saves.get(event.save_id)
        if save is not None:
            save.removing = False

    def tick(self) -> None:
        """End saves whose other ranks have not come in time."""
        for save in list(self._t.saves.values()):
            since = save.waiting_since
            if save.outcome is not None or save.committing or since is None:
                continue
            if self._t.now - since >= self._commit_timeout_s and not self._commit_when_complete(save):
                self.end(save, FAILED, timed_out(save, self._commit_timeout_s))

    # ---- how it ends ------------------------------------------------------------------------------------------------

    def end(self, save: Save, outcome: str, error: Wire) -> None:
        """End a save on all of its ranks, without a commit."""
        assert save.outcome is None and not save.committing, f"{save.save_id} ends twice"
        save.outcome, save.error = outcome, error
        at_begun, at_durable = _OUTCOME_EVENTS[outcome]
        for entry in save.ranks.values():
            event = at_begun if entry.phase == BEGUN else at_durable if entry.phase == DURABLE else "fail"
            self._move(save, entry, event, error)
        entry = next(iter(save.ranks.values()))
        facts = {"step": entry.step, "path": entry.path, "code": error.get("code")}
        level = "warning" if outcome == ABANDONED else "error"
        text = f"{outcome}: {error.get('text', '')}"
        self._t.log(level, text, save_id=save.save_id, session=entry.session, count=f"saves_{outcome}", **facts)
        self._clean_up(save)
        self._commit_next()

    # ---- steps ------------------------------------------------------------------------------------------------------

    def _prepare(self, save: Save, entry: RankSave, *, fsync: bool) -> None:
        entry.preparing = True
        self._t.actions.append(prepare_of(save.save_id, entry, fsync=fsync))

    def _write(self, save: Save, entry: RankSave) -> None:
        assert entry.request is not None
        self._move(save, entry, "write")
        entry.writing = True
        key = (save.save_id, entry.rank)
        self._t.slots[entry.slot].writes.add(key)
        self._t.actions.append(Write(key=key, slot=entry.slot, generation=entry.generation, request=entry.request))

    def _commit_next(self) -> None:
        """A save has ended: commit those that were held back for it."""
        for save in sorted(self._t.saves.values(), key=lambda s: s.save_id):
            if save.outcome is None and not save.committing and save.waiting_since is not None:
                self._commit_when_complete(save)

    def _commit_when_complete(self, save: Save) -> bool:
        """Commit when every rank is durable, and no earlier save of the run is in flight or the time is up.

        Returns:
            Whether it is committing now.
        """
        # IMPORTANT: every rank of the world, each durable: a manifest that names one that is not would list a torn
        # checkpoint.
        entries = [save.ranks[r] for r in sorted(save.ranks)]
        if len(entries) != save.world_size or any(e.phase != DURABLE for e in entries):
            return False
        overdue = save.waiting_since is not None and self._t.now - save.waiting_since >= self._commit_timeout_s
        if has_elder(save, self._t.saves) and not overdue:
            return False
        requests = tuple(e.request for e in entries if e.request is not None)
        assert len(requests) == save.world_size
        save.committing = True
        self._t.actions.append(
            Commit(save_id=save.save_id, requests=requests, results=tuple(e.result for e in entries))
        )
        return True

    def _clean_up(self, save: Save) -> None:
        """Remove what durable ranks of a failed save have left, once nobody writes to it any more."""
        left = [e for e in save.ranks.values() if e.result is not None]
        # IMPORTANT: never after `unknown`: the manifest may stand, and these are its files.
        if save.outcome in (FAILED, ABANDONED) and left and not save.busy:
            self._t.actions.append(Remove(save_id=save.save_id, path=left[0].path))
            save.removing = True
            for entry in left:
                entry.result = None

    def _move(self, save: Save, entry: RankSave, event: str, error: Wire | None = None) -> None:
        if entry.phase in ENDED:
            return
        entry.phase = advance(entry.phase, event)
        entry.error = error
        if entry.phase in ENDED:
            entry.request = None
        if entry.phase in ENDED or entry.phase == DURABLE:
            self._t.changed[(save.save_id, entry.rank)] = None
