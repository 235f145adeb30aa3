"""Workers on nodes of their own: network namespaces, a network that loses a fifth of everything, and partitions."""

from __future__ import annotations

import json
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import network
import pytest
import real_worker
import torch
from network import Network
from node_rank import state_of
from real_worker import wait_until

import asyncckpt

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(300)]
COMMIT_TIMEOUT_S = 8.0
HERE = pathlib.Path(__file__).resolve().parent.parent


class Node:
    """A worker and a rank."""

    def __init__(self, net: Network, n: int, directory: str, port: int) -> None:
        self.n, self._net = n, net
        self.endpoint = f"ipc://{directory}/{n}.sock"
        self.log = open(f"{directory}/{n}.log", "w")  # noqa: SIM115
        self.worker = self.start_worker()
        program = [sys.executable, str(HERE / "node_rank.py"), self.endpoint, str(COMMIT_TIMEOUT_S)]
        self.rank = subprocess.Popen(
            net.command(n, *program),
            env=network.environment(n, len(net.names), port),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )

    def start_worker(self) -> subprocess.Popen[bytes]:
        address = ("--advertise", self._net.address(self.n))
        command = [sys.executable, "-m", "asyncckpt_worker", "--endpoint", self.endpoint, *address]
        started = subprocess.Popen(self._net.command(self.n, *command), stdout=self.log, stderr=self.log)
        real_worker.status_of(self.endpoint)
        return started

    def order(self, **what: Any) -> None:
        assert self.rank.stdin is not None
        self.rank.stdin.write(json.dumps(what) + "\n")
        self.rank.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.rank.stdout is not None
        line = self.rank.stdout.readline()
        assert line, f"rank {self.n} has ended:\n{pathlib.Path(self.log.name).read_text()[-4000:]}"
        return dict(json.loads(line))

    def close(self) -> None:
        for process in (self.rank, self.worker):
            process.kill()
            process.wait()
        for pipe in (self.rank.stdin, self.rank.stdout, self.log):
            assert pipe is not None
            pipe.close()


class Cluster:
    """Nodes with a worker and a rank each, and one directory."""

    def __init__(self, n_nodes: int, root: pathlib.Path, seed: int) -> None:
        self.root, self._directory = root, tempfile.mkdtemp(prefix="ackpt-", dir="/tmp")
        self.net = Network(n_nodes, seed)
        self.nodes: list[Node] = []
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        for n in range(n_nodes):
            self.nodes.append(Node(self.net, n, self._directory, port))
        for node in self.nodes:
            node.hear()

    def begin(self, step: int) -> None:
        for node in self.nodes:
            node.order(step=step, path=str(self.root / f"step-{step}"))
        for node in self.nodes:
            assert node.hear() == {"staged": step}

    def ends(self) -> list[dict[str, Any]]:
        return [node.hear() for node in self.nodes]

    def save(self, step: int) -> list[dict[str, Any]]:
        for node in self.nodes:
            node.order(step=step, path=str(self.root / f"step-{step}"))
        found = []
        for node in self.nodes:
            said = node.hear()
            found.append(said if "error" in said else node.hear())
        return found

    def must_save(self, step: int, within_s: float = 60.0) -> int:
        """Save until it succeeds on all ranks, at most so long; returns the step that did."""
        deadline = time.monotonic() + within_s
        while True:
            ends = self.save(step)
            if all(end["error"] == "" for end in ends):
                loaded = asyncckpt.load(self.root / f"step-{step}")
                assert torch.equal(loaded["large"], state_of(step)["large"])
                return step
            assert time.monotonic() < deadline, ends
            step += 1

    def is_committed(self, step: int) -> bool:
        return (self.root / f"step-{step}" / "manifest.json").exists()

    def close(self) -> None:
        for node in self.nodes:
            node.close()
        self.net.close()
        shutil.rmtree(self._directory)


@pytest.fixture(params=[2, 4], ids=["two", "four"])
def cluster(request: pytest.FixtureRequest, tmp_path: pathlib.Path, seed: int) -> Iterator[Cluster]:
    why = network.unavailable()
    if why:
        pytest.skip(why)
    made = Cluster(request.param, tmp_path, seed)
    try:
        yield made
    finally:
        made.close()


def test_nodes_save_together_and_go_on_when_a_fifth_of_everything_is_lost(cluster: Cluster) -> None:
    cluster.must_save(0, within_s=0)
    cluster.net.loss = 0.2
    ends = [cluster.save(step) for step in range(1, 6)]
    wrong = [end for save in ends for end in save if end["error"] not in ("", "CommitTimeoutError")]
    assert not wrong
    assert sum(all(end["error"] == "" for end in save) for save in ends) >= 3, ends
    for step, save in enumerate(ends, 1):
        assert len({end["error"] for end in save}) == 1, save
        assert cluster.is_committed(step) == (save[0]["error"] == "")
    cluster.net.loss = 0.0
    cluster.must_save(10)


def test_a_first_save_comes_through_although_a_fifth_of_everything_is_lost(cluster: Cluster) -> None:
    cluster.net.loss = 0.2
    cluster.must_save(0, within_s=120)


@pytest.mark.parametrize("which", ["first", "last"])
def test_a_node_that_is_cut_off_is_named_nobody_hangs_and_saves_go_on_when_it_is_back(
    cluster: Cluster, which: str
) -> None:
    cluster.must_save(0, within_s=0)
    last = len(cluster.nodes) - 1
    cut = 0 if which == "first" else last
    cluster.net.cut = {cut}
    began = time.monotonic()
    ends = cluster.save(1)
    assert time.monotonic() - began < 4 * COMMIT_TIMEOUT_S
    assert not cluster.is_committed(1)
    with_the_leader = [end for n, end in enumerate(ends) if (n == 0) or (which == "last" and n != last)]
    others = set(range(1, last + 1)) if which == "first" else {last}
    for end in with_the_leader:
        assert end["error"] == "CommitTimeoutError" and set(end["facts"]["missing_ranks"]) == others, end
    for end in [end for end in ends if end not in with_the_leader]:
        assert end["error"] in ("CommitUnknownError", "CommitTimeoutError"), end
        missing = end["facts"]["missing_ranks"]
        assert 0 in missing, end
        assert missing and all(str(rank) in end["text"] for rank in missing), end
    cluster.net.cut = set()
    cluster.must_save(2)


def test_a_node_that_is_cut_off_for_a_moment_costs_no_save(cluster: Cluster) -> None:
    cluster.must_save(0, within_s=0)
    cluster.net.cut = {1}
    cluster.begin(1)
    time.sleep(1.5)
    cluster.net.cut = set()
    assert [end["error"] for end in cluster.ends()] == [""] * len(cluster.nodes)


@pytest.mark.parametrize("which", ["first", "last"])
def test_a_worker_that_is_killed_is_replaced_and_saves_go_on(cluster: Cluster, which: str) -> None:
    cluster.must_save(0, within_s=0)
    node = cluster.nodes[0 if which == "first" else -1]
    node.worker.kill()
    node.worker.wait()
    node.worker = node.start_worker()
    cluster.must_save(1)
    wait_until(lambda: not list(cluster.root.glob("*/.*")), "nothing temporary is left")
