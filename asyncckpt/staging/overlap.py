"""Copies behind the training: which tensors wait for the copier, who waits for it, and how all that ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from asyncckpt.config import CheckpointerConfig
from asyncckpt.errors import CheckpointerClosedError, ConfigError
from asyncckpt.staging.copier import Copier
from asyncckpt.staging.fence import Fence
from asyncckpt.staging.ownership import Owners, has_hooks
from asyncckpt.staging.spare_cores import cores_to_spare

CLOSE_S = 5.0
"""How long `close` waits for a copy that it has given up: it ends with its piece. Chosen, far above what that takes."""

_NOTHING: frozenset[int] = frozenset()


class Overlap:
    """See the module. One per checkpointer.

    Args:
        config: For `staging`.
    """

    def __init__(self, config: CheckpointerConfig) -> None:
        self._mode = config.staging
        self._owners = Owners()
        self.copier = Copier()
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

    def later(
        self, tensors: Sequence[torch.Tensor], among: Sequence[int], *, needs_core: bool = True
    ) -> tuple[frozenset[int], list[torch.Tensor]]:
        """Return the positions of those tensors that need not be copied before `save()` returns.

        Args:
            tensors: The state's.
            among: Positions of those for which it pays.
            needs_core: The copy is work of a processor; else it waits for storage most of its time.

        Returns:
            The positions; and optimizers' tensors that lie in the same storages.
        """
        if self._mode == "blocking":
            return _NOTHING, []
        if self._mode != "overlap" and self._attached and needs_core and not cores_to_spare():
            among = [n for n in among if not tensors[n].is_cpu]
        if self._owners:
            return self._owners.owned(tensors, among)
        # An optimizer that was attached and is gone owns nothing any more; nor does anybody promise to change nothing.
        promised = self._mode == "overlap" and not self._attached
        return self._owners.everything(tensors, among) if promised else (_NOTHING, [])

    def leave(self, timeout_s: float, *, join_s: float | None = None) -> None:
        """Wait for running copies at most `timeout_s`, give up the rest, and take the hooks away.

        Args:
            timeout_s: For copies.
            join_s: How long `close()` may wait for the thread after that; default: `CLOSE_S`.
        """
        self._join_s = join_s
        if not self.copier.in_thread():
            self.copier.wait(timeout_s)
        self.copier.give_up(CheckpointerClosedError("the checkpointer was closed while the state was being copied"))
        self.fence.remove()
        self._owners.clear()

    def close(self) -> None:
        """Give up what runs, and wait for the copier's thread. Blocks at most `CLOSE_S`. Twice is fine."""
        self.leave(0.0, join_s=self._join_s)
        self.copier.join(CLOSE_S if self._join_s is None else self._join_s)
