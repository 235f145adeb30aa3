"""Saves of a torch-free client through a real worker, remembered: what was acknowledged must load, bit for bit."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from asyncckpt.errors import AsyncCkptError
from asyncckpt.format.names import SaveId
from asyncckpt.protocol import messages as m
from asyncckpt.storage.catalog import found_at, read_manifest
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import LocalStore
from asyncckpt.storage.verification import verify_checkpoint
from tests.torch_free_client import Client, ClientSlot, Snapshot, new_save_id

ROOT = pathlib.Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / '.typing'}"}


@contextlib.contextmanager
def worker_process(endpoint: str, *before: str, **popen: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A worker at `endpoint`; `before`: the command that starts it, such as strace with its options."""
    command = [*before, sys.executable, "-m", "asyncckpt_worker", "--endpoint", endpoint]
    options = {"env": ENVIRONMENT, "cwd": ROOT, "stderr": subprocess.DEVNULL, **popen}
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


class Saver:
    """One client that saves numbered states, each to a path of its own, and remembers how each save ended.

    Attributes:
        acknowledged: Path -> what was saved there, of all that were reported committed.
        refused: Path -> the error that was reported.
        open: Paths of saves whose end was never told.
    """

    def __init__(self, endpoint: str, *, nbytes: int = 300_000, timeout_s: float = 30.0) -> None:
        self.client = Client(endpoint, timeout_s=timeout_s)
        self.nbytes = nbytes
        self.acknowledged: dict[str, Snapshot] = {}
        self.refused: dict[str, Mapping[str, Any]] = {}
        self.open: list[str] = []
        self._slots: list[ClientSlot] = []

    def __enter__(self) -> Saver:
        kept, self.client.timeout_s = self.client.timeout_s, 60.0  # a worker that is starting on a busy machine
        try:
            self.client.hello()
        except BaseException:
            self.client.close()
            raise
        self.client.timeout_s = kept
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def begin(self, path: pathlib.Path, seed: int, **rest: Any) -> tuple[SaveId, Snapshot, ClientSlot]:
        """Stage a state and ring the doorbell; do not wait."""
        snapshot, save_id = Snapshot(nbytes=self.nbytes, seed=seed), new_save_id(seed)
        slot = self._slots.pop() if self._slots else self.client.allocate(snapshot.slot_nbytes())
        self.open.append(str(path))
        self.client.stage(slot, snapshot, save_id, str(path), step=seed, **rest)
        self.client.submit(slot, save_id)
        return save_id, snapshot, slot

    def end(self, path: pathlib.Path, begun: tuple[SaveId, Snapshot, ClientSlot]) -> str:
        """Wait for its end and return the phase."""
        save_id, snapshot, slot = begun
        row = self.client.wait(save_id)
        self.open.remove(str(path))
        if row["phase"] == "committed":
            self.acknowledged[str(path)] = snapshot
        else:
            self.refused[str(path)] = row["error"]
        self._slots.append(slot)
        return str(row["phase"])

    def save(self, path: pathlib.Path, seed: int, **rest: Any) -> str:
        """Save and wait; returns the phase in which it ended."""
        return self.end(path, self.begin(path, seed, **rest))

    def status(self) -> Mapping[str, Any]:
        """Return the worker's report."""
        report: Mapping[str, Any] = self.client.call(m.Status(id=self.client.next_id())).report
        return report


def fault_of(path: str, snapshot: Snapshot) -> str:
    """Return what is wrong with the checkpoint at `path`, of which every byte is known; "" when nothing is."""
    try:
        verdict = verify_checkpoint(path, Files())
    except (AsyncCkptError, OSError) as error:
        return f"{path}: {error}"
    if verdict.faults or verdict.contents is None:
        return f"{path}: {verdict.faults}"
    stored = [
        pathlib.Path(path, shard.name).read_bytes() for rank in verdict.contents.ranks for shard in rank.index.shards
    ]
    return "" if stored == [bytes(image) for image in snapshot.images] else f"{path}: other bytes than were staged"


def violations(acknowledged: Mapping[str, Snapshot], others: Sequence[str] = ()) -> list[str]:
    """Return every broken promise: acknowledged and not there in full, or listed and not in full."""
    found = [fault for path, snapshot in acknowledged.items() if (fault := fault_of(path, snapshot))]
    for path in others:
        seen = found_at(path, LocalStore())
        if seen is not None and seen.state == "committed" and verify_checkpoint(path, Files()).faults:
            found.append(f"{path}: listed, and damaged")
        if seen is not None and seen.state not in ("committed", "incomplete"):
            found.append(f"{path}: {seen.state}: {seen.error}")
    return found


def is_listed(path: pathlib.Path) -> bool:
    """Whether a reader finds a checkpoint at `path`."""
    try:
        read_manifest(str(path), LocalStore())
    except (AsyncCkptError, OSError):
        return False
    return True
