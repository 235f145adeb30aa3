"""The state that a manager was given last, and whether it can be proven to be that of the end of a step.

Who leaves the manager's block because the workers of its DataLoader were killed has not said that a step has ended.
What is known: the step that was asked for last, and, of a sample of the tensors, whether anything was written to them
since, gradients too; and whether an optimizer has stepped. Only if nothing has is the state that of the asked step. A
write through `.data` or a CUDA graph outside of an optimizer's `step()` is not seen: as everywhere (promise P2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from asyncckpt.steps import step_in

SAMPLE = 64
"""Tensors of parameters, and as many buffers: each asks for some 100 ns at every step. Chosen: a step writes to all
parameters that it trains, and a forward to all buffers that it keeps."""


class LastState:
    """See the module. Used by the training thread.

    Args:
        is_on: Whether anybody will ask; else it costs nothing.
    """

    def __init__(self, is_on: bool) -> None:
        self.is_on = is_on
        self.state: Mapping[Any, Any] | None = None
        self._sample: list[torch.Tensor] = []
        self._parameters: list[torch.Tensor] = []
        self._step: int | None = None
        self._seen: object = None
        self._optimizer_steps = 0
        self._hook = register_optimizer_step_post_hook(self._has_stepped) if is_on else None

    def _has_stepped(self, *_: Any) -> None:
        self._optimizer_steps += 1

    def given(self, state: Mapping[Any, Any] | None, step: int | None) -> None:
        """It was given to `save` or `restore`; it is that of `step` now. None: nothing was restored."""
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
        self.passed(step)

    def passed(self, step: int | None) -> None:
        """The training is at the end of `step`."""
        if self.is_on and self.state is not None:
            self._step, self._seen = step, self._look()

    def _look(self) -> object:
        versions = [one._version for one in self._sample]
        for one in self._parameters:
            versions.append(-1 if one.grad is None else one.grad._version)
        return versions, self._optimizer_steps

    def has_gone_on(self) -> bool:
        """Whether anything was trained since the step that was asked for last, or since the state was given."""
        return self._look() != self._seen

    def why_unproven(self, step: int | None) -> str:
        """Return why the state may not be that of the end of `step`, which was asked for last; empty: it is."""
        state = self.state
        if state is None:
            return "no state was given to save or restore"
        if step is None or step != self._step:
            return "no step was asked for since the state was given"
        if self.has_gone_on():
            return f"training has gone on since step {step}: it is in the middle of a step"
        # What is no object of its own may be a copy of an earlier step's, unless the mapping says that it is kept up.
        plain = [key for key, one in state.items() if not callable(getattr(one, "state_dict", None))]
        if plain and step_in(state) != step:
            return f"{plain[0]!r} in the state that was given last may be of an earlier step: its 'step' is not {step}"
        return ""

    def close(self) -> None:
        """Let go of the state. Twice is fine."""
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
