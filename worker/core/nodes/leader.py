"""The leader of a run: admits the workers of other nodes as followers, takes their reports, and sends them outcomes.

A rank of another node has a session and parts like the ranks of this worker's own trainers. Its session has no peer,
and the phases of its parts come from the follower's table.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

from asyncckpt.basics.limits import MAX_RANKS
from asyncckpt.errors import AsyncCkptError, from_wire
from asyncckpt.format.names import SaveId
from asyncckpt.protocol.fields import MAX_MISSING, MAX_TABLE
from asyncckpt.protocol.messages import Consent, Lead, Leading, Lineage, Withdraw
from asyncckpt.protocol.node_tables import BEAT_S, CONSENTED, Outcomes, Report
from asyncckpt.protocol.save_phases import ABANDONED, COMMITTED, DURABLE, FAILED, OPEN
from asyncckpt_worker.core.actions import Listener, Relay, Resources
from asyncckpt_worker.core.events import Relayed, Wire
from asyncckpt_worker.core.failures import busy, failed, led_elsewhere, other_world, part_rejected, worker_lost
from asyncckpt_worker.core.model import RankSave, Save, Session, Slot
from asyncckpt_worker.core.nodes.tables import (
    PRESENT_S,
    Row,
    begin_of,
    pages,
    reported_phase,
    request_of,
    unpack_result,
)
from asyncckpt_worker.core.runs import LineageRegistry, RunRegistry
from asyncckpt_worker.core.save_admission import SaveAdmission
from asyncckpt_worker.core.saves import SaveRegistry, forget_inactive_followers
from asyncckpt_worker.core.slots import SlotRegistry
from asyncckpt_worker.core.status import missing_of
from asyncckpt_worker.core.tables import EndedSave, Tables
from asyncckpt_worker.mirrors.schedule import MirrorRegistry

MAX_LED = 64
"""Runs whose followers are admitted; beyond it, the oldest run without members is dropped. Chosen, not measured."""

MAX_FOLLOWERS = 4096
"""Maximum number of followers: more than a job has nodes."""

MAX_ANSWERS = 64
"""Directories for which a follower may have a lineage question open. Chosen, not measured."""

FORGET_S = 600.0
"""A follower is forgotten after this time without a message, but not before the timeouts of its run's open saves.
Must be far above the time in which connections are made again, some 15 s. Chosen."""


@dataclass(slots=True)
class _FollowerRecord:
    """A follower in one run. `name`: its ID in sessions and parts; `route`: address of its last message."""

    run_id: str
    instance: str
    name: str
    route: bytes
    last_counter: int = 0
    """Counter of the last page received from it."""

    world_size: int = 0
    ranks: dict[int, int] = field(default_factory=dict)
    """Its ranks -> `attempt` of their latest Follow."""

    departed: set[int] = field(default_factory=set)
    """Ranks of it that it has reported as departed."""

    reassigned: set[int] = field(default_factory=set)
    """Ranks that it reported and that have another worker now."""

    refused: dict[str, set[int]] = field(default_factory=dict)
    """Save ID -> the ranks in `reassigned` of which this follower still reports parts."""

    saves: tuple[str, ...] = ()
    """Saves whose outcomes it asks for."""

    questions: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Directory -> a path in it, and number of its last lineage question."""

    error: Wire | None = None
    """Why its reports are rejected; None if they are accepted."""

    full_sent_at: float = float("-inf")
    """When the whole table was last sent to it."""


class Leader:
    """Receives reports of followers, and sends them outcomes."""

    def __init__(
        self,
        tables: Tables,
        runs: RunRegistry,
        admission: SaveAdmission,
        saves: SaveRegistry,
        slot_registry: SlotRegistry,
        lineages: LineageRegistry,
        mirrors: MirrorRegistry,
        resources: Resources,
    ) -> None:
        self._t, self._runs, self._slot_registry, self._mirrors = tables, runs, slot_registry, mirrors
        self._admission, self._saves, self._lineages = admission, saves, lineages
        self._resources = resources
        self._listener: Listener | None = None
        self._admitted: dict[str, str] = {}
        """Run -> public key that its followers must prove."""

        self.followers: dict[str, _FollowerRecord] = {}
        """Name -> its record."""

        self._counter = 0
        """Counter of the last page sent. IMPORTANT: one for all pages of this process, not one a record: a follower
        that is forgotten and heard again would ignore everything until a new count has passed the old one."""

        self._answers: dict[tuple[str, str], Wire] = {}
        """Run and directory -> error of the last lineage scan."""

        self._pending_rows: dict[str, dict[str, None]] = {}
        """Follower -> saves whose rows are sent at the end of this event; others are sent with the next whole table."""

    # ---- requests of trainers ---------------------------------------------------------------------------------------

    def lead(self, session: Session, m: Lead) -> None:
        """Admit followers of the run, and answer with the address at which this worker listens for them."""
        run = self._runs.join(session, m.run)
        if run is None:
            world_size = self._t.runs[m.run].world_size
            error = from_wire(other_world(m.run, world_size, session.rank, session.world_size))
            return self._t.refuse(session.peer, m.id, error)
        if run.followed:
            return self._t.refuse(session.peer, m.id, led_elsewhere(m.run))
        if not self._make_room(m.run):
            return self._t.refuse(session.peer, m.id, busy())
        self._admitted[m.run] = m.client_public
        if self._listener is None:
            try:
                self._listener = self._resources.listen(m.port, m.server_secret)
            except AsyncCkptError as error:
                return self._t.refuse(session.peer, m.id, error)
            self._t.log("info", f"listening for other workers at {self._listener.address}")
        at = self._listener
        answer = Leading(id=m.id, address=at.address, server_public=at.public, server_secret=at.secret)
        return self._t.send(session.peer, answer)

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
        """Return the run whose followers authenticate with this key, or None if the key is unknown."""
        return next((run_id for run_id, key in self._admitted.items() if key == client_public), None)

    # ---- reports of followers ---------------------------------------------------------------------------------------

    def received(self, event: Relayed) -> None:
        """Handle a page of a follower's table.

        IMPORTANT: rows of parts come before withdrawals and departures: a sealed save can commit without the rank.
        """
        m = event.message
        if not isinstance(m, Report) or event.run not in self._admitted:
            return
        follower = self._follower_record(event, m)
        if follower is None or m.counter <= follower.last_counter:
            return
        follower.last_counter, follower.route, follower.saves = m.counter, event.route, tuple(m.saves)
        follower.world_size = m.world_size
        follower.refused = {save_id: ranks for save_id, ranks in follower.refused.items() if save_id in follower.saves}
        self._t.last_message_at[follower.name] = self._t.now
        if m.to != self._t.instance:
            follower.full_sent_at = float("-inf")  # it does not know this leader yet
        run = self._t.runs.get(event.run)
        known = run.world_size if run is not None else m.world_size
        follower.error = None
        if m.world_size > MAX_RANKS or known != m.world_size:
            rank = m.ranks[0]["rank"] if m.ranks else 0
            follower.error = other_world(event.run, known, rank, m.world_size)
            return
        rows = [(self._take_rank, row) for row in m.ranks]
        if m.to == self._t.instance:
            rows += [(self._take_part, row) for row in m.parts]
            rows += [(self._take_failure, row) for row in m.failures]
            rows += [(self._take_withdrawal, row) for row in m.withdrawals]
            rows += [(self._take_departure, row) for row in m.ranks if row["gone"]]
        rows += [(self._take_question, row) for row in m.questions]
        for take, row in rows:
            if row.get("rank", 0) >= m.world_size or ("save_id" in row and _run_of(row) != event.run):
                text = f"worker {m.sender} reports a rank or save that is not in run {event.run}; ignored"
                self._t.log("error", text, count="protocol_errors")
                continue
            self._t.run_guarded(row.get("save_id", ""), take, follower, row)
        ended = [i for i in m.saves if (save := self._t.find(i)) is not None and save.outcome is not None]
        if ended:
            self._pending_rows.setdefault(follower.name, {}).update(dict.fromkeys(ended))

    def _follower_record(self, event: Relayed, m: Report) -> _FollowerRecord | None:
        name = f"{m.sender}.{event.run}"
        found = self.followers.get(name)
        if found is None and self._has_room():
            found = self.followers[name] = _FollowerRecord(event.run, m.sender, name, event.route)
            self._t.log("info", f"worker {m.sender} is a follower in run {event.run}", count="followers_linked")
        return found

    def _has_room(self) -> bool:
        """Whether another follower can be added; if not, drop the one without ranks that is silent longest."""
        if len(self.followers) >= MAX_FOLLOWERS:
            with_ranks = {s.follower for s in self._t.sessions.values()}
            spare = [name for name in self.followers if name not in with_ranks]
            if spare:
                oldest = min(spare, key=lambda name: self._t.last_message_at.get(name, 0.0))
                self._forget(self.followers[oldest], "too many followers")
        return len(self.followers) < MAX_FOLLOWERS

    # ---- ranks ------------------------------------------------------------------------------------------------------

    def _take_rank(self, follower: _FollowerRecord, row: Row) -> None:
        """Handle a row of a rank: this follower is its worker, unless the rank has named another one since."""
        rank, attempt, run = row["rank"], row["attempt"], self._t.runs.get(follower.run_id)
        holder = self._t.sessions.get(run.members.get(rank, "")) if run is not None else None
        if holder is not None and holder.follower not in ("", follower.name):
            other = self.followers.get(holder.follower)
            if other is not None and attempt <= other.ranks.get(rank, -1):
                follower.ranks.pop(rank, None)
                follower.reassigned.add(rank)
                return
            self._detach_rank(holder, "the rank has another worker now")
        is_new = follower.ranks.get(rank) != attempt
        follower.ranks[rank] = attempt
        follower.reassigned.discard(rank)
        if is_new or not row["gone"]:
            follower.departed.discard(rank)
            session = self._session(follower, rank)
            self._t.sessions[session.name] = session
            self._runs.join(session, follower.run_id)

    def _session(self, follower: _FollowerRecord, rank: int) -> Session:
        """Return the session of a rank; a new one, which is not stored, if the rank has departed."""
        name = f"{follower.name}/{rank}"
        new = Session(name, b"", 0, 0, rank, follower.world_size, "", follower=follower.name)
        return self._t.sessions.get(name) or new

    def _take_departure(self, follower: _FollowerRecord, row: Row) -> None:
        session = self._t.sessions.get(f"{follower.name}/{row['rank']}")
        if session is not None:
            del self._t.sessions[session.name]
            self._runs.leave(session, row["gone"])
        if row["rank"] in follower.ranks and row["rank"] not in follower.departed:
            follower.departed.add(row["rank"])
            self._pending_rows.setdefault(follower.name, {})

    def _detach_rank(self, session: Session, why: str) -> None:
        """Remove a rank from its follower. Its parts stay open, as the rank's next worker reports them again.

        Parts that are not reported again end by the deadline for silent followers (`saves.deadline`).
        """
        follower = self.followers.get(session.follower)
        if follower is not None:
            follower.ranks.pop(session.rank, None)
            follower.reassigned.add(session.rank)
        del self._t.sessions[session.name]
        self._runs.leave(session, f"its worker was lost: {why}")

    def _forget(self, follower: _FollowerRecord, why: str) -> None:
        """Forget a follower, and end the saves in which a rank of it is not durable or has not consented."""
        del self.followers[follower.name]
        self._t.last_message_at.pop(follower.name, None)
        for session in [s for s in self._t.sessions.values() if s.follower == follower.name]:
            self._detach_rank(session, why)
            for save in [s for s in self._t.saves.values() if s.outcome is None and not s.committing]:
                part = save.ranks.get(session.rank)
                if part is not None and part.follower == follower.name and _is_unfinished(part):
                    self._saves.end(save, FAILED, worker_lost(save, part, why))

    # ---- parts ------------------------------------------------------------------------------------------------------

    def _take_part(self, follower: _FollowerRecord, row: Row) -> None:
        save_id, rank = SaveId.parse(row["save_id"]), row["rank"]
        if rank not in follower.ranks:
            if rank in follower.reassigned:
                follower.refused.setdefault(save_id, set()).add(rank)
            return
        session = self._session(follower, rank)
        self._reassign_part(follower, session, save_id)
        save, part = self._t.find(save_id), self._t.part((save_id, rank))
        if part is None and save is not None and save.outcome == COMMITTED:
            return  # the former leader committed it, with all ranks
        if part is None:
            if self._admission.refuse_other_world(session, save_id) is None:
                self._admission.begin(session, begin_of(row), resumed=row["recovering"])
            part = self._t.part((save_id, rank))
        if part is None or part.follower != follower.name or part.ended:
            return
        if row["streamed"] and part.is_open and (not part.streaming or (part.written_at == inf) != row["writing"]):
            part.streaming, part.written_at = True, inf if row["writing"] else self._t.now
            self._t.touched[(save_id, rank)] = None
        try:
            request = request_of(row)
            result = unpack_result(row["result"], save_id, rank) if "result" in row else None
        except (ValueError, TypeError, KeyError, AsyncCkptError) as error:
            return self._fail_unreadable_part(save_id, part, error)
        if request is not None and part.is_open:
            slot = Slot(0, 0, session.name, rank, session.world_size, 0, follower=follower.name)
            self._admission.accept_sealed(slot, 1, request)
        opened = self._t.saves.get(save_id)
        if result is not None and opened is not None and part.request is not None and part.result is None:
            self._saves.written_remotely(opened, part, result, row.get("report", {}))
        if "consent" in row:
            consent = Consent(id=0, save_id=save_id, granted=row["consent"], reason=row.get("reason", ""))
            needed = part.needs_consent
            self._admission.consent(session, consent)
            if needed and not part.needs_consent:  # the follower need not repeat it
                self._pending_rows.setdefault(follower.name, {})[save_id] = None

    def _fail_unreadable_part(self, save_id: str, part: RankSave, error: Exception) -> None:
        """End the save of a part that cannot be decoded, at once rather than by its deadline."""
        text = f"the report of the worker of rank {part.rank} cannot be decoded: {error!r}"
        self._t.log("error", text, save_id=save_id, count="protocol_errors")
        save = self._t.saves.get(save_id)
        if save is not None and save.outcome is None and not save.committing:
            self._saves.end(save, FAILED, failed(save, part, "protocol", text))

    def _reassign_part(self, follower: _FollowerRecord, session: Session, save_id: str) -> None:
        """Assign an open part of a rank to its new worker.

        What the former worker reported stays; the new one reports the same.
        """
        part = self._t.part((save_id, session.rank))
        if part is None or part.follower in ("", follower.name) or session.run != follower.run_id:
            return
        save = self._t.find_or_reopen(save_id, session.rank)
        assert save is not None
        part = save.ranks[session.rank]
        part.follower, part.session = follower.name, session.name
        part.streaming = False
        text = f"rank {session.rank} continues with another worker"
        self._t.log("info", text, save_id=save_id, session=session.name, count="ranks_resumed")

    def _take_failure(self, follower: _FollowerRecord, row: Row) -> None:
        save, parsed = self._t.find(row["save_id"]), SaveId.parse(row["save_id"])
        run = self._t.runs.get(parsed.run_id)
        if isinstance(save, Save) and save.outcome is None and not save.committing:
            self._saves.end(save, row["outcome"], row["error"])
        elif save is None and run is not None:
            self._runs.withdraw(run, parsed.sequence, row["error"])  # ranks that begin it later fail at once

    def _take_withdrawal(self, follower: _FollowerRecord, row: Row) -> None:
        if row["rank"] not in follower.ranks:
            return
        if not self._fail_orphaned(follower, row):
            fields = {name: row[name] for name in ("save_id", "reason", "skipped")}
            self._admission.withdraw(self._session(follower, row["rank"]), Withdraw(id=0, **fields))

    def _fail_orphaned(self, follower: _FollowerRecord, row: Row) -> bool:
        """End a save whose rank reports that no worker continues its sealed part; return whether the row is handled."""
        save, part = self._t.saves.get(row["save_id"]), self._t.part((row["save_id"], row["rank"]))
        if part is None or part.follower in ("", follower.name) or part.is_open:
            return False
        if save is not None and save.outcome is None and not save.committing and _is_unfinished(part):
            self._saves.end(save, FAILED, worker_lost(save, part, row["reason"] or "no worker continues its part"))
        return True

    def _take_question(self, follower: _FollowerRecord, row: Row) -> None:
        parent, run = os.path.dirname(row["path"]), self._t.runs.get(follower.run_id)
        if row["rank"] not in follower.ranks or run is None:
            return
        _, number = follower.questions.get(parent, ("", 0))
        if row["number"] <= number:
            return
        for old in list(follower.questions)[: 1 - MAX_ANSWERS]:
            del follower.questions[old]
        follower.questions[parent] = (row["path"], row["number"])
        self._answers.pop((follower.run_id, parent), None)
        session = self._session(follower, row["rank"])
        request = Lineage(id=0, run=follower.run_id, path=row["path"], least_epoch=row["least_epoch"])
        self._lineages.ask(session, request)

    def epoch_found(self, run_id: str, path: str, epoch: int, error: Wire | None) -> None:
        """Send the epoch or the error to every follower of the run that asked for it."""
        parent = os.path.dirname(path)
        if error is not None:
            self._answers[run_id, parent] = error
            for old in list(self._answers)[: -MAX_LED * MAX_ANSWERS]:
                del self._answers[old]
        for name, follower in self.followers.items():
            if follower.run_id == run_id and parent in follower.questions:
                self._pending_rows.setdefault(name, {})

    # ---- outcomes for followers -------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Forget followers that have been silent for too long."""
        for follower in list(self.followers.values()):
            silent_s = self._t.now - self._t.last_message_at.get(follower.name, self._t.now)
            if silent_s >= FORGET_S and all(silent_s >= s.timeout_s for s in self._t.open_saves(follower.run_id)):
                self._forget(follower, f"no message for {silent_s:.0f} s")
        forget_inactive_followers(self._t, self.followers.keys())

    def flush(self) -> None:
        """Send each follower the rows that changed, or the whole table when that is due; at the end of an event."""
        pending, self._pending_rows = self._pending_rows, {}
        failed_copies, self._mirrors.new_failures = self._mirrors.new_failures, []
        for save_id, rank in (*self._t.touched, *self._t.changed):
            save = self._t.saves.get(save_id)
            part = save.ranks.get(rank) if save is not None else None
            if part is not None and part.follower:
                pending.setdefault(part.follower, {})[save_id] = None
        rows: dict[str, dict[str, Any]] = {}  # built once for all followers, as are the failed copies of a run
        repeated: dict[str, list[SaveId]] = {}
        for name, follower in self.followers.items():
            if follower.run_id in self._t.announced:
                pending.setdefault(name, {})
            if failed := [save_id for save_id in failed_copies if save_id.run_id == follower.run_id]:
                pending.setdefault(name, {}).update(dict.fromkeys(failed))
            if self._t.now - follower.full_sent_at >= BEAT_S:
                follower.full_sent_at = self._t.now
                if follower.run_id not in repeated:
                    repeated[follower.run_id] = self._mirrors.failures_of(follower.run_id)
                wanted = dict.fromkeys((*follower.saves, *repeated[follower.run_id]))
                self._t.run_guarded("", self._send, follower, tuple(wanted), rows)
            elif name in pending:
                self._t.run_guarded("", self._send, follower, tuple(pending[name]), rows)

    def _send(self, follower: _FollowerRecord, save_ids: tuple[str, ...], rows: dict[str, dict[str, Any]]) -> None:
        tables = {
            "saves": [self._outcome_row(follower, save_id, rows) for save_id in save_ids],
            "epochs": list(self._epoch_rows(follower)),
        }
        run = self._t.runs.get(follower.run_id)
        for page in pages(tables):
            self._counter += 1
            outcomes = Outcomes(
                sender=self._t.instance,
                counter=self._counter,
                to=follower.instance,
                decided=tuple(run.outcomes.items()) if run is not None else (),
                gone=tuple(sorted(follower.departed))[:MAX_TABLE],
                error=follower.error or {},
                **page,
            )
            self._t.actions.append(Relay(run=follower.run_id, route=follower.route, message=outcomes))

    def _outcome_row(self, follower: _FollowerRecord, save_id: str, rows: dict[str, dict[str, Any]]) -> Row:
        """Return the row of a save for this follower, with the known phases of its ranks.

        `known` is needed for ended saves too: a follower must not end a part that was reported to the former leader
        before this leader shows that it knows the part.
        """
        save = self._t.find(save_id)
        if save_id not in rows:
            rows[save_id] = self._common_row(save_id, save)
        parts = {rank: self._t.part((save_id, rank)) for rank in sorted(follower.ranks)}
        mine = {rank: part for rank, part in parts.items() if part is not None and part.follower == follower.name}
        known = [(rank, _phase_of(part) or OPEN) for rank, part in mine.items()]
        refused = sorted(follower.refused.get(save_id, set()) - mine.keys())
        known += [(rank, OPEN) for rank in refused]
        row = {**rows[save_id], "known": known[:MAX_TABLE]}
        if save is None:
            return row
        if row["outcome"] == COMMITTED:
            late = next((e for e in mine.values() if e.ended and e.phase != COMMITTED), None)
            if late is not None:  # it came after the commit, and is not in the manifest
                return {
                    **row,
                    "outcome": FAILED,
                    "error": late.error or part_rejected(save_id, late.rank),
                    "report": {},
                }
            report = next((dict(part.report) for part in mine.values()), {})
            return {**row, "report": report}
        if row["outcome"]:
            error = next((e.error for e in mine.values() if e.ended and e.error), None)
            return {**row, "error": error or row["error"]}
        if refused and not mine:
            return {**row, "outcome": FAILED, "error": part_rejected(save_id, refused[0])}
        return row

    def _common_row(self, save_id: str, save: Save | EndedSave | None) -> dict[str, Any]:
        row: dict[str, Any] = {
            "save_id": save_id,
            "outcome": "",
            "error": {},
            "report": {},
            "missing": (),
            "known": (),
        }
        parsed = SaveId.parse(save_id)
        if save is None:
            run = self._t.runs.get(parsed.run_id)
            ended = [s for s in self._t.of_call(parsed.call) if s.outcome is not None]
            if ended:
                row |= {"outcome": ended[0].outcome, "error": ended[0].error or {}}
            elif run is not None and parsed.sequence in run.withdrawn and not self._t.of_call(parsed.call):
                row |= {"outcome": ABANDONED, "error": run.withdrawn[parsed.sequence]}
        elif save.outcome is not None:
            row |= {"outcome": save.outcome, "error": save.error or {}}
        elif isinstance(save, Save):
            row["missing"] = tuple(missing_of(save)[:MAX_MISSING])
        if row["outcome"] in ("", COMMITTED):
            row["error"] = self._mirrors.failure_of(parsed) or {}
        return row

    def _epoch_rows(self, follower: _FollowerRecord) -> Iterator[Row]:
        run = self._t.runs.get(follower.run_id)
        for parent, (path, number) in list(follower.questions.items()):
            if self._lineages.is_asked_for(follower.run_id, parent):  # the epoch may become larger
                continue
            error = self._answers.get((follower.run_id, parent))
            epoch = run.epochs.get(parent) if run is not None else None
            if error is not None or epoch is not None:
                shown = {} if error is None or epoch is not None else error
                yield {"path": path, "number": number, "epoch": epoch or 0, "error": shown}

    # ---- timers and status report -----------------------------------------------------------------------------------

    def times(self) -> Iterator[float]:
        """Yield the times of the next whole tables."""
        return (follower.full_sent_at + BEAT_S for follower in self.followers.values())

    def report(self) -> list[Mapping[str, Any]]:
        """Return a row of the status report for each follower."""
        now, last_message_at = self._t.now, self._t.last_message_at
        return [
            {"run": r.run_id, "worker": r.instance, "silent_s": now - last_message_at.get(name, now)}
            for name, r in self.followers.items()
        ]

    @property
    def busy(self) -> bool:
        """Whether a reachable follower does not know yet that a save has ended."""
        now = self._t.now
        return any(
            now - self._t.last_message_at.get(name, now) < PRESENT_S
            and any((save := self._t.find(s)) is not None and save.outcome is not None for s in follower.saves)
            for name, follower in self.followers.items()
        )


def _run_of(row: Row) -> str:
    return SaveId.parse(row["save_id"]).run_id


def _is_unfinished(part: RankSave) -> bool:
    return part.phase != DURABLE or part.needs_consent


def _phase_of(part: RankSave) -> str:
    """Return the phase of a part to acknowledge; "" once it has ended."""
    if part.result is None or part.ended:
        return reported_phase(part)
    return CONSENTED if part.has_consented else DURABLE
