"""512 ranks and 1,024 ended saves at one real worker: what a request costs it, and what it holds."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import resource
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
import zmq

from asyncckpt.format.names import SaveId
from asyncckpt.protocol import messages as m
from tests.saving import worker_process
from tests.torch_free_client import Client, Snapshot, new_save_id

pytestmark = [pytest.mark.fault, pytest.mark.soak]

RANKS, ENDED_SAVES = 512, 1024
BEGUN_BY = 8
"""Ranks that begin each of the saves that end: what is remembered of one that has ended is bounded for all alike."""

MAX_CPU_S = 1e-3
"""Of the worker, for one request whose answer does not grow with the ranks."""

MAX_ROW_CPU_S = 20e-6
"""For each row more of an answer that has one for each rank. Seen: 8 to 13 where eight programs share two cores."""

BATCHES = 4
"""Others on this machine only ever make it slower: the best of so many counts."""

MAX_RSS_NBYTES = 100_000_000
FILES = 8192


class Crowd:
    """A client for each rank, in one process, and the worker's process."""

    def __init__(self, endpoint: str, worker: psutil.Process, stack: contextlib.ExitStack) -> None:
        context = zmq.Context()
        stack.callback(context.term)
        context.set(zmq.MAX_SOCKETS, 2 * RANKS)
        self.worker, self.cpu_s = worker, dict[str, float]()
        self.ranks = [
            stack.enter_context(Client(endpoint, rank=n, world_size=RANKS, context=context)) for n in range(RANKS)
        ]

    def measure(self, name: str, calls: list[Callable[[], object]]) -> None:
        """Make the calls, and note what one of them costs the worker."""
        found = []
        for batch in (calls[start::BATCHES] for start in range(BATCHES)):
            before = self._cpu_s()
            for call in batch:
                call()
            found.append((self._cpu_s() - before) / len(batch))
        self.cpu_s[name] = min(found)

    def _cpu_s(self) -> float:
        times = self.worker.cpu_times()
        return float(times.user + times.system)


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < FILES:
        pytest.skip(f"only {hard} descriptors are allowed; {FILES} are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_requests_of_many_ranks_after_many_saves_cost_little_time_and_memory(
    endpoint: str, tmp_path: pathlib.Path, many_files: None
) -> None:
    snapshot = Snapshot(n_tensors=1, nbytes=5000)
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(worker_process(endpoint))
        crowd = Crowd(endpoint, psutil.Process(process.pid), stack)
        crowd.ranks[0].hello()
        crowd.measure("hello", [client.hello for client in crowd.ranks[1:]])
        slots = {client: client.allocate(snapshot.slot_nbytes()) for client in crowd.ranks}

        def begin(client: Client, save_id: SaveId) -> None:
            client.begin(slots[client], save_id, str(tmp_path / f"{save_id.sequence}"), nbytes=snapshot.nbytes)

        for n in range(ENDED_SAVES):
            save_id = new_save_id(n)
            for client in crowd.ranks[:BEGUN_BY]:
                begin(client, save_id)
            crowd.ranks[0].withdraw(save_id)
        save_id = new_save_id(ENDED_SAVES)
        crowd.measure("begin", [lambda client=client: begin(client, save_id) for client in crowd.ranks])
        crowd.measure("heartbeat", [lambda client=client: client.row(save_id) for client in crowd.ranks])
        for rank, client in enumerate(crowd.ranks):
            part = Snapshot(n_tensors=1, nbytes=5000, seed=rank, shard=(rank, RANKS))
            part.fill(slots[client].memory, save_id)
            client.seal(slots[client], part, save_id, str(tmp_path / f"{save_id.sequence}"))
            client.submit(slots[client], save_id)
        assert crowd.ranks[0].wait(save_id)["phase"] == "committed"
        recall = m.Recall(id=crowd.ranks[1].next_id(), path=str(tmp_path), hold=False)
        assert len(crowd.ranks[1].call(recall).parts) == RANKS
        crowd.measure("recall", [lambda: crowd.ranks[1].call(recall)] * 100)
        rss_nbytes = crowd.worker.memory_info().rss - crowd.worker.memory_info().shared
        text = json.dumps({**crowd.cpu_s, "rss_nbytes": rss_nbytes})
        print(text)
        if (results := os.environ.get("ASYNCCKPT_TEST_RESULTS")) is not None:
            pathlib.Path(results, f"many_sessions-{time.strftime('%Y-%m-%d')}.json").write_text(text + "\n")
        assert crowd.cpu_s.pop("recall") < MAX_CPU_S + RANKS * MAX_ROW_CPU_S
        assert {name: cpu_s for name, cpu_s in crowd.cpu_s.items() if cpu_s > MAX_CPU_S} == {}
        assert rss_nbytes < MAX_RSS_NBYTES
