"""Conversions against what the disk allows, and stock DCP directories loaded by us against stock `dcp.load`, resharded.

    python -m benchmarks.convert [--mib 4096] [--reshard-mib 1024] [--rounds 3] [--dir D]

The limits are measured in every round, by O_DIRECT, the best of several block sizes and numbers of threads: a copy of
the source's bytes, read and written at once and flushed; and reading them. Twice: `read_back=False` against the copy,
and the default, which reads its target back from the disk, against the copy and the reading. The source is out of the
page cache in all of them. Takes about 2.2 x `--mib` of disk and 1.2 x of memory; everything is removed at the end.

The loads: 4 ranks saved by rows, 2 ranks load by columns, with the files in the page cache and without; the slowest
rank counts. Nothing else should run.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import asyncckpt
from asyncckpt.memory.mapping import Mapping
from benchmarks import machine
from benchmarks.limits import copy_file_s, read_s

RESULTS = Path(__file__).parent / "results"
TENSOR_NBYTES = 64 << 20
PAIRS = (("dcp", "safetensors"), ("dcp", "torch"), ("torch", "dcp"), ("torch", "hf"), ("asyncckpt", "safetensors"))
SAVED_BY, LOADED_BY, N = 4, 2, 4096
LIMIT_SHARE, TIMES_AS_FAST = 0.8, 2.0
LIMIT_CHOICES = ((4 << 20, 2), (16 << 20, 2), (16 << 20, 4))


def main() -> None:
    """Measure, print, and keep the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=4096)
    parser.add_argument("--reshard-mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("conversions", "loads"), help="one half; no result file is written")
    parser.add_argument("--pairs", nargs="+", help="only these conversions, as from:to")
    parser.add_argument("--dir", type=Path, help="where to write (default: below the temporary directory)")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    directory = Path(tempfile.mkdtemp(prefix="asyncckpt-bench-", dir=args.dir))
    try:
        result: dict[str, Any] = {"benchmark": "convert", "machine": machine.describe(directory)}
        if args.only != "loads":
            pairs = [(a, b) for a, b in PAIRS if args.pairs is None or f"{a}:{b}" in args.pairs]
            result["conversions"] = conversions(directory, args.mib << 20, args.rounds, pairs)
        if args.only != "conversions":
            result["dcp_load"] = loads(directory, max(1, (args.reshard_mib << 20) // (4 * N * N)), args.rounds)
    finally:
        shutil.rmtree(directory)
    if args.only is None and args.pairs is None:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "convert.json").write_text(json.dumps(result, indent=1) + "\n")
    report(result)


# ---- conversions ----------------------------------------------------------------------------------------------------


def conversions(directory: Path, nbytes: int, rounds: int, pairs: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return every round's figures of each pair."""
    found = []
    for kind in dict.fromkeys(source for source, _ in pairs):
        source = directory / f"source-{kind}"
        _write_source(kind, source, max(1, nbytes // TENSOR_NBYTES))
        plain = max(_files_of(source), key=lambda file: file.stat().st_size)
        for to in (to for other, to in pairs if other == kind):
            row: dict[str, Any] = {"from": kind, "to": to, "nbytes": _nbytes(source), "rounds": []}
            for _ in range(rounds):
                row["rounds"].append(_round(source, plain, to, directory, row["nbytes"]))
            found.append(row)
        if source.is_dir():
            shutil.rmtree(source)
        else:
            source.unlink()
    return found


def _round(source: Path, plain: Path, to: str, directory: Path, nbytes: int) -> dict[str, float]:
    scale = nbytes / plain.stat().st_size
    copies, reads = [], []
    for block, threads in LIMIT_CHOICES:
        _drop_cache(source)
        copies.append(copy_file_s(plain, directory / "copy", block, threads))
        (directory / "copy").unlink()
        _drop_cache(source)
        reads.append(_read_s(plain, block, threads))
    found = {"copy_limit_s": min(copies) * scale, "read_limit_s": min(reads) * scale}
    for name, read_back in (("once_s", False), ("read_back_s", True)):
        target = directory / "target"
        _drop_cache(source)
        began = time.perf_counter()
        asyncckpt.convert(source, target, to=to, read_back=read_back)
        found[name] = time.perf_counter() - began
        if target.is_dir():
            shutil.rmtree(target)
        else:
            target.unlink()
    return found


def _read_s(path: Path, block: int, threads: int) -> float:
    with Mapping(-1, threads * block) as memory, memory.view() as view:
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


def _files_of(path: Path) -> list[Path]:
    return [file for file in path.iterdir() if file.is_file()] if path.is_dir() else [path]


def _nbytes(path: Path) -> int:
    return sum(file.stat().st_size for file in _files_of(path))


def _drop_cache(path: Path) -> None:
    for file in _files_of(path):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# ---- loads ----------------------------------------------------------------------------------------------------------


def loads(directory: Path, n_tensors: int, rounds: int) -> dict[str, Any]:
    """Return every round's figures of both ways."""
    path = directory / "dcp"
    _on_ranks(SAVED_BY, _save, directory, str(path), n_tensors)
    seconds = _on_ranks(LOADED_BY, _load, directory, str(path), n_tensors, rounds)
    found = [{key: max(ranks[n][key] for ranks in seconds) for key in seconds[0][n]} for n in range(rounds)]
    return {"nbytes": n_tensors * N * N * 4, "saved_by": SAVED_BY, "loaded_by": LOADED_BY, "rounds": found}


def _on_ranks(world_size: int, function: Callable[..., Any], directory: Path, *arguments: Any) -> list[Any]:
    from torch.multiprocessing.spawn import spawn

    store = Path(tempfile.mkdtemp(dir=directory))
    spawn(_rank, (world_size, str(store), function, arguments), nprocs=world_size)  # type: ignore[no-untyped-call]
    return [json.loads((store / f"result-{rank}").read_text()) for rank in range(world_size)]


def _rank(rank: int, world_size: int, store: str, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}/group", rank=rank, world_size=world_size)
    found = function(rank, *arguments)
    dist.destroy_process_group()
    Path(store, f"result-{rank}").write_text(json.dumps(found))


def _state(n_tensors: int, dim: int, fill: bool) -> dict[str, Any]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    shape = [N // size if d == dim else N for d in range(2)]
    return {
        f"w{n}": DTensor.from_local(torch.full(shape, float(n) if fill else -1.0), mesh, [Shard(dim)])
        for n in range(n_tensors)
    }


def _save(rank: int, path: str, n_tensors: int) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    save(_state(n_tensors, 0, True), checkpoint_id=path)


def _load(rank: int, path: str, n_tensors: int, rounds: int) -> list[dict[str, float]]:
    from torch.distributed.checkpoint.state_dict_loader import load

    state = _state(n_tensors, 1, False)
    ways: dict[str, Callable[[], Any]] = {
        "stock": lambda: load(state, checkpoint_id=path),
        "ours": lambda: asyncckpt.load(path, state, strict=True),
    }
    for work in ways.values():
        work()
    found = []
    for _ in range(rounds):
        row = {}
        for name, work in ways.items():
            for cold in (True, False):  # the second finds in the page cache what the first has read
                row[f"{name}_{'cold' if cold else 'warm'}_s"] = _together(path, work, cold=cold)
        found.append(row)
    assert all(bool((state[f"w{n}"].to_local() == n).all()) for n in range(n_tensors))
    return found


def _together(path: str, work: Callable[[], Any], *, cold: bool) -> float:
    import torch.distributed as dist

    if cold:
        _drop_cache(Path(path))
    else:
        for file in _files_of(Path(path)):
            with file.open("rb") as opened:
                while opened.read(16 << 20):
                    pass
    dist.barrier()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


# ---- report ---------------------------------------------------------------------------------------------------------


def report(result: dict[str, Any]) -> None:
    """Print the figures, and what misses its target."""
    for row in result.get("conversions", ()):
        once = statistics.median(r["copy_limit_s"] / r["once_s"] for r in row["rounds"])
        both = statistics.median((r["copy_limit_s"] + r["read_limit_s"]) / r["read_back_s"] for r in row["rounds"])
        seconds = statistics.median(r["once_s"] for r in row["rounds"])
        missed = "" if min(once, both) >= LIMIT_SHARE else f"   below {LIMIT_SHARE}"
        print(
            f"{row['from']:>10} -> {row['to']:<12}{row['nbytes'] / seconds / 1e9:6.2f} GB/s, {once:.2f} of what a copy "
            f"takes; read back too: {both:.2f} of a copy and a read{missed}"
        )
    for state in ("cold", "warm") if "dcp_load" in result else ():
        rounds = result["dcp_load"]["rounds"]
        times = statistics.median(r[f"stock_{state}_s"] / r[f"ours_{state}_s"] for r in rounds)
        ours = statistics.median(r[f"ours_{state}_s"] for r in rounds)
        missed = "" if times >= TIMES_AS_FAST else f"   below {TIMES_AS_FAST}"
        print(f"stock DCP directory, resharded, {state}: {ours:.3f} s, {times:.2f} times as fast as stock{missed}")


if __name__ == "__main__":
    main()
