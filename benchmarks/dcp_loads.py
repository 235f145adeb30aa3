"""Stock DCP directories loaded into other placements: by us, by stock `dcp.load`, and what the machine allows.

Ranks of one machine save matrices with stock `dcp.save`, other ranks load them, cut otherwise, with the files in the
page cache and without; the slowest rank counts. Beside each load, in the same round, the least that a loader does that
reads every file once: `disk_s`, by O_DIRECT, by one process; `cache_s`, from the page cache into one buffer, by every
rank; `cold_cache_s`, the same from the disk, each byte of which is brought into the page cache once, for all ranks.
`python -m benchmarks.convert --only loads` runs it.
"""

from __future__ import annotations

import json
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
from benchmarks.limits import read_s
from benchmarks.machine import drop_cache, files_of
from benchmarks.spread import text_of

N = 4096
CASES = ((4, 0, 2, 1), (2, 0, 4, 1), (4, 1, 2, 0))
"""(ranks that saved, the dimension that they cut, ranks that load, the dimension that they want cut)."""

TIMES_AS_FAST = 2.0
READ_BLOCK_NBYTES, READ_THREADS = 4 << 20, 4
_BUFFER_NBYTES = 1 << 20
AT_ONCE = 5
"""So many rounds of a case by one start of its ranks, whose first loads are not counted."""


def loads(
    directory: Path,
    nbytes: int,
    rounds: int,
    deadline_s: float,
    found: list[dict[str, Any]],
    keep: Callable[[], None],
    cases: Sequence[int] = range(len(CASES)),
) -> None:
    """Add rounds to each case until there are as many as asked, `AT_ONCE` at a time.

    Args:
        directory: Where to write.
        nbytes: Of the state.
        rounds: Of each case.
        deadline_s: By `time.monotonic`; beyond it none begin, but the very first.
        found: What there is by now; added to.
        keep: Called when some were added.
        cases: Which, by their number.
    """
    n_tensors = max(1, nbytes // (4 * N * N))
    for saved_by, saved_dim, loaded_by, loaded_dim in (CASES[number] for number in cases):
        names = {"saved": f"{saved_by} x Shard({saved_dim})", "loaded": f"{loaded_by} x Shard({loaded_dim})"}
        row = next((one for one in found if names.items() <= one.items()), None)
        while len(row["rounds"] if row else ()) < rounds and (not found or time.monotonic() < deadline_s):
            row = row or {**names, "nbytes": n_tensors * N * N * 4, "rounds": []}
            count = min(AT_ONCE, rounds - len(row["rounds"]))
            path = Path(tempfile.mkdtemp(dir=directory))
            _on_ranks(saved_by, _save, directory, str(path), n_tensors, saved_dim)
            ranks = _on_ranks(loaded_by, _load, directory, str(path), n_tensors, loaded_dim, count)
            for file in files_of(path):
                file.unlink()
            row["rounds"] += [_of_all_ranks([rows[n] for rows in ranks]) for n in range(count)]
            if row not in found:
                found.append(row)
            keep()


def _of_all_ranks(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """The slowest rank counts; seconds of CPU are added up."""
    return {key: (sum if key.endswith("cpu_s") else max)(row[key] for row in rows) for key in rows[0]}


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


def _save(rank: int, path: str, n_tensors: int, dim: int) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    save(_state(n_tensors, dim, True), checkpoint_id=path)


def _load(rank: int, path: str, n_tensors: int, dim: int, rounds: int) -> list[dict[str, float]]:
    from torch.distributed.checkpoint.state_dict_loader import load

    state = _state(n_tensors, dim, False)
    ways: dict[str, Callable[[], Any]] = {
        "stock": lambda: load(state, checkpoint_id=path),
        "ours": lambda: asyncckpt.load(path, state, strict=True),
    }
    for work in ways.values():
        work()
    found = []
    for _ in range(rounds):
        row = {"disk_s": _together(path, lambda: _read_disk(path) if rank == 0 else None, cold=True)[0]}
        for name, work in ways.items():
            for cold in (True, False):  # the second finds in the page cache what the first has read
                seconds, cpu = _together(path, work, cold=cold)
                row[f"{name}_{'cold' if cold else 'warm'}_s"] = seconds
                row[f"{name}_{'cold' if cold else 'warm'}_cpu_s"] = cpu
        for limit, cold in (("cold_cache_s", True), ("cache_s", False)):
            row[limit] = _together(path, lambda: _read_cache(path), cold=cold)[0]
        found.append(row)
    assert all(bool((state[f"w{n}"].to_local() == n).all()) for n in range(n_tensors))
    return found


def _together(path: str, work: Callable[[], Any], *, cold: bool) -> tuple[float, float]:
    """Return seconds and seconds of CPU of work that all ranks begin at once."""
    import torch.distributed as dist

    if cold:
        drop_cache(Path(path))
    else:
        _read_cache(path)
    dist.barrier()
    began, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - cpu


def _read_cache(path: str) -> None:
    buffer = bytearray(_BUFFER_NBYTES)
    for file in files_of(Path(path)):
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass


def _read_disk(path: str) -> None:
    with Mapping(-1, READ_THREADS * READ_BLOCK_NBYTES) as memory, memory.view() as view:
        for file in files_of(Path(path)):
            read_s(file, view, file.stat().st_size // 4096 * 4096, READ_BLOCK_NBYTES, READ_THREADS)


def report(cases: Sequence[dict[str, Any]]) -> None:
    """Print ours, stock's and the limit of each case, and what misses its target."""
    for case in cases:
        for state, limits in (("cold", ("disk_s", "cold_cache_s")), ("warm", ("cache_s",))):
            print(
                f"stock DCP directory, {case['saved']} -> {case['loaded']}, {state}: {_compared(case, state, limits)}"
            )


def _compared(case: dict[str, Any], state: str, limits: Sequence[str]) -> str:
    rounds = case["rounds"]
    ours, stock = (text_of([row[f"{who}_{state}_s"] for row in rounds], 3) for who in ("ours", "stock"))
    ratios = {
        unit: [row[f"stock_{state}_{unit}"] / row[f"ours_{state}_{unit}"] for row in rounds] for unit in ("s", "cpu_s")
    }
    times = statistics.median(ratios["s"])
    fast = f"{text_of(ratios['s'])} times as fast as stock, by CPU {text_of(ratios['cpu_s'])}"
    parts = [f"{len(rounds)} rounds; ours {ours} s, stock {stock} s; {fast}"]
    for limit in limits:
        what = "the " + limit.removesuffix("_s").replace("_", " ")
        least = statistics.median(row[limit] for row in rounds)
        share = statistics.median(row[limit] / row[f"ours_{state}_s"] for row in rounds)
        possible = statistics.median(row[f"stock_{state}_s"] / row[limit] for row in rounds)
        parts.append(f"{what} alone {least:.3f} s, {share:.2f} of ours, stock is {possible:.2f} of it")
    return "; ".join(parts) + ("" if times >= TIMES_AS_FAST else f"   below {TIMES_AS_FAST}")
