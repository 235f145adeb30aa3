"""Two workers for tests, each as if it were a node's: where they are, and both of them, started."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator

import real_worker
from real_worker import RealWorker, stop_whoever_serves

Places = tuple[str, str]


@contextlib.contextmanager
def empty_places() -> Iterator[Places]:
    """Where two workers are, once they are started, and whoever takes their place; they are ended after it."""
    directory = tempfile.mkdtemp(prefix="ackpt-", dir="/tmp")
    found = f"ipc://{directory}/a.sock", f"ipc://{directory}/b.sock"
    try:
        yield found
    finally:
        for endpoint in found:
            stop_whoever_serves(endpoint)
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def both_running(places: Places, *options: str) -> Iterator[list[RealWorker]]:
    """Start a worker at each of `places`; they are ended after it, or those that have taken their place.

    Args:
        places: The endpoints.
        *options: Of the first worker's command line.
    """
    with real_worker.running(places[0], *options) as first, real_worker.running(places[1]) as second:
        yield [first, second]
