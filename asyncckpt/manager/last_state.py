"""The state that was last passed to a manager, and a proof that it is the state at the end of a step.

When an error leaves the manager's `with` block because DataLoader workers were killed, the training may be in the
middle of a step. The manager knows only the step for which `should_save` or `reached_preemption` was called last. The
state belongs to that step if nothing was trained since: no sampled tensor, nor its gradient, was written to, and no
optimizer has stepped. A write through `.data`, or by a CUDA graph outside of an optimizer's `step()`, is not seen (the
exception of promise P2).

A state that is not kept current, such as a copy that was made for one save, proves nothing at later steps. It is
dropped, as it may hold a copy of everything.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from asyncckpt.manager.preemption import had_dataloader_workers
from asyncckpt.training_step import step_in

SAMPLE = 64
"""Number of sampled parameters, and of sampled buffers, at about 100 ns each a step. Chosen: a training step writes to
all parameters that it trains, and a forward pass to all buffers that it updates."""

_VERSION, _GRADIENT = attrgetter("_version"), attrgetter("grad")
_NOT_ASKED = object()


class LastState:
    """Holds the last state and its step, and counts writes since. Used by the training thread.

    Args:
        is_enabled: Whether to hold a state; if not, all calls return at once.
    """

    def __init__(self, is_enabled: bool) -> None:
        self.is_enabled = is_enabled
        self.state: Mapping[Any, Any] | None = None
        self._sample: list[torch.Tensor] = []
        self._parameters: list[torch.Tensor] = []
        self._step: int | None = None
        self._recorded: list[int] = []
        self._optimizer_steps = 0
        self._copied_key = ""
        self._declared_step: object = _NOT_ASKED
        self._was_dropped = False
        self._remove_hook: Callable[[], object] = lambda: None
        if is_enabled:
            # IMPORTANT: a weak reference: torch keeps the hook, which must not keep a dropped manager's state alive.
            me = weakref.ref(self)
            self._remove_hook = weakref.finalize(
                self, register_optimizer_step_post_hook(lambda *_: _count(me())).remove
            )

    def record_state(self, state: Mapping[Any, Any] | None, step: int | None) -> None:
        """Hold a state that was passed to `save` or `restore`, at `step`; None: nothing was restored."""
        if not self.is_enabled or state is None:
            return
        self._copied_key, self._declared_step, self._was_dropped = _copied_key_in(state), _NOT_ASKED, False
        if state is not self.state:
            self.state, parameters, buffers = state, list[torch.Tensor](), list[torch.Tensor]()
            for one in _objects(state):
                if isinstance(one, torch.nn.Module):
                    parameters += [p for p in one.parameters() if p.requires_grad]
                    buffers += one.buffers()
                elif isinstance(one, torch.optim.Optimizer):
                    parameters += [p for group in one.param_groups for p in group["params"]]
            self._parameters = [
                one for one in _evenly_spaced(parameters) if one.is_leaf
            ]  # others have no gradient to ask for
            self._sample = self._parameters + _evenly_spaced(buffers)
        self._step, self._recorded = step, self._counts()

    def record_step(self, step: int) -> None:
        """Record that the training is at the end of `step`. Idempotent."""
        if self.state is None or (step == self._step and self._recorded_steps == self._optimizer_steps):
            return
        if self._copied_key:
            declared = step_in(self.state)
            if declared == self._declared_step != step:
                self.state, self._was_dropped = None, True
                return
            self._declared_step = declared
        self._step, self._recorded = step, self._counts() if had_dataloader_workers() else []

    @property
    def _recorded_steps(self) -> int:
        return self._recorded[-1] if self._recorded else -1

    def _counts(self) -> list[int]:
        """Return counters that a training step changes: versions of tensors and gradients, and steps of optimizers."""
        gradients = map(_GRADIENT, self._parameters)
        versions = [*map(_VERSION, self._sample), *(-1 if one is None else one._version for one in gradients)]
        versions.append(self._optimizer_steps)
        return versions

    def has_trained_since(self) -> bool:
        """Return whether anything was trained since the last call of `record_state` or `record_step`."""
        return self._counts() != self._recorded

    def why_unproven(self, step: int | None) -> str:
        """Return why the held state may not be the one at the end of `step`; empty: it is.

        Args:
            step: The step for which `should_save` or `reached_preemption` was called last.
        """
        state = self.state
        if state is None:
            if self._was_dropped:
                return f"{self._copied_key} in the last state is of an earlier step: the state's 'step' did not change"
            return "no state was passed to save or restore"
        if step is None or step != self._step:
            return "should_save or reached_preemption was not called since the state was passed to save or restore"
        if not self._recorded:
            return f"no DataLoader had started workers at the end of step {step}"
        if self.has_trained_since():
            return f"tensors or optimizers have changed since step {step}: the training is in the middle of a step"
        copied = _copied_key_in(state)
        if copied and step_in(state) != step:
            return f"{copied} in the last state may be of an earlier step: the state's 'step' is not {step}"
        return ""

    def close(self) -> None:
        """Drop the state, and remove the hook. Idempotent."""
        self._remove_hook()
        self.state, self._sample, self._parameters, self.is_enabled = None, [], [], False


def _count(last: LastState | None) -> None:
    if last is not None:
        last._optimizer_steps += 1


def _copied_key_in(state: Mapping[Any, Any]) -> str:
    """Return a key whose value has no state_dict() and may thus be a copy; empty: there is none."""
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


def _evenly_spaced(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return at most `SAMPLE` of the tensors, evenly spaced, the last one included."""
    # Inference tensors have no version counters.
    unique = list({id(one): one for one in tensors if not one.is_inference()}.values())
    if len(unique) <= SAMPLE:
        return unique
    return [unique[(n + 1) * len(unique) // SAMPLE - 1] for n in range(SAMPLE)]
