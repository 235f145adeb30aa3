"""A client that was written from protocol/SPEC.md, memory/SPEC.md and format/SPEC.md alone: it imports nothing of ours.

It saves one float32 matrix `w` of one rank. What it has to guess is a gap in these documents.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import secrets
import struct
import time
from typing import Any

import msgpack
import xxhash
import zmq

PROTOCOL_VERSION, SLOT_VERSION, PAGE = 16, 6, 4096
EMPTY, OPEN, SEALED = 0, 1, 2
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
ENDED = ("committed", "failed", "unknown", "abandoned")


def padded(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


class Worker:
    """A session with the worker at `endpoint` (protocol/SPEC.md sections 2 and 3)."""

    def __init__(self, endpoint: str, deadline_s: float = 60.0) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(endpoint)
        self.deadline_s, self.ids, self.session = deadline_s, 0, secrets.token_hex(8)
        with open("/proc/self/stat", encoding="ascii") as file:
            started = int(file.read().rpartition(")")[2].split()[19])
        self.welcome = self.call(
            "hello", session=self.session, replaces="", package="spec", pid=os.getpid(), pid_start=started, rank=0,
            world_size=1, storage={},
        )  # fmt: skip

    def call(self, name: str, **fields: Any) -> dict[str, Any]:
        """Send a request again and again with one id, until it is answered."""
        self.ids += 1
        header = struct.pack("<4sH", b"ACKP", PROTOCOL_VERSION)
        frames = [header, msgpack.packb({"m": name, "id": self.ids, **fields})]
        deadline = time.monotonic() + self.deadline_s
        while time.monotonic() < deadline:
            self.socket.send_multipart(frames)
            while self.socket.poll(500):
                answer: dict[str, Any] = msgpack.unpackb(self.socket.recv_multipart()[1])
                if answer["id"] == self.ids:
                    if answer["m"] == "refused":
                        raise RuntimeError(answer["error"])
                    return answer
        raise TimeoutError(name)

    def ended(self, save_id: str) -> dict[str, Any]:
        """Return the row of a save once it has ended."""
        deadline = time.monotonic() + self.deadline_s
        while time.monotonic() < deadline:
            for row in self.call("heartbeat", saves=[save_id])["saves"]:
                if row["phase"] in ENDED:
                    return dict(row)
            time.sleep(0.01)
        raise TimeoutError(save_id)

    def close(self) -> None:
        self.socket.close()
        self.context.term()


class Slot:
    """A slot that a worker has granted (memory/SPEC.md)."""

    def __init__(self, worker_pid: int, granted: dict[str, Any]) -> None:
        self.number, self.nbytes, self.token = granted["slot"], granted["nbytes"], granted["token"]
        self.fd = os.open(f"/proc/{worker_pid}/fd/{granted['fd']}", os.O_RDWR | os.O_CLOEXEC)
        assert os.fstat(self.fd).st_size == self.nbytes and fcntl.fcntl(self.fd, fcntl.F_GET_SEALS) & SEALS == SEALS
        self.map = mmap.mmap(self.fd, self.nbytes)
        assert self.map[:8] == b"ACKPSLOT" and self.word(8) == SLOT_VERSION and self.map[16:32] == self.token
        assert self.word(32) == self.nbytes
        self.tail = self.nbytes - PAGE
        assert self.map[self.tail : self.tail + 8] == b"ACKPTAIL"

    def word(self, at: int, value: int | None = None) -> int:
        if value is not None:
            struct.pack_into("<Q", self.map, at, value)
        return int(struct.unpack_from("<Q", self.map, at)[0])

    def stage(self, generation: int, body: bytes, request: bytes) -> None:
        """Section 3, in its order."""
        self.word(64, OPEN)
        self.word(self.tail + 64, generation)
        self.word(72, generation)
        self.map[PAGE : PAGE + len(body)] = body
        at = PAGE + padded(len(body))
        self.map[at : at + len(request)] = request
        self.word(80, at)
        self.word(88, len(request))
        self.word(96, xxhash.xxh3_64_intdigest(request))
        self.word(64, SEALED)

    def close(self) -> None:
        self.map.close()
        os.close(self.fd)


def shard_of(save_id: str, values: list[list[float]]) -> bytes:
    """Return the shard file (format/SPEC.md section 6)."""
    numbers = [value for row in values for value in row]
    shape, data = [len(values), len(values[0])], struct.pack(f"<{len(numbers)}f", *numbers)
    about = {"asyncckpt_save_id": save_id, "format": "pt", "DCP_SHARDING_INFO": '{"w":{"saved_offsets":[0,0]}}'}
    header = {"__metadata__": about, "w": {"dtype": "F32", "shape": shape, "data_offsets": [0, len(data)]}}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (padded(8 + len(text)) - 8 - len(text))
    return struct.pack("<Q", len(text)) + text + data


def request_of(save_id: str, path: str, shard: bytes, shape: list[int], step: int) -> bytes:
    """Return the request (protocol/SPEC.md section 4), with structure and objects (format/SPEC.md sections 4 and 5)."""
    at = 8 + struct.unpack_from("<Q", shard)[0]
    structure = {
        "structure": 1,
        "parts": [len(shard)],
        "tensors": [["w", "float32", shape, [[0, at, len(shard) - at]]]],
        "n_objects": 1,
        "tree": ["d", ["w", ["T", 0], "step", ["O", 0]]],
    }
    objects = {"asyncckpt_objects": 1, "save_id": save_id, "values": [step]}
    request = {
        "v": PROTOCOL_VERSION, "save_id": save_id, "step": step, "path": path, "rank": 0, "world_size": 1,
        "parts": [[PAGE, len(shard)]], "structure": msgpack.packb(structure),
        "objects": json.dumps(objects).encode(), "n_tensors": 1, "metadata": '{"by": "the SPEC"}', "fsync": True,
        "overwrite": False, "umask": 0o077, "write_threads": 0, "package": "spec", "commit_timeout_s": 60,
        "hook_timeout_s": 0, "plan": "", "samples": b"", "changed": False, "layout": "safetensors",
        "ring_segments": 0, "ring_segment_nbytes": 0, "mirror": "", "reuse": False,
    }  # fmt: skip
    return bytes(msgpack.packb(request))
