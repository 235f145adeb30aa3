"""Master parameters of mixed precision: the full-precision copies that an optimizer keeps of low-precision weights.

Such an optimizer updates the masters and writes the rounded result into the weights. If a checkpoint holds only the
weights, the masters are still the old ones after a load, and the first step overwrites the loaded weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from asyncckpt.torch_tensors import flat_bytes

Pair = tuple[torch.Tensor, torch.Tensor]
_GROUPS = (
    ("float16_groups", "fp32_from_float16_groups"),  # Megatron-LM: Float16OptimizerWithFloat16Params
    ("fp16_groups", "fp32_from_fp16_groups"),  # NVIDIA apex: FP16_Optimizer, and amp's stash
    ("fp16_groups", "fp32_groups"),  # apex and DeepSpeed: groups that are not flat
    ("fp16_groups_flat", "fp32_groups_flat"),  # DeepSpeed: FP16_Optimizer
)
_IN_STATE = ("master_param", "master_params", "master_weight", "fp32_param", "master")
"""Keys of masters in an optimizer's per-parameter state: Transformer Engine and others."""


def master_pairs(optimizer: Any) -> list[Pair]:
    """Return the pairs (weight, master) of an optimizer; empty if it has no masters that are known here.

    The masters are found by, in this order: a method `master_param_pairs()` that returns them (the protocol for your
    own optimizers); lists of groups as Megatron-LM, apex and DeepSpeed name them, on the optimizer or on apex amp's
    `_amp_stash`; `param_groups_master` beside `param_groups` (apex FusedAdam); `optimizer.state[weight]` with
    "master_param", "master_weight" or "fp32_param" (Transformer Engine and others). The attribute `optimizer` of a
    wrapper is searched as well.
    """
    own = getattr(optimizer, "master_param_pairs", None)
    found = list(own()) if callable(own) else [*_in_groups(optimizer), *_in_state(optimizer)]
    inner = getattr(optimizer, "optimizer", None)
    if not callable(own) and inner is not None and inner is not optimizer:
        found += master_pairs(inner)
    unique = {id(master): (weight, master) for weight, master in found if _is_pair(weight, master)}
    return list(unique.values())


def refresh_master_params(optimizer: Any, *, but: Iterable[torch.Tensor] = ()) -> int:
    """Set those full-precision masters of an optimizer that do not fit their weights from the weights.

    A master that rounds to its weight, bit for bit, stays unchanged: it is more precise than the weight. With
    stochastic rounding this test does not work; then call this function only if the checkpoint had no masters.

    Args:
        optimizer: An optimizer whose masters `master_pairs` finds.
        but: Masters that are never changed.

    Returns:
        Number of masters that were set.
    """
    spared = {id(master) for master in but}
    count = 0
    with torch.no_grad():
        for weight, master in master_pairs(optimizer):
            if id(master) in spared or torch.equal(_bits(master.to(weight.dtype)), _bits(weight.detach())):
                continue
            master.copy_(weight)
            count += 1
    return count


class MasterParams:
    """The masters of the optimizers in a state, recorded before a load to find those that the load did not write.

    Args:
        values: Values of the state; those that are not optimizers are ignored.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self._optimizers = [one for one in values if hasattr(one, "step") and hasattr(one, "state_dict")]
        self._before = {
            id(master): (master, master._version) for one in self._optimizers for _, master in master_pairs(one)
        }
        self._stepped_on = [(one, _version(one)) for one in self._parameters()]

    def _parameters(self) -> Iterator[torch.Tensor]:
        for optimizer in self._optimizers:
            for group in getattr(optimizer, "param_groups", None) or ():
                yield from (one for one in group["params"] if isinstance(one, torch.Tensor) and one.numel())

    def refresh(self) -> int:
        """Set the masters that the load did not write from the weights. Returns their number."""
        count = 0
        for one in self._optimizers:
            loaded = [master for _, master in master_pairs(one) if not self._is_as_before(master)]
            count += refresh_master_params(one, but=loaded)
        return count

    def untouched(self) -> int:
        """Return the number of the optimizers' parameters that neither the load nor `refresh` has written."""
        return sum(_version(one) == version for one, version in self._stepped_on)

    def _is_as_before(self, master: torch.Tensor) -> bool:
        _, version = self._before.get(id(master), (None, None))
        return version == master._version


def _version(tensor: torch.Tensor) -> int:
    """Return a version counter; for a DTensor the sum with its local tensor's, since either may be written."""
    local = getattr(tensor, "_local_tensor", None)
    return tensor._version + (0 if local is None else local._version)


def _in_groups(optimizer: Any) -> Iterator[Pair]:
    for holder in (optimizer, getattr(optimizer, "_amp_stash", None)):
        for low, full in _GROUPS:
            weights, masters = getattr(holder, low, None), getattr(holder, full, None)
            if isinstance(weights, Sequence) and isinstance(masters, Sequence):
                yield from zip(_flat(weights), _flat(masters), strict=False)
    weights, masters = getattr(optimizer, "param_groups", None), getattr(optimizer, "param_groups_master", None)
    if isinstance(weights, Sequence) and isinstance(masters, Sequence):
        for weight_group, master_group in zip(weights, masters, strict=False):
            yield from zip(weight_group["params"], master_group["params"], strict=False)


def _in_state(optimizer: Any) -> Iterator[Pair]:
    state = getattr(optimizer, "state", None)
    if not isinstance(state, Mapping):
        return
    for weight, entry in list(state.items()):
        for name in _IN_STATE:
            if isinstance(weight, torch.Tensor) and hasattr(entry, "get") and entry.get(name) is not None:
                yield weight, entry[name]


def _flat(groups: Sequence[Any]) -> Iterator[Any]:
    for group in groups:
        if isinstance(group, (list, tuple)):
            yield from group
        else:
            yield group


def _is_pair(weight: Any, master: Any) -> bool:
    tensors = isinstance(weight, torch.Tensor) and isinstance(master, torch.Tensor)
    return tensors and weight is not master and weight.shape == master.shape and master.is_floating_point()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor, for comparison: NaN does not equal itself, but its bits do."""
    local = getattr(tensor, "_local_tensor", tensor)
    return flat_bytes(local)
