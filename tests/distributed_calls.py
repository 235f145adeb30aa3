"""Counts what reaches torch.distributed, in every thread that was started since."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

LOOKS = {
    "torch.distributed.is_available",
    *(f"torch.distributed.distributed_c10d.{name}" for name in ("is_initialized", "WORLD", "default_pg")),
}
"""Which process group this process has: each save looks, and sends no message. Not counted."""


class DistributedCalls:
    """What calls torch.distributed: its functions in Python, and methods of stores and process groups in C++.

    Made before the threads that are to be looked at: before Python 3.12 nobody can look into those that run already.

    Attributes:
        found: Names of what was called while somebody counted, and how often.
        threads: Names of all threads that were looked into meanwhile.
    """

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self.threads: set[str] = set()
        self._counts = False
        threading.setprofile(self._profile)

    def _profile(self, frame: Any, event: str, argument: Any) -> None:
        if not self._counts:
            return
        self.threads.add(threading.current_thread().name)
        if event == "call" and str(frame.f_globals.get("__name__", "")).startswith("torch.distributed"):
            name = f"{frame.f_globals['__name__']}.{frame.f_code.co_name}"
            if name not in LOOKS:
                self.found[name] += 1
        if event == "c_call" and "distributed" in str(getattr(argument, "__module__", "")):
            self.found[str(argument)] += 1
        if event == "c_call" and isinstance(getattr(argument, "__self__", None), (dist.Store, dist.ProcessGroup)):
            self.found[str(argument)] += 1

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count inside, in this thread too; that it counts is tried first."""
        self._counts = True
        sys.setprofile(self._profile)
        try:
            dist.get_rank()
            assert self.found.pop("torch.distributed.distributed_c10d.get_rank", 0), "the counter counts"
            self.found.clear()
            yield
        finally:
            sys.setprofile(None)
            self._counts = False
            threading.setprofile(None)
