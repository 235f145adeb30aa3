"""The worker's core on a bench: what surrounds it is played by the test, one event at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

from asyncckpt.errors import AsyncCkptError, SaveFailedError, to_wire
from asyncckpt.protocol import messages as m
from asyncckpt.protocol.request import PartRange, SaveRequest
from asyncckpt_worker.core import actions as ac
from asyncckpt_worker.core import events as ev
from asyncckpt_worker.core.actions import LeaderAddress, Listener, Resources
from asyncckpt_worker.core.machine import Core, CoreConfig
from asyncckpt_worker.core.model import RankSave, Save
from asyncckpt_worker.core.tables import EndedSave, History, Tables

CONFIG = CoreConfig(
    package="test",
    pid=10,
    pid_start=20,
    instance="ab" * 8,
    heartbeat_s=0.5,
    idle_exit_s=600.0,
    drain_timeout_s=120.0,
    staging_grace_s=10.0,
    keep_snapshots_s=30.0,
    mirror_roots=(),
)
FIRST = "000001-00000000-aaaaaaaaaaaa"
SECOND = "000001-00000001-aaaaaaaaaaaa"
PATH = "/ckpt/a"
COMMIT_TIMEOUT_S = 1800.0
RUN, OTHER_RUN = "a" * 12, "c" * 12
ERROR = to_wire(SaveFailedError("no room", code="ENOSPC"))
HELLO = {"replaces": "", "package": "t", "pid": 7, "pid_start": 8, "storage": {}}
BEGIN = {"step": 5, "path": PATH, "nbytes": 1, "umask": 0o22, "fsync": True, "overwrite": False}
BEGIN |= {"commit_timeout_s": COMMIT_TIMEOUT_S}
"""What most messages say."""
T = TypeVar("T")


def all_saves(tables: Tables) -> list[Save | EndedSave]:
    """Return all saves that a core knows, open or ended."""
    return list({save.save_id: save for save in (*tables.ended, *tables.saves.values())}.values())


def all_parts(tables: Tables) -> Iterator[tuple[Save | EndedSave, RankSave]]:
    """Yield all ranks of all saves that a core knows."""
    for save in all_saves(tables):
        for rank in save.ranks:
            part = tables.part((save.save_id, rank))
            assert part is not None
            yield save, part


class WatchedHistory(History):
    """Keeps the parts of all ranks as they were when their saves had ended."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[RankSave] = []

    def add(self, save: Save) -> None:
        """Also keep the parts."""
        self.parts += save.ranks.values()
        super().add(save)


class WatchedBrain(Core):
    """A core of which a test sees all parts that there were."""

    def __init__(self, config: CoreConfig, now: float, resources: Resources) -> None:
        super().__init__(config, now, resources)
        self.history = self.tables.ended = WatchedHistory()

    def parts(self) -> list[RankSave]:
        """Return the parts of all ranks in all saves."""
        return [*self.history.parts, *(part for _, part in self.tables.parts())]


class FakeResources:
    """Gives what is asked for, unless a test says otherwise, and notes it: the name of the method, and what it took.

    Attributes:
        alive: Whether processes are.
        no_watch, no_slot, no_socket: Why there is none.
        listener: Where this worker listens.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.alive = True
        self.no_watch: AsyncCkptError | None = None
        self.no_slot: AsyncCkptError | None = None
        self.no_socket: AsyncCkptError | None = None
        self.listener = Listener(address="tcp://here:1", public="k" * 40, secret="s" * 40)

    def watch(self, session: str, pid: int, pid_start: int) -> bool:
        """See `Resources`."""
        self.asked.append(("watch", (session, pid, pid_start)))
        if self.no_watch is not None:
            raise self.no_watch
        return self.alive

    def create_slot(self, number: int, nbytes: int, *, populate: bool) -> tuple[int, bytes]:
        """See `Resources`."""
        self.asked.append(("create_slot", number))
        if self.no_slot is not None:
            raise self.no_slot
        return 100 + number, b"t" * 16

    def listen(self, port: int, secret: str) -> Listener:
        """See `Resources`."""
        self.asked.append(("listen", (port, secret)))
        if self.no_socket is not None:
            raise self.no_socket
        return self.listener

    def connect(self, leader: LeaderAddress) -> None:
        """See `Resources`."""
        self.asked.append(("connect", leader))
        if self.no_socket is not None:
            raise self.no_socket

    def disconnect(self, run: str) -> None:
        """See `Resources`."""
        self.asked.append(("disconnect", run))


class Bench:
    """A core with its surroundings at hand."""

    def __init__(self, config: CoreConfig = CONFIG) -> None:
        self.resources = FakeResources()
        self.core = Core(config, 0.0, self.resources)
        self.now = 0.0
        self.ids = 0
        self.actions: list[Any] = []

    def feed(self, kind: Any, **fields: Any) -> list[Any]:
        """Feed one event and return the actions, logs left out."""
        self.resources.asked.clear()
        self.actions = [a for a in self.core.handle(kind(now=self.now, **fields)) if not isinstance(a, ac.Log)]
        return self.actions

    def say(self, kind: Any, peer: bytes = b"p", **fields: Any) -> Any:
        """Send a message and return the reply, or None."""
        self.ids += 1
        message = kind(**{"id": self.ids, **fields})
        self.feed(ev.Received, peer=peer, message=message)
        replies = [a.message for a in self.of(ac.Send) if getattr(a.message, "id", 0) == message.id and a.peer == peer]
        return replies[0] if replies else None

    def of(self, kind: type[T]) -> list[T]:
        """Return the last actions of one kind."""
        return [a for a in self.actions if isinstance(a, kind)]

    def asked(self, name: str) -> list[Any]:
        """Return what the last event has asked one method of the resources for."""
        return [what for method, what in self.resources.asked if method == name]

    def pushed(self) -> list[Any]:
        """Return the rows that were pushed last."""
        return [
            r for a in self.of(ac.Send) if isinstance(a.message, m.Saves) and a.message.id == 0 for r in a.message.saves
        ]

    def hello(
        self, peer: bytes = b"p", session: str = "1" * 16, rank: int = 0, world_size: int = 1, **changes: Any
    ) -> Any:
        fields = {**HELLO, "session": session, "rank": rank, "world_size": world_size, **changes}
        return self.say(m.Hello, peer, **fields)

    def slot(self, peer: bytes = b"p") -> int:
        return int(self.say(m.Allocate, peer, nbytes=12288, populate=True).slot)

    def adopt(self, peer: bytes = b"p", **changes: Any) -> Any:
        """Hand a slot over that a dead worker had lent: its save of generation 4 has not ended."""
        fields = {"fd": 9, "nbytes": 12288, "token": b"t" * 16, "generation": 4, "ended": 3, "committed": ""}
        return self.say(m.Adopt, peer, **{**fields, **changes})

    def adopted(self, peer: bytes = b"p", **changes: Any) -> int:
        """Bring a slot that is handed over to where it is looked into; return its number."""
        assert self.adopt(peer, **changes) is None
        (job,) = self.of(ac.AdoptSlot)
        self.feed(ev.SlotAdopted, slot=job.slot, fd=100 + job.slot, token=b"t" * 16)
        return int(job.slot)

    def begin(self, slot: int, save_id: str = FIRST, generation: int = 1, peer: bytes = b"p", **changes: Any) -> Any:
        fields = {**BEGIN, "save_id": save_id, "slot": slot, "generation": generation, **changes}
        return self.say(m.Begin, peer, **fields)

    def submit(self, slot: int, save_id: str = FIRST, generation: int = 1, peer: bytes = b"p") -> Any:
        return self.say(m.Submit, peer, save_id=save_id, slot=slot, generation=generation)

    def read(self, slot: int, save_id: str = FIRST, generation: int = 1, **changes: Any) -> list[Any]:
        request = replace(REQUEST, save_id=save_id, **changes)
        return self.feed(ev.SlotRead, slot=slot, generation=generation, request=request)

    def phase(self, save_id: str = FIRST, rank: int = 0) -> str | None:
        part = self.core.tables.part((save_id, rank))
        return part.phase if part else None

    def row(self, save_id: str = FIRST, peer: bytes = b"p") -> Any:
        reply = self.say(m.Heartbeat, peer, saves=(save_id,))
        return reply.saves[0] if reply.saves else None

    def at_writing(
        self, slot: int, save_id: str = FIRST, generation: int = 1, peer: bytes = b"p", rank: int = 0
    ) -> None:
        """Bring a save to where its files are being written."""
        world_size = self.core.tables.slots[slot].world_size
        self.begin(slot, save_id, generation, peer)
        self.feed(ev.Prepared, key=(save_id, rank))
        self.submit(slot, save_id, generation, peer)
        self.read(slot, save_id, generation, rank=rank, world_size=world_size)
        assert self.phase(save_id, rank) == "writing"


REQUEST = SaveRequest(
    save_id=FIRST,
    step=5,
    path=PATH,
    rank=0,
    world_size=1,
    parts=(PartRange(offset=4096, nbytes=1),),
    structure=b"",
    objects=b"",
    n_tensors=1,
    metadata="{}",
    fsync=True,
    overwrite=False,
    umask=0o22,
    write_threads=0,
    package="t",
    commit_timeout_s=COMMIT_TIMEOUT_S,
    hook_timeout_s=0,
    plan="",
    samples=b"",
    changed=False,
)


def code(reply: Any) -> str:
    assert isinstance(reply, m.Refused), reply
    return str(reply.error["code"])
