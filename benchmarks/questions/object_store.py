"""How fast are saves to an object store and loads from it, against what obstore alone does with as many bytes?

The store is a server of S3 on loopback (moto, of the extra `dev`), slower than obstore, a new one for each way. What
obstore does is measured with several sizes of parts and numbers of concurrent requests, and the fastest counts. One
save takes up to a fifth more than the next, so each figure is the median of three. A load is compared with reads of
ranges, of at most 16 MiB as ours: for each range moto takes time for the whole object, so fewer ones would be faster.
`worker_nbytes` is by how much the memory of the worker, besides slots, grows at most while a checkpoint is uploaded.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

import asyncckpt
from benchmarks import machine, processes
from benchmarks.figures import Row
from benchmarks.runner import Context, Question

BUCKET = "s3://benchmark"
STARTS_WITHIN_S = 60.0
SAVE_S = 300.0
REPEATS = 3
CHOICES = ((6 << 20, 4), (6 << 20, 8), (16 << 20, 8))
"""(size of a part in bytes, concurrent requests) of obstore alone."""


def run(context: Context) -> Row:
    """Upload and load the same number of bytes both ways, each beside a server of its own."""
    nbytes = context.facts["nbytes"] = context.options.mib << 20
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
    ways: dict[str, Callable[[int], Row]] = {"obstore": alone, "asyncckpt": saved}
    row: Row = {}
    for name in context.in_turn(ways):
        with _server() as url:
            environment, own_worker = {"AWS_ENDPOINT_URL": url, **keys}, name == "asyncckpt"
            row[name] = processes.call(ways[name], nbytes, own_worker=own_worker, environment=environment)
    for what in ("save", "load"):
        row[f"{what}_share"] = min(row["obstore"][f"{what}s_s"]) / row["asyncckpt"][f"{what}_s"]
    return row


def alone(nbytes: int) -> Row:
    """Upload and read `nbytes` with nothing but obstore, in each of `CHOICES`."""
    import obstore
    from obstore.store import from_url

    store: Any = from_url(BUCKET, client_options={"allow_http": True})
    data = torch.arange(nbytes // 8).numpy().tobytes()
    row: Row = {"saves_s": [], "loads_s": []}
    for n, (part, at_a_time) in enumerate(CHOICES):
        name = f"alone-{n}"
        put = partial(obstore.put, store, name, data, use_multipart=True, chunk_size=part, max_concurrency=at_a_time)
        row["saves_s"].append(_median_s(put))
        row["loads_s"].append(_median_s(partial(_read, store, name, nbytes, part, at_a_time)))
    return row


def _median_s(call: Callable[[], Any]) -> float:
    return statistics.median(machine.timed(call)["s"] for _ in range(REPEATS))


def _read(store: Any, name: str, nbytes: int, part: int, at_a_time: int) -> None:
    import obstore

    with ThreadPoolExecutor(at_a_time) as pool:
        starts = range(0, nbytes, part)
        parts = pool.map(lambda at: obstore.get_range(store, name, start=at, end=min(nbytes, at + part)), starts)
        assert sum(map(len, parts)) == nbytes


def saved(nbytes: int) -> Row:
    """Save `nbytes` with a worker, and load them; a first save makes the slot."""
    state = {"w": torch.arange(nbytes // 8)}
    with asyncckpt.AsyncCheckpointer() as checkpointer:
        checkpointer.save(state, f"{BUCKET}/run/0", step=0).written.result(SAVE_S)
        pid = machine.worker_status()["pid"]
        steps = itertools.count(1)

        def save() -> None:
            step = next(steps)
            checkpointer.save(state, f"{BUCKET}/run/{step}", step=step).written.result(SAVE_S)

        with _greatest_growth(pid) as growth:
            save_s = _median_s(save)
        load_s = _median_s(partial(asyncckpt.load, f"{BUCKET}/run/1", source="disk"))
    return {"save_s": save_s, "load_s": load_s, "worker_nbytes": growth[0]}


@contextlib.contextmanager
def _greatest_growth(pid: int) -> Iterator[list[int]]:
    """Watch the memory of a process that it shares with none; the list holds the greatest growth in bytes."""
    ended, before = threading.Event(), _own_nbytes(pid)
    growth = [0]

    def watch() -> None:
        while not ended.wait(0.01):
            growth[0] = max(growth[0], _own_nbytes(pid) - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield growth
    finally:
        ended.set()
        thread.join()


def _own_nbytes(pid: int) -> int:
    found = re.search(r"^RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(found[1]) << 10 if found else 0


@contextlib.contextmanager
def _server() -> Iterator[str]:
    """Run a server of S3 with an empty bucket."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            deadline = time.monotonic() + STARTS_WITHIN_S
            request = urllib.request.Request(f"{url}/{BUCKET.removeprefix('s3://')}", method="PUT")
            while True:
                try:
                    urllib.request.urlopen(request, timeout=5).close()
                    break
                except OSError:
                    if server.poll() is not None or time.monotonic() > deadline:
                        raise
                    time.sleep(0.1)
            yield url
        finally:
            server.terminate()


QUESTION = Question(
    run,
    ["obstore/*", "asyncckpt/*", "save_share", "load_share"],
    options={"mib": 256},
    smallest="--mib 8",
    suite=(),
    rounds=5,
)
