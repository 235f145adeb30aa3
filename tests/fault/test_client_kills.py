"""SIGKILL meets trainers at every moment; one worker serves them all and loses nothing that was sealed.

Promises P3, P5 and P12 of the guarantees, with a torch-free client that speaks the real protocol.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from asyncckpt.errors import CheckpointNotCommittedError
from asyncckpt.format.checksums import DIGEST_NBYTES, block_digest, file_checksum
from asyncckpt.format.index import decode_index
from asyncckpt.format.names import MANIFEST_NAME
from asyncckpt.protocol import messages as m
from asyncckpt.storage.catalog import read_manifest, scan
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import LocalStore
from asyncckpt_worker.core.kept_snapshots import MAX_KEPT_SAVES
from tests.torch_free_client import Client, Order, encode_order, new_save_id

pytestmark = pytest.mark.fault

KILLS = int(os.environ.get("ASYNCCKPT_TEST_KILLS", "50"))
"""Per kind; `make test-fault` raises it."""

ROOT = pathlib.Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / '.typing'}"}


class Nursery:
    """Forks clients to order and waits for the end of each."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.torch_free_client"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=ENVIRONMENT,
            cwd=ROOT,
            text=True,
        )

    def obey(self, order: Order) -> dict[str, Any]:
        """Run one client to its end."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(encode_order(order) + "\n")
        self._process.stdin.flush()
        return dict(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """End the nursery."""
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(60)


@pytest.fixture
def worker(endpoint: str) -> Iterator[subprocess.Popen[bytes]]:
    """A worker process of its own."""
    command = [sys.executable, "-m", "asyncckpt_worker", "--endpoint", endpoint]
    with subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL) as process:
        yield process
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


@pytest.fixture
def nursery(record_property: Callable[[str, object], None]) -> Iterator[Nursery]:
    """A process that forks clients."""
    record_property("count", KILLS)
    nursery = Nursery()
    yield nursery
    nursery.close()


def settled_status(client: Client, timeout_s: float = 60.0) -> dict[str, Any]:
    """Wait until the worker has no session, slot or job left, and return its status."""
    deadline = time.monotonic() + timeout_s
    while True:
        report = dict(client.call(m.Status(id=client.next_id())).report)
        if not report["sessions"] and not report["slots"] and not report["jobs"]:
            return report
        assert time.monotonic() < deadline, f"not settled: {report}"
        time.sleep(0.01)


def held_fds(pid: int) -> tuple[int, int]:
    """Return how many fds a process holds, and how many of them are slots."""
    targets = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            targets.append(os.readlink(f"/proc/{pid}/fd/{name}"))
        except FileNotFoundError:
            continue
    return len(targets), sum("memfd:asyncckpt" in target for target in targets)


def verify(path: str, save_id: str) -> None:
    """Check manifest, index, sizes and every block of a committed checkpoint."""
    files = Files()
    manifest = read_manifest(path, LocalStore(files))
    assert str(manifest.save_id) == save_id
    for record in manifest.ranks:
        data = pathlib.Path(path, record.index_name).read_bytes()
        assert file_checksum(data) == record.index_checksum
        index = decode_index(data)
        for shard in index.shards:
            image = pathlib.Path(path, shard.name).read_bytes()
            assert len(image) == shard.nbytes
            for number, start in enumerate(range(0, len(image), index.block_nbytes)):
                expected = shard.digests[number * DIGEST_NBYTES : (number + 1) * DIGEST_NBYTES]
                assert block_digest(image[start : start + index.block_nbytes]) == expected
        stored = pathlib.Path(path, index.objects.name).read_bytes()
        assert (len(stored), file_checksum(stored)) == (index.objects.nbytes, index.objects.checksum)


def kill_all(nursery: Nursery, orders: list[Order]) -> None:
    for order in orders:
        ended = nursery.obey(order)
        assert ended["signal"] == signal.SIGKILL, f"{order} ended with {ended}"


def orders_of(endpoint: str, root: pathlib.Path, moment: str, rng: random.Random) -> list[Order]:
    """Orders of the kind `moment`: how far the client comes, and whether it announces its save ahead."""
    return [
        Order(
            endpoint=endpoint,
            path=str(root / moment / f"step-{n}"),
            save_id=str(new_save_id(n)),
            die="sealed" if moment == "sealed_unannounced" else moment,
            announced=moment != "sealed_unannounced",
            nbytes=rng.randrange(20_000, 1_500_000),
            progress=rng.random(),
            delay_s=rng.random() * 0.01,
            seed=n,
        )
        for n in range(KILLS)
    ]


@pytest.mark.parametrize("moment", ["sealed_unannounced", "sealed", "submitted"])
def test_trainer_killed_after_the_seal_is_committed_and_verifies(
    moment: str,
    worker: subprocess.Popen[bytes],
    nursery: Nursery,
    endpoint: str,
    tmp_path: pathlib.Path,
    rng: random.Random,
) -> None:
    orders = orders_of(endpoint, tmp_path, moment, rng)
    with Client(endpoint) as client:
        kill_all(nursery, orders)
        report = settled_status(client)
    for order in orders:
        verify(order.path, order.save_id)
    assert report["counters"]["saves_committed"] == KILLS
    if moment != "submitted":
        assert report["counters"]["saves_rescued"] == KILLS


def test_trainer_killed_about_the_seal_with_another_save_in_flight_loses_nothing_that_was_sealed(
    worker: subprocess.Popen[bytes], nursery: Nursery, endpoint: str, tmp_path: pathlib.Path, rng: random.Random
) -> None:
    orders = orders_of(endpoint, tmp_path, "around_seal", rng)
    for n, order in enumerate(orders):
        order.first = (order.path + "-first", str(new_save_id(n)))
        order.mark, order.announced, order.delay_s = order.path + ".sealed", n % 2 == 0, rng.random() ** 3 * 0.001
    (tmp_path / "around_seal").mkdir()
    with Client(endpoint) as client:
        kill_all(nursery, orders)
        report = settled_status(client)
    committed = 0
    for order in orders:
        assert order.first
        verify(*order.first)
        if os.path.exists(os.path.join(order.path, MANIFEST_NAME)):
            verify(order.path, order.save_id)
            committed += 1
        else:
            assert not os.path.exists(order.mark), "it was sealed, and is lost"
    assert report["counters"]["saves_committed"] == KILLS + committed
    assert "internal_errors" not in report["counters"]


def test_trainer_killed_before_the_seal_lists_nothing(
    worker: subprocess.Popen[bytes], nursery: Nursery, endpoint: str, tmp_path: pathlib.Path, rng: random.Random
) -> None:
    orders = orders_of(endpoint, tmp_path, "before_seal", rng)
    with Client(endpoint) as client:
        kill_all(nursery, orders)
        report = settled_status(client)
    assert report["counters"]["saves_abandoned"] == KILLS
    assert not list(tmp_path.rglob(MANIFEST_NAME)) and not list(tmp_path.rglob("*.safetensors"))
    for order in orders:
        with pytest.raises(CheckpointNotCommittedError):
            read_manifest(order.path, LocalStore())
    assert not [found for found in scan(str(tmp_path / "before_seal"), LocalStore()) if found.state == "committed"]


def test_many_killed_trainers_leave_no_memory_no_fd_no_socket(
    worker: subprocess.Popen[bytes],
    nursery: Nursery,
    endpoint: str,
    endpoint_dir: pathlib.Path,
    tmp_path: pathlib.Path,
    rng: random.Random,
) -> None:
    moments = ("before_seal", "sealed_unannounced", "sealed", "submitted")
    orders = [order for moment in moments for order in orders_of(endpoint, tmp_path, moment, rng)]
    rng.shuffle(orders)
    with Client(endpoint) as client:
        kill_all(nursery, orders[: len(orders) // 3])
        settled_status(client)
        before, _ = held_fds(worker.pid)
        kill_all(nursery, orders[len(orders) // 3 :])
        report = settled_status(client)
        after, slots = held_fds(worker.pid)
    kept = len(report["kept"])
    assert slots == kept <= MAX_KEPT_SAVES, "a slot's memory is left in the worker that is not kept"
    assert after <= before + 2 + MAX_KEPT_SAVES, f"{before} fds became {after}"
    with open(f"/proc/{worker.pid}/maps") as maps:
        assert maps.read().count("memfd:asyncckpt") == kept
    assert report["counters"]["saves_committed"] == 3 * KILLS
    assert "internal_errors" not in report["counters"]
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(60) == 0
    assert sorted(p.name for p in endpoint_dir.iterdir()) == ["w.sock.lock"], "only the lock's file stays"


def test_killed_worker_leaves_a_socket_that_the_next_one_replaces(endpoint: str, tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-m", "asyncckpt_worker", "--endpoint", endpoint]
    instances = set()
    for _ in range(3):
        with subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL) as process:
            with Client(endpoint) as client:
                instances.add(client.hello().instance)
            process.kill()
    with subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL) as process:
        with Client(endpoint) as client:
            instances.add(client.hello().instance)
        process.terminate()
        assert process.wait(60) == 0
    assert len(instances) == 4
