"""The process that publishes what a trainer saves, however that ends: `python -m asyncckpt.integrations.exporter`.

It is told the path of each job by a line on its standard input, and does them in turn: waits for the commit, publishes.
What fails for a reason that may pass, a full disk say, it tries again now and then. Once the input ends, or the trainer
is gone, it does what is left, and ends. It has a session of its own and a low priority. What it could not do stays a
job, for the next start of the training (`finish_exports`). Imports no torch.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import logging
import os
import select
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from asyncckpt.integrations.exporting import export
from asyncckpt.integrations.spool import AGAIN, Job, await_commit, holds_staged, jobs_in, locked, read_job
from asyncckpt.staging.umask import current_umask

NICENESS = 10
"""Above that of the training, so that it gets what the training leaves. Chosen, not measured."""

_LOOK_S = 0.5
"""How often it looks whether the trainer, whose end of the pipe a forked child may hold, is still there."""

FIRST_RETRY_S, LAST_RETRY_S = 1.0, 60.0
"""Between two tries of a job that failed for a reason that may pass; each waits twice as long as before. Chosen."""

MAY_PASS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT, errno.EROFS, errno.ENOLCK}
)

_log = logging.getLogger("asyncckpt.integrations")


def work(job: Job, *, timeout_s: float, umask: int) -> bool:
    """Do a job as soon as it can be done; False if it was taken back, or is left for later.

    Raises:
        AsyncCkptError, OSError: As `export`.
    """
    deadline = time.monotonic() + timeout_s
    with locked(job, timeout_s) as is_ours:
        if not is_ours or not await_commit(job, deadline - time.monotonic()) or not job.is_open:
            return False
        export(job, umask=umask)
        return True


def finish_exports(spool: str, *, timeout_s: float) -> list[str]:
    """Do what is left of an earlier run, or wait for who does; to be called before a run asks what is there.

    Args:
        spool: See `spool.spool_of`.
        timeout_s: For each job. One whose save was never committed, and that nobody has, is removed.

    Returns:
        The targets that were published here. A job that fails is logged, and stays.
    """
    done = []
    for job in jobs_in(spool):
        try:
            if job.is_committed and work(job, timeout_s=timeout_s, umask=current_umask()):
                done.append(job.target)
            elif not job.is_committed:
                with locked(job, 0.0) as is_ours:
                    if is_ours and not job.is_committed:  # nobody waits for it, and no worker writes it any more
                        job.close()
        except Exception as error:  # it must not keep the training from its start
            _log.error("%s cannot be published, its snapshot stays at %s: %s", job.target, job.native, error)
    if not jobs_in(spool) and not holds_staged(
        spool
    ):  # what has no job is left of exports that were killed, and of saves that failed
        shutil.rmtree(spool, ignore_errors=True)
    return done


def remove_if_empty(spool: str) -> None:
    """Remove the directory of the jobs if none is left; logs of jobs that are done go, too."""
    with contextlib.suppress(OSError):
        names = set(os.listdir(spool))
        for name in names:
            if name.endswith(".log") and f"{name.removesuffix('.log')}.job" not in names:
                os.unlink(os.path.join(spool, name))
        os.rmdir(spool)


class Retries:
    """Jobs that have failed and are tried again.

    Args:
        do: Does a job; raises where that fails.
        clock: As `time.monotonic`.
    """

    def __init__(self, do: Callable[[Job], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._do, self._clock = do, clock
        self._waiting: list[tuple[float, float, Job]] = []  # when it is due, how long it has waited, what

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def attempt(self, job: Job, waited_s: float = 0.0) -> bool:
        """Do a job; where it fails, say why beside it, and try it again later if that may help; False then."""
        try:
            self._do(job)
        except Exception as error:  # whatever it is, those that were told after it are done all the same
            may_pass = _errno_of(error) in MAY_PASS
            with contextlib.suppress(OSError), open(job.failure_path, "w", encoding="utf-8", errors="replace") as file:
                again = AGAIN if may_pass else ""
                file.write(f"{type(error).__name__}: {error}; its snapshot stays at {job.native}{again}")
            if may_pass:
                wait_s = min(2 * waited_s, LAST_RETRY_S) or FIRST_RETRY_S
                self._waiting.append((self._clock() + wait_s, wait_s, job))
            return False
        with contextlib.suppress(OSError):
            os.unlink(job.failure_path)
        return True

    def turn(self, *, last: bool = False) -> None:
        """Try what is due again; `last`: all, oldest first."""
        waiting, self._waiting = self._waiting, []
        for due, waited_s, job in waiting:
            if not job.is_open:  # a newer one stands in its place
                continue
            if last or due <= self._clock():
                self.attempt(job, waited_s)
            else:
                self._waiting.append((due, waited_s, job))


def _errno_of(error: BaseException | None) -> int | None:
    """Return the system's reason for an error, or for what has caused it."""
    for _ in range(10):
        if error is None or (isinstance(error, OSError) and error.errno is not None):
            break
        error = error.__cause__ or error.__context__
    return error.errno if isinstance(error, OSError) else None


def _told(parent: int) -> Iterator[str | None]:
    """Yield the lines of the standard input until it ends, or the trainer has gone and nothing more is in it.

    None, now and then, while there is nothing to do.
    """
    pending = b""
    while True:
        ready, _, _ = select.select([0], [], [], _LOOK_S)
        if not ready:
            if os.getppid() != parent:
                return
            yield None
            continue
        data = os.read(0, 65536)
        if not data:
            return
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            yield os.fsdecode(line)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do the jobs that are told; 1 if one could not be done."""
    parser = argparse.ArgumentParser(prog="asyncckpt.integrations.exporter", description=__doc__)
    parser.add_argument("--timeout-s", type=float, default=3600.0)
    parser.add_argument("--umask", type=int, default=0o077)
    parser.add_argument("--parent", type=int, default=0)
    options = parser.parse_args(arguments)
    os.nice(NICENESS)
    is_well = True

    def do(job: Job) -> None:
        job.flush()
        work(job, timeout_s=options.timeout_s, umask=options.umask)

    retries = Retries(do)
    for path in _told(options.parent):
        job = None if path is None else read_job(path)
        if job is not None:  # else it was taken back
            is_well = retries.attempt(job) and is_well
        retries.turn()
    retries.turn(last=True)
    return 0 if is_well and not retries else 1


if __name__ == "__main__":
    sys.exit(main())
