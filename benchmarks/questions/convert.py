"""How fast are conversions, against a copy of the source's bytes?

The limits are measured beside the conversions in each round, with O_DIRECT and several block sizes and thread counts: a
copy, read and written at once and flushed, and a read. A conversion with `read_back=False` is compared with the fastest
copy of the round, the default, which reads its target back from the disk, with the fastest copy and the fastest read.
The source is not in the page cache. A round needs 2.2 times `--mib` of disk and 1.2 times of memory.
"""

from __future__ import annotations

import mmap
import warnings
from collections import defaultdict
from functools import partial
from pathlib import Path

import torch

import asyncckpt
from benchmarks import machine
from benchmarks.figures import Row
from benchmarks.limits import BUFFER_NBYTES, CHOICES, memory, move_s
from benchmarks.questions.load import save
from benchmarks.runner import Context, Question

TENSOR_NBYTES = 64 << 20
PAIRS = (
    *("dcp:safetensors", "dcp:torch", "torch:dcp", "torch:hf", "torch:asyncckpt"),
    *("asyncckpt:safetensors", "hf:asyncckpt"),
)
TRIES = CHOICES[1:4]
"""Of the limits; as many conversions are made beside them."""


def run(context: Context) -> Row:
    """Convert each pair of formats once beside each choice of the limits."""
    warnings.simplefilter("ignore")
    nbytes = context.facts["nbytes"] = context.options.mib << 20
    buffer, row = memory(BUFFER_NBYTES), Row()
    pairs = [pair.split(":") for pair in context.in_turn(PAIRS)]
    for kind in dict.fromkeys(source for source, _ in pairs):
        source = context.directory / f"source-{kind}"
        write_source(kind, source, max(1, nbytes // TENSOR_NBYTES), min(nbytes, TENSOR_NBYTES))
        for target in [target for of, target in pairs if of == kind]:
            row[f"{kind} to {target}"] = _pair(context, source, target, buffer)
        machine.remove(source)
    return row


def _pair(context: Context, source: Path, to: str, buffer: mmap.mmap) -> Row:
    largest = machine.largest_file(source)
    scale = sum(file.stat().st_size for file in machine.files_of(source)) / largest.stat().st_size
    copy, target = context.directory / "copy", context.directory / "target"
    found: Row = defaultdict(list)
    for choice in context.in_turn(TRIES):
        machine.drop_cache(source)
        found["copies_s"].append(scale * move_s(buffer, *choice, source=largest, target=copy))
        machine.remove(copy)
        machine.drop_cache(source)
        found["reads_s"].append(scale * move_s(buffer, *choice, source=largest))
        for name, read_back in (("once", False), ("read_back", True)):
            work = partial(asyncckpt.convert, source, target, to=to, read_back=read_back)  # imported before the clock
            machine.drop_cache(source)
            for key, value in machine.timed(work).items():
                found[f"{name}_{key}"].append(value)
            machine.remove(target)
    copy_s, copy_and_read_s = min(found["copies_s"]), min(found["copies_s"]) + min(found["reads_s"])
    found |= {"copy_share": [copy_s / s for s in found["once_s"]]}
    return found | {"copy_and_read_share": [copy_and_read_s / s for s in found["read_back_s"]]}


def write_source(kind: str, path: Path, n_tensors: int, nbytes: int) -> None:
    """Write a checkpoint of `n_tensors` tensors of `nbytes` each, in one of the formats that are converted."""
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    values = torch.randn(nbytes // 4096, 1024)
    state = {f"w{n}": values + n for n in range(n_tensors)}
    if kind == "torch":
        torch.save(state, path)
    elif kind == "dcp":
        dcp_save(state, checkpoint_id=str(path), no_dist=True)
    elif kind == "hf":
        whole = path.with_name("whole.pt")
        torch.save(state, whole)
        asyncckpt.convert(whole, path, to="hf", max_shard_bytes=1 << 30, read_back=False)
        whole.unlink()
    else:
        save(state, path)


QUESTION = Question(
    run,
    ["*/once_s", "*/once_cpu_s", "*/copy_share", "*/read_back_s", "*/copy_and_read_share", "*/copies_s"],
    options={"mib": 4096},
    smallest="--mib 4",
    rounds=3,
)
