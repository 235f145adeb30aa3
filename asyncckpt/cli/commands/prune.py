"""List the committed checkpoints in a directory that exceed --keep, oldest first. With --delete, remove them.

These are always kept: the newest checkpoint (in the order of saves, not of steps), the best by --best, pinned ones,
those whose step is a multiple of --keep-period, those that are not in their mirror yet, and those that the worker is
writing. If the newest one is incomplete, all are kept. After a rollback to an earlier step, checkpoints of the
abandoned branch are removed first. A training with a CheckpointManager removes checkpoints itself: use the same policy
in both, or run this while no training saves to the directory.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any

from asyncckpt import __version__
from asyncckpt.basics.paths import current_umask
from asyncckpt.basics.quantities import count, human
from asyncckpt.cli.output import (
    action_of,
    add_delete,
    add_storage_options,
    existing_directory,
    path_argument,
    print_removals,
)
from asyncckpt.cli.worker_requests import add_endpoint, busy_paths
from asyncckpt.errors import ConfigError
from asyncckpt.maintenance.pins import pinned_in
from asyncckpt.maintenance.policy import BEST_MODES, RetentionPolicy
from asyncckpt.maintenance.retention import Pruned, Scores, Survey, prune, survey
from asyncckpt.storage.local import store_over
from asyncckpt.storage.store import Store

EXAMPLES = (
    "asyncckpt prune runs/a --keep 5",
    "asyncckpt prune runs/a --keep 5 --keep-period 10000 --delete",
    "asyncckpt prune runs/a --keep 3 --best val_loss --best-mode min --delete",
)

MAX_COUNT = 10**15


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "root", metavar="ROOT", type=path_argument, help="directory or URL that contains the checkpoints of a run"
    )
    parser.add_argument(
        "--keep",
        type=count(1, MAX_COUNT),
        required=True,
        metavar="N",
        help="number of checkpoints to keep, including the newest and the best",
    )
    parser.add_argument(
        "--keep-period",
        type=count(1, MAX_COUNT),
        metavar="K",
        help="in addition, keep checkpoints whose step is a multiple of K",
    )
    parser.add_argument("--best", metavar="METRIC", help="keep the checkpoint with the best value of this metric")
    parser.add_argument(
        "--best-mode",
        choices=BEST_MODES,
        default="min",
        help="whether the smallest or the largest value is the best (default: %(default)s)",
    )
    add_delete(parser)
    add_endpoint(parser)
    add_storage_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command; exit codes: 1 something could not be removed, 4 there is no such directory."""
    given, files = existing_directory(args.root)
    root = store_over(files).resolve(given)
    store = store_over(files, umask=current_umask())
    policy = RetentionPolicy(max_to_keep=args.keep, keep_period=args.keep_period, best_mode=args.best_mode)
    busy, worker = busy_paths(args)

    def score(metrics: Mapping[str, Any]) -> float:
        return float(metrics[args.best])

    scores = Scores(score) if args.best else None
    before = survey(root, store, score=scores)
    if args.best and before.stored and all(one.score is None for one in before.stored):
        raise ConfigError(f"--best {args.best}: no checkpoint has this metric", field="best", value=args.best)
    done = prune(
        root,
        store,
        policy,
        package=__version__,
        score=scores,
        busy=[os.path.basename(path) for path in busy if os.path.dirname(path) == root],
        delete=args.delete,
    )
    rows = [_row(args, root, one) for one in done]
    kept = _kept(before, done, store, root)
    return print_removals(
        args,
        {"root": root, "worker": worker, "kept": kept, "found": rows},
        [("STEP", [row["step"] for row in rows]), ("SIZE", [human(row["nbytes"]) for row in rows])],
        f"{len(kept)} checkpoints are kept",
        f"nothing to remove: {len(before.stored)} checkpoints in {args.root}, --keep {args.keep}",
    )


def _kept(before: Survey, done: list[Pruned], store: Store, root: str) -> list[dict[str, Any]]:
    given_up, pinned = {one.stored.name for one in done}, pinned_in(root, store)
    return [
        {"path": os.path.join(root, one.name), "step": one.step, "score": one.score, "pinned": one.name in pinned}
        for one in before.stored
        if one.name not in given_up
    ]


def _row(args: argparse.Namespace, root: str, one: Pruned) -> dict[str, Any]:
    return {
        "path": os.path.join(root, one.stored.name),
        "step": one.stored.step,
        "nbytes": one.stored.nbytes,
        "action": action_of(args, stays=not one.is_removed, failed=one.error is not None),
        "abandoned_branch": one.stored.is_abandoned,
        "why": one.kept,
        "error": str(one.error) if one.error else None,
    }
