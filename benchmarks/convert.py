"""Conversions against what the disk allows, and stock DCP directories loaded by us against stock `dcp.load`, resharded.

    python -m benchmarks.convert [--mib 4096] [--reshard-mib 1024] [--rounds 3] [--dir D] [--time-limit-s S] [--resume]

The limits are measured in every round, by O_DIRECT, with several block sizes and numbers of threads: a copy of the
source's bytes, read and written at once and flushed; and reading them. Twice: `read_back=False` against the copy, and
the default, which reads its target back from the disk, against the copy and the reading. The source is out of the page
cache in all of them. After each try of a limit comes one of each conversion, so that all meet the same disk: it may
give one copy three times the rate of the next. Each round begins with another choice of block size and threads.

Every try of a conversion counts: it is compared with its round's limit, by the choice whose median over all rounds is
the fastest. The median of these shares is judged; the quartiles are beside it. Takes about 2.2 x `--mib` of disk and
1.2 x of memory; everything is removed at the end.

The loads: see `benchmarks.dcp_loads`. Nothing else should run. Seconds of CPU are kept too, for machines that are busy.
The file is written after each round. Past `--time-limit-s` no further round begins, but the very first; `--resume` adds
to a file of the same code, machine and sizes, also with `--only`, `--pairs` and `--cases`, which measure a part (and
are only printed otherwise).
"""

from __future__ import annotations

import argparse
import gc
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
from benchmarks import dcp_loads, kept, machine, quiet, sources
from benchmarks.limits import copy_file_s, read_s
from benchmarks.machine import drop_cache, files_of
from benchmarks.spread import text_of

RESULTS = Path(__file__).parent / "results"
TENSOR_NBYTES = 64 << 20
PAIRS = (
    *(("dcp", "safetensors"), ("dcp", "torch"), ("torch", "dcp"), ("torch", "hf"), ("torch", "asyncckpt")),
    *(("asyncckpt", "safetensors"), ("hf", "asyncckpt")),
)
SHARD_NBYTES = 1 << 30
"""Of the files of a Hugging Face directory."""

LIMIT_SHARE = 0.8
LIMIT_CHOICES = ((4 << 20, 2), (16 << 20, 2), (16 << 20, 4))


def main() -> None:
    """Measure, print, and keep the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=4096)
    parser.add_argument("--reshard-mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("conversions", "loads"), help="one half")
    parser.add_argument("--pairs", nargs="+", help="only these conversions, as from:to")
    parser.add_argument("--cases", nargs="+", type=int, default=range(len(dcp_loads.CASES)), help="only these loads")
    parser.add_argument("--time-limit-s", type=float, default=1800)
    parser.add_argument("--resume", action="store_true", help="add rounds to the file")
    parser.add_argument("--json", type=Path, help="the result file; of a part it is written only if named or resumed")
    parser.add_argument("--dir", type=Path, help="where to write (default: below the temporary directory)")
    args = parser.parse_args()
    path = args.json or RESULTS / "convert.json"
    partly = bool(args.only or args.pairs or len(args.cases) < len(dcp_loads.CASES))
    warnings.simplefilter("ignore")
    deadline_s = time.monotonic() + args.time_limit_s
    directory = Path(tempfile.mkdtemp(prefix="asyncckpt-bench-", dir=args.dir))
    try:
        head = {"benchmark": "convert", "machine": machine.describe(directory), "code": sources.code_of("convert")}
        head |= {"nbytes": args.mib << 20, "reshard_nbytes": args.reshard_mib << 20}
        result: dict[str, Any] = head | {"conversions": [], "dcp_load": []}
        if args.resume:
            result = kept.earlier(path, head) or result

        def keep() -> None:
            if args.json or args.resume or not partly:
                kept.write(path, result)

        if args.only != "loads":
            pairs = [(a, b) for a, b in PAIRS if args.pairs is None or f"{a}:{b}" in args.pairs]
            conversions(directory, args.mib << 20, args.rounds, pairs, deadline_s, result["conversions"], keep)
        if args.only != "conversions":
            nbytes, found = args.reshard_mib << 20, result["dcp_load"]
            dcp_loads.loads(directory, nbytes, args.rounds, deadline_s, found, keep, args.cases)
    finally:
        shutil.rmtree(directory)
    report(result)


# ---- conversions ----------------------------------------------------------------------------------------------------


def conversions(
    directory: Path,
    nbytes: int,
    rounds: int,
    pairs: Sequence[tuple[str, str]],
    deadline_s: float,
    found: list[dict[str, Any]],
    keep: Callable[[], None],
) -> None:
    """Add rounds to each pair until there are as many as asked; `keep` is called after each. See `dcp_loads.loads`."""

    def row_of(pair: tuple[str, str]) -> dict[str, Any] | None:
        return next((row for row in found if (row["from"], row["to"]) == pair), None)

    def lacks(pair: tuple[str, str]) -> bool:
        row = row_of(pair)
        return len(row["rounds"] if row else ()) < rounds and (not found or time.monotonic() < deadline_s)

    for kind in dict.fromkeys(pair[0] for pair in pairs if lacks(pair)):
        if not any(lacks(pair) for pair in pairs if pair[0] == kind):
            break
        source = directory / f"source-{kind}"
        _write_source(kind, source, max(1, nbytes // TENSOR_NBYTES))
        plain = max(files_of(source), key=lambda file: file.stat().st_size)
        for pair in (pair for pair in pairs if pair[0] == kind):
            while lacks(pair):
                row = row_of(pair) or {"from": kind, "to": pair[1], "nbytes": _nbytes(source), "rounds": []}
                row["rounds"].append(_round(source, plain, pair[1], directory, row["nbytes"], len(row["rounds"])))
                if row_of(pair) is None:
                    found.append(row)
                keep()
        if source.is_dir():
            shutil.rmtree(source)
        else:
            source.unlink()


def _round(source: Path, plain: Path, to: str, directory: Path, nbytes: int, number: int) -> dict[str, list[Any]]:
    """Return the seconds of each try: of the copy and the reading with each of the choices, and of the conversions.

    `choices` are those, by number, in the order in which they were tried, as all lists are.
    """
    scale = nbytes / plain.stat().st_size
    turned = [(number + n) % len(LIMIT_CHOICES) for n in range(len(LIMIT_CHOICES))]
    found: dict[str, list[Any]] = {"choices": list(turned), "busy_before": [quiet.until_idle()["busy_before"]]}

    def add(name: str, seconds: float) -> None:
        found.setdefault(name, []).append(seconds)

    for block, threads in (LIMIT_CHOICES[choice] for choice in turned):
        drop_cache(source)
        add("copy_s", copy_file_s(plain, directory / "copy", block, threads) * scale)
        (directory / "copy").unlink()
        quiet.until_discarded(directory)
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
    quiet.until_discarded(target.parent)
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
    elif kind == "hf":
        whole = path.with_name("whole.pt")
        torch.save(state, whole)
        asyncckpt.convert(whole, path, to="hf", max_shard_bytes=SHARD_NBYTES, read_back=False)
        whole.unlink()
    else:
        with asyncckpt.SyncCheckpointer(rank_info=asyncckpt.RankInfo(0, 1)) as checkpointer:
            checkpointer.save(state, path)
    del state
    gc.collect()


def _nbytes(path: Path) -> int:
    return sum(file.stat().st_size for file in files_of(path))


def shares(rounds: Sequence[Mapping[str, Sequence[float]]]) -> tuple[list[float], list[float]]:
    """Return the limits as parts of what each try of the conversions took: once, and read back.

    Args:
        rounds: As `conversions` has them.
    """
    copies, reads = _limit(rounds, "copy_s"), _limit(rounds, "read_s")
    return (
        [copy / took for copy, row in zip(copies, rounds, strict=True) for took in row["once_s"]],
        [
            (copy + read) / took
            for copy, read, row in zip(copies, reads, rounds, strict=True)
            for took in row["read_back_s"]
        ],
    )


def _limit(rounds: Sequence[Mapping[str, Sequence[float]]], name: str) -> list[float]:
    """Return each round's seconds by the choice whose median over the rounds is the fastest."""
    by_choice: dict[float, list[float]] = {}
    for row in rounds:
        for choice, seconds in zip(row["choices"], row[name], strict=True):
            by_choice.setdefault(choice, []).append(seconds)
    return min(by_choice.values(), key=statistics.median)


# ---- report ---------------------------------------------------------------------------------------------------------


def report(result: dict[str, Any]) -> None:
    """Print the figures, and what misses its target."""
    for row in result["conversions"]:
        once, both = shares(row["rounds"])
        seconds = [took for one in row["rounds"] for took in one["once_s"]]
        missed = min(statistics.median(once), statistics.median(both)) < LIMIT_SHARE
        print(
            f"{row['from']:>10} -> {row['to']:<12}{len(seconds)} tries, "
            f"{row['nbytes'] / statistics.median(seconds) / 1e9:.2f} GB/s, {text_of(once)} of what a copy takes; read "
            f"back too: {text_of(both)} of a copy and a read{f'   below {LIMIT_SHARE}' if missed else ''}"
        )
    dcp_loads.report(result["dcp_load"])


if __name__ == "__main__":
    main()
