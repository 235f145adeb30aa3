"""The command `asyncckpt-worker`: reads options, claims the endpoint, goes into the background if asked, and serves.

Exit codes: 0: every submitted save has ended; 1: could not start, for instance because the endpoint has a worker; 2:
wrong options; 3: a drain timed out or was stopped, with unfinished saves.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from asyncckpt import __version__
from asyncckpt.basics.paths import checkpoint_path
from asyncckpt.errors import AsyncCkptError, ConfigError
from asyncckpt.protocol.endpoint import default_endpoint
from asyncckpt.protocol.options import ADVERTISE_VARIABLE, LOOPBACK, add_options
from asyncckpt_worker.config import WorkerConfig
from asyncckpt_worker.service.endpoint_lock import claim, wait_for_endpoint
from asyncckpt_worker.service.observers import Supervisor

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNFINISHED = 3

_EXAMPLE = """\
example:
  asyncckpt-worker --endpoint ipc:///run/user/1000/asyncckpt/job7.sock --root /checkpoints --idle-exit-s 3600

Trainers find a worker without --endpoint by themselves; set ASYNCCKPT_ENDPOINT for one with it. SIGTERM drains the
worker: it finishes the submitted saves, then exits with 0. A second SIGINT ends it at once.

On several nodes, start one on each, with --advertise a name or address of that node that the other nodes reach:
  srun --ntasks-per-node=1 sh -c 'asyncckpt-worker --advertise $(hostname) --port 7400'
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asyncckpt-worker",
        description="Write checkpoints that trainers stage into this process's memory.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    parser.add_argument("--version", action="version", version=f"asyncckpt-worker {__version__}")
    return parser


def _config(options: argparse.Namespace) -> WorkerConfig:
    endpoint = options.endpoint or os.environ.get("ASYNCCKPT_ENDPOINT")
    if not endpoint:
        endpoint = default_endpoint(os.environ, uid=os.geteuid(), package=__version__, interpreter=sys.prefix)
    return WorkerConfig(
        endpoint=endpoint,
        roots=tuple(checkpoint_path(root) for root in options.root),
        idle_exit_s=options.idle_exit_s,
        while_pid=options.while_pid,
        keep_snapshots_s=options.keep_snapshots_s,
        drain_timeout_s=options.drain_timeout_s,
        threads=options.threads,
        max_write_bandwidth=options.max_write_bandwidth,
        max_mirror_bandwidth=options.max_mirror_bandwidth,
        mirror_roots=tuple(checkpoint_path(root) for root in options.mirror),
        advertise=options.advertise or os.environ.get(ADVERTISE_VARIABLE) or LOOPBACK,
        port=options.port,
        events=options.events,
        metrics=options.metrics,
        supervised=not (options.detach or options.while_pid),
        log_format=options.log_format,
        log_file=os.path.abspath(os.path.expanduser(options.log_file)) if options.log_file else None,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        config = _config(options)
        if options.when_free and config.supervised:
            return serve(config, claimed=wait_for_endpoint(config.endpoint, Supervisor(os.environ, os.getpid())))
        if options.detach:
            return _detached(config)
        return _owned(config) if config.while_pid and config.log_file else serve(config)
    except ConfigError as error:
        print(f"asyncckpt-worker: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (AsyncCkptError, OSError) as error:
        print(f"asyncckpt-worker: {error}", file=sys.stderr)
        return EXIT_FAILED


def _detached(config: WorkerConfig) -> int:
    """Fork; the child serves in its own session, and the parent exits with 0.

    IMPORTANT: must run before zmq is imported and before any thread is started: neither survives a fork.
    """
    for fd in _inherited_fds():
        with contextlib.suppress(OSError):
            os.close(fd)
    path, lock = claim(config.endpoint)  # before the fork, so that the command reports the error
    if os.fork():
        os._exit(EXIT_OK)
    os.setsid()
    sys.path[:] = [os.path.abspath(p) for p in sys.path]
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    from asyncckpt_worker.process_limits import reset_inherited_limits
    from asyncckpt_worker.service.log import keep_tail, redirect_output

    reset_inherited_limits()
    log_file = config.log_file or f"{path.removesuffix('.sock')}.log"
    keep_tail(log_file)
    redirect_output(log_file)
    return serve(config, claimed=(path, lock), own_log=log_file)


def _owned(config: WorkerConfig) -> int:
    """Serve in the foreground for the program that started this worker; the worker limits the size of its log."""
    from asyncckpt_worker.service.log import keep_tail, redirect_output

    assert config.log_file is not None
    keep_tail(config.log_file)
    redirect_output(config.log_file)
    return serve(config, own_log=config.log_file)


def _inherited_fds() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2]


def serve(config: WorkerConfig, *, claimed: tuple[str, int] | None = None, own_log: str | None = None) -> int:
    """Serve in this process until drained or idle; changes its priority, umask and signal handlers.

    Args:
        config: Settings.
        claimed: Result of `claim`, if the caller has the lock already.
        own_log: File to which stderr goes already, and whose size the worker limits.

    Raises:
        EndpointError: Another worker has the endpoint, or its directory is not safe.
        OSError: The log file cannot be opened.
    """
    from asyncckpt.memory.heap import return_large_blocks
    from asyncckpt_worker.process_limits import lower_priority
    from asyncckpt_worker.service import log
    from asyncckpt_worker.service.daemon import Daemon

    if config.log_file is not None and own_log is None:
        log.redirect_output(config.log_file)
    log.configure(config.log_format, rotated=own_log)
    return_large_blocks()  # large blocks are used for milliseconds only
    os.umask(0)  # the modes of files and directories come from each request
    daemon = Daemon(config, claimed=claimed)
    gc.freeze()  # existing objects stay: a full collection of them would delay answers
    lower_priority()  # only now: a trainer may be waiting for the start
    interrupts = 0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal interrupts
        interrupts += number == signal.SIGINT
        daemon.stop(immediately=interrupts > 1)

    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(name, stop)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the parent process may have blocked them, to wait for them
    complete = daemon.run()
    sys.stdout.flush()
    sys.stderr.flush()
    if not complete:
        # A job may hang on a disk; the normal exit of the interpreter would wait for its thread.
        os._exit(EXIT_UNFINISHED)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
