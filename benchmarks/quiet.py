"""Waiting until the machine is idle before something is measured, and until its disk has discarded what was removed."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

IDLE_SHARE = 0.10
"""Of the processors' time: a machine that is less busy counts as idle."""

OVER_S = 2.0
WAIT_S = 60.0
DISCARDED_S = 0.3
"""The disk has discarded everything when for so long it has discarded nothing more."""

DISCARD_WAIT_S = 5.0


def until_idle(wait_s: float = WAIT_S, over_s: float = OVER_S) -> dict[str, float]:
    """Wait until the processors are idle; returns `busy_before`, their busy share in the end, and `idle_wait_s`.

    The share is that of the last `over_s` seconds, from /proc/stat: the load average tells of the last minutes. What a
    busy host took away counts as busy, waiting for a disk does not. A round puts what this returns into its row.

    Blocks:
        For at most `wait_s`, and `over_s`.
    """
    began = time.monotonic()
    while True:
        share = busy_share(over_s)
        waited_s = time.monotonic() - began
        if share < IDLE_SHARE or waited_s > wait_s:
            return {"busy_before": share, "idle_wait_s": waited_s}


def busy_share(over_s: float) -> float:
    """Return which part of the processors' time is used in the next `over_s` seconds."""
    first = _spent()
    time.sleep(over_s)
    idle, whole = (b - a for a, b in zip(first, _spent(), strict=True))
    return 1.0 - idle / whole if whole else 0.0


def _spent() -> tuple[int, int]:
    """Return clock ticks since the start of the machine: idle ones, and all."""
    numbers = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return numbers[3] + numbers[4], sum(numbers)


def until_discarded(directory: Path, wait_s: float = DISCARD_WAIT_S) -> float:
    """Wait until what was removed below `directory` is discarded; returns the seconds that took.

    A file system that tells its disk what it no longer needs does so behind the `unlink`, with a transaction; the disk
    may take a second for each GB, and what is measured meanwhile is that. Where the disk does not tell what it
    discards, only the transaction is waited for.

    Blocks:
        For at most `wait_s`, and for the transaction.
    """
    began = time.monotonic()
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
        device = os.fstat(fd).st_dev
    finally:
        os.close(fd)
    last, since = _discards(device), time.monotonic()
    while last is not None and time.monotonic() - began < wait_s:
        time.sleep(DISCARDED_S / 10)
        now = _discards(device)
        if now != last:
            last, since = now, time.monotonic()
        elif time.monotonic() - since > DISCARDED_S:
            break
    return time.monotonic() - began


def _discards(device: int) -> tuple[int, ...] | None:
    """Return a disk's counters of what it has discarded; None where it has none."""
    try:
        fields = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat").read_text().split()
    except OSError:
        return None
    return tuple(map(int, fields[11:15])) if len(fields) >= 15 else None


def busy_shares(result: dict[str, Any]) -> list[float]:
    """Return how busy the machine was before each round of a result; none of one that does not tell."""
    rounds = result.get("rounds")
    rows = rounds if isinstance(rounds, list) else []
    found = [row["busy_before"] for row in rows if "busy_before" in row]
    return found or ([result["busy_before"]] if "busy_before" in result else [])


def said(result: dict[str, Any]) -> str:
    """Return what a result tells of who else used the machine."""
    shares = busy_shares(result)
    if shares:
        most = max(shares)
        when = "before every round" if isinstance(result.get("rounds"), list) else "before"
        busy = f"the processors at most {100 * most:.0f} % busy {when}"
        return busy if most < IDLE_SHARE else f"{busy}: not a quiet machine"
    load = result["machine"].get("load_before")
    return "not told how busy it was" if load is None else f"load average before: {load:.1f}"
