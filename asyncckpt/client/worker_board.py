"""Meetings through the worker, for ranks without an initialised process group.

Each rank posts its bytes to a board (a table in the worker's memory, protocol/SPEC.md), in pieces, and fetches the
other ranks' once all have posted.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

from asyncckpt.config import RankInfo
from asyncckpt.distributed.meetings import Exchange, Meeting, Save, WaitTimer, refused
from asyncckpt.errors import SaveFailedError
from asyncckpt.protocol import fields as check
from asyncckpt.protocol import messages

PIECE_NBYTES = check.MAX_PIECE_NBYTES
_REFUSED, _PAYLOAD = b"\0", b"\1"
"""First byte of a post: a reason for not coming, or the payload, follows."""

_SCOPE = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_STEP_ID")
"""Environment variables that are equal on all ranks of one start of a job, and differ between starts."""

_counts: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
"""How many meetings of each series this process has come to."""

SendRequest = Callable[[Callable[[int], messages.Message], float], messages.Message]
"""Sends a request, built from its id, to the worker and returns the reply. Raises WorkerUnavailableError after so many
seconds, and the error with which the worker refuses."""


class BoardExchange(Exchange):
    """Meetings of the ranks that have the same worker, and the same start of a job in their environment.

    Args:
        rank: Rank of this process.
        request: Sends a request to the worker, and returns the reply.
        timeout_s: Timeout of each request.
        environ: Defaults to `os.environ`.
    """

    def __init__(
        self, rank: RankInfo, request: SendRequest, *, timeout_s: float, environ: Mapping[str, str] | None = None
    ) -> None:
        self._rank, self._request, self._timeout_s = rank, request, timeout_s
        self.environ = environ = os.environ if environ is None else environ
        self._scope = "\0".join(environ.get(name, "") for name in _SCOPE)

    def meet_next(self, series: str, call: str, about: Save | None = None) -> Meeting:
        """As `Exchange`. Each process counts for itself: a board is forgotten when the processes that use it end."""
        self.refuse_several_nodes(self._rank.world_size, self.environ)
        return _BoardMeeting(self, f"{series}-{next(_counts[self._board(series)])}", call)

    def announce_absence(self, sequence: int, reason: str) -> None:
        """Do nothing: a post is seen only once all ranks have posted. The others wait until their timeout."""

    @staticmethod
    def refuse_several_nodes(world_size: int, environ: Mapping[str, str]) -> None:
        """Refuse ranks on several nodes, which cannot meet through one worker.

        Raises:
            SaveFailedError: Code "several_machines": by torchrun's environment the ranks are on several nodes.
        """
        here = environ.get("LOCAL_WORLD_SIZE", "")
        is_number = here.isascii() and here.isdecimal() and len(here) <= len(str(world_size))
        if is_number and 0 < int(here) < world_size:
            raise SaveFailedError(
                f"{here} of {world_size} ranks are on this node, and no process group is initialised: ranks on several "
                "nodes need one for their first save; call torch.distributed.init_process_group() before it (any "
                "backend)",
                code="several_machines",
                detail="no process group",
            )

    def post(self, name: str, data: bytes) -> None:
        """Post this rank's bytes to the board `name`.

        Raises:
            AsyncCkptError: The worker cannot be reached, or refuses.
        """
        board = self._board(name)
        for offset in range(0, max(1, len(data)), PIECE_NBYTES):
            piece = data[offset : offset + PIECE_NBYTES]
            self._request(_share(board, offset, len(data), piece), self._timeout_s)

    def missing(self, name: str) -> list[int]:
        """Return the ranks that have not posted."""
        return self._fetched(name, 0, 0)[0]

    def take(self, name: str, rank: int) -> bytes:
        """Return what `rank` has posted; call it only once all ranks have posted.

        Raises:
            SaveFailedError: The rank, or another one, has ended since (code "exchange").
            AsyncCkptError: The worker cannot be reached, or refuses.
        """
        data, total = bytearray(), 1
        while len(data) < total:
            missing, total, piece = self._fetched(name, rank, len(data))
            if missing or (total and not piece):
                raise SaveFailedError(
                    f"ranks {missing or [rank]} ended during the meeting of all ranks",
                    code="exchange",
                    rank=missing[0] if missing else rank,
                )
            data += piece
        return bytes(data)

    def _fetched(self, name: str, rank: int, offset: int) -> tuple[list[int], int, bytes]:
        reply = self._request(_fetch(self._board(name), rank, offset), self._timeout_s)
        assert isinstance(reply, messages.Fetched)
        return list(reply.missing), reply.total, reply.data

    def _board(self, name: str) -> str:
        return hashlib.sha256(f"{self._scope}\0{self._rank.world_size}\0{name}".encode()).hexdigest()[:32]


class _BoardMeeting(Meeting):
    def __init__(self, exchange: BoardExchange, name: str, call: str) -> None:
        self._exchange, self._name, self._call = exchange, name, call
        self._round = 0

    def gather(self, payload: bytes, deadline: float) -> list[bytes]:
        exchange, board = self._exchange, f"{self._name}/{self._round}"
        timer = WaitTimer(self._call, deadline, first=self._round == 0)
        self._round += 1
        exchange.post(board, _PAYLOAD + payload)
        while missing := exchange.missing(board):
            timer.wait(lambda found=missing: found)  # type: ignore[misc]
        found = [exchange.take(board, rank) for rank in range(exchange._rank.world_size)]
        for rank, data in enumerate(found):
            if data[:1] == _REFUSED:
                raise refused(rank, data[1:].decode(errors="replace"))
        return [data[1:] for data in found]

    def refuse(self, reason: str) -> None:
        self._exchange.post(f"{self._name}/{self._round}", _REFUSED + reason[:500].encode(errors="replace"))

    def close(self) -> None:
        """Do nothing: the worker forgets boards by itself."""


def _share(board: str, offset: int, total: int, data: bytes) -> Callable[[int], messages.Message]:
    return lambda n: messages.Share(id=n, board=board, offset=offset, total=total, data=data)


def _fetch(board: str, rank: int, offset: int) -> Callable[[int], messages.Message]:
    return lambda n: messages.Fetch(id=n, board=board, rank=rank, offset=offset)
