"""What a mounted file system can do, and what a save needs of it.

A commit needs a name that appears with all of its content, unless it is taken: link(2), or renameat2(2) with
RENAME_NOREPLACE. FUSE mounts of object stores (s3fs, gcsfuse, rclone), exFAT and SMB may have neither. There the name
is created exclusively under a lock (`LocalStore.put_if_absent`). What else a save needs is checked before it begins.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from asyncckpt.errors import UnsupportedPathError

BY_LINK, BY_RENAME, BY_CREATION = "link", "renameat2", "exclusive creation"
"""How a file is published under a name that nothing has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Abilities:
    """What a mount can do.

    Attributes:
        publishes_by: `BY_LINK`, `BY_RENAME` or `BY_CREATION`; None: no way works.
        writes_anywhere: New files may be written at any offset, in any order.
        keeps_content: A file that was closed holds what was written.
        truncates: ftruncate(2) cuts a file that is being written.
        flushes: fsync(2) of a file works.
        replaces: rename(2) replaces a file.
        locks: flock(2) admits one holder, of this machine at least.
        removes: Files can be removed.
    """

    publishes_by: str | None = BY_LINK
    writes_anywhere: bool = True
    keeps_content: bool = True
    truncates: bool = True
    flushes: bool = True
    replaces: bool = True
    locks: bool = True
    removes: bool = True

    def missing(self, *, fsync: bool, overwrite: bool) -> list[str]:
        """Return what a save needs and the mount lacks.

        Args:
            fsync: Whether the save flushes.
            overwrite: Whether it may replace a checkpoint, or a file.
        """
        needs = {
            "writes at any offset of a new file (it takes them in order only)": self.writes_anywhere,
            "files that hold what was written to them": self.keeps_content or not self.writes_anywhere,
            "the removal of files": self.removes,
            "a way to publish a file under a name that must be free: link, renameat2(RENAME_NOREPLACE), or "
            "open(O_EXCL) together with flock": self.publishes_by is not None,
            "fsync, which fsync=False does without": self.flushes or not fsync,
            "a rename that replaces a file, as overwrite=True and layout='dcp' need": self.replaces or not overwrite,
            "flock, as overwrite=True and layout='dcp' need": self.locks or not overwrite,
        }
        return [what for what, is_there in needs.items() if not is_there]


NATIVE = Abilities()


def refuse_unable(path: str, abilities: Abilities, *, fsync: bool, overwrite: bool) -> None:
    """Raise when a save to `path` needs what its mount lacks; arguments as of `Abilities.missing`.

    Raises:
        UnsupportedPathError: It does; names all of it.
    """
    missing = abilities.missing(fsync=fsync, overwrite=overwrite)
    if missing:
        raise UnsupportedPathError(
            f"cannot save to {path}: its file system lacks {'; '.join(missing)}. Nothing was written. Save to another "
            f"file system, or mount it with what is missing; see `asyncckpt doctor {os.path.dirname(path)}`",
            path=path,
        )
