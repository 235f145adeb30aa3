"""Giving a file its final name unless that is taken: the one call by which a commit, or a tombstone, takes effect."""

from __future__ import annotations

import errno

from asyncckpt.storage.files import Files

NO_HARD_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
"""Answers of link(2) on file systems that have none, or no more of them for this file."""


def put_if_absent(temporary: str, final: str, files: Files) -> None:
    """Give a finished file its final name; the temporary one may stay beside it.

    Raises:
        FileExistsError: The name is taken.
        OSError: A call failed.
    """
    try:
        files.link(temporary, final)
    except OSError as error:
        if error.errno not in NO_HARD_LINKS:
            raise
        files.rename_noreplace(temporary, final)
