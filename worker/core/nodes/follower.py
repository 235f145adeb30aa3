"""The followers of a run: each reports its ranks' parts to the leader, and ends saves by the leader's outcomes.

States of a followed run, with event, next state and effect:

    none        Follow                                             -> asking      connect; report the ranks
    asking      Outcomes: the leader's instance is known           -> following   answer the waiting Follows
    following   Outcomes of another instance                       -> following   report all parts to it
    any         Follow names another address                       -> asking      end open saves; connect
    any         no member, no open save, nothing left to report    -> none        disconnect
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncckpt.errors import AsyncCkptError, ProtocolError, WorkerUnavailableError, from_wire
from asyncckpt.format.names import SaveId
from asyncckpt.protocol.fields import MAX_TABLE, MAX_TEXT_CHARS
from asyncckpt.protocol.messages import Follow, Following, Lineage, LineageFound
from asyncckpt.protocol.node_tables import BEAT_S, CONSENTED, Outcomes, Report
from asyncckpt.protocol.save_phases import ABANDONED, COMMITTED, DURABLE, FAILED, UNKNOWN
from asyncckpt_worker.core.actions import LeaderAddress, Relay, Resources
from asyncckpt_worker.core.events import Peer, Relayed
from asyncckpt_worker.core.failures import busy, leader_lost, not_continued, other_world
from asyncckpt_worker.core.model import RankSave, Run, Save, Session
from asyncckpt_worker.core.nodes.tables import PHASE_ORDER, PRESENT_S, Row, known_phase, pages, part_row
from asyncckpt_worker.core.runs import RunRegistry
from asyncckpt_worker.core.saves import SaveRegistry
from asyncckpt_worker.core.slots import SlotRegistry
from asyncckpt_worker.core.tables import Tables
from asyncckpt_worker.mirrors.schedule import MirrorRegistry

FOUND_S = 2 * BEAT_S
"""How long the leader has to report the outcome of a save that was found committed here."""

MAX_FOLLOWED = 64
"""Maximum number of followed runs; each has a connection. Chosen, not measured."""

MAX_ASKING = 1024
"""Maximum number of requests that wait for the leader of a run. Chosen, not measured."""

MAX_UNACKNOWLEDGED = 64
"""Saves, ended here as failed or unknown, that are reported to a new leader. More than saves are open at once."""

MAX_FORMER_LEADERS = 64
"""Former leaders of a run that are remembered, to ignore their late messages."""

IDLE_DISCONNECT_S = 60.0
"""Silence of the leader after which an unused connection is closed."""


@dataclass(slots=True)
class _Question:
    """A Lineage request that waits for the leader."""

    rank: int
    path: str
    least_epoch: int
    number: int


@dataclass(slots=True)
class _Followed:
    """A run that another worker leads. `run.leader`: instance of the leader, "" before its first message."""

    run: Run
    leader_address: LeaderAddress
    last_message_at: float
    attempts: dict[int, int] = field(default_factory=dict)
    """Rank -> `attempt` of its latest Follow. Only these ranks are reported."""

    waiting_follows: dict[tuple[Peer, int], float] = field(default_factory=dict)
    """Waiting Follow request -> its deadline."""

    questions: dict[tuple[Peer, int], _Question] = field(default_factory=dict)
    unacknowledged_failures: dict[str, Row] = field(default_factory=dict)
    """Save ID -> row of a failure that the leader has not acknowledged; ranks of other nodes may wait for that save."""

    ended_calls: set[str] = field(default_factory=set)
    """Calls (`SaveId.call`) of `run.declined` whose saves have ended by the leader's outcomes."""

    sent: dict[str, dict[Any, Row]] = field(default_factory=dict)
    """Name of a table -> key of a row -> the row as it was sent last, of the rows that there were then. Between whole
    tables, only changed rows are sent."""

    acknowledged_departures: set[int] = field(default_factory=set)
    """Departed ranks that the leader has acknowledged."""

    last_counter: int = 0
    """Counter of the last page received from the leader."""

    last_question: int = 0
    former_leaders: dict[str, None] = field(default_factory=dict)
    full_sent_at: float = float("-inf")
    """When the whole table was last sent."""

    def row(self, now: float) -> Mapping[str, Any]:
        """Return its row of the status report."""
        address, silent_s = self.leader_address.address, now - self.last_message_at
        return {"run": self.run.run_id, "address": address, "leader": self.run.leader, "silent_s": silent_s}


class Follower:
    """Reports to the leaders of followed runs, and handles their outcomes.

    Args:
        tables: Tables of the core.
        runs, saves, slot_registry, mirrors: Parts of the core.
        resources: Opens and closes connections.
    """

    def __init__(
        self,
        tables: Tables,
        runs: RunRegistry,
        saves: SaveRegistry,
        slot_registry: SlotRegistry,
        mirrors: MirrorRegistry,
        resources: Resources,
    ) -> None:
        self._t, self._runs, self._saves, self._slot_registry = tables, runs, saves, slot_registry
        self._mirrors, self._resources = mirrors, resources
        self.followed: dict[str, _Followed] = {}
        """Run -> its record."""

        self._counter = 0
        """Counter of the last page sent. IMPORTANT: one for all pages of this process, not one a record: a leader whose
        run is followed again would ignore everything until a new count has passed the old one."""

    # ---- requests of trainers ---------------------------------------------------------------------------------------

    def follow(self, session: Session, m: Follow) -> None:
        """Connect to the leader if needed; answer when its first message has arrived."""
        run = self._runs.join(session, m.run)
        if run is None:
            error = other_world(m.run, self._t.runs[m.run].world_size, session.rank, session.world_size)
            return self._t.refuse(session.peer, m.id, from_wire(error))
        refusal = self._refusal(m)
        run.leader_unreachable = refusal is not None
        if refusal is not None:
            return self._t.refuse(session.peer, m.id, refusal)
        leader = LeaderAddress(
            run=m.run,
            address=m.address,
            server_public=m.server_public,
            client_public=m.client_public,
            client_secret=m.client_secret,
        )
        followed = self.followed.get(m.run)
        if followed is not None and (followed.leader_address != leader or followed.run is not run):
            self._lose_leader(followed, "the run has another leader")
            self._disconnect(followed)
            followed = None
        if followed is None:
            try:
                self._resources.connect(leader)
            except AsyncCkptError as error:
                run.leader_unreachable = True
                return self._t.refuse(session.peer, m.id, error)
            run.followed, run.leader = True, ""
            followed = self.followed[m.run] = _Followed(run, leader, self._t.now)
            self._resend_everything(followed)
        followed.attempts[session.rank] = m.attempt
        followed.waiting_follows.setdefault((session.peer, m.id), self._t.now + m.timeout_s)
        self._t.to_report.add(m.run)
        return self._answer(followed)

    def _refusal(self, m: Follow) -> AsyncCkptError | None:
        run, followed = self._t.runs[m.run], self.followed.get(m.run)
        if any(s.follower for name in run.members.values() if (s := self._t.sessions.get(name)) is not None):
            return ProtocolError(f"this worker leads run {m.run} itself", detail="leads")
        if followed is None and len(self.followed) >= MAX_FOLLOWED:
            return busy()
        return busy() if followed is not None and len(followed.waiting_follows) >= MAX_ASKING else None

    def lineage(self, session: Session, run: Run, m: Lineage) -> None:
        """Ask the leader for the epoch of a directory."""
        followed = self.followed.get(run.run_id)
        if followed is None or len(followed.questions) >= MAX_ASKING:
            return self._t.refuse(session.peer, m.id, busy())
        key = (session.peer, m.id)
        if key not in followed.questions:
            followed.last_question += 1
            followed.questions[key] = _Question(session.rank, m.path, m.least_epoch, followed.last_question)
            self._t.to_report.add(run.run_id)
        return None

    # ---- outcomes of the leader -------------------------------------------------------------------------------------

    def received(self, event: Relayed) -> None:
        """Handle a page of the leader's table."""
        followed, m = self.followed.get(event.run), event.message
        if followed is None or not isinstance(m, Outcomes) or m.to != self._t.instance:
            return
        if m.sender in followed.former_leaders:
            return
        if m.error:
            return self._refused(followed, m.error)
        if m.sender != followed.run.leader:
            self._change_leader(followed, m.sender)
        if m.counter <= followed.last_counter:
            return
        followed.last_counter, followed.last_message_at = m.counter, self._t.now
        self._answer(followed)
        followed.acknowledged_departures = set(m.gone)
        for sequence, meet in m.decided:
            followed.run.found_committed.pop(sequence, None)
            if followed.run.add_outcome(sequence, meet):
                self._t.announced[followed.run.run_id] = None
        self._announce_found(followed.run)
        for row in m.epochs:
            self._take_epoch(followed, row)
        for row in m.saves:
            if SaveId.parse(row["save_id"]).run_id == followed.run.run_id:
                self._t.run_guarded(row["save_id"], self._take_outcome, followed, row)

    def _announce_found(self, run: Run) -> None:
        """Announce outcomes of saves that were found committed here, if the leader has not reported them in time.

        IMPORTANT: else a rank would wait for the outcome as long as for a slot. If another rank was told a different
        outcome by the dead leader, this rank refuses the meeting, as after every loss of a worker.
        """
        for sequence, (meet, since) in list(run.found_committed.items()):
            if self._t.now - since >= FOUND_S:
                del run.found_committed[sequence]
                if run.add_outcome(sequence, meet):
                    self._t.announced[run.run_id] = None

    def _refused(self, followed: _Followed, error: Mapping[str, Any]) -> None:
        """The leader rejects the reports of this worker: refuse the waiting requests."""
        for key in list(followed.waiting_follows):
            del followed.waiting_follows[key]
            self._t.refuse(*key, from_wire(error))
        self._refuse_questions(followed, from_wire(error))

    def _change_leader(self, followed: _Followed, instance: str) -> None:
        """Handle the first message of a leader: everything is reported to it again."""
        run = followed.run
        if run.leader:
            followed.former_leaders[run.leader] = None
            for old in list(followed.former_leaders)[:-MAX_FORMER_LEADERS]:
                del followed.former_leaders[old]
            self._t.log("info", f"run {run.run_id} has a new leader", count="leaders_replaced")
        self._t.log("info", f"following worker {instance} in run {run.run_id}", count="runs_followed")
        run.leader, followed.last_counter = instance, 0
        self._t.announced[run.run_id] = None
        self._resend_everything(followed)

    def _resend_everything(self, followed: _Followed) -> None:
        """Mark everything of a run as unacknowledged, and send the whole table."""
        run_id = followed.run.run_id
        followed.sent.clear()
        followed.acknowledged_departures.clear()
        followed.full_sent_at = float("-inf")
        for save in self._t.open_saves(followed.run.run_id):
            for part in save.ranks.values():
                part.acknowledged = ""
        mine = [s for s in (*self._t.ended, *self._t.saves.values()) if s.save_id.run_id == run_id and s.error]
        for ended in [s for s in mine if s.outcome in (FAILED, ABANDONED, UNKNOWN)][-MAX_UNACKNOWLEDGED:]:
            error = ended.error or {}
            if ended.outcome == UNKNOWN:  # a leader that finds that it was not committed must not wait for our ranks
                error = not_continued(ended.save_id, error)
            followed.unacknowledged_failures.setdefault(
                ended.save_id, _failure(ended.save_id, str(ended.outcome), error)
            )
        followed.ended_calls.clear()
        self._t.to_report.add(run_id)

    def _take_epoch(self, followed: _Followed, row: Row) -> None:
        parent = os.path.dirname(row["path"])
        if not row["error"]:
            followed.run.remember_epoch(parent, row["epoch"])
        for key, question in list(followed.questions.items()):
            if os.path.dirname(question.path) == parent and question.number <= row["number"]:
                del followed.questions[key]
                if row["error"]:
                    self._t.refuse(*key, from_wire(row["error"]))
                else:
                    self._t.send(key[0], LineageFound(id=key[1], epoch=row["epoch"]))

    def _take_outcome(self, followed: _Followed, row: Row) -> None:
        save_id, outcome = SaveId.parse(row["save_id"]), row["outcome"]
        if outcome not in ("", COMMITTED) and not row["error"]:
            text = f"the leader of run {followed.run.run_id} reports {outcome} without an error; ignored"
            return self._t.log("error", text, save_id=save_id, count="protocol_errors")
        if outcome:
            followed.unacknowledged_failures.pop(save_id, None)
            declined = {_call(row) for row in followed.run.declined}
            followed.ended_calls = (followed.ended_calls | {save_id.call}) & declined
        if outcome in ("", COMMITTED) and row["error"]:
            self._mirrors.failed_elsewhere(save_id, row["error"])
        save = self._t.saves.get(save_id)
        if save is None or save.outcome is not None:
            return None
        for rank, phase in row["known"]:
            part = save.ranks.get(rank)
            if part is not None and PHASE_ORDER[phase] > PHASE_ORDER[part.acknowledged]:
                part.acknowledged = phase
                if rank in followed.run.departed:
                    self._t.to_report.add(followed.run.run_id)  # see `_rank_rows`
        if not outcome:
            save.leader_missing = list(row["missing"])
            return None
        # IMPORTANT: a leader that does not know a part that was reported to the former leader, by this worker or by a
        # dead one, has not checked whether that leader has committed the save.
        if outcome != COMMITTED and any(
            _former_may_know(followed, e) and not e.acknowledged
            for e in save.ranks.values()
            if e.rank in followed.attempts
        ):
            return None
        for part in save.ranks.values():
            part.report.update(row["report"])
        if outcome == COMMITTED:
            return self._saves.found_committed(save, row["report"])  # its recovery may still be in progress
        return self._saves.end_here(save, outcome, row["error"])

    # ---- without the leader ----------------------------------------------------------------------------------------

    def _lose_leader(self, followed: _Followed, why: str) -> None:
        for save in self._t.open_saves(followed.run.run_id):
            self._end_without_leader(followed, save, why)
        followed.run.leader = ""
        self._refuse_questions(followed, _unreachable(followed, why))

    def _refuse_questions(self, followed: _Followed, error: AsyncCkptError) -> None:
        questions, followed.questions = followed.questions, {}
        for key in questions:
            self._t.refuse(*key, error)

    def _end_without_leader(self, followed: _Followed, save: Save, why: str) -> None:
        """End a save without the leader: `failed` if the leader cannot have committed it, else `unknown`.

        It may have committed the save if all ranks of this node are durable, or a dead worker may have reported it.
        """
        ranks = save.ranks.values()
        resumed = any(e.from_dead_worker for e in ranks)
        unknown = all(e.phase == DURABLE or e.from_dead_worker for e in ranks) and (resumed or not save.failed_locally)
        # If the leader comes back, it must not wait for parts that are no longer reported, or for a hook's consent.
        if not unknown or any(not _is_complete_there(e) for e in ranks):
            error = save.pending_failure[1] if save.pending_failure else leader_lost(save, why, unknown=False)
            followed.unacknowledged_failures[save.save_id] = _failure(save.save_id, FAILED, error)
            self._t.to_report.add(followed.run.run_id)
        self._saves.end_here(save, UNKNOWN if unknown else FAILED, leader_lost(save, why, unknown=unknown))

    def _disconnect(self, followed: _Followed) -> None:
        followed.run.followed, followed.run.leader = False, ""
        for save in self._t.open_saves(followed.run.run_id):
            self._saves.update_deadline(save)  # its deadlines now apply here
        del self.followed[followed.run.run_id]
        self._resources.disconnect(followed.run.run_id)

    def tick(self) -> None:
        """End saves whose leader has been silent for too long, and close connections that are not needed."""
        now = self._t.now
        for followed in list(self.followed.values()):
            for key in [key for key, until in followed.waiting_follows.items() if now >= until]:
                del followed.waiting_follows[key]
                self._t.refuse(*key, _unreachable(followed, "it does not answer"))
            for save in self._t.open_saves(followed.run.run_id):
                begun_at = min(e.begun_at for e in save.ranks.values())
                if now >= max(followed.last_message_at, begun_at) + save.timeout_s:
                    self._end_without_leader(followed, save, f"no message for {save.timeout_s:g} s")
            silent = now - followed.last_message_at >= IDLE_DISCONNECT_S
            if (
                not self._t.open_saves(followed.run.run_id)
                and not followed.run.members
                and (silent or not self._has_unacknowledged(followed))
            ):
                self._disconnect(followed)

    # ---- the table --------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Send each leader the rows that changed, or the whole table when that is due; at the end of an event."""
        t = self._t
        changed, t.to_report = t.to_report, set()
        changed |= {SaveId.parse(save_id).run_id for save_id, _ in t.touched}
        for run_id, followed in self.followed.items():
            whole = t.now - followed.full_sent_at >= BEAT_S
            if whole or run_id in changed:
                self._t.run_guarded("", self._send, followed, whole)

    def _send(self, followed: _Followed, whole: bool) -> None:
        rows: dict[str, Iterable[Row]] = {
            "ranks": self._rank_rows(followed),
            "failures": self._failure_rows(followed),
            "withdrawals": _withdrawal_rows(followed),
            "questions": _question_rows(followed),
            "parts": self._part_rows(followed),
        }
        tables = {name: _rows_to_send(followed, name, found, whole=whole) for name, found in rows.items()}
        if whole:
            followed.full_sent_at = self._t.now
        elif not any(tables.values()):
            return
        saves = {*(save.save_id for save in self._t.open_saves(followed.run.run_id)), *followed.unacknowledged_failures}
        saves |= {row["save_id"] for row in _withdrawal_rows(followed)}
        for page in pages(tables):
            self._counter += 1
            report = Report(
                sender=self._t.instance,
                counter=self._counter,
                to=followed.run.leader,
                world_size=followed.run.world_size,
                saves=tuple(sorted(saves))[-MAX_TABLE:],
                **page,
            )
            self._t.actions.append(Relay(run=followed.run.run_id, route=b"", message=report))

    def _rank_rows(self, followed: _Followed) -> Iterator[Row]:
        """Yield the rows of ranks.

        IMPORTANT: a departure is reported only when the leader has acknowledged everything that the rank has sealed
        and consented to; else the leader would end saves that can be committed without the rank.
        """
        run = followed.run
        for rank in sorted({*run.members, *run.departed}):
            if rank not in followed.attempts:
                continue
            reason = run.departed.get(rank, "")[:MAX_TEXT_CHARS]
            if reason and any(
                _is_unacknowledged(part)
                for save in self._t.open_saves(followed.run.run_id)
                if (part := save.ranks.get(rank)) is not None and part.request is not None
            ):
                reason = ""
            yield {"rank": rank, "attempt": followed.attempts[rank], "gone": reason}

    def _failure_rows(self, followed: _Followed) -> Iterator[Row]:
        for save in self._t.open_saves(followed.run.run_id):
            if save.failed_locally and save.pending_failure is not None:
                yield _failure(save.save_id, *save.pending_failure)
        yield from followed.unacknowledged_failures.values()

    def _part_rows(self, followed: _Followed) -> Iterator[Row]:
        run = followed.run
        for save in self._t.open_saves(followed.run.run_id) if run.leader else ():
            for rank, part in save.ranks.items():
                if rank in followed.attempts and not part.ended:
                    part.reported_to = part.reported_to or run.leader
                    yield part_row(save.save_id, part, recovering=_former_may_know(followed, part))

    def _has_unacknowledged(self, followed: _Followed) -> bool:
        """Whether the leader has not acknowledged everything yet."""
        open_parts = (part for save in self._t.open_saves(followed.run.run_id) for part in save.ranks.values())
        departed = {rank for rank in followed.run.departed if rank in followed.attempts}
        return bool(
            followed.unacknowledged_failures
            or departed - followed.acknowledged_departures
            or [*_withdrawal_rows(followed)]
        ) or any(map(_is_unacknowledged, open_parts))

    def _answer(self, followed: _Followed) -> None:
        if followed.run.leader:
            for peer, id in followed.waiting_follows:
                self._t.send(peer, Following(id=id, leader=followed.run.leader))
            followed.waiting_follows.clear()

    # ---- timers and status report -----------------------------------------------------------------------------------

    def times(self) -> Iterator[float]:
        """Yield the times of the next whole tables, and the deadlines of waiting requests."""
        for followed in self.followed.values():
            yield followed.full_sent_at + BEAT_S
            yield from followed.waiting_follows.values()

    def report(self) -> list[Mapping[str, Any]]:
        """Return a row of the status report for each followed run."""
        return [followed.row(self._t.now) for followed in self.followed.values()]

    @property
    def busy(self) -> bool:
        """Whether a reachable leader has not acknowledged everything yet."""
        now = self._t.now
        return any(self._has_unacknowledged(f) and now - f.last_message_at < PRESENT_S for f in self.followed.values())


def _is_unacknowledged(part: RankSave) -> bool:
    return PHASE_ORDER[part.acknowledged] < PHASE_ORDER[known_phase(part)]


def _is_complete_there(part: RankSave) -> bool:
    """Whether the leader needs nothing more of this part: it is durable, and its hook, if it has one, has consented."""
    return part.acknowledged == (CONSENTED if part.has_consented else DURABLE) and not part.needs_consent


def _former_may_know(followed: _Followed, part: RankSave) -> bool:
    """Whether a rank's part was reported to a former leader, or may have been by a dead worker."""
    return part.from_dead_worker or part.reported_to not in ("", followed.run.leader)


def _rows_to_send(followed: _Followed, table: str, rows: Iterable[Row], *, whole: bool) -> list[Row]:
    """Return the rows of a table that have changed since they were sent; all rows if `whole`."""
    before, found = followed.sent.get(table, {}), list[Row]()
    now: dict[Any, Row] = {}
    for row in rows:
        key = (row.get("save_id", row.get("path", "")), row.get("rank", -1))
        now[key] = {name: value for name, value in row.items() if name not in ("request", "result", "report")}
        if whole or before.get(key) != now[key]:
            found.append(row)
    followed.sent[table] = now
    return found


def _failure(save_id: str, outcome: str, error: Mapping[str, Any]) -> Row:
    return {"save_id": save_id, "outcome": ABANDONED if outcome == ABANDONED else FAILED, "error": error}


def _call(row: Row) -> str:
    return SaveId.parse(row["save_id"]).call


def _withdrawal_rows(followed: _Followed) -> Iterator[Row]:
    return (row for row in followed.run.declined if _call(row) not in followed.ended_calls)


def _question_rows(followed: _Followed) -> Iterator[Row]:
    for question in followed.questions.values():
        yield {
            "rank": question.rank,
            "path": question.path,
            "least_epoch": question.least_epoch,
            "number": question.number,
        }


def _unreachable(followed: _Followed, why: str) -> WorkerUnavailableError:
    """Return the error for requests that wait for a leader that cannot be reached."""
    address = followed.leader_address.address
    return WorkerUnavailableError(
        f"the worker at {address} that leads run {followed.run.run_id} cannot be reached from here: {why}. Start the "
        "worker beside rank 0 with --advertise HOST, a name or address of its node that the other nodes reach, and "
        "--port P if a firewall is between them",
        endpoint=address,
        detail="leader",
    )
