"""SIGKILL of the worker, of the trainer, or of both, at random instants of uploads and of copies to a mirror.

The store shows old checkpoints or new ones, each whole. What was told to be there is there. The mirror is completed.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import rank_processes
import torch
from rank_processes import talk
from real_worker import DEADLINE_S, RealWorker, is_served, stop_whoever_serves, wait_until

import asyncckpt
from asyncckpt import AsyncCheckpointer
from asyncckpt.client import launcher
from asyncckpt.storage.cloud.object_store import ObjectStore
from asyncckpt.storage.store import Store
from asyncckpt.storage.verification import verify_checkpoint
from tests import object_servers
from tests.fault_table import record_kills
from tests.object_servers import NO_CONNECTION_STAYS

pytestmark = pytest.mark.fault

object_servers.start_runtime()

ASKED = int(os.environ.get("ASYNCCKPT_TEST_KILLS", "0"))
KILLS = {"s3": ASKED // 5 or 6, "gs": ASKED // 20 or 2, "az": ASKED // 20 or 2}
"""Of the worker; `make test-fault` asks for 100 in S3."""

KILLS_OF_TRAINERS = {"s3": ASKED // 10 or 4, "gs": ASKED // 40 or 2, "az": ASKED // 40 or 2}
"""In each place; `make test-fault` asks for 50 in S3, half of them of the worker too."""

SAVES = 4
"""Of one trainer."""

VARIABLES = ("AWS_", "GOOGLE_", "AZURE_", "ASYNCCKPT_")


@pytest.fixture(scope="module", autouse=True)
def server() -> None:
    """What trainers are forked from, before any test could be blamed for its pipes."""
    rank_processes.start_server()


@pytest.fixture(scope="module", params=object_servers.SCHEMES)
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def root(scheme: str) -> Iterator[str]:
    """Where checkpoints lie in a store that programs find by the environment."""
    with object_servers.running(scheme) as server, object_servers.in_environment(server):
        yield f"{server.root}/runs"


def state_of(step: int) -> dict[str, torch.Tensor]:
    """Each tensor is a file of its own, which is uploaded in two parts."""
    return {f"w{n}": torch.full((1_700_000,), float(step * 10 + n)) for n in range(3)}


def there(store: Store, prefix: str) -> list[str]:
    try:
        return store.names(prefix)
    except FileNotFoundError:  # nothing of the first checkpoint is there yet
        return []


def store_of(root: str) -> ObjectStore:
    return ObjectStore(root.rpartition("/")[0], NO_CONNECTION_STAYS)


def watcher(store: Store, root: str) -> Callable[[], dict[int, str]]:
    """Return a function that returns what a reader of the store sees: step -> state.

    A checkpoint that has verified is not read again.
    """
    verified: dict[str, str] = {}

    def listed() -> dict[int, str]:
        found = {}
        for name in there(store, root):
            if "manifest.json" in there(store, f"{root}/{name}"):
                if verified.get(name) != "ok":
                    verified[name] = verify_checkpoint(f"{root}/{name}", store.as_files()).state
                found[int(name)] = verified[name]
        return found

    return listed


def without_manifest(store: Store, root: str) -> set[str]:
    """Return the objects of checkpoints whose manifest is not there, and in S3 those of incomplete uploads."""
    found, listing = set[str](), store.listed(root)

    def note(name: str) -> bool:
        found.add(name)
        return False  # its parts are not asked for

    if root.startswith("s3:"):
        list(store.incomplete_uploads(root, note))
    for place in (f"{root}/{step}" for step in there(listing, root)):
        names = there(listing, place)
        found |= {f"{place}/{name}" for name in names if "manifest.json" not in names}
    return found


def check_state(root: str, step: int) -> None:
    found = asyncckpt.load(f"{root}/{step}", source="disk", storage_options=NO_CONNECTION_STAYS)
    assert all(torch.equal(found[fqn], value) for fqn, value in state_of(step).items()), step


def test_kills_at_random_instants_of_uploads_leave_old_or_new(
    root: str, scheme: str, endpoint: str, record_property: Callable[[str, object], None]
) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng, store, before_manifest = random.Random(seed), store_of(root), 0
    listed = watcher(store, root)
    try:
        launcher.start_worker(endpoint)
        with AsyncCheckpointer(endpoint=endpoint, files_per_rank=3, worker_timeout_s=DEADLINE_S) as checkpointer:
            for number in range(KILLS[scheme]):
                earlier = without_manifest(store, root)
                handle = checkpointer.save(state_of(number), f"{root}/{number}", step=number)
                handle.staged.result(DEADLINE_S)
                time.sleep(rng.random() * 0.4)
                RealWorker(endpoint).kill()
                before_manifest += bool(without_manifest(store, root) - earlier)
                seen = listed()
                assert set(seen.values()) <= {"ok"}, f"after kill {number}: {seen}"
                assert set(seen) in (set(range(number)), set(range(number + 1))), f"after kill {number}: {seen}"
                launcher.start_worker(endpoint)
                handle.written.result(DEADLINE_S)
        record_kills(record_property, f"worker, uploads to {scheme}", KILLS[scheme], before_manifest)
        for number in range(KILLS[scheme]):
            check_state(root, number)
    finally:
        stop_whoever_serves(endpoint)


def train(rank: int, endpoint: str, place: str, mirror: str, first: int) -> None:
    """Save `SAVES` steps, two at a time, and wait for the end. Says which are staged and which are written."""
    with AsyncCheckpointer(endpoint=endpoint, files_per_rank=3, worker_timeout_s=DEADLINE_S) as checkpointer:
        before = None
        for step in range(first, first + SAVES):
            options = {"mirror": f"{mirror}/{step}"} if mirror else {}
            handle = checkpointer.save(state_of(step), f"{place}/{step}", step=step, **options)
            handle.staged.result(DEADLINE_S)
            talk().say(("staged", step))
            if before is not None:
                before.written.result(DEADLINE_S)
                talk().say(("written", step - 1))
            before = handle
        time.sleep(DEADLINE_S)


def killed_trainer(
    endpoint: str, rng: random.Random, kind: str, after: str, look: Callable[[], set[str]], *arguments: object
) -> tuple[dict[str, set[int]], bool]:
    """Let a trainer run until a step is `after`, and a moment longer; kill it, or it and its worker.

    Returns:
        The steps that it spoke of: "staged", "written". Whether `look` then returned something that it had not before.
    """
    earlier = look()
    said: dict[str, set[int]] = {"staged": set(), "written": set()}
    environ = {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)}
    with rank_processes.running(1, train, endpoint, *arguments, group=False, environ=environ) as trainer:
        while not said[after]:
            what, step = trainer.receive(0)
            said[what].add(step)
        time.sleep(rng.random() * 2.0)
        victims = [trainer.kill, *([RealWorker(endpoint).kill] if kind == "both" else [])]
        rng.shuffle(victims)
        for kill in victims:
            kill()
        before_manifest = bool(look() - earlier)
        with contextlib.suppress(EOFError):
            while True:
                what, step = trainer.receive(0)
                said[what].add(step)
    return said, before_manifest


@pytest.mark.parametrize("mirrored", [False, True], ids=["uploads", "copies"])
def test_kills_of_trainer_and_worker_leave_old_or_new_and_complete_the_mirror(
    root: str,
    scheme: str,
    endpoint: str,
    tmp_path: pathlib.Path,
    mirrored: bool,
    record_property: Callable[[str, object], None],
) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng, bucket, store = random.Random(seed), f"{root}-{mirrored}", store_of(root)
    listed, look = watcher(store, bucket), partial(without_manifest, store, bucket)
    place, mirror = (str(tmp_path), bucket) if mirrored else (bucket, "")
    first, written, before_manifest = 0, set[int](), 0

    def here() -> set[int]:
        return {int(p.parent.name) for p in tmp_path.glob("*/manifest.json")} if mirrored else set(listed())

    try:
        for number in range(KILLS_OF_TRAINERS[scheme]):
            kind = ("trainer", "both")[number % 2]
            if not is_served(endpoint):
                launcher.start_worker(endpoint)
            after = "staged" if number else "written"
            said, is_before = killed_trainer(endpoint, rng, kind, after, look, place, mirror, first)
            before_manifest += is_before
            what = f"after kill {number} ({kind}), seed {seed}"
            assert set(listed().values()) <= {"ok"}, f"{what}: {listed()}"
            written |= said["written"]
            assert written <= here(), f"{what}: {written} were told to be written"
            if kind == "trainer":
                wait_until(lambda: said["staged"] <= here(), f"{what}: the worker writes what was staged")  # noqa: B023
            else:
                wait_until(lambda: not is_served(endpoint), "the worker is gone")
            first = max([first, *said["staged"], *here()]) + 1
        assert written, "not one save was ever written"
        what = f"trainer or both, {'copies' if mirrored else 'uploads'} to {scheme}"
        record_kills(record_property, what, KILLS_OF_TRAINERS[scheme], before_manifest)
        if mirrored:
            stop_whoever_serves(endpoint)
            launcher.start_worker(endpoint, options=(f"--mirror={place}",))
            timeout_s = DEADLINE_S + 2 * SAVES * KILLS_OF_TRAINERS[scheme]
            wait_until(lambda: set(listed()) == here(), f"the mirror is completed, seed {seed}", timeout_s)
        assert set(listed().values()) == {"ok"} and written <= set(listed())
        for step in written:
            check_state(bucket, step)
    finally:
        stop_whoever_serves(endpoint)
