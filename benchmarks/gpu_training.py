"""A training loop on a GPU that saving has to run beside, and what a copy to pinned memory takes there.

With `cpu` for the device everything runs without a GPU, which measures nothing: for the tests.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks import training

BATCH, LENGTH = 8, 512
AHEAD = 2
"""Steps that are launched and have not ended on the GPU, at most: a training that looks at its loss is no further."""


def nothing() -> None:
    """For a training that need not wait before a step."""


class Loop:
    """A training loop whose steps end on the GPU after they have ended on the CPU.

    Args:
        device: Where it computes.
        model: What is trained; made on the device.
        shape: (batch, length) of the tokens of a step.

    Attributes:
        before_step: Called in front of each `optimizer.step()`: what a checkpointer without hooks has to wait for.
        waited_s: Seconds that hooks and `before_step` have taken; whoever measures sets it to zero.
    """

    def __init__(
        self, device: str, model: Callable[[], nn.Module] = training.GPT, shape: tuple[int, int] = (BATCH, LENGTH)
    ) -> None:
        self.device = torch.device(device)
        with self.device:
            self.model = model()
            self.tokens = torch.randint(0, training.VOCABULARY, shape)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.before_step: Callable[[], Any] = nothing
        self.waited_s = 0.0
        self._marks: deque[torch.cuda.Event] = deque()
        self.step()
        self.settle()

    def attach(self, attach: Callable[[torch.optim.Optimizer], None]) -> None:
        """Attach the optimizer to something whose hook makes its step wait; the wait is counted."""
        self.optimizer.register_step_pre_hook(lambda *_: self._note(-time.perf_counter()))
        attach(self.optimizer)
        self.optimizer.register_step_pre_hook(lambda *_: self._note(time.perf_counter()))

    def _note(self, seconds: float) -> None:
        self.waited_s += seconds

    def step(self) -> None:
        """Launch one step; waits for the one `AHEAD` steps before to end on the GPU."""
        if len(self._marks) >= AHEAD:
            self._marks.popleft().synchronize()
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16), self.device:
            loss = self.model(self.tokens)
        loss.backward()
        self._note(-time.perf_counter())
        self.before_step()
        self._note(time.perf_counter())
        self.optimizer.step()
        if self.device.type == "cuda":
            mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
            mark.record()
            self._marks.append(mark)

    def settle(self) -> None:
        """Wait until the GPU has nothing to do."""
        self._marks.clear()
        synchronize(self.device)

    def quiet_step_s(self, n_steps: int) -> float:
        """Make steps, beginning and ending with a GPU that has nothing to do; returns seconds for each."""
        self.settle()
        began = time.perf_counter()
        for _ in range(n_steps):
            self.step()
        self.settle()
        return (time.perf_counter() - began) / n_steps

    def state(self) -> dict[str, Any]:
        """Return what is saved."""
        return {"model": self.model.state_dict(), "optim": self.optimizer.state_dict()}


class Pinned:
    """The limit of a copy to the host: one `Tensor.copy_` into memory of torch's own pinned allocator.

    Args:
        device: Where the bytes are.
        nbytes: As many as the state has.
    """

    TRIES = 3

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._source = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._target = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.copy_s()

    def copy_s(self) -> float:
        """Return the fewest seconds of a few copies, with nothing else on the GPU."""
        seconds = []
        for _ in range(self.TRIES):
            synchronize(self._source.device)
            began = time.perf_counter()
            self._target.copy_(self._source, non_blocking=True)
            synchronize(self._source.device)
            seconds.append(time.perf_counter() - began)
        return min(seconds)


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has nothing to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
