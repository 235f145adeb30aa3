"""The worker's core under messages that are valid one by one and make no sense together."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from typing import Any

import pytest
from simulated_workers import KEY, result_of
from worker_bench import COMMIT_TIMEOUT_S, ERROR, REQUEST, Bench, code

from asyncckpt.basics.limits import MAX_RANKS
from asyncckpt.protocol import messages as m
from asyncckpt.protocol.messages import REQUESTS
from asyncckpt.protocol.node_tables import PART_DETAILS, ROWS, Outcomes, Report
from asyncckpt.protocol.request import SaveRequest, encode_request
from asyncckpt.protocol.samples import encode_samples
from asyncckpt_worker.core import actions as ac
from asyncckpt_worker.core import events as ev
from asyncckpt_worker.core.exchange import MAX_BOARDS, MAX_BOARDS_NBYTES
from asyncckpt_worker.core.kept_snapshots import MAX_KEPT_SAVES
from asyncckpt_worker.core.model import MAX_DIRECTORIES, MAX_HISTORY, MAX_SESSIONS, Slot
from asyncckpt_worker.core.nodes.tables import pack_result
from asyncckpt_worker.core.runs import MAX_RUNS, MAX_WITHDRAWN

HONEST = "000001-00000000-ffffffffffff"
KINDS = [kind for kind in REQUESTS.values() if kind is not m.Drain]


class Mob(Bench):
    """Sessions that say anything; jobs that end anyhow."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng = rng
        self.jobs: list[Any] = []
        self.pages = 1

    def save_id(self) -> str:
        return f"{self.rng.randrange(4):06d}-{self.rng.randrange(4):08d}-{self.rng.randrange(3):012x}"

    def value(self, name: str, kind: str) -> Any:
        """Return something that the field may hold, of the kind that brings messages together."""
        rng = self.rng
        if name in ("total", "offset", "nbytes"):
            return rng.choice((0, 1, 5, 8192, 1 << 20, (1 << 26) - 1, 1 << 62))
        return {
            "uint": lambda: rng.choice((0, 1, 2, 3, 5, rng.randrange(60), (1 << 63) - 1)),
            "sint_or_none": lambda: rng.choice((-5, 0, 5, None)),
            "umask": lambda: 0o22,
            "save_id": self.save_id,
            "hex12": lambda: f"{rng.randrange(3):012x}",
            "hex12_or_none": lambda: rng.choice(("", f"{rng.randrange(3):012x}")),
            "outcomes": lambda: [(rng.randrange(9), rng.random() < 0.5)],
            "hex16": lambda: f"{rng.randrange(1, 9):016x}",
            "hex16_or_none": lambda: rng.choice(("", f"{rng.randrange(1, 9):016x}")),
            "path": lambda: f"/ckpt/{rng.randrange(4)}/{rng.randrange(9)}",
            "text": lambda: rng.choice(("", "plan", "plan-2", "\u0661" * 9)),
            "seconds": lambda: 1.0,
            "timeout": lambda: rng.choice((1e-3, 5.0, COMMIT_TIMEOUT_S)),
            "piece": lambda: rng.choice((b"", b"x", b"abcde")),
            "token": lambda: b"t" * 16,
            "save_id_or_none": lambda: rng.choice(("", self.save_id())),
            "flag": lambda: rng.random() < 0.5,
            "curve_key": lambda: KEY,
            "curve_key_or_none": lambda: rng.choice(("", KEY)),
            "port": lambda: rng.choice((0, 7000)),
            "address": lambda: rng.choice(("tcp://a:7000", "tcp://b:7000")),
            "request_bytes": lambda: rng.choice((b"", b"x", encode_request(self.request_for(None)))),
            "rank": lambda: rng.randrange(2),
            "part_phase": lambda: rng.choice(("open", "sealed", "durable")),
            "failure": lambda: rng.choice(("failed", "abandoned")),
            "error": lambda: ERROR,
            "end_or_open": lambda: rng.choice(("", "", "committed", "failed", "abandoned", "unknown")),
            "missing": lambda: tuple(range(rng.randrange(3))),
            "known": lambda: tuple((n, rng.choice(("open", "sealed", "durable"))) for n in range(rng.randrange(3))),
            "mapping": lambda: rng.choice(({}, {"record": {}}, pack_result(result_of(self.save_id(), 1)))),
            "error_or_none": lambda: rng.choice(({}, ERROR)),
            "figures": lambda: rng.choice(({}, {"nbytes": 1})),
            "storage_options": lambda: rng.choice(({}, {"region": "eu"})),
            "save_ids": lambda: tuple(self.save_id() for _ in range(rng.randrange(4))),
        }[kind]()

    def shout(self) -> None:
        """One message from one of the peers."""
        kind = self.rng.choice(KINDS)
        if kind in (m.Goodbye, m.Release) and self.rng.random() < 0.8:
            kind = m.Begin
        names = [f.name for f in fields(kind)]  # type: ignore[arg-type]
        body = {name: self.value(name, kind.checks[name].__name__) for name in names}
        peer = str(self.rng.randrange(8)).encode()
        if kind is m.Hello:
            body |= {"session": f"{int(peer) + 1:016x}", "rank": int(peer) % 3, "world_size": self.rng.choice((2, 3))}
            body |= {"pid": 7, "pid_start": 8}
        if kind is m.Adopt and self.rng.random() < 0.8:
            body |= {"nbytes": 12288, "generation": self.rng.randrange(3, 9), "ended": self.rng.randrange(4)}
        session = self.core.tables.sessions.get(f"{int(peer) + 1:016x}")
        if session is not None and session.slots and "slot" in body and self.rng.random() < 0.8:
            body["slot"] = self.rng.choice(sorted(session.slots))
        self.take(self.core.handle(ev.Received(now=self.now, peer=peer, message=kind(**body))))

    def whisper(self) -> None:
        """One page of another worker's table: of a follower, or of a leader."""
        rng, run = self.rng, f"{self.rng.randrange(3):012x}"
        route, kind = rng.choice(((b"", Outcomes), (b"1", Report), (b"2", Report)))
        sender = rng.choice((*["a" * 16] * 20, "b" * 16))
        own = self.core.tables.instance
        body: dict[str, Any] = {"counter": self.pages, "sender": sender, "to": rng.choice((own, own, own, "c" * 16))}
        self.pages += rng.random() < 0.98
        if kind is Report:
            body |= {
                "world_size": rng.choice((*[2 + int(run, 16) % 2] * 20, 9, MAX_RANKS + 1)),
                "saves": self.save_ids(run),
            }
            tables = {"ranks": "rank", "parts": "part", "failures": "failure", "withdrawals": "withdrawal"}
            tables["questions"] = "question"
        else:
            body |= {
                "decided": ((rng.randrange(9), True),),
                "gone": tuple(range(rng.randrange(3))),
                "error": rng.choice((*[{}] * 9, ERROR)),
            }
            tables = {"saves": "outcome", "epochs": "epoch"}
        for field, rows in tables.items():
            body[field] = tuple(self.row(f"{rows}_rows", run) for _ in range(rng.randrange(3)))
        self.take(self.core.handle(ev.Relayed(now=self.now, run=run, route=route, message=kind(**body))))

    def save_ids(self, run: str) -> tuple[str, ...]:
        return tuple({self.save_id()[:16] + run for _ in range(self.rng.randrange(4))})

    def row(self, table: str, run: str) -> dict[str, Any]:
        """Return a row that is valid by itself, nearly always of this run."""
        rng = self.rng
        kinds = dict(ROWS[table])
        if table == "part_rows":
            kinds |= {key: fits for key, fits in PART_DETAILS.items() if rng.random() < 0.5}
        made = {key: self.value(key, fits.__name__) for key, fits in kinds.items()}
        if "save_id" in made and rng.random() < 0.95:
            made["save_id"] = made["save_id"][:16] + run
        if "request" in made and rng.random() < 0.8:
            request = replace(self.request_for(None), save_id=made["save_id"], rank=made["rank"])
            made["request"] = encode_request(replace(request, world_size=2 + int(run, 16) % 2))
        if "result" in made and rng.random() < 0.8:
            made["result"] = pack_result(result_of(made["save_id"], made["rank"]))
        return made

    def take(self, actions: list[Any]) -> None:
        for action in actions:
            if isinstance(action, ac.LogFault):
                raise action.error
            if isinstance(action, ac.Relay):
                continue
            if not isinstance(action, (ac.Send, ac.Log, ac.SendStatus, ac.Unwatch)):
                self.jobs.append(action)

    def finish(self) -> None:
        """One job ends."""
        job, now, rng = self.jobs.pop(self.rng.randrange(len(self.jobs))), self.now, self.rng
        match job:
            case ac.ReadSlot():
                self.take(self.core.handle(self.read_slot(job.slot)))
            case ac.AdoptSlot():
                opened = {"fd": job.slot + 100, "token": job.token} if rng.random() < 0.8 else {"error": ERROR}
                self.take(self.core.handle(ev.SlotAdopted(now=now, slot=job.slot, **opened)))
            case ac.FreeSlot():
                self.take(self.core.handle(ev.SlotFreed(now=now, slot=job.slot)))
            case ac.Prepare():
                committed = job.resumed and rng.random() < 0.3
                self.take(self.core.handle(ev.Prepared(now=now, key=job.key, committed=committed)))
            case ac.Write():
                self.take(self.core.handle(ev.Written(now=now, key=job.key, result=result_of(*job.key))))
            case ac.Commit():
                self.take(self.core.handle(ev.Published(now=now, save_id=job.save_id)))
            case ac.Remove():
                self.take(self.core.handle(ev.Removed(now=now, save_id=job.save_id)))
            case ac.ScanLineage():
                facts = {"run": job.run, "path": job.path}
                self.take(self.core.handle(ev.LineageScanned(now=now, epoch=rng.randrange(1, 5), **facts)))
            case ac.CopyToMirror() | ac.CheckMirrored():
                ended = rng.choice(({"is_done": True}, {"error": ERROR}, {"error": ERROR, "is_final": True}, {}))
                self.take(self.core.handle(ev.Copied(now=now, save_id=job.save_id, **ended)))
            case ac.ScanUnmirrored():
                self.take(self.core.handle(ev.UnmirroredFound(now=now, root=job.root)))

    def read_slot(self, slot: int) -> ev.SlotRead:
        if self.rng.random() < 0.4:
            return ev.SlotRead(now=self.now, slot=slot, reason="OPEN")
        request = self.request_for(self.core.tables.slots.get(slot))
        return ev.SlotRead(now=self.now, slot=slot, generation=self.rng.randrange(50), request=request)

    def request_for(self, held: Slot | None) -> SaveRequest:
        """A request that some rank might leave in its slot."""
        world_size = self.rng.choice((1, 2, 3))
        changes = {
            "save_id": self.save_id(),
            "rank": self.rng.randrange(world_size),
            "world_size": world_size,
            "path": f"/ckpt/{self.rng.randrange(4)}/{self.rng.randrange(3)}",
            "commit_timeout_s": 5.0,
            "hook_timeout_s": self.rng.choice((0, 0, 3.0)),
            "plan": self.rng.choice(("", "1" * 16)),
            "samples": encode_samples([("w", self.rng.random() < 0.5, self.rng.choice((bytes(8), b"8 bytes!")))]),
            "changed": self.rng.random() < 0.5,
            "mirror": self.rng.choice(("", "/mirror/1")),
        }
        if held is not None and self.rng.random() < 0.7:
            changes |= {"rank": held.rank, "world_size": held.world_size}
            part = self.core.tables.part(held.key)
            if part is not None and held.key is not None:
                changes |= {"save_id": held.key[0], "path": part.path, "step": part.step}
        return SaveRequest(**{f.name: changes.get(f.name, getattr(REQUEST, f.name)) for f in fields(REQUEST)})

    def check(self) -> None:
        """Everything is bounded, and every save that was sealed by somebody has time to run out."""
        t = self.core.tables
        assert len(t.sessions) <= MAX_SESSIONS and len(t.saves) <= MAX_HISTORY + 64
        assert len(t.runs) <= MAX_RUNS + MAX_SESSIONS
        assert all(len(r.withdrawn) <= MAX_WITHDRAWN and len(r.epochs) <= MAX_DIRECTORIES for r in t.runs.values())
        assert self.core._boards.nbytes <= MAX_BOARDS_NBYTES and len(self.core._boards._boards) <= MAX_BOARDS
        assert len({t.slots[n].key for n in t.slots if t.slots[n].kept}) <= MAX_KEPT_SAVES * 3 + len(t.sessions)
        for session in t.sessions.values():
            assert all(t.slots[n].session == session.name for n in session.slots)
        for save in t.saves.values():
            assert all(rank < save.world_size for rank in save.ranks)


@pytest.mark.parametrize("schedule", range(6))
def test_messages_that_make_no_sense_end_nothing_but_their_own_saves(schedule: int, rng: random.Random) -> None:
    mob = Mob(rng)
    for rank, peer in enumerate((b"h0", b"h1")):
        mob.hello(peer, f"{0xA0 + rank:016x}", rank, 2, pid=99)
    slots = [mob.slot(peer) for peer in (b"h0", b"h1")]
    for _ in range(2500):
        mob.now += rng.random() / 10
        dice = rng.random()
        if dice < 0.45:
            mob.shout()
        elif dice < 0.6:
            mob.whisper()
        elif dice < 0.9 and mob.jobs:
            mob.finish()
        else:
            mob.take(mob.core.handle(ev.Tick(now=mob.now, memory_short=rng.random() < 0.05)))
        mob.check()
    mob.jobs.clear()
    for rank, (peer, slot) in enumerate(zip((b"h0", b"h1"), slots, strict=True)):
        assert isinstance(mob.begin(slot, HONEST, peer=peer, path="/honest"), m.Ok)
        mob.feed(ev.Prepared, key=(HONEST, rank))
        mob.submit(slot, HONEST, peer=peer)
        mob.read(slot, HONEST, rank=rank, world_size=2, path="/honest")
        mob.feed(ev.Written, key=(HONEST, rank), result="r")
    assert [c.save_id for c in mob.of(ac.Commit)] == [HONEST]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_message_of_a_peer_without_a_session_changes_nothing(kind: Any, rng: random.Random) -> None:
    mob = Mob(rng)
    if kind in (m.Hello, m.Status):
        return
    body = {f.name: mob.value(f.name, kind.checks[f.name].__name__) for f in fields(kind)}
    mob.feed(ev.Received, peer=b"nobody", message=kind(**body))
    t = mob.core.tables
    assert not t.runs and not t.saves and not t.slots and not mob.core._boards._boards
    (send,) = mob.actions
    assert code(send.message) == "unknown_save"
