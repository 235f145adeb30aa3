"""What does a mirror that hangs, refuses, is full or is gone cost a training, against saves without a mirror?

In a process, two checkpointers save in turn, one with a mirror and one without, each with a worker of its own, so that
what else the machine does meets both alike. The mirror is a bucket whose server takes connections and says nothing
("hangs"), answers 403 to everything ("refuses"), holds nothing and answers 507 to whatever is put there ("full"), or
does not listen ("gone"). `lost_s` is what a save costs the training beyond as many steps without one, the first save
excluded; `extra_s` is the median of how much more that is with the mirror than in the save beside it without one.
`first_save_s` is how long the call of the first one takes; the one without a mirror comes before the other then.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

import asyncckpt
from asyncckpt.client import launcher
from benchmarks import machine, processes
from benchmarks.figures import Row
from benchmarks.runner import Context, Question
from benchmarks.workloads import SAVE_S

CASES = ("hangs", "refuses", "full", "gone")
BUCKET = "s3://mirror/run"
STEPS = 8
"""Of the training, behind each save."""


def run(context: Context) -> Row:
    """Let a training save in each case."""
    nbytes = context.facts["nbytes"] = context.options.mib << 20
    row: Row = {}
    for case in context.in_turn(CASES):
        directory = context.directory / case
        directory.mkdir()
        with server(case) as url:
            keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
            call = partial(processes.call, own_worker=True, environment={"AWS_ENDPOINT_URL": url, **keys})
            row[case] = call(train, str(directory), nbytes, context.options.saves)
        machine.remove(directory)
    return row


def train(directory: str, nbytes: int, saves: int) -> Row:
    """Save with and without a mirror beside a training, each time once the save before is written."""
    state = {"w": torch.zeros(nbytes // 4)}
    costs: dict[str, list[tuple[float, float]]] = {"none": [], "mirror": []}
    with tempfile.TemporaryDirectory(prefix="asyncckpt-bench-") as sockets:
        endpoint = f"ipc://{sockets}/second.sock"
        launcher.start_worker(endpoint)
        with asyncckpt.AsyncCheckpointer() as plain, asyncckpt.AsyncCheckpointer(endpoint=endpoint) as mirrored:
            try:
                mirrors = [
                    _cost(
                        checkpointer,
                        state,
                        Path(directory, way, str(n)),
                        f"{BUCKET}/{n}" if way == "mirror" else None,
                        costs[way],
                    )
                    for n in range(saves + 1)
                    for way, checkpointer in in_turn(n, ("none", plain), ("mirror", mirrored))
                ]
                done = sum(one.done() for one in mirrors if one is not None)
            finally:
                machine.stop_worker("--endpoint", endpoint)
    found: Row = {way: {"first_save_s": ours[0][0]} for way, ours in costs.items()}
    for way, ours in costs.items():
        found[way] |= {"save_s": statistics.median(s for s, _ in ours[1:]), "written": len(ours)}
        found[way]["lost_s"] = statistics.median(lost for _, lost in ours[1:])
    pairs = list(zip(costs["mirror"][1:], costs["none"][1:], strict=True))
    found["extra_save_s"] = statistics.median(ours[0] - theirs[0] for ours, theirs in pairs)
    found["extra_s"] = statistics.median(ours[1] - theirs[1] for ours, theirs in pairs)
    return found | {"mirrored": done}


def in_turn(number: int, *ways: tuple[str, asyncckpt.AsyncCheckpointer]) -> Iterable[tuple[str, Any]]:
    """Return the ways to save; every other time in the other order."""
    return reversed(ways) if number % 2 else ways


def _cost(
    checkpointer: asyncckpt.AsyncCheckpointer,
    state: dict[str, torch.Tensor],
    path: Path,
    mirror: str | None,
    costs: list[tuple[float, float]],
) -> asyncckpt.SaveFuture | None:
    """Save and train; append how long `save()` took, and what it and the steps behind it took longer than steps."""
    quiet_s = steps(STEPS)
    began = time.perf_counter()
    handle = checkpointer.save(state, path, step=len(costs), mirror=mirror)
    save_s = time.perf_counter() - began
    costs.append((save_s, save_s + steps(STEPS) - quiet_s))
    handle.written.result(SAVE_S)
    return handle.mirrored


def steps(count: int) -> float:
    """Train for `count` steps; return the seconds that they took."""
    weight = torch.ones(400, 400)
    began = time.perf_counter()
    for _ in range(count):
        for _ in range(4):
            weight = (weight @ weight).clamp_(-1, 1)
    return time.perf_counter() - began


@contextlib.contextmanager
def server(case: str) -> Iterator[str]:
    """Run the server of a case, and yield its URL; "gone" has one where nobody listens."""
    if case in _HANDLERS:
        serving = ThreadingHTTPServer(("127.0.0.1", 0), _HANDLERS[case])
        thread = threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{serving.server_address[1]}"
        finally:
            serving.shutdown()
            serving.server_close()
            thread.join()
        return
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        if case == "hangs":
            yield url
            return
    yield url


class _Handler(BaseHTTPRequestHandler):
    def answer(self, status: int, body: bytes) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


class _Refusal(_Handler):
    def _refuse(self) -> None:
        self.answer(403, b"<Error><Code>AccessDenied</Code></Error>")

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _refuse


class _Full(_Handler):
    def _look(self) -> None:
        if "list-type=2" in self.path:
            self.answer(200, b"<ListBucketResult><KeyCount>0</KeyCount></ListBucketResult>")
        else:
            self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")

    def _put(self) -> None:
        self.answer(507, b"<Error><Code>InsufficientStorage</Code></Error>")

    def _remove(self) -> None:
        self.answer(204, b"")

    do_GET = do_HEAD = _look
    do_PUT = do_POST = _put
    do_DELETE = _remove


_HANDLERS: dict[str, type[_Handler]] = {"refuses": _Refusal, "full": _Full}


QUESTION = Question(
    run,
    [
        f"*/{name}"
        for name in (
            "extra_s",
            "extra_save_s",
            "none/lost_s",
            "none/save_s",
            "none/first_save_s",
            "mirror/first_save_s",
        )
    ],
    options={"mib": 16, "saves": 12},
    smallest="--mib 4 --saves 2",
    suite=(),
    rounds=5,
)
