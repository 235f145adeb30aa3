"""Trainings that are interrupted at given steps and go on: plain, DDP and FSDP2, for the tests of CheckpointManager."""

from __future__ import annotations

import os
import pathlib
import random
import signal
from typing import Any

import rank_processes
import torch
import torch.distributed as dist
from rank_processes import talk

from asyncckpt import CheckpointManager, PerRank, RngState

PLAIN, DDP, FSDP2 = "plain", "ddp", "fsdp2"
WORLD_SIZES = {PLAIN: 1, DDP: 2, FSDP2: 2}
EVERY, KEPT = 3, 2


class Loop:
    """A small training with dropout, of which each step depends on all before it."""

    def __init__(self, kind: str, rank: int) -> None:
        torch.manual_seed(7)
        bare = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Dropout(0.3), torch.nn.Linear(9, 2))
        self.network: Any = bare
        if kind == DDP:
            self.network = torch.nn.parallel.DistributedDataParallel(bare)
        elif kind == FSDP2:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            fully_shard(bare, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=0.05)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.97)
        torch.manual_seed(100 + rank)
        random.seed(100 + rank)
        self.state: dict[str, Any] = {
            "model": self.network,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "rng": PerRank(RngState()),
            "step": 0,
        }

    def train(self) -> int:
        """One step; returns its number."""
        loss = (self.network(torch.randn(5, 6) * random.random()) - 1).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.state["step"] += 1
        return int(self.state["step"])

    def outcome(self) -> list[Any]:
        """Return what must be equal bit for bit, of this rank."""
        parameters = [getattr(p, "_local_tensor", p).detach() for p in self.network.parameters()]
        moments = [getattr(v, "_local_tensor", v) for s in self.optimizer.state.values() for v in s.values()]
        rest = [self.schedule.get_last_lr(), random.random(), torch.rand(2).tolist()]
        return [tensor.tolist() for tensor in (*parameters, *moments)] + rest


def train(rank: int, kind: str, root: str, endpoint: str, steps: int, halt_after: int | None) -> dict[str, Any]:
    """Train to `steps`, from the newest checkpoint; after so many tell the test, and go on when it says so.

    Returns:
        Where it began and stopped, and what a training to there is that was never interrupted.
    """
    loop = Loop(kind, rank)
    options: dict[str, Any] = {"max_to_keep": KEPT, "save_interval_steps": EVERY, "preemption_signal": signal.SIGTERM}
    with CheckpointManager(root, endpoint=endpoint, **options) as manager:
        found = manager.restore(loop.state)
        began = loop.state["step"]
        assert began == (0 if found is None else found.step)
        stopped = False
        while loop.state["step"] < steps and not stopped:
            step = loop.train()
            if halt_after is not None and step == began + halt_after:
                talk().say(step)
                talk().hear()
            if manager.should_save(step):
                manager.save(step, loop.state)
            stopped = manager.reached_preemption(step)
    result = {"began": began, "ended": loop.state["step"], "stopped": stopped, "outcome": loop.outcome()}
    if not stopped:
        whole = Loop(kind, rank)
        while whole.train() < steps:
            pass
        result["expected"] = whole.outcome()
    return result


def interrupted(
    kind: str, root: pathlib.Path, endpoint: str, *, steps: int, rng: random.Random, signals: list[int]
) -> list[str]:
    """Interrupt a training with one signal after the other, let it end, and compare. Returns what has happened.

    SIGTERM goes to one rank, and the others hear of it; SIGKILL to all.
    """
    world_size, told = WORLD_SIZES[kind], []
    environ = {"MASTER_PORT": str(os.getpid())}
    for number in [*signals, None]:
        halt_after = None if number is None else rng.randint(1, max(1, steps // len(signals)))
        arguments = (kind, str(root), endpoint, steps, halt_after)
        with rank_processes.running(world_size, train, *arguments, group=world_size > 1, environ=environ) as ranks:
            found = [ranks.receive(rank) for rank in range(world_size)]
            if isinstance(found[0], int):
                assert number is not None and len(set(found)) == 1
                told.append(f"{signal.Signals(number).name} at {found[0]}")
                if number == signal.SIGKILL:
                    ranks.kill()
                    continue
                ranks.kill(rng.randrange(world_size), number=number)
                for rank in range(world_size):
                    ranks.send(rank, "go on")
                found = ranks.results()
                assert all(one["stopped"] for one in found), told
        assert len({(one["began"], one["ended"], one["stopped"]) for one in found}) == 1, (told, found)
        told.append(f"{found[0]['began']} to {found[0]['ended']}")
        for one in found:
            assert "expected" not in one or one["outcome"] == one["expected"], told
    assert found[0]["ended"] == steps
    return told
