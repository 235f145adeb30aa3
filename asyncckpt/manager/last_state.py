"""The state that was last passed to a manager, and a proof that it is the state at the end of a step.

When an error leaves the manager's block because DataLoader workers were killed, nothing says that a step has ended.
What is known is the step for which `should_save` or `reached_preemption` was called last. The state belongs to that
step only if nothing was trained since: no tensor of a sample, nor its gradient, was written to, and no optimizer has
stepped. A write through `.data`, or by a CUDA graph outside of an optimizer's `step()`, is not seen (the exception of
promise P2).

A state that is not kept current, such as one that was made for a save, proves nothing at later steps: it is let go, as
it may hold a copy of everything.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from asyncckpt.manager.preemption import have_been_started
from asyncckpt.training_step import step_in

SAMPLE = 64
"""How many parameters are looked at, and how many buffers: some 100 ns each at every step. Chosen: a step writes to all
parameters that it trains, and a forward to all buffers that it updates."""

_VERSION, _GRADIENT = attrgetter("_version"), attrgetter("grad")
_NOT_ASKED = object()


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
        self._recorded: list[int] = []
        self._optimizer_steps = 0
        self._plain = ""
        self._said: object = _NOT_ASKED
        self._was_let_go = False
        self._unhook: Callable[[], object] = lambda: None
        if is_on:
            # IMPORTANT: torch keeps a hook until it is removed: it must not keep the state of a dropped manager alive.
            me = weakref.ref(self)
            self._unhook = weakref.finalize(self, register_optimizer_step_post_hook(lambda *_: _count(me())).remove)

    def record_state(self, state: Mapping[Any, Any] | None, step: int | None) -> None:
        """Remember a state that was passed to `save` or `restore`, at `step`. `step=None`: nothing was restored."""
        if not self.is_on or state is None:
            return
        self._plain, self._said, self._was_let_go = _plain_in(state), _NOT_ASKED, False
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
        self._step, self._recorded = step, self._counts()

    def record_step(self, step: int) -> None:
        """Remember that the training is at the end of `step`. Again at the same one is fine."""
        if self.state is None or (step == self._step and self._recorded_steps == self._optimizer_steps):
            return
        if self._plain:
            said = step_in(self.state)
            if said == self._said != step:
                self.state, self._was_let_go = None, True
                return
            self._said = said
        self._step, self._recorded = step, self._counts() if have_been_started() else []

    @property
    def _recorded_steps(self) -> int:
        return self._recorded[-1] if self._recorded else -1

    def _counts(self) -> list[int]:
        """Return what a training step changes: versions of tensors and gradients, and the steps of optimizers."""
        gradients = map(_GRADIENT, self._parameters)
        versions = [*map(_VERSION, self._sample), *(-1 if one is None else one._version for one in gradients)]
        versions.append(self._optimizer_steps)
        return versions

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
            if self._was_let_go:
                return f"{self._plain} in the state that was passed last is of an earlier step: its 'step' stayed"
            return "no state was passed to save or restore"
        if step is None or step != self._step:
            return "should_save or reached_preemption was not called since the state was passed to save or restore"
        if not self._recorded:
            return f"no DataLoader had workers yet at the end of step {step}"
        if self.has_trained_since():
            return f"training has gone on since step {step}: it is in the middle of a step"
        plain = _plain_in(state)
        if plain and step_in(state) != step:
            return f"{plain} in the state that was passed last may be of an earlier step: its 'step' is not {step}"
        return ""

    def close(self) -> None:
        """Drop the state and its hook. Twice is fine."""
        self._unhook()
        self.state, self._sample, self._parameters, self.is_on = None, [], [], False


def _count(last: LastState | None) -> None:
    if last is not None:
        last._optimizer_steps += 1


def _plain_in(state: Mapping[Any, Any]) -> str:
    """Return a key whose value has no state_dict(): it may be a copy, unless the mapping's `step` is current."""
    return next((repr(key) for key, one in state.items() if not callable(getattr(one, "state_dict", None))), "")


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
