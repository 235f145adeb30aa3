"""The root of the exception tree, and the form in which any error of it crosses a process boundary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

_MAX_TEXT_CHARS = 4000
"""Longer texts are cut when an error travels, so that a table of many errors stays below the frame limit."""

Plain = str | int | float | bool


ERRORS_BY_CODE: dict[str, type[AsyncCkptError]] = {}


class AsyncCkptError(Exception):
    """Root of the tree; raised itself only for an error code that this version does not know."""

    wire_code: ClassVar[str] = "error"
    fields: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, *, code: str, fields: tuple[str, ...] = ()) -> None:
        cls.wire_code, cls.fields = code, fields
        ERRORS_BY_CODE.setdefault(code, cls)

    if TYPE_CHECKING:  # the facts

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, message: str, **facts: Any) -> None:
        """Build the error.

        Args:
            message: What happened, to what, what was expected, what to do.
            **facts: Values for the names in `fields`.

        Raises:
            TypeError: A fact that the class does not name.
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
        """Return the facts as a dict, unset ones left out."""
        return {n: v for n in self.fields if (v := getattr(self, n, None)) is not None}


ERRORS_BY_CODE[AsyncCkptError.wire_code] = AsyncCkptError


def to_wire(error: BaseException) -> dict[str, Any]:
    """Return `error` as code, text and fields: plain values and lists of them only, long ones cut, texts valid UTF-8.

    An exception that is not of our tree becomes the root's code with the type's name in the text.
    """
    if isinstance(error, AsyncCkptError):
        facts = {name: _fact(value) for name, value in error.facts().items()}
        return {"code": error.wire_code, "text": _plain(error.message), "fields": facts}
    return {"code": AsyncCkptError.wire_code, "text": _plain(f"{type(error).__name__}: {error}"), "fields": {}}


def _fact(value: Any) -> Plain | list[Plain]:
    """A list stays one, of plain values; cut when its texts and digits are as long as a text may be."""
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
    # A file name that is not UTF-8 reaches a message as lone surrogates, which msgpack refuses to pack.
    return str(value)[:_MAX_TEXT_CHARS].encode("utf-8", "backslashreplace").decode()


def from_wire(wire: Mapping[str, Any]) -> AsyncCkptError:
    """Rebuild an error from `to_wire`'s dict; facts that this version does not know are dropped. Never raises."""
    cls = ERRORS_BY_CODE.get(str(wire.get("code")), AsyncCkptError)
    fields = wire.get("fields")
    known = {n: v for n, v in fields.items() if n in cls.fields} if isinstance(fields, Mapping) else {}
    facts = {n: list(v) if isinstance(v, tuple) else v for n, v in known.items()}  # msgpack gives tuples for lists
    return cls(str(wire.get("text", "")), **facts)
