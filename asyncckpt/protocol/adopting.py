"""The request by which a trainer hands the memory that a dead worker had lent to the worker that takes its place.

Part of `messages`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from asyncckpt.protocol import fields as check
from asyncckpt.protocol.fields import Check
from asyncckpt.protocol.message import Message


@dataclass(frozen=True, kw_only=True, slots=True)
class Adopt(Message):
    """Hold this slot as if it had been lent by this worker. Answered by `granted`, with its number here.

    `fd`: of the trainer's process, which is that of the session. `generation`: of the snapshot that the slot holds or
    receives; the saves of all generations up to `ended` have ended, as far as the trainer knows. `committed`: the save
    of generation `ended`, if a worker has said that it is committed, else "".
    """

    id: int
    fd: int
    nbytes: int
    token: bytes
    generation: int
    ended: int
    committed: str
    name: ClassVar[str] = "adopt"
    checks: ClassVar[dict[str, Check]] = {
        "id": check.uint,
        "fd": check.uint,
        "nbytes": check.uint,
        "token": check.token,
        "generation": check.uint,
        "ended": check.uint,
        "committed": check.save_id_or_none,
    }
