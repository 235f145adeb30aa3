"""Tensors that are stored as their component tensors: subclasses, sparse, quantized and jagged tensors.

A tensor subclass implements torch's protocol of traceable wrappers: `__tensor_flatten__` returns the names of its
component tensors and a context, `__tensor_unflatten__` makes a tensor of them. The components are stored like any other
tensor. The context, whatever the class puts there, is stored as an object, without pickle.

A class is looked up only to make a new tensor, and only among the types that the program has registered, and those of
`_KNOWN_MODULES` that it has imported. No name that is read from a file is imported.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from asyncckpt.errors import UnsupportedLeafError
from asyncckpt.format.objects import MAX_NESTING
from asyncckpt.format.state_tree import MAX_KIND_CHARS, OFFSETS, SHARDED, TENSOR_KINDS
from asyncckpt.sharding.dtensor import mesh_position_of, sharded_components
from asyncckpt.sharding.registry import is_dtensor
from asyncckpt.sharding.shard_types import ShardedComponent

_KNOWN_MODULES = (
    "torchao.optim.subclass_8bit",
    "torchao.optim.subclass_4bit",
    "torchao.optim.subclass_fp8",
    "torchao.quantization",
    "torchao.quantization.granularity",
    "torchao.quantization.quant_primitives",
    "torchao.quantization.quantize_.",
    "torchao.float8.inference",
)
"""Modules, and packages with a dot at their end, whose types are known as if the program had registered them, once it
has imported them."""

_NOT_STORED = ("torch._subclasses.", "torch._functorch.", "torch.distributed.")
"""Where torch's own wrappers are defined that stand for other tensors (fake and functional ones, unfinished
collectives), or that are stored as shards."""

TypeOf = Callable[[str], "type | None"]
"""(full name) -> the type; None: it is unknown."""

_registered: dict[str, type] = {}


class Composite(NamedTuple):
    """A tensor as its components.

    Attributes:
        kind: One of `TENSOR_KINDS`, or the full name of the class.
        tensors: The components by name: views of the tensor's memory; of a DTensor, `ShardedComponent` among them.
        rest: What else is needed to make the tensor: a dict of values that are stored as an object.
        types: By full name, the class of the tensor and the types of all `Instance` in `rest`.
    """

    kind: str
    tensors: Mapping[str, Any]
    rest: dict[str, Any]
    types: Mapping[str, type] = {}


class Instance(NamedTuple):
    """An enum member, a dataclass or a named tuple in the context of a subclass: its type's name and its values.

    Attributes:
        form: `enum`, `dataclass` or `namedtuple`.
        kind: Full name of the type.
        values: The name of the member; the values by field; or a list of values.
    """

    form: str
    kind: str
    values: Any


def type_name(kind: type) -> str:
    """Return the full name of a type, under which it is stored and looked up."""
    return f"{kind.__module__}.{kind.__qualname__}"


def register_subclass(kind: type) -> None:
    """Register a type for loads that make new tensors of a subclass: into a new state dict, or for a new optimizer.

    A target that holds such a tensor is filled in place, without this.

    Args:
        kind: A subclass of `torch.Tensor` with `__tensor_flatten__` and `__tensor_unflatten__`; or a dataclass, an enum
            or a named tuple that the context of such a class contains. It is found under its full name, with its
            module. A second type of the same name replaces the first.

    Raises:
        TypeError: `kind` is not such a type.
    """
    if not isinstance(kind, type) or _form_of(kind) is None:
        raise TypeError(
            f"register_subclass() expects a subclass of torch.Tensor with __tensor_flatten__ and __tensor_unflatten__, "
            f"or a dataclass, an enum or a named tuple, got {kind!r}"
        )
    _registered[type_name(kind)] = kind


def registered_type(name: str) -> type | None:
    """Return the type of a full name, if the program has registered it, or has imported a known module with it."""
    found = _registered.get(name)
    if found is not None or not _is_known(name):
        return found
    module, _, last = name.rpartition(".")
    value = getattr(sys.modules.get(module), last, None)
    if not isinstance(value, type) or type_name(value) != name or _form_of(value) is None:
        return None
    return value


def _is_known(name: str) -> bool:
    module = name.rpartition(".")[0]
    return any(module == one or (one.endswith(".") and module.startswith(one)) for one in _KNOWN_MODULES)


def how_to_register(name: str) -> str:
    """Return what a user does so that `registered_type` finds a name, for messages."""
    module, _, last = name.rpartition(".")
    if _is_known(name):
        return f"import {module} before the load"
    return f"call asyncckpt.register_subclass({last}) before the load"


def is_composite_class(kind: type) -> bool:
    """Whether a type of tensors implements torch's protocol of traceable wrappers, and is stored by it."""
    return (
        hasattr(kind, "__tensor_flatten__")
        and hasattr(kind, "__tensor_unflatten__")
        and not kind.__module__.startswith(_NOT_STORED)
    )


def _form_of(kind: type) -> str | None:
    """Return `tensor` for a subclass with components, or the `Instance.form` of a type; None for any other type."""
    if issubclass(kind, torch.Tensor):
        return "tensor" if is_composite_class(kind) else None
    if issubclass(kind, enum.Enum):
        return "enum"
    if dataclasses.is_dataclass(kind):
        return "dataclass"
    return "namedtuple" if issubclass(kind, tuple) and hasattr(kind, "_fields") else None


def decompose(value: torch.Tensor) -> Composite | None:
    """Return the components of a tensor; None: it is stored otherwise, or cannot be stored.

    Raises:
        UnsupportedLeafError: Its class names no tensors, or its layout cannot be stored; the caller adds the FQN.
    """
    if is_dtensor(value):
        return _of_dtensor(value)
    if type(value) is torch.Tensor or not is_composite_class(type(value)):
        describe = _DESCRIBERS.get(value.layout) or (_quantized if value.is_quantized else None)
        return None if describe is None else describe(value.detach())
    if value.is_nested and value.layout is torch.jagged:
        return _jagged(value)
    return _of_subclass(value)


def _of_subclass(value: Any) -> Composite:
    kind = type_name(type(value))
    if len(kind) > MAX_KIND_CHARS:
        raise _refused(value, f"the name of its class has more than {MAX_KIND_CHARS} characters")
    try:
        names, context = value.__tensor_flatten__()
        tensors = {name: getattr(value, name) for name in names}
    except Exception as error:  # whatever the class raises
        raise _refused(value, f"its __tensor_flatten__() failed: {type(error).__name__}: {error}") from error
    if not tensors:
        raise _refused(value, "its __tensor_flatten__() names no tensors")
    for name, tensor in tensors.items():
        if type(name) is not str or not isinstance(tensor, torch.Tensor):
            raise _refused(value, f"its __tensor_flatten__() names {name!r}, which is a {type(tensor).__name__}")
    try:
        size, stride = [int(n) for n in value.shape], [int(n) for n in value.stride()]
    except (TypeError, ValueError, RuntimeError) as error:  # symbolic sizes
        raise _refused(value, f"its sizes are no integers: {error}") from error
    types: dict[str, type] = {kind: type(value)}
    rest = {"context": _as_values(context, types), "size": size, "stride": stride}
    return Composite(kind, tensors, rest, types)


def _of_dtensor(value: Any) -> Composite | None:
    """Return the components of the local tensor of a DTensor, each as what this process holds of it.

    Components that are not sharded with the tensor are whole: equal on all ranks, or of this rank only.
    """
    local = value._local_tensor
    if hasattr(local, "wait"):
        local = local.wait()
    found = None if type(local) is torch.Tensor else decompose(local)
    if found is None:
        return None
    if found.kind in TENSOR_KINDS or any(decompose(tensor) is not None for tensor in found.tensors.values()):
        raise _refused(value, f"its local tensor is a {found.kind}; only subclasses of plain tensors are stored there")
    context = repr(found.rest["context"])
    sharded, offsets = sharded_components(value, local, found.tensors, context, _slice_of)
    rest = {**found.rest, "size": list(value.shape), "stride": list(value.stride())}
    rest[SHARDED] = {name: dict(component.dims) for name, component in sharded.items()}
    if offsets is not None:
        rest[OFFSETS] = list(offsets)
    return Composite(found.kind, {**found.tensors, **sharded}, rest, found.types)


Form = tuple[tuple[int, ...], torch.dtype]
"""(global shape, dtype) of a component."""


def new_dtensor_like(
    parameter: Any, kind: str, rest: Any, forms: Mapping[str, Form], known: Mapping[str, torch.Tensor], type_of: TypeOf
) -> torch.Tensor:
    """Return a new DTensor that is sharded like a parameter, of a saved composite tensor that was sharded.

    Args:
        parameter: A DTensor of the same shape.
        kind, rest: As in `Composite`; `rest` as decoded. All `needed_types` are known.
        forms: The forms of the components by name.
        known: Components by name that exist already, since another tensor has them too.
        type_of: As for `compose`.

    Raises:
        Exception: A component cannot be cut like the parameter, or has no place in the whole, or the class refuses the
            components.
    """
    position = mesh_position_of(parameter._spec)
    shape, local = tuple(parameter.shape), parameter._local_tensor
    boxes = () if position.coordinate is None else position.grid.boxes(shape, position.coordinate)
    if len(boxes) != 1:
        raise ValueError("this rank does not hold one box of it")
    tensors = {}
    for name, (global_shape, dtype) in forms.items():
        sizes = list(global_shape)
        for d, e in rest[SHARDED].get(name, {}).items():
            sizes[e], left = divmod(global_shape[e] * boxes[0][1][d], shape[d])
            if left:
                raise ValueError(f"its component {name} of shape {list(global_shape)} cannot be cut like it")
        tensors[name] = known[name] if name in known else torch.empty(sizes, dtype=dtype, device=local.device)
        if (list(tensors[name].shape), tensors[name].dtype) != (sizes, dtype):
            raise ValueError(f"its component {name!r} is shared with another tensor, which is sharded differently")
    own = {**rest, "size": list(boxes[0][1]), "stride": list(local.stride())}
    made: Any = compose(kind, tensors, own, type_of)
    found: torch.Tensor = type(parameter.data).from_local(
        made,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    described = _of_dtensor(found)
    for name, part in described.tensors.items() if described is not None else ():
        found_shape = tuple(part.found.global_shape if isinstance(part, ShardedComponent) else part.shape)
        if found_shape != forms[name][0]:  # the class has no slice of so small a part
            raise ValueError(f"the place of this rank's part of its component {name} in the whole is unknown")
        mine = part.found.shards[0].tensor if isinstance(part, ShardedComponent) else part
        if name in known and mine.data_ptr() != known[name].data_ptr():
            raise ValueError(f"its component {name!r} is shared with another tensor, and {kind} has made a copy of it")
    return found


def _slice_of(value: torch.Tensor, dim: int, length: int) -> Mapping[str, torch.Tensor] | None:
    try:
        with torch.no_grad():
            found = decompose(torch.ops.aten.slice.Tensor(value, dim, 0, length))
            own = decompose(value)
    except Exception:  # the class has no slices, or none of this length
        return None
    if found is None or own is None or found.tensors.keys() != own.tensors.keys():
        return None
    return found.tensors


def _as_values(context: Any, types: dict[str, type], depth: int = 0) -> Any:
    """Return a context with `Instance` in place of enum members, dataclasses and named tuples.

    Args:
        context: The context, or a value in it.
        types: Gets the types of these, by full name.
        depth: Number of containers around the value.
    """
    kind = type(context)
    form = _form_of(kind)
    if depth > MAX_NESTING or form == "tensor":
        return context  # refused when it is encoded
    if form is not None:
        types[type_name(kind)] = kind
        if form == "enum":
            return Instance(form, type_name(kind), context.name)
        if form == "dataclass":
            fields = [f.name for f in dataclasses.fields(context) if f.init]
            values: Any = {name: _as_values(getattr(context, name), types, depth + 1) for name in fields}
        else:
            values = [_as_values(member, types, depth + 1) for member in context]
        return Instance(form, type_name(kind), values)
    if kind is dict:
        return {key: _as_values(member, types, depth + 1) for key, member in context.items()}
    if kind is list or kind is tuple:
        return kind(_as_values(member, types, depth + 1) for member in context)
    return context


def needed_types(kind: str, rest: Any) -> list[tuple[str, str]]:
    """Return (full name, what it must be, as `_form_of` says) of the types that a new tensor needs.

    Args:
        kind, rest: As in `Composite`; `rest` as decoded.
    """
    return [] if kind in TENSOR_KINDS else [(kind, "tensor"), *_types_in(rest)]


def _types_in(values: Any) -> list[tuple[str, str]]:
    if isinstance(values, Instance):
        return [(values.kind, values.form), *_types_in(values.values)]
    members = values.values() if isinstance(values, dict) else values if isinstance(values, (list, tuple)) else ()
    return [found for member in members for found in _types_in(member)]


def check_rest(kind: str, rest: Any) -> dict[str, Any]:
    """Return a decoded `rest` of a file, checked as far as that is possible without the components.

    Raises:
        ValueError: It is malformed.
    """
    if not isinstance(rest, dict):
        raise ValueError(f"it is described by a {type(rest).__name__}, expected a dict")
    if kind in TENSOR_KINDS:
        return rest
    lengths = [rest.get("size"), rest.get("stride")]
    if "context" not in rest or not all(isinstance(one, list) and all(type(n) is int for n in one) for one in lengths):
        raise ValueError("it has no context, size or stride")
    sharded = rest.get(SHARDED, {})
    dims = sharded.values() if isinstance(sharded, dict) else (None,)
    if not all(isinstance(one, dict) and all(type(n) is int and n >= 0 for n in (*one, *one.values())) for one in dims):
        raise ValueError("its sharded components are malformed")
    return rest


def unknown_type(kind: str, rest: Any, type_of: TypeOf = registered_type) -> str | None:
    """Return the full name of the first of `needed_types` that is not registered; None: all of them are.

    Args:
        kind, rest: As for `needed_types`.
        type_of: Returns the type of a full name.
    """
    for name, form in needed_types(kind, rest):
        found = type_of(name)
        if found is None or _form_of(found) != form:
            return name
    return None


def _from_values(values: Any, type_of: TypeOf) -> Any:
    """Return a context from its decoded values; `type_of` knows all types."""
    if isinstance(values, Instance):
        kind: Any = type_of(values.kind)
        inner = _from_values(values.values, type_of)
        if values.form == "enum":
            return kind[inner]
        return kind(**inner) if values.form == "dataclass" else kind(*inner)
    if type(values) is dict:
        return {key: _from_values(member, type_of) for key, member in values.items()}
    if type(values) is list or type(values) is tuple:
        return type(values)(_from_values(member, type_of) for member in values)
    return values


def compose(
    kind: str,
    tensors: Mapping[str, torch.Tensor],
    rest: Any,
    type_of: TypeOf = registered_type,
) -> torch.Tensor:
    """Make a tensor from its components.

    Args:
        kind, tensors, rest: As in `Composite`; `rest` as decoded, so that it may hold anything.
        type_of: Returns the type of a full name. It knows all `needed_types`.

    Raises:
        Exception: The components do not fit together, or the class refuses them.
    """
    if kind in TENSOR_KINDS:
        return _MAKERS[kind](kind, tensors, rest)
    made: Any = type_of(kind)
    context = _from_values(rest["context"], type_of)
    size, stride = torch.Size(rest["size"]), tuple(rest["stride"])
    found = made.__tensor_unflatten__(dict(tensors), context, size, stride)
    if not isinstance(found, torch.Tensor):
        raise TypeError(f"its __tensor_unflatten__() returned a {type(found).__name__}")
    if found.shape != size:  # for example the context of one rank's part
        raise ValueError(f"its __tensor_unflatten__() returned a tensor of shape {list(found.shape)}, not {list(size)}")
    return found


def _refused(value: Any, why: str) -> UnsupportedLeafError:
    return UnsupportedLeafError(why, leaf="", type_name=type(value).__name__)


# ---- Sparse, quantized and jagged tensors


def _sparse_coo(value: Any) -> Composite:
    tensors = {"indices": value._indices(), "values": value._values()}
    rest = {"size": list(value.shape), "is_coalesced": value.is_coalesced()}
    return Composite("sparse_coo", tensors, rest)


_COMPRESSED = {
    "sparse_csr": ("crow_indices", "col_indices"),
    "sparse_csc": ("ccol_indices", "row_indices"),
    "sparse_bsr": ("crow_indices", "col_indices"),
    "sparse_bsc": ("ccol_indices", "row_indices"),
}


def _compressed(value: Any) -> Composite:
    kind = str(value.layout).removeprefix("torch.")
    tensors = {name: getattr(value, name)() for name in (*_COMPRESSED[kind], "values")}
    return Composite(kind, tensors, {"size": list(value.shape)})


def _jagged(value: Any) -> Composite:
    found = {"values": value._values, "offsets": value._offsets, "lengths": value._lengths}
    tensors = {name: tensor.detach() for name, tensor in found.items() if tensor is not None}
    # `offsets` itself: two tensors that share it have the same ragged size.
    tensors["offsets"] = value._offsets
    rest = {
        "ragged_idx": value._ragged_idx,
        "min_seqlen": value._maybe_min_seqlen,
        "max_seqlen": value._maybe_max_seqlen,
    }
    return Composite("jagged", tensors, rest)


_INTEGERS = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}
"""The integers of quantized dtypes. The elements of other quantized dtypes share bytes."""


def _quantized(value: Any) -> Composite:
    kind = str(value.qscheme()).removeprefix("torch.")
    if kind not in TENSOR_KINDS:
        raise _refused(value, f"its quantization scheme is {value.qscheme()}")
    rest: dict[str, Any] = {"dtype": str(value.dtype).removeprefix("torch."), "size": list(value.shape)}
    tensors = {"data": _bytes_of(value)}
    if kind == "per_tensor_affine":
        rest |= {"scale": value.q_scale(), "zero_point": value.q_zero_point()}
    else:
        rest["axis"] = value.q_per_channel_axis()
        tensors |= {"scales": value.q_per_channel_scales(), "zero_points": value.q_per_channel_zero_points()}
    return Composite(kind, tensors, rest)


def _bytes_of(value: torch.Tensor) -> torch.Tensor:
    """Return the integers of a quantized tensor as a view; where elements share bytes, the bytes."""
    integer = _INTEGERS.get(value.dtype)
    if integer is not None:
        empty = torch.empty(0, dtype=integer, device=value.device)
        return empty.set_(value.untyped_storage(), value.storage_offset(), value.shape, value.stride())
    if not value.is_contiguous() or value.storage_offset():
        raise _refused(value, f"a {value.dtype} tensor is stored only if it is contiguous; pass a clone()")
    empty = torch.empty(0, dtype=torch.uint8, device=value.device)
    nbytes = math.ceil(value.numel() / _PER_BYTE[value.dtype])
    return empty.set_(value.untyped_storage(), 0, (nbytes,), (1,))


_PER_BYTE = {torch.quint4x2: 2, torch.quint2x4: 4}
_QUANTIZED = {str(dtype).removeprefix("torch."): dtype for dtype in (*_INTEGERS, *_PER_BYTE)}

_DESCRIBERS: dict[Any, Callable[[Any], Composite]] = {
    torch.sparse_coo: _sparse_coo,
    **{getattr(torch, name): _compressed for name in _COMPRESSED},
}


def _make_sparse_coo(_: str, tensors: Mapping[str, torch.Tensor], rest: Any) -> torch.Tensor:
    found = torch.sparse_coo_tensor(tensors["indices"], tensors["values"], rest["size"], check_invariants=True)
    if rest["is_coalesced"] is not True:
        return found
    # IMPORTANT: a file may say that unsorted or repeated indices are coalesced. Kernels would then read out of order.
    again = found.coalesce()
    if not torch.equal(again._indices(), found._indices()):
        raise ValueError("its indices are not coalesced, as it says")
    return found._coalesced_(True)


def _make_compressed(kind: str, tensors: Mapping[str, torch.Tensor], rest: Any) -> torch.Tensor:
    compressed, plain = (tensors[name] for name in _COMPRESSED[kind])
    layout = getattr(torch, kind)
    return torch.sparse_compressed_tensor(
        compressed, plain, tensors["values"], rest["size"], layout=layout, check_invariants=True
    )


def _make_jagged(_: str, tensors: Mapping[str, torch.Tensor], rest: Any) -> torch.Tensor:
    values, offsets, lengths = tensors["values"], tensors["offsets"], tensors.get("lengths")
    dim = rest["ragged_idx"]
    if type(dim) is not int or not 1 <= dim <= values.dim() or offsets.dim() != 1 or not offsets.numel():
        raise ValueError("its offsets do not fit its values")
    if offsets.dtype not in (torch.int32, torch.int64) or (lengths is not None and lengths.dtype != offsets.dtype):
        raise ValueError(f"its offsets are {offsets.dtype}")
    ends = offsets[1:] if lengths is None else offsets[:-1] + lengths
    if bool((offsets < 0).any()) or bool((ends > values.shape[dim - 1]).any()) or bool((ends < offsets[:-1]).any()):
        raise ValueError("its offsets are not inside its values")
    seqlens = [rest["min_seqlen"], rest["max_seqlen"]]
    if not all(n is None or type(n) is int for n in seqlens):
        raise ValueError("its sequence lengths are no integers")
    return torch.nested.nested_tensor_from_jagged(
        values, offsets, lengths, jagged_dim=dim, min_seqlen=seqlens[0], max_seqlen=seqlens[1]
    )


def _make_quantized(kind: str, tensors: Mapping[str, torch.Tensor], rest: Any) -> torch.Tensor:
    data, dtype, size = tensors["data"], _QUANTIZED[rest["dtype"]], torch.Size(rest["size"])
    device = data.device
    own = (size, _INTEGERS.get(dtype, torch.uint8))
    if dtype in _PER_BYTE:
        own = (torch.Size([math.ceil(size.numel() / _PER_BYTE[dtype])]), torch.uint8)
    if own != (data.shape, data.dtype):  # before memory is allocated
        raise ValueError(f"its data are {data.dtype}{list(data.shape)}, expected {own[1]}{list(own[0])}")
    if kind == "per_tensor_affine":
        scale, zero_point = float(rest["scale"]), int(rest["zero_point"])
        made = torch._empty_affine_quantized(size, scale=scale, zero_point=zero_point, dtype=dtype, device=device)
    else:
        scales, zero_points, axis = tensors["scales"], tensors["zero_points"], int(rest["axis"])
        if not 0 <= axis < len(size) or scales.shape != (size[axis],) or zero_points.shape != scales.shape:
            raise ValueError("its scales do not fit its size")
        made = torch._empty_per_channel_affine_quantized(
            size, scales=scales, zero_points=zero_points, axis=axis, dtype=dtype, device=device
        )
    _bytes_of(made).copy_(data)
    return made


_MAKERS: dict[str, Callable[[str, Mapping[str, torch.Tensor], Any], torch.Tensor]] = {
    "sparse_coo": _make_sparse_coo,
    **{name: _make_compressed for name in _COMPRESSED},
    "jagged": _make_jagged,
    **{name: _make_quantized for name in TENSOR_KINDS if name.startswith("per_")},
}
