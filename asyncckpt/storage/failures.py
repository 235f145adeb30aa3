"""An OSError of the file system -> a SaveFailedError that says what happened to what, and what to do."""

from __future__ import annotations

import errno

from asyncckpt.errors import SaveFailedError

_ADVICE = {
    errno.ENOSPC: "the file system is full: free space or inodes there, or choose another directory",
    errno.EDQUOT: "the disk quota is used up: free space, or choose another directory",
    errno.EROFS: "the file system is read-only: choose another directory, or remount it",
    errno.EACCES: "no permission: check the owner and mode of the directory",
    errno.EPERM: "not permitted: check the directory, and the worker's --root options",
    errno.ENOTDIR: "a part of the path is a file: choose another path",
    errno.EEXIST: "a file is in the way: choose another path",
    errno.ENAMETOOLONG: "the path is too long: choose a shorter one",
    errno.EIO: "the storage reported an I/O error: check the device before trusting it again",
    errno.ESTALE: "the network file system dropped the directory: check the mount",
    errno.EMFILE: "the process has no file descriptors left: raise ulimit -n",
    errno.ENFILE: "the machine has no file descriptors left",
    errno.EFBIG: "the file is larger than the file system or ulimit -f allows: use more files_per_rank",
}


def save_failure(error: OSError, *, rank: int, path: str, save_id: str, step: int) -> SaveFailedError:
    """Return `error` as the typed error of a save.

    Args:
        error: What the file system said; its filename and text go into the message.
        rank, path, save_id, step: Of the save.
    """
    code = errno.errorcode.get(error.errno, "EIO") if error.errno is not None else "EIO"
    detail = str(error)
    advice = _ADVICE.get(error.errno or 0, "earlier checkpoints are untouched; the next save tries anew")
    return SaveFailedError(
        f"step {step}, rank {rank}: saving to {path} failed: {detail}; {advice}",
        code=code,
        rank=rank,
        path=path,
        detail=detail,
        save_id=save_id,
        step=step,
    )
