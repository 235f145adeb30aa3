"""Files of tensors as pieces, without a byte of a tensor being read: what `torch.save` and safetensors would write.

`torch.save` itself makes the file, told to skip the elements; where they belong it leaves room, in the order in which
it met their storages. So any object, on any device, becomes the very file that the framework would have written.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.serialization import register_package, skip_data

from asyncckpt.dtypes import DTYPES
from asyncckpt.errors import UnsupportedLeafError
from asyncckpt.planning.torch_types import flat_bytes

_FIRST = -1
"""Priority of our tagger: before those of torch, of which the first has 10."""

_HEADER_ALIGNMENT = 8
"""Of what safetensors itself writes."""

TorchSave = Callable[..., None]
_torch_save: TorchSave = torch.save
"""The real one, whatever stands in its place while an adapter records."""

_local = threading.local()

patching = threading.RLock()
"""Held while something stands in the place of `torch.save`, so that of two threads each puts back what it found."""


@dataclass(frozen=True, slots=True)
class Captured:
    """One file, front to back: bytes that are known, and tensors of bytes that share memory with what was saved."""

    pieces: tuple[bytes | torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Length of the file."""
        return sum(p.numel() if isinstance(p, torch.Tensor) else len(p) for p in self.pieces)


def _note(storage: Any) -> None:
    """Called by torch for every storage that it pickles; never tells a location, so that torch's own taggers do."""
    met = getattr(_local, "met", None)
    if met is not None:
        met.setdefault(storage._cdata, storage)


register_package(_FIRST, _note, lambda storage, location: None)


class _Sink:
    """What torch writes to: bytes, and seeks over the room of each storage."""

    def __init__(self) -> None:
        self.parts: list[bytearray | int] = []

    def write(self, data: Any) -> int:
        if not self.parts or isinstance(self.parts[-1], int):
            self.parts.append(bytearray())
        part = self.parts[-1]
        assert isinstance(part, bytearray)
        part += data
        return len(data)

    def seek(self, nbytes: int, whence: int = 0) -> int:
        assert whence == 1, "torch seeks forward only"
        self.parts.append(nbytes)
        return 0

    def flush(self) -> None:
        pass


def captured_torch_save(value: Any, **options: Any) -> Captured:
    """Return the file that `torch.save(value, file, **options)` writes, but for CRC-32s of elements, which are zero.

    Raises:
        UnsupportedLeafError: torch left another room than its storages take.
        Exception: Whatever `torch.save` raises.
    """
    sink = _Sink()
    met: dict[int, Any] = {}
    _local.met = met
    try:
        skipping = skip_data()
        with skipping, _whole_inside(skipping):
            _torch_save(value, sink, **options)
    finally:
        _local.met = None
    storages = [storage for storage in met.values() if storage.nbytes()]
    rooms = [part for part in sink.parts if isinstance(part, int)]
    if rooms != [storage.nbytes() for storage in storages]:
        raise UnsupportedLeafError(
            f"torch.save left room for {len(rooms)} storages of {sum(rooms)} bytes, and met {len(storages)} others",
            leaf="",
            type_name=type(value).__name__,
        )
    found = iter(storages)
    return Captured(
        tuple(bytes(part) if isinstance(part, bytearray) else _bytes_of(next(found)) for part in sink.parts)
    )


@contextlib.contextmanager
def _whole_inside(skipping: Any) -> Iterator[None]:
    """Let what an object saves while it is pickled itself, into bytes of its own say, have its elements."""
    with patching:
        outer = torch.save

        def save(*arguments: Any, **options: Any) -> None:
            met = getattr(_local, "met", None)
            if met is None:  # another thread, or inside such a save
                outer(*arguments, **options)
                return
            _local.met = None
            skipping.__exit__(None, None, None)
            try:
                _torch_save(*arguments, **options)
            finally:
                skipping.__enter__()
                _local.met = met

        torch.save = save
        try:
            yield
        finally:
            torch.save = outer


def _bytes_of(storage: Any) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def captured_safetensors(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> Captured:
    """Return the file that `safetensors.torch.save_file(tensors, file, metadata)` writes, byte for byte.

    Raises:
        UnsupportedLeafError: A sparse tensor, or a dtype that safetensors lacks.
    """
    named = [(name, tensor, _stored_dtype(name, tensor)) for name, tensor in tensors.items()]
    named.sort(key=lambda one: (-_rank_of(one[2]), one[0]))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at, elements = 0, []
    for name, tensor, dtype in named:
        nbytes = tensor.numel() * tensor.itemsize
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
        if nbytes:
            elements.append(flat_bytes(tensor))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    return Captured((len(text).to_bytes(8, "little") + text, *elements))


_ORDER = (
    *("BOOL", "F4", "F6_E2M3", "F6_E3M2", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"),
    *("I16", "U16", "F16", "BF16", "I32", "U32", "F32", "C64", "F64", "I64", "U64"),
)
"""The library writes the last of these first. Source: safetensors 0.8, `tensor.rs`, enum Dtype."""


def _rank_of(dtype: str) -> int:
    return _ORDER.index(dtype) if dtype in _ORDER else -1


def _stored_dtype(name: str, tensor: torch.Tensor) -> str:
    dtype = DTYPES.get(str(tensor.dtype).removeprefix("torch."))
    if tensor.layout != torch.strided or dtype is None or dtype.safetensors is None:
        raise UnsupportedLeafError(
            f"{name}: a tensor of dtype {tensor.dtype} and layout {tensor.layout} has no place in safetensors files",
            leaf=name,
            type_name=str(tensor.dtype),
        )
    return dtype.safetensors


def pieces_of(content: Captured | bytes) -> Sequence[bytes | torch.Tensor]:
    """Return the pieces of a file that was captured or is known whole."""
    return content.pieces if isinstance(content, Captured) else (content,)
