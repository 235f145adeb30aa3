"""The state that was last passed to a manager, and a proof that it is the state at the end of a step.

When an error leaves the manager's block because DataLoader workers were killed, nothing says that a step has ended.
What is known is the step for which `should_save` or `reached_preemption` was called last. The state belongs to that
step only if nothing was trained since: no tensor of a sample, nor its gradient, was written to, and no optimizer has
stepped. A write through `.data`, or by a CUDA graph outside of an optimizer's `step()`, is not seen (the exception of
promise P2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from asyncckpt.steps import step_in

SAMPLE = 64
"""How many parameters are looked at, and how many buffers: some 100 ns each at every step. Chosen: a step writes to all
parameters that it trains, and a forward to all buffers that it updates."""


class LastState:
    """Remembers the state and the step, and counts writes since. Used by the training thread.

    Args:
        is_on: False: nothing is remembered, and no call costs anything.
    """

    def __init__(self, is_on: bool) -> None:
        self.is_on = is_on
        self.state: Mapping[Any, Any] | None = None
        self._sample: list[torch.Tensor] = []
        self._parameters: list[torch.Tensor] = []
        self._step: int | None = None
        self._recorded: object = None
        self._optimizer_steps = 0
        self._hook = register_optimizer_step_post_hook(self._has_stepped) if is_on else None

    def _has_stepped(self, *_: Any) -> None:
        self._optimizer_steps += 1

    def record_state(self, state: Mapping[Any, Any] | None, step: int | None) -> None:
        """Remember a state that was passed to `save` or `restore`, at `step`. `step=None`: nothing was restored."""
        if not self.is_on or state is None:
            return
        if state is not self.state:
            self.state, parameters, buffers = state, list[torch.Tensor](), list[torch.Tensor]()
            for one in _objects(state):
                if isinstance(one, torch.nn.Module):
                    parameters += [p for p in one.parameters() if p.requires_grad]
                    buffers += one.buffers()
                elif isinstance(one, torch.optim.Optimizer):
                    parameters += [p for group in one.param_groups for p in group["params"]]
            self._parameters = [one for one in _spread(parameters) if one.is_leaf]  # others have no gradient to ask for
            self._sample = self._parameters + _spread(buffers)
        self.record_step(step)

    def record_step(self, step: int | None) -> None:
        """Remember that the training is at the end of `step`."""
        if self.is_on and self.state is not None:
            self._step, self._recorded = step, self._counts()

    def _counts(self) -> object:
        versions = [one._version for one in self._sample]
        for one in self._parameters:
            versions.append(-1 if one.grad is None else one.grad._version)
        return versions, self._optimizer_steps

    def has_trained_since(self) -> bool:
        """Whether anything was trained since the last call of `record_state` or `record_step`."""
        return self._counts() != self._recorded

    def why_unproven(self, step: int | None) -> str:
        """Return why the state may not be that at the end of `step`; empty: it is.

        Args:
            step: The step for which `should_save` or `reached_preemption` was called last.
        """
        state = self.state
        if state is None:
            return "no state was passed to save or restore"
        if step is None or step != self._step:
            return "should_save or reached_preemption was not called since the state was passed to save or restore"
        if self.has_trained_since():
            return f"training has gone on since step {step}: it is in the middle of a step"
        # A value without state_dict() may be a copy from an earlier step, unless the mapping's own `step` is current.
        plain = [key for key, one in state.items() if not callable(getattr(one, "state_dict", None))]
        if plain and step_in(state) != step:
            return f"{plain[0]!r} in the state that was passed last may be of an earlier step: its 'step' is not {step}"
        return ""

    def close(self) -> None:
        """Drop the state and its hook. Twice is fine."""
        if self._hook is not None:
            self._hook.remove()
        self.state, self._sample, self._parameters, self.is_on, self._hook = None, [], [], False, None


def _objects(state: Any) -> Iterator[Any]:
    if isinstance(state, Mapping):
        for one in state.values():
            yield from _objects(one)
    elif isinstance(state, (list, tuple)):
        for one in state:
            yield from _objects(one)
    else:
        yield state


def _spread(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return at most `SAMPLE` of them, evenly spread, the last one too."""
    unique = list({id(one): one for one in tensors if not one.is_inference()}.values())  # those have no versions
    if len(unique) <= SAMPLE:
        return unique
    return [unique[(n + 1) * len(unique) // SAMPLE - 1] for n in range(SAMPLE)]
