"""The worker's log: one line per event, for humans or as JSON, each with the save and session that it is about.

Everything goes to loggers below `asyncckpt`, never to the root logger.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import datetime, timezone
from typing import Any, TextIO

LOGGER = "asyncckpt.worker"
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def write(
    level: str,
    text: str,
    *,
    save_id: str | None = None,
    session: str | None = None,
    facts: dict[str, Any] | None = None,
    exc_info: bool = False,
) -> None:
    """Write one line; `exc_info` adds the traceback of the exception that is being handled."""
    extra = {"save_id": save_id, "session": session, "facts": facts or {}}
    logging.getLogger(LOGGER).log(_LEVELS[level], "%s", text, extra=extra, exc_info=exc_info)


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
    """Time, level, text, then what is known of save_id, session and facts as name=value."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
        facts = " ".join(f"{name}={_short(value)}" for name, value in _facts(record).items() if value is not None)
        line = f"{when} {record.levelname:7} {record.getMessage()}" + (f"  [{facts}]" if facts else "")
        line = line.replace("\n", " ")
        return line + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


def _short(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def configure(log_format: str, stream: TextIO | None = None) -> logging.Handler:
    """Send the log of `asyncckpt` to `stream`, stderr by default. Returns the handler, for tests to take off again."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else HumanFormatter())
    logger = logging.getLogger("asyncckpt")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    return handler


def redirect_output(path: str) -> None:
    """Let stdout and stderr of this process go to the end of `path`, which only this user can read.

    Raises:
        OSError: It cannot be opened.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
