"""SIGKILL of the worker at random instants of uploads: the store shows old checkpoints or new ones, each whole."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator

import pytest
import torch
from real_worker import DEADLINE_S, RealWorker, stop_whoever_serves

import asyncckpt
from asyncckpt import AsyncCheckpointer
from asyncckpt.client import launcher
from asyncckpt.storage.cloud.object_store import ObjectStore
from asyncckpt.storage.verification import verify_checkpoint
from tests import object_servers
from tests.object_servers import NO_CONNECTION_STAYS

pytestmark = pytest.mark.fault

object_servers.start_runtime()

KILLS = int(os.environ.get("ASYNCCKPT_TEST_KILLS", "0")) // 5 or 6
"""`make test-fault` asks for 100."""


@pytest.fixture(scope="module")
def root() -> Iterator[str]:
    """Where checkpoints lie in a store that programs find by the environment."""
    with object_servers.running("s3") as server, object_servers.in_environment(server):
        yield f"{server.root}/runs"


def state_of(step: int) -> dict[str, torch.Tensor]:
    return {f"w{n}": torch.full((1_500_000,), float(step * 10 + n)) for n in range(3)}


def test_kills_at_random_instants_of_uploads_leave_old_or_new(root: str, endpoint: str) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    store = ObjectStore(root.rpartition("/")[0], NO_CONNECTION_STAYS)

    def there(prefix: str) -> list[str]:
        try:
            return store.names(prefix)
        except FileNotFoundError:  # nothing of the first checkpoint is there yet
            return []

    def listed() -> dict[int, str]:
        """Return what a reader sees: step -> state."""
        found = {}
        for name in there(root):
            if "manifest.json" in there(f"{root}/{name}"):
                found[int(name)] = verify_checkpoint(f"{root}/{name}", store.as_files()).state
        return found

    try:
        launcher.start_worker(endpoint)
        with AsyncCheckpointer(endpoint=endpoint, files_per_rank=3) as checkpointer:
            for number in range(KILLS):
                handle = checkpointer.save(state_of(number), f"{root}/{number}", step=number)
                handle.staged.result(DEADLINE_S)
                time.sleep(rng.random() * 0.4)
                RealWorker(endpoint).kill()
                seen = listed()
                assert set(seen.values()) <= {"ok"}, f"after kill {number}: {seen}"
                assert set(seen) in (set(range(number)), set(range(number + 1))), f"after kill {number}: {seen}"
                launcher.start_worker(endpoint)
                handle.written.result(DEADLINE_S)
        for number in range(KILLS):
            found = asyncckpt.load(f"{root}/{number}", source="disk", storage_options=NO_CONNECTION_STAYS)
            assert all(torch.equal(found[fqn], value) for fqn, value in state_of(number).items())
    finally:
        stop_whoever_serves(endpoint)
