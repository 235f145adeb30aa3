"""What conversions that were killed left behind under their temporary names.

What was set aside for an instant may be the only copy of a checkpoint: it goes only where another one stands in its
place, and where an overwrite would have removed all that is in it.
"""

from __future__ import annotations

import os

from asyncckpt.conversion.replaceable import may_belong, standing_at
from asyncckpt.conversion.under_way import refuse_saves
from asyncckpt.errors import AsyncCkptError
from asyncckpt.foreign.kinds import read_any
from asyncckpt.format.names import is_converting, is_kept, set_aside_from, set_aside_name
from asyncckpt.storage.files import Files
from asyncckpt.storage.garbage import CONVERSION
from asyncckpt.storage.temporaries import Temporary


def _is_left(name: str) -> bool:
    return is_converting(name) or is_kept(name) or set_aside_from(name) is not None


def _keeps(path: str, files: Files) -> str:
    directory, name = os.path.split(path)
    if is_kept(name):
        return "a conversion that failed could not put it back to where it was: it may be the only copy"
    aside = set_aside_from(name)
    if aside is not None:
        converting, target = (os.path.join(directory, one) if one else "" for one in aside)
        return _keeps_aside(path, converting, target, files)
    if _is_there(set_aside_name(path), files):
        return f"a checkpoint was about to be replaced by it, and is now at {set_aside_name(path)}"
    return ""


def _keeps_aside(path: str, converting: str, target: str, files: Files) -> str:
    stood = "it was about to be replaced, and may be the only copy"
    if not target:
        return f"{stood}: the name that it had cannot be known"
    if _is_there(converting, files):
        return f"{stood}: what should have replaced {target} is still at {converting}"
    try:
        read_any(target, files)
    except (AsyncCkptError, OSError):
        return f"{stood}: no checkpoint that can be read is at {target}, where it was. Move it back there"
    try:
        standing_at(path, files, overwrite=True)
        refuse_saves(path, files)
    except (AsyncCkptError, OSError) as error:
        return f"it was at {target}, and is more than a checkpoint that was replaced: {error}"
    return ""


def _is_there(path: str, files: Files) -> bool:
    try:
        files.lstat(path)
    except FileNotFoundError:
        return False
    return True


CONVERSIONS = Temporary(kind=CONVERSION, who="conversion", is_named=_is_left, may_hold=may_belong, keeps=_keeps)
