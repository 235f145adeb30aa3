"""Makes the training wait for copies that run behind it, before it changes what is being copied.

A hook in front of every attached optimizer's `step()` and `load_state_dict()`, and of every attached module's
`load_state_dict()`. A hook that fires twice, as for a subclass that calls `super().step()`, waits once.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from asyncckpt.errors import ReentrantCallError, StagingError
from asyncckpt.staging.copier import Copier
from asyncckpt.staging.ownership import storages

FENCE_TIMEOUT_S = 60.0
"""A copy that has not ended by then is given up: its save fails, and the training goes on. Chosen: no copy into memory
takes so long unless the machine is in trouble."""


class _ModuleHook:
    """Waits before a module's `load_state_dict()`. It is part of the module: a pickle of that holds one that does not.

    A module that is copied (`copy.deepcopy`, for an average of the weights) waits as its original does.
    """

    def __init__(self, wait: Callable[[], None] | None = None) -> None:
        self._wait = wait

    def __call__(self, *_: Any, **__: Any) -> None:
        if self._wait is not None:
            self._wait()

    def __reduce__(self) -> Any:
        return _ModuleHook, ()

    def __deepcopy__(self, memo: Any) -> _ModuleHook:
        return self


class Fence:
    """See the module. Nothing of it works in a forked child, whose parent does the copying.

    Args:
        copier: Whose copies are waited for.

    Attributes:
        waited_s: How long callers have waited, all together.
    """

    def __init__(self, copier: Copier) -> None:
        self.waited_s = 0.0
        self._copier = copier
        self._owner_pid = os.getpid()
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._watched: list[weakref.ref[torch.optim.Optimizer]] = []

    def wait(self, timeout_s: float = FENCE_TIMEOUT_S, *, ordered: bool = True) -> None:
        """Wait until tensors may be changed: no copy runs, or it comes first in the current streams of this thread.

        Args:
            timeout_s: See below.
            ordered: False waits for the copies of devices too, for changes that come from elsewhere.

        Blocks: for what is copied from the host, at most `timeout_s`; copies that have not ended then are given up,
        and their saves fail. One that goes through a ring is waited for as long as something of it is written.

        Raises:
            ReentrantCallError: In the copier's own thread, by a callback of `staged`.
        """
        # IMPORTANT: the process first. A forked child has the list of copies and no thread that ends them.
        if os.getpid() != self._owner_pid or not self._copier.busy:
            return
        if self._copier.in_thread():
            raise ReentrantCallError(
                "a callback of `staged` steps, loads or waits for the copies, in the thread that makes them"
            )
        began = time.perf_counter()
        for late in self._copier.wait(timeout_s, ordered=ordered, patient=True):
            late.give_up(
                StagingError(f"the copy behind the training had not ended {timeout_s:g} s after it was needed")
            )
        self.waited_s += time.perf_counter() - began

    def watch_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Let its `step()` and `load_state_dict()` wait, and every `step()` over what is being copied."""
        if not self._watched:
            self._handles.append(register_optimizer_step_pre_hook(self._hook(self._wait_for_sharer)))
        self._watched.append(weakref.ref(optimizer))
        self._handles.append(optimizer.register_step_pre_hook(self._hook()))
        self._handles.append(optimizer.register_load_state_dict_pre_hook(self._hook()))

    def watch_module(self, module: torch.nn.Module) -> None:
        """Let its `load_state_dict()`, and that of every module in it, wait. Those that do already are left alone."""
        for one in module.modules():
            if one not in self._modules:
                self._modules.add(one)
                hook = _ModuleHook(self.wait)
                handle = one.register_load_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]
                self._handles.append(handle)

    def _wait_for_sharer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Wait before the step of an optimizer that is not attached: a second one, a shallow copy, one made since."""
        if os.getpid() != self._owner_pid or not self._copier.busy:
            return
        if any(known() is optimizer for known in self._watched):
            return  # its own hook waits
        copied = self._copier.places()
        if any(place in copied for group in optimizer.param_groups for place in storages(group["params"])):
            self.wait()

    def _hook(self, wait: Callable[..., None] | None = None) -> Callable[..., None]:
        everybody = self.wait

        def wait_for_copies(*arguments: Any, **__: Any) -> None:
            if wait is None:
                everybody()
            else:
                wait(*arguments)

        # What torch.compiler.disable would set, without the second and a half that importing the compiler takes:
        # a compiled step calls the hook, instead of having what it saw at its first run compiled in.
        wait_for_copies._torchdynamo_disable = True  # type: ignore[attr-defined]
        return wait_for_copies

    def remove(self) -> None:
        """Take the hooks away."""
        handles, self._handles, self._watched = self._handles, [], []
        self._modules.clear()
        for handle in handles:
            handle.remove()
