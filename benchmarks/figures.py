"""Figures of result files: values by name, ratios of two, medians and quartiles.

A round is a nested dict of numbers. A figure is named by its path: `saves/stall_s` finds `stall_s` of each member of
the list `saves`. `a / b` is the ratio of two figures within each round: value by value if there are as many of both,
else over the median of `b`. `*` stands for any one part of a path; a figure with `*` is found once per match.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]


def flat(value: Any, path: str = "") -> dict[str, list[float]]:
    """Return every number of a nested value by its path; numbers of lists are joined under one path."""
    found: dict[str, list[float]] = {}
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        found[path] = [float(value)]
    elif isinstance(value, (Mapping, list)):
        for key, member in value.items() if isinstance(value, Mapping) else ((None, member) for member in value):
            for name, numbers in flat(member, "/".join(filter(None, (path, key)))).items():
                found.setdefault(name, []).extend(numbers)
    return found


def matches(result: Row, figure: str) -> dict[str, list[float]]:
    """Return the values of a figure over all rounds; if it has a `*`, by what that stands for, else under ""."""
    over, _, under = figure.partition(" / ")
    pattern = re.compile(re.escape(over).replace(r"\*", "(?P<match>[^/]*)"))
    found: dict[str, list[float]] = {}
    for numbers in map(flat, result["rounds"]):
        for path, values in numbers.items():
            if hit := pattern.fullmatch(path):
                match = hit.groupdict().get("match", "")
                divisors = numbers.get(under.replace("*", match), [])
                found.setdefault(match, []).extend(_ratios(values, divisors) if under else values)
    return {match: values for match, values in found.items() if values}


def _ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    if not over or not under:
        return []
    if len(over) != len(under):
        under = [statistics.median(under)] * len(over)
    return [a / b for a, b in zip(over, under, strict=True)]


def values(result: Row, figure: str) -> list[float]:
    """Return the values of a figure over all rounds; of several matches those with the greatest median."""
    return max(matches(result, figure).values(), key=statistics.median, default=[])


def median(result: Row, figure: str) -> float:
    """Return the median of a figure."""
    return statistics.median(values(result, figure))


def quartiles(numbers: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile; all lie within what was measured."""
    if len(numbers) == 1:
        return numbers[0], numbers[0], numbers[0]
    low, middle, high = statistics.quantiles(numbers, n=4, method="inclusive")
    return low, middle, high


def in_turn(ways: Iterable[Any], number: int) -> list[Any]:
    """Return what is compared, in another order for each number, so that each comes first once."""
    found = list(ways)
    first = number % len(found) if found else 0
    return found[first:] + found[:first]


def table(columns: Mapping[str, Row], shown: Iterable[str]) -> list[str]:
    """Return lines of text: each figure in each result, and ratios of the last result to the others.

    A ratio is of the medians of one round; the table has its median and quartiles over all rounds.
    """
    *others, last = columns
    lines = [f"{'median (quartiles)':60s}" + "".join(f"{name[:32]:>34s}" for name in columns)]
    for figure in shown:
        found = {name: matches(result, figure) for name, result in columns.items()}
        for match in found[last]:
            cells = [_spread(v[match], ".4g") if match in v else "none" for v in found.values()]
            lines.append(f"{figure.replace('*', match):60s}" + "".join(f"{cell:>34s}" for cell in cells))
            for name in others:
                if ratios := _by_round(columns[last], columns[name], figure, match):
                    lines.append(f"{'':20s}{last[:30]} / {name[:30]}: {_spread(ratios, '.3f')}")
    return lines


def _spread(numbers: Sequence[float], form: str) -> str:
    low, middle, high = quartiles(numbers)
    return f"{middle:{form}} ({low:{form}} to {high:{form}})"


def _by_round(over: Row, under: Row, figure: str, match: str) -> list[float]:
    found = []
    for pair in zip(over["rounds"], under["rounds"], strict=False):
        one, two = (matches({"rounds": [row]}, figure).get(match) for row in pair)
        if one and two and statistics.median(two):
            found.append(statistics.median(one) / statistics.median(two))
    return found
