"""What programs that were killed left behind under temporary names of their own: found, and removed file by file.

It is ours by three things: the name, which nobody else gives; that nothing but regular files is in it, with names that
this program gives; and that no part of it was changed for so long.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from asyncckpt.storage.files import Files
from asyncckpt.storage.garbage import Garbage, Rules


@dataclass(frozen=True, kw_only=True, slots=True)
class Temporary:
    """What one program makes.

    Attributes:
        kind: Of `Garbage`.
        who: The program, for people: "conversion".
        is_named: Whether a file or directory is called as it calls what it makes.
        may_hold: Whether it puts a file of this name into such a directory.
        keeps: Why the one at a path is not to go, whatever else holds; "" where nothing speaks against it.
    """

    kind: str
    who: str
    is_named: Callable[[str], bool]
    may_hold: Callable[[str], bool]
    keeps: Callable[[str, Files], str] = lambda path, files: ""


def temporaries_in(
    root: str, files: Files, rules: Rules, of: Sequence[Temporary], *, recursive: bool = False
) -> Iterator[Garbage]:
    """Yield what these programs left in `root`, or at any depth, ordered by path. Links are not followed.

    Raises:
        OSError: `root` cannot be listed.
    """
    for name in sorted(files.listdir(root)):
        path = os.path.join(root, name)
        made = next((one for one in of if one.is_named(name)), None)
        try:
            found = files.lstat(path)
            if made is not None:
                yield _garbage(path, found, files, rules, made)
            elif recursive and stat.S_ISDIR(found.st_mode):
                yield from temporaries_in(path, files, rules, of, recursive=True)
        except OSError:  # gone, or closed to this user
            continue


def _garbage(path: str, found: os.stat_result, files: Files, rules: Rules, made: Temporary) -> Garbage:
    inside = {}
    if stat.S_ISDIR(found.st_mode):
        inside = {name: files.lstat(os.path.join(path, name)) for name in files.listdir(path)}
    foreign = [name for name, one in sorted(inside.items()) if not (stat.S_ISREG(one.st_mode) and made.may_hold(name))]
    age_s = rules.now - max(one.st_mtime for one in (found, *inside.values()))
    kept = made.keeps(path, files)
    if kept:
        pass
    elif not (stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)):
        kept = "it is neither a file nor a directory"
    elif foreign:
        kept = f"it holds {foreign[0]!r}, which no {made.who} writes"
    elif age_s < rules.older_than_s:
        kept = f"changed {max(0.0, age_s):.0f} s ago: it may be under way"
    return Garbage(
        path=path,
        kind=made.kind,
        names=tuple(sorted(inside)),
        nbytes=sum(one.st_size for one in inside.values()) if inside else found.st_size,
        age_s=age_s,
        save_ids=(),
        kept=kept,
    )


def remove_temporary(garbage: Garbage, files: Files) -> list[str]:
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
