"""numpy arrays -> tensors, numpy scalars -> JSON, and back. numpy is optional: this module works without it.

A process that saves numpy values has imported numpy, so saving looks it up among the loaded modules. Loading imports it
if it is installed.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from typing import Any

import torch

from asyncckpt.format.objects import checked_numpy_scalar, is_numpy_scalar, numpy_scalar_value
from asyncckpt.torch_tensors import flat_bytes

_log = logging.getLogger("asyncckpt.loading")

_TORCH_NAMES = {
    **{"|b1": "bool", "|u1": "uint8", "|i1": "int8", "<u2": "uint16", "<i2": "int16", "<u4": "uint32", "<i4": "int32"},
    **{"<u8": "uint64", "<i8": "int64", "<f2": "float16", "<f4": "float32", "<f8": "float64"},
    **{"<c8": "complex64", "<c16": "complex128"},
}
_DTYPES = {name: getattr(torch, of_torch) for name, of_torch in _TORCH_NAMES.items() if hasattr(torch, of_torch)}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def _loaded() -> Any:
    numpy = sys.modules.get("numpy")
    return numpy if hasattr(numpy, "memmap") else None  # without it, the import of numpy is still running


@functools.cache
def _imported() -> Any:
    try:
        return importlib.import_module("numpy")
    except ImportError:
        _log.warning("numpy is not installed: its arrays are loaded as tensors, its scalars as Python values")
        return None


def is_array(value: Any) -> bool:
    """Whether `value` is a plain numpy array, in memory or mapped from a file."""
    numpy = _loaded()
    return numpy is not None and (type(value) is numpy.ndarray or type(value) is numpy.memmap)


def is_scalar(value: Any) -> bool:
    """Whether `value` is a numpy scalar, of any dtype."""
    numpy = _loaded()
    return numpy is not None and isinstance(value, numpy.generic)


def view_of(array: Any) -> torch.Tensor | None:
    """Return a tensor that shares the elements of an array; None if torch cannot make one."""
    dtype = _DTYPES.get(array.dtype.str)
    if dtype is None or not array.size or not array.flags.writeable:
        return None
    try:
        found = torch.from_numpy(array)
    except (TypeError, ValueError, RuntimeError):  # negative strides; or torch was built without numpy
        if not array.flags.c_contiguous:
            return None
        found = torch.frombuffer(memoryview(array).cast("B"), dtype=torch.uint8).view(dtype).view(array.shape)
    return found


def tensor_of(array: Any) -> torch.Tensor | None:
    """Return an array's elements as a tensor, a view if possible; None if torch lacks the dtype."""
    dtype = _DTYPES.get(array.dtype.str)
    if dtype is None:
        return None
    if not array.size:
        return torch.empty(array.shape, dtype=dtype, device="cpu")
    view = view_of(array)
    if view is not None:
        return view
    return torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8).view(dtype).view(array.shape)


def array_of(tensor: torch.Tensor) -> Any:
    """Return a tensor's elements as an array, shared if possible; the tensor itself if no array can hold them."""
    numpy, name = _imported(), _NAMES.get(tensor.dtype)
    if numpy is None or name is None:
        return tensor
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    try:
        return tensor.numpy()
    except RuntimeError:  # torch was built without numpy
        data = bytearray(flat_bytes(tensor).tolist())
        return numpy.frombuffer(data, dtype=name).reshape(tuple(tensor.shape))


def encode_scalar(value: Any) -> tuple[str, Any] | None:
    """Return (tag, payload) of a numpy scalar; None for anything else, or a dtype that cannot be stored."""
    if not is_scalar(value):
        return None
    if isinstance(value, str):  # numpy would drop trailing NUL characters
        data = str.__str__(value).encode("utf-32-le", "surrogatepass")
        return "numpy.scalar", [f"<U{len(data) // 4}", data.hex()]
    if isinstance(value, bytes):
        return "numpy.scalar", [f"|S{len(value)}", value.hex()]
    dtype = value.dtype.newbyteorder("<")
    if not is_numpy_scalar(dtype.str):
        return None
    return "numpy.scalar", [dtype.str, _loaded().asarray(value).astype(dtype).tobytes().hex()]


def decode_scalar(payload: Any) -> Any:
    """Return a numpy scalar; without numpy the nearest Python value.

    Raises:
        ValueError: The payload is malformed.
    """
    dtype, data = checked_numpy_scalar(payload)
    nearest = numpy_scalar_value(dtype, data)  # also validates the data: numpy would accept invalid characters
    numpy = _imported()
    if numpy is None:
        return nearest
    if dtype[1] in "US":
        return numpy.str_(nearest) if dtype[1] == "U" else numpy.bytes_(nearest)
    return numpy.frombuffer(data, dtype=dtype)[0]
