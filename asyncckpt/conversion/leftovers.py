"""What conversions that were killed left behind under their temporary names."""

from __future__ import annotations

from asyncckpt.conversion.replaceable import may_belong
from asyncckpt.format.names import is_converting, set_aside_name
from asyncckpt.storage.files import Files
from asyncckpt.storage.garbage import CONVERSION
from asyncckpt.storage.temporaries import Temporary


def _keeps(path: str, files: Files) -> str:
    try:
        files.lstat(set_aside_name(path))
    except FileNotFoundError:
        return ""
    return f"a checkpoint was about to be replaced by it, and is now at {set_aside_name(path)}"


CONVERSIONS = Temporary(kind=CONVERSION, who="conversion", is_named=is_converting, may_hold=may_belong, keeps=_keeps)
