"""A training of `test_preempted_loaders`, as a program: rank, world size and what it does are arguments."""

from __future__ import annotations

import hashlib
import pathlib
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

import asyncckpt

IGNORED = "loader workers ignore the signal"
"""All ranks meet in each backward, as with DDP; the loader goes on, since its workers are not killed."""

HOW, ROOT, ENDPOINT, _RANK, _WORLD, MEET = (*sys.argv[1:7], *("0",) * 6)[:6]
RANK, WORLD = (int(one) if one.isdigit() else 0 for one in (_RANK, _WORLD))
LAST, MICRO = 5, 3


class Data(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, i: int) -> torch.Tensor:
        if HOW == "a mistake in the data" and i == 4 * LAST:
            while not pathlib.Path(MEET + ".go").exists():
                time.sleep(0.01)
            raise ConnectionResetError("of the data")
        if HOW != IGNORED and i >= 4 * (LAST + (MICRO - 2 if HOW == "micro-batches" else 0)):
            time.sleep(10**6)
        return torch.full((4,), float(i))


def digest(model: torch.nn.Module) -> str:
    values = (bytes(t.reshape(-1).contiguous().view(torch.uint8).tolist()) for t in model.state_dict().values())
    return hashlib.sha256(b"".join(values)).hexdigest()


def ignore_sigterm(_worker_id: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def say(*words: Any) -> None:
    print(*words, flush=True)


def main() -> None:
    if WORLD > 1:
        dist.init_process_group("gloo", init_method=f"file://{MEET}", rank=RANK, world_size=WORLD)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optim": optimizer, "step": 0}
    if HOW == "objects only":
        del state["step"]
    step = 0
    signals = {"nobody asks": None}.get(HOW, signal.SIGTERM)
    every = {"saved at that step": LAST, "a stale copy": 2, "objects only": 2}.get(HOW, 10**6)
    grace = 3.0 if HOW in ("one rank does not come", "another step") else 25.0
    options = {"endpoint": ENDPOINT, "save_interval_steps": every, "preemption_signal": signals, "grace_s": grace}
    with asyncckpt.CheckpointManager(ROOT, **options) as manager:
        manager.restore(state)
        loader = torch.utils.data.DataLoader(
            Data(), batch_size=4, num_workers=2, worker_init_fn=ignore_sigterm if HOW == IGNORED else None
        )
        batches = iter(loader)
        while True:
            for _micro in range(MICRO if HOW == "micro-batches" and step == LAST - 1 else 1):
                if RANK and step == {"one rank does not come": LAST, "another step": LAST - 1}.get(HOW):
                    say("waiting")
                    time.sleep(10**6)
                if _micro == MICRO - 1:
                    say("waiting")
                batch = next(batches)
                model(batch).square().mean().backward()
            if HOW == IGNORED:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
            if HOW == "in the middle of a step" and step == LAST - 1:
                say("waiting")
                while any(worker.is_alive() for worker in batches._workers):
                    time.sleep(0.01)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if "step" in state:
                state["step"] = step
            if HOW == "asked before the step":
                state["step"] = step
                manager.reached_preemption(step)
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                say("step", step, digest(model))
                continue
            if HOW == "a stale copy":
                if manager.should_save(step):
                    manager.save(step, {"model": model, "optim": optimizer.state_dict(), "step": step})
            elif manager.should_save(step):
                manager.save(step, state)
            stops = manager.reached_preemption(step)
            say("step", step, digest(model))
            if stops:
                break
            if HOW == "a mistake of its own" and step == LAST:
                say("waiting")
                signal.pause()
                raise RuntimeError("DataLoader worker (pid 1) exited unexpectedly")
    say("ended in order")


if __name__ == "__main__":
    main()
