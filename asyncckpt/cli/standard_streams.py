"""Makes stdin, stdout and stderr usable if they are closed, a pipe without a reader, on a full disk, or ASCII only.

cron jobs, daemons and CI runners start commands with such streams. Without this module, `sys.stdout` is None if stdout
is closed, and Python exits with code 120 if it cannot be flushed. And the next file that is opened gets the descriptor
of the closed stream, so that output of libraries would be written into that file.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from asyncckpt.cli.output import EXIT_FAILED


@contextlib.contextmanager
def usable() -> Iterator[None]:
    """Open /dev/null for closed streams. Within the block, escape characters that stdout or stderr cannot encode."""
    _open_closed()
    streams: list[Any] = [stream for stream in (sys.stdout, sys.stderr) if hasattr(stream, "reconfigure")]
    before = [stream.errors for stream in streams]
    for stream in streams:
        stream.reconfigure(errors="backslashreplace")
    stdout = sys.stdout
    sys.stdout = _RecordingStream(stdout)
    try:
        yield
    finally:
        sys.stdout = stdout
        for stream, errors in zip(streams, before, strict=True):
            with contextlib.suppress(OSError, ValueError):  # full, or closed meanwhile
                stream.reconfigure(errors=errors)


def _open_closed() -> None:
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null == fd:
                os.set_inheritable(fd, True)
            else:
                os.dup2(null, fd)
                os.close(null)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


class _RecordingStream:
    """A stream that records its first error, even if a caller has caught it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.lost: OSError | None = None

    def write(self, text: str) -> int:
        with self._recorded():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._recorded():
            self._stream.flush()

    @contextlib.contextmanager
    def _recorded(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.lost = self.lost or error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def lost_output() -> OSError | None:
    """Flush stdout, and return the error by which output was lost within `usable`; None: all was written."""
    _flush(sys.stdout)
    return getattr(sys.stdout, "lost", None)


def exit_code(code: int) -> int:
    """Flush stdout and stderr, and return the exit code of the command.

    Returns:
        `code`, or `EXIT_FAILED` if `code` is 0 and output was lost. The loss is reported on stderr, unless stdout is a
        pipe whose reader has closed it, as `head` does.
    """
    lost = lost_output()
    if lost is not None and not isinstance(lost, BrokenPipeError):
        with contextlib.suppress(OSError):
            print(f"asyncckpt: stdout cannot be written: {lost}", file=sys.stderr)
    _flush(sys.stderr)
    return code or (EXIT_FAILED if lost is not None else 0)


def _flush(stream: TextIO) -> None:
    """Flush a stream. If that fails, drop the buffered output, so that Python does not try again when it exits."""
    try:
        stream.flush()
    except OSError:
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
            stream.flush()
    except ValueError:  # closed
        pass
