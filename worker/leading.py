"""The brain's runs that this worker leads for others: who may follow, what each follower says, and what it is told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncckpt.errors import from_wire
from asyncckpt.protocol.codec import unpack
from asyncckpt.protocol.fields import MAX_MISSING
from asyncckpt.protocol.lifecycle import COMMITTED, FAILED
from asyncckpt.protocol.messages import Lead, Leading
from asyncckpt.protocol.relay import FOLLOWER_RECORDS, Changed, Ended, EpochFound, Piece, Unlinked, Waits
from asyncckpt_worker.actions import Listen, Relay
from asyncckpt_worker.deadlines import forget_the_silent
from asyncckpt_worker.events import Listening, Peer, Relayed, Wire
from asyncckpt_worker.hearing import Hearing, Link
from asyncckpt_worker.intake import Intake
from asyncckpt_worker.lending import Lending, busy
from asyncckpt_worker.lineages import LineageBook
from asyncckpt_worker.progress import packed
from asyncckpt_worker.records import Save, Session
from asyncckpt_worker.rows import missing_of
from asyncckpt_worker.runs import RunBook
from asyncckpt_worker.saves import SaveBook
from asyncckpt_worker.streams import BEAT_S, Stream
from asyncckpt_worker.tables import Tables
from asyncckpt_worker.verdicts import leads_not, other_world

MAX_LED = 64
"""Runs whose followers are admitted; the oldest that nobody saves in any more makes room. Chosen, not measured."""

MAX_LINKS = 4096
"""Streams: more than a job has nodes."""

MAX_WAITS = 64
"""Open saves that one `waits` speaks of, the latest."""

FORGET_S = 600.0
"""A follower that is silent for so long, and longer than any of its saves may take, is forgotten."""

PRESENT_S = 5.0
"""A follower that was heard so lately is there."""


@dataclass(slots=True)
class _Listener:
    """Where this worker listens, once it does."""

    address: str = ""
    public: str = ""
    secret: str = ""
    waiting: list[tuple[Peer, int]] = field(default_factory=list)


class LeadBook:
    """See the module. Used at the end of every event, too (`flush`)."""

    def __init__(
        self,
        tables: Tables,
        runs: RunBook,
        intake: Intake,
        saves: SaveBook,
        lending: Lending,
        lineages: LineageBook,
    ) -> None:
        self._t, self._runs, self._lending = tables, runs, lending
        self._listener = _Listener()
        self._admitted: dict[str, str] = {}
        self._links: dict[str, Link] = {}
        self._hearing = Hearing(tables, runs, intake, saves, lineages, self._ended_at_once, self._links.get)
        self._stirred: dict[str, None] = {}
        """Streams that have something to say before the next tick; all others wait for that."""

    # ---- what trainers ask ------------------------------------------------------------------------------------------

    def lead(self, session: Session, m: Lead) -> None:
        """Admit the run's followers, and say where this worker listens for them."""
        run = self._runs.join(session, m.run)
        if run is None:
            world_size = self._t.runs[m.run].world_size
            error = from_wire(other_world(m.run, world_size, session.rank, session.world_size))
            return self._lending.refuse(session.peer, m.id, error)
        if run.followed:
            return self._lending.refuse(session.peer, m.id, leads_not(m.run))
        if not self._make_room(m.run):
            return self._lending.refuse(session.peer, m.id, busy())
        run.inherited = run.inherited or (bool(m.server_secret) and m.run not in self._admitted)
        self._admitted[m.run] = m.client_public
        if self._listener.address:
            return self._answer(session.peer, m.id)
        if not self._listener.waiting:
            self._t.actions.append(Listen(port=m.port, secret=m.server_secret))
        if (session.peer, m.id) not in self._listener.waiting:
            self._listener.waiting.append((session.peer, m.id))
        return None

    def listening(self, event: Listening) -> None:
        """Answer those who wait."""
        waiting, self._listener.waiting = self._listener.waiting, []
        if event.error is None:
            self._listener = _Listener(event.address, event.public, event.secret)
            self._t.log("info", f"listening for other workers at {event.address}")
        for peer, id in waiting:
            if event.error is not None:
                self._lending.refuse(peer, id, from_wire(event.error))
            else:
                self._answer(peer, id)

    def _answer(self, peer: Peer, id: int) -> None:
        at = self._listener
        answer = Leading(id=id, address=at.address, server_public=at.public, server_secret=at.secret)
        self._lending.send(peer, answer)

    def _make_room(self, run_id: str) -> bool:
        for old in [r for r in self._admitted if r != run_id and not self._is_in_use(r)]:
            if len(self._admitted) < MAX_LED:
                break
            del self._admitted[old]
        return run_id in self._admitted or len(self._admitted) < MAX_LED

    def _is_in_use(self, run_id: str) -> bool:
        run = self._t.runs.get(run_id)
        return run is not None and bool(run.members)

    def run_of(self, client_public: str) -> str | None:
        """Return the run whose followers prove this key, or None: nobody of ours."""
        return next((run_id for run_id, key in self._admitted.items() if key == client_public), None)

    # ---- what followers say -----------------------------------------------------------------------------------------

    def received(self, event: Relayed) -> None:
        """Take a message of a follower's."""
        m = event.message
        if not isinstance(m, Piece) or event.run not in self._admitted:
            return
        link = self._links.get(m.stream)
        if link is None and m.first == 1 and m.taken == 0 and self._has_room():
            link = self._links[m.stream] = Link(event.run, Stream(m.stream, self._t.instance), event.route)
            self._t.log("info", f"worker {m.sender} follows in run {event.run}", count="followers_linked")
        if link is not None and link.run_id == event.run and not link.stream.has_sent(m.taken):
            self._undo(link)
            link = None
        if link is None or link.run_id != event.run:
            return self._unlink(event.run, event.route, m.stream)
        link.route = event.route
        self._stirred[m.stream] = None
        self._t.heard[m.stream] = self._t.now
        try:
            data = link.stream.take(m, self._t.now)
            if data is not None:
                self._hearing.take(link, unpack(data, FOLLOWER_RECORDS))
        except Exception as error:
            # IMPORTANT: the stream ends. A record that was taken and not done would never come again, and its save wait
            # for it without end.
            text = f"worker {m.sender}, which follows in run {event.run}, breaks the rules: {error!r}"
            self._t.log("error", text, count="protocol_errors")
            self._unlink(event.run, event.route, m.stream)
            self._forget(link, "it broke the rules")
        return None

    def _has_room(self) -> bool:
        """Whether another stream fits; else the one that was silent longest of those without ranks makes room."""
        if len(self._links) >= MAX_LINKS:
            with_ranks = {s.link for s in self._t.sessions.values()}
            spare = [name for name in self._links if name not in with_ranks]
            if spare:
                oldest = min(spare, key=lambda name: self._t.heard.get(name, 0.0))
                self._forget(self._links[oldest], "another needs its place")
        return len(self._links) < MAX_LINKS

    def _unlink(self, run_id: str, route: bytes, stream: str) -> None:
        message = Unlinked(stream=stream, sender=self._t.instance)
        self._t.actions.append(Relay(run=run_id, route=route, message=message))

    def _undo(self, link: Link) -> None:
        """The stream was one with the leader before, and was begun anew by a piece that came late.

        IMPORTANT: nothing ends by that: its follower opens another one, and tells of its saves again.
        """
        name = link.stream.name
        del self._links[name]
        forget_the_silent(self._t, self._links.keys())
        for session in [s for s in self._t.sessions.values() if s.link == name]:
            del self._t.sessions[session.name]
            self._runs.part(session)

    def _forget(self, link: Link, why: str) -> None:
        name = link.stream.name
        del self._links[name]
        self._t.heard.pop(name, None)
        for session in [s for s in self._t.sessions.values() if s.link == name]:
            self._hearing.lose(session, why)

    # ---- what followers are told ------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Forget followers that are gone for good, and let the others hear something."""
        for link in list(self._links.values()):
            silent_s = self._t.now - self._t.heard.get(link.stream.name, self._t.now)
            if silent_s >= FORGET_S and all(silent_s >= s.timeout_s for s in self._open_saves(link.run_id)):
                self._forget(link, f"it has not been heard of for {silent_s:.0f} s")
        self._stirred.update(dict.fromkeys(self._links))
        forget_the_silent(self._t, self._links.keys())

    def epoch_found(self, run_id: str, path: str, epoch: int, error: Wire | None) -> None:
        """Tell every follower of the run; who has not asked yet need not."""
        record = packed(EpochFound(path=path, epoch=epoch, error=error or {}))
        for link in self._links.values():
            if link.run_id == run_id:
                self._post(link, record)

    def flush(self) -> None:
        """At the end of an event: post what has changed, and send what is due."""
        if not self._links:
            return
        for follower in [one for one in self._links.values() if one.run_id in self._t.announced]:
            self._post_changes(follower)  # before the end of a save that they cure: its next one is to know them
        told: set[tuple[str, str]] = set()
        for save_id, rank in self._t.changed:
            save = self._t.saves[save_id]
            entry = save.ranks[rank]
            link = self._links.get(entry.link)
            if link is not None and entry.ended and (entry.link, save_id) not in told:
                told.add((entry.link, save_id))
                assert save.outcome is not None
                late = save.outcome == COMMITTED and entry.phase != COMMITTED
                outcome = FAILED if late else save.outcome
                ended = Ended(save_id=save_id, outcome=outcome, error=entry.error or {}, report=entry.report)
                self._post(link, packed(ended))
        for run_id in self._t.announced:
            self._stirred.update({name: None for name, link in self._links.items() if link.run_id == run_id})
        stirred, self._stirred = self._stirred, {}
        waiting: dict[str, tuple[Mapping[str, Any], ...]] = {}  # once for all followers of a run
        for link in [self._links[name] for name in stirred if name in self._links]:
            self._send(link, waiting)

    def _post(self, link: Link, record: bytes) -> None:
        link.stream.post(record)
        self._stirred[link.stream.name] = None

    def _send(self, link: Link, waiting: dict[str, tuple[Mapping[str, Any], ...]]) -> None:
        t = self._t
        self._post_changes(link)
        if link.stream.overflows:
            return self._forget(link, "it does not take what it is told")
        for piece in link.stream.due(t.now):
            t.actions.append(Relay(run=link.run_id, route=link.route, message=piece))
        if t.now - link.said_waits_at >= BEAT_S:
            link.said_waits_at = t.now
            if link.run_id not in waiting:
                waiting[link.run_id] = self._waits(link.run_id)
            if waiting[link.run_id]:
                waits = Waits(stream=link.stream.name, saves=waiting[link.run_id])
                t.actions.append(Relay(run=link.run_id, route=link.route, message=waits))
        return None

    def _post_changes(self, link: Link) -> None:
        run = self._t.runs.get(link.run_id)
        for body in run.changes[link.changes_sent :] if run is not None else ():
            link.stream.post(packed(Changed(data=body)))
            link.changes_sent += 1

    def _waits(self, run_id: str) -> tuple[Mapping[str, Any], ...]:
        """Return the rows of the latest open saves that somebody has sealed."""
        saves = [s for s in self._open_saves(run_id) if s.sealed_since is not None][-MAX_WAITS:]
        return tuple(
            {"save_id": s.save_id, "phase": "submitted", "missing": missing_of(s)[:MAX_MISSING]} for s in saves
        )

    def _open_saves(self, run_id: str) -> list[Save]:
        return [s for s in self._t.saves.values() if s.outcome is None and s.save_id.endswith(run_id)]

    def _ended_at_once(self, link: Link, save_id: str, outcome: str, error: Wire) -> None:
        self._post(link, packed(Ended(save_id=save_id, outcome=outcome, error=error, report={})))

    def times(self) -> Iterator[float]:
        """Yield when something is due."""
        return (link.stream.wakes_at for link in self._links.values())

    def report(self) -> list[Mapping[str, Any]]:
        """Return a row for people of each follower."""
        now, heard = self._t.now, self._t.heard
        return [
            {"run": link.run_id, "stream": name, "silent_s": now - heard.get(name, now)}
            for name, link in self._links.items()
        ]

    @property
    def busy(self) -> bool:
        """Whether a follower that is there has not taken everything yet."""
        heard, now = self._t.heard, self._t.now
        return any(
            link.stream.untaken_nbytes and now - heard.get(name, now) < PRESENT_S for name, link in self._links.items()
        )
