"""The one place that pickles and unpickles, and only for users who asked for it: `allow_pickle=True`.

DANGER: unpickling runs whatever the bytes say. Whoever can write into a checkpoint's directory can run code in every
process that loads it with `allow_pickle=True`. Nothing else in asyncckpt runs what a pickle says: not the worker, not
`ls`, `inspect` or `verify`, not a load without that argument. Pickles of other formats are read as data
(`foreign.unpickling`), and `dcp.leaf_values` takes what stock planners made in this process, by
`torch.load(weights_only=True)`.
"""

from __future__ import annotations

import base64
import io
import pickle
from typing import Any

import torch

PROTOCOL = 4
"""Of Python 3.4 and later."""

_ZIP = b"PK\x03\x04"
"""What `torch.save` writes begins so; a pickle of protocol 2 or later with 0x80."""


def encode_pickle(value: Any) -> tuple[str, Any]:
    """Return (tag, payload) of a value of any type.

    Raises:
        Exception: Whatever the value's own code raises, and `pickle.PicklingError`.
    """
    data = pickle.dumps(value, protocol=PROTOCOL)
    return "pickle", [f"{type(value).__module__}.{type(value).__qualname__}", base64.b64encode(data).decode()]


def unpickle(data: bytes) -> Any:
    """Return the value of a pickle, or of what `torch.save` wrote. DANGER: see the module.

    Raises:
        Exception: Anything: the bytes decide.
    """
    if data.startswith(_ZIP):
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
    return pickle.loads(data)
