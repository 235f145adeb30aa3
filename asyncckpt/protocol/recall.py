"""Messages about snapshots that lie in the worker's memory: who loads them asks where they are. Part of `messages`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from asyncckpt.protocol import fields as check
from asyncckpt.protocol.fields import Check
from asyncckpt.protocol.message import Message


@dataclass(frozen=True, kw_only=True, slots=True)
class Recall(Message):
    """Ask for the snapshots at `path` and below it. `hold`: they stay where they are until this session ends."""

    id: int
    path: str
    hold: bool
    name: ClassVar[str] = "recall"
    checks: ClassVar[dict[str, Check]] = {"id": check.uint, "path": check.path, "hold": check.flag}


@dataclass(frozen=True, kw_only=True, slots=True)
class Recalled(Message):
    """The answer to Recall: a row for each rank's part of a snapshot, newest save first.

    A row is a map with `save_id`, `step`, `path`, `rank`, `world_size`, where the part lies (`slot`, `fd`, `nbytes`,
    `token` as in Granted; `generation`), and two flags: `whole`: all ranks have staged it, and nobody has objected;
    `committed`. `inode` and `birth_ns` (nanoseconds since 1970; 0: the file system does not tell) are of the save's
    directory once that was made, else of the one that was to hold it; `inode` 0: neither was seen.
    """

    id: int
    parts: tuple[Mapping[str, Any], ...]
    name: ClassVar[str] = "recalled"
    checks: ClassVar[dict[str, Check]] = {"id": check.uint, "parts": check.recall_rows}
