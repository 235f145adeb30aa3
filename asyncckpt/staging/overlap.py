"""Copies behind the training: which tensors are deferred, and what waits for their copies.

Hooks before every attached optimizer's `step()` and `load_state_dict()`, and before every attached module's
`load_state_dict()`, make the training wait for copies before it changes tensors that are being copied.
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
"""A copy that has not ended after so long a wait is cancelled: its save fails, and the training goes on. Chosen: a copy
into memory takes so long only if something is wrong with the machine."""


LOCAL_RANKS = "LOCAL_WORLD_SIZE"
"""Environment variable of torchrun: how many processes train on this node."""

CLOSE_S = 5.0
"""How long `close` waits for a cancelled copy, which ends after its current piece. Chosen: far above that."""


class _ModuleHook:
    """Waits before a module's `load_state_dict()`.

    It is part of the module: an unpickled module has a hook that does not wait. A deep copy of the module (for an
    average of the weights, say) waits as the original does.
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
    """The hooks that wait for copies. If a hook fires twice (`super().step()` in a subclass), the second does not wait.

    In a forked child it does nothing: the copies are the parent's.

    Args:
        copier: Runs the copies to wait for.

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
        """Wait until tensors may be changed: every copy has ended, or this thread's current streams come after it.

        Args:
            timeout_s: Copies that have not ended by then are cancelled, and their saves fail.
            ordered: Let streams order copies by devices before later work of this thread; False: wait for these copies
                too, since the tensors will be changed by other means.

        Blocks: for copies from host memory, at most `timeout_s`; for a copy through a ring, as long as the worker
        continues to write it.

        Raises:
            ReentrantCallError: Called in the copier's thread, by a callback of `staged`.
        """
        # IMPORTANT: check the process first. A forked child has the list of copies, but no thread that ends them.
        if os.getpid() != self._owner_pid or not self._copier.busy:
            return
        if self._copier.in_thread():
            raise ReentrantCallError(
                "a callback of `staged` called step(), load_state_dict() or fence(), which wait for the thread that "
                "the callback runs in; call them in another thread"
            )
        began = time.perf_counter()
        for late in self._copier.wait(timeout_s, ordered=ordered, extended=True):
            late.cancel(
                StagingError(f"the copy behind the training did not end within {timeout_s:g} s of waiting for it")
            )
        self.waited_s += time.perf_counter() - began

    def watch_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Make its `step()` and `load_state_dict()` wait, and `step()` of any optimizer that shares its parameters."""
        if not self._watched:
            self._handles.append(register_optimizer_step_pre_hook(self._hook(self._wait_for_sharer)))
        self._watched.append(weakref.ref(optimizer))
        self._handles.append(optimizer.register_step_pre_hook(self._hook()))
        self._handles.append(optimizer.register_load_state_dict_pre_hook(self._hook()))

    def watch_module(self, module: torch.nn.Module) -> None:
        """Make `load_state_dict()` of a module and of its submodules wait, unless they do so already."""
        for one in module.modules():
            if one not in self._modules:
                self._modules.add(one)
                hook = _ModuleHook(self.wait)
                handle = one.register_load_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]
                self._handles.append(handle)

    def _wait_for_sharer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Wait before `step()` of an optimizer that is not attached, if it changes tensors that are being copied.

        Such as a second optimizer of the same parameters, or a copy of an attached one.
        """
        if os.getpid() != self._owner_pid or not self._copier.busy:
            return
        if any(known() is optimizer for known in self._watched):
            return  # it is attached: its own hook waits
        copied = self._copier.source_storage_ptrs()
        if any(ptr in copied for group in optimizer.param_groups for ptr in storage_ptrs(group["params"])):
            self.wait()

    def _hook(self, wait: Callable[..., None] | None = None) -> Callable[..., None]:
        wait_for_all = self.wait

        def wait_for_copies(*arguments: Any, **__: Any) -> None:
            if wait is None:
                wait_for_all()
            else:
                wait(*arguments)

        # As torch.compiler.disable, whose import takes 1.5 s: a compiled step calls the hook in every step, instead of
        # compiling in what the hook did in the first one.
        wait_for_copies._torchdynamo_disable = True  # type: ignore[attr-defined]
        return wait_for_copies

    def remove(self) -> None:
        """Remove the hooks."""
        handles, self._handles, self._watched = self._handles, [], []
        self._modules.clear()
        for handle in handles:
            handle.remove()


def has_idle_core() -> bool:
    """Whether there is a core for copies behind the training that the training does not use.

    If all cores are busy, a copy behind the training slows it down more than waiting for the copy (docs/adr/0029). If
    devices compute, the host's cores wait for them. Else torch's threads, of all ranks of the node, are compared with
    the cores that this process may use.

    Raises:
        ConfigError: As `local_ranks`.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return True
    return torch.get_num_threads() * local_ranks(os.environ) < len(os.sched_getaffinity(0))


def local_ranks(environ: Mapping[str, str]) -> int:
    """Return the node's number of ranks according to torchrun's environment; 1 if that does not say.

    Raises:
        ConfigError: The number has more digits than Python parses.
    """
    text = environ.get(LOCAL_RANKS, "")
    try:
        return max(1, int(text)) if text.isascii() and text.isdecimal() else 1
    except ValueError as error:
        raise ConfigError(
            f"{LOCAL_RANKS} has {len(text)} digits: expected the number of processes that train on this node",
            field=LOCAL_RANKS,
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
        """Attach optimizers, and modules whose `load_state_dict()` must wait too. Earlier ones stay attached.

        Raises:
            ConfigError: An argument is neither of them, or an optimizer on which no hooks can be registered.
        """
        for one in attached:
            kind = type(one).__name__
            if not isinstance(one, (torch.optim.Optimizer, torch.nn.Module)):
                raise ConfigError(
                    f"attach() takes optimizers (torch.optim.Optimizer) and modules (torch.nn.Module); got a {kind}",
                    field="attach",
                    value=repr(type(one)),
                )
            if isinstance(one, torch.optim.Optimizer) and not has_hooks(one):
                raise ConfigError(
                    f"attach() got a {kind} that has never run Optimizer.__init__(), so that its step() calls no "
                    "hooks; if it wraps another optimizer, attach that one",
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
        """Wait for running copies, as `Fence.wait`, then undo every `attach`."""
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
            needs_core: Whether the copy keeps a core busy; False: it waits for storage most of the time.

        Returns:
            Their positions; and the optimizers' tensors in the same storages.
        """
        if self._mode == "blocking":
            return _NOTHING, []
        if self._mode != "overlap" and self._attached and needs_core and not has_idle_core():
            among = [n for n in among if not tensors[n].is_cpu]
        if self._owners:
            return self._owners.owned(tensors, among)
        # With "overlap" and nothing attached, the user promises to change nothing before fence(). Not so if optimizers
        # were attached, even if they have been garbage-collected since.
        promised = self._mode == "overlap" and not self._attached
        return self._owners.all_deferrable(tensors, among) if promised else (_NOTHING, [])

    def leave(self, timeout_s: float, *, join_s: float | None = None) -> None:
        """Wait for running copies at most `timeout_s`, cancel the rest, and remove the hooks.

        Args:
            timeout_s: Time limit for all copies together.
            join_s: How long `close()` may wait for the copier's thread after that; default: `CLOSE_S`.
        """
        self._join_s = join_s
        if not self.copier.in_thread():
            self.copier.wait(timeout_s)
        self.copier.cancel_all(CheckpointerClosedError("the checkpointer was closed while the state was being copied"))
        self.fence.remove()
        self._owners.clear()

    def close(self) -> None:
        """Cancel running copies, and wait for the copier's thread. Blocks at most `CLOSE_S`. Idempotent."""
        self.leave(0.0, join_s=self._join_s)
        self.copier.join(CLOSE_S if self._join_s is None else self._join_s)
