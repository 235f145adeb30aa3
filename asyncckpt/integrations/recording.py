"""Runs a framework's own saving code, and takes what it saves instead of letting it write.

While a recording runs, `torch.save` and safetensors' `save_file` of this thread, to paths below a directory, are
captured (`capturing`); other files, small ones, are written there by the framework and read back. So every version of a
framework saves what it always saves. Other threads and other paths are passed on.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from asyncckpt.integrations.capturing import Captured, captured_safetensors, captured_torch_save, patching


class Recording:
    """What a framework saved: `files` by name relative to the directory, in the order in which they were saved."""

    def __init__(self, directory: str) -> None:
        self.directory = os.path.abspath(directory)
        self.files: dict[str, Captured | bytes] = {}
        self._thread = threading.get_ident()

    def name_of(self, path: Any) -> str | None:
        """Return the name under which a file is recorded; None where it is not ours."""
        if threading.get_ident() != self._thread or not isinstance(path, (str, os.PathLike)):
            return None
        whole = os.path.abspath(os.fsdecode(path))
        inside = whole.startswith(self.directory + os.sep)
        return os.path.relpath(whole, self.directory) if inside else None

    def read_back(self) -> None:
        """Take what the framework has written as files, and remove it from the disk."""
        for folder, _, names in os.walk(self.directory):
            for name in sorted(names):
                path = os.path.join(folder, name)
                with open(path, "rb") as file:
                    self.files[os.path.relpath(path, self.directory)] = file.read()
        shutil.rmtree(self.directory, ignore_errors=True)


@contextlib.contextmanager
def recording(directory: str, *, modules: Sequence[str] = ()) -> Iterator[Recording]:
    """Record what this thread saves below `directory`, which is made, and gone afterwards.

    Args:
        directory: Where the framework believes that it saves.
        modules: Packages of which every loaded module is looked through for safetensors' `save_file` under a name of
            its own.

    Yields:
        The recording; its `files` are complete after the block.
    """
    found = Recording(directory)
    os.makedirs(found.directory, exist_ok=True)
    try:
        with patching, contextlib.ExitStack() as stack:
            stack.enter_context(_in_place_of(torch, "save", _torch_save(found)))
            for module, name, original in _save_file_names(modules):
                stack.enter_context(_in_place_of(module, name, _save_file(found, original)))
            yield found
        found.read_back()
    finally:
        shutil.rmtree(found.directory, ignore_errors=True)


@contextlib.contextmanager
def _in_place_of(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _torch_save(found: Recording) -> Callable[..., None]:
    original = torch.save

    def save(obj: Any, f: Any, *arguments: Any, **options: Any) -> None:
        name = found.name_of(f)
        if name is None or arguments or options.get("_use_new_zipfile_serialization") is False:
            original(obj, f, *arguments, **options)
        else:
            found.files[name] = captured_torch_save(obj, **options)

    return save


def _save_file(found: Recording, original: Callable[..., None]) -> Callable[..., None]:
    def save_file(tensors: Any, filename: Any, metadata: Any = None) -> None:
        name = found.name_of(filename)
        if name is None:
            original(tensors, filename, metadata)
        else:
            found.files[name] = captured_safetensors(tensors, metadata)

    return save_file


def _save_file_names(packages: Sequence[str]) -> list[tuple[Any, str, Callable[..., None]]]:
    """Return (module, name, function) of every place from which the function is called."""
    try:
        library = importlib.import_module("safetensors.torch")
    except ImportError:
        return []
    function = library.save_file
    found: list[tuple[Any, str, Callable[..., None]]] = [(library, "save_file", function)]
    for name, module in sorted(sys.modules.items()):
        if module is not None and name.partition(".")[0] in packages:
            found += [(module, key, function) for key, value in list(vars(module).items()) if value is function]
    return found
