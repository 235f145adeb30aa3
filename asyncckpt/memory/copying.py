"""Copying between addresses."""

from __future__ import annotations

import ctypes

_HOLD_GIL_BELOW_NBYTES = 64 * 1024
"""A copy this short takes less time than giving the GIL up and getting it back. Chosen, not measured."""

_memmove_holding_gil = ctypes.PyDLL(None).memmove
_memmove_holding_gil.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memmove_holding_gil.restype = ctypes.c_void_p


def view_at(address: int, nbytes: int) -> memoryview:
    """Return bytes of a mapping as a memoryview. It does not keep the mapping alive."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def copy_bytes(target: int, source: int, nbytes: int) -> None:
    """Copy between addresses; long copies release the GIL."""
    (ctypes.memmove if nbytes >= _HOLD_GIL_BELOW_NBYTES else _memmove_holding_gil)(target, source, nbytes)
