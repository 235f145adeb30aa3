"""The sampler whose epoch another world size continues, and what a loader's state cannot say. Needs no torchdata."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data.distributed import DistributedSampler

from asyncckpt.errors import ConfigError, ReshardError
from asyncckpt.integrations.torchdata import ElasticDistributedSampler, reshard_dataloader_state


def samplers(n: int, world_size: int, **options: Any) -> list[ElasticDistributedSampler]:
    data: Any = range(n)
    return [ElasticDistributedSampler(data, world_size, rank, **options) for rank in range(world_size)]


def loader_state(sampler: dict[str, Any] | None, drawn: int, **changes: Any) -> dict[str, Any]:
    """Return what a StatefulDataLoader without workers returns."""
    batches = {"samples_yielded": drawn} if sampler is None else {"samples_yielded": drawn, "sampler_state": sampler}
    found = {
        "_index_sampler_state": None,
        "_sampler_iter_state": batches,
        "_sampler_iter_yielded": drawn,
        "_num_yielded": drawn,
        "_IterableDataset_len_called": None,
        "_shared_seed": None,
        "fetcher_state": None,
        "dataset_state": None,
        "_iterator_finished": False,
    }
    return found | changes


def worker_state(sampler: dict[str, Any], drawn: int, seed: int = 7, behind: int = 0, **of_worker: Any) -> Any:
    """Return what one with two workers returns."""
    main = loader_state(sampler, drawn)
    for name in ("fetcher_state", "dataset_state", "_iterator_finished", "_num_yielded"):
        del main[name]
    workers = {f"worker_{n}": {"worker_id": n, "dataset_state": None, "fetcher_state": None} for n in range(2)}
    workers["worker_1"].update(of_worker)
    snapshot = {
        "_snapshot_step": drawn,
        "_last_yielded_worker_id": 0,
        "_main_snapshot": main | {"_num_workers": 2, "_base_seed": seed},
        "_worker_snapshots": workers,
    }
    return {"_snapshot": snapshot, "_steps_since_snapshot": behind, "_iterator_finished": False}


def sampler_state_in(state: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = state["_sampler_iter_state"]["sampler_state"]
    return found


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_an_epoch_of_one_world_size_is_that_of_a_distributed_sampler(shuffle: bool, drop_last: bool) -> None:
    for n in (1, 2, 5, 12, 13):
        for world_size in (1, 2, 3, 5, 7):
            for rank, ours in enumerate(samplers(n, world_size, shuffle=shuffle, seed=3, drop_last=drop_last)):
                data: Any = range(n)
                stock = DistributedSampler(data, world_size, rank, shuffle, seed=3, drop_last=drop_last)
                for epoch in range(2):
                    ours.set_epoch(epoch), stock.set_epoch(epoch)
                    assert list(ours) == list(stock) and len(ours) == len(stock)


@pytest.mark.parametrize("drop_last", [False, True])
def test_any_chain_of_world_sizes_draws_each_sample_of_the_epoch_once(drop_last: bool, rng: random.Random) -> None:
    for _ in range(60):
        n, seed, epoch = rng.randrange(1, 60), rng.randrange(100), rng.randrange(5)
        drawn: Counter[int] = Counter()
        states: list[dict[str, Any]] | None = None
        order = samplers(n, 1, seed=seed)[0]
        order.set_epoch(epoch)
        in_order, most = list(order), 0
        while True:
            world_size = rng.randrange(1, 8)
            most = max(most, world_size)
            ranks = samplers(n, world_size, seed=seed, drop_last=drop_last)
            for rank, sampler in enumerate(ranks):
                sampler.set_epoch(epoch if states is None else epoch + 9)
                if states is not None:
                    sampler.load_state_dict(sampler_state_in(reshard_dataloader_state(states, rank, world_size)))
            drawers = [iter(sampler) for sampler in ranks]
            steps = rng.randrange(0, 9) if rng.random() < 0.7 else n + 1
            found = [[index for _, index in zip(range(steps), drawer, strict=False)] for drawer in drawers]
            assert len(set(map(len, found))) == 1, "all ranks draw as many"
            drawn.update(index for indices in found for index in indices)
            states = [loader_state(sampler.state_dict(), len(found[0])) for sampler in ranks]
            if steps > n:
                break
        twice = sum(drawn.values()) - len(drawn)
        if drop_last:
            assert not twice and n - len(drawn) < world_size
            assert set(in_order[: len(drawn)]) == set(drawn), "what is left out is at the end"
        else:
            assert set(drawn) == set(range(n)) and twice < most


def test_the_epoch_after_a_continued_one_is_whole() -> None:
    (first,) = samplers(10, 1)
    drawer = iter(first)
    seen = [next(drawer) for _ in range(4)]
    for rank, sampler in enumerate(samplers(10, 2)):
        value = reshard_dataloader_state([loader_state(first.state_dict(), 4)], rank, 2)
        sampler.load_state_dict(sampler_state_in(value))
        rest = list(sampler)
        assert len(rest) == 3 and not set(rest) & set(seen)
        sampler.set_epoch(1)
        assert len(list(sampler)) == 5


def test_a_state_saved_before_the_first_sample_of_a_continued_epoch_is_that_of_the_continuation() -> None:
    (first,) = samplers(12, 1)
    drawer = iter(first)
    for _ in range(6):
        next(drawer)
    (second,) = samplers(12, 1)
    second.load_state_dict(first.state_dict())
    drawer = iter(second)
    assert second.state_dict() == first.state_dict()
    assert [*drawer] == list(first)[6:]


def test_an_epoch_that_was_over_leaves_the_epoch_that_was_set() -> None:
    first = samplers(8, 4)
    for sampler in first:
        sampler.set_epoch(3)
        list(sampler)
    states = [loader_state(sampler.state_dict(), 2, _iterator_finished=True) for sampler in first]
    for rank, sampler in enumerate(samplers(8, 2)):
        sampler.set_epoch(4)
        value = reshard_dataloader_state(states, rank, 2)
        assert value["_iterator_finished"]
        sampler.load_state_dict(sampler_state_in(value))
        assert not list(sampler), "nothing of the epoch that is over"
        assert sampler.epoch == 4 and len(list(sampler)) == 4


@pytest.mark.parametrize("finished", [False, True])
def test_torchdata_s_own_sampler_continues_where_the_ranks_can_share_evenly(finished: bool) -> None:
    states = [loader_state({"yielded": 6}, 6, _iterator_finished=finished) for _ in range(4)]
    for world_size, drawn in ((1, 24), (2, 12), (3, 8), (8, 3)):
        value = reshard_dataloader_state(states, 0, world_size)
        assert value["_sampler_iter_state"]["sampler_state"] == {"yielded": 0 if finished else drawn}
        assert value["_sampler_iter_state"]["samples_yielded"] == (0 if finished else drawn)
    if not finished:
        with pytest.raises(ReshardError, match=r"6 samples on each of 4 ranks are no multiple of 5 ranks.*Elastic"):
            reshard_dataloader_state(states, 0, 5)
    stale = [loader_state({"yielded": 99}, 6) for _ in range(4)]  # as after a load, before the first sample
    assert reshard_dataloader_state(stale, 0, 2)["_sampler_iter_state"]["sampler_state"] == {"yielded": 12}


def test_a_loader_with_workers_starts_again_with_its_first_worker_and_with_seeds_of_its_own() -> None:
    ranks = samplers(20, 2)
    for sampler in ranks:
        drawer = iter(sampler)
        for _ in range(3):
            next(drawer)
    states = [worker_state(sampler.state_dict(), 3, seed=10 * n) for n, sampler in enumerate(ranks)]
    seeds = set()
    for rank in range(6):
        before = copy.deepcopy(states)
        snapshot = reshard_dataloader_state(states, rank, 6)["_snapshot"]
        assert states == before, "the values stay as they are"
        assert snapshot["_snapshot_step"] == snapshot["_main_snapshot"]["_sampler_iter_yielded"] == 0
        assert snapshot["_last_yielded_worker_id"] == 1
        assert sampler_state_in(snapshot["_main_snapshot"])["start"] == 6
        seeds |= {snapshot["_main_snapshot"]["_base_seed"] + n for n in range(2)}
    assert len(seeds) == 12


def test_a_loader_without_batches_continues_too() -> None:
    (sampler,) = samplers(8, 1)
    drawer = iter(sampler)
    for _ in range(4):
        next(drawer)
    state = loader_state(None, 0, _sampler_iter_state=None, _index_sampler_state=sampler.state_dict())
    found = reshard_dataloader_state([state], 1, 2)["_index_sampler_state"]
    assert (found["start"], found["num_replicas"]) == (4, 2)
    stock = loader_state(
        None, 0, _sampler_iter_state=None, _index_sampler_state={"yielded": 4}, _sampler_iter_yielded=4
    )
    assert reshard_dataloader_state([stock], 1, 2)["_index_sampler_state"] == {"yielded": 2}


NO_STATE = "its sampler keeps no state"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["_sampler_iter_state"].pop("sampler_state"), NO_STATE),
        (lambda s: s["_sampler_iter_state"].update(sampler_iter_state={"yielded": 1, "generator": 0}), NO_STATE),
        (lambda s: s["_sampler_iter_state"].update(sampler_state={"position": 4}), NO_STATE),
        (lambda s: s.update(_sampler_iter_state=None), NO_STATE),
        (lambda s: s.update(fetcher_state={"dataset_iter_state": None, "fetcher_ended": False}), "iterable"),
        (lambda s: s.update(dataset_state={"at": 3}), "the dataset has a state of its own"),
        (lambda s: s.pop("_iterator_finished"), "not the state of a StatefulDataLoader"),
        (lambda s: s.pop("_sampler_iter_state"), "not the state of a StatefulDataLoader"),
    ],
)
def test_a_state_that_does_not_say_what_was_drawn_is_refused(
    change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    states = [loader_state({"yielded": 4}, 4) for _ in range(4)]
    change(states[2])
    with pytest.raises(ReshardError, match=f"of rank 2 cannot go from 4 to 2 ranks.*{message}") as caught:
        reshard_dataloader_state(states, 0, 2)
    assert (caught.value.saved, caught.value.wanted) == (4, 2)


@pytest.mark.parametrize("value", [None, 3, [], {}, "text", {"_snapshot": {}}, torch.ones(2)])
def test_what_is_no_state_of_a_loader_is_refused(value: Any) -> None:
    with pytest.raises(ReshardError, match="not the state of a StatefulDataLoader"):
        reshard_dataloader_state([value], 0, 2)


@pytest.mark.parametrize(
    ("of_worker", "message"),
    [
        ({"fetcher_state": {"dataset_iter_state": None}}, "iterable"),
        ({"dataset_state": {"at": 3}}, "the dataset has a state of its own"),
        ({"behind": 2}, "before the last 2 of the batches.*snapshot_every_n_steps=1"),
    ],
)
def test_states_of_workers_and_late_snapshots_are_refused(of_worker: dict[str, Any], message: str) -> None:
    with pytest.raises(ReshardError, match=message):
        reshard_dataloader_state([worker_state({"yielded": 4}, 4, **of_worker)] * 2, 0, 1)


@pytest.mark.parametrize("change", [{"yielded": 5}, {"epoch": 1}, {"seed": 9}, {"dataset_length": 7}, {"shuffle": 0}])
def test_ranks_at_different_positions_are_refused(change: dict[str, Any]) -> None:
    states = [loader_state(sampler.state_dict(), 0) for sampler in samplers(8, 2)]
    assert reshard_dataloader_state(states, 0, 3)
    sampler_state_in(states[1]).update(change)
    with pytest.raises(ReshardError, match="ranks 0 and 1 were at different positions"):
        reshard_dataloader_state(states, 0, 3)


def test_a_rank_that_had_finished_before_the_others_is_refused() -> None:
    states = [loader_state({"yielded": 4}, 4, _iterator_finished=finished) for finished in (True, False)]
    with pytest.raises(ReshardError, match="different positions"):
        reshard_dataloader_state(states, 0, 1)


@pytest.mark.parametrize(
    ("other", "error"),
    [
        ({"n": 9}, ConfigError),
        ({"seed": 1}, ConfigError),
        ({"shuffle": False}, ConfigError),
        ({"world_size": 3}, ReshardError),
    ],
)
def test_a_sampler_refuses_the_state_of_another_order(other: dict[str, Any], error: type[Exception]) -> None:
    state = samplers(8, 2)[0].state_dict()
    with pytest.raises(error):
        samplers(**{"n": 8, "world_size": 2, **other})[0].load_state_dict(state)
    with pytest.raises(ConfigError, match="another sampler"):
        samplers(8, 2)[0].load_state_dict({"yielded": 3})


def test_a_default_device_of_the_user_does_not_matter() -> None:
    torch.set_default_device("meta")
    try:
        assert sorted(samplers(5, 1)[0]) == list(range(5))
    finally:
        torch.set_default_device(None)
