"""An OSError of the file system -> a SaveFailedError that says what happened to what, and what to do."""

from __future__ import annotations

import errno

from asyncckpt.errors import SaveFailedError

ADVICE = {
    "ENOSPC": "free space or inodes, or save to another file system",
    "EDQUOT": "the quota is used up: free space, or save to another file system",
    "EACCES": "give this user the right to write there, or save elsewhere",
    "EPERM": "give this user the right to write there, or save elsewhere",
    "EROFS": "the file system is read-only: save elsewhere, or mount it writable",
    "ENOTDIR": "a file is where a directory is wanted: save to another path",
    "EEXIST": "something else is in the way: save to another path",
    "ENAMETOOLONG": "choose a shorter path",
    "ELOOP": "symbolic links lead in a circle: choose another path",
    "EIO": "the storage failed: look at the kernel's log before you trust it again",
    "ESTALE": "the network file system lost the directory: check the mount",
    "EAGAIN": "another save to this path is being published: wait for its end",
    "ENOLCK": "overwriting needs file locks: save to another path, or mount the file system with them",
    "EMFILE": "raise the limit of open files of the process that writes (ulimit -n)",
    "ENFILE": "raise the machine's limit of open files (sysctl fs.file-max)",
    "EFBIG": "files may not get this large there (ulimit -f, or the file system): use more files, or save elsewhere",
}
_NOADVICE = "earlier checkpoints are untouched, and the next save tries anew"


def whose(step: int | None, rank: int | None) -> str:
    """Return how texts say which part of a save; `step` is None where only rank 0 knows it."""
    return f"rank {rank}" if step is None else f"step {step}, rank {rank}"


def save_failure(
    error: OSError, *, save_id: str | None, rank: int | None, step: int | None, path: str
) -> SaveFailedError:
    """Return `error` as the typed error of a save.

    Args:
        error: What the file system said; its filename and text go into the message.
        save_id, rank, step: Of the save; None when it was looking around before one.
        path: The checkpoint's directory.
    """
    code = errno.errorcode.get(error.errno or 0, "EIO")
    detail = str(error) or type(error).__name__
    what = f"save {save_id} ({whose(step, rank)}) to {path}" if save_id else f"looking beside {path}"
    return SaveFailedError(
        f"{what} failed: {detail}; nothing was published; {ADVICE.get(code, _NOADVICE)}",
        code=code,
        rank=rank,
        path=path,
        detail=detail,
        save_id=save_id,
        step=step,
    )
