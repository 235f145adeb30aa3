"""What stands for globals of a pickle that are not on the list, and for everything that is made by them.

Who owns what: `unpickling` puts a `Stranger` in the place of such an object and lets it swallow what the pickle does to
it; `torch_globals` makes no tensor and no storage of one; `growth` makes an `Unread` of the leaf that it stands in, and
of that alone; `storage.unread` says what such leaves are and what to say where one is asked for.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from asyncckpt.foreign.pickle_values import Maker, shown
from asyncckpt.foreign.refusals import UnpicklingError
from asyncckpt.format.records import Record

MAX_NAME_CHARS = 200
"""Of a module, or of a name in one: nobody's are longer, and of those that are this much is kept."""

_GIVEN_A_CLASS = "torch._utils._rebuild_wrapper_subclass"
"""Makes a tensor of the class that is its first argument, such as a DTensor: that one tells what it is."""


class Stranger:
    """A global that is not on the list, or what it would have made; nothing of it is imported, called or set.

    Compared and hashed by identity: it may be a key.

    Attributes:
        name: Of the global, fit for a message.
        held: What it was given: arguments, state, items. Looked into only to count tensors.
    """

    __slots__ = ("held", "name")

    def __init__(self, name: str, *held: Any) -> None:
        text = name[: 2 * MAX_NAME_CHARS]
        self.name = text if text.isprintable() else repr(text)[1:-1][: 2 * MAX_NAME_CHARS]
        self.held: list[Any] = list(held)

    def made(self, arguments: tuple[Any, ...]) -> Stranger:
        """Return what stands for the result of calling it."""
        name, first = self.name, arguments[0] if arguments else None
        if isinstance(first, (Stranger, Maker)):
            if name == _GIVEN_A_CLASS:
                name = first.name
            elif name == "builtins.getattr" and type(arguments[-1]) is str:  # protocol 2's word for a class in a class
                name = f"{first.name}.{arguments[-1][:MAX_NAME_CHARS]}"
        return Stranger(name, arguments)

    def __repr__(self) -> str:
        return self.name


def made_by(maker: Any, arguments: Any) -> Any:
    """Return what REDUCE and NEWOBJ make: by a `Maker`, a value; by a stranger or of one, another stranger.

    Raises:
        UnpicklingError: Nothing to be called; or as the maker has it.
    """
    if type(arguments) is tuple:
        if type(maker) is Stranger:
            return maker.made(arguments)
        if type(maker) is Maker and maker.make is not None:
            strange = next((value for value in arguments if type(value) is Stranger), None)
            if strange is None or maker.name == "collections.defaultdict":  # whose factory is a name
                return maker.make(*arguments)
            return Stranger(strange.name, arguments)
    raise UnpicklingError(f"it calls {shown(maker)}, which is nothing to be called")


def members_of(value: Any) -> Collection[Any]:
    """Return what a value holds, for whoever looks into it: keys and values, members, or what a stranger was given."""
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, (Stranger, Record)):
        return value.held if isinstance(value, Stranger) else (value.state,)
    return value if isinstance(value, (list, tuple, set, frozenset)) else ()
