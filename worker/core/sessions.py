"""Sessions of trainers: each is one client of a process, from its Hello until it leaves, is replaced, or dies."""

from __future__ import annotations

from collections.abc import Callable

from asyncckpt.basics.storage_options import StorageOptions
from asyncckpt.errors import AsyncCkptError, ProtocolError, WorkerUnavailableError
from asyncckpt.protocol.messages import Hello, Welcome
from asyncckpt_worker.core.actions import Resources
from asyncckpt_worker.core.events import Died, Peer
from asyncckpt_worker.core.exchange import BoardRegistry
from asyncckpt_worker.core.kept_snapshots import SnapshotRegistry
from asyncckpt_worker.core.model import MAX_SESSIONS, Session
from asyncckpt_worker.core.runs import RunRegistry
from asyncckpt_worker.core.slots import SlotRegistry
from asyncckpt_worker.core.tables import Tables


class SessionRegistry:
    """Opens, replaces and ends sessions."""

    def __init__(
        self,
        tables: Tables,
        slot_registry: SlotRegistry,
        snapshot_registry: SnapshotRegistry,
        runs: RunRegistry,
        boards: BoardRegistry,
        welcome: Callable[[int], Welcome],
        resources: Resources,
    ) -> None:
        self._t, self._resources = tables, resources
        self._slot_registry, self._snapshot_registry = slot_registry, snapshot_registry
        self._runs, self._boards = runs, boards
        self._welcome = welcome

    def hello(self, peer: Peer, m: Hello) -> None:
        """Open a session; a repeated Hello, or one over a new connection, gets the same session."""
        known = self._t.sessions.get(m.session)
        if self._t.peers.get(peer, m.session) != m.session:
            return self._t.refuse(
                peer, m.id, ProtocolError("this connection belongs to another session", detail="session")
            )
        if known is not None:
            if (known.pid, known.pid_start, known.rank) != (m.pid, m.pid_start, m.rank):
                return self._t.refuse(peer, m.id, ProtocolError("another process has this session", detail="session"))
            self._t.peers.pop(known.peer, None)
            self._t.peers[peer], known.peer = known.name, peer
            return self._t.send(peer, self._welcome(m.id))
        own = sum(not s.follower for s in self._t.sessions.values())  # ranks of other nodes do not count
        if self._t.draining or own >= MAX_SESSIONS:
            why = "is shutting down" if self._t.draining else f"already serves {MAX_SESSIONS} sessions, its limit"
            return self._t.refuse(peer, m.id, WorkerUnavailableError(f"this worker {why}; start another", detail=why))
        if not m.rank < m.world_size:
            return self._t.refuse(peer, m.id, ProtocolError(f"rank {m.rank} of world {m.world_size}", detail="rank"))
        try:
            is_watched = self._resources.watch(m.session, m.pid, m.pid_start)
        except AsyncCkptError as error:
            return self._t.refuse(peer, m.id, error)
        if not is_watched:
            text = f"the worker finds no process {m.pid} with that start time; both must share a PID namespace"
            return self._t.refuse(peer, m.id, WorkerUnavailableError(text, detail="pid"))
        session = Session(m.session, peer, m.pid, m.pid_start, m.rank, m.world_size, m.package, m.replaces)
        session.storage = StorageOptions(m.storage)
        self._t.sessions[m.session] = session
        self._t.peers[peer] = m.session
        self._t.send(peer, self._welcome(m.id))
        text = f"session opened by process {session.pid}, rank {session.rank} of {session.world_size}"
        self._t.log("info", text, session=session.name, count="sessions_opened")
        return self._replace(session)

    def died(self, event: Died) -> None:
        """Close the slots of a dead process; sealed snapshots in them are accepted first."""
        session = self._t.sessions.get(event.session)
        if session is not None:
            self._t.log("info", "process died", session=session.name, count="sessions_died", pid=session.pid)
            self._forget(session, died=True)
            self._runs.leave(session, f"its process {session.pid} died")
        else:
            self._snapshot_registry.died(event.session)

    def goodbye(self, session: Session) -> None:
        """End a session whose trainer has closed it."""
        self._t.log("info", "session closed", session=session.name, count="sessions_closed")
        self._forget(session)
        self._runs.leave(session, "its checkpointer was closed")

    def _replace(self, session: Session) -> None:
        """End the earlier session of this client; while the process runs, nothing else would end it."""
        old = self._t.sessions.get(session.replaces)
        if old is not None and old is not session and (old.pid, old.pid_start) == (session.pid, session.pid_start):
            self._t.log("info", f"replaced by session {session.name}", session=old.name, count="sessions_replaced")
            self._runs.hand_over(old, session)
            self._forget(old, session)

    def _forget(self, session: Session, successor: Session | None = None, *, died: bool = False) -> None:
        self._t.sessions.pop(session.name, None)
        self._snapshot_registry.session_ended(session, died=died, replaced=successor is not None)
        self._boards.ended(session, successor)
        self._t.peers.pop(session.peer, None)
        for number in sorted(session.slots):
            self._slot_registry.close(self._t.slots[number])
