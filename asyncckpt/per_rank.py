"""PerRank: marks a part of a state dict that belongs to one rank, such as random number states and data positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asyncckpt.errors import ConfigError

Reshard = Callable[[list[Any], int, int], Any]
"""(values of all ranks that saved, rank, world size) -> the value of that rank."""


class PerRank:
    """Marks a subtree of a state dict as belonging to the rank that saves it.

    It is stored for every rank, and loaded by the rank with the same number. At another world size, loading it raises
    `PerRankUnavailableError`, unless the `PerRank` of the target has a `reshard`. Inside another `PerRank` it has no
    effect, and neither has its `reshard`.

    Args:
        value: Any value that a state dict may hold. It may be replaced at any time.
        reshard: What a load at another world size calls, as `reshard(values, rank, world_size)`. `values` are the
            values that the ranks saved, in the order of their numbers; `rank` and `world_size` are those of the load.
            The result is loaded into `value`. It is never called at the world size of the save. It is not stored: a
            save ignores it, and each load needs it in its target.

            Each rank that calls it reads the values of all ranks, and holds them in host memory at the same time.
            Their tensors are on the CPU and belong to `reshard`, as do their dicts and lists. It is called before
            anything in the target changes, and again if the load has to start again. It must not call collectives of
            torch.distributed: a load of one rank waits for no other.

            The result is loaded like a saved value: an object with a `load_state_dict()` is given its part, a dict of
            `value` gets its own keys, of which none may be missing in the result, an empty dict or list takes
            everything. A tensor of the same shape and dtype is filled in place. Everything else is replaced.

    Raises:
        ConfigError: `reshard` is not callable.
    """

    __slots__ = ("reshard", "value")

    def __init__(self, value: Any, reshard: Reshard | None = None) -> None:
        if reshard is not None and not callable(reshard):
            raise ConfigError(
                f"PerRank(reshard={reshard!r}): expected a function (values of all ranks, rank, world size) -> value",
                field="reshard",
                value=repr(reshard),
            )
        self.value, self.reshard = value, reshard

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"
