"""Writes pickles as in torch's files, opcode by opcode, with only what `torch.load(weights_only=True)` reads.

Protocol 2, as torch uses. A tensor refers to its storage, an entry of the same archive, by a persistent ID.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from asyncckpt.dtypes import DTYPES
from asyncckpt.format.objects import Opaque, Record, decode_value
from asyncckpt.format.state_tree import DICT, LIST, OBJECT, ORDERED_DICT, TUPLE, Node, python_key
from asyncckpt.format.structure import row_major

STORAGES = {
    **{"float64": "Double", "float32": "Float", "float16": "Half", "bfloat16": "BFloat16", "int64": "Long"},
    **{"int32": "Int", "int16": "Short", "int8": "Char", "uint8": "Byte", "bool": "Bool"},
    **{"complex64": "ComplexFloat", "complex128": "ComplexDouble"},
}
"""Storage class of each dtype that has one. Tensors of other dtypes have an `UntypedStorage`."""


class Call(NamedTuple):
    """A value that the reader makes by calling the global `name` with `arguments`."""

    name: str
    arguments: tuple[Any, ...]


class Encoded(NamedTuple):
    """An encoded value: opcodes that push it to the stack without use of the memo."""

    data: bytes


class NotPickledError(TypeError):
    """Raised for a value that `torch.load(weights_only=True)` would not read; the message names its type. Internal."""


class PickleImage:
    """Writer of one pickle.

    Args:
        tensor: Returns (dtype, shape) of the tensor with a number.
        objects: JSON forms of the objects, by number.
    """

    def __init__(self, tensor: Callable[[int], tuple[str, tuple[int, ...]]], objects: Sequence[Any]) -> None:
        self._tensor, self._objects = tensor, objects
        self._out: list[bytes] = [b"\x80\x02"]
        self._memo: dict[int, int] = {}

    def of_node(self, node: Node) -> bytes:
        """Return the pickle of the value of a tree's node.

        Raises:
            NotPickledError: A leaf cannot be written.
        """
        self._node(node)
        return b"".join((*self._out, b"."))

    def of_value(self, value: Any) -> bytes:
        """Return the pickle of a value, which may contain `Record`, `Call` and `Encoded`.

        Raises:
            NotPickledError: A value in it cannot be written.
        """
        self._value(value)
        return b"".join((*self._out, b"."))

    def _put(self, *parts: bytes) -> None:
        self._out += parts

    def _node(self, node: Node) -> None:
        kind = node[0]
        if kind == DICT and node[2:] == (("Counter",),):
            self._put(b"ccollections\nCounter\n(}")
            self._members(node[1])
            self._put(b"tR")
        elif kind == DICT:  # also for a defaultdict, which `weights_only` does not read
            self._put(b"}")
            self._members(node[1])
        elif kind == ORDERED_DICT:
            self._put(b"ccollections\nOrderedDict\n)R")
            self._members(node[1])
            if node[2] is not None:
                self._put(b"}")
                self._value("_metadata")
                self._metadata(decode_value(self._objects[node[2]], Opaque))
                self._put(b"sb")
        elif kind == LIST:
            self._put(b"](")
            for child in node[1]:
                self._node(child)
            self._put(b"e")
        elif kind == TUPLE:
            self._put(b"(")
            for child in node[1]:
                self._node(child)
            self._put(b"t")
        elif kind == OBJECT:
            self._value(decode_value(self._objects[node[1]], Opaque))
        elif node[1] in self._memo:
            self._put(b"j", struct.pack("<I", self._memo[node[1]]))
        else:
            self._tensor_of(node[1])
            self._memo[node[1]] = len(self._memo)
            self._put(b"r", struct.pack("<I", self._memo[node[1]]))

    def _members(self, members: tuple[Any, ...]) -> None:
        self._put(b"(")
        for key, child in zip(members[::2], members[1::2], strict=True):
            self._value(python_key(key))
            self._node(child)
        self._put(b"u")

    def _metadata(self, metadata: Any) -> None:
        """Write the `_metadata` of a module's state dict, as an OrderedDict if it is a dict."""
        if not isinstance(metadata, dict):
            self._value(metadata)
            return
        self._put(b"ccollections\nOrderedDict\n)R(")
        for key, value in metadata.items():
            self._value(key)
            self._value(value)
        self._put(b"u")

    def _tensor_of(self, number: int) -> None:
        dtype, shape = self._tensor(number)
        storage = STORAGES.get(dtype)
        numel, itemsize = math.prod(shape), DTYPES[dtype].itemsize
        rebuild = b"_rebuild_tensor_v2" if storage else b"_rebuild_tensor_v3"
        self._put(b"ctorch._utils\n", rebuild, b"\n((")
        self._value("storage")
        self._put(f"ctorch\n{storage}Storage\n".encode() if storage else b"ctorch.storage\nUntypedStorage\n")
        self._value(str(len(self._memo)))
        self._value("cpu")
        self._value(numel if storage else numel * itemsize)
        self._put(b"tQ")
        self._value(0)
        self._value(shape)
        self._value(row_major(shape))
        self._put(b"\x89ccollections\nOrderedDict\n)R")
        if not storage:
            self._put(f"ctorch\n{dtype}\n".encode())
        self._put(b"tR")

    def _value(self, value: Any) -> None:
        kind = type(value)
        if kind in _SIMPLE:
            self._put(_SIMPLE[kind](value))
        elif kind is tuple:
            self._put(b"(")
            for member in value:
                self._value(member)
            self._put(b"t")
        elif kind is list:
            self._put(b"](")
            for member in value:
                self._value(member)
            self._put(b"e")
        elif kind is dict:
            self._put(b"}(")
            for key, member in value.items():
                self._value(key)
                self._value(member)
            self._put(b"u")
        elif kind in (bytes, bytearray, complex, set):
            self._called(*_CALLS[kind](value))
        elif kind is Opaque:
            self._opaque(value)
        elif kind is Encoded:
            self._put(value.data)
        elif kind is Call:
            self._called(value.name, value.arguments)
        elif kind is Record:
            self._put(_global(value.kind), b")\x81")
            if value.state is not None:
                self._value(value.state)
                self._put(b"b")
        else:
            raise NotPickledError(f"a {kind.__name__}")

    def _called(self, name: str, arguments: tuple[Any, ...]) -> None:
        self._put(_global(name))
        self._value(arguments)
        self._put(b"R")

    def _opaque(self, value: Opaque) -> None:
        if value.tag == "torch.dtype":
            self._put(f"ctorch\n{value.payload}\n".encode())
        elif value.tag == "torch.Size":
            self._called("torch.Size", (tuple(value.payload),))
        elif value.tag == "torch.device":
            kind, _, index = str(value.payload).partition(":")
            self._called("torch.device", (kind, int(index)) if index else (kind,))
        else:
            raise NotPickledError(f"a {value.tag}")


def encoded(value: Any) -> Encoded:
    """Encode a value without tensors once, for use in many places.

    Raises:
        NotPickledError: A value in it cannot be written.
    """
    return Encoded(PickleImage(_no_tensor, ()).of_value(value)[2:-1])


def _no_tensor(number: int) -> tuple[str, tuple[int, ...]]:
    raise AssertionError(f"tensor {number} in a value without tensors")


@functools.cache
def _global(name: str) -> bytes:
    module, _, attribute = name.rpartition(".")
    return f"c{module}\n{attribute}\n".encode()


def _int(value: int) -> bytes:
    if 0 <= value < 1 << 8:
        return b"K" + bytes([value])
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    if len(data) > 255:
        raise NotPickledError(f"an int of {len(data)} bytes")
    return b"\x8a" + bytes([len(data)]) + data


def _text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


_SIMPLE: dict[type, Callable[[Any], bytes]] = {
    type(None): lambda value: b"N",
    bool: lambda value: b"\x88" if value else b"\x89",
    int: _int,
    float: lambda value: b"G" + struct.pack(">d", value),
    str: _text,
}
_CALLS: dict[type, Callable[[Any], tuple[str, tuple[Any, ...]]]] = {
    bytes: lambda value: ("_codecs.encode", (value.decode("latin1"), "latin1")),
    bytearray: lambda value: ("builtins.bytearray", (bytes(value),)),
    complex: lambda value: ("builtins.complex", (value.real, value.imag)),
    set: lambda value: ("builtins.set", (list(value),)),
}
