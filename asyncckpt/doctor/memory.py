"""Checks of memory: is there room for the snapshots, and does the kernel give it in the form that slots need."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

import psutil

from asyncckpt.doctor.findings import Finding, fail, ok, reason, warn
from asyncckpt.errors import UnsupportedPlatformError
from asyncckpt.memory.arena import SlotMemory
from asyncckpt.memory.headroom import RESERVE_NBYTES, cgroup_limit
from asyncckpt.memory.slot import SlotError
from asyncckpt.sizes import human

OVERHEAD_NBYTES = 200 << 20
"""What trainer and worker take beside the slots (GUARANTEES.md, P11)."""

PROBE_NBYTES = 1 << 20
_SHMEM_ENABLED = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"


def memory_checks(state_nbytes: int | None) -> Iterator[Finding]:
    """Yield the findings.

    Args:
        state_nbytes: What the ranks of this machine save together; None: not known.
    """
    yield _room(state_nbytes)
    yield _slots()
    yield _huge_pages()
    yield _locked(state_nbytes)
    yield _shm()


def _room(state_nbytes: int | None) -> Finding:
    try:
        available = int(psutil.virtual_memory().available)
    except OSError as error:
        text = f"how much is free is not known: {reason(error)}: {error.filename}"
        return fail("memory", text, "mount proc on /proc (mount -t proc proc /proc): the worker needs it")
    limit, used = cgroup_limit()
    where = "free on this machine"
    if limit is not None and limit - used < available:
        available, where = max(0, limit - used), f"left under the cgroup's limit of {human(limit)}"
    left = max(0, available - OVERHEAD_NBYTES - RESERVE_NBYTES)
    facts = {"available_nbytes": available, "limit_nbytes": limit, "state_nbytes": state_nbytes}
    if state_nbytes is None:
        return ok("memory", f"{human(available)} are {where}: for states up to {human(left / 2)} in two slots", **facts)
    text = f"{human(available)} are {where}, a snapshot takes {human(state_nbytes)}"
    if left < state_nbytes:
        advice = "save less, free memory, or set arena_limit_bytes: then a save takes as long as writing"
        return fail("memory", f"{text}: it does not fit, and every save fails", advice, **facts)
    if left < 2 * state_nbytes:
        advice = "save less often than a save takes, so that one slot is enough, or free memory"
        return warn("memory", f"{text}: saves that overlap need a second one, which does not fit", advice, **facts)
    return ok("memory", f"{text}: two of them fit", **facts)


def _slots() -> Finding:
    """Make a slot as the worker does, and take it away again."""
    advice = "allow memfd_create(2) with seals in this container's seccomp profile; Linux has it since 3.17"
    try:
        slot = SlotMemory.create(PROBE_NBYTES)
    except (OSError, SlotError, UnsupportedPlatformError) as error:
        cause = error.__cause__ if isinstance(error, UnsupportedPlatformError) else error
        text = reason(cause) if isinstance(cause, OSError) else str(error)
        return fail("slots", f"sealed memory without a name (memfd) cannot be made: {text}", advice)
    try:
        populated = slot.mapping.populate(0, PROBE_NBYTES)
    except OSError as error:
        return fail("slots", f"a slot's memory cannot be had: {reason(error)}", "free memory, or raise the limit")
    finally:
        slot.close()
    if not populated:
        text = "slots are sealed memfds; the kernel has no MADV_POPULATE_WRITE (before 5.14): pages are touched instead"
        return warn("slots", text, "nothing need be done; the first save of a run is slower", populate=False)
    return ok("slots", "slots are sealed memfds, filled in ahead by MADV_POPULATE_WRITE", populate=True)


def _huge_pages() -> Finding:
    try:
        with open(_SHMEM_ENABLED) as file:
            chosen = file.read().partition("[")[2].partition("]")[0]
    except OSError:
        chosen = ""
    if not chosen:
        return ok("huge pages", "the kernel says nothing of huge pages for shared memory", shmem_enabled=None)
    text = f"huge pages for shared memory: {chosen}"
    if chosen in ("never", "deny"):
        text += "; slots are of small pages, which costs the first save of a run some time and later ones little"
    return ok("huge pages", text, shmem_enabled=chosen)


def _locked(state_nbytes: int | None) -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = None if soft == resource.RLIM_INFINITY else soft
    has_gpu = os.path.exists("/proc/driver/nvidia") or os.path.exists("/dev/kfd")
    said = "no limit" if limit is None else f"at most {human(limit)}"
    text = f"locked memory (ulimit -l): {said}; only the pinning of slots for a GPU may need it"
    if limit is None or not has_gpu or (state_nbytes is not None and limit >= state_nbytes):
        return ok("locked memory", text, limit_nbytes=limit, gpu=has_gpu)
    advice = (
        "raise it to the size of the state where the driver counts pinned memory; else copies are slower, not wrong"
    )
    return warn("locked memory", text, advice, limit_nbytes=limit, gpu=has_gpu)


def _shm() -> Finding:
    note = "which does not matter: slots have no name there"
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return ok("/dev/shm", f"there is none, {note}")
    return ok("/dev/shm", f"{human(found.f_bavail * found.f_frsize)} are free, {note}")
