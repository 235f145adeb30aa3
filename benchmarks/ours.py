"""Our ways to checkpoint a training loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.contender import Contender, Saved, done
from benchmarks.training import Loop


class Ours(Contender):
    """`AsyncCheckpointer` with an attached optimizer; it chooses by itself what is copied behind the training."""

    fsyncs = verifies = outlives = True
    fresh = "disk"

    def __init__(self, loop: Loop, **options: Any) -> None:
        super().__init__(loop)
        from asyncckpt import AsyncCheckpointer

        self.checkpointer = AsyncCheckpointer(**options)
        loop.attach(self.checkpointer.attach)

    def save(self, path: Path, state: dict[str, Any]) -> Saved:
        handle = self.checkpointer.save(state, path)
        return Saved(done(), handle.written)  # the hook makes the step wait

    def load(self, path: Path, *, source: str = "auto") -> None:
        import asyncckpt

        state = self.loop.state()
        asyncckpt.load(path, state, strict=True, source=source)
        self.loop.steps = int(state["step"])
        torch.set_rng_state(state["rng"])

    def loads(self) -> dict[str, Callable[[Path], None]]:
        """As it comes: from the worker's memory, which has the newest checkpoint; and from the disk."""
        return {"": self.load, "disk": partial(self.load, source="disk")}

    def close(self) -> None:
        self.checkpointer.close()


class OursPrepared(Ours):
    """`AsyncCheckpointer` with `prepare()` called when the training is set up."""

    def prepare(self) -> float:
        began = time.perf_counter()
        self.checkpointer.prepare(self.loop.state())
        return time.perf_counter() - began


class OursOverlap(Ours):
    """`AsyncCheckpointer`, its copies behind the training whatever that costs: the shortest stall."""

    def __init__(self, loop: Loop) -> None:
        super().__init__(loop, staging="overlap")
