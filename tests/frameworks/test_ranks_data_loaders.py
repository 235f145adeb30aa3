"""torchdata's StatefulDataLoader at another world size: every sample of the epoch is seen once."""

from __future__ import annotations

import multiprocessing
import pathlib
import signal
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import rank_processes
import real_worker
import torch
import trainings
from documented_code import blocks
from many_ranks import save_ranks

import asyncckpt
from asyncckpt import PerRank, RankInfo, SyncCheckpointer
from asyncckpt.errors import ConfigError, PerRankUnavailableError, ReshardError
from asyncckpt.integrations.torchdata import ElasticDistributedSampler, reshard_dataloader_state

pytest.importorskip("torchdata", reason="`make test-frameworks` installs torchdata")
pytestmark = pytest.mark.timeout(600)

EPOCH, BATCH = 2, 3


def loader_of(
    n: int, rank: int, world_size: int, workers: int = 0, sampler: Any = ElasticDistributedSampler, **options: Any
) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    warnings.simplefilter("ignore")
    data = torch.arange(n)
    drawn = sampler(data, num_replicas=world_size, rank=rank, seed=5)
    if workers:  # ranks are made by a fork server, whose children would make a new interpreter for each
        options["multiprocessing_context"] = "fork"
    return StatefulDataLoader(data, batch_size=BATCH, sampler=drawn, num_workers=workers, **options)


def may_have_children() -> None:
    current: Any = multiprocessing.current_process()
    current._config["daemon"] = False  # else it may not have the loader's processes as children


def first_part(rank: int, world_size: int, path: str, endpoint: str, n: int, workers: int, steps: int) -> list[int]:
    """Draw some batches of an epoch, save, and return the samples. What the loader has fetched beyond is dropped."""
    may_have_children()
    loader = loader_of(n, rank, world_size, workers)
    loader.sampler.set_epoch(EPOCH)
    batches = iter(loader)
    seen = [sample for _ in range(steps) for sample in next(batches).tolist()]
    with asyncckpt.AsyncCheckpointer(endpoint=endpoint) as checkpointer:
        state = {"loader": PerRank(loader), "epoch": EPOCH}
        checkpointer.save(state, path).written.result(60)
    return seen


def the_rest(rank: int, world_size: int, path: str, n: int, workers: int) -> list[list[int]]:
    """Load, and return the batches until the end of the epoch."""
    may_have_children()
    loader = loader_of(n, rank, world_size, workers)
    state = {"loader": PerRank(loader, reshard=reshard_dataloader_state), "epoch": 0}
    asyncckpt.load(path, state)
    assert state["epoch"] == EPOCH
    loader.sampler.set_epoch(EPOCH)
    return [batch.tolist() for batch in loader]


def runs_the_guide(rank: int, directory: str, endpoint: str) -> list[int]:
    """Run the code of the page, with a loader of batches of 8; return the samples after its load."""
    (code,) = blocks("frameworks/dataloaders")
    model = torch.nn.Linear(2, 2)
    with asyncckpt.AsyncCheckpointer(endpoint=endpoint) as checkpointer:
        names = {
            "data": torch.arange(64),
            "model": model,
            "optimizer": torch.optim.AdamW(model.parameters()),
            "checkpointer": checkpointer,
            "path": f"{directory}/one",
        }
        exec(code, names)
    loader: Any = names["loader"]
    return [sample for batch in loader for sample in batch.tolist()]


def test_ranks_that_run_the_code_of_the_guide_see_every_sample(
    worker: real_worker.RealWorker, tmp_path: pathlib.Path
) -> None:
    found = rank_processes.run(2, runs_the_guide, str(tmp_path), worker.endpoint, timeout_s=trainings.TIMEOUT_S)
    assert Counter(sample for one in found for sample in one) == Counter(range(64))


def samples(parts: Any) -> Counter[int]:
    return Counter(sample for found in parts for batch in found for sample in batch)


@pytest.mark.parametrize(("before", "after", "workers"), [(4, 2, 0), (2, 4, 0), (2, 3, 2)])
def test_ranks_before_and_after_see_every_sample_of_the_epoch_once(
    before: int, after: int, workers: int, worker: real_worker.RealWorker, tmp_path: pathlib.Path
) -> None:
    path, steps = str(tmp_path / "one"), 2
    n = before * BATCH * steps + after * 7  # what is left over can be divided, and makes an incomplete last batch
    options: dict[str, Any] = {"timeout_s": trainings.TIMEOUT_S}
    seen = rank_processes.run(before, first_part, before, path, worker.endpoint, n, workers, steps, **options)
    rest = rank_processes.run(after, the_rest, after, path, n, workers, **options)
    assert [len(batches) for batches in rest] == [3] * after, "all ranks have as many batches"
    assert Counter(sample for found in seen for sample in found) + samples(rest) == Counter(range(n))


# ---- in this process: ranks are numbers ------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def signal_handler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A loader with workers sets torch's handler of SIGCHLD, for good."""
    from torch.utils.data._utils import signal_handling

    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)


def saved(loaders: list[Any], path: pathlib.Path) -> str:
    """Write a checkpoint of the loaders of all ranks."""
    return save_ranks(path, [{"loader": PerRank(loader)} for loader in loaders])


def drawn(loaders: list[Any], steps: int | None = None) -> Counter[int]:
    found: list[int] = []
    for loader in loaders:
        for number, batch in enumerate(loader, 1):
            found += batch.tolist()
            if number == steps:
                break
    return Counter(found)


def resharded(path: str, loaders: list[Any]) -> None:
    for rank, loader in enumerate(loaders):
        target = {"loader": PerRank(loader, reshard=reshard_dataloader_state)}
        asyncckpt.loading.load.DefaultReader(rank_info=RankInfo(rank, len(loaders))).read(path, target)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (4, 3)])
def test_ranks_of_every_kind_of_change_see_every_sample_of_the_epoch_once(
    before: int, after: int, workers: int, tmp_path: pathlib.Path
) -> None:
    n = before * BATCH * 2 + after * 7
    loaders = [loader_of(n, rank, before, workers) for rank in range(before)]
    for loader in loaders:
        loader.sampler.set_epoch(EPOCH)
    seen = drawn(loaders, 2)
    path = saved(loaders, tmp_path / "one")
    loaders = [loader_of(n, rank, after, workers) for rank in range(after)]
    resharded(path, loaders)
    rest = [drawn([loader]) for loader in loaders]
    assert [found.total() for found in rest] == [7] * after, "all ranks have as many samples"
    assert seen + sum(rest, Counter()) == Counter(range(n))
    for loader in loaders:
        loader.sampler.set_epoch(EPOCH + 1)
    later = drawn(loaders)
    assert set(later) == set(range(n)) and later.total() - n < after, "the next epoch is whole"


@pytest.mark.parametrize("drop_last", [False, True])
def test_ranks_that_cannot_share_the_rest_evenly_repeat_or_drop_as_with_a_distributed_sampler(
    drop_last: bool, tmp_path: pathlib.Path
) -> None:
    def loader(rank: int, world_size: int) -> Any:
        return loader_of(
            4 * BATCH + 10, rank, world_size, sampler=partial(ElasticDistributedSampler, drop_last=drop_last)
        )

    loaders = [loader(rank, 4) for rank in range(4)]
    seen = drawn(loaders, 1)
    path = saved(loaders, tmp_path / "one")
    loaders = [loader(rank, 3) for rank in range(3)]
    resharded(path, loaders)
    rest = [drawn([loader]) for loader in loaders]
    found = seen + sum(rest, Counter())
    assert [one.total() for one in rest] == [3 if drop_last else 4] * 3
    assert (len(found), found.total()) == ((21, 21) if drop_last else (22, 24))


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_that_change_again_before_their_first_batch_and_after_it_lose_nothing(
    workers: int, tmp_path: pathlib.Path
) -> None:
    n, seen = 66, Counter[int]()
    loaders = [loader_of(n, rank, 4, workers) for rank in range(4)]
    for at, (steps, world_size) in enumerate([(2, 3), (0, 2), (1, 2), (1, 5), (1, 1)]):
        seen += drawn(loaders, steps) if steps else Counter()
        path = saved(loaders, tmp_path / str(at))
        loaders = [loader_of(n, rank, world_size, workers) for rank in range(world_size)]
        resharded(path, loaders)
    assert seen + drawn(loaders) == Counter(range(n))


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4)])
def test_ranks_with_torchdata_s_own_sampler_continue_where_they_can_share_evenly(
    before: int, after: int, tmp_path: pathlib.Path
) -> None:
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    n = 48
    loaders = [loader_of(n, rank, before, sampler=StatefulDistributedSampler) for rank in range(before)]
    seen = drawn(loaders, 2)
    path = saved(loaders, tmp_path / "one")
    loaders = [loader_of(n, rank, after, sampler=StatefulDistributedSampler) for rank in range(after)]
    resharded(path, loaders)
    assert seen + drawn(loaders) == Counter(range(n))
    with pytest.raises(ReshardError, match="no multiple of 5 ranks"):
        resharded(path, [loader_of(n, 0, 5, sampler=StatefulDistributedSampler)] * 5)


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_that_had_finished_the_epoch_begin_the_next_one(workers: int, tmp_path: pathlib.Path) -> None:
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    for sampler in (ElasticDistributedSampler, StatefulDistributedSampler):
        loaders = [loader_of(24, rank, 4, workers, sampler) for rank in range(4)]
        assert drawn(loaders) == Counter(range(24))
        path = saved(loaders, tmp_path / sampler.__name__)
        loaders = [loader_of(24, rank, 2, workers, sampler) for rank in range(2)]
        resharded(path, loaders)
        for loader in loaders:
            loader.sampler.set_epoch(1)
        found = [[sample for batch in loader for sample in batch.tolist()] for loader in loaders]
        wanted = [loader_of(24, rank, 2, 0, sampler) for rank in range(2)]
        for loader in wanted:
            loader.sampler.set_epoch(1)
        assert found == [[sample for batch in loader for sample in batch.tolist()] for loader in wanted]


class Numbers(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(20))


class Remembering(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        return index

    def state_dict(self) -> dict[str, Any]:
        return {"read": 3}

    def load_state_dict(self, state: Any) -> None:
        pass


def other_loaders() -> dict[str, Callable[[int], Any]]:
    from torch.utils.data.distributed import DistributedSampler
    from torchdata.stateful_dataloader import StatefulDataLoader

    data, own = torch.arange(20), Remembering()
    return {
        "stock": lambda rank: loader_of(20, rank, 2, 0, DistributedSampler),
        "stock, workers": lambda rank: loader_of(20, rank, 2, 2, DistributedSampler),
        "shuffle": lambda rank: StatefulDataLoader(data, batch_size=2, shuffle=True),
        "in order": lambda rank: StatefulDataLoader(data, batch_size=2),
        "iterable": lambda rank: StatefulDataLoader(Numbers(), batch_size=2),
        "iterable, workers": lambda rank: StatefulDataLoader(Numbers(), batch_size=2, num_workers=2),
        "state": lambda rank: StatefulDataLoader(own, sampler=ElasticDistributedSampler(own, 2, rank)),
        "state, workers": lambda rank: StatefulDataLoader(
            own, sampler=ElasticDistributedSampler(own, 2, rank), num_workers=2
        ),
        "late": lambda rank: loader_of(20, rank, 2, 2, snapshot_every_n_steps=2),
    }


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("stock", "its sampler keeps no state"),
        ("stock, workers", "its sampler keeps no state"),
        ("shuffle", "its sampler keeps no state"),
        ("in order", "its sampler keeps no state"),
        ("iterable", "the dataset is iterable"),
        ("iterable, workers", "the dataset is iterable"),
        ("state", "the dataset has a state of its own"),
        ("state, workers", "the dataset has a state of its own"),
        ("late", "before the last 1 of the batches"),
    ],
)
def test_ranks_whose_loaders_do_not_say_what_was_drawn_are_refused(
    kind: str, message: str, tmp_path: pathlib.Path
) -> None:
    def state(loader: Any) -> Any:
        next(iter(loader))
        return loader.state_dict()

    warnings.simplefilter("ignore")
    path = saved([state(other_loaders()[kind](rank)) for rank in range(2)], tmp_path / "one")
    with pytest.raises(ReshardError, match=message) as caught:
        resharded(path, [loader_of(20, 0, 1)])
    assert (caught.value.fqn, caught.value.saved, caught.value.wanted) == ("loader", 2, 1)


def test_ranks_of_another_number_need_the_reshard_and_the_same_dataset(tmp_path: pathlib.Path) -> None:
    loaders = [loader_of(24, rank, 2) for rank in range(2)]
    drawn(loaders, 1)
    path = saved(loaders, tmp_path / "one")
    with pytest.raises(PerRankUnavailableError):
        asyncckpt.load(path, {"loader": PerRank(loader_of(24, 0, 1))})
    longer = loader_of(25, 0, 1)
    resharded(path, [longer])
    with pytest.raises(ConfigError, match="dataset_length"):
        next(iter(longer))
    with SyncCheckpointer(rank_info=RankInfo(0, 1)) as checkpointer:
        checkpointer.save({"loader": PerRank(loader_of(24, 0, 2))}, tmp_path / "two")
        other = loader_of(24, 0, 1)
        checkpointer.load(tmp_path / "two", {"loader": PerRank(other, reshard=reshard_dataloader_state)})
        with pytest.raises(ReshardError, match="that of 2 ranks, and this is one of 1"):
            next(iter(other))
