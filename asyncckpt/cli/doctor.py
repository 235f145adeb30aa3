"""`asyncckpt doctor`: is this machine, and a directory on it, fit for saving? Before a run begins; leaves nothing."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
from collections.abc import Iterator

from asyncckpt import __version__
from asyncckpt.cli.output import EXIT_FAILED, EXIT_OK, print_json, say
from asyncckpt.cli.worker import default_of_this_user, status_of
from asyncckpt.config import endpoint_from_environment
from asyncckpt.doctor.findings import FAIL, WARN, Finding, fail, ok, warn
from asyncckpt.doctor.memory import memory_checks
from asyncckpt.doctor.paces import learnt_paces
from asyncckpt.doctor.processes import process_checks
from asyncckpt.doctor.storage import nearest, storage_checks
from asyncckpt.errors import AsyncCkptError, WorkerUnavailableError
from asyncckpt.paths import absolute_path
from asyncckpt.protocol.endpoint import socket_path
from asyncckpt.protocol.identity import is_gone
from asyncckpt.recall.conversation import Conversation
from asyncckpt.storage.files import Files

HELP = "check this machine and a directory before a run"
DESCRIPTION = (
    "Check what a run needs of this machine: memory for the snapshots, what the kernel gives, limits, how processes "
    "meet; and with DIR what that directory's file system can do, by trying it out in a corner that is removed again, "
    "and how fast loads and saves went there before. "
    "Each line is ok, warn (it works, slower or with less) or fail; the exit code is 1 if any fails."
)
EXAMPLES = (
    "asyncckpt doctor",
    "asyncckpt doctor runs/a --state-bytes 40GB --ranks 8",
)
ANSWER_TIMEOUT_S = 1.0

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(i?)b?\Z", re.IGNORECASE)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("directory", metavar="DIR", nargs="?", help="where checkpoints will go; it need not be there")
    parser.add_argument(
        "--state-bytes",
        type=_nbytes,
        metavar="N",
        help="what the ranks of this machine save together: 40GB, 1.5TiB, or bytes",
    )
    parser.add_argument("--ranks", type=_count, default=1, metavar="N", help="of this machine (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _nbytes(text: str) -> int:
    found = _SIZE.match(text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: 40GB, 1.5TiB, 1000000")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** " kmgt".index(found[2].lower() or " "))


def _count(text: str) -> int:
    if int(text) < 1:
        raise ValueError("at least 1")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Run the command; exit code 1 when a check fails."""
    found: list[Finding] = []
    for finding in _findings(args):
        found.append(finding)
        if not args.json:
            _print(finding)
    code = EXIT_FAILED if any(one.status == FAIL for one in found) else EXIT_OK
    if args.json:
        print_json({"ok": code == EXIT_OK, "checks": [dataclasses.asdict(one) for one in found]})
        return code
    count = {status: sum(one.status == status for one in found) for status in (WARN, FAIL)}
    say(f"{len(found)} checks: {count[FAIL]} failed, {count[WARN]} warnings")
    if not args.directory:
        say("no directory was checked: asyncckpt doctor DIR")
    return code


def _findings(args: argparse.Namespace) -> Iterator[Finding]:
    yield from process_checks(args.state_bytes, args.ranks, os.environ)
    yield _worker()
    yield from memory_checks(args.state_bytes)
    if args.directory:
        directory, files = absolute_path(args.directory), Files()
        yield from storage_checks(directory, args.state_bytes, args.ranks, files)
        place = nearest(directory, files)
        if not isinstance(place, Finding):
            yield learnt_paces(place, endpoint_from_environment(), os.environ)


def _worker() -> Finding:
    try:
        endpoint = endpoint_from_environment() or default_of_this_user()
        if not os.path.exists(socket_path(endpoint)):
            return ok("worker", "none runs here; the first save starts one", endpoint=endpoint)
        report = status_of(endpoint, ANSWER_TIMEOUT_S)
    except WorkerUnavailableError as error:
        text, advice = f"there is a socket and nobody answers: {error}", "if saves fail too: asyncckpt worker stop"
        return warn("worker", text, advice)
    except AsyncCkptError as error:
        return warn("worker", f"cannot be asked: {error}", "see endpoint")
    try:  # as a trainer does: it may be refused although commands are not
        with Conversation(endpoint, __version__, ANSWER_TIMEOUT_S) as found:
            if is_gone(found.worker.pid, found.worker.pid_start):
                text = f"the one at {endpoint} is process {found.worker.pid}, which is not visible from here"
                return fail("worker", text, "let trainer and worker share a PID namespace, and see each other in /proc")
    except AsyncCkptError as error:
        advice = "see the reason; a job with an ASYNCCKPT_JOB of its own, and no ASYNCCKPT_ENDPOINT, starts another one"
        return fail("worker", f"a trainer cannot use the one at {endpoint}: {error}", advice)
    text = f"worker {report.get('pid')} answers, with {len(report.get('saves') or ())} saves that it remembers"
    return ok("worker", text, endpoint=endpoint, pid=report.get("pid"))


def _print(finding: Finding) -> None:
    say(f"{finding.status:4}  {finding.name}: {finding.text}")
    if finding.advice:
        say(f"      -> {finding.advice}")
