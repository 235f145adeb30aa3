"""A worker that writes down when each of its threads hashes, writes, flushes and commits. Part of `benchmarks.trace`.

    python -m benchmarks.traced_worker EVENTS --endpoint ipc://...

It is the worker itself, with a clock around the calls that do the work. The clock is the machine's monotonic one, which
all processes share.
"""

from __future__ import annotations

import functools
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncckpt.storage import shard_writer
from asyncckpt.storage.files import Files
from asyncckpt.storage.rank_files import RankWriter
from asyncckpt_worker import cli
from asyncckpt_worker.writer import Writer

Event = tuple[str, str, float, float]
"""(Thread, what it does, from, to): seconds of the machine's monotonic clock."""


class Events:
    """What has happened, from any thread."""

    def __init__(self) -> None:
        self.found: list[Event] = []

    def timed(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call` with an event for each time that it is called."""

        @functools.wraps(call)
        def run(*arguments: Any, **options: Any) -> Any:
            began = time.monotonic()
            try:
                return call(*arguments, **options)
            finally:
                self.found.append((threading.current_thread().name, kind, began, time.monotonic()))

        return run


def patch(events: Events) -> None:
    """Put clocks around the calls."""
    places: list[tuple[Any, str, str]] = [
        (shard_writer, "block_digest", "hash"),
        (shard_writer, "fsync_file", "fsync"),
        (Files, "pwrite", "write"),
        (Writer, "prepare", "prepare"),
        (Writer, "commit", "commit"),
        (RankWriter, "finish", "index"),
    ]
    for owner, name, kind in places:
        setattr(owner, name, events.timed(kind, getattr(owner, name)))


def main() -> int:
    """Serve until told to stop; then write the events down."""
    target = Path(sys.argv[1])
    events = Events()
    patch(events)
    try:
        return cli.main(sys.argv[2:])
    finally:
        target.write_text(json.dumps(events.found))


if __name__ == "__main__":
    sys.exit(main())
