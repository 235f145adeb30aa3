"""Captures the files that a framework's own saving code would write, without copying the tensors.

During a `recording`, calls of `torch.save` and safetensors' `save_file` in this thread are captured if their path is
below a given directory. The framework writes other files, which are small, to that directory, and they are read back.
So every version of a framework saves its usual files. Calls of other threads, and for other paths, are not changed.

`torch.save` itself creates the content of a captured file. It is told to skip the elements, and leaves gaps for them in
the order in which it has pickled their storages. So any object on any device becomes the same file that the framework
would have written.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.serialization import register_package, skip_data

from asyncckpt.dtypes import DTYPES
from asyncckpt.errors import UnsupportedLeafError
from asyncckpt.interop.write_torch import SkippedSave
from asyncckpt.torch_tensors import flat_bytes

Pieces = tuple[bytes | torch.Tensor, ...]
"""The content of one file, in order: bytes, and uint8 tensors that share memory with the saved tensors."""

_PACKAGES = frozenset({"transformers", "accelerate", "peft", "safetensors"})
"""Packages whose modules may have imported safetensors' `save_file`."""

_SAFETENSORS_ALIGNMENT = 8
_SAFETENSORS_ORDER = (
    *("BOOL", "F4", "F6_E2M3", "F6_E3M2", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"),
    *("I16", "U16", "F16", "BF16", "I32", "U32", "F32", "C64", "F64", "I64", "U64"),
)
"""Order of dtypes in a file, reversed. Source: safetensors 0.8, `tensor.rs`, enum Dtype."""

_torch_save: Callable[..., None] = torch.save
"""The original function, which a recording replaces in `torch`."""

_captured = threading.local()
"""Attribute `storages`: the storages that this thread's `torch.save` has pickled, by address; None: not captured."""

_replacing = threading.RLock()
"""Held while functions are replaced: two threads at once would restore each other's replacement."""


def _note_storage(storage: Any) -> None:
    """Record a storage; torch calls this for each that it pickles. Returns None, so torch asks its own taggers next."""
    storages = getattr(_captured, "storages", None)
    if storages is not None:
        storages.setdefault(storage._cdata, storage)


register_package(-1, _note_storage, lambda storage, location: None)  # before the taggers of torch: the first has 10


def capture_torch_save(value: Any, **options: Any) -> Pieces:
    """Return the file that `torch.save(value, file, **options)` writes, except for CRC-32s of elements, which are 0.

    Raises:
        UnsupportedLeafError: The gaps that torch has left do not match the storages.
        Exception: An error of `torch.save`.
    """
    sink, storages = SkippedSave(), dict[int, Any]()
    skipping: Any = skip_data()

    def save_whole(outer: Callable[..., None], *arguments: Any, **keywords: Any) -> None:
        """Save with elements what an object saves while it is being pickled, for example into its own bytes."""
        if getattr(_captured, "storages", None) is None:  # another thread, or inside such a save
            return outer(*arguments, **keywords)
        _captured.storages = None
        skipping.__exit__(None, None, None)
        try:
            _torch_save(*arguments, **keywords)
        finally:
            skipping.__enter__()
            _captured.storages = storages

    with _replaced([(torch, "save")], save_whole):
        _captured.storages = storages
        try:
            with skipping:
                _torch_save(value, sink, **options)
        finally:
            _captured.storages = None
    met = [storage for storage in storages.values() if storage.nbytes()]
    gaps = [part for part in sink.parts if isinstance(part, int)]
    if gaps != [storage.nbytes() for storage in met]:
        raise UnsupportedLeafError(
            f"torch.save left gaps for {len(gaps)} storages of {sum(gaps)} bytes, but pickled {len(met)} storages of "
            f"{sum(storage.nbytes() for storage in met)} bytes",
            leaf="",
            type_name=type(value).__name__,
        )
    elements = (torch.empty(0, dtype=torch.uint8, device=one.device).set_(one) for one in met)
    return tuple(next(elements) if isinstance(part, int) else bytes(part) for part in sink.parts)


def capture_safetensors(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> Pieces:
    """Return the file that `safetensors.torch.save_file(tensors, file, metadata)` writes, with the same bytes.

    Raises:
        UnsupportedLeafError: A tensor is sparse, or has a dtype that safetensors lacks.
    """
    named = [(name, tensor, _safetensors_dtype(name, tensor)) for name, tensor in tensors.items()]
    places = {dtype: place for place, dtype in enumerate(_SAFETENSORS_ORDER)}
    named.sort(key=lambda one: (-places.get(one[2], -1), one[0]))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end, elements = 0, []
    for name, tensor, dtype in named:
        start, end = end, end + tensor.numel() * tensor.itemsize
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
        if end > start:
            elements.append(flat_bytes(tensor))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _SAFETENSORS_ALIGNMENT)
    return (len(text).to_bytes(8, "little") + text, *elements)


def _safetensors_dtype(name: str, tensor: torch.Tensor) -> str:
    dtype = DTYPES.get(str(tensor.dtype).removeprefix("torch."))
    if tensor.layout != torch.strided or dtype is None or dtype.safetensors is None:
        raise UnsupportedLeafError(
            f"{name}: safetensors files cannot hold a tensor of dtype {tensor.dtype} and layout {tensor.layout}",
            leaf=name,
            type_name=str(tensor.dtype),
        )
    return dtype.safetensors


@dataclass
class Recording:
    """The files that a framework has saved.

    Attributes:
        directory: Directory that the framework was told to save to.
        files: Files by name relative to the directory, in the order of saving; complete after the block.
    """

    directory: str
    files: dict[str, Pieces] = field(default_factory=dict)
    _thread: int = field(default_factory=threading.get_ident)

    def name_of(self, path: Any) -> str | None:
        """Return the name under which to record a file; None: it is of another thread, or outside the directory."""
        if threading.get_ident() != self._thread or not isinstance(path, (str, os.PathLike)):
            return None
        name = os.path.relpath(os.path.abspath(os.fsdecode(path)), self.directory)
        return None if name.partition(os.sep)[0] in (".", "..") else name


@contextlib.contextmanager
def recording(name: str) -> Iterator[Recording]:
    """Record what this thread saves to a temporary directory called `name`.

    Yields:
        The recording.
    """
    with tempfile.TemporaryDirectory(prefix="asyncckpt-") as parent:
        found = Recording(os.path.join(parent, name))
        os.mkdir(found.directory)

        def save(outer: Callable[..., None], obj: Any, f: Any, *arguments: Any, **options: Any) -> None:
            file = found.name_of(f)
            if file is None or arguments or options.get("_use_new_zipfile_serialization") is False:
                outer(obj, f, *arguments, **options)
            else:
                found.files[file] = capture_torch_save(obj, **options)

        def save_file(outer: Callable[..., None], tensors: Any, filename: Any, metadata: Any = None) -> None:
            file = found.name_of(filename)
            if file is None:
                outer(tensors, filename, metadata)
            else:
                found.files[file] = capture_safetensors(tensors, metadata)

        with _replaced([(torch, "save")], save), _replaced(_names_of_save_file(), save_file):
            yield found
        for folder, _, names in os.walk(found.directory):
            for path in (os.path.join(folder, one) for one in sorted(names)):
                with open(path, "rb") as file:
                    found.files[os.path.relpath(path, found.directory)] = (file.read(),)


@contextlib.contextmanager
def _replaced(names: list[tuple[Any, str]], function: Callable[..., None]) -> Iterator[None]:
    """Replace the named attributes of modules by `function`, whose first argument is then the original."""
    with _replacing, contextlib.ExitStack() as stack:
        for module, name in names:
            outer = getattr(module, name)
            stack.callback(setattr, module, name, outer)
            setattr(module, name, lambda *args, outer=outer, **options: function(outer, *args, **options))
        yield


def _names_of_save_file() -> list[tuple[Any, str]]:
    """Return (module, name) of every attribute that is safetensors' `save_file`."""
    try:
        library = importlib.import_module("safetensors.torch")
    except ImportError:
        return []
    modules = [module for name, module in sorted(sys.modules.items()) if name.partition(".")[0] in _PACKAGES]
    return [
        (module, key)
        for module in modules
        if module is not None
        for key, value in list(vars(module).items())
        if value is library.save_file
    ]
