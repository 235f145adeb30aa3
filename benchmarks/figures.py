"""What finds the figures of `benchmarks.targets` in result files: each a list of every value that was measured."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import contest_results, cpu, ranks
from benchmarks.limits import fresh_s

OURS, PREPARED, OVERLAP = contest_results.OURS
Values = Callable[[dict[str, Any]], Sequence[float]]


def contest(measure: str, name: str = OURS, per: str | None = None) -> Values:
    """Return what finds a measure in a result of `benchmarks.compare`, or its ratio to a limit of the machine."""

    def found(result: dict[str, Any]) -> list[float]:
        ratios = list[float]()
        for row in result["rounds"]:
            if name not in row["contenders"]:
                return []
            values = contest_results.values(result | {"rounds": [row]}, name)
            if isinstance(values, str):
                return []
            limit = 1.0 if per is None else fresh_s(row["limits"]) if per == "read_fresh_s" else row["limits"][per]
            ratios += [value / limit for value in values.get(measure, ())]
        return ratios

    return found


def beside(measure: str, name: str = OURS, peer: str | None = None) -> Values:
    """Return what finds our values of a measure over the median of the best peer, or of one; loads from the disk."""

    def found(result: dict[str, Any]) -> list[float]:
        there = contest_results.names(result)
        others = [one for one in there if one not in contest_results.OURS and peer in (None, one)]
        every = [contest_results.values(result, other) for other in others]
        medians = [statistics.median(values[measure]) for values in every if not isinstance(values, str)]
        ours = contest_results.values(result, name) if name in there else ""
        if isinstance(ours, str) or not medians:
            return []
        return [value / min(medians) for value in ours.get(f"{measure}, {contest_results.FROM_DISK}", ours[measure])]

    return found


def save_load(measure: str, per: str) -> Values:
    """Return what finds a measure in a result of `benchmarks.save_load`, over a limit of the moment or the round."""

    def found(result: dict[str, Any]) -> list[float]:
        return [save[measure] / save.get(per, row["limits"][per]) for row in result["rounds"] for save in row["saves"]]

    return found


def cold(result: dict[str, Any]) -> list[float]:
    """Find loads of files that were never read over the limit of such reads."""
    return [row["load_cold_s"] / fresh_s(row["limits"]) for row in result["rounds"]]


def cold_again(result: dict[str, Any]) -> list[float]:
    """Find loads of files that were read before, over the limit of such reads."""
    return list(loaded("cold", "read limit")(result))


def ratio(over: str, under: str) -> Values:
    """Return what finds the ratio of two figures of a round."""
    return lambda result: [row[over] / row[under] for row in result["rounds"]]


def loaded(ours: str, other: str) -> Values:
    """Return what finds the ratio of two ways to load in a result of `benchmarks.load`; none where one is not there."""
    return lambda result: [row[ours][0] / row[other][0] for row in result["rounds"] if ours in row]


def resharded(verify: bool) -> Values:
    """Return what finds the bytes that were read over those that had to be, of each pair of meshes."""
    return lambda result: [
        row["read_nbytes"] / row["touched_nbytes"] for row in result["pairs"] if row["verify"] == verify
    ]


def reshard_extra(verify: bool) -> Values:
    """Return what finds the extra times of the worst pair of meshes, as `benchmarks.reshard` reports them."""

    def extra(result: dict[str, Any], row: dict[str, Any]) -> list[float]:
        share = result["nbytes"] / row["touched_nbytes"]
        return [share * r / p for r, p in zip(row["reshard_s"], row["plain_s"], strict=True)]

    return lambda result: max(
        (extra(result, row) for row in result["pairs"] if row["verify"] == verify), key=statistics.median
    )


def cpu_beyond(state: str) -> Values:
    """Return what finds the trainer's CPU time beyond the copy, in ms, of the way to stage that takes most."""

    def beyond(rows: list[dict[str, float]]) -> list[float]:
        return [1e3 * (row["trainer_s"] - row["copy_s"]) for row in rows]

    return lambda result: max(
        (beyond(result["states"][state][staging]) for staging in cpu.STAGINGS), key=statistics.median
    )


def scale(part: str, figure: str) -> Values:
    """Return what finds a figure of 4,096 ranks with 1,000 tensors, of every layout."""
    return lambda result: [row[figure] for row in result[part] if (row["ranks"], row["tensors"]) == (4096, 1000)]


def growth(result: dict[str, Any]) -> list[float]:
    """Find how much more planning takes over how many more chunks, for each step from one size to the next."""
    found = []
    for layout in dict.fromkeys(row["layout"] for row in result["planning"]):
        rows = [row for row in result["planning"] if row["layout"] == layout]
        for fixed, grown in (("tensors", "ranks"), ("ranks", "tensors")):
            same = max((row[fixed] for row in rows), key=[row[fixed] for row in rows].count)
            series = sorted((row[grown], row["plan_s"]) for row in rows if row[fixed] == same)
            found += [(b_s / a_s) / (b / a) for (a, a_s), (b, b_s) in itertools.pairwise(series)]
    return found


def behind(figure: Callable[[dict[str, Any]], float]) -> Values:
    """Return what finds a figure of the saves behind the training in a result of `benchmarks.overlap`."""
    return lambda result: [figure(save) for row in result["rounds"] for save in row["overlap"]]


def stall_ms(save: dict[str, Any]) -> float:
    """Return what one of these saves kept the training waiting."""
    return 1e3 * (float(save["save_s"]) + float(save["wait_s"]))


def first_behind(result: dict[str, Any]) -> list[float]:
    """Find the stall of the first save after `prepare()`, behind the training, in ms."""
    return [stall_ms(result["first_save"]["overlap"])]


def on_ranks(measure: str, arrangement: str, per: str | None = None) -> Values:
    """Return what finds a measure of the slower rank, or its ratio to a limit of the machine."""

    def found(result: dict[str, Any]) -> list[float]:
        values = [(row, ranks.values(result | {"rounds": [row]}, arrangement, OURS)) for row in result["rounds"]]
        return [
            value / (row["limits"][per] if per else 1.0)
            for row, of_round in values
            if not isinstance(of_round, str)
            for value in of_round[measure]
        ]

    return found


def fds(name: str) -> Values:
    """Return what finds the file descriptors that each rank had more, or that the worker had."""
    return lambda result: ranks.fds(result).get(name, [])


def contest_fds(result: dict[str, Any]) -> list[float]:
    """Find the file descriptors that a training without other ranks had more after its saves, of all our ways."""
    every = [row["contenders"].get(name, {}) for row in result["rounds"] for name in contest_results.OURS]
    return [one["added_fds"] for one in every if "added_fds" in one]


def gpu(figure: str, scale: float = 1.0, *, inverse: bool = False) -> Values:
    """Return what finds a figure of `benchmarks.gpu`, or what is 1 over it."""

    def found(result: dict[str, Any]) -> list[float]:
        values = result.get("figures", {}).get(figure, {}).get("values", [])
        return [scale / value if inverse else scale * value for value in values]

    return found
