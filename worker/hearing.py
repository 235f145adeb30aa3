"""What the brain does about a follower's records: its ranks take part like those of this worker's own trainers.

A rank of a follower is a session without a peer, called `<stream>/<rank>`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from asyncckpt.format.names import SaveId
from asyncckpt.protocol.fields import MAX_RANKS
from asyncckpt.protocol.lifecycle import ABANDONED, BEGUN, COMMITTED, DURABLE, FAILED
from asyncckpt.protocol.message import Message
from asyncckpt.protocol.messages import Begin, Consent, Lineage, Withdraw
from asyncckpt.protocol.relay import (
    Asked,
    Begun,
    Consented,
    Declined,
    Delivered,
    GaveUp,
    Joined,
    Left,
    Ringed,
    Sealed,
)
from asyncckpt.protocol.request import decode_request
from asyncckpt_worker.consents import ConsentBook
from asyncckpt_worker.events import Wire
from asyncckpt_worker.intake import Intake
from asyncckpt_worker.lineages import LineageBook
from asyncckpt_worker.records import Session, Slot
from asyncckpt_worker.results import unpack_result
from asyncckpt_worker.runs import RunBook
from asyncckpt_worker.saves import SaveBook
from asyncckpt_worker.streams import Stream
from asyncckpt_worker.tables import Tables
from asyncckpt_worker.verdicts import not_taken, worker_lost

_ANY_OFFSET = 1 << 62
"""Where a request's parts lie in the slot is the follower's affair."""


@dataclass(slots=True)
class Link:
    """The stream of one follower in one run. `route`: where it was heard last."""

    run_id: str
    stream: Stream
    route: bytes
    world_size: int = 0
    changes_sent: int = 0
    lost: set[int] = field(default_factory=set)
    """Ranks that have another worker now: what is heard of them here is late."""

    said_waits_at: float = float("-inf")


class Hearing:
    """See the module.

    Args:
        tables: The brain's.
        runs, intake, saves, lineages: The brain's books.
        end: Tells a link how a save has ended of which it has no part here.
        find: Returns the link of a stream.
    """

    def __init__(
        self,
        tables: Tables,
        runs: RunBook,
        intake: Intake,
        saves: SaveBook,
        lineages: LineageBook,
        end: Callable[[Link, str, str, Wire], None],
        find: Callable[[str], Link | None],
    ) -> None:
        self._t, self._runs, self._intake, self._saves = tables, runs, intake, saves
        self._lineages, self._end, self._find = lineages, end, find

    def take(self, link: Link, record: Message) -> None:
        """Do what a record asks for.

        Raises:
            Exception: It cannot be: the follower breaks the rules, or we do.
        """
        if isinstance(record, Joined):
            return self._joined(link, record)
        if link.world_size == 0:
            raise ValueError(f"{record.name} before joined")
        if not getattr(record, "save_id", link.run_id).endswith(link.run_id):
            raise ValueError(f"{record.name} of another run")
        if isinstance(record, GaveUp):
            return self._gave_up(link, record)
        return self._of_rank(link, record)

    def _of_rank(self, link: Link, record: Message) -> None:
        if not 0 <= record.rank < link.world_size:  # type: ignore[attr-defined]
            raise ValueError(f"a rank outside of world {link.world_size}")
        if record.rank in link.lost:  # type: ignore[attr-defined]
            if isinstance(record, (Begun, Sealed)):
                self._end_if_not_ours(link, record.save_id, record.rank)
            return
        session = self._session(link, record.rank)  # type: ignore[attr-defined]
        match record:
            case Left():
                self._leave(session, record.why)
            case Asked():
                self._lineages.ask(session, Lineage(id=0, run=link.run_id, path=record.path))
            case Begun():
                self._begun(link, session, record)
            case Ringed():
                self._ringed(link, record)
            case Sealed():
                self._sealed(link, session, record)
            case Delivered():
                save, entry = self._t.saves.get(record.save_id), self._t.entry((record.save_id, record.rank))
                if save is not None and entry is not None and entry.link == link.stream.name:
                    result = unpack_result(record.result, record.save_id, record.rank)
                    self._saves.delivered(save, entry, result, record.report)
            case Declined() if self._is_given_up(link, record):
                pass
            case Declined():
                message = Withdraw(id=0, save_id=record.save_id, reason=record.reason, skipped=record.skipped)
                self._intake.withdraw(session, message)
            case Consented():
                granted = Consent(id=0, save_id=record.save_id, granted=record.granted, reason=record.reason)
                ConsentBook(self._t, self._saves).consent(session, granted)

    # ---- ranks ------------------------------------------------------------------------------------------------------

    def _joined(self, link: Link, record: Joined) -> None:
        if not record.rank < record.world_size <= MAX_RANKS or link.world_size not in (0, record.world_size):
            raise ValueError(f"rank {record.rank} of world {record.world_size}")
        link.world_size = record.world_size
        run = self._t.runs.get(link.run_id)
        holder = self._t.sessions.get(run.members.get(record.rank, "")) if run is not None else None
        joined = record.attempt, record.opened
        if holder is not None and holder.link and holder.link != link.stream.name:
            if joined < holder.joined:
                link.lost.add(record.rank)
                return
            self._part(holder)
        link.lost.discard(record.rank)
        session = self._session(link, record.rank)
        session.joined = joined
        self._runs.join(session, link.run_id)

    def _session(self, link: Link, rank: int) -> Session:
        name = f"{link.stream.name}/{rank}"
        session = self._t.sessions.get(name)
        if session is None:
            session = self._t.sessions[name] = Session(
                name, b"", 0, 0, rank, link.world_size, "", hello=None, link=link.stream.name
            )
        return session

    def _leave(self, session: Session, why: str) -> None:
        del self._t.sessions[session.name]
        self._runs.leave(session, why)

    def _part(self, session: Session, why: str = "the rank has another worker now") -> None:
        """A rank has left a stream. The saves that it has begun by that go on: the next stream tells of them again.

        Those of which it does not end with the silence of this stream (`deadlines`), as if its worker were cut off.
        """
        link = self._find(session.link)
        if link is not None:
            link.lost.add(session.rank)
        self._leave(session, f"its worker was lost: {why}")

    def lose(self, session: Session, why: str) -> None:
        """The worker of a rank is gone: what it had not written, or its hook not seen, will never be."""
        self._part(session, why)
        for save in [s for s in self._t.saves.values() if s.outcome is None and not s.committing]:
            entry = save.ranks.get(session.rank)
            if entry is not None and entry.link == session.link and (entry.phase != DURABLE or entry.needs_consent):
                self._saves.end(save, FAILED, worker_lost(save, entry, why))

    # ---- saves ------------------------------------------------------------------------------------------------------

    def _goes_on(self, link: Link, session: Session, save_id: str) -> None:
        """A rank that has another stream now goes on with what it had begun by the one before.

        What was heard by that stays: it is told again, and is the same. An end that it may have missed is told again.
        """
        save, entry, run = self._t.saves.get(save_id), self._t.entry((save_id, session.rank)), session.run
        if save is None or entry is None or entry.link in ("", link.stream.name) or run != link.run_id:
            return
        entry.link, entry.session = link.stream.name, session.name
        entry.ringed = entry.streaming = False
        text = "a rank of it has another worker"
        self._t.log("info", text, save_id=save_id, session=session.name, count="ranks_resumed")
        if entry.ended:
            self._t.changed[(save_id, session.rank)] = None

    def _is_given_up(self, link: Link, record: Declined) -> bool:
        """Whether a rank says of what it has sealed that nobody goes on with it: its worker is dead."""
        save, entry = self._t.saves.get(record.save_id), self._t.entry((record.save_id, record.rank))
        if save is None or entry is None or entry.link in ("", link.stream.name) or entry.phase == BEGUN:
            return False
        written = entry.phase == DURABLE and not entry.needs_consent
        if save.outcome is None and not save.committing and not written:
            self._saves.end(save, FAILED, worker_lost(save, entry, record.reason or "nobody goes on with it"))
        return True

    def _begun(self, link: Link, session: Session, record: Begun) -> None:
        self._goes_on(link, session, record.save_id)
        save = self._t.saves.get(record.save_id)
        if save is not None and save.outcome == COMMITTED and record.rank not in save.ranks:
            return self._end(link, record.save_id, COMMITTED, {})  # by the leader before: of every rank of the world
        if self._t.entry((record.save_id, record.rank)) is None:
            begin = Begin(
                id=0,
                save_id=record.save_id,
                step=record.step,
                path=record.path,
                slot=0,
                generation=0,
                nbytes=record.nbytes,
                umask=record.umask,
                fsync=True,
                overwrite=record.overwrite,
                commit_timeout_s=record.commit_timeout_s,
            )
            if self._intake.refuse_other_world(session, record.save_id) is None:
                self._intake.begin(session, begin, resumed=record.resumed)
        return self._end_if_not_ours(link, record.save_id, record.rank)

    def _ringed(self, link: Link, record: Ringed) -> None:
        entry = self._t.entry((record.save_id, record.rank))
        if entry is not None and entry.link == link.stream.name and entry.phase == BEGUN:
            entry.streaming, entry.ringed, entry.written_at = True, record.writing, self._t.now

    def _sealed(self, link: Link, session: Session, record: Sealed) -> None:
        request = decode_request(record.request, _ANY_OFFSET)
        if (request.save_id, request.rank) != (record.save_id, record.rank):
            raise ValueError("a request of another save or rank")
        save = self._t.saves.get(record.save_id)
        if save is not None and save.outcome == COMMITTED and record.rank not in save.ranks:
            return  # as `_begun` has answered
        slot = Slot(0, 0, session.name, session.rank, session.world_size, 0, link=link.stream.name)
        self._intake.take_up(slot, 1, request)
        self._end_if_not_ours(link, record.save_id, record.rank)

    def _end_if_not_ours(self, link: Link, save_id: str, rank: int) -> None:
        """The follower waits for an end: it must hear of one although its part was not taken."""
        entry = self._t.entry((save_id, rank))
        if entry is None or entry.link != link.stream.name:
            self._end(link, save_id, FAILED, not_taken(save_id, rank))

    def _gave_up(self, link: Link, record: GaveUp) -> None:
        save, parsed = self._t.saves.get(record.save_id), SaveId.parse(record.save_id)
        run = self._t.runs.get(parsed.run_id)
        if not record.error:
            raise ValueError("given up without a reason")
        if save is not None and save.outcome is None and not save.committing:
            outcome = ABANDONED if record.outcome == ABANDONED else FAILED
            self._saves.end(save, outcome, record.error)
        elif save is None and run is not None:
            self._runs.withdraw(run, parsed.sequence, record.error)  # ranks that begin it later need not wait
        if save is None or not any(e.link == link.stream.name for e in save.ranks.values()):
            committed = save is not None and save.outcome == COMMITTED
            self._end(link, record.save_id, COMMITTED if committed else FAILED, {} if committed else record.error)
