"""Ranks for tests: real processes with a real gloo group, started from a server that has torch imported already."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist

DEADLINE_S = 60.0
_context = multiprocessing.get_context("forkserver")
PRELOADED = (
    "torch",
    "torch.distributed",
    "torch._dynamo",  # every optimizer's first step imports it
    "asyncckpt.manager.manager",
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
)
_context.set_forkserver_preload(list(PRELOADED))


def preload(modules: Sequence[str]) -> None:
    """Let the server import further modules; before it is started."""
    _context.set_forkserver_preload([*PRELOADED, *modules])


def start_server() -> None:
    """Start what the ranks are forked from, before any test could be blamed for its pipes."""
    multiprocessing.forkserver.ensure_running()
    multiprocessing.resource_tracker.ensure_running()
    dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # the first one leaves libuv's own pipe


class Ranks:
    """Processes that each run `function(rank, *arguments)`.

    Args:
        world_size: How many.
        function: At module level; what it returns must pickle.
        arguments: For all of them.
        group: Initialise the default process group (gloo) first.
        environ: Added to the environment of each.
        together: Put all into one process group of the operating system, as torchrun does.
    """

    def __init__(
        self,
        world_size: int,
        function: Callable[..., Any],
        *arguments: Any,
        group: bool = True,
        environ: Mapping[str, str] | None = None,
        together: bool = False,
    ) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if group else None
        port = self._store.port if self._store else 0
        self.processes = []
        self._pipes = []
        for rank in range(world_size):
            mine, theirs = _context.Pipe()
            leader = self.processes[0].pid if self.processes and together else 0 if together else None
            values = (rank, world_size, port, leader, dict(environ or {}), function, arguments, theirs)
            process = _context.Process(target=_main, args=values, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(mine)

    def send(self, rank: int, value: Any) -> None:
        """Send something to the `talk` of a rank."""
        _send(self._pipes[rank], "value", value)

    def receive(self, rank: int, timeout_s: float = DEADLINE_S) -> Any:
        """Return what a rank said by its `talk`, or returned; its failure fails the test."""
        assert self._pipes[rank].poll(timeout_s), f"rank {rank} has said nothing for {timeout_s:g} s"
        kind, value = pickle.loads(self._pipes[rank].recv_bytes())
        assert kind != "error", f"rank {rank} failed:\n{value}"
        return value

    def results(self, timeout_s: float = DEADLINE_S) -> list[Any]:
        """Return what every rank returned."""
        deadline = time.monotonic() + timeout_s
        return [self.receive(rank, deadline - time.monotonic()) for rank in range(len(self.processes))]

    def kill(self, *ranks: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to ranks; default: all of them, at once."""
        for rank in ranks or range(len(self.processes)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid or 0, number)

    def close(self) -> None:
        """Kill whatever still runs."""
        self.kill()
        for process in self.processes:
            process.join(DEADLINE_S)
            process.close()
        for pipe in self._pipes:
            pipe.close()
        self._store = None


class Talk:
    """A rank's line to the test."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe

    def say(self, value: Any) -> None:
        """Send `value` to the test's `receive`."""
        _send(self._pipe, "value", value)

    def hear(self, timeout_s: float = DEADLINE_S) -> Any:
        """Return what the test's `send` sent."""
        assert self._pipe.poll(timeout_s), "the test has said nothing"
        return pickle.loads(self._pipe.recv_bytes())[1]


_line: list[Talk] = []


def talk() -> Talk:
    """Return, in a rank's process, its line to the test."""
    return _line[0]


@contextlib.contextmanager
def running(world_size: int, function: Callable[..., Any], *arguments: Any, **options: Any) -> Iterator[Ranks]:
    """As `Ranks`, closed at the end."""
    ranks = Ranks(world_size, function, *arguments, **options)
    try:
        yield ranks
    finally:
        ranks.close()


def run(
    world_size: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = DEADLINE_S, **options: Any
) -> list[Any]:
    """Run `function` on every rank and return what each returned."""
    with running(world_size, function, *arguments, **options) as ranks:
        return ranks.results(timeout_s)


def _send(pipe: Any, kind: str, value: Any) -> None:
    pipe.send_bytes(pickle.dumps((kind, value)))  # torch would send tensors by memory that dies with the sender


def _join_group(leader: int) -> None:
    """Join rank 0's process group, which it may be about to make; 0: make it."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return os.setpgid(0, leader)
        except PermissionError:
            assert time.monotonic() < deadline, "rank 0 leads no process group"
            time.sleep(0.001)


def _main(
    rank: int,
    world_size: int,
    port: int,
    leader: int | None,
    environ: dict[str, str],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    pipe: Any,
) -> None:
    _line.append(Talk(pipe))
    if leader is not None:
        _join_group(leader)
    os.environ.update(environ, RANK=str(rank), WORLD_SIZE=str(world_size))
    try:
        import torch

        torch.set_num_threads(1)
        if port:
            store = dist.TCPStore("127.0.0.1", port, world_size, is_master=False)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
            dist.barrier()  # or a rank that is done at once ends while others still connect to it
        found = function(rank, *arguments)
        if dist.is_initialized():
            dist.destroy_process_group()
        _send(pipe, "result", found)
    except BaseException:
        _send(pipe, "error", traceback.format_exc())
