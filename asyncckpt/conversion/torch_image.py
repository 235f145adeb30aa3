"""Pickles for `torch.load(weights_only=True)` of values as a pickle of torch had them, beyond what a structure says."""

from __future__ import annotations

import math
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from asyncckpt.dtypes import DTYPES
from asyncckpt.errors import UnsupportedLeafError
from asyncckpt.foreign.as_saved import SavedView
from asyncckpt.foreign.long_values import LongBytes
from asyncckpt.foreign.pickle_values import Defaulting, LayoutText, PathText, Tally
from asyncckpt.foreign.refusals import MAX_NBYTES
from asyncckpt.foreign.torch_globals import STORAGES
from asyncckpt.format.archive import Mixed, TextPayload, mixed
from asyncckpt.format.objects import Opaque
from asyncckpt.format.pickle_image import Call, Encoded, PickleImage, encoded
from asyncckpt.format.tree import Node
from asyncckpt.storage import latin1

_MAX_TEXT_NBYTES = 0xFFFFFFFF
"""A longer one needs an opcode of protocol 4, which weights_only has none of."""

Pieces = Callable[[int], Iterable[bytes]]
_CLASSES = {dtype: f"ctorch\n{name}Storage\n".encode() for name, dtype in STORAGES.items()}
_BYTES = b"ctorch.storage\nUntypedStorage\n"


class TorchView(NamedTuple):
    """A tensor of the source as one of the target.

    Attributes:
        saved: What it was.
        payload: Number of the tensor whose elements are the storage that it lies in.
        storage_dtype: Of that storage; None: bytes.
        offset: Of its first element there, in its own elements.
        stride: Its strides there, in elements.
    """

    saved: SavedView
    payload: int
    storage_dtype: str | None
    offset: int
    stride: tuple[int, ...]


class TorchImage(PickleImage):
    """One pickle, with three more kinds of nodes than a structure's.

        ("V", view)                     a `TorchView`; those of one `ref` are one object
        ("P", value)                    an object leaf as the interpreter of pickles made it
        ("S", path, node)               a container that is one object with the others of that path

    Args:
        tensor, objects: See `PickleImage`.
        pieces: The bytes of a "B" leaf in pieces of whole steps (`storage.latin1`), by its tensor's number.
    """

    def __init__(
        self, tensor: Callable[[int], tuple[str, tuple[int, ...]]], objects: Sequence[Any], pieces: Pieces
    ) -> None:
        super().__init__(tensor, objects, _in_pieces)
        self._pieces = pieces
        self._keys: dict[int, str] = {}
        self._texts: dict[int, TextPayload] = {}  # by how many parts of `_out` stand before it

    def content_of(self, node: Node) -> bytes | Mixed:
        """Return the pickle of everything below a node; long bytes in it are yet to be read.

        Raises:
            NotPickledError: A leaf cannot be.
            UnsupportedLeafError: It is longer than pickles are that are read.
            CorruptCheckpointError, OSError: Long bytes cannot be read.
        """
        self._node(node)
        nbytes = sum(map(len, self._out)) + 1
        if nbytes > MAX_NBYTES:
            raise UnsupportedLeafError(
                f"what is no tensor would be a pickle of {nbytes} bytes; no more than {MAX_NBYTES} are read again. "
                "Choose other leaves by keys"
            )
        if not self._texts:
            return b"".join((*self._out, b"."))
        pieces: list[bytes | TextPayload] = []
        done = 0
        for at, text in self._texts.items():
            pieces += [b"".join(self._out[done:at]), text]
            done = at
        return mixed([*pieces, b"".join((*self._out[done:], b"."))])

    def _node(self, node: Node) -> None:
        if node[0] == "V":
            self._once(-1 - id(node[1].saved.ref), lambda: self._view(node[1]))  # numbers are those of tensors
        elif node[0] == "S":
            self._once(node[1], lambda: self._node(node[2]))
        elif node[0] == "P":
            self._value(_written_as(node[1]))
        elif node[0] == "B":
            self._once(("B", node[1]), lambda: self._long_bytes(node[1]))
        else:
            super()._node(node)

    def _long_bytes(self, number: int) -> None:
        """As `PickleImage` writes bytes: a text, whose length has to be known, and how to encode that."""
        text = text_of(number, self._pieces(number))
        if text.nbytes > _MAX_TEXT_NBYTES:
            raise UnsupportedLeafError(
                f"{text.nbytes} bytes of text, or more, are no member of a pickle that torch.load(weights_only=True) "
                "reads. Choose other leaves by keys, or save long bytes as a tensor"
            )
        self._put(b"c_codecs\nencode\n(X" + struct.pack("<I", text.nbytes))
        self._texts[len(self._out)] = text
        self._value("latin1")
        self._put(b"tR")

    def _view(self, view: TorchView) -> None:
        ref = view.saved.ref
        arguments = [self._storage(view), view.offset, ref.size, view.stride]
        arguments += [ref.requires_grad and not ref.is_parameter, Call("collections.OrderedDict", ())]
        if view.storage_dtype is None:
            arguments.append(Opaque("torch.dtype", ref.dtype))
        version = "v3" if view.storage_dtype is None else "v2"
        made = Call(f"torch._utils._rebuild_tensor_{version}", tuple(arguments))
        if ref.is_parameter:
            hooks = Call("collections.OrderedDict", ())
            made = Call("torch._utils._rebuild_parameter", (made, ref.requires_grad, hooks))
        self._value(made)

    def _storage(self, view: TorchView) -> Encoded:
        """Return the persistent id of the storage that a view lies in."""
        dtype, shape = self._tensor(view.payload)
        nbytes = math.prod(shape) * DTYPES[dtype].itemsize
        if view.payload not in self._keys:
            self._keys[view.payload] = str(len(self.storages))
            self.storages.append(view.payload)
        of, kind = view.storage_dtype, _BYTES
        if of is not None:
            nbytes, kind = nbytes // DTYPES[of].itemsize, _CLASSES[of]
        return Encoded(encoded(("storage", Encoded(kind), self._keys[view.payload], "cpu", nbytes)).data + b"Q")


def text_of(number: int, pieces: Iterable[bytes]) -> TextPayload:
    """Return what is to be known of the text that stands for the bytes of a tensor, which is read here and not kept."""
    starts, crc, step = [0], 0, latin1.STEP_NBYTES
    for piece in pieces:
        for at in range(0, len(piece), step):
            text = latin1.encoded(piece[at : at + step])
            starts.append(starts[-1] + len(text))
            crc = zlib.crc32(text, crc)
        if starts[-1] > _MAX_TEXT_NBYTES:  # nobody needs the rest
            break
    return TextPayload(number, starts[-1], tuple(starts), step, crc)


def _in_pieces(number: int) -> bytes:
    raise AssertionError(f"the bytes of tensor {number} at once")


def storage_dtype(dtypes: set[str]) -> str | None:
    """Return the dtype of a storage for tensors of these; None: bytes, which hold those of any."""
    (dtype, *others) = dtypes
    return dtype if not others and dtype in _CLASSES else None


def _written_as(value: Any) -> Any:
    """Return what `PickleImage` writes for a value of the interpreter's, of the types that it was saved with."""
    kind = type(value)
    if kind in (dict, Defaulting):
        return {_written_as(key): _written_as(member) for key, member in value.items()}
    if kind is Tally:
        return Call("collections.Counter", (_written_as(dict(value)),))
    if kind is OrderedDict:
        return Call("collections.OrderedDict", ([(_written_as(k), _written_as(v)) for k, v in value.items()],))
    if kind is LayoutText:
        return Call("torch.serialization._get_layout", (str(value),))
    if kind is PathText:
        return str(value)
    if kind in (list, tuple, set):
        return kind(_written_as(member) for member in value)
    return value.whole() if kind is LongBytes else value
