"""torch's own types as names and JSON: dtypes, devices, sizes."""

from __future__ import annotations

from typing import Any

import torch

from asyncckpt.dtypes import DTYPES
from asyncckpt.errors import UnsupportedLeafError

_BY_NAME: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES if hasattr(torch, name)}
_BY_DTYPE = {dtype: name for name, dtype in _BY_NAME.items()}

NO_ADDRESS_BELOW = 1 << 40
"""What is below may be an offset: memory hardly ever lies there, and no storage is that long."""

NO_MEMORY = "it has elements and no memory: its storage was freed or never allocated"
SHRUNK = "its storage holds fewer bytes than its elements take: it was resized"


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype called `name`.

    Raises:
        UnsupportedLeafError: This torch has no such dtype.
    """
    try:
        return _BY_NAME[name]
    except KeyError:
        raise UnsupportedLeafError(
            f"torch {torch.__version__} has no dtype {name}; load this tensor with a newer torch", type_name=name
        ) from None


def dtype_name(dtype: torch.dtype) -> str | None:
    """Return the table's name of `dtype`, or None when it cannot be stored."""
    return _BY_DTYPE.get(dtype)


def address_of(tensor: torch.Tensor) -> int:
    """Return where the elements lie; 0: nowhere. `data_ptr()` of a view of freed storage is how far inside it began."""
    address = tensor.data_ptr()
    return address if address >= NO_ADDRESS_BELOW or (address and tensor.untyped_storage().data_ptr()) else 0


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether its storage holds all of its elements: torch reads beyond one that was made smaller, and says nothing."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    end = tensor.storage_offset() + last + 1
    return not tensor.numel() or end * tensor.itemsize <= tensor.untyped_storage().nbytes()


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether its elements are what a subclass makes of every call (`__torch_dispatch__`), not what lies in its memory.

    So DTensors are, fake tensors, and quantized ones of libraries; `data_ptr()` of such a tensor says nothing.
    """
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def why_unreadable(tensor: torch.Tensor) -> str | None:
    """Return why the elements of a tensor cannot be copied, or None. What is copied by address must have one."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.device.type not in ("cpu", "cuda"):
        return f"a {'nested ' if tensor.is_nested else ''}tensor of layout {tensor.layout} on {tensor.device}"
    try:
        # A fake tensor says that it is on the CPU; its storage does not.
        if tensor.untyped_storage().device != tensor.device or (tensor.numel() and not address_of(tensor)):
            return NO_MEMORY
        return None if is_whole(tensor) else SHRUNK
    except RuntimeError as error:  # a subclass that stands for a tensor, as torch.compile has them
        return f"a {type(tensor).__name__}: {error}"


def encode_torch(value: Any) -> tuple[str, Any] | None:
    """Return (tag, payload) of a value of torch's own types; None for anything else."""
    if isinstance(value, torch.dtype):
        return "torch.dtype", str(value).removeprefix("torch.")
    if isinstance(value, torch.device):
        return "torch.device", str(value)
    if isinstance(value, torch.Size):
        return "torch.Size", list(value)
    return None


def decode_torch(tag: str, payload: Any) -> Any:
    """Return the value of one of torch's tags.

    Raises:
        ValueError: Malformed.
    """
    if tag == "torch.Size":
        return torch.Size(payload)
    if tag == "torch.device":
        return torch.device(payload)
    found = getattr(torch, str(payload), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"unknown torch dtype {payload!r}")
    return found
