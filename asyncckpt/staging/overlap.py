"""Copies behind the training: which tensors are deferred, what waits for their copies, and how all that ends.

A hook in front of every attached optimizer's `step()` and `load_state_dict()`, and of every attached module's
`load_state_dict()`, makes the training wait for copies before it changes what is being copied.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from asyncckpt.config import CheckpointerConfig
from asyncckpt.errors import CheckpointerClosedError, ConfigError, ReentrantCallError, StagingError
from asyncckpt.staging.deferred_copy import BackgroundCopier
from asyncckpt.staging.optimizer_ownership import AttachedOptimizers, has_hooks, storage_ptrs

FENCE_TIMEOUT_S = 60.0
"""A copy that has not ended by then is cancelled: its save fails, and the training goes on. Chosen: no copy into memory
takes so long unless the machine is in trouble."""


LOCAL_RANKS = "LOCAL_WORLD_SIZE"
"""Set by torchrun: how many processes train on this node."""

CLOSE_S = 5.0
"""How long `close` waits for a copy that it has cancelled: it ends with its piece. Chosen, far above that."""


class _ModuleHook:
    """Waits before a module's `load_state_dict()`. It is part of the module: a pickle of that holds one without a wait.

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
    """The hooks that wait. A hook that fires twice, as for a subclass that calls `super().step()`, waits once.

    Nothing of it works in a forked child, whose parent does the copying.

    Args:
        copier: Runs the copies that are waited for.

    Attributes:
        waited_s: How long callers have waited, all together.
    """

    def __init__(self, copier: BackgroundCopier) -> None:
        self.waited_s = 0.0
        self._copier = copier
        self._owner_pid = os.getpid()
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._watched: list[weakref.ref[torch.optim.Optimizer]] = []

    def wait(self, timeout_s: float = FENCE_TIMEOUT_S, *, ordered: bool = True) -> None:
        """Wait until tensors may be changed: no copy runs, or it comes first in the current streams of this thread.

        Args:
            timeout_s: Copies that have not ended by then are cancelled, and their saves fail.
            ordered: Whether streams may order the copies of devices; False waits for these too, for changes that come
                from elsewhere.

        Blocks: for what is copied from the host, at most `timeout_s`. A copy through a ring is waited for as long as
        the worker goes on writing.

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
        for late in self._copier.wait(timeout_s, ordered=ordered, extended=True):
            late.cancel(StagingError(f"the copy behind the training had not ended {timeout_s:g} s after it was needed"))
        self.waited_s += time.perf_counter() - began

    def watch_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Make its `step()` and `load_state_dict()` wait, and every `step()` that changes what is being copied."""
        if not self._watched:
            self._handles.append(register_optimizer_step_pre_hook(self._hook(self._wait_for_sharer)))
        self._watched.append(weakref.ref(optimizer))
        self._handles.append(optimizer.register_step_pre_hook(self._hook()))
        self._handles.append(optimizer.register_load_state_dict_pre_hook(self._hook()))

    def watch_module(self, module: torch.nn.Module) -> None:
        """Make its `load_state_dict()`, and that of every module in it, wait. Those that do already are left alone."""
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
        copied = self._copier.source_storage_ptrs()
        if any(ptr in copied for group in optimizer.param_groups for ptr in storage_ptrs(group["params"])):
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


def has_idle_core() -> bool:
    """Whether copies behind the training find a core that it does not use.

    On cores that are all busy a copy behind the training costs it more time than one in front of it (docs/adr/0029).
    Where devices compute, the host's cores wait for them. Else torch's threads, of all ranks of the node, are counted
    against the cores that this process may use.

    Raises:
        ConfigError: As `local_ranks`.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return True
    return torch.get_num_threads() * local_ranks(os.environ) < len(os.sched_getaffinity(0))


def local_ranks(environ: Mapping[str, str]) -> int:
    """Return how many ranks the launcher says that the node has; 1 if it says nothing.

    Raises:
        ConfigError: More digits than Python reads.
    """
    text = environ.get(LOCAL_RANKS, "")
    try:
        return max(1, int(text)) if text.isascii() and text.isdecimal() else 1
    except ValueError as error:
        raise ConfigError(
            f"{LOCAL_RANKS} has {len(text)} digits: expected how many processes train on this node", field=LOCAL_RANKS
        ) from error


_NOTHING: frozenset[int] = frozenset()


class Overlap:
    """The copies behind the training of one checkpointer.

    Args:
        config: For `staging`.

    Attributes:
        copier: Runs the copies.
        fence: Waits for them.
    """

    def __init__(self, config: CheckpointerConfig) -> None:
        self._mode = config.staging
        self._owners = AttachedOptimizers()
        self.copier = BackgroundCopier()
        self.fence = Fence(self.copier)
        self._attached = False
        self._join_s: float | None = None

    def attach(self, *attached: Any) -> None:
        """Attach optimizers, and modules whose `load_state_dict()` shall wait as well. What is attached stays so.

        Raises:
            ConfigError: One is neither, or an optimizer that cannot be hooked.
        """
        for one in attached:
            kind = type(one).__name__
            if not isinstance(one, (torch.optim.Optimizer, torch.nn.Module)):
                raise ConfigError(
                    f"attach() takes optimizers (torch.optim.Optimizer), and modules; got a {kind}",
                    field="attach",
                    value=repr(type(one)),
                )
            if isinstance(one, torch.optim.Optimizer) and not has_hooks(one):
                raise ConfigError(
                    f"attach() got a {kind} that has never run Optimizer.__init__(), so that its step() calls no "
                    "hooks: a wrapper around another optimizer, it seems; attach the one inside",
                    field="attach",
                    value=repr(type(one)),
                )
        for one in attached:
            if isinstance(one, torch.nn.Module):
                self.fence.watch_module(one)
            elif self._owners.add(one):
                self._attached = True
                self.fence.watch_optimizer(one)

    def detach(self) -> None:
        """Wait for running copies, as `Fence.wait`, and take everything back that `attach` did."""
        self.fence.wait(ordered=False)
        self.fence.remove()
        self._owners.clear()
        self._attached = False

    def choose_deferred(
        self, tensors: Sequence[torch.Tensor], among: Sequence[int], *, needs_core: bool = True
    ) -> tuple[frozenset[int], list[torch.Tensor]]:
        """Return which tensors need not be copied before `save()` returns.

        Args:
            tensors: All tensors of the state.
            among: Positions of those that are worth deferring.
            needs_core: Whether the copy is work of a processor; else it waits for storage most of its time.

        Returns:
            Their positions; and the optimizers' tensors that lie in the same storages.
        """
        if self._mode == "blocking":
            return _NOTHING, []
        if self._mode != "overlap" and self._attached and needs_core and not has_idle_core():
            among = [n for n in among if not tensors[n].is_cpu]
        if self._owners:
            return self._owners.owned(tensors, among)
        # An optimizer that was attached and is gone owns nothing any more; nor does anybody promise to change nothing.
        promised = self._mode == "overlap" and not self._attached
        return self._owners.everything(tensors, among) if promised else (_NOTHING, [])

    def leave(self, timeout_s: float, *, join_s: float | None = None) -> None:
        """Wait for running copies at most `timeout_s`, cancel the rest, and take the hooks away.

        Args:
            timeout_s: Time limit for all copies together.
            join_s: How long `close()` may wait for the thread after that; default: `CLOSE_S`.
        """
        self._join_s = join_s
        if not self.copier.in_thread():
            self.copier.wait(timeout_s)
        self.copier.cancel_all(CheckpointerClosedError("the checkpointer was closed while the state was being copied"))
        self.fence.remove()
        self._owners.clear()

    def close(self) -> None:
        """Cancel what runs, and wait for the copier's thread. Blocks at most `CLOSE_S`. Twice is fine."""
        self.leave(0.0, join_s=self._join_s)
        self.copier.join(CLOSE_S if self._join_s is None else self._join_s)
