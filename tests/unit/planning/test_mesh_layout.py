"""Which indices of a dimension a rank holds."""

from __future__ import annotations

import random

from asyncckpt.sharding.mesh_layout import count_indices, index_runs


def test_indices_are_counted_as_they_are_made(rng: random.Random) -> None:
    for _ in range(2000):
        shards = []
        for _ in range(rng.randrange(4)):
            n_shards = rng.randrange(1, 5)
            shards.append((n_shards, rng.randrange(n_shards), rng.choice([1, rng.randrange(1, 9)])))
        length = rng.randrange(40)
        runs = index_runs(length, shards)
        n_indices, n_steps = count_indices(length, shards)
        assert n_indices == sum(n for _, n in runs), (length, shards)
        assert len(runs) <= n_steps, (length, shards)
