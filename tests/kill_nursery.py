"""A process that forks a worker and a torch-free trainer again and again, and kills one of them or both. For tests.

Each line of stdin is a JSON object: `kind` (trainer, worker, both), `endpoint`, `root`, `run` (twelve hex digits
of all save ids), `delay_s` after the trainer's first contact, `first` (who of both is killed first),
`seed` of the first state. The answer is one JSON line: `sealed` and `acked` are the seeds of saves that were staged,
and reported committed, before the kill; `code` is how a worker that was not killed ended.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import sys
import time
import traceback
from typing import Any

from asyncckpt.format.layout import SAVE_ID_NBYTES, SAVE_ID_OFFSET, save_id_bytes
from asyncckpt.format.names import SaveId
from asyncckpt_worker.config import WorkerConfig
from asyncckpt_worker.service.daemon import Daemon
from tests.storage_samples import RecordingFiles
from tests.torch_free_client import Client, Snapshot

SIZES = (20_000, 90_000, 400_000, 1_500_000)


def snapshot_of(seed: int, run: str) -> tuple[SaveId, Snapshot]:
    """Return what the save numbered `seed` is about; its image is as it must be on disk."""
    save_id = SaveId(1, seed, run)
    snapshot = Snapshot(nbytes=SIZES[seed % len(SIZES)], seed=seed)
    for image in snapshot.images:
        image[SAVE_ID_OFFSET : SAVE_ID_OFFSET + SAVE_ID_NBYTES] = save_id_bytes(save_id)
    return save_id, snapshot


def serve(endpoint: str) -> None:
    """Be the worker."""
    daemon = Daemon(WorkerConfig(endpoint=endpoint), RecordingFiles())
    signal.signal(signal.SIGTERM, lambda *_: daemon.stop())
    daemon.run()


def train(order: dict[str, Any], told: int) -> None:
    """Be a trainer that saves until it is killed, two saves in flight, and says what it has done."""
    client = Client(order["endpoint"])
    client.hello()
    slots = [client.allocate(1 << 21) for _ in range(2)]
    os.write(told, b"r 0\n")
    flying: list[tuple[int, SaveId]] = []
    for seed in range(order["seed"], order["seed"] + 1000):
        if len(flying) == 2:
            number, save_id = flying.pop(0)
            phase = client.wait(save_id)["phase"]
            os.write(told, f"{'a' if phase == 'committed' else 'f'} {number}\n".encode())
        save_id, snapshot = snapshot_of(seed, order["run"])
        slot = slots[seed % 2]
        client.stage(slot, snapshot, save_id, f"{order['root']}/{seed}", step=seed)
        os.write(told, f"s {seed}\n".encode())
        client.submit(slot, save_id)
        flying.append((seed, save_id))


def forked(call: Any, *args: Any) -> int:
    """Run a function in a child of its own."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            call(*args)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def cycle(order: dict[str, Any]) -> dict[str, Any]:
    """Start both, kill as ordered, and return what was said before."""
    worker = forked(serve, order["endpoint"])
    heard, told = os.pipe()
    trainer = forked(train, order, told)
    os.close(told)
    said = os.read(heard, 4)
    time.sleep(order["delay_s"])
    victims = {"trainer": [trainer], "worker": [worker], "both": [trainer, worker]}[order["kind"]]
    for victim in victims if order["first"] == "trainer" else victims[::-1]:
        os.kill(victim, signal.SIGKILL)
    if order["kind"] == "worker":
        os.kill(trainer, signal.SIGKILL)  # it speaks to nobody now
    os.waitpid(trainer, 0)
    if order["kind"] == "trainer":
        time.sleep(0.02)
        os.kill(worker, signal.SIGTERM)  # drains: what was sealed is written first
    code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    while piece := os.read(heard, 65536):
        said += piece
    os.close(heard)
    pathlib.Path(order["endpoint"].removeprefix("ipc://")).unlink(missing_ok=True)
    lines = [line.split() for line in said.decode().splitlines() if line.count(" ")]
    found = {kind: [int(number) for what, number in lines if what == kind] for kind in "saf"}
    return {"sealed": found["s"], "acked": found["a"], "failed": found["f"], "code": code}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(cycle(json.loads(line))), flush=True)
