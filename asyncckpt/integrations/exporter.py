"""The process that exports one save, however the trainer ends: `python -m asyncckpt.integrations.exporter JOB`.

It waits for the commit, and for an earlier save to the same place, publishes, and ends. It has a session of its own and
a low priority. What it could not do stays a job, for the next start of the training (`finish_exports`).
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence

from asyncckpt.errors import AsyncCkptError
from asyncckpt.integrations.exporting import export
from asyncckpt.integrations.spool import Job, await_commit, await_earlier, jobs_in, locked, read_job
from asyncckpt.launcher import worker_environment
from asyncckpt.staging.umask import current_umask

NICENESS = 10
"""Above that of the training, so that it gets what the training leaves. Chosen, not measured."""

_log = logging.getLogger("asyncckpt.integrations")


def start_exporter(job: Job, *, timeout_s: float) -> subprocess.Popen[bytes]:
    """Start a process for a job.

    Args:
        job: It is on disk.
        timeout_s: How long its save may take to be committed.

    Raises:
        OSError: No process can be made.
    """
    command = [sys.executable, "-m", "asyncckpt.integrations.exporter", job.path, "--timeout-s", str(timeout_s)]
    log = os.open(f"{job.native}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        return subprocess.Popen(
            [*command, "--umask", str(current_umask())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env=worker_environment(),
            start_new_session=True,
        )
    finally:
        os.close(log)


def work(job: Job, *, timeout_s: float, umask: int) -> bool:
    """Do a job as soon as it can be done; False if it was taken back, or is left for later.

    Raises:
        AsyncCkptError, OSError: As `export`.
    """
    deadline = time.monotonic() + timeout_s
    with locked(job, timeout_s) as is_ours:
        if not is_ours or not await_commit(job, deadline - time.monotonic()):
            return False
        if not await_earlier(job, deadline - time.monotonic()):
            return False
        if not job.is_open:
            return False
        export(job, umask=umask)
        return True


def finish_exports(spool: str, *, timeout_s: float) -> list[str]:
    """Do what is left of an earlier run, or wait for who does; to be called before a run asks what is there.

    Args:
        spool: See `spool.spool_of`.
        timeout_s: For each job. One whose save was never committed is removed by then.

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
        except (AsyncCkptError, OSError) as error:
            _log.error("%s cannot be published, its snapshot stays at %s: %s", job.target, job.native, error)
    remove_if_empty(spool)
    return done


def remove_if_empty(spool: str) -> None:
    """Remove the directory of the jobs if none is left; logs of jobs that are done go, too."""
    with contextlib.suppress(OSError):
        names = set(os.listdir(spool))
        for name in names:
            if name.endswith(".log") and f"{name.removesuffix('.log')}.job" not in names:
                os.unlink(os.path.join(spool, name))
        os.rmdir(spool)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do one job; 0 if it is done or was taken back, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="asyncckpt.integrations.exporter", description=__doc__)
    parser.add_argument("job")
    parser.add_argument("--timeout-s", type=float, default=3600.0)
    parser.add_argument("--umask", type=int, default=0o077)
    options = parser.parse_args(arguments)
    os.nice(NICENESS)
    job = read_job(options.job)
    if job is None:
        return 0
    try:
        job.flush()
        is_done = work(job, timeout_s=options.timeout_s, umask=options.umask)
    except (AsyncCkptError, OSError) as error:
        print(f"{job.target} cannot be published, its snapshot stays at {job.native}: {error}", file=sys.stderr)
        return 1
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{job.native}.log")
    return 0 if is_done or not job.is_open else 1


if __name__ == "__main__":
    sys.exit(main())
