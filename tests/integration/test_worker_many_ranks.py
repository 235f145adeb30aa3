"""Several ranks at one real worker: real socket, real slots, real files, real processes that are killed."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pathlib
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

import pytest

from asyncckpt.errors import (
    CommitTimeoutError,
    ProtocolError,
    RanksDisagreeError,
    ReplicaMismatchError,
    SaveFailedError,
    SaveSkippedError,
    from_wire,
)
from asyncckpt.format.names import MANIFEST_NAME, SaveId
from asyncckpt.protocol import messages as m
from asyncckpt.protocol.samples import encode_samples
from asyncckpt.protocol.save_phases import DURABLE
from asyncckpt.storage.contents import read_contents
from asyncckpt.storage.files import Files
from asyncckpt_worker.config import WorkerConfig
from asyncckpt_worker.service.daemon import Daemon
from tests.torch_free_client import Client, ClientSlot, Order, Snapshot, encode_crew, new_save_id

KILLS = 20


class Worker:
    """A daemon in a thread of this process."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.daemon = Daemon(WorkerConfig(endpoint=endpoint))
        self._thread = threading.Thread(target=self.daemon.run)
        self._thread.start()

    def status(self) -> dict[str, Any]:
        with Client(self.endpoint) as client:
            return dict(client.call(m.Status(id=client.next_id())).report)

    def save(self, save_id: SaveId) -> dict[str, Any] | None:
        """Return the save's row of the status report."""
        return next((dict(s) for s in self.status()["saves"] if s["save_id"] == str(save_id)), None)

    def stop(self) -> None:
        self.daemon.stop(immediately=True)
        self._thread.join(60)
        assert not self._thread.is_alive()


@pytest.fixture
def worker(endpoint: str) -> Iterator[Worker]:
    """A worker in this process."""
    worker = Worker(endpoint)
    yield worker
    worker.stop()


class Rank:
    """A client of one rank with one slot."""

    def __init__(self, endpoint: str, rank: int, world_size: int = 2) -> None:
        self.client = Client(endpoint, rank=rank, world_size=world_size)
        self.client.hello()
        self.rank = rank
        self.snapshot = Snapshot(nbytes=200_000, seed=rank, shard=(rank, world_size))
        self.slot: ClientSlot = self.client.allocate(self.snapshot.slot_nbytes())

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def begin(self, save_id: SaveId, path: str) -> None:
        self.client.begin(self.slot, save_id, path, nbytes=self.snapshot.nbytes)

    def stage(self, save_id: SaveId, path: str, **rest: Any) -> None:
        """Begin, seal, and ring the doorbell."""
        self.client.stage(self.slot, self.snapshot, save_id, path, **rest)
        self.client.submit(self.slot, save_id)

    def error(self, save_id: SaveId) -> Any:
        return from_wire(self.client.wait(save_id)["error"])


@pytest.fixture
def pair(worker: Worker) -> Iterator[tuple[Rank, Rank]]:
    """Two ranks of one world."""
    with Rank(worker.endpoint, 0) as zero, Rank(worker.endpoint, 1) as one:
        yield zero, one


def eventually(check: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    """Wait until `check()` holds, and return what it returned."""
    deadline = time.monotonic() + timeout_s
    while not (found := check()):
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)
    return found


class Nursery:
    """The process that forks crews."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    @property
    def _pipes(self) -> tuple[IO[str], IO[str]]:
        assert self._process.stdin and self._process.stdout
        return self._process.stdin, self._process.stdout

    def start(self, orders: Sequence[Order]) -> int:
        """Start a crew; return its process group."""
        stdin, stdout = self._pipes
        stdin.write(encode_crew(orders) + "\n")
        stdin.flush()
        return int(json.loads(stdout.readline())["group"])

    def ends(self, count: int) -> list[int]:
        """Wait for all of a crew, and return the signals that they died of."""
        return [json.loads(self._pipes[1].readline())["signal"] for _ in range(count)]


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    """A nursery that ends with the test."""
    root = pathlib.Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.torch_free_client"]
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Nursery(process)
        with contextlib.suppress(BrokenPipeError):
            process.communicate(timeout=60)


def crew(endpoint: str, tmp_path: pathlib.Path, save_id: SaveId, ends: Sequence[str]) -> list[Order]:
    """Return orders for the ranks of one save, each with the moment at which it waits."""
    path = str(tmp_path / str(save_id))
    return [
        Order(
            endpoint=endpoint,
            path=path,
            save_id=str(save_id),
            die=end,
            nbytes=300_000,
            seed=7,
            mark=f"{path}.{rank}",
            rank=rank,
            world_size=len(ends),
        )
        for rank, end in enumerate(ends)
    ]


def committed(path: str | pathlib.Path) -> bool:
    """Whether a whole checkpoint is there: manifest, indexes, and every tensor covered exactly once."""
    if not pathlib.Path(path, MANIFEST_NAME).exists():
        return False
    contents = read_contents(str(path), Files())
    return len(contents.ranks) == contents.manifest.world_size


# ---- all or none


def test_two_ranks_commit_and_both_hear_it(pair: tuple[Rank, Rank], tmp_path: pathlib.Path) -> None:
    save_id, path = new_save_id(), str(tmp_path / "a")
    for rank in pair:
        rank.stage(save_id, path)
    assert [r.client.wait(save_id)["phase"] for r in pair] == ["committed"] * 2
    assert committed(path)


@pytest.mark.parametrize("skipped", [False, True])
@pytest.mark.parametrize("epoch_known", [False, True])
def test_rank_that_withdraws_before_the_others_begin_ends_the_save_for_them(
    pair: tuple[Rank, Rank], tmp_path: pathlib.Path, skipped: bool, epoch_known: bool
) -> None:
    save_id = new_save_id()
    pair[1].client.withdraw(save_id if epoch_known else save_id.with_parts(epoch=0), "a lambda", skipped=skipped)
    pair[0].begin(save_id, str(tmp_path / "a"))
    error = pair[0].error(save_id)
    assert isinstance(error, SaveSkippedError if skipped else SaveFailedError)
    assert error.rank == 1 and "a lambda" in str(error)
    after = new_save_id(1)
    for rank in pair:
        rank.stage(after, str(tmp_path / "b"))
    assert pair[0].client.wait(after)["phase"] == "committed"


def test_rank_that_dies_unstaged_is_named_to_the_other_at_once(
    worker: Worker, nursery: Nursery, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "asyncckpt.worker")
    save_id = new_save_id()
    order = crew(worker.endpoint, tmp_path, save_id, ["wait_unsealed"] * 2)[1]
    group = nursery.start([order])
    eventually(lambda: os.path.exists(order.mark))
    with Rank(worker.endpoint, 0) as first:
        first.stage(save_id, order.path, step=order.seed)
        assert dict(first.client.row(save_id) or {})["missing"] == (1,)
        killed = time.monotonic()
        os.killpg(group, signal.SIGKILL)
        error = first.error(save_id)
        assert time.monotonic() - killed < 30.0, "not at the end of commit_timeout_s"
    assert isinstance(error, SaveFailedError) and (error.code, error.rank) == ("not_sealed", 1)  # type: ignore[attr-defined]
    assert not committed(order.path)
    assert any("rank 1" in r.getMessage() and str(save_id) in r.getMessage() for r in caplog.records)
    nursery.ends(1)


def test_killpg_between_staged_and_written_commits_every_time(
    worker: Worker, nursery: Nursery, tmp_path: pathlib.Path
) -> None:
    for number in range(KILLS):
        save_id = new_save_id(number)
        orders = crew(worker.endpoint, tmp_path, save_id, [("wait_sealed", "wait_submitted")[number % 2]] * 2)
        group = nursery.start(orders)
        eventually(lambda orders=orders: all(os.path.exists(o.mark) for o in orders))  # type: ignore[misc]
        os.killpg(group, signal.SIGKILL)
        assert nursery.ends(2) == [signal.SIGKILL] * 2
        eventually(lambda orders=orders: committed(orders[0].path))  # type: ignore[misc]
    eventually(lambda: not worker.status()["slots"] and not worker.status()["sessions"])


def test_killpg_with_one_rank_unsealed_commits_never_and_names_it(
    worker: Worker, nursery: Nursery, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "asyncckpt.worker")
    for number in range(KILLS // 2):
        save_id = new_save_id(number)
        unsealed = number % 2
        ends = ["wait_sealed", "wait_sealed"]
        ends[unsealed] = "wait_unsealed"
        orders = crew(worker.endpoint, tmp_path, save_id, ends)
        group = nursery.start(orders)
        eventually(lambda orders=orders: all(os.path.exists(o.mark) for o in orders))  # type: ignore[misc]
        os.killpg(group, signal.SIGKILL)
        nursery.ends(2)
        row = eventually(lambda save_id=save_id: _ended(worker, save_id))  # type: ignore[misc]
        assert row["phase"] == "abandoned" and not committed(orders[0].path)
        texts = [r.getMessage() for r in caplog.records if str(save_id) in r.getMessage()]
        assert any(f"rank {unsealed}" in text for text in texts), texts
        eventually(lambda orders=orders: not any(pathlib.Path(orders[0].path).iterdir()))  # type: ignore[misc]
    eventually(lambda: not worker.status()["slots"])


def _ended(worker: Worker, save_id: SaveId) -> Any:
    row = worker.save(save_id)
    return row if row is not None and row["phase"] in ("abandoned", "failed", "committed") else None


def test_status_names_the_ranks_of_a_save_and_who_is_missing(
    worker: Worker, pair: tuple[Rank, Rank], tmp_path: pathlib.Path
) -> None:
    save_id = new_save_id()
    pair[0].stage(save_id, str(tmp_path / "a"))
    pair[1].begin(save_id, str(tmp_path / "a"))
    row = worker.save(save_id)
    assert row is not None and row["missing"] == (1,) and row["ranks"]["1"] == "open"


def test_commit_timeout_names_the_missing_ranks_on_every_rank(worker: Worker, tmp_path: pathlib.Path) -> None:
    save_id, path = new_save_id(), str(tmp_path / "a")
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(Rank(worker.endpoint, rank, 3)) for rank in range(3)]
        ranks[2].begin(save_id, path)
        began = time.monotonic()
        ranks[0].stage(save_id, path)
        ranks[1].stage(save_id, path, commit_timeout_s=0.3)  # the shortest holds, once both are there
        for rank in ranks:
            error = rank.error(save_id)
            assert isinstance(error, CommitTimeoutError) and error.missing_ranks == [2]  # type: ignore[attr-defined]
        assert 0.3 <= time.monotonic() - began < 50.0


def test_ranks_with_different_paths_hear_that_they_disagree(pair: tuple[Rank, Rank], tmp_path: pathlib.Path) -> None:
    save_id = new_save_id()
    for rank in pair:
        rank.stage(save_id, str(tmp_path / str(rank.rank)))
    for rank in pair:
        error = rank.error(save_id)
        assert isinstance(error, RanksDisagreeError) and error.ranks == [0, 1]  # type: ignore[attr-defined]
    assert not list(tmp_path.glob("*/manifest.json"))


# ---- hooks


@pytest.mark.parametrize("granted", [True, False])
def test_commit_waits_for_the_consent_of_each_hook(
    pair: tuple[Rank, Rank], tmp_path: pathlib.Path, granted: bool
) -> None:
    save_id, path = new_save_id(), str(tmp_path / "a")
    for rank in pair:
        rank.stage(save_id, path, hook_timeout_s=30.0)
    for rank in pair:
        rank.client.wait(save_id, frozenset({DURABLE}))
    pair[0].client.consent(save_id)
    assert not committed(path)
    pair[1].client.consent(save_id, granted=granted, reason="the loss is NaN")
    if granted:
        assert pair[0].client.wait(save_id)["phase"] == "committed" and committed(path)
        return
    for rank in pair:
        error = rank.error(save_id)
        assert (error.code, error.rank) == ("vetoed", 1) and "the loss is NaN" in str(error)
    eventually(lambda: not list(pathlib.Path(path).iterdir()))


# ---- what is stored


def outcomes_of(client: Client) -> dict[int, bool]:
    """Return which saves of the client's run have ended, and whether the ranks meet again after them."""
    return dict(client.call(m.Heartbeat(id=client.next_id(), saves=())).outcomes)


@pytest.mark.parametrize(("shards", "word"), [(((0, 3), (1, 3)), "of 150"), (((0, 2), (0, 2)), "twice")])
def test_tensor_that_is_not_covered_exactly_once_is_refused_by_name(
    pair: tuple[Rank, Rank], tmp_path: pathlib.Path, shards: tuple[tuple[int, int], ...], word: str
) -> None:
    save_id, path = new_save_id(), str(tmp_path / "a")
    for rank, shard in zip(pair, shards, strict=True):
        rank.snapshot = Snapshot(n_tensors=1, nbytes=50_000, shard=shard)
        rank.stage(save_id, path)
    for rank in pair:
        error = rank.error(save_id)
        assert isinstance(error, SaveFailedError) and error.code == "coverage"  # type: ignore[attr-defined]
        assert "'t0'" in error.detail and word in error.detail  # type: ignore[attr-defined]
    assert not committed(path)
    assert outcomes_of(pair[0].client) == {save_id.sequence: True}


@pytest.mark.parametrize("split", [True, False])
def test_unequal_replica_fails_whoever_writes_it(pair: tuple[Rank, Rank], tmp_path: pathlib.Path, split: bool) -> None:
    save_id, path = new_save_id(), str(tmp_path / "a")
    for rank in pair:
        samples = encode_samples([("model.weight", split, bytes([rank.rank]) * 8), ("model.bias", True, bytes(8))])
        rank.stage(save_id, path, samples=samples)
    for rank in pair:
        error = rank.error(save_id)
        assert isinstance(error, ReplicaMismatchError)
        assert (error.fqn, error.ranks) == ("model.weight", [0, 1])  # type: ignore[attr-defined]
    assert not committed(path)
    assert outcomes_of(pair[1].client) == {save_id.sequence: True}


@pytest.mark.parametrize("changed", [False, True])
def test_a_rank_that_has_changed_is_heard_of_by_all(
    pair: tuple[Rank, Rank], tmp_path: pathlib.Path, changed: bool
) -> None:
    save_id = new_save_id()
    pair[0].stage(save_id, str(tmp_path / "a"), changed=changed)
    pair[1].stage(save_id, str(tmp_path / "a"))
    for rank in pair:
        rank.client.wait(save_id)
        assert outcomes_of(rank.client) == {save_id.sequence: changed}


# ---- meeting


def test_ranks_meet_on_a_board(pair: tuple[Rank, Rank]) -> None:
    large = secrets.token_bytes(1_500_000)
    pair[0].client.share("plan-1", large)
    assert pair[0].client.fetch("plan-1", 1) == (1,)
    pair[1].client.share("plan-1", b"small")
    for rank in pair:
        assert [rank.client.fetch("plan-1", of) for of in range(2)] == [large, b"small"]


def test_two_groups_that_meet_on_one_board_are_told(worker: Worker, pair: tuple[Rank, Rank]) -> None:
    pair[0].client.share("plan-1", b"zero")
    with Client(worker.endpoint, rank=0, world_size=2) as twin:
        twin.hello()
        with pytest.raises(ProtocolError, match="two process groups"):
            twin.share("plan-1", b"zero")


def test_two_runs_that_ask_at_once_get_different_epochs_and_their_ranks_the_same(
    worker: Worker, tmp_path: pathlib.Path
) -> None:
    asked: dict[str, set[int]] = {secrets.token_hex(6): set() for _ in range(4)}
    gate = threading.Barrier(8)

    def ask(run: str, rank: int) -> None:
        with Client(worker.endpoint, rank=rank, world_size=2) as client:
            client.hello()
            gate.wait(60)
            asked[run].add(client.lineage(run, str(tmp_path / f"step-{rank}")))

    threads = [threading.Thread(target=ask, args=(run, rank)) for run in asked for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(len(epochs) == 1 for epochs in asked.values())
    assert sorted(epoch for epochs in asked.values() for epoch in epochs) == [1, 2, 3, 4]
