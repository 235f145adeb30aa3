"""`AsyncCkptError`, the base class of all errors, and the encoding of an error that is sent to another process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

_MAX_TEXT_CHARS = 4000
"""Longer texts are cut when an error is sent, so that a message with many errors stays below the frame limit."""

Plain = str | int | float | bool


ERRORS_BY_CODE: dict[str, type[AsyncCkptError]] = {}


class AsyncCkptError(Exception):
    """Base class of all errors of asyncckpt; raised itself only for an error code that this version does not know.

    Attributes:
        wire_code: Identifies the class in messages between processes.
        fields: Names of the attributes that an instance of the class has beside `message`.
        message: The text of the error.
    """

    wire_code: ClassVar[str] = "error"
    fields: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, *, code: str, fields: tuple[str, ...] = ()) -> None:
        cls.wire_code, cls.fields = code, fields
        ERRORS_BY_CODE.setdefault(code, cls)

    if TYPE_CHECKING:  # the attributes named in `fields`

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, message: str, **facts: Any) -> None:
        """Create the error.

        Args:
            message: What happened, to what, what was expected, what to do.
            **facts: Values of the attributes named in `fields`; one that is not given is None.

        Raises:
            TypeError: A name that is not in `fields`.
        """
        super().__init__(message)
        unknown = set(facts) - set(self.fields)
        if unknown:
            raise TypeError(f"{type(self).__name__} has no facts named {sorted(unknown)}")
        self.message = message
        for name in self.fields:
            setattr(self, name, facts.get(name))

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message,), self.facts()

    def facts(self) -> dict[str, Any]:
        """Return the attributes named in `fields` as a dict, without those that are None."""
        return {n: v for n in self.fields if (v := getattr(self, n, None)) is not None}


ERRORS_BY_CODE[AsyncCkptError.wire_code] = AsyncCkptError


def to_wire(error: BaseException) -> dict[str, Any]:
    """Encode an error as a dict with `code`, `text` and `fields`.

    Args:
        error: Any exception. One that is no `AsyncCkptError` gets the code of the base class, and its text begins with
            the name of its type.

    Returns:
        The dict. Its values are plain values or lists of them; long ones are cut, and texts are valid UTF-8.
    """
    if isinstance(error, AsyncCkptError):
        facts = {name: _fact(value) for name, value in error.facts().items()}
        return {"code": error.wire_code, "text": _plain(error.message), "fields": facts}
    return {"code": AsyncCkptError.wire_code, "text": _plain(f"{type(error).__name__}: {error}"), "fields": {}}


def _fact(value: Any) -> Plain | list[Plain]:
    """Return a plain value, or a list of plain values that is cut at `_MAX_TEXT_CHARS` characters in all."""
    if not isinstance(value, (list, tuple)):
        return _plain(value)
    found: list[Plain] = []
    room = _MAX_TEXT_CHARS
    for item in map(_plain, value):
        room -= len(str(item)) + 1
        if room < 0 and found:
            break
        found.append(item)
    return found


def _plain(value: Any) -> Plain:
    if isinstance(value, float) or (isinstance(value, int) and -(1 << 63) <= value < 1 << 63):
        return value
    # Python decodes a file name that is not UTF-8 to lone surrogates, which msgpack refuses to pack.
    return str(value)[:_MAX_TEXT_CHARS].encode("utf-8", "backslashreplace").decode()


def from_wire(wire: Mapping[str, Any]) -> AsyncCkptError:
    """Create an error from a dict that `to_wire` returned. Never raises.

    Args:
        wire: The dict. An unknown `code` gives `AsyncCkptError`; fields that the class does not have are ignored.

    Returns:
        The error.
    """
    cls = ERRORS_BY_CODE.get(str(wire.get("code")), AsyncCkptError)
    fields = wire.get("fields")
    known = {n: v for n, v in fields.items() if n in cls.fields} if isinstance(fields, Mapping) else {}
    facts = {n: list(v) if isinstance(v, tuple) else v for n, v in known.items()}  # msgpack gives tuples for lists
    return cls(str(wire.get("text", "")), **facts)
