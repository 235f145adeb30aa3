"""What lies beside the weights of a Hugging Face model, such as config.json: copied from a source, kept at a target."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable

from asyncckpt.foreign.hf_folder import index_names, is_index
from asyncckpt.storage.contents import Contents
from asyncckpt.storage.files import Files
from asyncckpt.storage.put_if_absent import NO_HARD_LINKS

_NO_LINK = NO_HARD_LINKS | {errno.EXDEV}
"""EXDEV: a mount, a quota, or a file system that links only within one directory, lies between the two."""

WEIGHTS = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".gguf", ".onnx")
"""Endings of files in a Hugging Face directory that hold weights, and so are not copied along."""


def companions(source: str, contents: Contents, files: Files) -> tuple[list[str], list[str]]:
    """Return what a Hugging Face directory holds beside the weights that are read.

    Args:
        source: The directory.
        contents: What was read of it.
        files: The storage seam.

    Returns:
        The files that belong to the model and are copied along; and everything else: directories, hidden files,
        weights in other formats.

    Raises:
        OSError: It cannot be listed.
    """
    names = files.listdir(source)
    read = {*contents.manifest.metadata.get("files", ()), *index_names(names)}
    copied = {name for name in names if _comes_along(name) and os.path.isfile(os.path.join(source, name))}
    return sorted(copied), sorted(set(names) - read - copied)


def _comes_along(name: str) -> bool:
    return not (name.startswith(".") or name.endswith(WEIGHTS) or is_index(name))


def copy_file(source: str, path: str, mode: int) -> None:
    """Copy a file durably.

    Raises:
        OSError: A call failed.
    """
    shutil.copyfile(source, path)
    os.chmod(path, mode)
    _flush(path)


def carry_over(path: str, temporary: str, names: Iterable[str], files: Files) -> list[str]:
    """Give files of the directory that is about to be replaced a place in the one that replaces it.

    They are the same files, by another name, where there are hard links: what is written to them meanwhile is in both.

    Args:
        path: What is replaced. Nothing in it is changed.
        temporary: What replaces it; what it has already, it keeps.
        names: Regular files and links.
        files: The storage seam.

    Returns:
        The names that came along.

    Raises:
        OSError: A call failed.
    """
    carried = []
    for name in names:
        source, target = os.path.join(path, name), os.path.join(temporary, name)
        if os.path.lexists(target):
            continue
        try:
            files.link(source, target)
        except FileNotFoundError:  # its owner has removed it meanwhile
            continue
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
            shutil.copy2(source, target, follow_symlinks=False)
            if not os.path.islink(target):
                _flush(target)
        carried.append(name)
    return carried


def _flush(path: str) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
