"""What conversions that were killed left behind under their temporary names: found, and removed file by file.

It is ours by three things: the name, which nobody else gives; that nothing but regular files is in it, with names that
a checkpoint's files have; and that no part of it was changed for so long.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from asyncckpt.conversion.replaceable import may_belong
from asyncckpt.format.names import is_converting, set_aside_name
from asyncckpt.storage.files import Files
from asyncckpt.storage.garbage import CONVERSION, Garbage, Rules


def leftovers_in(root: str, files: Files, rules: Rules, *, recursive: bool = False) -> Iterator[Garbage]:
    """Yield what conversions left in `root`, or at any depth, ordered by path. Links are not followed.

    Raises:
        OSError: `root` cannot be listed.
    """
    for name in sorted(files.listdir(root)):
        path = os.path.join(root, name)
        try:
            found = files.lstat(path)
            if is_converting(name):
                yield _garbage(path, found, files, rules)
            elif recursive and stat.S_ISDIR(found.st_mode):
                yield from leftovers_in(path, files, rules, recursive=True)
        except OSError:  # gone, or closed to this user
            continue


def _garbage(path: str, found: os.stat_result, files: Files, rules: Rules) -> Garbage:
    inside = {}
    if stat.S_ISDIR(found.st_mode):
        inside = {name: files.lstat(os.path.join(path, name)) for name in files.listdir(path)}
    foreign = [name for name, one in sorted(inside.items()) if not (stat.S_ISREG(one.st_mode) and may_belong(name))]
    age_s = rules.now - max(one.st_mtime for one in (found, *inside.values()))
    kept = ""
    if _exists(set_aside_name(path), files):
        kept = f"a checkpoint was about to be replaced by it, and is now at {set_aside_name(path)}"
    elif not (stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)):
        kept = "it is neither a file nor a directory"
    elif foreign:
        kept = f"it holds {foreign[0]!r}, which no conversion writes"
    elif age_s < rules.older_than_s:
        kept = f"changed {max(0.0, age_s):.0f} s ago: it may be under way"
    return Garbage(
        path=path,
        kind=CONVERSION,
        names=tuple(sorted(inside)),
        nbytes=sum(one.st_size for one in inside.values()) if inside else found.st_size,
        age_s=age_s,
        save_ids=(),
        kept=kept,
    )


def remove(garbage: Garbage, files: Files) -> list[str]:
    """Remove what was found, and return the names of the files that are gone. A file that came since then stays.

    Raises:
        OSError: Something cannot be removed, or came into the directory meanwhile.
    """
    if not stat.S_ISDIR(files.lstat(garbage.path).st_mode):
        files.unlink(garbage.path)
        return [os.path.basename(garbage.path)]
    for name in garbage.names:
        files.unlink(os.path.join(garbage.path, name))
    files.rmdir(garbage.path)
    return list(garbage.names)


def _exists(path: str, files: Files) -> bool:
    try:
        files.lstat(path)
    except FileNotFoundError:
        return False
    return True
