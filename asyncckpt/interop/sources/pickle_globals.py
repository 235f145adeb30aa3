"""The globals that a checkpoint's pickle may name, and what stands for each: torch's own list for `weights_only`, the
classes of a DCP directory's metadata, and numpy's scalars and arrays.

Sources: torch 2.13 `_weights_only_unpickler.py`; `distributed/checkpoint/metadata.py` and `filesystem.py`; numpy 2
`_core/src/multiarray/descriptor.c` (what a dtype is pickled as).
"""

from __future__ import annotations

import math
import posixpath
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from asyncckpt.dtypes import DTYPES
from asyncckpt.format.objects import Opaque, Record, checked_numpy_scalar, numpy_scalar_value
from asyncckpt.format.state_tree import FACTORIES, UNSTORED_FACTORY
from asyncckpt.format.torch_pickle import STORAGES
from asyncckpt.interop.sources.unpickler import (
    CounterDict,
    DefaultDict,
    LayoutText,
    Maker,
    OpaqueGlobal,
    PathText,
    UnpicklingError,
    keys_of,
    made_by,
    shown,
)
from asyncckpt.storage.contents import Located, Strided


def _scalar(dtype: Any, data: Any) -> Opaque | OpaqueGlobal:
    if type(dtype) is not Record or type(data) not in (bytes, Record):
        raise UnpicklingError("a numpy scalar without dtype and bytes")
    try:
        payload = [dtype_text(dtype), data.hex() if type(data) is bytes else ""]
        numpy_scalar_value(*checked_numpy_scalar(payload))
    except ValueError as error:  # its type is no plain number, or too wide for other platforms
        return OpaqueGlobal(f"numpy scalar, {error}")
    return Opaque("numpy.scalar", payload)


def dtype_text(dtype: Record) -> str:
    """Return a numpy dtype in the notation of the array protocol, such as `<f4` or `<M8[ns]`.

    Raises:
        UnpicklingError: It is big-endian or has fields.
    """
    state, text = dtype.state, dtype.kind.partition(" ")[2]
    order = state[1] if type(state) is tuple and len(state) > 1 else "<"
    if order not in ("<", "|", "=") or (type(state) is tuple and any(part is not None for part in state[2:5])):
        raise UnpicklingError(f"a numpy dtype {text!r} that is big-endian or has fields")
    if text[:1] in "<|":
        return text
    unit = _unit_of(state) if text in ("M8", "m8") else ""
    return ("|" if (text[-1:] == "1" and text[:1] in "biu") or text[:1] in "SV" else "<") + text + unit


def _unit_of(state: Any) -> str:
    """Return the unit of a time dtype, which is the last element of its state: (b"ns", multiple, 1, 1)."""
    last = state[-1] if type(state) is tuple and state else None
    parts = last[1] if type(last) is tuple and len(last) == 2 else None
    if type(parts) is not tuple or len(parts) != 4 or type(parts[0]) is not bytes or type(parts[1]) is not int:
        raise UnpicklingError("a numpy time without a unit")
    if parts[0] == b"generic":
        return ""
    return f"[{parts[1] if parts[1] != 1 else ''}{parts[0].decode('latin1')}]"


def _dtype(text: Any, align: Any = False, copy: Any = True) -> Record:
    if type(text) is not str or not 1 <= len(text) <= 16:
        raise UnpicklingError(f"a numpy dtype called {shown(text)}")
    return Record(f"numpy.dtype {text}")


def _array(kind: Any, shape: Any, code: Any) -> Record:
    if type(kind) is not Maker or kind.name != "numpy.ndarray":
        raise UnpicklingError(f"an array of class {shown(kind)}")
    return Record("numpy.ndarray")


def _frombuffer(data: Any, dtype: Any, shape: Any, order: Any, axes: Any = None) -> Record:
    """Return an array that was pickled with protocol 5 (numpy `_core/numeric.py`)."""
    if type(dtype) is not Record or not isinstance(data, (bytes, bytearray)):
        raise UnpicklingError("an array without dtype and bytes")
    array = Record("numpy.ndarray")
    array.state = 1, shape, dtype, order != "C" or axes is not None, data
    return array


_STORAGES = {kind: dtype for dtype, kind in STORAGES.items()}
"""The dtype of torch's typed storage classes, by the beginning of their names. Other storages hold bytes."""
_BUILTIN_DTYPES = {"float": "float32", "double": "float64", "half": "float16", "int": "int32", "long": "int64"}
_METADATA = "torch.distributed.checkpoint.metadata"
_RECORDS = (
    *(f"{_METADATA}.{n}" for n in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata")),
    *(f"{_METADATA}.{n}" for n in ("ChunkStorageMetadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
    "torch.distributed._shard.metadata.ShardMetadata",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
)
_CLASSES = (
    *("numpy.ndarray", "torch.Tensor", "torch.nn.parameter.Parameter", "torch.storage.UntypedStorage"),
    *("torch.storage.TypedStorage", "builtins.list", "builtins.dict", "builtins.int", "builtins.float"),
    *(f"{module}.{kind}Storage" for module in ("torch", "torch.cuda") for kind in (*_STORAGES, "Untyped")),
)
_MAX_EXPANDED_NBYTES, _MAX_EXPANSION = 64 << 30, 1000
"""Limits of a tensor with repeated elements, which `expand` creates: its size in bytes, and its ratio to the stored
elements. It is stored once and read in full size. Chosen, not measured."""

_MAX_PATH_CHARS = 1 << 16
_MAX_ATTRIBUTES = 9


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A storage outside of the pickle.

    Attributes:
        key: Its name in the archive.
        dtype: Name of its dtype; None: bytes.
        numel: Number of elements.
    """

    key: str
    dtype: str | None
    numel: int

    @property
    def nbytes(self) -> int:
        """Length of its elements in bytes."""
        return self.numel * DTYPES[self.dtype or "uint8"].itemsize


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor in a storage.

    Attributes:
        storage: The storage.
        dtype: Name of the dtype.
        offset: Index of its first element in the storage.
        size, stride: Shape and strides in elements.
        attributes: Names of its Python attributes. Most targets do not keep them, nor the following.
        is_parameter: Whether it was a Parameter.
        requires_grad: Whether it required gradients.
    """

    storage: StorageRef
    dtype: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    attributes: tuple[str, ...] = ()
    is_parameter: bool = False
    requires_grad: bool = False

    @property
    def nbytes(self) -> int:
        """Length of its elements in row-major order, in bytes."""
        return math.prod(self.size) * DTYPES[self.dtype].itemsize

    def place(self, part: int, start: int) -> Located | Strided:
        """Return where its elements are, if its storage begins at byte `start` of a part.

        Raises:
            UnpicklingError: It repeats elements, by strides of zero, beyond the limits.
        """
        itemsize = DTYPES[self.dtype].itemsize
        offset = start + self.offset * itemsize
        expected, is_row_major = 1, True
        for size, stride in zip(self.size[::-1], self.stride[::-1], strict=True):
            is_row_major = is_row_major and (size <= 1 or stride == expected)
            expected *= size
        if is_row_major or 0 in self.size:
            return Located(part, offset)
        span = itemsize * (1 + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True)))
        if self.nbytes > max(_MAX_EXPANDED_NBYTES, _MAX_EXPANSION * span):
            raise UnpicklingError(f"a tensor of {self.nbytes} bytes that repeats {span} of them", "expanded tensor")
        return Strided(part, offset, span, itemsize, self.size, self.stride)


def size_of(value: Any) -> tuple[int, ...]:
    """Return the shape that a `torch.Size`, a tuple or a list holds.

    Raises:
        UnpicklingError: The value is no shape.
    """
    members = value.payload if isinstance(value, Opaque) and value.tag == "torch.Size" else value
    if not isinstance(members, (tuple, list)) or any(type(n) is not int or not 0 <= n < 1 << 62 for n in members):
        raise UnpicklingError(f"{shown(value)} is no shape")
    return tuple(members)


def dtype_of(value: Any) -> str:
    """Return the name of a dtype.

    Raises:
        UnpicklingError: The value is no dtype, or one that cannot be stored.
    """
    if isinstance(value, Opaque) and value.tag == "torch.dtype" and value.payload in DTYPES:
        return str(value.payload)
    raise UnpicklingError(f"{shown(value)} is no dtype that can be stored")


def storage_of(pid: Any) -> StorageRef | OpaqueGlobal:
    """Return the storage that a persistent ID of `torch.save` names, or the opaque global that is its class.

    Raises:
        UnpicklingError: The ID is malformed.
    """
    if type(pid) is not tuple or len(pid) < 5 or pid[0] != "storage" or not isinstance(pid[1], (Maker, OpaqueGlobal)):
        raise UnpicklingError(f"{shown(pid)} is no storage")
    if isinstance(pid[1], OpaqueGlobal):
        return pid[1]
    kind, key, numel = pid[1].name.rpartition(".")[2], pid[2], pid[4]
    if not kind.endswith("Storage") or type(key) is not str or type(numel) is not int or numel < 0:
        raise UnpicklingError(f"{shown(pid)} is no storage")
    if len(pid) > 5 and pid[5] is not None:
        raise UnpicklingError("a view of a storage, as torch wrote before version 0.4")
    dtype = _STORAGES.get(kind.removesuffix("Storage"))
    if dtype is None and kind != "UntypedStorage":
        raise UnpicklingError(f"a storage of type {kind}, which cannot be read")
    return StorageRef(key, dtype, numel)


UNRESOLVED = "torch.Tensor with its conj or neg bit set"
"""Its elements must be computed from those in the file. Call `resolve_conj()` or `resolve_neg()` before saving."""


def _tensor(
    storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any = False, hooks: Any = None, math: Any = None
) -> TensorRef | OpaqueGlobal:
    if type(storage) is not StorageRef or storage.dtype is None:
        raise UnpicklingError("a tensor without a typed storage")
    dtype = Opaque("torch.dtype", storage.dtype)
    return _tensor_v3(storage, offset, size, stride, requires_grad, hooks, dtype, math)


def _tensor_v3(
    storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, dtype: Any, math: Any = None
) -> TensorRef | OpaqueGlobal:
    if type(storage) is not StorageRef:
        raise UnpicklingError("a tensor without a storage")
    tensor = TensorRef(
        storage, dtype_of(dtype), offset, size_of(size), size_of(stride), requires_grad=bool(requires_grad)
    )
    if type(offset) is not int or offset < 0 or len(tensor.size) != len(tensor.stride):
        raise UnpicklingError("a tensor whose shape and strides do not fit")
    last = offset + sum((n - 1) * s for n, s in zip(tensor.size, tensor.stride, strict=True))
    if 0 not in tensor.size and (last + 1) * DTYPES[tensor.dtype].itemsize > storage.nbytes:
        raise UnpicklingError(f"a tensor of shape {list(tensor.size)} reaches beyond its storage")
    return OpaqueGlobal(UNRESOLVED, tensor) if math else tensor


def _parameter(data: Any, requires_grad: Any = False, hooks: Any = None, state: Any = None) -> TensorRef:
    if type(data) is not TensorRef:
        raise UnpicklingError("a parameter that holds no tensor")
    return _with_attributes(replace(data, is_parameter=True, requires_grad=bool(requires_grad)), state)


def _with_attributes(tensor: TensorRef, state: Any) -> TensorRef:
    parts = state if type(state) is tuple else (state,)  # a class with __slots__ has two parts
    names = [name for part in parts if type(part) is dict for name in part if type(name) is str]
    return replace(tensor, attributes=(*tensor.attributes, *names[:_MAX_ATTRIBUTES])) if names else tensor


def _from_type(maker: Any, kind: Any, arguments: Any, state: Any) -> TensorRef | OpaqueGlobal:
    if type(maker) is not Maker or maker.make is None or not maker.name.startswith("torch._utils._rebuild"):
        raise UnpicklingError(f"a tensor that {shown(maker)} makes")
    if type(kind) is not Maker or kind.name not in ("torch.Tensor", "torch.nn.parameter.Parameter"):
        raise UnpicklingError(f"a tensor of class {shown(kind)}", shown(kind))
    made = made_by(maker, arguments)
    if type(made) is OpaqueGlobal:
        return made
    is_parameter = kind.name.endswith("Parameter")
    return _parameter(made, made.requires_grad, state=state) if is_parameter else _with_attributes(made, state)


_DEVICES = frozenset(
    {
        *("cpu", "cuda", "fpga", "hip", "hpu", "ideep", "ipu", "lazy", "maia", "meta", "mkldnn", "mps", "mtia"),
        *("opencl", "opengl", "privateuseone", "ve", "vulkan", "xla", "xpu"),
    }
)
"""Device types of torch 2.13, c10/core/DeviceType.h. An out-of-tree backend may have another name."""

_MAX_DEVICES = 128


def _device(kind: Any, index: Any = None) -> Opaque | OpaqueGlobal:
    if type(kind) is not str or type(index) not in (int, type(None)):
        raise UnpicklingError("an invalid device")
    if kind not in _DEVICES or not 0 <= (index or 0) < _MAX_DEVICES:
        return OpaqueGlobal(f"torch.device {kind[:99]}")
    return Opaque("torch.device", kind if index is None else f"{kind}:{index}")


def _encoded(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise UnpicklingError("bytes in another encoding than latin1")
    return text.encode("latin1")


def _pairs(members: Any) -> list[tuple[Any, Any]]:
    found = [(key, value) for key, value in (members.items() if isinstance(members, dict) else members)]
    return list(zip(keys_of(key for key, _ in found), (value for _, value in found), strict=True))


def _defaulting(factory: Any = None) -> DefaultDict:
    found = DefaultDict()
    if factory is not None:
        name = factory.name.removeprefix("builtins.") if isinstance(factory, (Maker, OpaqueGlobal)) else ""
        found.form = ("defaultdict", name if name in FACTORIES else UNSTORED_FACTORY)
    return found


def _layout(name: Any) -> LayoutText:
    if type(name) is not str:
        raise UnpicklingError("a layout without a name")
    return LayoutText(name)


def _posix_path(*parts: Any) -> PathText:
    if not all(type(part) is str for part in parts) or sum(map(len, parts)) > _MAX_PATH_CHARS:
        raise UnpicklingError("an invalid path")
    return PathText(posixpath.join(*parts) if parts else ".")


def _bytearray(*arguments: Any) -> bytearray:
    data = _encoded(*arguments) if len(arguments) == 2 else arguments[0] if arguments else b""
    if type(data) is not bytes:
        raise UnpicklingError("a bytearray of something else than bytes")
    return bytearray(data)


def _record(kind: str) -> Callable[[], Record]:
    return lambda: Record(kind)


_MAKERS: dict[str, Callable[..., Any] | None] = {
    "collections.OrderedDict": lambda members=(): OrderedDict(_pairs(members)),
    "collections.Counter": lambda members=(): CounterDict(_pairs(members)),
    "collections.defaultdict": _defaulting,
    "_codecs.encode": _encoded,
    "builtins.bytearray": _bytearray,
    "builtins.bytes": lambda: b"",  # empty bytes in protocol 2; others are encoded texts
    "builtins.set": lambda members=(): set(keys_of(members)),
    "builtins.frozenset": lambda members=(): frozenset(keys_of(members)),
    "builtins.complex": lambda real, imag=0.0: complex(real, imag),
    "builtins.slice": slice,
    **{f"{module}.PosixPath": _posix_path for module in ("pathlib", "pathlib._local")},
    **{f"{module}.PurePosixPath": _posix_path for module in ("pathlib", "pathlib._local")},
    "numpy.dtype": _dtype,
    **{f"{module}.scalar": _scalar for module in ("numpy.core.multiarray", "numpy._core.multiarray")},
    **{f"{module}._frombuffer": _frombuffer for module in ("numpy.core.numeric", "numpy._core.numeric")},
    **{f"{module}._reconstruct": _array for module in ("numpy.core.multiarray", "numpy._core.multiarray")},
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
    **{name: _record(name.rpartition(".")[2]) for name in _RECORDS},
    **dict.fromkeys(_CLASSES),
}
"""By full name: the function of this package that REDUCE calls; None: the global may be named but not called."""

KNOWN: dict[str, Any] = {
    **{f"torch.{name}": Opaque("torch.dtype", name) for name in DTYPES},
    **{f"torch.{name}": Opaque("torch.dtype", real) for name, real in _BUILTIN_DTYPES.items()},
    **{name: Maker(name, make) for name, make in _MAKERS.items()},
}
"""By full name: a `Maker`, or for a dtype the value itself."""
