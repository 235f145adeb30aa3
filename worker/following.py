"""The brain's runs that another worker leads: what this one has to tell of its ranks, and what it hears from there.

none        Follow                                         -> asking     Connect; a stream is opened
asking      the leader speaks                              -> following  every Follow that waits is answered
following   the leader does not know the stream any more   -> asking     open saves end; another stream is opened
following   another leader, which does not know the stream -> asking     another is opened; open saves are told again
any         no member, no open save, nothing left to say   -> none       Disconnect
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from asyncckpt.errors import AsyncCkptError, ProtocolError, from_wire
from asyncckpt.protocol.lifecycle import COMMITTED, FAILED
from asyncckpt.protocol.message import Message
from asyncckpt.protocol.messages import Follow, Following, Lineage, LineageFound
from asyncckpt.protocol.relay import Changed, Ended, EpochFound, Piece, Unlinked, Waits
from asyncckpt_worker.actions import Connect, Disconnect, Relay
from asyncckpt_worker.events import Relayed, Unconnected
from asyncckpt_worker.followed import Followed, heard, unreachable
from asyncckpt_worker.introducing import introduce
from asyncckpt_worker.lending import Lending, busy
from asyncckpt_worker.progress import asked, packed, told_of
from asyncckpt_worker.records import RankSave, Save, Session
from asyncckpt_worker.run_record import Run
from asyncckpt_worker.runs import RunBook
from asyncckpt_worker.saves import SaveBook
from asyncckpt_worker.streams import BEAT_S, Stream
from asyncckpt_worker.tables import Tables
from asyncckpt_worker.verdicts import failed, other_world
from asyncckpt_worker.without_leader import give_up

MAX_FOLLOWED = 64
"""Runs that are followed at once: each has a connection. Chosen, not measured."""

MAX_ASKING = 4096
"""Requests that wait for the leader."""

PARTING_S, PRESENT_S = 60.0, 5.0
"""Silence after which a connection that nobody uses is given up, and after which a leader counts as away."""


class FollowBook:
    """Changes `Run.followed` and what belongs to it.

    Args:
        tables: The brain's.
        runs, saves, lending: The brain's books.
        instance: Of this worker; streams are named after it and a count.
    """

    def __init__(self, tables: Tables, runs: RunBook, saves: SaveBook, lending: Lending) -> None:
        self._t, self._runs, self._saves, self._lending = tables, runs, saves, lending
        self._followed: dict[str, Followed] = {}
        self._opened = 0

    # ---- what trainers ask ------------------------------------------------------------------------------------------

    def follow(self, session: Session, m: Follow) -> None:
        """Connect, unless that is done, and answer once the leader has spoken."""
        run = self._runs.join(session, m.run)
        if run is None:
            error = other_world(m.run, self._t.runs[m.run].world_size, session.rank, session.world_size)
            return self._lending.refuse(session.peer, m.id, from_wire(error))
        refusal = self._refusal(m)
        run.estranged = refusal is not None
        if refusal is not None:
            return self._lending.refuse(session.peer, m.id, refusal)
        connect = Connect(
            run=m.run,
            address=m.address,
            server_public=m.server_public,
            client_public=m.client_public,
            client_secret=m.client_secret,
        )
        known = self._followed.get(m.run)
        if known is not None and (known.connect != connect or known.run is not run):
            self._lose(known, "the run has another leader")
            self._drop(known)
            known = None
        if known is None:
            run.followed, run.leader = True, ""
            known = self._followed[m.run] = Followed(run, connect, self._new_stream(), self._t.now)
            self._t.actions.append(connect)
            introduce(self._t, known)
        known.attempts[session.rank] = m.attempt
        known.join(session.rank)
        for save in self._open_saves(known):  # of which nothing was told before
            if session.rank in save.ranks:
                self._t.touched[(save.save_id, session.rank)] = None
        known.follows.setdefault((session.peer, m.id), self._t.now + m.timeout_s)
        return self._answer(known)

    def _refusal(self, m: Follow) -> AsyncCkptError | None:
        run, known = self._t.runs[m.run], self._followed.get(m.run)
        if any(s.link for name in run.members.values() if (s := self._t.sessions.get(name)) is not None):
            return ProtocolError(f"this worker leads run {m.run} itself", detail="leads")
        if known is None and len(self._followed) >= MAX_FOLLOWED:
            return busy()
        return busy() if known is not None and len(known.follows) >= MAX_ASKING else None

    def lineage(self, session: Session, run: Run, m: Lineage) -> None:
        """Ask the leader; what it says is remembered."""
        known = self._followed.get(run.run_id)
        if known is None or len(known.lineages) >= MAX_ASKING:
            return self._lending.refuse(session.peer, m.id, busy())
        key = (session.peer, m.id)
        if key not in known.lineages:
            known.lineages[key] = asked(session.rank, m.path)
            self._t.told.append((run.run_id, known.lineages[key]))
        return None

    # ---- what the leader says ---------------------------------------------------------------------------------------

    def unconnected(self, event: Unconnected) -> None:
        """There can be no connection."""
        known = self._followed.get(event.run)
        if known is not None:
            for peer, id in known.follows:
                self._lending.refuse(peer, id, from_wire(event.error))
            self._drop(known)
            known.run.estranged = True

    def received(self, event: Relayed) -> None:
        """Take a message of the leader's."""
        known, m = self._followed.get(event.run), event.message
        if known is None or getattr(m, "stream", "") != known.stream.name:
            return
        if isinstance(m, Unlinked):  # which counts for silence: by that it waits for nobody here
            if m.sender != known.run.leader:
                return self._renew(known)
            return self._over(known, "it does not know this worker any more")
        known.heard_at = self._t.now
        if isinstance(m, Waits):
            for row in m.saves:
                save = self._t.saves.get(row["save_id"])
                if save is not None and save.outcome is None:
                    save.told_missing = list(row.get("missing", ()))
        elif isinstance(m, Piece):
            self._piece(known, m)
        return None

    def _piece(self, known: Followed, m: Piece) -> None:
        if known.run.leader not in ("", m.sender):
            return self._renew(known)
        try:
            data = known.stream.take(m, self._t.now)
            record = heard(data) if data is not None else None
        except (ValueError, AsyncCkptError) as error:  # what was taken, and not understood, would never come again
            self._t.log("error", f"the leader of run {known.run.run_id}: {error}", count="protocol_errors")
            return self._over(known, str(error))
        if not known.run.leader:
            known.run.leader = m.sender
            self._t.announced[known.run.run_id] = None
            self._t.log("info", f"following worker {m.sender} in run {known.run.run_id}", count="runs_followed")
        self._answer(known)
        return self._record(known, record)

    def _record(self, known: Followed, record: Message | None) -> None:
        run = known.run
        if isinstance(record, EpochFound):
            parent = os.path.dirname(record.path)
            if not record.error:
                run.remember_epoch(parent, record.epoch)
            for key in known.take_lineages(parent):
                if record.error:
                    self._lending.refuse(*key, from_wire(record.error))
                else:
                    self._lending.send(key[0], LineageFound(id=key[1], epoch=record.epoch))
        elif isinstance(record, Changed):
            run.changes.append(record.data)
            self._t.announced[run.run_id] = None
        elif isinstance(record, Ended):
            save = self._t.saves.get(record.save_id)
            if save is not None and save.outcome is None and record.save_id.endswith(run.run_id):
                self._ended(save, record)

    def _ended(self, save: Save, record: Ended) -> None:
        for entry in save.ranks.values():
            entry.report.update(record.report)
        if record.outcome == COMMITTED:
            self._saves.was_committed(save, record.report)  # perhaps while files that it took over are looked at
        else:
            self._saves.end_here(save, record.outcome, record.error)

    # ---- the end of a stream ----------------------------------------------------------------------------------------

    def _over(self, known: Followed, why: str) -> None:
        """The stream has ended: the leader knows nothing of what this worker has said. Begin anew."""
        # Not at once where the leader has never taken this one: it may refuse the next as well, and so on, without end.
        quiet_s = 0.0 if known.run.leader else BEAT_S
        self._lose(known, why)
        known.stream = self._new_stream(self._t.now + quiet_s)
        introduce(self._t, known)

    def _renew(self, known: Followed) -> None:
        """Another worker leads, which knows nothing of the run: it is told again. Nothing is given up for that."""
        quiet_s = 0.0 if known.run.leader else BEAT_S
        self._t.log("info", f"run {known.run.run_id} has another leader", count="leaders_replaced")
        known.run.leader = ""
        known.run.changes.clear()
        known.stream = self._new_stream(self._t.now + quiet_s)
        introduce(self._t, known)

    def _lose(self, known: Followed, why: str) -> None:
        run = known.run
        for save in [s for s in self._t.saves.values() if s.outcome is None and s.save_id.endswith(run.run_id)]:
            give_up(self._saves, save, why)
        run.leader = ""
        run.changes.clear()
        for key in known.take_lineages():
            self._lending.refuse(*key, unreachable(known, why))

    def _drop(self, known: Followed) -> None:
        known.run.followed, known.run.leader = False, ""
        del self._followed[known.run.run_id]
        self._t.actions.append(Disconnect(run=known.run.run_id))

    # ---- time, and the end of an event ------------------------------------------------------------------------------

    def tick(self) -> None:
        """Give up what the leader has been silent about for too long, and connections that nobody needs."""
        now = self._t.now
        for known in list(self._followed.values()):
            for key in [key for key, until in known.follows.items() if now >= until]:
                del known.follows[key]
                self._lending.refuse(*key, unreachable(known, "it does not answer"))
            open_saves = self._open_saves(known)
            for save in open_saves:
                if now >= known.silent_until(save):
                    give_up(self._saves, save, f"it has not been heard of for {save.timeout_s:g} s")
            silent = now - known.heard_at >= PARTING_S
            if not open_saves and not known.run.members and (silent or not known.stream.untaken_nbytes):
                self._drop(known)

    def _open_saves(self, known: Followed) -> list[Save]:
        return [s for s in self._t.saves.values() if s.outcome is None and s.save_id.endswith(known.run.run_id)]

    def flush(self) -> None:
        """At the end of an event: post what is new, and send what is due."""
        t = self._t
        touched, t.touched = t.touched, {}
        if not self._followed:
            return t.told.clear()
        for save_id, rank in touched:
            known, entry = self._followed.get(save_id[-12:]), t.entry((save_id, rank))
            if known is not None and entry is not None and rank in known.attempts:
                self._tell(known, t.saves[save_id], entry)
        told, t.told = t.told, []
        for run_id, record in told:
            if (known := self._followed.get(run_id)) is not None:
                if record.name == "left":
                    known.joined.pop(record.rank, None)  # type: ignore[attr-defined]
                known.stream.post(packed(record))
        for known in self._followed.values():
            if known.stream.overflows:
                self._over(known, "it does not take what it is told")
            for piece in known.stream.due(t.now):
                t.actions.append(Relay(run=known.run.run_id, route=b"", message=piece))

    def _tell(self, known: Followed, save: Save, entry: RankSave) -> None:
        try:
            for data in told_of(save.save_id, entry):
                known.stream.post(data)
        except ProtocolError as error:
            detail = f"its request does not fit into what a worker may tell another: {error}"
            self._saves.end(save, FAILED, failed(save, entry, "too_large", detail))

    def times(self) -> Iterator[float]:
        """Yield when something is due."""
        for known in self._followed.values():
            yield known.stream.wakes_at
            yield from known.follows.values()

    def report(self) -> list[Mapping[str, Any]]:
        """Return a row for people of each run that is followed."""
        return [followed.row(self._t.now) for followed in self._followed.values()]

    @property
    def busy(self) -> bool:
        """Whether a leader that is there has not taken everything yet."""
        now = self._t.now
        return any(f.stream.untaken_nbytes and now - f.heard_at < PRESENT_S for f in self._followed.values())

    # ---- steps ------------------------------------------------------------------------------------------------------

    def _new_stream(self, quiet_until: float = 0.0) -> Stream:
        self._opened += 1
        name = hashlib.sha256(f"{self._t.instance}/{self._opened}".encode()).hexdigest()[:16]
        return Stream(name, self._t.instance, self._opened, quiet_until=quiet_until)

    def _answer(self, known: Followed) -> None:
        if known.run.leader:
            for peer, id in known.follows:
                self._lending.send(peer, Following(id=id, leader=known.run.leader))
            known.follows.clear()
