"""Conversions whose target lies inside the source's directory, or whose source lies inside the target's.

Stock `dcp_to_torch_save` and `torch_save_to_dcp` are used like this: `model.pt` beside the files of `dcp.save`. Here is
checked which of these are safe, and finished files are moved into a directory that exists.
"""

from __future__ import annotations

import contextlib
import os

from asyncckpt.conversion.publishing import Beside
from asyncckpt.conversion.renaming_by_steps import put_where_nothing_is
from asyncckpt.conversion.replaceable import belongs
from asyncckpt.errors import CheckpointExistsError, ConfigError
from asyncckpt.foreign.kinds import OURS, kind_at
from asyncckpt.format.names import DCP_METADATA_NAME, MANIFEST_NAME
from asyncckpt.storage.contents import Contents
from asyncckpt.storage.files import Files, fsync_directory
from asyncckpt.uninterrupted import uninterrupted

_OF_HUB = (".safetensors", ".index.json")
"""Endings of the files that a Hugging Face directory is read from: a new file of these would change its model."""


def is_inside(path: str, directory: str) -> bool:
    """Whether a path, which need not exist, lies inside a directory after symbolic links are resolved."""
    inner, outer = os.path.realpath(path), os.path.realpath(directory)
    return inner != outer and os.path.commonpath([inner, outer]) == outer


def check_apart(path: str, source: str, to: str) -> None:
    """Refuse targets of kinds that can neither lie in the source nor around it.

    Raises:
        ConfigError: The target is the source, a directory in it, or a file or a Hugging Face directory around it.
    """
    is_same = os.path.realpath(path) == os.path.realpath(source)
    if is_same or (is_inside(path, source) and to not in ("torch", "safetensors")):
        raise _nested(path, source)
    if is_inside(source, path) and to not in (OURS, "dcp"):
        raise _nested(path, source)


def check_inside(path: str, source: str, contents: Contents) -> None:
    """Refuse a target in the source's directory whose name would make it a part of the source.

    Raises:
        ConfigError: By its name it is, or would be, a part of the source.
    """
    if not is_inside(path, source):
        return
    kind = contents.source.kind if contents.source is not None else OURS
    first = os.path.relpath(os.path.realpath(path), os.path.realpath(source)).split(os.sep)[0]
    read = contents.source.stamps if contents.source is not None else ()
    is_read = os.path.realpath(path) in {os.path.realpath(os.path.join(source, name)) for name in read}
    if is_read or (first.endswith(_OF_HUB) if kind == "hf" else belongs(first, kind)):
        raise ConfigError(
            f"{path} lies in the source {source}, and by its name it would be a part of it; choose another name",
            field="dst",
        )


def check_around(path: str, files: Files) -> None:
    """Refuse a target around the source that holds a checkpoint, or files of one.

    Raises:
        CheckpointExistsError: It holds one.
        OSError: It cannot be listed.
    """
    names = sorted(files.listdir(path))
    found = [name for name in names if belongs(name, "dcp")]
    if found or kind_at(path, files) != OURS:
        what = repr(found[0]) if found else "safetensors files"
        raise CheckpointExistsError(
            f"{path}, in which the source lies, holds a checkpoint already, or a part of one: {what}; it was left "
            "untouched. Choose another path",
            path=path,
        )


def put_into_directory(temporary: Beside, path: str, files: Files) -> None:
    """Move a finished target's files into a directory that exists; the manifest or DCP's metadata comes last.

    On an error the files that were moved are moved back.

    Raises:
        CheckpointExistsError: A file of the same name was made there meanwhile.
        OSError: A call failed.
    """
    last = (DCP_METADATA_NAME, MANIFEST_NAME)
    moved: list[str] = []
    with uninterrupted():
        try:
            for name in sorted(files.listdir(temporary), key=lambda name: (name in last, name)):
                if name in last:
                    fsync_directory(files, path)
                put_where_nothing_is(os.path.join(temporary, name), os.path.join(path, name), files)
                moved.append(name)
            fsync_directory(files, path)
        except BaseException:
            for name in reversed(moved):
                with contextlib.suppress(OSError):
                    os.rename(os.path.join(path, name), os.path.join(temporary, name))
            raise


def _nested(path: str, source: str) -> ConfigError:
    return ConfigError(
        f"{path} and the source {source} are the same or inside each other: a file may lie in the source's directory, "
        "and a directory of kind dcp or asyncckpt around the source",
        field="dst",
    )
