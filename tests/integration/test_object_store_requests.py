"""What discovery and loads ask an object store for: requests cost money, and bytes cost time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import rank_processes
import torch

import asyncckpt
from tests import object_proxy, object_servers
from tests.object_proxy import FaultyProxy
from tests.object_servers import NO_CONNECTION_STAYS

object_servers.start_runtime()

DEADLINE_S = 120.0
ROWS, COLUMNS = 4096, 2048
NBYTES = 4 * ROWS * COLUMNS
VARIABLES = ("AWS_",)


@pytest.fixture(scope="module")
def proxy() -> Iterator[FaultyProxy]:
    """A proxy in front of a server of S3; programs find it by the environment."""
    with (
        object_servers.running("s3") as server,
        object_proxy.running(server.url) as found,
        object_servers.in_environment(server, found.url),
    ):
        yield found


@pytest.fixture(scope="module")
def root(proxy: FaultyProxy) -> str:
    """URL of a directory with two small checkpoints, and a third with a tensor of 32 MiB and eight of 4 MiB."""
    root = f"s3://{object_servers.BUCKET}/runs"
    state = {"w": torch.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS).float()}
    state |= {f"layer{n}": torch.full((1 << 20,), float(n)) for n in range(8)}
    with asyncckpt.SyncCheckpointer(storage_options=NO_CONNECTION_STAYS) as checkpointer:
        for step in (1, 2):
            checkpointer.save({"w": torch.ones(3)}, f"{root}/step-{step}", step=step)
        checkpointer.save(state, f"{root}/step-3", step=3)
    return root


@pytest.fixture
def read(proxy: FaultyProxy) -> Callable[[], int]:
    """A function that returns how many bytes were read since the test began."""
    before = proxy.nbytes_read
    return lambda: proxy.nbytes_read - before


def n_listings(proxy: FaultyProxy) -> int:
    return sum(method == "GET" and "list-type=2" in path for method, path in proxy.seen)


def restore_on_a_rank(rank: int, root: str) -> None:
    state = {"layer0": torch.ones(1 << 20)}
    restored = asyncckpt.restore_latest(root, state, keys=["layer0"])
    assert restored is not None and restored.path == f"{root}/step-3" and not state["layer0"].any()


@pytest.mark.parametrize("world_size", [1, 4])
def test_ranks_list_the_store_once_together(proxy: FaultyProxy, root: str, world_size: int) -> None:
    environ = {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)}
    proxy.seen.clear()
    rank_processes.run(world_size, restore_on_a_rank, root, environ=environ, timeout_s=DEADLINE_S)
    assert n_listings(proxy) == 1, proxy.seen


def test_an_eighth_of_a_tensor_costs_an_eighth_of_its_bytes(root: str, read: Callable[[], int]) -> None:
    with asyncckpt.open_checkpoint(f"{root}/step-3", storage_options=NO_CONNECTION_STAYS) as opened:
        before = read()
        found = opened.tensor("w", slice(ROWS // 8, ROWS // 4))
        assert read() - before <= 1.1 * NBYTES / 8
    assert torch.equal(found.flatten(), torch.arange(NBYTES // 32, NBYTES // 16).float())


def test_an_eighth_of_a_state_costs_an_eighth_of_its_bytes(root: str, read: Callable[[], int]) -> None:
    found = asyncckpt.load(f"{root}/step-3", source="disk", keys=["layer5"], storage_options=NO_CONNECTION_STAYS)
    assert torch.equal(found["layer5"], torch.full((1 << 20,), 5.0))
    assert read() <= 1.1 * (1 << 22)
