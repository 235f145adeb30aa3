"""How a rank joins a save, by Begin or by a sealed slot; and how it withdraws, consents or vetoes."""

from __future__ import annotations

from asyncckpt.format.names import SaveId
from asyncckpt.protocol.messages import Begin, Consent, Withdraw
from asyncckpt.protocol.request import SaveRequest
from asyncckpt.protocol.save_phases import ABANDONED, COMMITTED, FAILED, OPEN, UNKNOWN
from asyncckpt_worker.core.consistency import declare, own_contradiction
from asyncckpt_worker.core.events import Wire
from asyncckpt_worker.core.failures import failed, kind_of, other_world, withdrawn
from asyncckpt_worker.core.model import NEW, RankSave, Save, Session, Slot
from asyncckpt_worker.core.runs import RunRegistry
from asyncckpt_worker.core.saves import SaveRegistry, clean_up
from asyncckpt_worker.core.tables import EndedSave, Tables

MAX_DECLINED = 64
"""Withdrawals of a run that are kept, to report them to a new leader. More than saves are open at once."""


class SaveAdmission:
    """Adds saves and parts to `tables.saves`, and ends those that can never commit."""

    def __init__(self, tables: Tables, saves: SaveRegistry, runs: RunRegistry) -> None:
        self._t, self._saves, self._runs = tables, saves, runs

    def refuse_other_world(self, session: Session, save_id: SaveId) -> Wire | None:
        """Return an error if the save belongs to a world of another size, and end that save; else None."""
        save, run = self._t.find(save_id), self._t.runs.get(save_id.run_id)
        known = save.world_size if save is not None else run.world_size if run is not None else session.world_size
        if known == session.world_size:
            return None
        return self._refuse_world(save_id, session.rank, session.world_size, session.name)

    # ---- begin ------------------------------------------------------------------------------------------------------

    def begin(self, session: Session, message: Begin, *, resumed: bool = False) -> Wire | None:
        """Add the part of a rank that stages. The caller has checked slot and generation.

        Args:
            session: Session of the rank.
            message: Its Begin.
            resumed: As in `part_of_begin`.

        Returns:
            The error if another save uses the path, or None.
        """
        save_id = SaveId.parse(message.save_id)
        self._runs.join(session, save_id.run_id)
        save = self._open(save_id, session.world_size)
        slot = None if session.follower else self._t.slots.get(message.slot)
        adopted = slot.adopted_generation if slot is not None else -1
        part = part_of_begin(session, message, self._t.now, adopted=adopted, resumed=resumed)
        had_ended = save.outcome is not None
        self._add(save, part)
        if had_ended:
            clean_up(self._t, save)  # files that its former worker may have written
        elif not part.ended and not save.failed_locally:
            self._t.log("debug", "staging", save_id=save.save_id, session=session.name, count="saves_begun")
        return part.error if part.error and not had_ended and kind_of(part.error) == "path_in_use" else None

    # ---- the seal ---------------------------------------------------------------------------------------------------

    def accept_sealed(self, slot: Slot, generation: int, request: SaveRequest) -> bool:
        """Accept a sealed snapshot: its slot is in flight until the save has ended.

        Returns:
            Whether the snapshot was new, and its part was open.
        """
        slot.accepted_generation = max(slot.accepted_generation, generation)
        found = self._part_in(slot, generation, request, sealed=True)
        if found is None:
            return False
        save, part = found
        part.ring_segments = request.ring_segments
        if not part.is_open:  # it has ended, or the snapshot was accepted before
            if part.phase == COMMITTED and (part.slot, part.generation) == (slot.number, generation):
                slot.last = (save, part)  # the snapshot can still be loaded from the slot
            return False
        part.slot, part.generation, part.request = slot.number, generation, request
        part.commit_timeout_s = min(part.commit_timeout_s, request.commit_timeout_s)
        save.timeout_s = min(save.timeout_s, part.commit_timeout_s)
        slot.last = (save, part)
        declare(save, part)
        save.meet = save.meet or request.changed
        save.sealed_since = self._t.now if save.sealed_since is None else save.sealed_since
        text = "sealed snapshot accepted"
        self._t.log("info", text, save_id=save.save_id, session=slot.session, count="saves_submitted")
        part.step = request.step if part.step is None else part.step
        part.contradiction = own_contradiction(part, slot)
        if part.phase == NEW:
            self._begin(save, part, "seal")
        else:
            self._saves.advance(save, part, "seal")
        return True

    def stream(self, slot: Slot, generation: int, request: SaveRequest) -> None:
        """Write a slot while its trainer fills it; its part stays open until the seal."""
        found = self._part_in(slot, generation, request, sealed=False)
        if found is None:
            return
        save, part = found
        if not part.is_open or part.stream is not None:
            return
        if (part.slot, part.generation) != (slot.number, generation):
            return
        slot.last = (save, part)
        part.ring_segments, part.stream = request.ring_segments, request
        if part.ring:
            text, level, counter = "writing a ring while it is filled", "info", "saves_ringed"
        else:
            text, level, counter = "writing the slot while it is filled", "debug", "saves_early"
        self._t.log(level, text, save_id=save.save_id, session=slot.session, count=counter)
        if part.phase == OPEN and not part.preparing and not save.failed_locally:
            self._saves.advance(save, part, "prepared")

    def _part_in(
        self, slot: Slot, generation: int, request: SaveRequest, *, sealed: bool
    ) -> tuple[Save, RankSave] | None:
        """Return the save and part of a slot's request; None if the request contradicts them.

        A rank that is not in the save yet is added. If its request is not sealed, its part begins by this.
        """
        save_id = SaveId.parse(request.save_id)
        known = self._t.find(save_id)
        run = self._runs.join_by_slot(slot, save_id.run_id, request.world_size)
        world_size = known.world_size if known is not None else run.world_size
        if world_size != request.world_size:
            # IMPORTANT: before the part is added: a rank beyond the world would break a commit that is in progress.
            self._refuse_world(save_id, request.rank, request.world_size, slot.session)
            return None
        # IMPORTANT: before the part is added: the earlier save in this slot may use the same path.
        self.supersede(slot, save_id, generation)
        save = self._open(save_id, request.world_size, request.rank)
        part = save.ranks.get(request.rank)
        if part is None:
            part = part_of_request(slot, generation, request, self._t.now)
            self._add(save, part, sealed=sealed)
        if part.session != slot.session:
            text = f"two sessions, {part.session} and this one, save as rank {part.rank}; the second was ignored"
            self._t.log("error", text, save_id=save.save_id, session=slot.session, count="protocol_errors")
            return None
        return save, part

    # ---- withdrawal and consent -------------------------------------------------------------------------------------

    def withdraw(self, session: Session, m: Withdraw) -> None:
        """End a save on all ranks because this rank will not seal it; also if no rank has begun it yet."""
        parsed = SaveId.parse(m.save_id)
        run = self._runs.join(session, parsed.run_id)
        if run is None or self._runs.is_other_sessions(run, session):
            text = f"rank {session.rank} of {session.world_size} withdrew a save of another session or world; ignored"
            return self._t.log("error", text, save_id=m.save_id, session=session.name, count="protocol_errors")
        if run.followed:
            row = {"save_id": m.save_id, "rank": session.rank, "reason": m.reason, "skipped": m.skipped}
            run.declined = [*run.declined, row][-MAX_DECLINED:]
            return self._t.to_report.add(run.run_id)
        saves = self._t.of_call(parsed.call)
        if any(s.outcome is not None or isinstance(s, EndedSave) or s.has_sealed(session.rank) for s in saves):
            return None
        error = withdrawn(m.save_id, session.rank, m.reason or "no reason given", skipped=m.skipped)
        self._runs.withdraw(run, parsed.sequence, error)
        for save in saves:
            if isinstance(save, Save):
                self._saves.end(save, ABANDONED, error)
        return None

    def consent(self, session: Session, m: Consent) -> None:
        """Handle the answer of a rank's `pre_commit` hook. The first one counts; other saves are ignored."""
        run = self._t.runs.get(SaveId.parse(m.save_id).run_id)
        if run is not None and run.members.get(session.rank) == session.name:
            run.hook_answered_at[session.rank] = self._t.now
            if run.followed:
                if (mine := self._t.part((m.save_id, session.rank))) is not None:
                    mine.consent = mine.consent or (m.granted, m.reason)
                return self._t.to_report.add(run.run_id)
        save, part = self._t.saves.get(m.save_id), self._t.part((m.save_id, session.rank))
        if save is None or part is None or save.outcome is not None or save.world_size != session.world_size:
            return
        if part.session != session.name and part.session in self._t.sessions:
            return
        if not m.granted and part.needs_consent:
            self._saves.end(save, FAILED, failed(save, part, "vetoed", f"its pre_commit hook refused: {m.reason}"))
        elif m.granted and part.needs_consent:
            part.consent = (True, m.reason)
            self._saves.commit_when_complete(save)

    def supersede(self, slot: Slot, save_id: str, generation: int) -> None:
        """Abandon an unsealed save in `slot`, now that a later `generation` of the slot belongs to `save_id`."""
        if slot.last is None or slot.last[0].save_id == save_id:
            return
        if slot.last[1].is_open and slot.last[1].generation < generation:
            self.abandon(*slot.last, "withdrawn", "its slot was used for the next save")

    def abandon(self, save: Save, part: RankSave, code: str, detail: str) -> None:
        """End a save because a rank will never seal it."""
        self._saves.end(save, ABANDONED, failed(save, part, code, detail))

    # ---- adding parts -----------------------------------------------------------------------------------------------

    def _open(self, save_id: SaveId, world_size: int, *ranks: int) -> Save:
        save = self._t.find_or_reopen(save_id, *ranks)
        if save is None:
            save = self._t.saves[save_id] = Save(save_id, world_size)
        return save

    def _add(self, save: Save, part: RankSave, *, sealed: bool = False) -> None:
        """Add a rank's part. It ends like its save if that has ended; else it begins, unless its seal will begin it."""
        save.add(part)
        declare(save, part)
        if (session := self._t.sessions.get(part.session)) is not None:
            session.last = (save, part)
        if save.outcome == COMMITTED and sealed and part.from_dead_worker:  # the dead worker had committed it
            self._saves.advance(save, part, "commit")
        elif save.outcome is not None:
            error = save.error or failed(save, part, "disagree", "it has ended before")
            is_unknown = save.outcome == UNKNOWN and part.from_dead_worker
            self._saves.advance(save, part, "lose" if is_unknown else "fail", error)
        elif not sealed:
            self._begin(save, part, "begin")

    def _begin(self, save: Save, part: RankSave, event: str) -> None:
        """Give a part its first phase: `recovering` if a dead worker may have committed its save."""
        if part.from_dead_worker and not save.known_uncommitted:
            event = "recover"
        self._saves.advance(save, part, event)

    def _refuse_world(self, save_id: SaveId, rank: int, world_size: int, session: str) -> Wire:
        """Log and return the error of a rank of another world; end its save, unless that is being committed."""
        save, run = self._t.find(save_id), self._t.runs.get(save_id.run_id)
        known = save.world_size if save is not None else run.world_size if run is not None else 0
        error = other_world(save_id, known, rank, world_size)
        self._t.log("error", str(error["text"]), save_id=save_id, session=session, count="protocol_errors")
        if isinstance(save, Save) and save.outcome is None and not save.committing:
            self._saves.end(save, FAILED, error)
        return error


def part_of_begin(session: Session, m: Begin, now: float, *, adopted: int = -1, resumed: bool = False) -> RankSave:
    """Return the part of a rank that has begun.

    Args:
        session, m: The rank's session, and its Begin.
        now: Time of the event.
        adopted: `Slot.adopted_generation` of its slot.
        resumed: Reported by a follower: a dead worker or leader may have committed it.
    """
    return RankSave(
        rank=session.rank,
        session=session.name,
        slot=m.slot,
        generation=m.generation,
        path=m.path,
        step=m.step,
        nbytes=m.nbytes,
        umask=m.umask,
        fsync=m.fsync,
        overwrite=m.overwrite,
        begun_at=now,
        commit_timeout_s=m.commit_timeout_s,
        follower=session.follower,
        storage=session.storage,
        from_dead_worker=resumed or m.generation <= adopted,
    )


def part_of_request(slot: Slot, generation: int, request: SaveRequest, now: float) -> RankSave:
    """Return the part of a rank whose Begin was not received, from the request in its slot."""
    return RankSave(
        rank=request.rank,
        session=slot.session,
        slot=slot.number,
        generation=generation,
        path=request.path,
        step=request.step,
        nbytes=sum(p.nbytes for p in request.parts),
        umask=request.umask,
        fsync=request.fsync,
        overwrite=request.overwrite,
        begun_at=now,
        commit_timeout_s=request.commit_timeout_s,
        follower=slot.follower,
        storage=slot.storage,
        from_dead_worker=generation <= slot.adopted_generation,
    )
