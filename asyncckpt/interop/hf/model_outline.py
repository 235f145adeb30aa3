"""`ModelOutline`: what an export compares with a checkpoint of a model, without the model: names, shapes and ties."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from asyncckpt.state_dict.stateful import BareNames


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOutline:
    """What is known of a model. Its fields are JSON values, so that another process can have it.

    Attributes:
        architecture: Name of the model's class.
        shapes: Shapes of the tensors of its state dict, by name.
        tied: Names of tensors that the model ties to others itself, with the names of those.
    """

    architecture: str
    shapes: dict[str, list[int]]
    tied: dict[str, str]


def outline_of_model(model: Any, state: Mapping[str, Any] | None = None) -> ModelOutline:
    """Return the outline of a model.

    Args:
        model: The model.
        state: What `bare_state_of` has returned for it. None calls that, which may be a collective of several ranks.
    """
    state = bare_state_of(model) if state is None else state
    return ModelOutline(
        architecture=type(model).__name__.removeprefix("FSDP"),  # `fully_shard` makes a subclass of that name
        shapes={name: list(value.shape) for name, value in state.items() if hasattr(value, "shape")},
        tied=_tied_names(model),
    )


def bare_state_of(model: Any) -> Any:
    """Return the state dict of a model, under the names that it has in a checkpoint: without wrappers of submodules.

    Calls `state_dict()` of the model, which may be a collective of several ranks.
    """
    state = model.state_dict()
    return BareNames(model).strip(state) if isinstance(model, torch.nn.Module) else state


def is_model(value: Any) -> bool:
    """Return whether a value is a model: it has `state_dict()` and `named_parameters()`."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "named_parameters", None))


def _tied_names(model: Any) -> dict[str, str]:
    """Return the names of tensors that a model ties to others itself, with the names of those.

    A model of transformers declares them. Of any other model, they are the parameters and buffers that it holds under
    an earlier name too.
    """
    declared = getattr(model, "all_tied_weights_keys", None)
    if isinstance(declared, Mapping):
        return {str(name): str(to) for name, to in declared.items() if name != to}
    bare_name = BareNames(model).of if isinstance(model, torch.nn.Module) else str
    firsts: dict[int, str] = {}
    found = {}
    for names in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, value in ((bare_name(name), value) for name, value in names):
            first = firsts.setdefault(id(value), name)
            if first != name:
                found[name] = first
    return found
