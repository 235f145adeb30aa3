"""A pickle as data: an interpreter of the opcodes that only builds, and of a fixed list of globals.

Nothing that a pickle names is imported or called. A global is looked up in the caller's table of `Maker`s, which are
functions of ours that return plain values or `Record`s. REDUCE calls a `Maker` and nothing else; BUILD gives a state
to a `Record`, or an OrderedDict its `_metadata`, and nothing else. Python's own `pickle` takes no part.
Where strangers are let in, a global that is not in the table becomes a `Stranger`, which swallows what is done to it.
Source of the opcodes: CPython's `pickletools`.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from asyncckpt.foreign.long_values import FilePickle, HeldPickle, LongBytes, LongText
from asyncckpt.foreign.numpy_globals import TAKES_LONG
from asyncckpt.foreign.pickle_cursor import Cursor
from asyncckpt.foreign.pickle_values import (
    Defaulting,
    Maker,
    PathText,
    Tally,
    hashable,
    is_encoded_next,
    keys_of,
    shown,
    unknown_global,
)
from asyncckpt.foreign.refusals import MAX_NBYTES, UnpicklingError
from asyncckpt.foreign.strangers import MAX_NAME_CHARS, Stranger, made_by
from asyncckpt.format.hashes import Hashes
from asyncckpt.format.records import Record

_GIVEN_PER_BYTE, _GIVEN_ANYWAY = 16, 1 << 16
_MARK = object()


def unpickle_data(
    data: bytes | FilePickle,
    known: Mapping[str, Any],
    persistent: Callable[[Any], Any] | None = None,
    at: int = 0,
    *,
    strangers: bool = False,
) -> tuple[Any, int]:
    """Interpret the pickle that begins at `at`.

    Args:
        data: The bytes; or where they lie, and then long ones in it become `LongBytes`, which stay there.
        known: By `module.name`: what a global stands for, a `Maker` or a value.
        persistent: Makes a value of a persistent id.
        at: Where the pickle begins.
        strangers: A global that is not in `known` becomes a `Stranger`; otherwise it is an error.

    Returns:
        The value, and where the pickle ends.

    Raises:
        UnpicklingError: Malformed, an opcode that does more than build, or a global that is not in `known`.
    """
    machine = _Machine(HeldPickle(data) if isinstance(data, bytes) else data, known, persistent, at, strangers)
    try:
        return machine.run(), machine.place
    except UnpicklingError:
        raise
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, OverflowError, struct.error) as error:
        raise UnpicklingError(f"malformed near byte {machine.place}: {type(error).__name__}: {error}") from error
    except (RecursionError, MemoryError) as error:
        raise UnpicklingError(f"too deep or too large: {type(error).__name__}") from error


class _Machine(Cursor):
    """One run over one pickle."""

    def __init__(self, pickle: Any, known: Mapping[str, Any], persistent: Any, at: int, strangers: bool) -> None:
        super().__init__(pickle, at)
        self.known, self.persistent, self.strangers = known, persistent, strangers
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.hashes = Hashes()
        self.may_give = _GIVEN_PER_BYTE * min(pickle.nbytes, MAX_NBYTES) + _GIVEN_ANYWAY

    def run(self) -> Any:
        table = _OPCODES
        if self.place >= self.pickle.nbytes or self.take(1) != b"\x80":
            raise UnpicklingError("it does not begin as a pickle of protocol 2 or later")
        self.proto()
        while True:
            if self.at >= len(self.data):
                self.bring(1)
            opcode = self.data[self.at]
            self.at += 1
            if opcode == 0x2E:  # STOP
                return self.stack.pop()
            act = table.get(opcode)
            if act is None:
                raise UnpicklingError(f"opcode {bytes([opcode])!r} at byte {self.place - 1} is not allowed")
            act(self)

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

    def find(self, module: str, name: str) -> None:
        if module == "__builtin__":  # Python 2's name, which protocol 2 uses
            module = "builtins"
        full = f"{module[:MAX_NAME_CHARS]}.{name[:MAX_NAME_CHARS]}"  # few bytes give the same long ones again
        maker = self.known.get(full)
        if maker is None and self.strangers:
            maker = Stranger(full)
        elif maker is None:
            raise unknown_global(full)
        self.push(maker)

    def global_(self) -> None:
        module = self.line()
        self.find(module, self.line())

    def stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if type(name) is not str or type(module) is not str:
            raise UnpicklingError("a global whose name is no text")
        self.find(module, name)

    def call(self) -> None:
        """REDUCE and NEWOBJ alike."""
        arguments, maker = self.stack.pop(), self.stack.pop()
        if type(maker) is Maker and type(arguments) is tuple:
            # What a maker is given it may copy, and a few bytes give it the same again.
            self.may_give -= len(arguments) + sum(len(v) for v in arguments if type(v) in _SIZED)
            if self.may_give < 0:
                raise UnpicklingError("what it makes is out of proportion to its length")
            if maker.name not in TAKES_LONG and any(type(v) is LongBytes for v in arguments):
                arguments = tuple(v.whole() if type(v) is LongBytes else v for v in arguments)
        self.push(made_by(maker, arguments))

    def call_with_keywords(self) -> None:
        """NEWOBJ_EX, which no class on the list has."""
        keywords, arguments = self.stack.pop(), self.stack.pop()
        if type(self.stack[-1]) is not Stranger or type(keywords) is not dict:
            raise UnpicklingError(f"it calls {shown(self.stack[-1])} with keywords")
        self.push((arguments, keywords))
        self.call()

    def swallowed(self, members: Any) -> bool:
        """Whether what stands on top is a stranger, which gets what another one would be given."""
        target = self.stack[-1]
        if type(target) is not Stranger:
            return False
        target.held.append(members)
        return True

    def build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if self.swallowed(state):
            return
        if type(target) is Record and target.state is None:
            target.state = state
        elif type(target) is OrderedDict and type(state) is dict:
            target._metadata = state.get("_metadata")  # type: ignore[attr-defined]
            others = [shown(name) for name in state if name != "_metadata"]
            target._others = ", ".join(others[:9])  # type: ignore[attr-defined]
        else:
            raise UnpicklingError(f"it gives a state to a {type(target).__name__}")

    def set_items(self, members: list[Any]) -> None:
        target = self.stack[-1]
        if self.swallowed(members):
            return
        if type(target) not in _DICTS or len(members) % 2:
            raise UnpicklingError(f"it sets items of a {type(target).__name__}")
        for i in range(0, len(members), 2):
            target[self.hashes.met(hashable(members[i]))] = members[i + 1]

    def append(self, members: list[Any]) -> None:
        if self.swallowed(members):
            return
        if type(self.stack[-1]) is not list:
            raise UnpicklingError(f"it appends to a {type(self.stack[-1]).__name__}")
        self.stack[-1].extend(members)

    def add(self) -> None:
        members = self.marked()
        if self.swallowed(members):
            return
        if type(self.stack[-1]) is not set:
            raise UnpicklingError(f"it adds to a {type(self.stack[-1]).__name__}")
        self.stack[-1].update(self.hashes.met(hashable(member)) for member in members)

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
        if len(self.stack) < count or _MARK in self.stack[len(self.stack) - count :]:
            raise UnpicklingError("a tuple lacks members")
        found = tuple(self.stack[len(self.stack) - count :])
        del self.stack[len(self.stack) - count :]
        self.push(found)

    def text(self, width: int) -> None:
        nbytes = self.number(width)
        if is_encoded_next(self.stack, nbytes, _MARK):
            self.push(self.long_text(nbytes))
        else:
            self.push(self.take(nbytes).decode("utf-8", "surrogatepass"))

    def long(self, width: int) -> None:
        self.push(int.from_bytes(self.take(self.number(width)), "little", signed=True))


_DICTS = (dict, OrderedDict, Tally, Defaulting)
_SIZED = (str, LongText, LongBytes, PathText, bytes, bytearray, list, tuple, *_DICTS, set, frozenset)


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
        "B": lambda m: m.push(m.bytes_of(4)),
        "C": lambda m: m.push(m.bytes_of(1)),
        "\x8e": lambda m: m.push(m.bytes_of(8)),
        "\x96": lambda m: m.push(m.bytes_of(8, bytearray)),
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
        "c": _Machine.global_,
        "\x93": _Machine.stack_global,
        "R": _Machine.call,
        "\x81": _Machine.call,
        "\x92": _Machine.call_with_keywords,
        "b": _Machine.build,
        "Q": _Machine.persistent_id,
    }.items()
}
"""Not among them: INST, OBJ and EXT, which nobody's checkpoints need, and protocols 0 and 1."""
