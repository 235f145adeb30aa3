"""Checks of how trainer and worker meet: processes, limits, the socket's directory, the software they are made of."""

from __future__ import annotations

import errno
import importlib.metadata
import itertools
import os
import platform
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping

from asyncckpt import __version__
from asyncckpt.doctor.findings import Finding, fail, ok, reason, warn
from asyncckpt.errors import AsyncCkptError, UnsupportedPlatformError, WorkerUnavailableError
from asyncckpt.memory.arena import SlotMemory
from asyncckpt.memory.slot import SlotError
from asyncckpt.protocol.dealer import check_descriptors
from asyncckpt.protocol.endpoint import check_directory, default_endpoint, places, socket_path
from asyncckpt.sizes import human

PROBE_NBYTES = 1 << 20
CHILD_TIMEOUT_S = 10.0
FDS_PER_RANK, FDS_AT_LEAST = 16, 128
"""A handful of slots, pidfds and connections a rank; files being written, and Python's own. Chosen, not measured."""

NEEDED = {"torch": "2.6", "psutil": "5.9", "pyzmq": "25.1", "msgpack": "1.0.5", "xxhash": "3.2"}
"""As pyproject.toml has them; a test compares."""

_PYTHON = (3, 10)
_WRITTEN_S = 1_735_689_600.0
"""1 January 2025: no clock that goes right is before it."""

_CHILD = """
import os, sys
fd = os.open(f"/proc/{sys.argv[1]}/fd/{sys.argv[2]}", os.O_RDWR)
mine = os.memfd_create("asyncckpt-doctor")
print(mine, flush=True)
sys.stdin.read()
"""


def process_checks(state_nbytes: int | None, ranks: int, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the findings.

    Args:
        state_nbytes: What the ranks of this machine save together; None: not known.
        ranks: On this machine.
        environ: For the endpoint.
    """
    yield _kernel()
    yield _pidfd()
    yield _proc()
    yield _open_files(ranks)
    yield _file_size(state_nbytes)
    yield _endpoint(environ)
    yield _software()
    yield _clock()


def _kernel() -> Finding:
    text = f"{platform.system()} {platform.release()}"
    if platform.system() != "Linux":
        return fail("kernel", f"{text}: asyncckpt needs Linux", "run it on Linux")
    return ok("kernel", text, release=platform.release())


def _pidfd() -> Finding:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as raised:  # the first: a Python that was built without
        error = raised if isinstance(raised, OSError) else OSError(errno.ENOSYS, "this Python has none")
        text = f"no pidfds ({reason(error)}): a process's end is learnt from /proc every 200 ms, not at once"
        return warn(
            "pidfd", text, "nothing needs to be done, for trainer or worker; Linux has pidfds since 5.3", pidfd=False
        )
    return ok("pidfd", "the end of a process is learnt at once, by pidfd", pidfd=True)


def _proc() -> Finding:
    """Open a slot of this process in another one, and the other way round: as trainer and worker do."""
    advice = "run trainer and worker as one user, in one PID namespace, and let them read each other's /proc/<pid>/fd"
    facts = {"ptrace_scope": _read("/proc/sys/kernel/yama/ptrace_scope"), "hidepid": _hidepid()}
    try:
        slot = SlotMemory.create(PROBE_NBYTES)
    except (OSError, SlotError, UnsupportedPlatformError) as error:
        return fail("processes", f"cannot be tried, there is no memory to share: {error}", "see slots", **facts)
    arguments = [sys.executable, "-I", "-S", "-c", _CHILD, str(os.getpid()), str(slot.fd)]
    try:
        with subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            number = child.stdout.readline().strip()  # it ends with the child, which waits for nothing before it
            try:
                if number:
                    os.close(os.open(f"/proc/{child.pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC))
            except OSError as error:
                return fail("processes", f"a worker cannot open a trainer's slots: {reason(error)}", advice, **facts)
            finally:
                _, said = child.communicate(timeout=CHILD_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        return fail("processes", f"a second process cannot be started: {error}", "raise ulimit -u", **facts)
    finally:
        slot.close()
    if not number:
        why = said.strip().splitlines()[-1:] or ["it said nothing"]
        return fail("processes", f"a trainer cannot open a worker's slots: {why[0]}", advice, **facts)
    return ok("processes", "processes of this user open each other's slots by /proc/<pid>/fd", **facts)


def _read(path: str) -> str | None:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return None


def _hidepid() -> str | None:
    for line in (_read("/proc/mounts") or "").splitlines():
        fields = line.split()
        if len(fields) > 3 and fields[1] == "/proc":
            return next((one.partition("=")[2] for one in fields[3].split(",") if one.startswith("hidepid=")), None)
    return None


def _open_files(ranks: int) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        check_descriptors("its endpoint")
    except WorkerUnavailableError as error:
        return fail("open files", str(error), "raise it (ulimit -n), and allow eventfd(2)", limit=soft)
    wanted = FDS_AT_LEAST + FDS_PER_RANK * ranks
    limit = None if soft == resource.RLIM_INFINITY else soft
    text = (
        "no limit for open files" if limit is None else f"{limit} open files a process (ulimit -n), {wanted} are enough"
    )
    if limit is not None and limit < wanted:
        most = "no limit" if hard == resource.RLIM_INFINITY else str(hard)
        return warn(
            "open files", f"{text} for {ranks} ranks", f"raise it: ulimit -n {wanted} (at most: {most})", limit=limit
        )
    return ok("open files", text, limit=limit)


def _file_size(state_nbytes: int | None) -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if soft == resource.RLIM_INFINITY:
        return ok("file size", "no limit for the size of a file", limit_nbytes=None)
    text = f"no file may be larger than {human(soft)} (ulimit -f)"
    advice = "raise it, or set max_shard_bytes below it"
    if state_nbytes is not None and soft < state_nbytes:
        return fail(
            "file size", f"{text}, and a rank's file may be of {human(state_nbytes)}", advice, limit_nbytes=soft
        )
    return warn("file size", text, advice, limit_nbytes=soft)


def _endpoint(environ: Mapping[str, str]) -> Finding:
    """Look at the directory of the endpoint that a training with this environment takes."""
    named = environ.get("ASYNCCKPT_ENDPOINT")
    if not named:
        return _default_place(environ)
    advice = "choose another: ASYNCCKPT_ENDPOINT=ipc:///a/short/directory/of/yours/name.sock"
    facts = {"endpoint": named}
    try:
        check_directory(named)
        directory = os.path.dirname(socket_path(named))
    except AsyncCkptError as error:
        return fail("endpoint", str(error), advice, **facts)
    if not os.path.lexists(directory):
        return _new_endpoint(directory, advice, facts)
    return ok("endpoint", f"trainer and worker meet in {directory}, which is this user's alone", **facts)


def _default_place(environ: Mapping[str, str]) -> Finding:
    found = places(environ, os.geteuid())
    taken = next((place.directory for place in found if not place.refusal), None)
    refusals = list(itertools.takewhile(bool, (place.refusal for place in found)))
    if taken is None:
        text = f"no directory is fit for the worker's socket: {'; '.join(place.refusal for place in found)}"
        return fail("endpoint", text, "set ASYNCCKPT_ENDPOINT=ipc:///a/short/directory/of/yours/name.sock")
    endpoint = default_endpoint(environ, uid=os.geteuid(), package=__version__, interpreter=sys.prefix)
    there = "which is this user's alone" if os.path.isdir(taken) else "which will be made"
    text = f"trainer and worker meet in {taken}, {there}"
    if refusals:
        text += f"; passed over: {'; '.join(refusals)}"
    return ok("endpoint", text, endpoint=endpoint, passed_over=refusals)


def _new_endpoint(directory: str, advice: str, facts: Mapping[str, str]) -> Finding:
    above = os.path.dirname(directory)
    while not os.path.isdir(above) and above != os.path.dirname(above):
        above = os.path.dirname(above)
    if not os.access(above, os.W_OK | os.X_OK):
        return fail("endpoint", f"{directory} cannot be made: {above} is not writable for this user", advice, **facts)
    return ok("endpoint", f"trainer and worker will meet in {directory}, which will be made", **facts)


def _software() -> Finding:
    found = {name: _version_of(name) for name in NEEDED}
    facts = {"python": platform.python_version(), "asyncckpt": __version__, **found}
    text = ", ".join(f"{name} {version or 'missing'}" for name, version in facts.items())
    wrong = [f"{name}>={NEEDED[name]}" for name, version in found.items() if not _is_at_least(version, NEEDED[name])]
    if wrong:
        return fail("software", text, f"install {', '.join(wrong)}", **facts)
    if sys.version_info < _PYTHON:
        return fail("software", text, f"use Python {_PYTHON[0]}.{_PYTHON[1]} or later", **facts)
    return ok("software", text, **facts)


def _version_of(name: str) -> str | None:
    """Without importing it, which takes seconds for torch."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _is_at_least(version: str | None, wanted: str) -> bool:
    return version is not None and _numbers(version) >= _numbers(wanted)


def _numbers(version: str) -> list[int]:
    found = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    return [int(part) for part in found[0].split(".")] if found else []


def _clock() -> Finding:
    now = time.time()
    text = time.strftime("the clock says %Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if now < _WRITTEN_S:
        return warn(
            "clock", f"{text}, which is in the past: ages and dates of checkpoints will be wrong", "set the clock"
        )
    return ok("clock", text)
