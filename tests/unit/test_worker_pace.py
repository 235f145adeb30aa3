"""With how many threads a worker writes: as it is told, else as the device has it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from asyncckpt.storage.files import Files
from asyncckpt.storage.pace import Pace
from asyncckpt.storage.pace_file import DevicePaces
from asyncckpt_worker.writer import WRITE_PACES, Writer

MORE = WRITE_PACES[1]


class Known(DevicePaces):
    """Knows that more threads are faster."""

    def choose(self, path: str) -> Pace:
        return MORE


@pytest.mark.parametrize(
    ("asked", "configured", "expected"),
    [(0, 0, MORE), (3, 0, None), (0, 5, None), (3, 5, None)],
)
def test_a_device_is_asked_where_nobody_names_a_number(asked: int, configured: int, expected: Pace | None) -> None:
    slots: Any = None
    request: Any = SimpleNamespace(write_threads=asked, path="/")
    writer = Writer(Files(), slots, (), configured, Known(None, "write", WRITE_PACES))
    assert writer._pace(request) == expected
