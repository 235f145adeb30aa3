"""Counters, and figures of the process for the status report."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

import psutil


class Metrics:
    """Counters and figures of the process. Safe to call from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: Counter[str] = Counter()
        self._process = psutil.Process()
        self._process.cpu_percent()  # the first call starts the interval of the next one

    def count(self, name: str, by: int = 1) -> None:
        """Add to a counter."""
        with self._lock:
            self._counters[name] += by

    def counters(self) -> dict[str, int]:
        """Return a copy of all counters."""
        with self._lock:
            return dict(self._counters)

    def process(self) -> Mapping[str, Any]:
        """Return memory (`private_nbytes`: without slots), CPU and I/O figures, except those that cannot be read."""
        p, found = self._process, dict[str, Any]()
        with contextlib.suppress(psutil.Error, OSError), p.oneshot():
            memory, times = p.memory_info(), p.cpu_times()
            found["rss_nbytes"] = memory.rss
            found["private_nbytes"] = memory.rss - memory.shared
            found["cpu_percent"] = p.cpu_percent()
            found["cpu_seconds"] = times.user + times.system
            found["threads"] = p.num_threads()
            found["fds"] = p.num_fds()
            found["nice"] = p.nice()
        with contextlib.suppress(psutil.Error, OSError, AttributeError):
            io = p.io_counters()
            found["read_nbytes"], found["write_nbytes"] = io.read_bytes, io.write_bytes
        return found
