"""The worker's log: one line per record, as text or as JSON, with the save and session that it belongs to.

All records go to loggers below `asyncckpt`, never to the root logger.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from datetime import datetime, timezone
from typing import Any, TextIO

LOGGER = "asyncckpt.worker"
MAX_LOG_NBYTES = 1 << 20
"""Maximum size of the log file of a worker that a trainer started, usually in a tmpfs. One older file is kept too."""

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def write(
    level: str,
    text: str,
    *,
    save_id: str | None = None,
    session: str | None = None,
    facts: dict[str, Any] | None = None,
    error: BaseException | None = None,
) -> None:
    """Write one record, with the traceback of `error`."""
    extra = {"save_id": save_id, "session": session, "facts": facts or {}}
    logging.getLogger(LOGGER).log(_LEVELS[level], "%s", text, extra=extra, exc_info=error)


def _facts(record: logging.LogRecord) -> dict[str, Any]:
    known = {"save_id": getattr(record, "save_id", None), "session": getattr(record, "session", None)}
    return {**known, **getattr(record, "facts", {})}


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, text, save_id, session, facts, error."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        line = {"time": when, "level": record.levelname.lower(), "text": record.getMessage(), **_facts(record)}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class HumanFormatter(logging.Formatter):
    """Time, level, text, then save_id, session and facts as name=value, without those that are None."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
        facts = " ".join(
            f"{name}={value:.3f}" if isinstance(value, float) else f"{name}={value}"
            for name, value in _facts(record).items()
            if value is not None
        )
        line = f"{when} {record.levelname:7} {record.getMessage()}" + (f"  [{facts}]" if facts else "")
        line = line.replace("\n", " ")
        return line + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


class RotatingHandler(logging.StreamHandler[TextIO]):
    """Writes to stderr, which goes to the file `path`; renames a full file to `path`.1 and begins a new one.

    It redirects stdout and stderr themselves, so that a crash of the interpreter is in the newest file too.
    """

    def __init__(self, path: str) -> None:
        super().__init__(sys.stderr)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            if os.fstat(2).st_size >= MAX_LOG_NBYTES:
                with contextlib.suppress(FileNotFoundError):
                    os.replace(self._path, f"{self._path}.1")
                redirect_output(self._path)
        super().emit(record)


def configure(log_format: str, stream: TextIO | None = None, *, rotated: str | None = None) -> logging.Handler:
    """Configure the logger `asyncckpt`.

    Args:
        log_format: "human" or "json".
        stream: Destination; stderr by default.
        rotated: The file that stderr goes to, if it is to be rotated.

    Returns:
        The handler, for tests to remove it.
    """
    handler = RotatingHandler(rotated) if rotated else logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else HumanFormatter())
    logger = logging.getLogger("asyncckpt")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    return handler


def keep_tail(path: str) -> None:
    """Truncate the log of earlier workers to its end, if it exceeds `MAX_LOG_NBYTES`. Errors are ignored."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            nbytes = os.fstat(fd).st_size
            if nbytes > MAX_LOG_NBYTES:
                tail = os.pread(fd, MAX_LOG_NBYTES // 2, nbytes - MAX_LOG_NBYTES // 2)
                os.ftruncate(fd, 0)
                os.pwrite(fd, tail[tail.find(b"\n") + 1 :], 0)
        finally:
            os.close(fd)


def redirect_output(path: str) -> None:
    """Redirect stdout and stderr of this process to the end of `path`, which only this user can read.

    Raises:
        OSError: The file cannot be opened; ENXIO: it is a pipe without a reader.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(path, flags | os.O_NONBLOCK, 0o600)  # without O_NONBLOCK, a pipe would block
    os.set_blocking(fd, True)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
