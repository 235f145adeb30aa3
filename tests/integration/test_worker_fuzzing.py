"""Strange bytes while real saves go on to a real worker: on the wire, in slots, and as connections."""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import secrets
import socket
from collections.abc import Callable, Mapping
from typing import Any

import msgpack
import psutil
import pytest
import zmq
from real_worker import RealWorker, running, wait_until
from torch_free_client import Client, ClientSlot, Snapshot, new_save_id

from asyncckpt.errors import AsyncCkptError
from asyncckpt.memory.slot import PAGE_NBYTES
from asyncckpt.protocol import messages as m
from asyncckpt.protocol.codec import encode
from asyncckpt.protocol.endpoint import socket_path
from asyncckpt.storage.files import Files
from asyncckpt.storage.verification import verify_checkpoint
from tests.fuzz.mutator import mutated
from tests.unit.mutations import altered, packed
from tests.unit.protocol_samples import MESSAGES

N_MESSAGES = int(os.environ.get("ASYNCCKPT_TEST_MESSAGES", "10000"))
GROWTH_NBYTES = 40 << 20
"""Queues of a flood, and the history of sessions and saves; what a message leaves for good would be far above."""

HEADER = encode(m.Status(id=1))[0]
UNSAID = (m.Drain, m.Lead, m.Follow)
"""They end the worker, listen or call elsewhere, and that would be what they ask for."""


class Bystander:
    """A session whose saves must succeed, whatever others do, and the worker as it was before."""

    def __init__(self, worker: RealWorker, root: pathlib.Path) -> None:
        self.worker, self.root, self.count = worker, root, 0
        self.client = Client(worker.endpoint, timeout_s=60.0)
        self.client.hello()
        self.snapshot = Snapshot(nbytes=300_000)
        self.slot = self.client.allocate(self.snapshot.slot_nbytes())
        self.save()
        self.process = psutil.Process(worker.pid)
        self.before = self.anonymous(), self.process.num_fds(), self.process.num_threads()

    def save(self) -> None:
        """Save, and look at every byte."""
        path = str(self.root / f"good-{self.count}")
        self.count += 1
        assert self.client.save(self.slot, self.snapshot, path, step=self.count)["phase"] == "committed"
        assert verify_checkpoint(path, Files()).state == "ok"

    def anonymous(self) -> int:
        with open(f"/proc/{self.worker.pid}/status") as file:
            return int(next(line.split()[1] for line in file if line.startswith("RssAnon"))) << 10

    def check(self) -> Mapping[str, Any]:
        """The worker is as it was, and has seen no bug of its own."""
        status = self.worker.status()
        assert status["pid"] == self.worker.pid, "another worker serves"
        log = pathlib.Path(socket_path(self.worker.endpoint)).with_suffix(".log").read_text()
        assert "internal_errors" not in status["counters"], [
            line for line in log.splitlines() if "a bug in the worker" in line
        ]
        memory, fds, threads = self.before
        assert self.anonymous() < memory + GROWTH_NBYTES
        assert self.process.num_fds() <= fds + 8 and self.process.num_threads() <= threads + 24
        return status


@contextlib.contextmanager
def bystander(endpoint: str, root: pathlib.Path) -> Any:
    with running(endpoint, "--root", str(root)) as worker:
        found = Bystander(worker, root)
        try:
            yield found
        finally:
            found.client.close()


def bodies(root: pathlib.Path) -> list[bytes]:
    """Sound requests, whose paths lie where the worker may write, and whose sizes are small."""
    found = []
    for message in MESSAGES:
        if message.name in m.REQUESTS and not isinstance(message, UNSAID):
            body = msgpack.unpackb(encode(message)[1])
            body |= {"path": str(root / "strange")} if "path" in body else {}
            body |= {"nbytes": 1 << 16} if isinstance(message, m.Allocate) else {}
            found.append(packed(body))
    return found


def test_mutated_messages_cost_no_save_no_memory_and_not_the_worker(
    endpoint: str, tmp_path: pathlib.Path, rng: random.Random, record_property: Callable[[str, object], None]
) -> None:
    record_property("count", N_MESSAGES)
    good = bodies(tmp_path)
    documents = [msgpack.unpackb(body) for body in good]
    with bystander(endpoint, tmp_path) as other, Client(endpoint) as stranger, Client(endpoint) as member:
        member.hello()
        for number in range(N_MESSAGES):
            body = mutated(good, rng) if rng.random() < 0.6 else packed(altered(rng.choice(documents), rng))
            frames = [HEADER, body]
            if rng.random() < 0.1:
                frames = [mutated([HEADER], rng), body, *[b"more"] * rng.choice((0, 1, 200))]
            peer = rng.choice((stranger, member))
            peer.socket.send_multipart(frames)
            while peer.socket.poll(0):
                peer.socket.recv_multipart()
            if number % 1000 == 500:
                other.save()
        with contextlib.suppress(AsyncCkptError):  # it may have said so already
            member.call(m.Goodbye(id=1 << 60))
        other.save()
        wait_until(
            lambda: other.worker.status()["counters"]["messages_received"] > 0.9 * N_MESSAGES, "all of them are read"
        )
        counters = other.check()["counters"]
        assert counters["messages_malformed"] > N_MESSAGES / 4


def _pages(slot: ClientSlot) -> tuple[int, int]:
    address = slot.memory.mapping.address
    return address, address + slot.memory.nbytes - PAGE_NBYTES


def _spoil_pages(client: Client, slot: ClientSlot, snapshot: Snapshot, path: str, rng: random.Random) -> None:
    """Random words in the control pages of a sealed slot."""
    client.seal(slot, snapshot, new_save_id(), path)
    view = slot.memory.mapping.view()
    for _ in range(rng.choice((1, 2, 8))):
        at = rng.choice((64, 72, 80, 88, 96, slot.memory.nbytes - PAGE_NBYTES + 64, rng.randrange(slot.memory.nbytes)))
        view[at : at + 8] = rng.choice((rng.randbytes(8), bytes(8), b"\xff" * 8, b"\0" * 7 + b"\x10"))[
            : slot.memory.nbytes - at
        ]
    view.release()


def _spoil_request(client: Client, slot: ClientSlot, snapshot: Snapshot, path: str, rng: random.Random) -> None:
    """A request with a good checksum, and anything in it."""
    good = snapshot.request(new_save_id(), path, 0)
    bad = mutated([good], rng) if rng.random() < 0.3 else packed(altered(msgpack.unpackb(good), rng))
    slot.memory.control.seal(bad[:60_000], PAGE_NBYTES + snapshot.nbytes)


@pytest.mark.parametrize("spoil", [_spoil_pages, _spoil_request])
def test_slots_that_hold_anything_cost_no_other_save_and_not_the_worker(
    endpoint: str, tmp_path: pathlib.Path, rng: random.Random, spoil: Callable[..., None]
) -> None:
    with bystander(endpoint, tmp_path) as other, Client(endpoint, timeout_s=60.0) as client:
        client.hello()
        snapshot = Snapshot()
        for number in range(120):
            slot = client.allocate(snapshot.slot_nbytes())
            save_id = new_save_id()
            path = str(tmp_path / f"strange-{number}")
            client.begin(slot, save_id, path, nbytes=snapshot.nbytes)
            snapshot.fill(slot.memory, save_id)
            spoil(client, slot, snapshot, path, rng)
            with contextlib.suppress(AsyncCkptError):
                client.call(m.Submit(id=client.next_id(), save_id=str(save_id), slot=slot.number, generation=1))
            with contextlib.suppress(AsyncCkptError):
                client.withdraw(save_id)
            client.call(m.Release(id=client.next_id(), slot=slot.number))
            slot.memory.close()
            client.slots.remove(slot)
            if number % 40 == 0:
                other.save()
        other.save()
        other.check()
        for path in tmp_path.glob("strange-*"):
            assert verify_checkpoint(str(path), Files()).state in ("ok", "absent", "incomplete", "corrupt")


GREETINGS: dict[str, Callable[[random.Random], bytes]] = {
    "silent": lambda _: b"",
    "random": lambda rng: rng.randbytes(300),
    "half a hello_builder": lambda _: b"\xff" + bytes(8) + b"\x7f\x03",
    "a frame of 2**63 bytes": lambda _: b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48) + b"\x02" + b"\x7f" * 8,
    "http": lambda _: b"GET / HTTP/1.1\r\n\r\n",
}


def test_a_flood_of_connections_that_say_nothing_sensible_leaves_the_worker_serving(
    endpoint: str, tmp_path: pathlib.Path, rng: random.Random
) -> None:
    with bystander(endpoint, tmp_path) as other, contextlib.ExitStack() as stack:
        for number in range(300):
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            connection.settimeout(5)
            connection.connect(socket_path(endpoint))
            with contextlib.suppress(OSError):
                connection.sendall(list(GREETINGS.values())[number % len(GREETINGS)](rng))
            if number % 100 == 50:
                other.save()
        other.save()
        assert other.process.is_running()
        stack.close()
        other.save()
        other.check()


def test_peers_that_send_without_end_and_never_read_leave_room_for_a_save(
    endpoint: str, tmp_path: pathlib.Path
) -> None:
    context = zmq.Context()
    with bystander(endpoint, tmp_path) as other:
        peers = [context.socket(zmq.DEALER) for _ in range(8)]
        try:
            for peer in peers:
                peer.setsockopt(zmq.LINGER, 0)
                peer.setsockopt(zmq.RCVHWM, 1)
                peer.connect(endpoint)
            status, large = encode(m.Status(id=1)), [HEADER, bytes(1 << 20)]
            for number in range(2000):
                with contextlib.suppress(zmq.Again):
                    peers[number % 8].send_multipart(large if number % 50 == 0 else status, zmq.NOBLOCK)
                if number % 500 == 250:
                    other.save()
            other.save()
        finally:
            for peer in peers:
                peer.close(0)
            context.term()
        other.save()
        other.check()


def test_strange_files_beside_a_save_are_neither_followed_nor_waited_for(endpoint: str, tmp_path: pathlib.Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    root = tmp_path / "root"
    root.mkdir()
    with bystander(endpoint, root) as other:
        for number, make in enumerate((os.mkfifo, lambda p: os.symlink(outside / "x", p), _socket_at)):
            target = root / f"t{number}"
            target.mkdir()
            save_id = new_save_id()
            for name in (
                f"rank-00000-part-000.{save_id}.safetensors",
                f"rank-00000.{save_id}.objects.json",
                f"rank-00000.{save_id}.index",
            ):
                make(target / name)  # type: ignore[operator]
            other.client.stage(other.slot, other.snapshot, save_id, str(target))
            other.client.submit(other.slot, save_id)
            assert other.client.wait(save_id)["phase"] == "failed"
            assert not (target / "manifest.json").exists()
        os.mkfifo(root / "manifest.json")
        other.save()
        assert not any(outside.iterdir())
        other.check()


def _socket_at(path: pathlib.Path) -> None:
    """A socket with a long name: bound by a short one first."""
    short = path.parent.parent / secrets.token_hex(2)
    with socket.socket(socket.AF_UNIX) as made:
        fd = os.open(short.parent, os.O_RDONLY)
        try:
            made.bind(f"/proc/self/fd/{fd}/{short.name}")
        finally:
            os.close(fd)
    os.rename(short, path)
