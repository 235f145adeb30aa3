"""torchdata's `StatefulDataLoader` at another world size, in the middle of an epoch.

    sampler = ElasticDistributedSampler(dataset)
    loader = StatefulDataLoader(dataset, batch_size=8, sampler=sampler)
    state = {"loader": PerRank(loader, reshard=reshard_dataloader_state)}

A state of the loader counts what its rank has drawn, and no data. All ranks draw from one order of the dataset in turn:
rank r draws the positions r, r + W, r + 2W. After n samples on each of W ranks, the first n * W positions have been
seen, so a world of any size can continue behind them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler

from asyncckpt.errors import ConfigError, ReshardError


class ElasticDistributedSampler(DistributedSampler[int]):
    """A `DistributedSampler` with a state, with which another number of ranks continues an epoch.

    The order is that of `DistributedSampler`. After a load at another world size, the samples that no rank has drawn in
    this epoch are divided among the ranks, in the same way as `DistributedSampler` divides a dataset: each rank gets
    the same number, so that all have the same number of batches. If they cannot be divided evenly, fewer samples than
    there are ranks are drawn twice at the end of the epoch; with `drop_last`, they are left out instead.

    The epoch belongs to the state: a loader that continues an epoch draws from the order of that epoch, whatever
    `set_epoch` was called with before. Call `set_epoch` before each further epoch, as with `DistributedSampler`.

    Args:
        dataset: The dataset; only its length is used.
        num_replicas: Number of ranks; None: that of the default process group.
        rank: This rank; None: that in the default process group.
        shuffle: Whether each epoch has an order of its own, from `seed` and the epoch.
        seed: The same on all ranks, and in the whole run.
        drop_last: Whether samples are left out, not drawn twice, where they cannot be divided evenly.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        self._start = 0  # the position in the order of the epoch from which these ranks draw
        self._yielded = 0  # what this rank has drawn since
        self._is_resumed = False  # whether the next iterator continues from `_start` and `_yielded`

    def __iter__(self) -> Iterator[int]:
        # IMPORTANT: now, not when the first sample is drawn. A loader may be saved before that.
        if not self._is_resumed:
            self._start = self._yielded = 0
        self._is_resumed = False
        return self._draw(self._start, self._yielded)

    def _draw(self, start: int, yielded: int) -> Iterator[int]:
        for index in self._indices(start)[yielded:]:
            self._yielded += 1
            yield index

    def _indices(self, start: int) -> list[int]:
        """Return what this rank draws of the epoch, if all ranks begin at position `start` of its order."""
        n: int = len(self.dataset)  # type: ignore[arg-type]
        if self.shuffle:
            generator = torch.Generator()
            generator.manual_seed(self.seed + self.epoch)
            order = torch.randperm(n, generator=generator, device="cpu").tolist()
        else:
            order = list(range(n))
        left = order[start:]
        share = len(left) // self.num_replicas if self.drop_last else math.ceil(len(left) / self.num_replicas)
        lacking = share * self.num_replicas - len(left)
        if lacking > 0:
            left += (order * math.ceil(lacking / n))[:lacking]
        return left[: share * self.num_replicas][self.rank :: self.num_replicas]

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and what determines the order."""
        return {
            "dataset_length": len(self.dataset),  # type: ignore[arg-type]
            "shuffle": self.shuffle,
            "seed": self.seed,
            "epoch": self.epoch,
            "num_replicas": self.num_replicas,
            "start": self._start,
            "yielded": self._yielded,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the next iterator continue from a return value of `state_dict`.

        Raises:
            ConfigError: The state is of another kind of sampler, or of a dataset of another length, or of another order
                (`shuffle`, `seed`).
            ReshardError: It is of another number of ranks.
        """
        mine = self.state_dict()
        if state_dict.keys() != mine.keys():
            raise ConfigError(
                f"the state of a sampler has the keys {sorted(map(str, state_dict))}, an ElasticDistributedSampler "
                f"expects {sorted(mine)}: the loader was saved with another sampler; load it into a loader with that",
                field="sampler",
            )
        for name in ("dataset_length", "shuffle", "seed"):
            if state_dict[name] != mine[name]:
                raise ConfigError(
                    f"the state of an ElasticDistributedSampler was saved with {name}={state_dict[name]!r}, this one "
                    f"has {mine[name]!r}, which is another order, so it cannot continue the epoch: make it with the "
                    "saved value, or do not load the loader",
                    field=name,
                    value=repr(mine[name]),
                )
        if state_dict["num_replicas"] != self.num_replicas:
            raise ReshardError(
                f"the state of an ElasticDistributedSampler is that of {state_dict['num_replicas']} ranks, and this is "
                f"one of {self.num_replicas}: load it by PerRank(loader, reshard=reshard_dataloader_state)",
                saved=state_dict["num_replicas"],
                wanted=self.num_replicas,
            )
        self._start, self._yielded = state_dict["start"], state_dict["yielded"]
        self._is_resumed = True
        if _seen(state_dict) < mine["dataset_length"]:  # else the epoch is over, and the user has set the next one
            self.epoch = state_dict["epoch"]


def reshard_dataloader_state(values: Sequence[Any], rank: int, world_size: int) -> Any:
    """Return the state of the `StatefulDataLoader` of one rank of another world size; for `PerRank(reshard=...)`.

    All ranks together then draw each sample of the epoch that has not been drawn yet, once. The dataset must be a
    map-style one without a state of its own. The sampler must be one of these, with the same dataset on all ranks:

    - `ElasticDistributedSampler`: for every world size.
    - torchdata's `StatefulDistributedSampler`: where the number of samples that all ranks have drawn is a multiple of
      `world_size`. Else some ranks would have a sample, and possibly a batch, more than others.

    Random states of loader workers are not continued: a new rank `r` has the base seed of rank `r` modulo the number of
    saved ranks.

    Args:
        values: The states of all ranks, by rank.
        rank, world_size: The rank that loads.

    Returns:
        A state for `StatefulDataLoader.load_state_dict`, of a loader with the same number of workers.

    Raises:
        ReshardError: The states do not say which samples have been drawn (another sampler, or none with a state; an
            iterable dataset, or one with a state; `snapshot_every_n_steps`); or the ranks were not at the same step; or
            the number of samples is not a multiple of `world_size`, as above.
    """
    saved = len(values)
    positions = [_Position(value, at, saved, world_size) for at, value in enumerate(values)]
    first = positions[0]
    for at, other in enumerate(positions):
        if other.facts() != first.facts():
            raise first.refused(
                f"ranks 0 and {at} were at different positions ({first.facts()} and {other.facts()}); save all loaders "
                "after the same step, and give all samplers the same arguments"
            )
    found = copy.deepcopy(positions[rank % saved])
    found.move(rank, world_size)
    return found.value


def _seen(state: Mapping[str, Any]) -> int:
    """Return how many positions of the epoch's order have been drawn, by the state of an `ElasticDistributedSampler`.

    Beyond the length of the dataset, samples have been drawn twice.
    """
    seen: int = state["start"] + state["yielded"] * state["num_replicas"]
    return seen


_ELASTIC = {"dataset_length", "shuffle", "seed", "epoch", "num_replicas", "start", "yielded"}
_STOCK = {"yielded"}
"""Keys of the states of the samplers."""

_ADVICE = "use ElasticDistributedSampler of asyncckpt.integrations.torchdata"


class _Position:
    """Where one rank's loader is, in a state that `StatefulDataLoader.state_dict` of torchdata 0.10 or later returned.

    Args:
        value: The state.
        at: The rank that saved it.
        saved, wanted: The world sizes, for messages.

    Raises:
        ReshardError: It is no such state, or does not say which samples have been drawn.
    """

    def __init__(self, value: Any, at: int, saved: int, wanted: int) -> None:
        self.value, self._at, self._saved, self._wanted = value, at, saved, wanted
        try:
            self._snapshot: dict[str, Any] | None = value.get("_snapshot")
            self.is_finished = bool(value["_iterator_finished"])
            self._main: dict[str, Any] = value if self._snapshot is None else self._snapshot["_main_snapshot"]
            of_dataset = [value] if self._snapshot is None else list(self._snapshot["_worker_snapshots"].values())
            self._batches: dict[str, Any] | None = self._main["_sampler_iter_state"]
            self._sampler = self._found_sampler()
            has_state = any(one["dataset_state"] is not None for one in of_dataset)
            is_iterable = any(one["fetcher_state"] is not None for one in of_dataset)
            self._drawn: int = self._main["_sampler_iter_yielded"]
            if self._batches is not None:
                self._drawn = self._batches["samples_yielded"]
            behind = 0 if self._snapshot is None else value["_steps_since_snapshot"]
        except (KeyError, TypeError, AttributeError) as error:
            raise self.refused(
                f"it is not the state of a StatefulDataLoader ({type(error).__name__}: {error}); put the loader, or "
                "its state_dict(), into the PerRank"
            ) from error
        refusals = (
            (
                is_iterable,
                "the dataset is iterable, so only the dataset itself could say which samples have been drawn; use a "
                "map-style dataset, or a reshard of your own",
            ),
            (
                has_state,
                "the dataset has a state of its own, which only the dataset can divide; use a reshard of your own",
            ),
            (
                behind,
                f"its state is that before the last {behind} of the batches that were drawn; create the loader with "
                "snapshot_every_n_steps=1, or save at a multiple of it",
            ),
            (
                self._sampler is None or self._sampler.keys() not in (_STOCK, _ELASTIC),
                f"its sampler keeps no state that says which samples of the dataset all ranks have drawn; {_ADVICE}",
            ),
        )
        for holds, why in refusals:
            if holds:
                raise self.refused(why)

    def _found_sampler(self) -> dict[str, Any] | None:
        """Return the state of the sampler; None: there is none, or it is no sampler that divides a dataset."""
        if self._batches is None:  # without batches, or with a batch sampler of the user's
            found: dict[str, Any] | None = self._main["_index_sampler_state"]
            return found
        return None if "sampler_iter_state" in self._batches else self._batches.get("sampler_state")

    @property
    def _is_elastic(self) -> bool:
        return self._sampler is not None and self._sampler.keys() == _ELASTIC

    def facts(self) -> dict[str, Any]:
        """Return what must be equal on all ranks."""
        found = dict(self._sampler or {}) if self._is_elastic else {"yielded": self._drawn}
        return {**found, "finished": self.is_finished}

    def move(self, rank: int, world_size: int) -> None:
        """Change the state to that of a rank of another world size.

        Raises:
            ReshardError: It cannot be that of a `StatefulDistributedSampler`.
        """
        assert self._sampler is not None
        n = 0
        if self._is_elastic:
            length = self._sampler["dataset_length"]
            start = length if self.is_finished else min(length, _seen(self._sampler))
            self._sampler.update(start=start, yielded=0, num_replicas=world_size)
        else:
            if not self.is_finished:  # else it must be 0: the sampler would leave them out of the next epoch
                n, left_over = divmod(self._drawn * self._saved, world_size)
                if left_over:
                    raise self.refused(
                        f"{self._drawn} samples on each of {self._saved} ranks are no multiple of {world_size} ranks, "
                        f"so some ranks would get more batches than others; {_ADVICE} instead of "
                        "StatefulDistributedSampler"
                    )
            self._sampler["yielded"] = n
        if self._batches is not None:
            self._batches["samples_yielded"] = n
        steps = n if self._batches is None else 0  # of this world size
        self._main["_sampler_iter_yielded"] = steps
        if self._snapshot is None:
            self.value["_num_yielded"] = steps
            return
        n_workers = self._main["_num_workers"]
        # Worker n of a loader has the seed base + n. Ranks that continue from the same saved rank must not share seeds.
        self._snapshot.update(_snapshot_step=steps, _last_yielded_worker_id=n_workers - 1)
        self._main["_base_seed"] = (self._main["_base_seed"] + rank // self._saved * n_workers) % (1 << 63)

    def refused(self, why: str) -> ReshardError:
        """Return the error for a state that cannot be resharded."""
        return ReshardError(
            f"the StatefulDataLoader of rank {self._at} cannot go from {self._saved} to {self._wanted} ranks: {why}",
            saved=self._saved,
            wanted=self._wanted,
            detail=why,
        )
