"""How long one rank computes to agree with thousands of others: `python -m benchmarks.many_ranks [RANKS] [TENSORS]`.

Three jobs: all ranks hold the same tensors; groups of 64 ranks do; every rank holds others under the same names. The
exchange itself is left out: the encoded contributions are made beforehand.
"""

from __future__ import annotations

import itertools
import sys
import time

from asyncckpt.planning.agreement import Agreement
from asyncckpt.planning.contributions import (
    Change,
    Contribution,
    candidates,
    decode_contributions,
    with_digests,
)

STEPS = ("decode", "compare", "encode", "agree", "duties")


def measure(name: str, n_ranks: int, n_tensors: int, group: int, *, equal: bool) -> None:
    """Print the seconds of each step for ranks of which `group` at a time hold tensors of the same names."""
    shapes = [(4096, 1024), (1024,), (4096, 4096), (1,)]
    raw, digests = {}, {}
    for rank in range(n_ranks):
        names = [f"stage{rank // group}.layers.{n}.weight" for n in range(n_tensors)]
        tensors = tuple((name, "bfloat16", shapes[n % 4]) for n, name in enumerate(names))
        raw[rank] = Contribution(tensors=tensors, own_nbytes=5000, digests=(b"",) * n_tensors).encode()
        digests[rank] = ((0 if equal else rank) + 1).to_bytes(8, "little") * n_tensors if group > 1 else b""
    steps = [time.perf_counter()]
    given = decode_contributions(raw)
    steps.append(time.perf_counter())
    candidates(given)
    given = with_digests(given, digests)
    steps.append(time.perf_counter())
    change = Change(contributions=given)
    encoded = change.encode()
    steps.append(time.perf_counter())
    agreement = Agreement.start(n_ranks).extended(change, encoded, compared=True)
    steps.append(time.perf_counter())
    for key in given[0].tensors:
        if agreement.duty(0, *key).split:
            agreement.turn(*key)
    steps.append(time.perf_counter())
    seconds = [after - before for before, after in itertools.pairwise(steps)]
    took = ", ".join(f"{what} {s:.2f}" for what, s in zip(STEPS, seconds, strict=True))
    nbytes = sum(map(len, raw.values())) / 1e6
    print(f"{name}: {n_ranks} ranks, {n_tensors} tensors, {nbytes:.0f} MB exchanged: {sum(seconds):.2f} s ({took})")


def main() -> None:
    """Run the three jobs."""
    n_ranks, n_tensors = map(int, (sys.argv[1:] + ["4096", "1000"][len(sys.argv) - 1 :])[:2])
    measure("all alike", n_ranks, n_tensors, n_ranks, equal=True)
    measure("groups of 64", n_ranks, n_tensors, 64, equal=True)
    measure("same names, all unequal", n_ranks, n_tensors, n_ranks, equal=False)


if __name__ == "__main__":
    main()
