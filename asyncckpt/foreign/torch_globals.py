"""The globals that a checkpoint's pickle may name, and what stands for each: torch's own list for `weights_only`, the
classes of a DCP directory's metadata, and numpy's scalars and arrays.

Sources: torch 2.13 `_weights_only_unpickler.py`; `distributed/checkpoint/metadata.py` and `filesystem.py`.
"""

from __future__ import annotations

import posixpath
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

from asyncckpt.dtypes import DTYPES
from asyncckpt.foreign.long_values import LongBytes, LongText, held
from asyncckpt.foreign.numpy_globals import NUMPY
from asyncckpt.foreign.pickle_values import (
    ENCODE,
    Defaulting,
    LayoutText,
    Maker,
    PathText,
    Tally,
    keys_of,
    shown,
)
from asyncckpt.foreign.refusals import UnpicklingError
from asyncckpt.foreign.strangers import Stranger, made_by
from asyncckpt.format.objects import Opaque
from asyncckpt.format.records import Record
from asyncckpt.format.tree import FACTORIES, UNSTORED_FACTORY

STORAGES = {
    **{"Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64"},
    **{"Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool"},
    **{"ComplexFloat": "complex64", "ComplexDouble": "complex128"},
}
"""Of torch's classes of typed storages, by what their names begin with: the dtype. Others have bytes."""
_BUILTIN_DTYPES = {"float": "float32", "double": "float64", "half": "float16", "int": "int32", "long": "int64"}
_METADATA = "torch.distributed.checkpoint.metadata"
_RECORDS = (
    *(f"{_METADATA}.{n}" for n in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata")),
    *(f"{_METADATA}.{n}" for n in ("ChunkStorageMetadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
    "torch.distributed._shard.metadata.ShardMetadata",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
)
_MAX_PATH_CHARS = 1 << 16
_MAX_ATTRIBUTES = 9


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A storage outside of the pickle: its key, its dtype's name (None: bytes), its length in elements."""

    key: str
    dtype: str | None
    numel: int


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor: which storage, from which element on, and how.

    And what most checkpoints do not keep of it: names of its Python attributes, whether it was a Parameter, and
    whether it required gradients.
    """

    storage: StorageRef
    dtype: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    attributes: tuple[str, ...] = ()
    is_parameter: bool = False
    requires_grad: bool = False


def size_of(value: Any) -> tuple[int, ...]:
    """Return a shape: of a `torch.Size`, a tuple or a list.

    Raises:
        UnpicklingError: Not one.
    """
    members = value.payload if isinstance(value, Opaque) and value.tag == "torch.Size" else value
    if not isinstance(members, (tuple, list)) or any(type(n) is not int or not 0 <= n < 1 << 62 for n in members):
        raise UnpicklingError(f"{shown(value)} is no shape")
    return tuple(members)


def dtype_of(value: Any) -> str:
    """Return a dtype's name.

    Raises:
        UnpicklingError: Not a dtype, or one that is not in the table.
    """
    if isinstance(value, Opaque) and value.tag == "torch.dtype" and value.payload in DTYPES:
        return str(value.payload)
    raise UnpicklingError(f"{shown(value)} is no dtype that can be stored")


def storage_of(pid: Any) -> StorageRef | Stranger:
    """Return the storage that a persistent id of `torch.save` names; of a class that is a stranger, that.

    Raises:
        UnpicklingError: Malformed.
    """
    if type(pid) is not tuple or len(pid) < 5 or pid[0] != "storage" or not isinstance(pid[1], (Maker, Stranger)):
        raise UnpicklingError(f"{shown(pid)} is no storage")
    if isinstance(pid[1], Stranger):
        return pid[1]
    kind, key, numel = pid[1].name.rpartition(".")[2], pid[2], pid[4]
    if not kind.endswith("Storage") or type(key) is not str or type(numel) is not int or numel < 0:
        raise UnpicklingError(f"{shown(pid)} is no storage")
    if len(pid) > 5 and pid[5] is not None:
        raise UnpicklingError("a view of a storage, as torch wrote before version 0.4")
    dtype = STORAGES.get(kind.removesuffix("Storage"))
    if dtype is None and kind != "UntypedStorage":
        raise UnpicklingError(f"a storage of type {kind}, which cannot be read")
    return StorageRef(key, dtype, numel)


UNRESOLVED = "torch.Tensor with its conj or neg bit set"
"""Its elements are not what lies in the file, and nothing here computes: `resolve_conj()` before saving helps."""


def _tensor(
    storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any = False, hooks: Any = None, math: Any = None
) -> TensorRef | Stranger:
    if type(storage) is not StorageRef or storage.dtype is None:
        raise UnpicklingError("a tensor without a typed storage")
    made = TensorRef(storage, storage.dtype, offset, size_of(size), size_of(stride), requires_grad=bool(requires_grad))
    return Stranger(UNRESOLVED, _checked(made)) if math else _checked(made)


def _tensor_v3(
    storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, dtype: Any, math: Any = None
) -> TensorRef | Stranger:
    if type(storage) is not StorageRef:
        raise UnpicklingError("a tensor without a storage")
    made = TensorRef(
        storage, dtype_of(dtype), offset, size_of(size), size_of(stride), requires_grad=bool(requires_grad)
    )
    return Stranger(UNRESOLVED, _checked(made)) if math else _checked(made)


def _checked(tensor: TensorRef) -> TensorRef:
    if type(tensor.offset) is not int or tensor.offset < 0 or len(tensor.size) != len(tensor.stride):
        raise UnpicklingError("a tensor whose shape and strides do not fit")
    last = tensor.offset + sum((n - 1) * s for n, s in zip(tensor.size, tensor.stride, strict=True))
    held = DTYPES[tensor.storage.dtype or "uint8"].itemsize * tensor.storage.numel
    if 0 not in tensor.size and (last + 1) * DTYPES[tensor.dtype].itemsize > held:
        raise UnpicklingError(f"a tensor of shape {list(tensor.size)} reaches beyond its storage")
    return tensor


def _parameter(data: Any, requires_grad: Any = False, hooks: Any = None, state: Any = None) -> TensorRef:
    if type(data) is not TensorRef:
        raise UnpicklingError("a parameter that holds no tensor")
    return _with_attributes(replace(data, is_parameter=True, requires_grad=bool(requires_grad)), state)


def _with_attributes(tensor: TensorRef, state: Any) -> TensorRef:
    parts = state if type(state) is tuple else (state,)  # of a class with __slots__ there are two
    names = [name for part in parts if type(part) is dict for name in part if type(name) is str]
    return replace(tensor, attributes=(*tensor.attributes, *names[:_MAX_ATTRIBUTES])) if names else tensor


def _from_type(maker: Any, kind: Any, arguments: Any, state: Any) -> TensorRef | Stranger:
    if type(maker) is not Maker or maker.make is None or not maker.name.startswith("torch._utils._rebuild"):
        raise UnpicklingError(f"a tensor that {shown(maker)} makes")
    if type(kind) is not Maker or kind.name not in ("torch.Tensor", "torch.nn.parameter.Parameter"):
        raise UnpicklingError(f"a tensor of class {shown(kind)}", shown(kind))
    made = made_by(maker, arguments)
    if type(made) is Stranger:
        return made
    is_parameter = kind.name.endswith("Parameter")
    return _parameter(made, made.requires_grad, state=state) if is_parameter else _with_attributes(made, state)


_DEVICES = frozenset(
    {
        *("cpu", "cuda", "fpga", "hip", "hpu", "ideep", "ipu", "lazy", "maia", "meta", "mkldnn", "mps", "mtia"),
        *("opencl", "opengl", "privateuseone", "ve", "vulkan", "xla", "xpu"),
    }
)
"""Of torch 2.13, c10/core/DeviceType.h. A backend of its own may have given itself another name, elsewhere."""

_MAX_DEVICES = 128


def _device(kind: Any, index: Any = None) -> Opaque | Stranger:
    if type(kind) is not str or type(index) not in (int, type(None)):
        raise UnpicklingError("a device that is none")
    if kind not in _DEVICES or not 0 <= (index or 0) < _MAX_DEVICES:
        return Stranger(f"torch.device {kind[:99]}")
    return Opaque("torch.device", kind if index is None else f"{kind}:{index}")


def _encoded(text: str | LongText, encoding: str) -> bytes | LongBytes:
    if encoding != "latin1":
        raise UnpicklingError("bytes in another encoding than latin1")
    return text.latin1() if isinstance(text, LongText) else text.encode("latin1")


def _pairs(members: Any) -> list[tuple[Any, Any]]:
    found = [(key, value) for key, value in (members.items() if isinstance(members, dict) else members)]
    return list(zip(keys_of(key for key, _ in found), (value for _, value in found), strict=True))


def _ordered(members: Any = ()) -> OrderedDict[Any, Any]:
    return OrderedDict(_pairs(members))


def _counter(members: Any = ()) -> Tally:
    return Tally(_pairs(members))


def _defaulting(factory: Any = None) -> Defaulting:
    found = Defaulting()
    if factory is not None:
        name = factory.name.removeprefix("builtins.") if isinstance(factory, (Maker, Stranger)) else ""
        found.factory = name if name in FACTORIES else UNSTORED_FACTORY
    return found


def _layout(name: Any) -> LayoutText:
    if type(name) is not str:
        raise UnpicklingError("a layout without a name")
    return LayoutText(name)


def _empty_bytes(*arguments: Any) -> bytes:
    """What protocol 2 calls for bytes of which there are none; others are encoded texts."""
    if arguments:
        raise UnpicklingError("bytes made of something")
    return b""


def _posix_path(*parts: Any) -> PathText:
    if not all(type(part) is str for part in parts) or sum(map(len, parts)) > _MAX_PATH_CHARS:
        raise UnpicklingError("a path that is none")
    return PathText(posixpath.join(*parts) if parts else ".")


def _bytearray(*arguments: Any) -> bytearray:
    data = arguments[0] if arguments else b""
    if len(arguments) == 2:
        data = held(_encoded(*arguments))
    if type(data) is not bytes:
        raise UnpicklingError("a bytearray of something else than bytes")
    return bytearray(data)


def _makers() -> dict[str, Maker]:
    made: dict[str, Any] = {
        "collections.OrderedDict": _ordered,
        "collections.Counter": _counter,
        "collections.defaultdict": _defaulting,
        ENCODE: _encoded,
        "builtins.bytearray": _bytearray,
        "builtins.bytes": _empty_bytes,
        "builtins.set": lambda members=(): set(keys_of(members)),
        "builtins.frozenset": lambda members=(): frozenset(keys_of(members)),
        "builtins.complex": lambda real, imag=0.0: complex(real, imag),
        "builtins.slice": slice,
        "torch.Size": lambda members=(): Opaque("torch.Size", list(size_of(members))),
        "torch.device": _device,
        "torch.serialization._get_layout": _layout,
        "torch._utils._rebuild_tensor": _tensor,
        "torch._utils._rebuild_tensor_v2": _tensor,
        "torch._utils._rebuild_tensor_v3": _tensor_v3,
        "torch._utils._rebuild_parameter": _parameter,
        "torch._utils._rebuild_parameter_with_state": _parameter,
        "torch._tensor._rebuild_from_type_v2": _from_type,
        f"{_METADATA}._MEM_FORMAT_ENCODING": lambda value: value,
        "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING": lambda value: value,
    }
    for module in ("pathlib", "pathlib._local"):
        made[f"{module}.PosixPath"] = made[f"{module}.PurePosixPath"] = _posix_path
    made |= NUMPY
    for name in _RECORDS:
        made[name] = lambda name=name: Record(name.rpartition(".")[2])
    known = {name: Maker(name, make) for name, make in made.items()}
    inert = ["numpy.ndarray", "torch.Tensor", "torch.nn.parameter.Parameter", "torch.storage.UntypedStorage"]
    inert += ["torch.storage.TypedStorage", "builtins.list", "builtins.dict", "builtins.int", "builtins.float"]
    inert += [f"{module}.{kind}Storage" for module in ("torch", "torch.cuda") for kind in (*STORAGES, "Untyped")]
    known |= {name: Maker(name) for name in inert}
    return known


KNOWN: dict[str, Any] = {
    **{f"torch.{name}": Opaque("torch.dtype", name) for name in DTYPES},
    **{f"torch.{name}": Opaque("torch.dtype", real) for name, real in _BUILTIN_DTYPES.items()},
    **_makers(),
}
"""By full name: a `Maker`; or, of a dtype, the value itself."""
