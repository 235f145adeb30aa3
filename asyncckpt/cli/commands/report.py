"""Make a self-contained HTML page about the saves in ROOT: step times, stalls of the training, what each rank was
doing, how much training a crash would have lost, and a table of the saves. It reads the manifests, and events.jsonl in
ROOT, which is written by trainings with events=True (or ASYNCCKPT_EVENTS=1) and by workers with --events. Without
events, some charts are missing. The charts need matplotlib (the extra `report`). With --json, print the data instead.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

from asyncckpt import __version__
from asyncckpt.basics.paths import absolute_path
from asyncckpt.cli.output import EXIT_OK, existing_directory, path_argument, print_json, say
from asyncckpt.errors import CheckpointNotFoundError, ConfigError
from asyncckpt.format.manifest import Manifest
from asyncckpt.maintenance.event_log import EVENTS_NAME, ROTATED_NAME, read_events
from asyncckpt.maintenance.mirroring import unmirrored_in
from asyncckpt.reporting.charts import can_draw
from asyncckpt.reporting.history import History, SaveRecord, history_of, recovery_points
from asyncckpt.reporting.page import NO_CHARTS, page
from asyncckpt.storage.catalog import scan
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import store_over

EXAMPLES = (
    "asyncckpt report runs/a",
    "asyncckpt report runs/a -o /tmp/a.html",
    "asyncckpt report runs/a --json",
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "root", metavar="ROOT", type=path_argument, help="directory that contains the checkpoints of a run"
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=path_argument, help="file to write (default: report.html in ROOT)"
    )


def run(args: argparse.Namespace) -> int:
    """Run the command; exit code 4 if there is neither an event nor a checkpoint."""
    root, files = existing_directory(args.root)
    if args.json and args.output:
        raise ConfigError("--json writes no page: leave out --output", field="output", value=args.output)
    history = history_of(read_events(root), _manifests(root, files))
    unmirrored = {one.save_id for one in unmirrored_in(root, store_over(files))}
    for save in history.saves:
        save.is_unmirrored = save.save_id in unmirrored
    if not history.saves:
        raise CheckpointNotFoundError(
            f"{args.root} contains no checkpoints, and no events of saves in {EVENTS_NAME} or {ROTATED_NAME}",
            path=root,
        )
    if args.json:
        print_json(_described(root, history))
        return EXIT_OK
    output = absolute_path(args.output or os.path.join(root, "report.html"))
    text = page(args.root, history, now=time.time(), package=__version__)
    temporary = f"{output}.tmp-{os.getpid()}"
    try:
        with open(temporary, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
        os.replace(temporary, output)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
    say(f"{output}: {len(history.saves)} saves, {history.n_events} events")
    if not can_draw():
        say(NO_CHARTS)
    return EXIT_OK


def _manifests(root: str, files: Files) -> Iterator[tuple[str, Manifest]]:
    for found in scan(root, store_over(files)):
        if found.manifest is not None:
            yield os.path.basename(found.path), found.manifest


def _described(root: str, history: History) -> dict[str, Any]:
    return {
        "root": root,
        "events": history.n_events,
        "saves": [_save(save) for save in history.saves],
        "spans": [
            {"t": s.at, "step": s.step, "mean_s": s.mean_s, "longest_s": s.longest_s, "waited_s": s.waited_s}
            for s in history.spans
        ],
        "recovery_points": [{"t": t, "taken": at} for t, at in recovery_points(history.saves, memory=False)],
    }


def _save(save: SaveRecord) -> dict[str, Any]:
    names = ("save_id", "step", "name", "outcome", "begun", "sealed", "ended", "nbytes", "stall_s", "write_s")
    return {name: getattr(save, name) for name in (*names, "seconds", "error", "is_unmirrored")}
