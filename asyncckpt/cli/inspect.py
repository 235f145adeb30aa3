"""`asyncckpt inspect`: what a checkpoint holds: tensors, shapes, dtypes, shards, objects, timings."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from asyncckpt.cli.output import EXIT_OK, human, print_json, print_table
from asyncckpt.format.objects import decode_value
from asyncckpt.format.tree import fqn_of, leaves
from asyncckpt.storage.contents import Contents, corrupt, read_contents, read_objects
from asyncckpt.storage.files import Files

HELP = "show what a checkpoint holds: tensors, shards, objects, timings"
EXAMPLE = "asyncckpt inspect runs/a/step-300"
MAX_VALUE_CHARS = 60


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("path", metavar="PATH", help="a checkpoint's directory")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Run the command; exit codes 3 for a damaged or incomplete checkpoint, 4 for none, 1 for an unreadable one."""
    files = Files()
    contents = read_contents(os.path.abspath(args.path), files)
    described = _describe(contents, files)
    if args.json:
        print_json(described)
    else:
        _print(described)
    return EXIT_OK


def _describe(contents: Contents, files: Files) -> dict[str, Any]:
    manifest = contents.manifest
    tensors = []
    for tensor in contents.tensors.values():
        shards = sorted({contents.ranks[rank].index.shards[chunk.part].name for rank, chunk in tensor.chunks})
        tensors.append(
            {
                "fqn": tensor.fqn,
                "dtype": tensor.dtype,
                "shape": list(tensor.global_shape),
                "nbytes": sum(chunk.nbytes for _, chunk in tensor.chunks),
                "chunks": len(tensor.chunks),
                "shards": shards,
            }
        )
    objects = []
    for rank, rank_contents in enumerate(contents.ranks):
        values = read_objects(contents, rank, files)
        for path, node in leaves(rank_contents.structure.tree):
            if node[0] == "O":
                try:
                    shown = _shown(values[node[1]])
                except ValueError as error:
                    name = rank_contents.index.objects.name
                    raise corrupt(contents.path, name, f"object {node[1]} does not decode: {error}") from error
                objects.append({"rank": rank, "fqn": fqn_of(path), "value": shown})
    return {
        "path": contents.path,
        "step": manifest.step,
        "save_id": str(manifest.save_id),
        "created": manifest.created,
        "writer": manifest.writer,
        "fsync": manifest.fsync,
        "world_size": manifest.world_size,
        "nbytes": manifest.nbytes,
        "metadata": dict(manifest.metadata),
        "timings": dict(manifest.timings),
        "shards": [
            {"rank": rank, "name": shard.name, "nbytes": shard.nbytes}
            for rank, rank_contents in enumerate(contents.ranks)
            for shard in rank_contents.index.shards
        ],
        "tensors": tensors,
        "objects": objects,
    }


def _shown(raw: Any) -> str:
    """Return a value as Python writes it; one with an integer of thousands of digits as the file has it.

    Raises:
        ValueError: It does not decode.
    """
    value = decode_value(raw)
    try:
        return repr(value)
    except ValueError:  # the interpreter's limit for decimal digits, sys.set_int_max_str_digits
        return json.dumps(raw)


def _print(described: dict[str, Any]) -> None:
    for name in ("path", "step", "save_id", "created", "writer", "fsync", "world_size"):
        print(f"{name}: {described[name]}")
    print(f"size: {human(described['nbytes'])}")
    print("metadata: " + (", ".join(f"{k}={v}" for k, v in described["metadata"].items()) or "-"))
    print("timings: " + (", ".join(f"{k} {v:.3f} s" for k, v in described["timings"].items()) or "-"))
    print(f"\nshards: {len(described['shards'])}")
    print_table(
        ("RANK", "SIZE", "NAME"), [[str(s["rank"]), human(s["nbytes"]), s["name"]] for s in described["shards"]]
    )
    print(f"\ntensors: {len(described['tensors'])}")
    rows = [[t["fqn"], t["dtype"], str(t["shape"]), human(t["nbytes"]), str(t["chunks"])] for t in described["tensors"]]
    print_table(("FQN", "DTYPE", "SHAPE", "SIZE", "CHUNKS"), rows)
    print(f"\nobjects: {len(described['objects'])}")
    cut = [[o["fqn"], o["value"][:MAX_VALUE_CHARS], str(o["rank"])] for o in described["objects"]]
    print_table(("FQN", "VALUE", "RANK"), cut)
