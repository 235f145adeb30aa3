"""Boards: the ranks of a run exchange bytes through the worker while they have no process group."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncckpt.errors import AsyncCkptError, InsufficientMemoryError, ProtocolError, UnknownSaveError, from_wire
from asyncckpt.protocol.fields import MAX_PIECE_NBYTES, MAX_TABLE
from asyncckpt.protocol.messages import Fetch, Fetched, Message, Ok, Share
from asyncckpt_worker.core.failures import other_world
from asyncckpt_worker.core.model import Session
from asyncckpt_worker.core.tables import Tables

MAX_BOARDS = 64
MAX_SHARED_NBYTES = 64 << 20
"""Maximum bytes that one rank may share: names and shapes of a million tensors. Chosen, not measured."""

MAX_BOARDS_NBYTES = 256 << 20
"""Maximum bytes of all boards; a rank's total counts from its first piece. Chosen, not measured."""


@dataclass(slots=True)
class _Shared:
    """The bytes that one rank has shared so far."""

    session: str
    total: int
    data: bytearray = field(default_factory=bytearray)

    @property
    def complete(self) -> bool:
        return len(self.data) == self.total


@dataclass(slots=True)
class _Board:
    world_size: int
    ranks: dict[int, _Shared] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return len(self.ranks) == self.world_size and all(s.complete for s in self.ranks.values())

    @property
    def nbytes(self) -> int:
        return sum(s.total for s in self.ranks.values())


class BoardRegistry:
    """Answers Share and Fetch. A board is dropped at the latest when all of its sessions have ended."""

    def __init__(self, tables: Tables) -> None:
        self._t = tables
        self._boards: dict[str, _Board] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that the boards hold or have reserved."""
        return sum(board.nbytes for board in self._boards.values())

    def share(self, session: Session, m: Share) -> Message | AsyncCkptError:
        """Append a piece; a repeated piece is accepted again."""
        end, board = m.offset + len(m.data), self._boards.get(m.board)
        if m.total > MAX_SHARED_NBYTES or end > m.total:
            text = f"board {m.board!r} cannot take bytes {m.offset} to {end} of {m.total}"
            return ProtocolError(text, detail="board")
        if board is not None and board.world_size != session.world_size:
            return from_wire(other_world(m.board, board.world_size, session.rank, session.world_size))
        mine = board.ranks.get(session.rank) if board else None
        if mine is not None and mine.session != session.name:
            if mine.session in self._t.sessions:
                return _two_groups(session.rank)
            del self._boards[m.board]  # complete, of a job that has ended: a new job reuses the name
            mine = None
        if mine is None:
            if m.offset:
                text = f"board {m.board!r} has no bytes of rank {session.rank}: share from offset 0"
                return UnknownSaveError(text, detail="board")
            refused = self._make_room(m)
            if refused is not None:
                return refused
            board = self._boards.setdefault(m.board, _Board(session.world_size))
            mine = board.ranks[session.rank] = _Shared(session.name, m.total)
        known = mine.data[m.offset : end]
        if mine.total != m.total or m.offset > len(mine.data) or not m.data.startswith(known):
            text = f"board {m.board!r} holds {len(mine.data)} of {mine.total} bytes; the piece differs or leaves a gap"
            return ProtocolError(text, detail="board")
        mine.data += m.data[len(known) :]
        return Ok(id=m.id)

    def fetch(self, session: Session, m: Fetch) -> Message | AsyncCkptError:
        """Return a piece, or the ranks that have not shared everything."""
        if not m.rank < session.world_size:
            return ProtocolError(f"rank {m.rank} of world {session.world_size}", detail="rank")
        board = self._boards.get(m.board)
        if board is not None and board.world_size != session.world_size:
            return from_wire(other_world(m.board, board.world_size, session.rank, session.world_size))
        if board is None or not board.complete:
            ranks = board.ranks if board else {}
            missing = [r for r in range(session.world_size) if r not in ranks or not ranks[r].complete]
            return Fetched(id=m.id, missing=tuple(missing[:MAX_TABLE]), total=0, data=b"")
        return _piece(m, board.ranks[m.rank].data)

    def ended(self, session: Session, successor: Session | None = None) -> None:
        """End a session: its bytes go to its successor, or are dropped unless the board is complete."""
        for name, board in list(self._boards.items()):
            mine = board.ranks.get(session.rank)
            if mine is not None and mine.session == session.name:
                if successor is not None and successor.rank == session.rank:
                    mine.session = successor.name
                elif not board.complete:
                    del board.ranks[session.rank]
            if not any(s.session in self._t.sessions for s in board.ranks.values()):
                del self._boards[name]

    def _make_room(self, m: Share) -> AsyncCkptError | None:
        """Drop complete boards, oldest first, until another rank's bytes fit; return the error if they do not."""
        new = m.board not in self._boards
        for name in [n for n, b in self._boards.items() if b.complete and n != m.board]:
            if len(self._boards) + new <= MAX_BOARDS and self.nbytes + m.total <= MAX_BOARDS_NBYTES:
                break
            del self._boards[name]
        if len(self._boards) + new <= MAX_BOARDS and self.nbytes + m.total <= MAX_BOARDS_NBYTES:
            return None
        return InsufficientMemoryError(
            f"{len(self._boards)} boards hold {self.nbytes} bytes; {m.total} more do not fit into {MAX_BOARDS_NBYTES}",
            nbytes=m.total,
            available=max(0, MAX_BOARDS_NBYTES - self.nbytes),
            limit=MAX_BOARDS_NBYTES,
        )


def _piece(m: Fetch, data: bytes | bytearray) -> Message:
    return Fetched(id=m.id, missing=(), total=len(data), data=bytes(data[m.offset : m.offset + MAX_PIECE_NBYTES]))


def _two_groups(rank: int) -> ProtocolError:
    return ProtocolError(
        f"two process groups meet at this worker: another process shares as rank {rank} too; give each its own "
        "ASYNCCKPT_JOB or endpoint",
        detail="two_groups",
    )
