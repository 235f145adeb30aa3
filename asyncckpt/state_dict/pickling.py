"""Pickles and unpickles objects, only with `allow_pickle=True`. No other module of asyncckpt does.

DANGER: unpickling can run any code. Whoever can write into a checkpoint's directory can run code in every process that
loads it with `allow_pickle=True`. Nothing else in asyncckpt runs code from a pickle: not the worker, not `ls`,
`inspect` or `verify`, not a load without that argument. Pickles of other formats are read as data
(`interop.sources.unpickler`), and `dcp.write_plan` reads the bytes that stock planners made in this process with
`torch.load(weights_only=True)`.
"""

from __future__ import annotations

import base64
import importlib
import io
import pickle
from typing import Any

import torch

PROTOCOL = 4
"""Pickle protocol; Python 3.4 and later read it."""

_ZIP = b"PK\x03\x04"
"""First bytes of a `torch.save` file, which is used for values with tensors. A pickle begins with 0x80."""


def importable_type(name: str) -> type | None:
    """Return the type of a full name, imported if necessary; None: there is none. Only if the user allows pickles."""
    parts = name.split(".")
    for n in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:n]))
        except Exception:  # not a module, or one that fails
            continue
        for part in parts[n:]:
            found = getattr(found, part, None)
        return found if isinstance(found, type) else None
    return None


def encode_pickle(value: Any) -> tuple[str, Any]:
    """Return (tag, payload) of a value of any type.

    Raises:
        Exception: Any error of the value's own code, and `pickle.PicklingError`.
    """
    file = io.BytesIO()
    try:
        _Pickler(file).dump(value)
    except _HoldsElementsError:
        # IMPORTANT: Python's pickle cannot load the tensors that it writes if their dtype has no typed storage (float8,
        # uint16), and it copies memory that several tensors share once for each.
        file = io.BytesIO()
        torch.save(value, file, pickle_protocol=PROTOCOL)
    data = file.getvalue()
    return "pickle", [f"{type(value).__module__}.{type(value).__qualname__}", base64.b64encode(data).decode()]


class _HoldsElementsError(Exception):
    """The value holds a torch storage."""


class _Pickler(pickle.Pickler):
    """Raises `_HoldsElementsError` at the first torch storage."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=PROTOCOL)
        self.file = file

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (torch.UntypedStorage, torch.TypedStorage)):
            raise _HoldsElementsError
        return NotImplemented


def unpickle(data: bytes) -> Any:
    """Return the value of a pickle, or of a `torch.save` file. DANGER: this can run any code.

    Tensors are loaded to the device that they were on, or to the CPU if this machine has no such device.

    Raises:
        Exception: Any error; the bytes decide which.
    """
    if data.startswith(_ZIP):
        return torch.load(io.BytesIO(data), map_location=_SavedDeviceOrCpu(), weights_only=False)
    return pickle.loads(data)


class _SavedDeviceOrCpu(dict[Any, Any]):
    """Maps each location to itself, or to the CPU if this machine has no such device.

    IMPORTANT: this must be a dict. When torch rebuilds a tensor subclass that wraps other tensors, it accepts no
    function as `map_location`.
    """

    def get(self, location: Any, default: Any = None) -> Any:
        try:
            torch.serialization.default_restore_location(torch.UntypedStorage(0), str(location))  # type: ignore[no-untyped-call]
        except RuntimeError:
            return "cpu"
        return location
