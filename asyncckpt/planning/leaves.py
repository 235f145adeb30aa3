"""The object leaves of a state dict as typed JSON, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asyncckpt.errors import UnsupportedLeafError
from asyncckpt.format import objects
from asyncckpt.format.names import DCP, SAFETENSORS
from asyncckpt.planning.dcp_leaves import check_dcp_objects
from asyncckpt.planning.flattened import Flattened, object_fqn
from asyncckpt.planning.numpy_values import decode_scalar, encode_scalar, is_array
from asyncckpt.planning.pickles import encode_pickle
from asyncckpt.planning.torch_types import decode_torch, encode_torch

Unpickle = Callable[[str, bytes], Any]
"""Makes a value of (name of its type, bytes), or refuses."""


def encode_leaves(flat: Flattened, layout: str = SAFETENSORS) -> list[Any]:
    """Return the JSON forms of all object leaves, in order.

    Args:
        flat: The state dict.
        layout: What it is written as, one of `format.names.LAYOUTS`.

    Raises:
        UnsupportedLeafError: A leaf of a type that cannot be stored; `leaf` is the path to it.
    """
    extend = _extend_or_pickle if flat.allow_pickle else _extend
    out = []
    for number, value in enumerate(flat.objects):
        if type(value) in (bool, type(None)) or (type(value) is str and value.isascii()):
            out.append(value)  # by far the most, and JSON keeps them
            continue
        try:
            out.append(objects.encode_value(value, extend))
        except objects.UnknownTypeError as error:
            raise _refusal(flat, number, error.value, error) from error.__cause__
    if layout == DCP:
        check_dcp_objects(flat.tree, out)
    return out


def _extend(value: Any) -> tuple[str, Any] | None:
    return encode_torch(value) or encode_scalar(value)


def _extend_or_pickle(value: Any) -> tuple[str, Any] | None:
    found = _extend(value)
    if found is not None or isinstance(value, tuple):  # a namedtuple is a tuple
        return found
    try:
        return encode_pickle(value)
    except Exception as error:
        raise objects.UnknownTypeError(value) from error


def _refusal(flat: Flattened, number: int, value: Any, error: objects.UnknownTypeError) -> UnsupportedLeafError:
    leaf, kind = object_fqn(flat.tree, number), type(value).__name__
    if error.__cause__ is not None:
        why = f"type {kind} cannot be pickled: {error.__cause__}"
    elif is_array(value):
        why = f"torch has no dtype for an array of {value.dtype}; allow_pickle=True on both sides would pickle it"
    else:
        why = f"type {kind} cannot be stored; allow_pickle=True on both sides would pickle it"
    return UnsupportedLeafError(f"state dict leaf {leaf!r}: {why}", leaf=leaf, type_name=kind)


def decode_leaf(raw: Any, unpickle: Unpickle) -> Any:
    """Return the Python value of one object leaf's JSON form, of torch's and numpy's types too.

    Args:
        raw: The JSON form.
        unpickle: Asked for a leaf that was pickled.

    Raises:
        ValueError: Malformed.
    """

    def make(tag: str, payload: Any) -> Any:
        if tag == "numpy.scalar":
            return decode_scalar(payload)
        return unpickle(*objects.pickled(payload)) if tag in objects.PICKLED_TAGS else decode_torch(tag, payload)

    return objects.decode_value(raw, make)
