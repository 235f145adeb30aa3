"""Conversions against what the disk allows, and stock DCP directories loaded by us against stock `dcp.load`, resharded.

    python -m benchmarks.convert [--mib 4096] [--reshard-mib 1024] [--rounds 3] [--dir D]

`of the limit`: seconds of a plain copy of the source's bytes, read and written by O_DIRECT at once and flushed,
against those of the conversion, which also reads its target back. The source is out of the page cache in both. Takes
about 3 x `--mib` of disk and 2 x of memory. The loads: 4 ranks saved by rows, 2 ranks load by columns, with the files
in the page cache and without; the slowest rank counts. Nothing else should run.
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
from benchmarks import machine
from benchmarks.limits import copy_file_s

RESULTS = Path(__file__).parent / "results"
TENSOR_NBYTES = 64 << 20
PAIRS = (("dcp", "safetensors"), ("dcp", "torch"), ("torch", "dcp"), ("torch", "hf"), ("asyncckpt", "safetensors"))
SAVED_BY, LOADED_BY, N = 4, 2, 4096
LIMIT_SHARE, TIMES_AS_FAST = 0.8, 2.0


def main() -> None:
    """Measure, print, and keep the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=4096)
    parser.add_argument("--reshard-mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, help="where to write (default: below the temporary directory)")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    directory = Path(tempfile.mkdtemp(prefix="asyncckpt-bench-", dir=args.dir))
    try:
        result: dict[str, Any] = {"benchmark": "convert", "machine": machine.describe(directory)}
        result["conversions"] = conversions(directory, args.mib << 20, args.rounds)
        result["dcp_load"] = loads(directory, max(1, (args.reshard_mib << 20) // (4 * N * N)), args.rounds)
    finally:
        shutil.rmtree(directory)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "convert.json").write_text(json.dumps(result, indent=1) + "\n")
    report(result)


# ---- conversions ----------------------------------------------------------------------------------------------------


def conversions(directory: Path, nbytes: int, rounds: int) -> list[dict[str, Any]]:
    """Return every round's figures of each pair."""
    found = []
    for kind in dict.fromkeys(source for source, _ in PAIRS):
        source = directory / f"source-{kind}"
        _write_source(kind, source, max(1, nbytes // TENSOR_NBYTES))
        plain = max(_files_of(source), key=lambda file: file.stat().st_size)
        for to in (to for other, to in PAIRS if other == kind):
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
    limits = []
    for _ in range(2):
        _drop_cache(source)
        limits.append(copy_file_s(plain, directory / "copy"))
    (directory / "copy").unlink()
    target = directory / "target"
    _drop_cache(source)
    began = time.perf_counter()
    asyncckpt.convert(source, target, to=to)
    seconds = time.perf_counter() - began
    if target.is_dir():
        shutil.rmtree(target)
    else:
        target.unlink()
    return {"limit_s": min(limits) * nbytes / plain.stat().st_size, "convert_s": seconds}


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
    for row in result["conversions"]:
        share = statistics.median(r["limit_s"] / r["convert_s"] for r in row["rounds"])
        seconds = statistics.median(r["convert_s"] for r in row["rounds"])
        missed = "" if share >= LIMIT_SHARE else f"   below {LIMIT_SHARE}"
        rate = row["nbytes"] / seconds / 1e9
        print(f"{row['from']:>10} -> {row['to']:<12}{rate:6.2f} GB/s, {share:.2f} of the limit{missed}")
    for state in ("cold", "warm"):
        rounds = result["dcp_load"]["rounds"]
        times = statistics.median(r[f"stock_{state}_s"] / r[f"ours_{state}_s"] for r in rounds)
        ours = statistics.median(r[f"ours_{state}_s"] for r in rounds)
        missed = "" if times >= TIMES_AS_FAST else f"   below {TIMES_AS_FAST}"
        print(f"stock DCP directory, resharded, {state}: {ours:.3f} s, {times:.2f} times as fast as stock{missed}")


if __name__ == "__main__":
    main()
