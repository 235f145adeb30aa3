"""The restricted unpickler: it builds plain values, and knows a fixed list of globals.

Nothing that a pickle names is imported or called. A global is looked up in the caller's table of `Maker`s, which are
functions of ours that return plain values or `Record`s. REDUCE calls a `Maker` and nothing else; BUILD gives a state
to a `Record`, or an OrderedDict its `_metadata`, and nothing else. Python's own `pickle` takes no part.

Where the caller allows it, a global that is not in the table becomes an `OpaqueGlobal`, which takes what is done to it
and does nothing. `pickle_globals` makes no tensor of one, and `pickle_tree` makes an unreadable leaf of it.

Source of the opcodes: CPython's `pickletools`.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from asyncckpt.format.objects import Record
from asyncckpt.format.state_tree import CollisionLimit, checked_hashes

MAX_NBYTES = 1 << 30
"""Longest pickle that is read: all of it is held. The metadata of 100,000 chunks take some 20 MB. Chosen."""

WINDOW_NBYTES = 1 << 20
"""Least bytes that are read of a file at once."""

MAX_KEY_MEMBERS = 1000
"""In a tuple or frozenset that is a key or a member of a set: hashing one has no bound of its own. Chosen."""

MAX_NAME_CHARS = 200
"""Of a module, or of a name in one; of longer ones this much is kept."""

_GIVEN_PER_BYTE, _GIVEN_ANYWAY = 16, 1 << 16
"""Bytes and members that makers are given, for each byte of the pickle: a few opcodes can name one value many times."""

_GIVEN_A_CLASS = "torch._utils._rebuild_wrapper_subclass"
"""Makes a tensor of the class that is its first argument, such as a DTensor: that name is the one to report."""

_PYTHON_2 = {"long": "int", "unicode": "str"}
"""Names of `__builtin__`, Python 2's module of them, that are others now. Up to protocol 2 pickles have these."""

_MARK = object()


class UnpicklingError(ValueError):
    """The pickle is not read. Internal to reading: callers raise an error of asyncckpt.

    `name`: the global that is not on the list, if that is why.
    """

    def __init__(self, text: str, name: str | None = None) -> None:
        super().__init__(text)
        self.name = name


def check_length(nbytes: int) -> None:
    """Raise `UnpicklingError` for a pickle that is too long to be held."""
    if nbytes > MAX_NBYTES:
        raise UnpicklingError(f"{nbytes} bytes of a pickle would have to be held, more than are read", "a large pickle")


def unknown_global(name: str) -> UnpicklingError:
    """Return the error for a global that is not on the list."""
    return UnpicklingError(f"it names the global {name!r}, which is not on the list of what may be read", name)


class PickleStream:
    """Pickles behind one another at the beginning of a file. Their end is known when they have been interpreted.

    Args:
        read_at: Reads exactly (offset, length) of the file.
        nbytes: Length of the file.
        data: What was read of it, from its beginning on.
    """

    def __init__(self, read_at: Callable[[int, int], bytes], nbytes: int, data: bytes = b"") -> None:
        check_length(len(data))
        self._read_at, self.nbytes, self.data = read_at, nbytes, data

    def extend(self, end: int) -> bytes:
        """Read on until `data` reaches byte `end`; return `data`.

        Raises:
            UnpicklingError: The file ends before, or more would have to be held than is read.
            ValueError, OSError: The file cannot be read.
        """
        if end > self.nbytes:
            raise UnpicklingError("it ends early")
        check_length(end)
        had = len(self.data)
        self.data += self._read_at(had, min(max(end - had, had, WINDOW_NBYTES), self.nbytes - had))
        return self.data


@dataclass(frozen=True, slots=True, eq=False)
class Maker:
    """A global that is on the list: its name, and the function of ours that REDUCE and NEWOBJ call, if they may."""

    name: str
    make: Callable[..., Any] | None = None


class OpaqueGlobal:
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

    def made(self, arguments: tuple[Any, ...]) -> OpaqueGlobal:
        """Return what stands for the result of calling it."""
        name, first = self.name, arguments[0] if arguments else None
        if isinstance(first, (OpaqueGlobal, Maker)):
            if name == _GIVEN_A_CLASS:
                name = first.name
            elif name == "builtins.getattr" and type(arguments[-1]) is str:  # protocol 2's word for a class in a class
                name = f"{first.name}.{arguments[-1][:MAX_NAME_CHARS]}"
        return OpaqueGlobal(name, arguments)


class PathText(str):
    """What a path of pathlib is read as."""

    __slots__ = ()


class LayoutText(str):
    """What a torch.layout is read as."""

    __slots__ = ()


class CounterDict(dict[Any, Any]):
    """What a Counter is read as. `form`: what its node in `format.state_tree` ends in."""

    form = ("Counter",)


class DefaultDict(dict[Any, Any]):
    """What a defaultdict is read as. `form`: as of a Counter, with the name of what makes missing values."""

    form: tuple[str, str | None] = ("defaultdict", None)


READ_AS: dict[type, tuple[type, str]] = {
    PathText: (str, "a path became a text"),
    LayoutText: (str, "a torch.layout became a text"),
    CounterDict: (dict, "a Counter became a dict"),
    DefaultDict: (dict, "a defaultdict became a dict"),
}
"""By what stands for a value while it is read: what becomes of it in a leaf or a key, and how that is reported."""

DICTS = (dict, OrderedDict, CounterDict, DefaultDict)
"""What SETITEMS may fill."""


def shown(value: Any) -> str:
    """Return a value for a message. Of a container its type alone: a pickle may put one into itself over and over."""
    if type(value) is str:
        return repr(value[:100])
    return value.name if type(value) is Maker else f"a {type(value).__name__}"


def made_by(maker: Any, arguments: Any) -> Any:
    """Return what REDUCE and NEWOBJ make: by a `Maker` a value; by an opaque global, or of one, an opaque global.

    Raises:
        UnpicklingError: Nothing to be called; or as the maker has it.
    """
    if type(arguments) is tuple:
        if type(maker) is OpaqueGlobal:
            return maker.made(arguments)
        if type(maker) is Maker and maker.make is not None:
            opaque = next((value for value in arguments if type(value) is OpaqueGlobal), None)
            if opaque is None or maker.name == "collections.defaultdict":  # whose factory is a name
                return maker.make(*arguments)
            return OpaqueGlobal(opaque.name, arguments)
    raise UnpicklingError(f"it calls {shown(maker)}, which is nothing to be called")


def members_of(value: Any) -> Collection[Any]:
    """Return what a value holds: keys and values, members, or what an opaque global was given."""
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, (OpaqueGlobal, Record)):
        return value.held if isinstance(value, OpaqueGlobal) else (value.state,)
    return value if isinstance(value, (list, tuple, set, frozenset)) else ()


def keys_of(keys: Iterable[Any]) -> list[Any]:
    """Return the keys of one dict, or the members of one set.

    Raises:
        UnpicklingError: As `hashable`.
        ValueError: Too many have one hash.
    """
    return checked_hashes(map(hashable, keys))


def hashable(key: Any) -> Any:
    """Return what is to be a key, or a member of a set.

    IMPORTANT: the hash of a tuple recurses without a limit, which overflows the C stack, and visits what is there twice
    twice, 2**n times in all.

    Raises:
        UnpicklingError: It holds more than `MAX_KEY_MEMBERS`.
    """
    if type(key) not in (tuple, frozenset):
        return key
    todo, count = [key], 0
    while todo:
        value = todo.pop()
        if type(value) in (tuple, frozenset):
            count += 1 + len(value)
            if count > MAX_KEY_MEMBERS:
                raise UnpicklingError(f"a key with more than {MAX_KEY_MEMBERS} members")
            todo += value
    return key


def unpickle_data(
    data: bytes | PickleStream,
    known: Mapping[str, Any],
    persistent: Callable[[Any], Any] | None = None,
    at: int = 0,
    *,
    opaque: bool = False,
) -> tuple[Any, int]:
    """Interpret the pickle that begins at `at`.

    Args:
        data: The bytes; or the file that they are read from.
        known: By `module.name`: what a global stands for, a `Maker` or a value.
        persistent: Makes a value of a persistent id.
        at: Where the pickle begins.
        opaque: A global that is not in `known` becomes an `OpaqueGlobal`; otherwise it is an error.

    Returns:
        The value, and where the pickle ends.

    Raises:
        UnpicklingError: Malformed, an opcode that does more than build, or a global that is not in `known`.
    """
    stream = data if isinstance(data, PickleStream) else PickleStream(lambda at, nbytes: b"", len(data), data)
    machine = _Machine(stream, known, persistent, at, opaque)
    try:
        return machine.run(), machine.at
    except UnpicklingError:
        raise
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, OverflowError, struct.error) as error:
        raise UnpicklingError(f"malformed near byte {machine.at}: {type(error).__name__}: {error}") from error
    except (RecursionError, MemoryError) as error:
        raise UnpicklingError(f"too deep or too large: {type(error).__name__}") from error


class _Machine:
    """One run over one pickle: it reads `data` on from `at`."""

    def __init__(self, stream: PickleStream, known: Mapping[str, Any], persistent: Any, at: int, opaque: bool) -> None:
        self.stream, self.data, self.at = stream, stream.data, at
        self.known, self.persistent, self.opaque = known, persistent, opaque
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.collisions = CollisionLimit()
        self.may_give = _GIVEN_PER_BYTE * min(stream.nbytes, MAX_NBYTES) + _GIVEN_ANYWAY

    def run(self) -> Any:
        table = _OPCODES
        if self.take(1) != b"\x80":
            raise UnpicklingError("it does not begin as a pickle of protocol 2 or later")
        self.proto()
        while True:
            if self.at >= len(self.data):
                self.data = self.stream.extend(self.at + 1)
            opcode = self.data[self.at]
            self.at += 1
            if opcode == 0x2E:  # STOP
                return self.stack.pop()
            act = table.get(opcode)
            if act is None:
                raise UnpicklingError(f"opcode {bytes([opcode])!r} at byte {self.at - 1} is not allowed")
            act(self)

    def take(self, nbytes: int) -> bytes:
        """Return the next bytes."""
        start, end = self.at, self.at + nbytes
        if end > len(self.data):
            self.data = self.stream.extend(end)
        self.at = end
        return self.data[start:end]

    def number(self, width: int) -> int:
        """Return the next number, of so many bytes."""
        return int.from_bytes(self.take(width), "little")

    def line(self) -> str:
        """Return the text up to the end of its line."""
        while (end := self.data.find(b"\n", self.at)) < 0:
            self.data = self.stream.extend(len(self.data) + 1)
        return self.take(end + 1 - self.at)[:-1].decode()

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def marked(self) -> list[Any]:
        """Pop everything above the last mark, and the mark."""
        stack = self.stack
        at = len(stack) - 1
        while stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise UnpicklingError("a mark is missing")
        found = stack[at + 1 :]
        del stack[at:]
        return found

    def find(self, module: Any, name: Any) -> None:
        if type(name) is not str or type(module) is not str:
            raise UnpicklingError("a global whose name is no text")
        if module == "__builtin__":
            module, name = "builtins", _PYTHON_2.get(name, name)
        full = f"{module[:MAX_NAME_CHARS]}.{name[:MAX_NAME_CHARS]}"  # few bytes give the same long ones again
        maker = self.known.get(full)
        if maker is None and self.opaque:
            maker = OpaqueGlobal(full)
        elif maker is None:
            raise unknown_global(full)
        self.push(maker)

    def call(self) -> None:
        """REDUCE and NEWOBJ alike."""
        arguments, maker = self.stack.pop(), self.stack.pop()
        if type(maker) is Maker and type(arguments) is tuple:
            # What a maker is given it may copy, and a few bytes give it the same again.
            self.may_give -= len(arguments) + sum(len(v) for v in arguments if type(v) in _SIZED)
            if self.may_give < 0:
                raise UnpicklingError("what it makes is out of proportion to its length")
        self.push(made_by(maker, arguments))

    def call_with_keywords(self) -> None:
        """NEWOBJ_EX, which no class on the list has."""
        keywords, arguments = self.stack.pop(), self.stack.pop()
        if type(self.stack[-1]) is not OpaqueGlobal or type(keywords) is not dict:
            raise UnpicklingError(f"it calls {shown(self.stack[-1])} with keywords")
        self.push((arguments, keywords))
        self.call()

    def receiver(self, given: Any, *kinds: type) -> Any:
        """Return the object on top that is given something; None of an opaque global, which keeps it."""
        target = self.stack[-1]
        if type(target) is OpaqueGlobal:
            target.held.append(given)
            return None
        if type(target) not in kinds:
            raise UnpicklingError(f"it gives state or members to {shown(target)}, which takes none")
        return target

    def build(self) -> None:
        state = self.stack.pop()
        target = self.receiver(state, Record, OrderedDict)
        if type(target) is Record and target.state is None:
            target.state = state
        elif type(target) is OrderedDict and type(state) is dict:
            target._metadata = state.get("_metadata")  # type: ignore[attr-defined]
            target._others = ", ".join([shown(name) for name in state if name != "_metadata"][:9])  # type: ignore[attr-defined]
        elif target is not None:
            raise UnpicklingError(f"it gives a state to {shown(target)}, which takes no such one")

    def set_items(self, members: list[Any]) -> None:
        if (target := self.receiver(members, *DICTS)) is not None:
            for key, value in zip(members[::2], members[1::2], strict=True):
                target[self.collisions.check(hashable(key))] = value

    def append(self, members: list[Any]) -> None:
        if (target := self.receiver(members, list)) is not None:
            target.extend(members)

    def add(self) -> None:
        members = self.marked()
        if (target := self.receiver(members, set)) is not None:
            target.update(self.collisions.check(hashable(member)) for member in members)

    def persistent_id(self) -> None:
        if self.persistent is None:
            raise UnpicklingError("it refers to something outside of itself")
        self.push(self.persistent(self.stack.pop()))

    def proto(self) -> None:
        if not 2 <= self.number(1) <= 5:
            raise UnpicklingError("it is of another protocol than 2 to 5")

    def put(self, number: int) -> None:
        self.memo[number] = self.stack[-1]

    def tuple_of(self, count: int) -> None:
        found = tuple(self.stack[-count:])
        if len(found) < count or _MARK in found:
            raise UnpicklingError("a tuple lacks members")
        self.stack[-count:] = [found]

    def text(self, width: int) -> None:
        self.push(self.take(self.number(width)).decode("utf-8", "surrogatepass"))

    def long(self, width: int) -> None:
        self.push(int.from_bytes(self.take(self.number(width)), "little", signed=True))


_SIZED = (str, PathText, bytes, bytearray, list, tuple, *DICTS, set, frozenset)


def _with_value(value: Any) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(value)


_OPCODES: dict[int, Callable[[_Machine], None]] = {
    ord(code): act
    for code, act in {
        "\x80": _Machine.proto,
        "\x95": lambda m: m.take(8),  # FRAME
        "(": _with_value(_MARK),
        "0": lambda m: m.stack.pop(),
        "1": lambda m: m.marked(),
        "2": lambda m: m.push(m.stack[-1]),
        "N": _with_value(None),
        "\x88": _with_value(True),
        "\x89": _with_value(False),
        "K": lambda m: m.push(m.number(1)),
        "M": lambda m: m.push(m.number(2)),
        "J": lambda m: m.push(int.from_bytes(m.take(4), "little", signed=True)),
        "\x8a": lambda m: m.long(1),
        "\x8b": lambda m: m.long(4),
        "G": lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
        "X": lambda m: m.text(4),
        "\x8c": lambda m: m.text(1),
        "\x8d": lambda m: m.text(8),
        "B": lambda m: m.push(m.take(m.number(4))),
        "C": lambda m: m.push(m.take(m.number(1))),
        "\x8e": lambda m: m.push(m.take(m.number(8))),
        "\x96": lambda m: m.push(bytearray(m.take(m.number(8)))),
        ")": _with_value(()),
        "]": lambda m: m.push([]),
        "}": lambda m: m.push({}),
        "\x8f": lambda m: m.push(set()),
        "t": lambda m: m.push(tuple(m.marked())),
        "\x85": lambda m: m.tuple_of(1),
        "\x86": lambda m: m.tuple_of(2),
        "\x87": lambda m: m.tuple_of(3),
        "l": lambda m: m.push(m.marked()),
        "\x91": lambda m: m.push(frozenset(keys_of(m.marked()))),
        "a": lambda m: m.append([m.stack.pop()]),
        "e": lambda m: m.append(m.marked()),
        "s": lambda m: m.set_items([m.stack.pop(-2), m.stack.pop()]),
        "u": lambda m: m.set_items(m.marked()),
        "\x90": _Machine.add,
        "q": lambda m: m.put(m.number(1)),
        "r": lambda m: m.put(m.number(4)),
        "\x94": lambda m: m.put(len(m.memo)),
        "h": lambda m: m.push(m.memo[m.number(1)]),
        "j": lambda m: m.push(m.memo[m.number(4)]),
        "c": lambda m: m.find(m.line(), m.line()),
        "\x93": lambda m: m.find(m.stack.pop(-2), m.stack.pop()),
        "R": _Machine.call,
        "\x81": _Machine.call,
        "\x92": _Machine.call_with_keywords,
        "b": _Machine.build,
        "Q": _Machine.persistent_id,
    }.items()
}
"""Not among them: INST, OBJ and EXT, which nobody's checkpoints need, and protocols 0 and 1."""
