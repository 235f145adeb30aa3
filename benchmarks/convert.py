"""Conversions against what the disk allows, and stock DCP directories loaded by us against stock `dcp.load`, resharded.

    python -m benchmarks.convert [--mib 4096] [--reshard-mib 1024] [--rounds 3] [--dir D] [--time-limit-s S]

The limits are measured in every round, by O_DIRECT, the best of several block sizes and numbers of threads: a copy of
the source's bytes, read and written at once and flushed; and reading them. Twice: `read_back=False` against the copy,
and the default, which reads its target back from the disk, against the copy and the reading. The source is out of the
page cache in all of them. After each try of a limit comes one of each conversion, so that all meet the same disk: it
may give one copy three times the rate of the next. A round compares the best of either; the medians of all tries are
printed too. Takes about 2.2 x `--mib` of disk and 1.2 x of memory; everything is removed at the end.

The loads: see `benchmarks.dcp_loads`. Nothing else should run. Seconds of CPU are kept too, for machines that are busy.
Past `--time-limit-s` no further round begins, but the first of each pair and case.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import asyncckpt
from asyncckpt.memory import mapping
from benchmarks import dcp_loads, machine
from benchmarks.limits import copy_file_s, read_s
from benchmarks.machine import drop_cache, files_of

RESULTS = Path(__file__).parent / "results"
TENSOR_NBYTES = 64 << 20
PAIRS = (("dcp", "safetensors"), ("dcp", "torch"), ("torch", "dcp"), ("torch", "hf"), ("asyncckpt", "safetensors"))
LIMIT_SHARE = 0.8
LIMIT_CHOICES = ((4 << 20, 2), (16 << 20, 2), (16 << 20, 4))


def main() -> None:
    """Measure, print, and keep the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=4096)
    parser.add_argument("--reshard-mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("conversions", "loads"), help="one half; no result file is written")
    parser.add_argument("--pairs", nargs="+", help="only these conversions, as from:to")
    parser.add_argument("--time-limit-s", type=float, default=1800)
    parser.add_argument("--dir", type=Path, help="where to write (default: below the temporary directory)")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    deadline_s = time.monotonic() + args.time_limit_s
    directory = Path(tempfile.mkdtemp(prefix="asyncckpt-bench-", dir=args.dir))
    try:
        result: dict[str, Any] = {"benchmark": "convert", "machine": machine.describe(directory)}
        if args.only != "loads":
            pairs = [(a, b) for a, b in PAIRS if args.pairs is None or f"{a}:{b}" in args.pairs]
            result["conversions"] = conversions(directory, args.mib << 20, args.rounds, pairs, deadline_s)
        if args.only != "conversions":
            result["dcp_load"] = dcp_loads.loads(directory, args.reshard_mib << 20, args.rounds, deadline_s)
    finally:
        shutil.rmtree(directory)
    if args.only is None and args.pairs is None:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "convert.json").write_text(json.dumps(result, indent=1) + "\n")
    report(result)


# ---- conversions ----------------------------------------------------------------------------------------------------


def conversions(
    directory: Path, nbytes: int, rounds: int, pairs: Sequence[tuple[str, str]], deadline_s: float
) -> list[dict[str, Any]]:
    """Return every round's figures of each pair."""
    found = []
    for kind in dict.fromkeys(source for source, _ in pairs):
        source = directory / f"source-{kind}"
        _write_source(kind, source, max(1, nbytes // TENSOR_NBYTES))
        plain = max(files_of(source), key=lambda file: file.stat().st_size)
        for to in (to for other, to in pairs if other == kind):
            row: dict[str, Any] = {"from": kind, "to": to, "nbytes": _nbytes(source), "rounds": []}
            while len(row["rounds"]) < rounds and (not row["rounds"] or time.monotonic() < deadline_s):
                row["rounds"].append(_round(source, plain, to, directory, row["nbytes"]))
            found.append(row)
        if source.is_dir():
            shutil.rmtree(source)
        else:
            source.unlink()
    return found


def _round(source: Path, plain: Path, to: str, directory: Path, nbytes: int) -> dict[str, list[float]]:
    """Return the seconds of each try: of the copy and the reading with each of the choices, and of the conversions."""
    scale = nbytes / plain.stat().st_size
    found: dict[str, list[float]] = {}

    def add(name: str, seconds: float) -> None:
        found.setdefault(name, []).append(seconds)

    for block, threads in LIMIT_CHOICES:
        drop_cache(source)
        add("copy_s", copy_file_s(plain, directory / "copy", block, threads) * scale)
        (directory / "copy").unlink()
        drop_cache(source)
        add("read_s", _read_s(plain, block, threads) * scale)
        for name, read_back in (("once", False), ("read_back", True)):
            seconds, cpu_s = _convert_s(source, directory / "target", to, read_back)
            add(f"{name}_s", seconds)
            add(f"{name}_cpu_s", cpu_s)
    return found


def _convert_s(source: Path, target: Path, to: str, read_back: bool) -> tuple[float, float]:
    convert = asyncckpt.convert  # the first time this imports a hundred modules, before the clock
    drop_cache(source)
    began, cpu = time.perf_counter(), time.process_time()
    convert(source, target, to=to, read_back=read_back)
    found = time.perf_counter() - began, time.process_time() - cpu
    if target.is_dir():
        shutil.rmtree(target)
    else:
        target.unlink()
    return found


def _read_s(path: Path, block: int, threads: int) -> float:
    with mapping.Mapping(-1, threads * block) as memory, memory.view() as view:
        memory.populate(0, memory.nbytes)
        return read_s(path, view, path.stat().st_size // 4096 * 4096, block, threads)


def _write_source(kind: str, path: Path, n_tensors: int) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    state = {f"w{n}": torch.randn(TENSOR_NBYTES // 4096, 1024) for n in range(n_tensors)}
    if kind == "torch":
        torch.save(state, path)
    elif kind == "dcp":
        save(state, checkpoint_id=str(path), no_dist=True)
    else:
        with asyncckpt.SyncCheckpointer(rank_info=asyncckpt.RankInfo(0, 1)) as checkpointer:
            checkpointer.save(state, path)
    del state
    gc.collect()


def _nbytes(path: Path) -> int:
    return sum(file.stat().st_size for file in files_of(path))


def share(
    rounds: Sequence[Mapping[str, Sequence[float]]], chosen: Callable[[Sequence[float]], float]
) -> tuple[float, float]:
    """Return the limits as parts of what the conversions took, medians of the rounds: once, and read back.

    Args:
        rounds: As `conversions` has them.
        chosen: What counts of the tries of a round, on both sides.
    """
    found = [{name: chosen(tries) for name, tries in one.items()} for one in rounds]
    return (
        statistics.median(one["copy_s"] / one["once_s"] for one in found),
        statistics.median((one["copy_s"] + one["read_s"]) / one["read_back_s"] for one in found),
    )


def _together(rounds: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    return {name: [seconds for one in rounds for seconds in one[name]] for name in rounds[0]}


# ---- report ---------------------------------------------------------------------------------------------------------


def report(result: dict[str, Any]) -> None:
    """Print the figures, and what misses its target."""
    for row in result.get("conversions", ()):
        once, both = share(row["rounds"], min)
        tried_once, tried_both = share([_together(row["rounds"])], statistics.median)
        seconds = statistics.median(min(r["once_s"]) for r in row["rounds"])
        missed = "" if min(once, both) >= LIMIT_SHARE else f"   below {LIMIT_SHARE}"
        print(
            f"{row['from']:>10} -> {row['to']:<12}{row['nbytes'] / seconds / 1e9:6.2f} GB/s, {once:.2f} of what a copy "
            f"takes; read back too: {both:.2f} of a copy and a read (medians of all tries: {tried_once:.2f}, "
            f"{tried_both:.2f}){missed}"
        )
    dcp_loads.report(result.get("dcp_load", ()))


if __name__ == "__main__":
    main()
