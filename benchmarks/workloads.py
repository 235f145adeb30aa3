"""What is saved: states with the shapes of real models, and training loops that run beside a save.

`gpt` is a GPT-2 of 124 M parameters with AdamW, 1.49 GB; `large` one of about 350 M, 4.3 GB; `small` has 20,000 tensors
of 16 KiB, 0.33 GB; `many` 100,000 of 1 KiB. `tiny` measures nothing and shows that everything runs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

VOCABULARY, CONTEXT = 50304, 1024
SMALL_NBYTES = 16 * 1024
NBYTES = {"gpt": 1_493_716_496, "small": 327_685_056, "large": 4_295_610_896, "tiny": 9_899_840}
"""State -> bytes of its tensors."""


ADAMW, SGD = partial(torch.optim.AdamW, lr=1e-4), partial(torch.optim.SGD, lr=1e-4)
"""Optimizers; the state of this SGD is empty."""


class GPT(nn.Module):
    """A GPT-2 without dropout. Width 768 and 12 layers are 124 M parameters."""

    def __init__(self, width: int = 768, layers: int = 12, heads: int = 12) -> None:
        super().__init__()
        how: dict[str, Any] = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, **how)
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of predicting each next token."""
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        logits = self.blocks(x, mask, is_causal=True) @ self.token.weight.t()
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class ManyTensors(nn.Module):
    """Many small parameters, of which a few do work."""

    def __init__(self, count: int, nbytes: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(nbytes // 4)) for _ in range(count))
        self.work = torch.randn(1024, 1024)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return a loss that moves one parameter in a hundred; `tokens` says how much work it is."""
        for _ in range(tokens.shape[0]):
            self.work = torch.tanh(self.work @ self.work)
        return torch.stack([w.sum() for w in self.weights[::100]]).sum()


SAVE_S = 120.0
"""A save that takes longer has failed."""

AHEAD = 2
"""How many steps may be launched on a GPU and not have ended: a training that reads its loss is no further ahead."""


class Loop:
    """A training loop that measures its steps, and how long each waits for a checkpointer.

    Args:
        model: Makes the model; called with `device` as the default device.
        optimizer: Makes the optimizer of its parameters.
        shape: (batch, length) of the tokens of a step.
        device: Where it computes.

    Attributes:
        before_step: Called before each `optimizer.step()`: what a checkpointer without hooks has to wait for.
        waited_s: Seconds spent in hooks and `before_step`; set to zero by whoever measures.
    """

    def __init__(
        self,
        model: Callable[[], nn.Module],
        optimizer: Callable[[Any], torch.optim.Optimizer],
        shape: tuple[int, int],
        device: str = "cpu",
    ) -> None:
        self.device = torch.device(device)
        with self.device:
            self.model = model()
            self.tokens = torch.randint(0, VOCABULARY, shape)
        self.optimizer = optimizer(self.model.parameters())
        self.waited_s = 0.0
        self.before_step: Callable[[], Any] = nothing
        self.steps = 0
        self._marks: deque[torch.cuda.Event] = deque()

    def attach(self, attach: Callable[[torch.optim.Optimizer], None]) -> None:
        """Attach the optimizer to a checkpointer whose hook makes its step wait; the wait is counted."""
        self.optimizer.register_step_pre_hook(lambda *_: self._note(-time.perf_counter()))
        attach(self.optimizer)
        self.optimizer.register_step_pre_hook(lambda *_: self._note(time.perf_counter()))

    def _note(self, seconds: float) -> None:
        self.waited_s += seconds

    def step(self) -> float:
        """Make one step; on a GPU, launch it, and wait for the one `AHEAD` steps before. Return the seconds."""
        began = time.perf_counter()
        if len(self._marks) >= AHEAD:
            self._marks.popleft().synchronize()
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"), self.device:
            loss = self.model(self.tokens)
        loss.backward()
        self._note(-time.perf_counter())
        self.before_step()
        self._note(time.perf_counter())
        self.optimizer.step()
        self.steps += 1
        if self.device.type == "cuda":
            self._marks.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
            self._marks[-1].record()
        return time.perf_counter() - began

    def settle(self) -> None:
        """Wait until the GPU is idle."""
        self._marks.clear()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def state(self) -> dict[str, Any]:
        """Return what is saved."""
        return {
            "model": self.model.state_dict(),
            "optim": self.optimizer.state_dict(),
            "rng": torch.get_rng_state(),
            "step": self.steps,
        }

    def take(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optim"])
        torch.set_rng_state(state["rng"])
        self.steps = int(state["step"])


def nothing() -> None:
    """The `before_step` of a training that need not wait."""


def loop(name: str, device: str = "cpu") -> Loop:
    """Return the training loop of a state; `device` is for "gpt" and "tiny"."""
    torch.manual_seed(1)
    if name in ("small", "many"):
        count, nbytes = (20_000, SMALL_NBYTES) if name == "small" else (100_000, 1024)
        return Loop(lambda: ManyTensors(count, nbytes), SGD, (8, 1))
    if name == "tiny":
        return Loop(lambda: GPT(width=16, layers=1, heads=1), ADAMW, (1, 4), device)
    if name == "large":
        return Loop(lambda: GPT(width=1408, layers=12, heads=11), ADAMW, (1, 32))
    return Loop(GPT, ADAMW, (2, 64)) if device == "cpu" else Loop(GPT, partial(ADAMW, fused=True), (8, 512), device)


def state(name: str) -> dict[str, Any]:
    """Return the state after one step; nothing trains it further."""
    trained = loop(name)
    trained.step()
    trained.optimizer.zero_grad()
    return trained.state()


def tensors(value: Any) -> list[torch.Tensor]:
    """Return every tensor of a nested state."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def nbytes_of(value: Any) -> int:
    """Return the bytes of all tensors."""
    return sum(t.numel() * t.element_size() for t in tensors(value))
