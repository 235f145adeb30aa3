"""The object leaves of a state dict as typed JSON."""

from __future__ import annotations

from typing import Any

from asyncckpt.errors import UnsupportedLeafError
from asyncckpt.format import objects
from asyncckpt.format.tree import fqn_of
from asyncckpt.planning.state_dict import Flattened
from asyncckpt.planning.torch_types import extend


def encode_leaves(flat: Flattened) -> list[Any]:
    """Return the JSON forms of all object leaves, in order.

    Raises:
        UnsupportedLeafError: A leaf of a type that cannot be stored; `leaf` is the path to it.
    """
    out = []
    for number, value in enumerate(flat.objects):
        if type(value) in (bool, type(None)) or (type(value) is str and value.isascii()):
            out.append(value)  # by far the most, and JSON keeps them
            continue
        try:
            out.append(objects.encode_value(value, extend))
        except objects.UnknownTypeError as error:
            leaf, kind = fqn_of(flat.object_path(number)), type(error.value).__name__
            advice = "; pass its state_dict()" if hasattr(error.value, "state_dict") else ""
            raise UnsupportedLeafError(
                f"state dict leaf {leaf!r}: type {kind} cannot be stored{advice}", leaf=leaf, type_name=kind
            ) from None
    return out
