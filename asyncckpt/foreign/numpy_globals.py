"""The globals of numpy that a checkpoint's pickle may name: scalars, dtypes and arrays.

Source: numpy 2 `_core/src/multiarray/descriptor.c` (what a dtype is pickled as).
"""

from __future__ import annotations

from typing import Any

from asyncckpt.foreign.long_values import LongBytes
from asyncckpt.foreign.pickle_values import Maker, shown
from asyncckpt.foreign.refusals import UnpicklingError
from asyncckpt.foreign.strangers import Stranger
from asyncckpt.format import numpy_scalars
from asyncckpt.format.objects import Opaque
from asyncckpt.format.records import Record


def _scalar(dtype: Any, data: Any) -> Opaque | Stranger:
    if type(dtype) is not Record or type(data) not in (bytes, Record):
        raise UnpicklingError("a numpy scalar without dtype and bytes")
    try:
        payload = [dtype_text(dtype), data.hex() if type(data) is bytes else ""]
        numpy_scalars.python_value(*numpy_scalars.checked(payload))
    except ValueError as error:  # one that is no plain value, or too wide for anybody else
        return Stranger(f"numpy scalar, {error}")
    return Opaque("numpy.scalar", payload)


def dtype_text(dtype: Record) -> str:
    """Return a numpy dtype as the array protocol writes it, such as `<f4` or `<M8[ns]`.

    Raises:
        UnpicklingError: Not a plain one, or of a big-endian machine.
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
    """Return the unit of a time's dtype, which is the last of its state: (b"ns", how many of them, 1, 1)."""
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
    """What protocol 5 makes of an array: numpy `_core/numeric.py`."""
    if type(dtype) is not Record or not isinstance(data, (bytes, bytearray, LongBytes)):
        raise UnpicklingError("an array without dtype and bytes")
    array = Record("numpy.ndarray")
    array.state = 1, shape, dtype, order != "C" or axes is not None, data
    return array


TAKES_LONG = frozenset({"numpy.core.numeric._frombuffer", "numpy._core.numeric._frombuffer"})
"""Makers that are given long bytes as what stands for them."""

NUMPY = {
    "numpy.dtype": _dtype,
    **{f"{module}.scalar": _scalar for module in ("numpy.core.multiarray", "numpy._core.multiarray")},
    **dict.fromkeys(TAKES_LONG, _frombuffer),
    **{f"{module}._reconstruct": _array for module in ("numpy.core.multiarray", "numpy._core.multiarray")},
}
"""Name -> the function of ours that stands for it."""
