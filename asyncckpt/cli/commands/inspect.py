"""Show the contents of a checkpoint of any format: tensors with shapes and dtypes, shard files, objects, timings."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from asyncckpt.basics.quantities import human
from asyncckpt.cli.output import EXIT_OK, add_storage_options, given_path, path_argument, print_json, print_table, say
from asyncckpt.cli.progress import show_reads
from asyncckpt.errors import UnsupportedFormatError
from asyncckpt.format.names import split_per_rank_name
from asyncckpt.format.objects import decode_value
from asyncckpt.format.state_tree import OBJECT, composite_nodes, fqn_of, leaves, per_rank_nodes
from asyncckpt.interop.sources.detect import read_any
from asyncckpt.interop.sources.unread_leaves import UnreadLeaf
from asyncckpt.maintenance.mirroring import is_mirrored
from asyncckpt.storage.contents import NATIVE, Contents, SavedTensor, corrupt, read_objects
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import store_over
from asyncckpt.storage.locate import files_at

EXAMPLES = (
    "asyncckpt inspect runs/a/step-300",
    "asyncckpt inspect --stats runs/a/step-300",
    "asyncckpt inspect --json model.safetensors",
)
MAX_VALUE_CHARS = 60
_STATS = ("FQN", "MIN", "MAX", "MEAN", "STD", "ZEROS", "NAN", "INF")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", metavar="PATH", type=path_argument, help="a checkpoint of any format, directory or file"
    )
    parser.add_argument(
        "--stats",
        action="store_true",
        help="read all tensors; show minimum, maximum, mean, standard deviation, and counts of zeros, NaN, infinities",
    )
    add_storage_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command; exit codes: 3 damaged or incomplete, 4 not found, 1 unreadable."""
    path = given_path(args.path)
    files = files_at(path)
    contents = read_any(path, files)
    described = _describe(contents, files)
    if args.stats:
        _add_statistics(described, contents, files, quiet=args.json)
    if args.json:
        print_json(described)
    else:
        _print(described)
    return EXIT_OK


def _add_statistics(described: dict[str, Any], contents: Contents, files: Files, *, quiet: bool) -> None:
    """Add `stats` to each described tensor."""
    from asyncckpt.interop.statistics import statistics_of

    with show_reads(files, lambda: int(described["nbytes"]), quiet=quiet) as shown:
        found = {saved.fqn: asdict(stats) for saved, stats in statistics_of(contents, shown)}
    for tensor in described["tensors"]:
        tensor["stats"] = found[tensor["fqn"]]


def _describe(contents: Contents, files: Files) -> dict[str, Any]:
    manifest, shards = contents.manifest, _shards(contents)
    return {
        "path": contents.path,
        "kind": contents.kind,
        "layout": manifest.layout if contents.source is None else None,
        "step": manifest.step,
        "save_id": str(manifest.save_id),
        "created": manifest.created,
        "writer": manifest.writer,
        "fsync": manifest.fsync,
        "mirror": manifest.mirror,
        "is_mirrored": _is_mirrored(contents, files),
        "world_size": manifest.world_size,
        "nbytes": sum(shard["nbytes"] for shard in shards) if contents.source is not None else manifest.nbytes,
        "reused_nbytes": contents.reused_nbytes,
        "metadata": dict(manifest.metadata),
        "timings": dict(manifest.timings),
        "shards": shards,
        "tensors": [_tensor(contents, tensor) for tensor in contents.tensors.values()],
        "composites": _composites(contents),
        "objects": [found for rank in range(len(contents.ranks)) for found in _objects(contents, rank, files)],
    }


def _is_mirrored(contents: Contents, files: Files) -> bool | None:
    """Return whether it has been copied to its mirror; None: it has none, or this is the copy."""
    manifest = contents.manifest
    if manifest.mirror in (None, contents.path):
        return None
    return is_mirrored(contents.path, manifest.save_id, store_over(files))


def _shards(contents: Contents) -> list[dict[str, Any]]:
    """Return the shard files; `origin`: the earlier save that wrote the file, or None.

    A file of another format occurs once, even if it has several parts.
    """
    found: dict[str, dict[str, Any]] = {}
    for rank, rank_contents in enumerate(contents.ranks):
        for shard in rank_contents.index.shards:
            if shard.name:
                origin = None if shard.origin is None else str(shard.origin)
                described = {"rank": rank, "name": shard.name, "nbytes": shard.nbytes, "origin": origin}
                found.setdefault(shard.name, described)
    return list(found.values())


def _tensor(contents: Contents, tensor: SavedTensor) -> dict[str, Any]:
    """Describe a tensor: `fqn` is the stored name, `rank` its rank if it is stored per rank, `pieces` which rank wrote
    which box.
    """
    own = split_per_rank_name(tensor.fqn)
    return {
        "fqn": tensor.fqn,
        "rank": own[1] if own else None,
        "dtype": tensor.dtype,
        "shape": list(tensor.global_shape),
        "nbytes": sum(chunk.nbytes for _, chunk in tensor.chunks),
        "chunks": len(tensor.chunks),
        "pieces": [
            {
                "rank": rank,
                "part": chunk.part,
                "offsets": list(chunk.offsets),
                "sizes": list(chunk.sizes),
                "nbytes": chunk.nbytes,
            }
            for rank, chunk in tensor.chunks
        ],
        "shards": sorted({contents.ranks[rank].index.shards[chunk.part].name for rank, chunk in tensor.chunks}),
    }


def _composites(contents: Contents) -> list[dict[str, Any]]:
    """Describe the tensors that are stored as their components: `kind` is the class, or the layout or scheme."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for rank in contents.ranks:
        for path, node in composite_nodes(rank.structure.tree):
            described = {"fqn": fqn_of(path), "kind": node[3], "components": list(node[1][::2])}
            found.setdefault((described["fqn"], node[3]), described)
    return list(found.values())


def _objects(contents: Contents, rank: int, files: Files) -> Iterator[dict[str, Any]]:
    """Yield one rank's objects. `per_rank`: whether it is a `PerRank` value; `unread`: its class if unreadable."""
    tree = contents.ranks[rank].structure.tree
    values = read_objects(contents, rank, files)
    marked = {fqn_of(leaf) for path, node in per_rank_nodes(tree) for leaf, _ in leaves(node, path)}
    for path, node in leaves(tree):
        if node[0] == OBJECT:
            fqn = fqn_of(path)
            raw = values[node[1]]
            try:
                shown = raw.described() if isinstance(raw, UnreadLeaf) else _shown(raw)
            except UnsupportedFormatError:
                raise
            except ValueError as error:
                name = contents.ranks[rank].index.objects.name
                raise corrupt(contents.path, name, f"object {node[1]} does not decode: {error}") from error
            unread = {"unread": raw.kind} if isinstance(raw, UnreadLeaf) else {}
            yield {"rank": rank, "fqn": fqn, "per_rank": fqn in marked, "value": shown, **unread}


def _shown(raw: Any) -> str:
    """Return the `repr` of a value; if it contains an integer with thousands of digits, its JSON form.

    Raises:
        ValueError: It does not decode.
    """
    value = decode_value(raw)
    try:
        return repr(value)
    except ValueError:  # the interpreter's limit for decimal digits, sys.set_int_max_str_digits
        return json.dumps(raw)


def _print(described: dict[str, Any]) -> None:
    names = ["path", "kind", "created", "writer"]
    if described["kind"] == NATIVE:
        names += ["layout", "step", "save_id", "fsync", "world_size"]
    for name in names:
        say(f"{name}: {described[name]}")
    if described["is_mirrored"] is not None:
        say(f"mirror: {described['mirror']} ({'copied' if described['is_mirrored'] else 'not copied yet'})")
    reused = f", {human(described['reused_nbytes'])} of it in files of earlier saves"
    say(f"size: {human(described['nbytes'])}{reused if described['reused_nbytes'] else ''}")
    say("metadata: " + (", ".join(f"{k}={v}" for k, v in described["metadata"].items()) or "-"))
    if described["kind"] == NATIVE:
        say("timings: " + (", ".join(f"{k} {v:.3f} s" for k, v in described["timings"].items()) or "-"))
    say(f"\nshards: {len(described['shards'])}")
    print_table(
        ("RANK", "SIZE", "NAME", "WRITTEN BY"),
        [[str(s["rank"]), human(s["nbytes"]), s["name"], s["origin"] or "this save"] for s in described["shards"]],
    )
    say(f"\ntensors: {len(described['tensors'])}")
    print_table(("FQN", "DTYPE", "SHAPE", "SIZE", "CHUNKS", "RANKS"), _tensor_rows(described["tensors"]))
    if described["composites"]:
        say(f"\ntensors stored as components: {len(described['composites'])}")
        rows = [[one["fqn"], one["kind"], ", ".join(one["components"])] for one in described["composites"]]
        print_table(("FQN", "KIND", "COMPONENTS"), rows)
    if any("stats" in tensor for tensor in described["tensors"]):
        say("\nstatistics:")
        print_table(_STATS, [_stats_row(tensor) for tensor in described["tensors"]])
    say(f"\nobjects: {len(described['objects'])}")
    print_table(("FQN", "VALUE", "RANKS"), _object_rows(described["objects"]))


def _tensor_rows(tensors: list[dict[str, Any]]) -> list[list[str]]:
    """Return a row for each tensor. Per-rank tensors of one name, dtype and shape share a row: `x@rank[0-3]`."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for n, tensor in enumerate(tensors):
        alike = n if tensor["rank"] is None else tensor["fqn"].rpartition("@rank")[0]
        groups.setdefault((alike, tensor["dtype"], *tensor["shape"]), []).append(tensor)
    rows = []
    for group in groups.values():
        first, owners = group[0], [t["rank"] for t in group]
        writers = _ranks({piece["rank"] for t in group for piece in t["pieces"]})
        name = first["fqn"] if len(group) == 1 else f"{first['fqn'].rpartition('@rank')[0]}@rank[{_ranks(owners)}]"
        nbytes, chunks = sum(t["nbytes"] for t in group), sum(t["chunks"] for t in group)
        rows.append([name, first["dtype"], str(first["shape"]), human(nbytes), str(chunks), writers])
    return rows


def _stats_row(tensor: dict[str, Any]) -> list[str]:
    stats = tensor["stats"]
    numbers = ["-" if stats[name] is None else f"{stats[name]:.6g}" for name in ("minimum", "maximum", "mean", "std")]
    return [tensor["fqn"], *numbers, *(str(stats[name]) for name in ("zeros", "nans", "infinities"))]


def _object_rows(objects: list[dict[str, Any]]) -> list[list[str]]:
    """Return a row for each FQN and value, with the ranks that have it."""
    groups: dict[tuple[str, str], list[int]] = {}
    for found in objects:
        groups.setdefault((found["fqn"], found["value"]), []).append(found["rank"])
    return [[fqn, value[:MAX_VALUE_CHARS], _ranks(ranks)] for (fqn, value), ranks in groups.items()]


def _ranks(ranks: Iterable[int]) -> str:
    """Return ranks as ranges: `0-3,7`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(f"{low}-{high}" if high > low else str(low) for low, high in runs) or "-"
