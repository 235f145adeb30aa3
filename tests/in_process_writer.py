"""`asyncckpt.dcp.StorageWriter` without a worker, for tests of what it writes by itself."""

from __future__ import annotations

from typing import Any

from asyncckpt import dcp


class StorageWriter(dcp.StorageWriter):
    """See the module."""

    def __init__(self, *args: Any, **kw: Any) -> None:
        super().__init__(*args, use_worker=False, **kw)
