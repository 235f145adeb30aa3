"""What stands for objects of other people's classes in the pickles that are read and written here."""

from __future__ import annotations

from typing import Any


class Record:
    """What stands for an object of a class on the list: the class's name, and the state that it was saved with."""

    __slots__ = ("kind", "state")

    def __init__(self, kind: str, state: Any = None) -> None:
        self.kind, self.state = kind, state

    def get(self, field: str, default: Any = None) -> Any:
        """Return one attribute of an object whose state is its `__dict__`."""
        return self.state.get(field, default) if isinstance(self.state, dict) else default

    def __repr__(self) -> str:
        return f"{self.kind}({self.state!r})"
