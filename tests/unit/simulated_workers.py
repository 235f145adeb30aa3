"""Several workers' of_core, their ranks, and a network that loses, doubles and reorders; workers and ranks die.

What lies between a rank and its own worker is exact here (`test_worker_simulation` has its mischief): every request is
answered at once. The wire between workers, jobs, time and deaths are random. `check` holds what must always hold.

The ranks of a worker that has died give their memory to the next one, each at some later moment of its own, and are in
the same saves again. What the dead worker was about to do may have been done, and nobody knows.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

from worker_bench import BEGIN, HELLO, REQUEST, all_saves

from asyncckpt.errors import SaveFailedError, to_wire
from asyncckpt.format.manifest import RankRecord
from asyncckpt.format.names import SaveId, index_name
from asyncckpt.protocol import messages as m
from asyncckpt.protocol.codec import decode, encode
from asyncckpt.protocol.node_tables import BEAT_S, MAX_NODE_FRAME_NBYTES, NODE_MESSAGES
from asyncckpt.protocol.request import SaveRequest
from asyncckpt.protocol.save_phases import COMMITTED, DURABLE, ENDED, UNKNOWN
from asyncckpt.storage.rank_writer import RankResult
from asyncckpt_worker.core import actions as ac
from asyncckpt_worker.core import events as ev
from asyncckpt_worker.core.actions import LeaderAddress, Listener
from asyncckpt_worker.core.machine import Core, CoreConfig
from asyncckpt_worker.core.model import Save
from asyncckpt_worker.core.nodes.leader import FORGET_S
from asyncckpt_worker.core.tables import EndedSave

ERROR = to_wire(SaveFailedError("the simulated disk failed", code="EIO"))
KEY, SECRET = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7", "D:)Q[IlAW!ahhC2ac:9*A}h:p?([4%wOTJ%JR%cs"
COMMIT_TIMEOUT_S = 60.0
CONFIG = CoreConfig(
    package="sim",
    pid=1,
    pid_start=1,
    instance="",
    heartbeat_s=1.0,
    idle_exit_s=0.0,
    drain_timeout_s=1e6,
    staging_grace_s=1e5,
    keep_snapshots_s=0.0,
    mirror_roots=(),
)


@dataclass
class Rank:
    """An honest trainer on a node."""

    run: str
    rank: int
    world_size: int
    node: int
    session: str = ""
    alive: bool = True
    slot: int = 0
    generation: int = 0
    epoch: int | None = None
    sequence: int = 0
    hooked: bool = False
    outcomes: dict[int, bool] = field(default_factory=dict)
    attempts: int = 0
    open: dict[str, str] = field(default_factory=dict)
    """Save id -> the slot's state: begun, sealed."""

    failed: list[str] = field(default_factory=list)
    """Saves that it was told to have failed."""

    memory: tuple[int, SaveRequest | None] | None = None
    """Its worker is dead: what its slot holds, until another one has it."""


@dataclass
class Node:
    """A worker: its core, its jobs, its slots."""

    config: CoreConfig
    now: float
    jobs: list[Any] = field(default_factory=list)
    memory: dict[int, tuple[int, SaveRequest | None]] = field(default_factory=dict)
    connects: dict[str, LeaderAddress] = field(default_factory=dict)
    listens: bool = False
    gone: bool = False

    def __post_init__(self) -> None:
        self.core = Core(self.config, self.now, self)

    def watch(self, session: str, pid: int, pid_start: int) -> bool:
        """See `Resources`."""
        return True

    def create_slot(self, number: int, nbytes: int, *, populate: bool) -> tuple[int, bytes]:
        """See `Resources`."""
        self.memory[number] = (0, None)
        return number, b"t" * 16

    def listen(self, port: int, secret: str) -> Listener:
        """See `Resources`."""
        self.listens = True
        return Listener(address="tcp://first:7000", public=KEY, secret=secret or SECRET)

    def connect(self, leader: LeaderAddress) -> None:
        """See `Resources`."""
        self.connects[leader.run] = leader

    def disconnect(self, run: str) -> None:
        """See `Resources`."""
        self.connects.pop(run, None)


class Workers:
    """See the module.

    Args:
        seed: Of everything.
        n_nodes: Workers; the first leads every run.
        chaos: Chance that a message between workers is lost, and of each other mischief.
        deaths: Whether workers and ranks die.
        kills: Chance of each step that a worker dies and another one takes over from it.
    """

    def __init__(self, seed: int, *, n_nodes: int, chaos: float, deaths: bool, kills: float = 0.0) -> None:
        self.random = random.Random(seed)
        self.chaos, self.deaths, self.kills = chaos, deaths, kills
        self.now = 0.0
        self.cut: set[int] = set()
        """Nodes that are cut off from the first."""

        self.nodes = [self.new_node() for _ in range(n_nodes)]
        self.ranks: list[Rank] = []
        self.wire: list[tuple[int, ev.Relayed, str]] = []
        self.written: set[tuple[str, int]] = set()
        self.sealed: set[tuple[str, int]] = set()
        self.withdrawn: set[str] = set()
        self.harmed: set[str] = set()
        """Saves that a simulated failure may have ended."""

        self.commits: list[str] = []
        self.heard: dict[str, set[str]] = {}
        self.epochs: dict[str, int] = {}
        self.died = False
        self.handed: dict[int, tuple[int, SaveRequest | None]] = {}
        """Fd -> what lies in a slot that a rank hands over."""

        self.durable: set[tuple[str, int]] = set()
        """As `written`, without what was removed since."""

        self.removed: set[str] = set()
        self.files: set[tuple[str, int]] = set()
        """What was written, or in part, and not removed."""

        self.handovers = 0
        self.resumed: set[str] = set()
        """Saves that a rank had handed over."""

    def luck(self, share: float) -> bool:
        return self.random.random() < share

    def new_node(self) -> Node:
        return Node(replace(CONFIG, instance=f"{self.random.getrandbits(64):016x}"), self.now)

    # ---- surroundings of a core

    def feed(self, n: int, event: ev.Event) -> list[m.Message]:
        """Feed an event, and what follows at once; returns the messages to ranks."""
        node, todo, said = self.nodes[n], [event], []
        while todo:
            for action in node.core.handle(todo.pop(0)):
                todo += self.perform(n, node, action, said)
        return said

    def perform(self, n: int, node: Node, action: ac.Action, said: list[m.Message]) -> list[ev.Event]:
        match action:
            case ac.Send():
                said.append(action.message)
                if isinstance(action.message, m.Saves):
                    self.tell(n, action.peer, action.message)
            case ac.AdoptSlot():
                node.memory[action.slot] = self.handed.pop(action.fd)
                return [ev.SlotAdopted(now=self.now, slot=action.slot, fd=action.fd, token=action.token)]
            case ac.FreeSlot():
                return [ev.SlotFreed(now=self.now, slot=action.slot)]
            case ac.ReadSlot():
                generation, request = node.memory[action.slot]
                return [ev.SlotRead(now=self.now, slot=action.slot, generation=generation, request=request)]
            case ac.Relay():
                self.relay(n, node, action)
            case ac.Commit():
                self.check_commit(n, action)
                node.jobs.append(action)
            case ac.LogFault():
                raise action.error
            case ac.Log():
                assert action.count != "protocol_errors", action
            case ac.Prepare() | ac.Write() | ac.Remove() | ac.ScanLineage():
                node.jobs.append(action)
        return []

    def relay(self, n: int, node: Node, action: ac.Relay) -> None:
        message = decode(encode(action.message, MAX_NODE_FRAME_NBYTES), NODE_MESSAGES, MAX_NODE_FRAME_NBYTES)
        if action.route:
            to, instance = int(action.route.partition(b"/")[0]), action.route.partition(b"/")[2].decode()
            event = ev.Relayed(now=0.0, run=action.run, route=b"", message=message)
        else:
            assert action.run in node.connects, "sends without a connection"
            to, instance = 0, ""
            route = f"{n}/{node.core.tables.instance}".encode()
            event = ev.Relayed(now=0.0, run=action.run, route=route, message=message)
        for _ in range(1 + self.luck(self.chaos / 2)):
            if not self.luck(self.chaos):
                self.wire.append((to, event, instance))

    def carry(self) -> None:
        """Deliver one message between workers: usually the oldest."""
        at = self.random.randrange(len(self.wire)) if self.luck(self.chaos) else 0
        to, event, instance = self.wire.pop(at)
        source = int(event.route.partition(b"/")[0]) if event.route else 0
        node = self.nodes[to]
        if {to, source} & self.cut or node.gone:
            return
        if event.route and not node.listens:
            return
        if instance and instance != node.core.tables.instance:
            return  # the connection ended with its process
        self.feed(to, replace(event, now=self.now))

    def check_commit(self, n: int, action: ac.Commit) -> None:
        assert n == 0, "a follower commits"
        world_size = action.requests[0].world_size
        ranks = range(world_size)
        assert all((action.save_id, r) in self.sealed for r in ranks), "committed what nobody sealed"
        assert all((action.save_id, r) in self.written for r in ranks), "committed what is not durable"
        assert [r.record.rank for r in action.results] == list(ranks)
        assert action.save_id not in self.commits, "committed twice"
        assert "failed" not in self.heard.get(action.save_id, ()), "committed after a rank was told that it failed"
        here = {r.rank for r in self.ranks if r.run == action.save_id[-12:] and r.node == 0}
        assert set(action.remote) == set(ranks) - here

    def finish_job(self, n: int) -> None:
        node = self.nodes[n]
        job = node.jobs.pop(self.random.randrange(len(node.jobs)))
        fails = self.luck(self.chaos / 20)
        match job:
            case ac.Prepare() if job.key[0] in self.commits:
                assert job.resumed, "a committed save is taken for a new one"
                found = {"error": ERROR} if fails else {"committed": True}
                self.feed(n, ev.Prepared(now=self.now, key=job.key, **found))
            case ac.Prepare():
                self.harmed |= {job.key[0]} if fails else set()
                found = {"error": ERROR, "known_uncommitted": self.luck(0.5)} if fails else {}
                self.feed(n, ev.Prepared(now=self.now, key=job.key, **found))
            case ac.Write():
                self.files.add(job.key)
                if fails:
                    self.harmed.add(job.key[0])
                    self.feed(n, ev.Written(now=self.now, key=job.key, error=ERROR))
                    return
                self.written.add(job.key)
                self.durable.add(job.key)
                result = result_of(*job.key)
                self.feed(n, ev.Written(now=self.now, key=job.key, result=result, report={"nbytes": 1}))
            case ac.Commit():
                if fails or not self.is_whole(job.save_id):
                    self.harmed.add(job.save_id)
                    unknown = fails and self.luck(0.5)
                    self.feed(n, ev.Published(now=self.now, save_id=job.save_id, error=ERROR, unknown=unknown))
                    return
                self.commits.append(job.save_id)
                assert "failed" not in self.heard.get(job.save_id, ()), "committed, and a rank was told that it failed"
                self.feed(n, ev.Published(now=self.now, save_id=job.save_id, report={"seconds_commit": 0.1}))
            case ac.Remove():
                self.remove(job.save_id)
                self.feed(n, ev.Removed(now=self.now, save_id=job.save_id))
            case ac.ScanLineage():
                fields = {"run": job.run, "path": job.path}
                self.feed(n, ev.LineageScanned(now=self.now, epoch=1, **fields))

    def is_whole(self, save_id: str) -> bool:
        """Whether the files are there that a commit looks for: a leader that is dead may have removed some."""
        size = next(r.world_size for r in self.ranks if r.run == save_id[-12:])
        whole = all((save_id, rank) in self.durable for rank in range(size))
        assert whole or save_id in self.removed, "committed what was never durable"
        return whole

    def remove(self, save_id: str) -> None:
        assert save_id not in self.commits, "files of a committed save are removed"
        commits = [job for job in self.nodes[0].jobs if isinstance(job, ac.Commit) and job.save_id == save_id]
        assert not commits, "files are removed under a commit"
        self.durable = {key for key in self.durable if key[0] != save_id}
        self.files = {key for key in self.files if key[0] != save_id}
        self.removed.add(save_id)

    # ---- ranks

    def say(self, rank: Rank, kind: Any, /, **fields: Any) -> list[m.Message]:
        """Send a request of id 1 and return what the worker said to it at once."""
        event = ev.Received(now=self.now, peer=rank.session.encode(), message=kind(id=1, **fields))
        return [r for r in self.feed(rank.node, event) if getattr(r, "id", 0) == 1]

    def enter(self, rank: Rank) -> None:
        """Open a session, and link the worker: a new one of a run that others have met in."""
        rank.open.clear()
        self.greet(rank)
        (granted,) = self.say(rank, m.Allocate, nbytes=12288, populate=False)
        assert isinstance(granted, m.Granted)
        rank.slot, rank.generation = granted.slot, 0

    def take_over(self, rank: Rank) -> None:
        """Hand the memory that a dead worker had to the next one, as a trainer does: it is linked first."""
        assert rank.memory is not None
        (generation, request), rank.memory = rank.memory, None
        self.handovers += 1
        self.resumed |= set(rank.open)
        self.greet(rank)
        fd = 1000 + self.handovers
        self.handed[fd] = (generation, request)
        ended = generation - bool(rank.open)
        about = {"nbytes": 12288, "token": b"t" * 16, "generation": generation, "ended": ended, "committed": ""}
        (granted,) = self.say(rank, m.Adopt, fd=fd, **about)
        assert isinstance(granted, m.Granted)
        rank.slot = granted.slot
        for save_id, state in list(rank.open.items()):
            if state == "begun":
                self.say_begin(rank, save_id)
            else:
                rank.open[save_id] = "sealed"  # its hook is asked again
                self.say(rank, m.Submit, save_id=save_id, slot=rank.slot, generation=generation)
        for save_id in rank.failed[-16:]:
            self.say(rank, m.Withdraw, save_id=save_id, reason="it had failed", skipped=False)

    def greet(self, rank: Rank) -> None:
        rank.session = f"{self.random.getrandbits(64):016x}"
        fields: dict[str, Any] = {**HELLO, "session": rank.session}
        self.say(rank, m.Hello, rank=rank.rank, world_size=rank.world_size, **fields)
        self.link(rank)

    def link(self, rank: Rank) -> None:
        if rank.rank == 0:
            (leading,) = self.say(rank, m.Lead, run=rank.run, port=0, server_secret=SECRET, client_public=KEY)
            assert isinstance(leading, m.Leading)
        elif rank.node:
            rank.attempts += 1
            keys = {"attempt": rank.attempts, "server_public": KEY, "client_public": KEY, "client_secret": SECRET}
            self.say(rank, m.Follow, run=rank.run, address="tcp://first:7000", timeout_s=15.0, **keys)

    def tell(self, n: int, peer: bytes, saves: m.Saves) -> None:
        rank = next((r for r in self.ranks if r.alive and r.node == n and r.session.encode() == peer), None)
        if rank is None:
            return
        for sequence, meet in saves.outcomes if saves.run == rank.run else ():
            assert rank.outcomes.setdefault(sequence, meet) == meet or self.died, "an outcome was told twice"
        for row in saves.saves:
            save_id, phase = row["save_id"], row["phase"]
            if phase in ENDED:
                said = phase if phase in (COMMITTED, UNKNOWN) else "failed"
                self.heard.setdefault(save_id, set()).add(said)
                rank.open.pop(save_id, None)
                rank.failed += [save_id] if said == "failed" else []
            elif phase == DURABLE and rank.hooked and rank.open.get(save_id) == "sealed":
                rank.open[save_id] = "asked"

    def act(self, rank: Rank) -> None:
        """One step of an honest trainer."""
        if rank.memory is not None:
            return self.take_over(rank)
        if rank.epoch is None:
            for reply in self.say(rank, m.Lineage, run=rank.run, path="/ckpt/first", least_epoch=0):
                assert isinstance(reply, m.LineageFound)
            return self.learn_epoch(rank)
        asked = [s for s, state in rank.open.items() if state == "asked"]
        begun = [s for s, state in rank.open.items() if state == "begun"]
        if asked:
            granted = not self.luck(self.chaos / 20)
            self.harmed |= set() if granted else {asked[0]}
            rank.open[asked[0]] = "sealed"
            self.say(rank, m.Consent, save_id=asked[0], granted=granted, reason="")
        elif begun:
            self.seal(rank, begun[0])
        elif rank.open:
            self.say(rank, m.Heartbeat, saves=tuple(rank.open))
        else:
            self.begin(rank)
        return None

    def learn_epoch(self, rank: Rank) -> None:
        """The answer may have come later, by way of the leader."""
        run = self.nodes[rank.node].core.tables.runs.get(rank.run)
        epoch = run.epochs.get("/ckpt") if run is not None else None
        if epoch is not None:
            known = self.epochs.setdefault(rank.run, epoch)
            assert known == epoch or self.died, "ranks of a run differ in epoch"
            rank.epoch = known  # a leader that died before the run's first save leaves no trace of what it had reserved

    def begin(self, rank: Rank) -> None:
        save_id = f"{rank.epoch:06d}-{rank.sequence:08d}-{rank.run}"
        rank.sequence += 1
        if self.luck(0.05):
            self.withdrawn.add(save_id)
            self.say(rank, m.Withdraw, save_id="000000" + save_id[6:], reason="simulated", skipped=True)
            return
        rank.generation += 1
        self.nodes[rank.node].memory[rank.slot] = (rank.generation, None)
        rank.open[save_id] = "begun"
        self.say_begin(rank, save_id)

    def say_begin(self, rank: Rank, save_id: str) -> None:
        fields = {**BEGIN, "step": rank.sequence, "path": f"/ckpt/{save_id}", "commit_timeout_s": COMMIT_TIMEOUT_S}
        fields |= {"slot": rank.slot, "generation": rank.generation}
        for reply in self.say(rank, m.Begin, save_id=save_id, **fields):
            if isinstance(reply, m.Refused):
                self.harmed.add(save_id)
                rank.open.pop(save_id, None)

    def seal(self, rank: Rank, save_id: str) -> None:
        request = replace(
            REQUEST,
            save_id=save_id,
            step=rank.sequence,
            path=f"/ckpt/{save_id}",
            rank=rank.rank,
            world_size=rank.world_size,
            structure=b"s" * self.random.choice((1, 1_200_000)),
            commit_timeout_s=COMMIT_TIMEOUT_S,
            hook_timeout_s=1000.0 if rank.hooked else 0,
            plan="0" * 16,
            changed=self.random.random() < 0.5,
        )
        rank.open[save_id] = "sealed"
        self.sealed.add((save_id, rank.rank))
        self.nodes[rank.node].memory[rank.slot] = (rank.generation, request)
        self.say(rank, m.Submit, save_id=save_id, slot=rank.slot, generation=rank.generation)

    # ---- deaths

    def kill_rank(self, rank: Rank) -> None:
        self.harmed |= self.saves_of(rank.run)
        self.died = True
        rank.alive, rank.memory = False, None
        self.feed(rank.node, ev.Died(now=self.now, session=rank.session))

    def kill_worker(self, n: int) -> None:
        """Its ranks live, and find another worker: what was theirs is handed over, or given up as users may want."""
        self.died = True
        old, self.nodes[n] = self.nodes[n], self.new_node()
        for job in [job for job in old.jobs if self.luck(0.5)]:  # done, and nobody has heard of it
            match job:
                case ac.Write():
                    self.written.add(job.key)
                    self.durable.add(job.key)
                case ac.Commit() if self.is_whole(job.save_id):
                    self.commits.append(job.save_id)
                case ac.Remove():
                    self.remove(job.save_id)
        for rank in [r for r in self.ranks if r.node == n and r.alive]:
            if rank.memory is None:
                rank.memory = old.memory[rank.slot]
            if self.kills or self.luck(0.9):
                continue
            self.harmed |= self.saves_of(rank.run)
            lost = list(rank.open)
            rank.memory = None
            self.enter(rank)
            for save_id in lost:
                self.say(rank, m.Withdraw, save_id=save_id, reason="its worker was lost", skipped=False)

    def lose_node(self, n: int) -> None:
        """Worker and ranks are gone without a word, for good."""
        self.died = self.nodes[n].gone = True
        self.nodes[n].jobs.clear()
        for rank in [r for r in self.ranks if r.node == n]:
            rank.alive = False
            self.harmed |= self.saves_of(rank.run)

    def saves_of(self, run: str) -> set[str]:
        found = {s for r in self.ranks for s in r.open if s.endswith(run)}
        found |= {
            s for n in self.nodes for s, save in n.core.tables.saves.items() if s.endswith(run) and not save.outcome
        }
        highest = max((r.sequence for r in self.ranks if r.run == run), default=0)
        epoch = self.epochs.get(run, 1)
        return found | {f"{epoch:06d}-{i:08d}-{run}" for i in range(max(0, highest - 3), highest + 3)}

    # ---- the run

    def spawn_run(self) -> None:
        if any(node.gone for node in self.nodes):
            return
        run, size = f"{self.random.getrandbits(48):012x}", len(self.nodes) + self.random.randrange(2)
        ranks = [Rank(run, r, size, r % len(self.nodes), hooked=self.luck(0.2)) for r in range(size)]
        self.ranks += ranks
        for rank in ranks:
            self.enter(rank)

    def run(self, steps: int) -> None:
        self.spawn_run()
        self.live(steps)
        self.settle()

    def live(self, steps: int) -> None:
        for _ in range(steps):
            self.now += self.random.random() * 0.1
            dice, n = self.random.random(), self.random.randrange(len(self.nodes))
            living = [r for r in self.ranks if r.alive and not self.nodes[r.node].gone]
            if self.kills and self.luck(self.kills) and not self.nodes[n].gone:
                self.kill_worker(n)
            elif dice < 0.3 and living:
                self.act(self.random.choice(living))
            elif dice < 0.65 and self.wire:
                for _ in range(min(len(self.wire), 1 + self.random.randrange(8))):
                    self.carry()
            elif dice < 0.85 and self.nodes[n].jobs:
                self.finish_job(n)
            elif 0.85 <= dice < 0.853 and self.deaths:
                self.mischief(n, living)
            elif 0.853 <= dice < 0.856 and len(self.ranks) < 9:
                self.spawn_run()
            else:
                self.tick(n)

    def part(self, n: int, seconds: float) -> None:
        """Cut node `n` off for so long, while all workers live; once it is back, all must hear each other at once."""
        self.died = True
        self.harmed |= {s for r in self.ranks for s in self.saves_of(r.run)}
        self.cut.add(n)
        self.pass_time(seconds)
        self.cut.discard(n)
        chaos, self.chaos = self.chaos, 0.0
        self.pass_time(3 * BEAT_S)
        self.chaos = chaos
        assert self.nodes[0].core.report()["followers"], "nobody follows"
        for at, node in enumerate(self.nodes):
            report = node.core.report()
            for row in [*report["followers"], *report["followed"]]:
                assert row["silent_s"] < 2 * BEAT_S, f"node {at} has not heard another one since it is back: {row}"

    def pass_time(self, seconds: float) -> None:
        """Let time pass in which the ranks do nothing."""
        for _ in range(int(seconds / BEAT_S) + 1):
            self.now += BEAT_S
            for n, node in enumerate(self.nodes):
                self.tick(n)
                while node.jobs:
                    self.finish_job(n)
            while self.wire:
                self.carry()

    def mischief(self, n: int, living: list[Rank]) -> None:
        kind = self.random.randrange(5)
        if kind == 0 and living:
            self.kill_rank(self.random.choice(living))
        elif kind == 1 and not self.nodes[n].gone:
            self.kill_worker(n)
        elif kind == 2 and n:
            self.died = True
            self.cut ^= {n}
        elif kind == 4 and n:
            self.lose_node(n)
        elif kind == 3:
            self.now += self.random.choice((2.0, COMMIT_TIMEOUT_S + 1))
            self.harmed |= {s for r in self.ranks for s in self.saves_of(r.run)}

    def tick(self, n: int) -> None:
        if not self.nodes[n].gone:
            self.feed(n, ev.Tick(now=self.now))

    def quiet(self) -> bool:
        return not any(node.jobs for node in self.nodes) and not any(
            s.outcome is None for node in self.nodes for s in node.core.tables.saves.values()
        )

    def settle(self) -> None:
        """The network heals; nobody begins anything; all that was sealed everywhere is committed."""
        self.cut.clear()
        self.chaos = 0.0
        lost = any(node.gone for node in self.nodes)  # what it alone has begun ends when it is forgotten
        for _ in range(int(3 * COMMIT_TIMEOUT_S) + int(FORGET_S) * lost):
            self.now += 1.0 if lost else 0.5
            for rank in [r for r in self.ranks if r.alive]:
                if rank.memory is not None or any(state in ("begun", "asked") for state in rank.open.values()):
                    self.act(rank)
            for n, node in enumerate(self.nodes):
                self.tick(n)
                while node.jobs:
                    self.finish_job(n)
            while self.wire:
                self.carry()
        self.check_end()

    def check_end(self) -> None:
        for n, node in [(n, node) for n, node in enumerate(self.nodes) if not node.gone]:
            for save in all_saves(node.core.tables):
                assert save.outcome is not None, f"node {n}: {save.save_id} never ended: {shown(save)}"
                committed = save.save_id in self.commits
                assert save.outcome != COMMITTED or committed, f"node {n}: {save.save_id} is no commit"
                assert not committed or save.outcome in (COMMITTED, UNKNOWN), f"node {n}: {save.save_id} is committed"
        for rank in [r for r in self.ranks if r.alive]:
            assert not rank.open, f"rank {rank.rank} has never heard how its saves have ended: {rank.open}"
        for save_id, heard in self.heard.items():
            assert self.died or save_id in self.harmed or UNKNOWN not in heard, f"{save_id}: nobody knows why"
            assert not {COMMITTED, "failed"} <= heard, f"{save_id}: ranks were told {heard}"
            assert "failed" not in heard or save_id not in self.commits, f"{save_id} is committed, but told as failed"
        self.check_nothing_lost()
        self.check_nothing_left()
        self.check_leaders()

    def check_nothing_lost(self) -> None:
        for rank in self.ranks:
            for sequence in range(rank.sequence):
                save_id = f"{rank.epoch or 0:06d}-{sequence:08d}-{rank.run}"
                whole = all((save_id, r) in self.sealed for r in range(rank.world_size))
                if whole and save_id not in self.harmed | self.withdrawn:
                    outcomes = [shown(n.core.tables.find(save_id)) for n in self.nodes]
                    assert save_id in self.commits, f"{save_id} was staged and is lost: {outcomes}"

    def check_nothing_left(self) -> None:
        """A save that was lost leaves no files, where none of those has died that were to remove them.

        Where a rank was told that its end is unknown, its worker removes nothing: it may have been committed.
        """
        lost = {
            save_id for save_id, phases in self.heard.items() if phases == {"failed"} and save_id not in self.commits
        }
        left = {key for key in self.files if key[0] in lost}
        assert self.died or not left, f"files of lost saves are left: {left}"

    def check_leaders(self) -> None:
        """Every follower knows who decides, and what was decided."""
        for run_id in {r.run for r in self.ranks if r.rank == 0 and r.alive}:  # the others have no leader any more
            first = self.nodes[0].core.tables.runs.get(run_id)
            for node in [node for node in self.nodes[1:] if not node.gone]:
                run = node.core.tables.runs.get(run_id)
                if first is not None and run is not None and run.followed and run.members:
                    assert run.leader == self.nodes[0].core.tables.instance
                    assert run.outcomes.keys() >= first.outcomes.keys()
                    assert self.died or run.outcomes == first.outcomes


def result_of(save_id: str, rank: int) -> RankResult:
    """What a rank's files come to."""
    record = RankRecord(
        rank=rank,
        index_name=index_name(SaveId.parse(save_id), rank),
        index_nbytes=1,
        index_checksum="x",
        n_tensors=1,
        n_files=1,
        nbytes=1,
    )
    return RankResult(record=record, nbytes=1, seconds={"write": 0.5}, direct=True)


def shown(save: Save | EndedSave | None) -> str:
    """Say what became of a save, briefly."""
    if save is None:
        return "unknown here"
    if isinstance(save, EndedSave):
        return f"{save.outcome}, {dict(save.phases(save.world_size))}, {save.error}"
    ranks = {r: (e.phase, f"known {e.acknowledged}", e.link, e.needs_consent) for r, e in save.ranks.items()}
    return f"{save.outcome}, {ranks}, given up {save.failed_locally}, sealed since {save.sealed_since}, {save.error}"
