"""The restricted unpickler: it builds plain values, and accepts a fixed list of globals.

Nothing that a pickle names is imported or called, and Python's own `pickle` is not used. A global is looked up in the
caller's table of `Maker`s: functions of this package that return plain values or `Record`s. The opcode REDUCE calls
only a `Maker`. BUILD sets only the state of a `Record` and the `_metadata` of an OrderedDict.

If the caller allows it, a global that is not in the table becomes an `OpaqueGlobal`, on which all operations have no
effect. A value that contains one never becomes a tensor (`pickle_globals`), and its leaf is an `UnreadLeaf`
(`pickle_tree`).

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
"""Longest pickle that is read; all of it is in memory. The metadata of 100,000 chunks take about 20 MB. Chosen, not
measured."""

WINDOW_NBYTES = 1 << 20
"""Bytes that are read from a file at once, at least."""

MAX_KEY_MEMBERS = 1000
"""Limit of members in a tuple or frozenset that is a key or a member of a set: Python does not limit the time or the
recursion of hashing. Chosen, not measured."""

MAX_NAME_CHARS = 200
"""The name of a module, or a name in it, is cut at this length."""

_GIVEN_PER_BYTE, _GIVEN_ANYWAY = 16, 1 << 16
"""Limit of bytes and members passed to makers: so many for each byte of the pickle, and so many in any case. A few
opcodes can pass one value many times."""

_GIVEN_A_CLASS = "torch._utils._rebuild_wrapper_subclass"
"""Creates a tensor of the class that is its first argument, such as DTensor; messages name that class."""

_PYTHON_2 = {"long": "int", "unicode": "str"}
"""Builtins that had other names in Python 2 (module `__builtin__`). Pickles up to protocol 2 use the old names."""

_MARK = object()


class UnpicklingError(ValueError):
    """The pickle cannot be read. Callers convert it into an asyncckpt error.

    Attributes:
        name: The global that is not on the list, if that is the reason.
    """

    def __init__(self, text: str, name: str | None = None) -> None:
        super().__init__(text)
        self.name = name


def check_length(nbytes: int) -> None:
    """Raise `UnpicklingError` if a pickle is longer than `MAX_NBYTES`."""
    if nbytes > MAX_NBYTES:
        raise UnpicklingError(f"a pickle of {nbytes} bytes, the limit is {MAX_NBYTES}", "a large pickle")


def unknown_global(name: str) -> UnpicklingError:
    """Return the error for a global that is not on the list."""
    return UnpicklingError(f"it names the global {name!r}, which is not on the list of what may be read", name)


class PickleStream:
    """One or more pickles at the beginning of a file, read as far as they are interpreted: their length is not stored.

    Args:
        read_at: Returns exactly `length` bytes at `offset` of the file.
        nbytes: Length of the file in bytes.
        data: The beginning of the file, as far as it was read.
    """

    def __init__(self, read_at: Callable[[int, int], bytes], nbytes: int, data: bytes = b"") -> None:
        check_length(len(data))
        self._read_at, self.nbytes, self.data = read_at, nbytes, data

    def extend(self, end: int) -> bytes:
        """Read on until `data` reaches byte `end`; return `data`.

        Raises:
            UnpicklingError: The file ends before, or `end` is beyond `MAX_NBYTES`.
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
    """A global that is on the list.

    Attributes:
        name: Its full name.
        make: The function of this package that REDUCE and NEWOBJ call. None: it cannot be called.
    """

    name: str
    make: Callable[..., Any] | None = None


class OpaqueGlobal:
    """A global that is not on the list, or the result of calling it. Nothing of it is imported, called or set.

    It is compared and hashed by identity, so that it may be a key.

    Attributes:
        name: Name of the global, printable and cut at a limit.
        held: Arguments, state and items that were passed to it; used only to count tensors.
    """

    __slots__ = ("held", "name")

    def __init__(self, name: str, *held: Any) -> None:
        text = name[: 2 * MAX_NAME_CHARS]
        self.name = text if text.isprintable() else repr(text)[1:-1][: 2 * MAX_NAME_CHARS]
        self.held: list[Any] = list(held)

    def made(self, arguments: tuple[Any, ...]) -> OpaqueGlobal:
        """Return the `OpaqueGlobal` for the result of calling it."""
        name, first = self.name, arguments[0] if arguments else None
        if isinstance(first, (OpaqueGlobal, Maker)):
            if name == _GIVEN_A_CLASS:
                name = first.name
            elif name == "builtins.getattr" and type(arguments[-1]) is str:  # a nested class, in protocol 2
                name = f"{first.name}.{arguments[-1][:MAX_NAME_CHARS]}"
        return OpaqueGlobal(name, arguments)


class PathText(str):
    """Stands for a path of pathlib."""

    __slots__ = ()


class LayoutText(str):
    """Stands for a torch.layout."""

    __slots__ = ()


class CounterDict(dict[Any, Any]):
    """Stands for a Counter. `form` is the last element of its node (`format/state_tree.py`)."""

    form = ("Counter",)


class DefaultDict(dict[Any, Any]):
    """Stands for a defaultdict. `form` is the last element of its node, with the name of the default factory."""

    form: tuple[str, str | None] = ("defaultdict", None)


READ_AS: dict[type, tuple[type, str]] = {
    PathText: (str, "a path became a text"),
    LayoutText: (str, "a torch.layout became a text"),
    CounterDict: (dict, "a Counter became a dict"),
    DefaultDict: (dict, "a defaultdict became a dict"),
}
"""By each of these types: the plain type that it becomes in a leaf or a key, and the sentence that reports this."""

DICTS = (dict, OrderedDict, CounterDict, DefaultDict)
"""Types to which SETITEMS may add members."""


def shown(value: Any) -> str:
    """Return a text for a message: of a container only its type, since a pickle may nest one in itself."""
    if type(value) is str:
        return repr(value[:100])
    return value.name if type(value) is Maker else f"a {type(value).__name__}"


def made_by(maker: Any, arguments: Any) -> Any:
    """Return the result of REDUCE and NEWOBJ.

    Returns:
        The value that a `Maker` returns. An `OpaqueGlobal` if `maker` or one of the arguments is one.

    Raises:
        UnpicklingError: `maker` cannot be called, or refuses the arguments.
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
    """Return the members of a value: keys and values, items, or what was passed to an `OpaqueGlobal`."""
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, (OpaqueGlobal, Record)):
        return value.held if isinstance(value, OpaqueGlobal) else (value.state,)
    return value if isinstance(value, (list, tuple, set, frozenset)) else ()


def keys_of(keys: Iterable[Any]) -> list[Any]:
    """Return the keys of one dict, or the members of one set.

    Raises:
        UnpicklingError: See `hashable`.
        ValueError: Too many have the same hash.
    """
    return checked_hashes(map(hashable, keys))


def hashable(key: Any) -> Any:
    """Return `key`, if it may be hashed as a key or as a member of a set.

    IMPORTANT: hashing a tuple recurses without a limit, so that deep nesting overflows the C stack. It visits a member
    once for each reference, so that n levels of tuples with two references each take 2**n steps.

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
        data: The bytes, or the stream that they are read from.
        known: The allowed globals by `module.name`: a `Maker` or a value.
        persistent: Returns the value of a persistent ID.
        at: Offset of the pickle in `data`.
        opaque: Whether a global that is not in `known` becomes an `OpaqueGlobal`; False: it is an error.

    Returns:
        The value, and the offset of the end of the pickle.

    Raises:
        UnpicklingError: The pickle is malformed, or has an opcode or a global that is not allowed.
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
    """Interprets one pickle, from byte `at` of `data`."""

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
        """Return the next number, of `width` bytes."""
        return int.from_bytes(self.take(width), "little")

    def line(self) -> str:
        """Return the text up to the next end of line."""
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
        full = f"{module[:MAX_NAME_CHARS]}.{name[:MAX_NAME_CHARS]}"  # cut: a few bytes can repeat a long name
        maker = self.known.get(full)
        if maker is None and self.opaque:
            maker = OpaqueGlobal(full)
        elif maker is None:
            raise unknown_global(full)
        self.push(maker)

    def call(self) -> None:
        """Execute REDUCE or NEWOBJ."""
        arguments, maker = self.stack.pop(), self.stack.pop()
        if type(maker) is Maker and type(arguments) is tuple:
            # A maker may copy its arguments, and a few bytes can pass the same arguments many times.
            self.may_give -= len(arguments) + sum(len(v) for v in arguments if type(v) in _SIZED)
            if self.may_give < 0:
                raise UnpicklingError("what it makes is out of proportion to its length")
        self.push(made_by(maker, arguments))

    def call_with_keywords(self) -> None:
        """Execute NEWOBJ_EX; only an `OpaqueGlobal` may be called with keywords."""
        keywords, arguments = self.stack.pop(), self.stack.pop()
        if type(self.stack[-1]) is not OpaqueGlobal or type(keywords) is not dict:
            raise UnpicklingError(f"it calls {shown(self.stack[-1])} with keywords")
        self.push((arguments, keywords))
        self.call()

    def receiver(self, given: Any, *kinds: type) -> Any:
        """Return the top of the stack, to which `given` is to be added. None: it is an `OpaqueGlobal`, which got it."""
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
"""What executes each opcode. INST, OBJ, EXT and protocols 0 and 1 are refused: checkpoints do not use them."""
