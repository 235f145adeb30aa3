"""torch's dtypes by name; addresses and bytes of tensors; why some tensors have no readable memory."""

from __future__ import annotations

import sys
from typing import Any

import torch

from asyncckpt.dtypes import DTYPES, UNCONVERTED
from asyncckpt.errors import UnsupportedLeafError

_BY_NAME: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES if hasattr(torch, name)}
_BY_DTYPE = {dtype: name for name, dtype in _BY_NAME.items()}

CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""By item size: dtypes that torch can copy and slice, and whose copies keep every bit."""

NO_ADDRESS_BELOW = 1 << 40
"""A smaller address may be an offset in a freed storage: memory is almost never mapped there, and no storage is so
large."""

NO_MEMORY = "it has elements and no memory: its storage was freed or never allocated"
SHRUNK = "its storage holds fewer bytes than its elements take: it was resized"


_COPIED_AS_BYTES = frozenset(getattr(torch, name) for name in UNCONVERTED if hasattr(torch, name))


def copyable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or its bytes if torch cannot copy elements of its dtype: a view of uint8 of the same shape."""
    return tensor.view(torch.uint8) if tensor.dtype in _COPIED_AS_BYTES else tensor


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
    """Return the name of `dtype` in `dtypes.DTYPES`, or None if it cannot be stored."""
    return _BY_DTYPE.get(dtype)


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of the elements; 0: they have none. `data_ptr()` of a view of freed storage is an offset."""
    address = tensor.data_ptr()
    return address if address >= NO_ADDRESS_BELOW or (address and tensor.untyped_storage().data_ptr()) else 0


def fits_in_storage(tensor: torch.Tensor) -> bool:
    """Whether the storage of a tensor holds all its elements. torch reads beyond a storage that was made smaller."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    end = tensor.storage_offset() + last + 1
    return not tensor.numel() or end * tensor.itemsize <= tensor.untyped_storage().nbytes()


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in row-major order as flat uint8 on the tensor's device; a view if they are contiguous."""
    # `as_strided`: a tensor of one element is contiguous with any stride, but `view` of another width refuses some.
    tensor = tensor.detach().resolve_conj().resolve_neg()
    tensor = copyable(tensor).contiguous()
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a subclass defines its elements in `__torch_dispatch__`, so that `data_ptr()` does not point to them.

    Such as DTensors, fake tensors, and quantized tensors of libraries.
    """
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def why_unreadable(tensor: torch.Tensor) -> str | None:
    """Return why the elements of a tensor cannot be copied by address; None: they can."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.device.type not in ("cpu", "cuda"):
        return f"a {'nested ' if tensor.is_nested else ''}tensor of layout {tensor.layout} on {tensor.device}"
    try:
        # A fake tensor says that it is on the CPU; its storage does not.
        if tensor.untyped_storage().device != tensor.device or (tensor.numel() and not address_of(tensor)):
            return NO_MEMORY
        return None if fits_in_storage(tensor) else SHRUNK
    except RuntimeError as error:  # a placeholder subclass, as torch.compile uses
        return f"a {type(tensor).__name__}: {error}"


def why_no_memory(tensor: torch.Tensor) -> str | None:
    """Return why torch made a tensor without memory; None: it was made with memory, which may have been freed since."""
    fake = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", None)
    if fake is not None and isinstance(tensor, fake):
        return "it is a fake tensor, which has no memory"
    if tensor.is_meta:
        return "it is on the meta device, where it has no memory"
    try:
        if torch._is_functional_tensor(tensor):
            return "it belongs to a torch.func transform, which hides its memory"
        tensor.data_ptr()
    except (RuntimeError, NotImplementedError) as error:
        return f"it has no memory of its own: {error}"
    return None


def check_memory_is_real(what: str) -> None:
    """Check that torch makes ordinary tensors now. Others have no address that may be written to.

    Args:
        what: Name of the operation that was called, for the message.

    Raises:
        UnsupportedLeafError: FakeTensorMode or a torch.func transform is active.
    """
    probe = torch.empty(1, dtype=torch.uint8, device="cpu")
    why = why_no_memory(probe)
    if why is None and type(probe) is torch.Tensor:
        return
    kind = type(probe).__name__
    raise UnsupportedLeafError(
        f"{what} copies bytes of real tensors, and torch makes a {kind} instead of one here"
        f"{'' if why is None else ': ' + why}. Leave FakeTensorMode, or the transform (vmap, functionalize), around "
        "the call; nothing was changed",
        leaf="",
        type_name=kind,
    )


def plain_parameter(value: Any) -> torch.Tensor | None:
    """Return the elements of a parameter or buffer of a subclass as a plain tensor that shares its memory.

    Returns:
        None for everything else: also for a parameter that is not initialised yet, and for one whose class implements
        operations itself (`__torch_dispatch__`), since its elements may not be in its memory.
    """
    kind = type(value)
    if not _PARAMETERS.intersection(kind.__mro__) or torch.nn.parameter.is_lazy(value):
        return None
    if is_wrapper(value):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        return value.detach()  # type: ignore[no-any-return]


_PARAMETERS = frozenset({torch.nn.Parameter, getattr(torch.nn, "Buffer", torch.nn.Parameter)})
