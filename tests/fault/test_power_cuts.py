"""Power cuts: whatever was acknowledged before the cut loads after it, bit for bit; nothing incomplete is listed.

Promises P1, P3 and P4. A real worker writes to ext4 in a loop file, which is cut off from its device at random
instants; to ext4 on a device that records every write, whose possible contents after a cut are mounted; and to a device
that runs out of room behind the file system's back. Without fsync the same looks find losses: they can see them.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock

import asyncckpt
from asyncckpt import AsyncCheckpointer
from asyncckpt.errors import AsyncCkptError
from asyncckpt.format.layout import SAVE_ID_NBYTES, SAVE_ID_OFFSET, save_id_bytes
from asyncckpt.storage.catalog import read_manifest
from asyncckpt.storage.local import LocalStore
from tests import mounts
from tests.crash_states import Disk, read_log
from tests.mounts import needs_root
from tests.saving import Saver, fault_of, is_listed, violations, worker_process
from tests.torch_free_client import Snapshot

pytestmark = [pytest.mark.fault, pytest.mark.root, needs_root]

CUTS = int(os.environ.get("ASYNCCKPT_TEST_CUTS", "4"))
"""Of each kind; `make test-fault` raises it."""
DISK_NBYTES = 24 << 20
NBYTES = 200_000
MIN_SAVES = 3
PATIENCE_S = 60.0
"""For what must happen, on a busy machine."""


@pytest.fixture
def worker(endpoint: str) -> Iterator[subprocess.Popen[bytes]]:
    with worker_process(endpoint) as process:
        yield process


@pytest.fixture
def counted(record_property: Callable[[str, object], None]) -> None:
    """Say in the summary how many cuts there were."""
    record_property("count", CUTS)


class DcpSaver:
    """As `Saver`, of a training with layout "dcp"."""

    def __init__(self, endpoint: str, *, over: bool) -> None:
        self._checkpointer = AsyncCheckpointer(endpoint=endpoint, layout="dcp", overwrite=over)

    def __enter__(self) -> DcpSaver:
        return self

    def __exit__(self, *_: object) -> None:
        self._checkpointer.close()

    def save(self, path: pathlib.Path, seed: int, **_: Any) -> str:
        """Save and wait; returns the phase in which it ended."""
        self._checkpointer.save(self.state(seed), path).written.result(PATIENCE_S)
        return "committed"

    @staticmethod
    def state(seed: int) -> dict[str, torch.Tensor]:
        return {"w": torch.arange(NBYTES // 4, dtype=torch.int32) * seed}

    def fault_of(self, path: pathlib.Path, *seeds: int) -> str:
        """Return what is wrong at `path`: we find one of these saves there, and who has nothing of ours does as well.

        Between the two renames of an overwrite the one finds the new save and the other the old one, both whole.
        """
        found = {"w": torch.zeros(NBYTES // 4, dtype=torch.int32)}
        try:
            loaded = asyncckpt.load(path)
            with warnings.catch_warnings(action="ignore"):  # torch's own, of a load without a process group
                stock.load(found, checkpoint_id=str(path), no_dist=True)
        except (AsyncCkptError, OSError, stock.api.CheckpointException) as error:
            return f"{path}, save {seeds}: {error}"
        for reader, state in (("asyncckpt", loaded), ("torch", found)):
            if not any(torch.equal(state["w"], self.state(seed)["w"]) for seed in seeds):
                return f"{path}: {reader} finds other values than of save {seeds}"
        return ""

    def faults(self, root: pathlib.Path, done: list[int], *, over: bool) -> list[str]:
        """Return every broken promise: acknowledged and not there in full, or shown to a reader and not in full."""
        if over:
            last = done[-1] if done else 0
            if not last and not self._is_shown(root / "last"):
                return []
            return [fault for fault in [self.fault_of(root / "last", last, last + 1)] if fault]
        below = root / "below"
        others = {int(path.name) for path in below.iterdir() if self._is_shown(path)} if below.exists() else set()
        return [fault for seed in sorted({*done, *others}) if (fault := self.fault_of(below / f"{seed}", seed))]

    @staticmethod
    def _is_shown(path: pathlib.Path) -> bool:
        """Whether we list it, or a stock reader takes it for complete."""
        if is_listed(path):
            return True
        try:
            return (path / ".metadata").exists()
        except OSError:  # its inode was lost with the power (EBADMSG): no reader gets the file
            return False


class LinkingSaver(DcpSaver):
    """As `Saver`, of a training of which a part does not change: `reuse="auto"` links its file."""

    def __init__(self, endpoint: str, *, over: bool) -> None:
        self._checkpointer = AsyncCheckpointer(endpoint=endpoint, reuse="auto", overwrite=over)
        self.linked_nbytes = 0

    def save(self, path: pathlib.Path, seed: int, **_: Any) -> str:
        """Save and wait; returns the phase in which it ended."""
        done = self._checkpointer.save(self.state(seed), path).written.result(PATIENCE_S)
        self.linked_nbytes += done.details.get("reused_nbytes", 0)
        return "committed"

    @staticmethod
    def state(seed: int) -> dict[str, torch.Tensor]:
        frozen = torch.arange(NBYTES // 4, dtype=torch.int32)
        return {"frozen.w": frozen, "trained.w": frozen[: NBYTES // 8] * seed}

    def fault_of(self, path: pathlib.Path, *seeds: int) -> str:
        """Return what is wrong at `path`: one of these saves is to be found there."""
        try:
            loaded = asyncckpt.load(path, source="disk")
        except (AsyncCkptError, OSError) as error:
            return f"{path}, save {seeds}: {error}"
        states = map(self.state, seeds)
        if not any(all(torch.equal(loaded[name], state[name]) for name in state) for state in states):
            return f"{path}: other values than of save {seeds}"
        return ""


def save_on(
    saver: Saver | DcpSaver,
    root: pathlib.Path,
    stop: threading.Event,
    *,
    over: bool,
    fsync: bool = True,
    on_ack: Callable[[str], None] = lambda _: None,
) -> list[int]:
    """Save again and again, into new directories or over the same one, until told to stop or refused."""
    done: list[int] = []
    seed = 0
    while not stop.is_set():
        seed += 1
        path = root / "last" if over else root / "below" / f"{seed}"
        try:
            phase = saver.save(path, seed, overwrite=over, fsync=fsync)
        except (AsyncCkptError, TimeoutError):
            break
        if phase != "committed":
            break
        done.append(seed)
        on_ack(str(seed))
    return done


class Saves:
    """What a thread saves: those that were acknowledged, and when the first one was."""

    def __init__(self) -> None:
        self.done: list[int] = []
        self.first = threading.Event()


@contextlib.contextmanager
def saving_on(saver: Saver | DcpSaver, root: pathlib.Path, *, over: bool) -> Iterator[Saves]:
    """Save in another thread, until the block has ended."""
    stop, saves = threading.Event(), Saves()

    def save() -> None:
        saves.done += save_on(saver, root, stop, over=over, on_ack=lambda _: saves.first.set())

    thread = threading.Thread(target=save)
    thread.start()
    try:
        yield saves
    finally:
        stop.set()
        thread.join()


def stands(path: pathlib.Path, acknowledged: list[int]) -> str:
    """Return what is wrong with a path that was overwritten: it holds the last acknowledged save, or the one after."""
    last = acknowledged[-1] if acknowledged else 0
    if not last and not is_listed(path):
        return ""
    faults = []
    for seed in (last, last + 1):
        snapshot = Snapshot(nbytes=NBYTES, seed=seed)
        if not (fault := fault_of_values(path, snapshot)):
            return ""
        faults.append(fault)
    return f"{path}: neither save {last} nor the one after it: {faults}"


def fault_of_values(path: pathlib.Path, snapshot: Snapshot) -> str:
    """As `fault_of`, for a snapshot whose save id is not known: the header of its file is not compared."""
    try:
        marker = read_manifest(str(path), LocalStore()).save_id
    except (AsyncCkptError, OSError) as error:
        return str(error)
    for image in snapshot.images:
        image[SAVE_ID_OFFSET : SAVE_ID_OFFSET + SAVE_ID_NBYTES] = save_id_bytes(marker)
    return fault_of(str(path), snapshot)


def faults_on(saver: Saver | DcpSaver, root: pathlib.Path, done: list[int], *, over: bool) -> list[str]:
    """Return what is wrong on a disk after a cut."""
    if isinstance(saver, DcpSaver):
        return saver.faults(root, done, over=over)
    if over:
        return [fault for fault in [stands(root / "last", done)] if fault]
    wanted = {str(root / "below" / f"{n}"): saver.acknowledged[str(root / "below" / f"{n}")] for n in done}
    others = [str(path) for path in (root / "below").iterdir()] if (root / "below").exists() else []
    return violations(wanted, others)


def saver_of(endpoint: str, kind: str, *, over: bool) -> Saver | DcpSaver:
    kinds = {"dcp": DcpSaver, "links": LinkingSaver}
    return kinds[kind](endpoint, over=over) if kind in kinds else Saver(endpoint, nbytes=NBYTES)


KINDS = pytest.mark.parametrize(
    ("over", "layout"),
    [(over, layout) for layout in ("safetensors", "dcp", "links") for over in (False, True)],
    ids=["new", "overwrite", "new-dcp", "overwrite-dcp", "new-links", "overwrite-links"],
)


@KINDS
def test_a_power_cut_at_any_instant_loses_nothing_that_was_acknowledged(
    worker: subprocess.Popen[bytes],
    endpoint: str,
    tmp_path: pathlib.Path,
    rng: random.Random,
    over: bool,
    layout: str,
    counted: None,
) -> None:
    mounts.make_ext4(tmp_path / "empty", DISK_NBYTES)
    image, mountpoint = tmp_path / "image", tmp_path / "disk"
    acknowledged, cut, linked_nbytes = 0, 0, 0
    while cut < CUTS or not acknowledged:  # a busy disk may take longer for one save than any of the instants
        image.write_bytes((tmp_path / "empty").read_bytes())
        with (
            mounts.loop_mounted(image, mountpoint) as disk,
            saver_of(endpoint, layout, over=over) as saver,
            saving_on(saver, disk, over=over) as saves,
        ):
            if cut >= CUTS:
                assert saves.first.wait(PATIENCE_S), "no save ends"
            time.sleep(rng.uniform(0.0, 0.3))
            mounts.shut_down(disk)
        with mounts.loop_mounted(image, mountpoint) as disk:
            found = faults_on(saver, disk, saves.done, over=over)
            assert found == [], f"cut {cut}, after {len(saves.done)} saves"
        acknowledged += len(saves.done)
        linked_nbytes += saver.linked_nbytes if isinstance(saver, LinkingSaver) else 0
        cut += 1
    assert linked_nbytes or layout != "links" or acknowledged <= cut, "nothing was linked"
    print(f"{cut} cuts, {acknowledged} acknowledged saves")


def faults_of_states(
    endpoint: str,
    tmp_path: pathlib.Path,
    rng: random.Random,
    *,
    over: bool = False,
    fsync: bool = True,
    layout: str = "safetensors",
) -> tuple[list[str], int]:
    """Save to a device that records; return what is wrong with states after a cut, and how many acknowledged saves."""
    log, image, mountpoint = tmp_path / "log", tmp_path / "image", tmp_path / "disk"
    with mounts.fuse(tmp_path / "device", str(log)) as device:
        disk_file = device.path / "disk"
        mounts.make_ext4(disk_file, DISK_NBYTES)
        device.tell(mark="made")
        with mounts.loop_mounted(disk_file, mountpoint) as root, saver_of(endpoint, layout, over=over) as saver:
            until = time.monotonic() + min(0.4 + CUTS / 60, 3.0)
            stop = threading.Event()

            def acknowledged_one(seed: str) -> None:
                device.tell(mark=seed)
                if time.monotonic() >= until and int(seed) >= MIN_SAVES:
                    stop.set()

            save_on(saver, root, stop, over=over, fsync=fsync, on_ack=acknowledged_one)
    entries = read_log(log)
    begin = next(n for n, entry in enumerate(entries) if entry.kind == b"M") + 1
    assert any(entry.kind == b"F" for entry in entries[begin:]), "no flush was recorded"
    disk, faults, acknowledged = Disk(entries, DISK_NBYTES), list[str](), 0
    # Always at the end, too: something was acknowledged by then, wherever chance puts the others.
    for position in sorted([*(rng.randrange(begin, len(entries) + 1) for _ in range(CUTS - 1)), len(entries)]):
        state, marks = disk.after_cut_at(position, rng)
        image.write_bytes(state)
        done = [int(mark) for mark in marks if mark.isdigit()]
        acknowledged += len(done)
        with mounts.loop_mounted(image, mountpoint) as root:
            found = faults_on(saver, root, done, over=over)
        faults += [f"in front of entry {position} of {len(entries)}, after {len(done)} saves: {f}" for f in found]
    log.unlink()
    image.unlink()
    print(f"{CUTS} states of {len(entries)} entries, {acknowledged} acknowledged saves looked at")
    return faults, acknowledged


@KINDS
def test_every_state_in_which_a_recorded_device_may_be_after_a_cut_holds_what_was_acknowledged(
    worker: subprocess.Popen[bytes],
    endpoint: str,
    tmp_path: pathlib.Path,
    rng: random.Random,
    over: bool,
    layout: str,
    counted: None,
) -> None:
    faults, acknowledged = faults_of_states(endpoint, tmp_path, rng, over=over, layout=layout)
    assert faults == []
    assert acknowledged


@pytest.mark.soak
def test_without_fsync_the_recorded_device_shows_losses(
    worker: subprocess.Popen[bytes], endpoint: str, tmp_path: pathlib.Path, rng: random.Random
) -> None:
    assert faults_of_states(endpoint, tmp_path, rng, fsync=False)[0]


@pytest.mark.soak
def test_without_fsync_a_cut_file_system_shows_losses(
    worker: subprocess.Popen[bytes], endpoint: str, tmp_path: pathlib.Path
) -> None:
    mounts.make_ext4(tmp_path / "image", DISK_NBYTES)
    with mounts.loop_mounted(tmp_path / "image", tmp_path / "disk") as disk, Saver(endpoint, nbytes=NBYTES) as saver:
        assert saver.save(disk / "x", 1, fsync=False) == "committed"
        mounts.shut_down(disk)
    with mounts.loop_mounted(tmp_path / "image", tmp_path / "disk"):
        assert violations(saver.acknowledged)


def test_a_device_that_runs_out_of_room_behind_the_file_system_fails_saves_and_never_lies(
    worker: subprocess.Popen[bytes], endpoint: str, tmp_path: pathlib.Path
) -> None:
    """fsyncgate: the file system has room, its device has none; whoever asks twice is told that all is well."""
    with mounts.tmpfs(tmp_path / "backing", "size=16m") as backing:
        image = backing / "image"
        mounts.make_ext4(image, 64 << 20)
        with mounts.loop_mounted(image, tmp_path / "disk") as disk, Saver(endpoint, nbytes=1_000_000) as saver:
            room = os.statvfs(backing).f_bavail * os.statvfs(backing).f_bsize
            (backing / "hog").write_bytes(bytes(room - (5 << 20)))
            phases = [saver.save(disk / f"{n}", n) for n in range(12)]
            assert phases[0] == "committed" and "committed" not in phases[-3:], phases
            assert violations(saver.acknowledged) == []
            (backing / "hog").unlink()
        with mounts.loop_mounted(image, tmp_path / "disk") as disk:
            assert violations(saver.acknowledged, [*saver.refused, *saver.open]) == []
            with Saver(endpoint, nbytes=100_000) as again:
                assert again.save(disk / "after", 99) == "committed"
                assert violations(again.acknowledged) == []
