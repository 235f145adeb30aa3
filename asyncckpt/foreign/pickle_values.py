"""What an interpreted pickle is made of: what stands for globals and objects; and how to look at it without harm."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from asyncckpt.foreign.long_values import LONG_NBYTES, LongBytes, held
from asyncckpt.foreign.refusals import UnpicklingError
from asyncckpt.format.hashes import all_met

ENCODE = "_codecs.encode"
MAX_KEY_MEMBERS = 1000
"""In a tuple or frozenset that is a key or a member of a set: hashing one has no bound of its own. Chosen."""


def unknown_global(name: str) -> UnpicklingError:
    """Return the error for a global that is not on the list."""
    return UnpicklingError(f"it names the global {name!r}, which is not on the list of what may be read", name)


class Maker:
    """What stands for a global: its name, and the function of ours that REDUCE and NEWOBJ call, if they may."""

    __slots__ = ("make", "name")

    def __init__(self, name: str, make: Callable[..., Any] | None = None) -> None:
        self.name, self.make = name, make

    def __repr__(self) -> str:
        return self.name


def is_encoded_next(stack: list[Any], nbytes: int, mark: object) -> bool:
    """Whether a text of so many bytes is long, and follows what encodes it, or the mark after that."""
    if nbytes < LONG_NBYTES or not stack:
        return False
    before = stack[-2:-1] if stack[-1] is mark else stack[-1:]
    return any(type(value) is Maker and value.name == ENCODE for value in before)


class PathText(str):
    """What a path of pathlib is read as."""

    __slots__ = ()


class LayoutText(str):
    """What a torch.layout is read as."""

    __slots__ = ()


class Tally(dict[Any, Any]):
    """What a Counter is read as."""


class Defaulting(dict[Any, Any]):
    """What a defaultdict is read as; `factory`: the name of what makes missing values, as `format.tree` has it."""

    factory: str | None = None


COUNTER = "a Counter became a dict"
LAYOUT = "a torch.layout became a text"
READ_AS: dict[type, tuple[type, str]] = {
    PathText: (str, "a path became a text"),
    LayoutText: (str, LAYOUT),
    Tally: (dict, COUNTER),
    Defaulting: (dict, "a defaultdict became a dict"),
}
"""By what stands for a value while it is read: what becomes of it, and how that is reported."""

ATTRIBUTES = "attributes of tensors are not kept"
PARAMETER = "a Parameter became a tensor"
REQUIRES_GRAD = "requires_grad is not kept"
OF_ORDERED = "attributes of OrderedDicts are not kept"
UNORDERED = "an OrderedDict became a dict"
ROW_MAJOR = "a tensor that was strided otherwise became row-major"


def shown(value: Any) -> str:
    """Return a value for a message. Of a container its type alone: a pickle may put one into itself over and over."""
    if type(value) is str:
        return repr(value[:100])
    return value.name if type(value) is Maker else f"a {type(value).__name__}"


def keys_of(keys: Iterable[Any]) -> list[Any]:
    """Return the keys of one dict, or the members of one set.

    Raises:
        UnpicklingError: As `hashable`.
        ValueError: Too many have one hash.
    """
    return all_met(map(hashable, keys))


def hashable(key: Any) -> Any:
    """Return what is to be a key, or a member of a set.

    IMPORTANT: the hash of a tuple recurses without a limit, which overflows the C stack, and visits what is there twice
    twice, 2**n times in all.

    Raises:
        UnpicklingError: More is in it than anybody's keys have.
    """
    if type(key) not in (tuple, frozenset):
        return held(key)
    todo, count, has_long = [key], 0, False
    while todo:
        value = todo.pop()
        if type(value) in (tuple, frozenset):
            count += 1 + len(value)
            if count > MAX_KEY_MEMBERS:
                raise UnpicklingError(f"a key with more than {MAX_KEY_MEMBERS} members")
            todo += value
        has_long = has_long or type(value) is LongBytes
    return held(key) if has_long else key
