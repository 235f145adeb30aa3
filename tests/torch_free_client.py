"""A trainer without torch: speaks the real protocol over zmq and fills real slots. For tests of the worker.

As a program it is a nursery: it imports everything once, then forks a client per line of its stdin, so that a test can
kill hundreds of them in seconds. A line is a JSON object (`Order`); the end of the child is one JSON line.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import zmq

from asyncckpt.errors import WorkerUnavailableError, from_wire
from asyncckpt.format import layout, objects, structure
from asyncckpt.format.names import SaveId
from asyncckpt.memory.arena import SlotMemory
from asyncckpt.memory.slot import PAGE_NBYTES, slot_nbytes
from asyncckpt.protocol import messages as m
from asyncckpt.protocol.codec import decode, encode
from asyncckpt.protocol.identity import start_ticks
from asyncckpt.protocol.request import PartRange, SaveRequest, encode_request
from asyncckpt.protocol.save_phases import ENDED

MIN_TIMEOUT_S = 60.0


def new_save_id(sequence: int = 0, epoch: int = 1) -> SaveId:
    """Return a save id of a run of its own."""
    return SaveId(epoch, sequence, secrets.token_hex(6))


class Snapshot:
    """A made-up state: `n_tensors` uint8 tensors of random bytes, from a seed.

    `shard` (n, of): what this rank holds is the n-th of `of` equal pieces of each tensor.

    Attributes:
        images: One image per part, header included.
        nbytes: Bytes of all images, padded to pages.
    """

    def __init__(
        self,
        *,
        n_tensors: int = 3,
        nbytes: int = 100_000,
        seed: int = 0,
        n_parts: int = 1,
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        generator = random.Random(seed)
        sizes = [max(1, nbytes // n_tensors + i) for i in range(n_tensors)]
        specs = [
            layout.BoxSpec(
                fqn=f"t{i}", dtype="uint8", global_shape=(n * shard[1],), offsets=(n * shard[0],), sizes=(n,)
            )
            for i, n in enumerate(sizes)
        ]
        placed = layout.build_layout(specs, n_parts=n_parts)
        self.tensors = {s.fqn: generator.randbytes(s.nbytes) for s in specs}
        self.images = [bytearray(p.header) + bytearray(p.nbytes - len(p.header)) for p in placed.parts]
        for spec, chunk in zip(specs, placed.chunks, strict=True):
            self.images[chunk.part][chunk.offset_bytes : chunk.offset_bytes + chunk.nbytes] = self.tensors[spec.fqn]
        entries = tuple(
            structure.TensorEntry(fqn=s.fqn, dtype=s.dtype, global_shape=s.global_shape, chunks=(c,))
            for s, c in zip(specs, placed.chunks, strict=True)
        )
        keys: list[Any] = [part for s, n in zip(specs, range(n_tensors), strict=True) for part in (s.fqn, ("T", n))]
        self.structure = structure.encode_structure(
            structure.Structure(
                tree=("d", (*keys, "step", ("O", 0))),
                tensors=entries,
                n_objects=1,
                part_nbytes=tuple(p.nbytes for p in placed.parts),
            )
        )
        self.n_tensors = n_tensors
        self.nbytes = sum(layout.round_up(len(image)) for image in self.images)

    def slot_nbytes(self) -> int:
        """Return the size of a slot that this snapshot fits into."""
        return slot_nbytes(self.nbytes, len(self.structure) + 65536)

    def request(
        self, save_id: SaveId, path: str, step: int, *, rank: int = 0, world_size: int = 1, **rest: Any
    ) -> bytes:
        """Return the encoded save request."""
        parts, offset = [], PAGE_NBYTES
        for image in self.images:
            parts.append(PartRange(offset=offset, nbytes=len(image)))
            offset += layout.round_up(len(image))
        fields: dict[str, Any] = {
            "metadata": "{}", "fsync": True, "overwrite": False, "umask": 0o022, "write_threads": 0, "package": "test",
            "commit_timeout_s": 60.0, "hook_timeout_s": 0, "plan": "", "samples": b"", "changed": False, **rest,
        }  # fmt: skip
        return encode_request(
            SaveRequest(
                save_id=str(save_id),
                step=step,
                path=path,
                rank=rank,
                world_size=world_size,
                parts=tuple(parts),
                structure=self.structure,
                objects=objects.encode_objects(save_id, [step]),
                n_tensors=self.n_tensors,
                **fields,
            )
        )

    def fill(self, memory: SlotMemory, save_id: SaveId, *, fraction: float = 1.0) -> None:
        """Copy the first `fraction` of the images into an open slot's body."""
        view = memory.mapping.view()
        offset, left = PAGE_NBYTES, int(self.nbytes * fraction)
        for image in self.images:
            start = layout.SAVE_ID_OFFSET
            image[start : start + layout.SAVE_ID_NBYTES] = layout.save_id_bytes(save_id)
            count = min(left, len(image))
            view[offset : offset + count] = image[:count]
            offset += layout.round_up(len(image))
            left -= count
        view.release()


@dataclass
class ClientSlot:
    """A granted slot: its number and mapped memory, and the generation that was opened last."""

    number: int
    memory: SlotMemory
    generation: int = 0


class Client:
    """One session. Requests are repeated until they are answered; `Refused` raises what it carries.

    Args:
        context: Of the socket, where many clients share one.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        rank: int = 0,
        world_size: int = 1,
        timeout_s: float = MIN_TIMEOUT_S,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        self.endpoint, self.rank, self.world_size, self.timeout_s = endpoint, rank, world_size, timeout_s
        self.session = secrets.token_hex(8)
        self.slots: list[ClientSlot] = []
        self.pushed: list[Mapping[str, Any]] = []
        self.welcome: m.Welcome | None = None
        self._ids = iter(range(1, 1 << 62))
        self._own_context = zmq.Context() if context is None else None
        self.socket = (context or self._own_context).socket(zmq.DEALER)  # type: ignore[union-attr]
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.IDENTITY, self.session.encode())
        self.socket.setsockopt(zmq.RECONNECT_IVL, 10)
        self.socket.connect(endpoint)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap all slots and close the socket, without a goodbye."""
        self.socket.close(0)
        if self._own_context is not None:
            self._own_context.term()
        for slot in self.slots:
            slot.memory.close()
        self.slots.clear()

    # ---- messages ---------------------------------------------------------------------------------------------------

    def next_id(self) -> int:
        """Return a fresh request id."""
        return next(self._ids)

    def send(self, message: m.Message) -> None:
        """Send once, wait for nothing: where nobody takes anything, what is too much is lost."""
        with contextlib.suppress(zmq.Again):
            self.socket.send_multipart(encode(message), zmq.NOBLOCK)

    def receive(self, timeout_s: float) -> m.Message | None:
        """Return the next message, or None; remembers what was pushed."""
        if not self.socket.poll(max(0, int(timeout_s * 1000))):
            return None
        message = decode(self.socket.recv_multipart(), m.REPLIES)
        if isinstance(message, m.Saves):
            self.pushed.extend(message.saves)
        return message

    def call(self, message: m.Message, *, resend_s: float = 1.0) -> Any:
        """Send until answered, and return the answer."""
        number: int = message.id  # type: ignore[attr-defined]
        deadline = time.monotonic() + self.timeout_s
        while time.monotonic() < deadline:
            self.send(message)
            again = time.monotonic() + resend_s
            while (left := again - time.monotonic()) > 0:
                reply = self.receive(left)
                if reply is not None and reply.id == number:  # type: ignore[attr-defined]
                    if isinstance(reply, m.Refused):
                        raise from_wire(reply.error)
                    return reply
        raise WorkerUnavailableError(f"{self.endpoint} does not answer {message.name}", endpoint=self.endpoint)

    def hello(self, **changes: Any) -> m.Welcome:
        """Open the session."""
        pid = os.getpid()
        fields: dict[str, Any] = {
            "session": self.session, "replaces": "", "package": "test", "pid": pid, "pid_start": start_ticks(pid) or 0,
            "rank": self.rank, "world_size": self.world_size, "storage": {}, **changes,
        }  # fmt: skip
        welcome: m.Welcome = self.call(m.Hello(id=self.next_id(), **fields), resend_s=0.05)
        self.welcome = welcome
        return welcome

    def allocate(self, nbytes: int, *, populate: bool = False) -> ClientSlot:
        """Get a slot and map it."""
        assert self.welcome is not None
        granted = self.call(m.Allocate(id=self.next_id(), nbytes=nbytes, populate=populate))
        memory = SlotMemory.attach(self.welcome.pid, granted.fd, granted.nbytes, granted.token)
        slot = ClientSlot(granted.slot, memory, memory.control.generation)
        self.slots.append(slot)
        return slot

    def reopen(self, slot: ClientSlot) -> None:
        """Open the next generation of `slot`, and tell nobody."""
        slot.generation += 1
        slot.memory.control.open(slot.generation)

    def begin(
        self,
        slot: ClientSlot,
        save_id: SaveId,
        path: str,
        *,
        step: int = 0,
        nbytes: int,
        umask: int = 0o022,
        fsync: bool = True,
        overwrite: bool = False,
        commit_timeout_s: float = 60.0,
    ) -> None:
        """Open the next generation of `slot` and announce the save."""
        self.reopen(slot)
        message = m.Begin(
            id=self.next_id(),
            save_id=str(save_id),
            step=step,
            path=path,
            slot=slot.number,
            generation=slot.generation,
            nbytes=nbytes,
            umask=umask,
            fsync=fsync,
            overwrite=overwrite,
            commit_timeout_s=commit_timeout_s,
        )
        self.call(message)

    def submit(self, slot: ClientSlot, save_id: SaveId) -> None:
        """Ring the doorbell."""
        self.call(m.Submit(id=self.next_id(), save_id=str(save_id), slot=slot.number, generation=slot.generation))

    def stage(
        self, slot: ClientSlot, snapshot: Snapshot, save_id: SaveId, path: str, *, step: int = 0, **rest: Any
    ) -> None:
        """Begin, fill and seal; the doorbell is left to the caller."""
        begun = {name: rest[name] for name in ("fsync", "overwrite", "commit_timeout_s") if name in rest}
        self.begin(slot, save_id, path, step=step, nbytes=snapshot.nbytes, **begun)
        snapshot.fill(slot.memory, save_id)
        self.seal(slot, snapshot, save_id, path, step=step, **rest)

    def seal(
        self, slot: ClientSlot, snapshot: Snapshot, save_id: SaveId, path: str, *, step: int = 0, **rest: Any
    ) -> None:
        """Write the request behind the images and seal."""
        fields = {"rank": self.rank, "world_size": self.world_size, **rest}
        request = snapshot.request(save_id, path, step, **fields)
        slot.memory.control.seal(request, PAGE_NBYTES + snapshot.nbytes)

    def save(self, slot: ClientSlot, snapshot: Snapshot, path: str, *, step: int = 0, **rest: Any) -> Mapping[str, Any]:
        """Do a whole save and return its last row."""
        save_id = new_save_id()
        self.stage(slot, snapshot, save_id, path, step=step, **rest)
        self.submit(slot, save_id)
        return self.wait(save_id)

    def row(self, save_id: SaveId) -> Mapping[str, Any] | None:
        """Ask for one save's state by a heartbeat; None when the worker does not know it."""
        reply = self.call(m.Heartbeat(id=self.next_id(), saves=(str(save_id),)))
        return next(iter(reply.saves), None)

    def wait(self, save_id: SaveId, phases: frozenset[str] = ENDED) -> Mapping[str, Any]:
        """Wait for a pushed row, or ask every 50 ms, until the save is in one of `phases`."""
        deadline = time.monotonic() + self.timeout_s
        while time.monotonic() < deadline:
            for row in self.pushed:
                if row["save_id"] == str(save_id) and row["phase"] in phases:
                    return row
            row_now = self.row(save_id)
            if row_now is not None and row_now["phase"] in phases:
                return row_now
            self.receive(0.05)
        raise TimeoutError(f"save {save_id} is not in {sorted(phases)}: {self.row(save_id)}")

    def lineage(self, run: str, path: str) -> int:
        """Join the run, and return its epoch beside `path`."""
        return int(self.call(m.Lineage(id=self.next_id(), run=run, path=path, least_epoch=0)).epoch)

    def withdraw(self, save_id: SaveId, reason: str = "simulated", *, skipped: bool = False) -> None:
        """Take no part in a save."""
        self.call(m.Withdraw(id=self.next_id(), save_id=str(save_id), reason=reason, skipped=skipped))

    def goodbye(self) -> None:
        """End the session in order."""
        self.call(m.Goodbye(id=self.next_id()))


# ---- the nursery --------------------------------------------------------------------------------


@dataclass
class Order:
    """What one forked client does, and where SIGKILL meets it.

    Attributes:
        die: "before_seal" (when `progress` of the body is written), "around_seal" (`delay_s` after it set about
            sealing, wherever that meets it), "sealed" (before the doorbell is sent), "submitted" (`delay_s` after it
            was sent), or "never".
        announced: Whether Begin was sent and answered before the body is written.
        first: The path and id of a save in another slot that is submitted, and not waited for, ahead of the seal.
        mark: A file that is made once the seal is done, as proof of it.
    """

    endpoint: str
    path: str
    save_id: str
    die: str
    nbytes: int = 300_000
    progress: float = 1.0
    delay_s: float = 0.0
    seed: int = 0
    announced: bool = True
    first: tuple[str, str] | None = None
    mark: str = ""


def obey(order: Order) -> None:
    """Be a trainer that saves once and dies as ordered."""
    snapshot, save_id = Snapshot(nbytes=order.nbytes, seed=order.seed), SaveId.parse(order.save_id)
    client = Client(order.endpoint)
    client.hello()
    slot = client.allocate(snapshot.slot_nbytes(), populate=True)
    other = client.allocate(snapshot.slot_nbytes(), populate=True) if order.first else None
    if order.announced:
        client.begin(slot, save_id, order.path, step=order.seed, nbytes=snapshot.nbytes)
    else:
        client.reopen(slot)
    if order.die == "before_seal":
        snapshot.fill(slot.memory, save_id, fraction=order.progress)
        _die(0)
    if order.first and other:
        path, first_id = order.first[0], SaveId.parse(order.first[1])
        client.stage(other, snapshot, first_id, path, step=order.seed)
    snapshot.fill(slot.memory, save_id)
    if order.first and other:
        client.send(_submit(client, other, order.first[1]))
    if order.die == "around_seal":
        threading.Thread(target=_die, args=(order.delay_s,)).start()
    client.seal(slot, snapshot, save_id, order.path, step=order.seed)
    if order.mark:
        os.close(os.open(order.mark, os.O_CREAT))
    if order.die == "sealed":
        _die(0)
    if order.die == "around_seal":
        time.sleep(60)
    client.send(_submit(client, slot, order.save_id))
    if order.die == "submitted":
        _die(order.delay_s)
    client.wait(save_id)
    client.goodbye()
    client.close()


def _submit(client: Client, slot: ClientSlot, save_id: str) -> m.Submit:
    return m.Submit(id=client.next_id(), save_id=save_id, slot=slot.number, generation=slot.generation)


def _die(delay_s: float) -> None:
    time.sleep(delay_s)
    os.kill(os.getpid(), signal.SIGKILL)


def encode_order(order: Order) -> str:
    """Return the line that orders a child."""
    return json.dumps(asdict(order))


def nursery() -> None:
    """Fork a child for every line of stdin; say how each ended."""
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                obey(Order(**json.loads(line)))
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        killed_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        print(json.dumps({"signal": killed_by, "status": status}), flush=True)


if __name__ == "__main__":
    nursery()
