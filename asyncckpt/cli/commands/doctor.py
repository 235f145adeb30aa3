"""Check whether this machine can run asyncckpt: memory for snapshots, kernel features, limits, and whether training and
worker processes can reach each other. With DIR, also check that directory's file system, or what the object store at
that URL can do, in a temporary directory or under a scratch name, which is removed again. Each check is ok, warn
(works, but slower or with restrictions) or fail. The exit code is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Iterator

from asyncckpt import __version__
from asyncckpt.basics.limits import MAX_RANKS
from asyncckpt.basics.paths import absolute_path, checkpoint_path, is_url
from asyncckpt.basics.quantities import count, parse_nbytes
from asyncckpt.cli.output import EXIT_FAILED, EXIT_OK, add_storage_options, path_argument, print_json, say
from asyncckpt.cli.worker_requests import status_of
from asyncckpt.doctor.bucket import bucket_checks
from asyncckpt.doctor.directory import directory_checks
from asyncckpt.doctor.findings import FAIL, WARN, Check, Finding, fail, findings_of, ok, warn
from asyncckpt.doctor.machine import machine_checks
from asyncckpt.errors import AsyncCkptError, WorkerUnavailableError
from asyncckpt.protocol.endpoint import socket_path
from asyncckpt.protocol.identity import has_exited
from asyncckpt.recall.session import RecallSession
from asyncckpt.recall.snapshots import endpoint_of
from asyncckpt.storage.files import Files
from asyncckpt.storage.locate import store_at

EXAMPLES = (
    "asyncckpt doctor",
    "asyncckpt doctor runs/a --state-bytes 40GB --ranks 8",
    "asyncckpt doctor s3://bucket/runs/a",
)
ANSWER_TIMEOUT_S = 1.0


def configure(parser: argparse.ArgumentParser) -> None:
    text = "directory or URL for checkpoints; it need not exist yet"
    parser.add_argument("directory", metavar="DIR", nargs="?", type=path_argument, help=text)
    parser.add_argument(
        "--state-bytes",
        type=parse_nbytes,
        metavar="N",
        help="size of the state that all ranks of this machine save together: 40GB, 1.5TiB, or bytes",
    )
    parser.add_argument(
        "--ranks",
        type=count(1, MAX_RANKS),
        default=1,
        metavar="N",
        help="number of ranks on this machine (default: %(default)s)",
    )
    add_storage_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command; exit code 1 if a check fails."""
    found: list[Finding] = []
    for finding in _findings(args):
        found.append(finding)
        if not args.json:
            _print(finding)
    code = EXIT_FAILED if any(one.status == FAIL for one in found) else EXIT_OK
    if args.json:
        print_json({"ok": code == EXIT_OK, "checks": [dataclasses.asdict(one) for one in found]})
        return code
    failed, warnings = (sum(one.status == status for one in found) for status in (FAIL, WARN))
    say(f"{len(found)} checks: {failed} failed, {warnings} warnings")
    if not args.directory:
        say("no directory was checked; to check one: asyncckpt doctor DIR")
    return code


def _findings(args: argparse.Namespace) -> Iterator[Finding]:
    yield from machine_checks(args.state_bytes, args.ranks, os.environ)
    yield from findings_of([Check("worker", _worker, "its status cannot be read", "see the check 'endpoint'", WARN)])
    if args.directory and is_url(args.directory):
        url = checkpoint_path(args.directory)
        yield from bucket_checks(url, store_at(url))
    elif args.directory:
        yield from directory_checks(absolute_path(args.directory), args.state_bytes, args.ranks, Files())


def _worker() -> Finding:
    endpoint = endpoint_of(None)
    if not os.path.exists(socket_path(endpoint)):
        return ok("no worker is running; the first save starts one", endpoint=endpoint)
    try:
        report = status_of(endpoint, ANSWER_TIMEOUT_S)
    except WorkerUnavailableError as error:
        text, advice = f"there is a worker's socket, but: {error}", "if saves fail too, run: asyncckpt worker stop"
        return warn(text, advice)
    try:  # connect as a trainer does: a trainer may be refused even if commands are not
        with RecallSession(endpoint, __version__, ANSWER_TIMEOUT_S) as found:
            if has_exited(found.worker.pid, found.worker.pid_start):
                text = f"the worker at {endpoint} is process {found.worker.pid}, which this PID namespace lacks"
                return fail(text, "run training and worker in one PID namespace: they need each other's /proc/<pid>")
    except AsyncCkptError as error:
        advice = "set ASYNCCKPT_JOB to a new name and unset ASYNCCKPT_ENDPOINT: then the job starts another worker"
        return fail(f"the training cannot use the worker at {endpoint}: {error}", advice)
    text = f"worker {report.get('pid')} answers; it knows {len(report.get('saves') or ())} recent saves"
    return ok(text, endpoint=endpoint, pid=report.get("pid"))


def _print(finding: Finding) -> None:
    say(f"{finding.status:4}  {finding.name}: {finding.text}")
    if finding.advice:
        say(f"      -> {finding.advice}")
