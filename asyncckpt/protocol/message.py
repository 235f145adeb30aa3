"""What all messages share: `name` on the wire, and a check per field. An invalid message cannot be built."""

from __future__ import annotations

from dataclasses import fields
from typing import ClassVar

from asyncckpt.errors import ProtocolError
from asyncckpt.protocol.fields import Check


class Message:
    """See the module."""

    name: ClassVar[str]
    checks: ClassVar[dict[str, Check]]

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if not self.checks[field.name](value):
                shown = repr(value)[:80]
                raise ProtocolError(f"{self.name}: field {field.name} cannot be {shown}", detail=field.name)
