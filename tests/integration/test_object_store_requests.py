"""What discovery and loads ask an object store for: requests cost money, and bytes cost time."""

from __future__ import annotations

import os
import pathlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import rank_processes
import real_worker
import torch

import asyncckpt
from asyncckpt.distributed.meetings import Meeting
from asyncckpt.format.names import SaveId
from asyncckpt.restore import finder, restore_first
from asyncckpt.storage import locate
from asyncckpt.storage.cloud.object_store import ObjectStore
from tests import many_ranks, object_proxy, object_servers
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


PAGE = 1000
"""Objects that S3 and Google list by one request."""


class Requests:
    """A store of obstore's that counts how often each of its methods is called; of listings, the requests."""

    def __init__(self, store: Any) -> None:
        self._store, self.counts = store, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        self.counts[name] += 1
        return getattr(self._store, name)

    def list(self, prefix: str | None = None, **options: Any) -> Iterator[Any]:
        found = [one for page in self._store.list(prefix, **options) for one in page]
        self.counts["list"] += max(1, -(-len(found) // PAGE))
        return iter([found])

    def take_listings(self) -> int:
        """Return how many requests were listings since the last call."""
        counts, self.counts = self.counts, Counter[str]()
        return sum(count for name, count in counts.items() if "list" in name)


WORLD_SIZE = 512
SIMULATED = "s3://simulated/runs"


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Requests:
    """Requests to a store that has a checkpoint of 512 ranks, which are 1,537 objects, at `SIMULATED`/step-0."""
    files = many_ranks.checkpoint_files(
        [{"w": torch.zeros(WORLD_SIZE, 2)}] * WORLD_SIZE, save_id=SaveId(1, 0, "0" * 12)
    )
    found = Requests(object_servers.memory_store())
    monkeypatch.setattr(locate, "_stores", {})
    monkeypatch.setattr(locate, "_opened", lambda *_: ObjectStore("s3://simulated", client=found))
    store = locate.store_at(SIMULATED)
    for name, data in files.items():
        store.put(f"{SIMULATED}/step-0/{name}", data, replace=True)
    assert PAGE < len(files) < 2 * PAGE
    return found


class Circle:
    """Where the threads of a test meet, each as if it were a rank."""

    def __init__(self, world_size: int) -> None:
        self._barrier, self._given = threading.Barrier(world_size, timeout=DEADLINE_S), [b""] * world_size

    def meeting(self, rank: int) -> Meeting:
        circle = self

        class Here(Meeting):
            def gather(self, payload: bytes, deadline: float) -> list[bytes]:
                circle._given[rank] = payload
                circle._barrier.wait()
                found = list(circle._given)
                circle._barrier.wait()
                return found

            def refuse(self, reason: str) -> None:
                circle._barrier.abort()

            def close(self) -> None:
                """Nothing is open."""

        return Here()


def test_512_ranks_list_the_store_once_together(requests: Requests) -> None:
    with asyncckpt.SyncCheckpointer() as checkpointer:
        for step in (1, 2):
            checkpointer.save({"n": step}, f"{SIMULATED}/step-{step}", step=step)
    requests.take_listings()
    circle = Circle(WORLD_SIZE)

    def restore(rank: int) -> Any:
        return restore_first(
            finder(None),
            SIMULATED,
            None,
            quarantine=False,
            rank_info=asyncckpt.RankInfo(rank, WORLD_SIZE),
            timeout_s=DEADLINE_S,
            meet=lambda: circle.meeting(rank),
            source="disk",
        )

    with ThreadPoolExecutor(WORLD_SIZE) as ranks:
        found = list(ranks.map(restore, range(WORLD_SIZE)))
    assert all(one.path == f"{SIMULATED}/step-2" and one.state_dict == {"n": 2} for one in found)
    assert requests.take_listings() == 2, "two pages of one listing"


def test_a_look_for_the_newest_checkpoint_asks_for_each_page_of_objects(requests: Requests) -> None:
    for _ in range(2):  # as two ranks do, each by itself
        assert asyncckpt.latest_checkpoint(SIMULATED) == f"{SIMULATED}/step-0"
        assert requests.take_listings() == 2
    assert asyncckpt.restore_latest(SIMULATED, {"w": torch.ones(WORLD_SIZE, 2)}) is not None
    assert requests.take_listings() == 2
    with (
        asyncckpt.SyncCheckpointer() as checkpointer,
        asyncckpt.CheckpointManager(SIMULATED, checkpointer=checkpointer) as manager,
    ):
        assert manager.restore({"w": torch.ones(WORLD_SIZE, 2)}) is not None
        assert requests.take_listings() == 2
        assert (manager.latest_step(), manager.all_steps()) == (0, [0])
        assert requests.take_listings() == 4, "one listing each"


def test_an_eighth_of_a_tensor_costs_an_eighth_of_its_bytes(root: str, read: Callable[[], int]) -> None:
    with asyncckpt.open_checkpoint(f"{root}/step-3", storage_options=NO_CONNECTION_STAYS) as opened:
        before = read()
        found = opened.tensor("w", slice(ROWS // 8, ROWS // 4))
        assert read() - before <= 1.1 * NBYTES / 8
    assert torch.equal(found.flatten(), torch.arange(NBYTES // 32, NBYTES // 16).float())


def gpt_shapes() -> dict[str, tuple[int, ...]]:
    """Return the shapes of a GPT-2 of 2 layers and few words: 63 MB, in tensors of 3 KB to 9 MB."""
    width = 768
    shapes: dict[str, tuple[int, ...]] = {"token": (1024, width), "position": (512, width), "norm": (width,)}
    for layer in range(2):
        for name, n_out, n_in in (("qkv", 3, 1), ("proj", 1, 1), ("up", 4, 1), ("down", 1, 4)):
            shapes |= {f"{layer}.{name}.w": (n_out * width, n_in * width), f"{layer}.{name}.b": (n_out * width,)}
        shapes |= {f"{layer}.norm{n}.{kind}": (width,) for n in (1, 2) for kind in "wb"}
    return shapes


@pytest.mark.parametrize("how", ["saved", "mirrored"])
def test_an_eighth_of_the_rows_of_many_small_tensors_costs_an_eighth_of_their_bytes(
    proxy: FaultyProxy, tmp_path: pathlib.Path, endpoint: str, read: Callable[[], int], how: str
) -> None:
    model = {name: torch.randn(shape) for name, shape in gpt_shapes().items()}
    url = f"s3://{object_servers.BUCKET}/model/{how}/step-1"
    if how == "saved":
        with asyncckpt.SyncCheckpointer(storage_options=NO_CONNECTION_STAYS) as checkpointer:
            checkpointer.save(model, url, step=1)
    else:
        with real_worker.running(endpoint), asyncckpt.AsyncCheckpointer(endpoint=endpoint) as saving:
            handle = saving.save(model, tmp_path / "step-1", step=1, mirror=url)
            assert handle.mirrored is not None
            handle.mirrored.result(DEADLINE_S)
    parts = {name: tensor.chunk(8)[3] for name, tensor in model.items()}
    target = {
        name: asyncckpt.ShardedSlice(
            torch.zeros_like(part), tuple(model[name].shape), (3 * len(part), *[0] * (part.dim() - 1))
        )
        for name, part in parts.items()
    }
    before = read()
    asyncckpt.load(url, target, source="disk", storage_options=NO_CONNECTION_STAYS)
    assert read() - before <= 1.1 * sum(part.nbytes for part in parts.values())
    assert all(torch.equal(target[name].tensor, part) for name, part in parts.items())


def test_an_eighth_of_a_state_costs_an_eighth_of_its_bytes(root: str, read: Callable[[], int]) -> None:
    found = asyncckpt.load(f"{root}/step-3", source="disk", keys=["layer5"], storage_options=NO_CONNECTION_STAYS)
    assert torch.equal(found["layer5"], torch.full((1 << 20,), 5.0))
    assert read() <= 1.1 * (1 << 22)
