"""How the brain's saves come to be: by Begin or by a sealed slot; and how a rank says that it will not take part."""

from __future__ import annotations

from asyncckpt.format.names import SaveId
from asyncckpt.protocol.lifecycle import ABANDONED, BEGUN, COMMITTED, FAILED
from asyncckpt.protocol.messages import Begin, Withdraw
from asyncckpt.protocol.relay import Declined
from asyncckpt.protocol.request import SaveRequest
from asyncckpt_worker.agreement import disagreement, own_contradiction, settle_step, unequal_samples
from asyncckpt_worker.changes import ChangeBook
from asyncckpt_worker.entries import entry_of_begin, entry_of_request, steps_to_durable
from asyncckpt_worker.events import Wire
from asyncckpt_worker.leftovers import clean_up
from asyncckpt_worker.order import rival, same_call
from asyncckpt_worker.records import RankSave, Save, Session, Slot
from asyncckpt_worker.runs import RunBook
from asyncckpt_worker.saves import SaveBook
from asyncckpt_worker.starting import start_writing
from asyncckpt_worker.tables import Tables
from asyncckpt_worker.verdicts import disagree, failed, mismatch, other_world, path_in_use, withdrawn

MAX_DECLINED = 64
"""What the ranks of a run have declined last, told again to another leader. More than saves are in flight at once."""


class Intake:
    """Adds to `tables.saves`, and ends at once what cannot be."""

    def __init__(self, tables: Tables, saves: SaveBook, runs: RunBook, changes: ChangeBook) -> None:
        self._t, self._saves, self._runs, self._changes = tables, saves, runs, changes

    def refuse_other_world(self, session: Session, save_id: str) -> Wire | None:
        """Return why a session cannot begin a save of ranks of another world, which ends by that; else None."""
        save, run = self._t.saves.get(save_id), self._t.runs.get(SaveId.parse(save_id).run_id)
        known = save.world_size if save is not None else run.world_size if run is not None else session.world_size
        if known == session.world_size:
            return None
        return self._refuse_world(save_id, session.rank, session.world_size, session.name)

    # ---- begin ------------------------------------------------------------------------------------------------------

    def begin(self, session: Session, message: Begin, *, resumed: bool = False) -> Wire | None:
        """Add the entry of a rank that stages. The caller has checked slot and generation.

        Args:
            session, message: Of whom, and what.
            resumed: As of `entry_of_begin`.

        Returns:
            Why the save has failed at once, or None.
        """
        self._runs.join(session, SaveId.parse(message.save_id).run_id)
        self._runs.heard_of(message.save_id, session.world_size)
        save = self._open(message.save_id, session.world_size)
        slot = None if session.link else self._t.slots.get(message.slot)
        adopted = slot.adopted if slot is not None else -1
        entry = entry_of_begin(session, message, self._t.now, adopted=adopted, resumed=resumed)
        self._add(save, entry)
        if save.outcome is not None:
            clean_up(self._t, save)  # it has ended before: what its former worker had begun to write goes
        error = None if resumed else self._refuse_rival(save, entry)
        if not entry.ended and not save.given_up:
            self._saves.prepare(save, entry, fsync=message.fsync)
            self._t.log("debug", "staging", save_id=save.save_id, session=session.name, count="saves_begun")
        return error

    # ---- the seal ---------------------------------------------------------------------------------------------------

    def take_up(self, slot: Slot, generation: int, request: SaveRequest) -> bool:
        """Take a sealed snapshot over: from here its slot is in flight until the save has ended.

        Returns:
            Whether it was new.
        """
        slot.taken = max(slot.taken, generation)
        found = self._entry_in(slot, generation, request, sealed=True)
        if found is None:
            return False
        save, entry = found
        entry.ring = request.ring_segments > 0
        if entry.phase != BEGUN:  # it has ended, or the same snapshot came twice
            if entry.phase == COMMITTED and (entry.slot, entry.generation) == (slot.number, generation):
                slot.key = (save.save_id, entry.rank)  # where it can still be loaded from
            return False
        self.supersede(slot, save.save_id)
        entry.slot, entry.generation, entry.request = slot.number, generation, request
        entry.commit_timeout_s = min(entry.commit_timeout_s, request.commit_timeout_s)
        slot.key = (save.save_id, entry.rank)
        save.sealed_since = self._t.now if save.sealed_since is None else save.sealed_since
        self._saves.move(save, entry, "submit")
        self._t.log("info", "snapshot taken up", save_id=save.save_id, session=slot.session, count="saves_submitted")
        entry.step = request.step if entry.step is None else entry.step
        problem = self._problem(save, entry, slot)
        settle_step(save)
        if problem is not None:
            self._saves.end(save, FAILED, problem)
        elif not entry.resumed and (verdict := self._runs.verdict(save)) is not None:
            self._saves.end(save, ABANDONED, verdict)
        else:
            save.complete = not save.missing
            if entry.prepared:
                self._saves.write(save, entry)
            elif not entry.preparing:
                self._saves.prepare(save, entry, fsync=request.fsync)
        return True

    def stream(self, slot: Slot, generation: int, request: SaveRequest) -> None:
        """Write a slot that its trainer has begun to fill: its save stays begun until that is sealed."""
        found = self._entry_in(slot, generation, request, sealed=False)
        if found is None:
            return
        save, entry = found
        if (
            entry.phase != BEGUN
            or entry.stream is not None
            or (entry.slot, entry.generation) != (slot.number, generation)
        ):
            return
        self.supersede(slot, save.save_id)
        slot.key = (save.save_id, entry.rank)
        entry.ring, entry.stream = request.ring_segments > 0, request
        if entry.ring:
            text, level, counter = "a ring is being filled", "info", "saves_ringed"
        else:
            text, level, counter = "writing begins while it is staged", "debug", "saves_early"
        self._t.log(level, text, save_id=save.save_id, session=slot.session, count=counter)
        if save.given_up:
            return
        if entry.prepared:
            start_writing(self._t, save, entry, request)
        elif not entry.preparing:
            self._saves.prepare(save, entry, fsync=request.fsync)

    def _entry_in(
        self, slot: Slot, generation: int, request: SaveRequest, *, sealed: bool
    ) -> tuple[Save, RankSave] | None:
        """Return what a slot's request is of, added where it was not known; None: nothing that it can be."""
        known = self._t.saves.get(request.save_id)
        run = self._runs.join_by_slot(slot, SaveId.parse(request.save_id).run_id, request.world_size)
        world_size = known.world_size if known is not None else run.world_size
        if world_size != request.world_size:
            # IMPORTANT: before it gets an entry: a rank beyond the world would spoil a commit that is under way.
            self._refuse_world(request.save_id, request.rank, request.world_size, slot.session)
            return None
        self._runs.heard_of(request.save_id, request.world_size)
        save = self._open(request.save_id, request.world_size)
        entry = save.ranks.get(request.rank)
        if entry is None:
            entry = entry_of_request(slot, generation, request, self._t.now)
            self._add(save, entry, sealed=sealed)
            if not entry.resumed:
                self._refuse_rival(save, entry)
        if entry.session != slot.session:
            text = f"two sessions, {entry.session} and this one, save as rank {entry.rank}; the second was ignored"
            self._t.log("error", text, save_id=save.save_id, session=slot.session, count="protocol_errors")
            return None
        return save, entry

    def _problem(self, save: Save, entry: RankSave, slot: Slot) -> Wire | None:
        """Compare a rank that has just come with its session and the other ranks; once all are there, their samples."""
        contradiction = own_contradiction(entry, slot)
        if contradiction:
            return failed(save, entry, "disagree", contradiction)
        found = disagreement(save, entry)
        if found is not None:
            return disagree(save.save_id, entry.path, found[0], [entry.rank, found[1]], found[2])
        if save.missing:
            return None
        unequal = unequal_samples(save)
        self._changes.note(save, (fqn for fqn, _, _ in unequal))
        self._changes.publish(save, complete=True)
        for fqn, split, groups in unequal:
            # IMPORTANT: also where one rank writes all of it. Which one that is differs from tensor to tensor, so what
            # the writers have would be a checkpoint that no rank ever held.
            return mismatch(save, entry.path, fqn, groups, split=split)
        return None

    # ---- who does not take part -------------------------------------------------------------------------------------

    def withdraw(self, session: Session, m: Withdraw) -> None:
        """End a save that will not be sealed by this rank, on all ranks; one that nobody has begun is remembered."""
        parsed = SaveId.parse(m.save_id)
        run = self._runs.join(session, parsed.run_id)
        if run is None or self._runs.is_other_sessions(run, session):
            text = f"rank {session.rank} of {session.world_size} withdrew a save of others; that was ignored"
            return self._t.log("error", text, save_id=m.save_id, session=session.name, count="protocol_errors")
        self._runs.heard_of(m.save_id, session.world_size)
        if run.followed:
            record = Declined(save_id=m.save_id, rank=session.rank, reason=m.reason, skipped=m.skipped)
            run.declined = [*run.declined, record][-MAX_DECLINED:]
            return self._t.told.append((run.run_id, record))
        saves = same_call(m.save_id, self._t.saves)
        if any(s.has_sealed(session.rank) or s.outcome is not None for s in saves):
            return None
        error = withdrawn(m.save_id, session.rank, m.reason or "no reason given", skipped=m.skipped)
        self._runs.withdraw(run, parsed.sequence, error)
        for save in saves:
            self._saves.end(save, ABANDONED, error)
        return None

    def supersede(self, slot: Slot, save_id: str) -> None:
        """End a save that was begun in `slot` and never sealed, now that the slot is used for `save_id`."""
        entry = self._t.entry(slot.key)
        if slot.key is not None and slot.key[0] != save_id and entry is not None and entry.phase == BEGUN:
            self.abandon(self._t.saves[slot.key[0]], entry, "withdrawn", "its slot was used for the next save")

    def abandon(self, save: Save, entry: RankSave, code: str, detail: str) -> None:
        """End a save because one of its ranks will never seal it."""
        self._saves.end(save, ABANDONED, failed(save, entry, code, detail))

    # ---- what cannot be ---------------------------------------------------------------------------------------------

    def _open(self, save_id: str, world_size: int) -> Save:
        save = self._t.saves.get(save_id)
        if save is None:
            save = self._t.saves[save_id] = Save(save_id, world_size)
        return save

    def _add(self, save: Save, entry: RankSave, *, sealed: bool = False) -> None:
        """Add a rank; it ends with a save that another rank has ended already, or that never can be."""
        save.ranks[entry.rank] = entry
        self._t.touched[(save.save_id, entry.rank)] = None
        if save.outcome == COMMITTED and sealed and entry.resumed:  # by the worker before, as its other ranks have said
            for step in (*steps_to_durable(entry), "commit"):
                self._saves.move(save, entry, step)
            return None
        if save.outcome is not None:
            error = save.error or failed(save, entry, "disagree", "it has ended before")
            return self._saves.move(save, entry, "fail", error)
        twins = [s for s in same_call(save.save_id, self._t.saves) if s is not save and s.world_size > 1]
        if twins:
            detail = f"rank {entry.rank} saves it as {save.save_id}, others as {twins[0].save_id}"
            for one in [save, *(t for t in twins if t.outcome is None and not t.committing)]:
                ranks = {*save.ranks, *twins[0].ranks}
                self._saves.end(one, FAILED, disagree(one.save_id, entry.path, detail, ranks))
        elif not sealed and not entry.resumed and (verdict := self._runs.verdict(save)) is not None:
            self._saves.end(save, ABANDONED, verdict)
        return None

    def _refuse_rival(self, save: Save, entry: RankSave) -> Wire | None:
        """Fail a save to a path that an earlier one still uses: which of the two wins must not be chance."""
        if self._t.is_followed(save.save_id):
            return None  # its leader sees all ranks
        other = None if entry.ended else rival(entry.path, save.save_id, self._t.saves)
        if other is None:
            return None
        error = path_in_use(save, entry, other.save_id)
        self._saves.end(save, FAILED, error)
        return error

    def _refuse_world(self, save_id: str, rank: int, world_size: int, session: str) -> Wire:
        """End a save that a rank of another world contradicts, unless it is too late for that."""
        save, run = self._t.saves.get(save_id), self._t.runs.get(SaveId.parse(save_id).run_id)
        known = save.world_size if save is not None else run.world_size if run is not None else 0
        error = other_world(save_id, known, rank, world_size)
        self._t.log("error", str(error["text"]), save_id=save_id, session=session, count="protocol_errors")
        if save is not None and save.outcome is None and not save.committing:
            self._saves.end(save, FAILED, error)
        return error
