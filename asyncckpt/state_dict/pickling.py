"""The one place that pickles and unpickles, and only for users who asked for it: `allow_pickle=True`.

DANGER: unpickling runs whatever the bytes say. Whoever can write into a checkpoint's directory can run code in every
process that loads it with `allow_pickle=True`. Nothing else in asyncckpt runs what a pickle says: not the worker, not
`ls`, `inspect` or `verify`, not a load without that argument. Pickles of other formats are read as data
(`interop.sources.unpickler`), and `dcp.leaf_values` takes what stock planners made in this process, by
`torch.load(weights_only=True)`.
"""

from __future__ import annotations

import base64
import io
import pickle
from typing import Any

import torch

PROTOCOL = 4
"""Pickle protocol; Python 3.4 and later read it."""

_ZIP = b"PK\x03\x04"
"""First bytes of what `torch.save` writes, which is used for values with tensors. A pickle begins with 0x80."""


def encode_pickle(value: Any) -> tuple[str, Any]:
    """Return (tag, payload) of a value of any type.

    Raises:
        Exception: Any error of the value's own code, and `pickle.PicklingError`.
    """
    file = io.BytesIO()
    try:
        _Pickler(file).dump(value)
    except _HoldsElementsError:
        # IMPORTANT: Python's pickle cannot read back the tensors that it writes of dtypes without a typed storage
        # (float8, uint16), and makes two memories of one that several tensors share.
        file = io.BytesIO()
        torch.save(value, file, pickle_protocol=PROTOCOL)
    data = file.getvalue()
    return "pickle", [f"{type(value).__module__}.{type(value).__qualname__}", base64.b64encode(data).decode()]


class _HoldsElementsError(Exception):
    """The value holds a storage of torch."""


class _Pickler(pickle.Pickler):
    """Raises `_HoldsElementsError` at the first storage of torch."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=PROTOCOL)
        self.file = file

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (torch.UntypedStorage, torch.TypedStorage)):
            raise _HoldsElementsError
        return NotImplemented


def unpickle(data: bytes) -> Any:
    """Return the value of a pickle, or of what `torch.save` wrote. DANGER: this runs code that the bytes name.

    Tensors come to the device on which they were, or to the CPU where this machine lacks it.

    Raises:
        Exception: Any error; the bytes decide which.
    """
    if data.startswith(_ZIP):
        return torch.load(io.BytesIO(data), map_location=_WhereItWas(), weights_only=False)
    return pickle.loads(data)


class _WhereItWas(dict[Any, Any]):
    """Maps each location to itself, or to the CPU if this machine has no such device.

    IMPORTANT: a dict, since torch rebuilds a tensor subclass that stands for others with no function for its place.
    """

    def get(self, location: Any, default: Any = None) -> Any:
        try:
            torch.serialization.default_restore_location(torch.UntypedStorage(0), str(location))  # type: ignore[no-untyped-call]
        except RuntimeError:
            return "cpu"
        return location
