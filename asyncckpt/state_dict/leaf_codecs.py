"""Object leaves of a state dict -> typed JSON, and back; and checks that layout "dcp" can store all leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from asyncckpt.errors import UnsupportedLeafError
from asyncckpt.format import objects
from asyncckpt.format.dcp import item_pickle, items_of, refusal_of
from asyncckpt.format.names import DCP, SAFETENSORS
from asyncckpt.format.state_tree import OBJECT, TENSOR, Node, fqn_of
from asyncckpt.format.torch_pickle import NotPickledError
from asyncckpt.state_dict.composite_tensors import Instance
from asyncckpt.state_dict.flatten import Flattened, composite_kind, is_equal, object_fqn
from asyncckpt.state_dict.numpy_values import decode_scalar, encode_scalar, is_array
from asyncckpt.state_dict.pickling import encode_pickle

Unpickle = Callable[[str, bytes], Any]
"""(name of a type, bytes of a pickle) -> the value; raises if it is not allowed or fails."""


def encode_leaves(flat: Flattened, layout: str = SAFETENSORS) -> list[Any]:
    """Return the JSON forms of all object leaves, in order.

    Args:
        flat: The flattened state dict.
        layout: Format of the shard files, one of `format.names.LAYOUTS`.

    Raises:
        UnsupportedLeafError: A leaf has a type that cannot be stored; `leaf` is its FQN.
    """
    extend = _extend_or_pickle if flat.allow_pickle else _extend
    out: list[Any] = []
    try:
        for form in objects.encode_values(flat.objects, extend):
            out.append(form)
    except objects.UnknownTypeError as error:
        raise _refusal(flat, len(out), error.value, error) from error.__cause__
    if layout == DCP:
        check_dcp_objects(flat.tree, out)
    return out


def _extend(value: Any) -> tuple[str, Any] | None:
    if isinstance(value, Instance):
        return "instance", [value.form, value.kind, objects.encode_value(value.values, _extend)]
    return encode_torch(value) or encode_scalar(value)


def _extend_or_pickle(value: Any) -> tuple[str, Any] | None:
    if isinstance(value, Instance):
        return "instance", [value.form, value.kind, objects.encode_value(value.values, _extend_or_pickle)]
    found = _extend(value)
    if found is not None or isinstance(value, tuple):  # a namedtuple is a tuple
        return found
    try:
        return encode_pickle(value)
    except Exception as error:
        raise objects.UnknownTypeError(value) from error


def _refusal(flat: Flattened, number: int, value: Any, error: objects.UnknownTypeError) -> UnsupportedLeafError:
    leaf, kind = object_fqn(flat.tree, number), type(value).__name__
    of = composite_kind(flat.tree, number)
    if of is not None:
        why = f"the context of its class, {of}, contains a {kind}, which is stored only by pickle (allow_pickle=True)"
    elif error.__cause__ is not None:
        why = f"type {kind} cannot be pickled: {error.__cause__}"
    elif is_array(value):
        why = f"torch has no dtype for an array of {value.dtype}; with allow_pickle=True in save and load it is pickled"
    else:
        why = f"type {kind} cannot be stored; with allow_pickle=True in save and load it is pickled"
    return UnsupportedLeafError(f"state dict leaf {leaf!r}: {why}", leaf=leaf, type_name=kind)


def decode_leaf(raw: Any, unpickle: Unpickle) -> Any:
    """Return the Python value of the JSON form of an object leaf, including types of torch and numpy.

    Args:
        raw: The JSON form.
        unpickle: Called for a leaf that was pickled.

    Raises:
        ValueError: The form is malformed.
    """

    def make(tag: str, payload: Any) -> Any:
        if tag == "numpy.scalar":
            return decode_scalar(payload)
        if tag == "instance":
            return _instance(payload, make)
        return unpickle(*objects.pickled(payload)) if tag in objects.PICKLED_TAGS else decode_torch(tag, payload)

    if not isinstance(raw, (dict, list)):
        return raw  # most leaves are of types that JSON stores unchanged
    try:
        return objects.decode_value(raw, make)
    except RecursionError as error:
        raise ValueError("the values of a leaf are nested too deeply") from error


def is_same_leaf(one: Any, other: Any) -> bool:
    """Whether two object leaves have the same value, types included."""
    try:
        return bool(objects.encode_value(one, _extend) == objects.encode_value(other, _extend))
    except objects.UnknownTypeError:  # values that are pickled
        return is_equal(one, other)


def _instance(payload: Any, make: objects.Make) -> Instance:
    form, kind, values = payload
    if form not in ("enum", "dataclass", "namedtuple") or type(kind) is not str:
        raise ValueError(f"{form!r} of {kind!r} is no enum, dataclass or named tuple")
    found = objects.decode_value(values, make)
    if type(found) is not {"enum": str, "dataclass": dict, "namedtuple": list}[form]:
        raise ValueError(f"the values of a {form} are a {type(found).__name__}")
    if form == "dataclass" and not all(type(name) is str for name in found):
        raise ValueError("a field of a dataclass has no name")
    return Instance(form, kind, found)


def encode_torch(value: Any) -> tuple[str, Any] | None:
    """Return (tag, payload) of a torch dtype, device or size; None for anything else."""
    if isinstance(value, torch.dtype):
        return "torch.dtype", str(value).removeprefix("torch.")
    if isinstance(value, torch.device):
        return "torch.device", str(value)
    if isinstance(value, torch.Size):
        return "torch.Size", list(value)
    return None


def decode_torch(tag: str, payload: Any) -> Any:
    """Return the dtype, device or size of a tag and payload.

    Raises:
        ValueError: The payload is malformed.
    """
    if tag == "torch.Size":
        return torch.Size(payload)
    if tag == "torch.device":
        return torch.device(payload)
    found = getattr(torch, str(payload), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"unknown torch dtype {payload!r}")
    return found


def check_dcp_items(tree: Node) -> None:
    """Check that every leaf of a tree can be an item of `torch.distributed.checkpoint`. Ignores the types of objects.

    Raises:
        UnsupportedLeafError: A leaf cannot; names the first.
    """
    for item in items_of(tree):
        why = refusal_of(item.node)
        if why is not None:
            raise _refused(fqn_of(item.path), why)


def check_dcp_objects(tree: Node, objects: Sequence[Any]) -> None:
    """Check that the objects of a tree have a form that `torch.load(weights_only=True)` reads.

    Args:
        tree: Tree of the state dict.
        objects: JSON forms by object number.

    Raises:
        UnsupportedLeafError: An object has no such form; names the first.
    """
    for item in items_of(tree):
        if item.node[0] != TENSOR and not _is_plain(item.node, objects):
            try:
                item_pickle(item.node, objects)
            except NotPickledError as error:
                raise _refused(fqn_of(item.path), str(error)) from error


def _is_plain(node: Node, objects: Sequence[Any]) -> bool:
    """Whether an object is None, a bool, an int, a float or a str, which need no check; most objects are."""
    return node[0] == OBJECT and type(objects[node[1]]) in (type(None), bool, int, float, str)


def _refused(leaf: str, what: str) -> UnsupportedLeafError:
    return UnsupportedLeafError(
        f"state dict leaf {leaf!r}: layout='dcp' cannot store {what}; layout='safetensors' can",
        leaf=leaf,
        type_name=what.removeprefix("a ").partition(",")[0],
    )
