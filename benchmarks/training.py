"""Training loops that saving has to run beside: a GPT with AdamW, of two sizes, and one of many small tensors."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

VOCABULARY, CONTEXT = 50304, 1024


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, length, width) to the same shape."""
        batch, length, width = x.shape
        q, k, v = self.attention(self.ln_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.ln_2(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """A GPT-2 without dropout. Width 768 and 12 layers are 124 M parameters."""

    def __init__(self, width: int = 768, layers: int = 12, heads: int = 12) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks, self.norm = nn.Sequential(*(Block(width, heads) for _ in range(layers))), nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of predicting each next token."""
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        logits = self.norm(self.blocks(x)) @ self.token.weight.t()
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class ManyTensors(nn.Module):
    """20,000 parameters of 16 KiB, of which a few do work: 0.33 GB."""

    def __init__(self, count: int = 20_000, nbytes: int = 16 * 1024) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(nbytes // 4)) for _ in range(count))
        self.work = torch.randn(1024, 1024)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return a loss that moves one parameter in a hundred; `tokens` says how much work it is."""
        for _ in range(tokens.shape[0]):
            self.work = torch.tanh(self.work @ self.work)
        return torch.stack([w.sum() for w in self.weights[::100]]).sum()


class Loop:
    """A training loop that knows how long its steps take, and how long each waits for a checkpointer.

    Args:
        model: What is trained.
        optimizer: Makes its optimizer.
        shape: (batch, length) of the tokens of a step.
    """

    def __init__(
        self, model: nn.Module, optimizer: Callable[[Any], torch.optim.Optimizer], shape: tuple[int, int]
    ) -> None:
        self.model, self.optimizer = model, optimizer(model.parameters())
        self.tokens = torch.randint(0, VOCABULARY, shape)
        self.waited_s = 0.0
        self.before_step: Callable[[], None] = lambda: None
        self.steps = 0

    def attach(self, attach: Callable[[torch.optim.Optimizer], None]) -> None:
        """Attach the optimizer to something whose hook makes its step wait; the wait is counted."""
        self.optimizer.register_step_pre_hook(lambda *_: self._note(-time.perf_counter()))
        attach(self.optimizer)
        self.optimizer.register_step_pre_hook(lambda *_: self._note(time.perf_counter()))

    def _note(self, seconds: float) -> None:
        self.waited_s += seconds

    def step(self) -> float:
        """Make one step; returns how long it took."""
        began = time.perf_counter()
        self.optimizer.zero_grad()
        self.model(self.tokens).backward()
        waits = time.perf_counter()
        self.before_step()
        self.waited_s += time.perf_counter() - waits
        self.optimizer.step()
        self.steps += 1
        return time.perf_counter() - began

    def state(self) -> dict[str, Any]:
        """Return what is saved."""
        return {
            "model": self.model.state_dict(),
            "optim": self.optimizer.state_dict(),
            "rng": torch.get_rng_state(),
            "step": self.steps,
        }

    def take(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optim"])
        torch.set_rng_state(state["rng"])
        self.steps = int(state["step"])


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Return AdamW as it is used."""
    return torch.optim.AdamW(parameters, lr=1e-4)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return SGD without momentum: its state is empty."""
    return torch.optim.SGD(parameters, lr=1e-4)


def make(state: str) -> Loop:
    """Return the loop of a state: `gpt` (1.49 GB), `small` (20,000 tensors, 0.33 GB), `large` (4.2 GB),
    `many` (100,000 tensors, 0.1 GB), or `tiny`."""
    torch.manual_seed(1)
    if state == "tiny":
        return Loop(GPT(width=16, layers=1, heads=1), adamw, (1, 4))
    if state == "many":
        return Loop(ManyTensors(100_000, 1024), sgd, (8, 1))
    if state == "small":
        return Loop(ManyTensors(), sgd, (8, 1))
    if state == "large":
        return Loop(GPT(width=1408, layers=12, heads=11), adamw, (1, 32))
    return Loop(GPT(), adamw, (2, 64))
