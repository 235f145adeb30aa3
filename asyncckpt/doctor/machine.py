"""Checks of this machine: whether training and worker reach each other, memory for snapshots, limits, software."""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import platform
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping

import psutil

from asyncckpt import __version__
from asyncckpt.basics.quantities import human
from asyncckpt.doctor.directory import nearest_existing
from asyncckpt.doctor.findings import Check, Finding, fail, findings_of, ok, reason, warn
from asyncckpt.errors import AsyncCkptError, WorkerUnavailableError
from asyncckpt.memory.arena import SlotMemory
from asyncckpt.memory.headroom import RESERVE_NBYTES, cgroup_limit
from asyncckpt.protocol.dealer import check_descriptors
from asyncckpt.protocol.endpoint import check_directory, default_endpoint, places, socket_path
from asyncckpt.storage.files import Files

OVERHEAD_NBYTES = 200 << 20
"""Memory that trainer and worker need in addition to the slots (docs/guarantees.md, P11)."""

PROBE_NBYTES = 1 << 20
CHILD_TIMEOUT_S = 10.0
FDS_PER_RANK, FDS_AT_LEAST = 16, 128
"""File descriptors: for each rank, slots, pidfds and connections; in addition, files being written, and Python's own.
Chosen, not measured."""

NEEDED = {"torch": "2.6", "psutil": "5.9", "pyzmq": "25.1", "msgpack": "1.0.5", "xxhash": "3.2"}
"""The same as in pyproject.toml; a test compares them."""

_PYTHON = (3, 10)
_WRITTEN_S = 1_735_689_600.0
"""1 January 2025, in seconds since 1970. A clock with an earlier time is wrong."""

_ENDPOINT_ADVICE = "choose another path, for example ASYNCCKPT_ENDPOINT=ipc:///run/user/1000/asyncckpt.sock"
_PROC_ADVICE = "mount proc on /proc (mount -t proc proc /proc): the worker needs it"
_SLOTS_ADVICE = (
    "allow memfd_create(2) with seals in this container's seccomp profile; Linux has it since 3.17. For ENOMEM, free "
    "memory, or raise the limit"
)
_CHILD = """
import os, sys
fd = os.open(f"/proc/{sys.argv[1]}/fd/{sys.argv[2]}", os.O_RDWR)
mine = os.memfd_create("asyncckpt-doctor")
print(mine, flush=True)
sys.stdin.read()
"""


def machine_checks(state_nbytes: int | None, ranks: int, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the findings about this machine.

    Args:
        state_nbytes: Bytes that all ranks of this machine save together; None: not known.
        ranks: Number of ranks on this machine.
        environ: Environment variables, which determine the endpoint.
    """
    named = environ.get("ASYNCCKPT_ENDPOINT")
    return findings_of(
        (
            Check("kernel", _kernel),
            Check("pidfd", _pidfd),
            Check("processes", _processes),
            Check("open files", lambda: _open_files(ranks)),
            Check("file size", lambda: _file_size(state_nbytes)),
            Check("endpoint", lambda: _named_endpoint(named) if named else _endpoint(environ)),
            Check("software", _software),
            Check("clock", _clock),
            Check("memory", lambda: _memory(state_nbytes), "/proc/meminfo does not show the free memory", _PROC_ADVICE),
            Check("slots", _slots, "shared memory for snapshots (a sealed memfd) cannot be created", _SLOTS_ADVICE),
            Check("huge pages", _huge_pages),
            Check("locked memory", lambda: _locked(state_nbytes)),
        )
    )


def _kernel() -> Finding:
    text = f"{platform.system()} {platform.release()}"
    if platform.system() != "Linux":
        return fail(f"{text}: asyncckpt needs Linux", "run it on Linux")
    return ok(text, release=platform.release())


def _pidfd() -> Finding:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:  # AttributeError: Python was built without it
        text = f"pidfds are not available ({reason(error)}): /proc is polled every 200 ms for the end of a process"
        advice = "no action is needed; Linux has pidfds since 5.3"
        return warn(text, advice, pidfd=False)
    return ok("the end of a process is detected immediately, by pidfd", pidfd=True)


def _processes() -> Finding:
    hidepid = re.search(r"^\S+ /proc \S+ \S*hidepid=([^,\s]*)", _read("/proc/mounts"), re.MULTILINE)
    facts = {
        "ptrace_scope": _read("/proc/sys/kernel/yama/ptrace_scope") or None,
        "hidepid": hidepid[1] if hidepid else None,
    }
    try:
        refusal = _refused_memory()
    except OSError as error:
        refusal = f"this check could not start a process: {reason(error)}; see the check 'slots', or raise ulimit -u"
    if refusal:
        advice = "run training and worker as one user in one PID namespace; let them read each other's /proc/<pid>/fd"
        return fail(refusal, advice, **facts)
    return ok("processes of this user can open each other's memory through /proc/<pid>/fd", **facts)


def _refused_memory() -> str:
    """Open memory of this process in a child process, and vice versa; return the error text, "" if both worked."""
    mine = os.memfd_create("asyncckpt-doctor", os.MFD_CLOEXEC)
    command = [sys.executable, "-I", "-S", "-c", _CHILD, str(os.getpid()), str(mine)]
    pipe = subprocess.PIPE
    with open(mine), subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, stderr=pipe) as child:
        assert child.stdout is not None
        deadline = threading.Timer(CHILD_TIMEOUT_S, child.kill)
        deadline.start()
        number = child.stdout.readline().strip()
        try:
            if number:
                os.close(os.open(f"/proc/{child.pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            return f"a worker cannot open a trainer's slots: {reason(error)}"
        finally:
            _, said = child.communicate()
            deadline.cancel()
    why = said.strip().rpartition("\n")[2] or "the child process printed no error"
    return "" if number else f"a trainer cannot open a worker's slots: {why}"


def _read(path: str) -> str:
    """Return the text of a file in /proc or /sys; "" if it does not exist."""
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


def _limit(resource_number: int) -> int | None:
    """Return a resource limit of this process; None: unlimited."""
    soft, _ = resource.getrlimit(resource_number)
    return None if soft == resource.RLIM_INFINITY else soft


def _open_files(ranks: int) -> Finding:
    limit, wanted = _limit(resource.RLIMIT_NOFILE), FDS_AT_LEAST + FDS_PER_RANK * ranks
    try:
        check_descriptors("its endpoint")
    except WorkerUnavailableError as error:
        return fail(str(error), "raise it (ulimit -n), and allow eventfd(2)", limit=limit)
    if limit is None:
        return ok("no limit for open files", limit=limit)
    text = f"{limit} open files are allowed (ulimit -n), {wanted} are sufficient"
    if limit < wanted:
        return warn(f"{text} for {ranks} ranks", f"raise the limit: ulimit -n {wanted}", limit=limit)
    return ok(text, limit=limit)


def _file_size(state_nbytes: int | None) -> Finding:
    limit = _limit(resource.RLIMIT_FSIZE)
    if limit is None:
        return ok("no limit for the size of a file", limit_nbytes=None)
    text = f"files may not be larger than {human(limit)} (ulimit -f)"
    advice = "raise the limit, or set max_shard_bytes below it"
    if state_nbytes is not None and limit < state_nbytes:
        text = f"{text}, but a rank's file may have {human(state_nbytes)}"
        return fail(text, advice, limit_nbytes=limit)
    return warn(text, advice, limit_nbytes=limit)


def _named_endpoint(named: str) -> Finding:
    """Check the directory of the endpoint in the environment."""
    try:
        check_directory(named)
    except AsyncCkptError as error:
        return fail(str(error), _ENDPOINT_ADVICE, endpoint=named)
    directory = os.path.dirname(socket_path(named))
    above = nearest_existing(directory, Files())
    if above == directory:
        return ok(f"the worker's socket is created in {directory}, which only this user can access", endpoint=named)
    if not (os.path.isdir(above) and os.access(above, os.W_OK | os.X_OK)):
        text = f"{directory} cannot be created: {above} is not a directory that this user can write to"
        return fail(text, _ENDPOINT_ADVICE, endpoint=named)
    return ok(f"the worker's socket is created in {directory}, which will be created first", endpoint=named)


def _endpoint(environ: Mapping[str, str]) -> Finding:
    """Check the directory of the default endpoint."""
    found = places(environ, os.geteuid())
    refusals = list(itertools.takewhile(bool, (place.refusal for place in found)))
    if len(refusals) == len(found):
        return fail(f"no directory can be used for the worker's socket: {'; '.join(refusals)}", _ENDPOINT_ADVICE)
    taken = found[len(refusals)].directory
    there = "which only this user can access" if os.path.isdir(taken) else "which will be created first"
    passed_over = f"; directories that cannot be used: {'; '.join(refusals)}" if refusals else ""
    endpoint = default_endpoint(environ, uid=os.geteuid(), package=__version__, interpreter=sys.prefix)
    text = f"the worker's socket is created in {taken}, {there}{passed_over}"
    return ok(text, endpoint=endpoint, passed_over=refusals)


def _software() -> Finding:
    found = {name: _version_of(name) for name in NEEDED}
    facts = {"python": platform.python_version(), "asyncckpt": __version__, **found}
    text = ", ".join(f"{name} {version or 'missing'}" for name, version in facts.items())
    wrong = [f"{name}>={least}" for name, least in NEEDED.items() if _numbers(found[name]) < _numbers(least)]
    if wrong:
        return fail(text, f"install {', '.join(wrong)}", **facts)
    if sys.version_info < _PYTHON:
        return fail(text, f"use Python {_PYTHON[0]}.{_PYTHON[1]} or later", **facts)
    return ok(text, **facts)


def _version_of(name: str) -> str | None:
    """Return the version of a package without importing it, which takes seconds for torch."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str | None) -> list[int]:
    found = re.match(r"[0-9]+(?:\.[0-9]+)*", version or "")
    return [int(part) for part in found[0].split(".")] if found else []


def _clock() -> Finding:
    now = time.time()
    text = time.strftime("the clock shows %Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if now < _WRITTEN_S:
        text += ", which is before the release of this version: ages and dates of checkpoints will be wrong"
        return warn(text, "set the clock")
    return ok(text)


def _memory(state_nbytes: int | None) -> Finding:
    available, where = int(psutil.virtual_memory().available), "free on this machine"
    limit, used = cgroup_limit()
    if limit is not None and limit - used < available:
        available, where = max(0, limit - used), f"free below the cgroup's limit of {human(limit)}"
    left = max(0, available - OVERHEAD_NBYTES - RESERVE_NBYTES)
    facts = {"available_nbytes": available, "limit_nbytes": limit, "state_nbytes": state_nbytes}
    if state_nbytes is None:
        return ok(f"{human(available)} are {where}: enough for two snapshots of up to {human(left / 2)} each", **facts)
    text = f"{human(available)} are {where}, and a snapshot needs {human(state_nbytes)}"
    if left < state_nbytes:
        advice = "save less, free memory, or set arena_limit_bytes, with which a save takes as long as writing"
        return fail(f"{text}: it does not fit, so every save will fail", advice, **facts)
    if left < 2 * state_nbytes:
        advice = "leave enough time between saves that each is written before the next begins, or free memory"
        return warn(f"{text}: a second one, for saves that overlap, does not fit", advice, **facts)
    return ok(f"{text}: two of them fit", **facts)


def _slots() -> Finding:
    """Create a slot as the worker does, and remove it."""
    slot = SlotMemory.create(PROBE_NBYTES)
    try:
        populated = slot.mapping.populate(0, PROBE_NBYTES)
    finally:
        slot.close()
    if populated:
        text = "shared memory for snapshots (sealed memfds) can be created and allocated ahead (MADV_POPULATE_WRITE)"
        return ok(text, populate=True)
    text = (
        "shared memory for snapshots (sealed memfds) can be created, but this kernel (before 5.14) cannot allocate it "
        "ahead (MADV_POPULATE_WRITE)"
    )
    return warn(text, "no action is needed; the first save of a run is slower", populate=False)


def _huge_pages() -> Finding:
    chosen = _read("/sys/kernel/mm/transparent_hugepage/shmem_enabled").partition("[")[2].partition("]")[0]
    text = f"huge pages for shared memory: {chosen or 'not reported by the kernel'}"
    if chosen in ("never", "deny"):
        text += "; snapshots use small pages, so the first save of a run takes longer, later ones only a little"
    return ok(text, shmem_enabled=chosen or None)


def _locked(state_nbytes: int | None) -> Finding:
    limit = _limit(resource.RLIMIT_MEMLOCK)
    has_gpu = os.path.exists("/proc/driver/nvidia") or os.path.exists("/dev/kfd")
    bound = "no limit" if limit is None else f"at most {human(limit)}"
    text = f"locked memory (ulimit -l): {bound}; used only for pinned memory of copies from GPUs"
    if limit is None or not has_gpu or (state_nbytes is not None and limit >= state_nbytes):
        return ok(text, limit_nbytes=limit, gpu=has_gpu)
    advice = "raise the limit to the size of the state if the GPU driver counts pinned memory; else copies are slower"
    return warn(text, advice, limit_nbytes=limit, gpu=has_gpu)
