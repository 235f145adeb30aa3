"""`asyncckpt prune`: retention by hand; says which checkpoints would go, and removes them when asked to."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any

from asyncckpt import __version__
from asyncckpt.cli.output import EXIT_FAILED, EXIT_OK, print_json, print_table, say
from asyncckpt.cli.under_way import asked_whom, busy_paths
from asyncckpt.errors import CheckpointNotFoundError, ConfigError
from asyncckpt.retention.pins import pinned_in
from asyncckpt.retention.policy import BEST_MODES, RetentionPolicy
from asyncckpt.retention.pruning import Pruned, Survey, prune, survey
from asyncckpt.sizes import human
from asyncckpt.staging.umask import current_umask
from asyncckpt.storage.files import Files

HELP = "list the checkpoints that a retention policy gives up, and remove them with --delete"
DESCRIPTION = (
    "List the committed checkpoints of a directory that are more than --keep, oldest first; with --delete, remove "
    "them. Never the newest one, by run and save, nor the best by --best, nor one that is pinned or whose step is "
    "a multiple of --keep-period, nor one that the worker writes to; and nothing at all while the newest one is "
    "not whole. After going back to an earlier step, what the new branch does not come from goes first. A "
    "training with a CheckpointManager prunes by itself: give both the same policy, or run this when none saves "
    "there."
)
EXAMPLES = (
    "asyncckpt prune runs/a --keep 5",
    "asyncckpt prune runs/a --keep 5 --keep-period 10000 --delete",
    "asyncckpt prune runs/a --keep 3 --best val_loss --best-mode min --delete",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("root", metavar="ROOT", help="directory that holds the checkpoints of a run")
    parser.add_argument(
        "--keep", type=int, required=True, metavar="N", help="how many stay, the newest and the best too"
    )
    parser.add_argument("--keep-period", type=int, metavar="K", help="those whose step is a multiple of K stay on top")
    parser.add_argument("--best", metavar="METRIC", help="the one that is best by this metric of its save stays")
    parser.add_argument("--best-mode", choices=BEST_MODES, default="min", help="(default: %(default)s)")
    parser.add_argument("--delete", action="store_true", help="remove them; without this nothing is changed")
    parser.add_argument(
        "--endpoint", help="of the worker that is asked (default: $ASYNCCKPT_ENDPOINT, else the user's)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Run the command; exit code 1 when something could not be removed, 4 when there is no such directory."""
    files, root = Files(), os.path.realpath(args.root)
    if not os.path.isdir(root):
        raise CheckpointNotFoundError(f"{args.root} is no directory", path=root)
    policy = RetentionPolicy(max_to_keep=args.keep, keep_period=args.keep_period, best_mode=args.best_mode)
    busy, worker = busy_paths(args.endpoint)

    def score(metrics: Mapping[str, Any]) -> float:
        return float(metrics[args.best])

    before = survey(root, files, score=score if args.best else None)
    if args.best and before.stored and all(one.score is None for one in before.stored):
        raise ConfigError(f"--best {args.best}: no checkpoint has such a metric", field="best", value=args.best)
    done = prune(
        root,
        files,
        policy,
        umask=current_umask(),
        package=__version__,
        score=score if args.best else None,
        busy=[os.path.basename(path) for path in busy if os.path.dirname(path) == root],
        delete=args.delete,
    )
    rows = [_row(root, one, deleted=args.delete) for one in done]
    if args.json:
        print_json({"root": root, "worker": worker, "kept": _kept(before, done, files, root), "found": rows})
    else:
        _print(args, before, rows, worker)
    return EXIT_FAILED if any(row["error"] for row in rows) else EXIT_OK


def _kept(before: Survey, done: list[Pruned], files: Files, root: str) -> list[dict[str, Any]]:
    given_up, pinned = {one.stored.name for one in done}, pinned_in(root, files)
    return [
        {"path": os.path.join(root, one.name), "step": one.step, "score": one.score, "pinned": one.name in pinned}
        for one in before.stored
        if one.name not in given_up
    ]


def _row(root: str, one: Pruned, *, deleted: bool) -> dict[str, Any]:
    action = "failed" if one.error else "kept" if not one.is_removed else "removed" if deleted else "would go"
    return {
        "path": os.path.join(root, one.stored.name),
        "step": one.stored.step,
        "nbytes": one.stored.nbytes,
        "action": action,
        "abandoned_branch": one.stored.is_abandoned,
        "why": one.kept,
        "error": str(one.error) if one.error else None,
    }


def _print(args: argparse.Namespace, before: Survey, rows: list[dict[str, Any]], worker: str) -> None:
    if not rows:
        say(f"nothing to remove: {len(before.stored)} checkpoints in {args.root}, --keep {args.keep}")
        return
    print_table(
        ("ACTION", "STEP", "SIZE", "PATH"),
        [[r["action"], str(r["step"]), human(r["nbytes"]), _where(r)] for r in rows],
    )
    say(f"{len(before.stored) - len(rows)} stay; {asked_whom(worker)}")
    would = sum(row["nbytes"] for row in rows if row["action"] == "would go")
    if would:
        say(f"nothing was changed: --delete removes {human(would)}")


def _where(row: dict[str, Any]) -> str:
    reason = row["error"] or row["why"] or ("left behind by a rollback" if row["abandoned_branch"] else "")
    return f"{row['path']} ({reason})" if reason else str(row["path"])
