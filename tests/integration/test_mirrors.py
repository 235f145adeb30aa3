"""Checkpoints with a mirror: copied behind the training, whoever dies meanwhile, and restored from there."""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import mounts
import pytest
import torch
from real_worker import DEADLINE_S, RealWorker, running, wait_until

import asyncckpt
from asyncckpt import AsyncCheckpointer, CheckpointManager, SyncCheckpointer
from asyncckpt.client.session import Session
from asyncckpt.errors import CheckpointerClosedError, ConfigError, MirrorError, UnsupportedPathError
from asyncckpt.format.manifest import decode_manifest
from asyncckpt.format.names import SaveId
from asyncckpt.protocol import messages
from asyncckpt.storage import catalog
from asyncckpt.storage.catalog import CLOCK_EPOCH_S, epoch_by_clock
from asyncckpt.storage.files import Files
from tests import object_proxy, object_servers
from tests.storage_samples import Snapshot

object_servers.start_runtime()

SLOW = "--max-mirror-bandwidth=2M"
SOON = "--drain-timeout-s=1"
"""A worker that is told to end waits for copies; not for long here."""

STATE = {"w": torch.arange(1_000_000.0), "n": 7}


def save(checkpointer: AsyncCheckpointer, root: pathlib.Path, step: int, state: Any = STATE) -> Any:
    """Save a step to `root / "runs"`, with a mirror in `root / "mirror"`, and wait until it is written."""
    name = f"step-{step}"
    handle = checkpointer.save(state, root / "runs" / name, step=step, mirror=root / "mirror" / name)
    handle.written.result(DEADLINE_S)
    return handle


def save_id_of(path: pathlib.Path) -> SaveId:
    return decode_manifest((path / "manifest.json").read_bytes()).save_id


def names(path: pathlib.Path) -> set[str]:
    return {one.name for one in path.iterdir()} if path.is_dir() else set()


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "asyncckpt", *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    print(done.stdout, done.stderr)
    return done


@pytest.fixture
def worker(endpoint: str) -> Iterator[RealWorker]:
    with running(endpoint, SOON) as found:
        yield found


@pytest.fixture
def checkpointer(worker: RealWorker) -> Iterator[AsyncCheckpointer]:
    with AsyncCheckpointer(endpoint=worker.endpoint) as found:
        yield found


def test_the_copy_is_made_behind_the_save_and_loads(checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path) -> None:
    handle = save(checkpointer, tmp_path, 1)
    report = handle.mirrored.result(DEADLINE_S)
    assert report.nbytes > 4_000_000 and report.details["copied_nbytes"] == report.nbytes
    assert report.seconds["mirror"] > 0
    assert torch.equal(asyncckpt.load(tmp_path / "mirror" / "step-1")["w"], STATE["w"])
    without = checkpointer.save(STATE, tmp_path / "runs" / "step-2")
    without.written.result(DEADLINE_S)
    assert without.mirrored is None
    shown = command("inspect", str(tmp_path / "runs" / "step-1"))
    assert f"mirror: {tmp_path}/mirror/step-1 (copied)" in shown.stdout
    assert command("verify", str(tmp_path / "runs" / "step-1"), str(tmp_path / "mirror" / "step-1")).returncode == 0


def test_a_failed_save_fails_its_copy_too(checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path) -> None:
    save(checkpointer, tmp_path, 1).mirrored.result(DEADLINE_S)
    again = checkpointer.save(STATE, tmp_path / "runs" / "step-1", mirror=tmp_path / "mirror" / "step-1")
    assert type(again.mirrored.exception(DEADLINE_S)) is type(again.written.exception(DEADLINE_S)) is not type(None)


def test_a_heartbeat_after_the_goodbye_is_no_loss(
    worker: RealWorker, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mirror").write_text("a file where a directory is wanted")
    call = Session.call

    def called(session: Session, build: Any, timeout_s: float, **options: Any) -> Any:
        reply = call(session, build, timeout_s, **options)
        if isinstance(build(1), messages.Goodbye):
            session._next_heartbeat = 0.0
            session._wake_thread()
            wait_until(lambda: session.error is not None, "the worker refuses the heartbeat")
        return reply

    with AsyncCheckpointer(endpoint=worker.endpoint) as checkpointer:
        handle = save(checkpointer, tmp_path, 1)
        monkeypatch.setattr(Session, "call", called)
    assert isinstance(handle.mirrored.exception(DEADLINE_S), CheckpointerClosedError)
    assert "refused this session" not in caplog.text


def test_a_mirror_that_is_away_costs_no_save_and_gets_all_of_them_in_order_once_it_is_back(
    checkpointer: AsyncCheckpointer, worker: RealWorker, tmp_path: pathlib.Path
) -> None:
    mirror = tmp_path / "mirror"
    mirror.write_text("a file where a directory is wanted")
    handles = [save(checkpointer, tmp_path, step) for step in range(3)]
    rows = wait_until(
        lambda: [row for row in worker.status()["mirrors"] if row["error"]], "the oldest copy has failed once"
    )
    assert [row["step"] for row in rows] == [0] and len(worker.status()["mirrors"]) == 3
    assert not any(handle.mirrored.done() for handle in handles)
    shown = command("worker", "status", "--endpoint", worker.endpoint)
    assert "mirrors: 3" in shown.stdout
    shown = command("top", "--once", "--endpoint", worker.endpoint)
    assert f"mirror {mirror}: 3 behind" in shown.stdout and "oldest step 0" in shown.stdout
    mirror.unlink()
    for handle in handles:
        handle.mirrored.result(DEADLINE_S)
    times = [(mirror / f"step-{step}" / "manifest.json").stat().st_mtime_ns for step in range(3)]
    assert times == sorted(times) and not worker.status()["mirrors"]


def test_the_next_worker_goes_on_where_a_killed_one_stopped(endpoint: str, tmp_path: pathlib.Path) -> None:
    with (
        running(endpoint, SLOW, SOON) as worker,
        AsyncCheckpointer(endpoint=endpoint, files_per_rank=4) as checkpointer,
    ):
        state = {f"w{n}": torch.full((300_000,), float(n)) for n in range(4)}
        handle = save(checkpointer, tmp_path, 1, state)
        copy = tmp_path / "mirror" / "step-1"
        wait_until(lambda: [n for n in names(copy) if n.endswith(".safetensors")], "a file is copied")
        worker.kill()
        assert "manifest.json" not in names(copy) and not handle.mirrored.done()
        with running(endpoint, SOON):
            report = handle.mirrored.result(DEADLINE_S)
            assert 0 < report.details["copied_nbytes"] < report.nbytes
            found = asyncckpt.load(copy)
            assert all(torch.equal(found[name], state[name]) for name in state)
            assert not [name for name in names(copy) if name.endswith(".tmp")]


def test_a_later_training_finishes_what_a_dead_one_has_left(endpoint: str, tmp_path: pathlib.Path) -> None:
    program = f"""
import sys, torch, pathlib, asyncckpt
root = pathlib.Path(sys.argv[1])
with asyncckpt.AsyncCheckpointer(endpoint=sys.argv[2]) as checkpointer:
    state = {{"w": torch.arange(8_000_000.0)}}
    handle = checkpointer.save(state, root / "runs" / "step-0", step=0, mirror=root / "mirror" / "step-0")
    handle.written.result({DEADLINE_S})
"""
    with running(endpoint, SLOW, SOON) as worker:
        subprocess.run([sys.executable, "-c", program, str(tmp_path), endpoint], check=True, timeout=DEADLINE_S)
        worker.kill()
    assert names(tmp_path / "mirror" / "step-0") & {"manifest.json"} == set()
    with running(endpoint, SOON), AsyncCheckpointer(endpoint=endpoint) as checkpointer:
        save(checkpointer, tmp_path, 1).mirrored.result(DEADLINE_S)
        assert "manifest.json" in names(tmp_path / "mirror" / "step-0")


def test_what_is_left_is_copied_by_a_worker_that_is_told_to(endpoint: str, tmp_path: pathlib.Path) -> None:
    with running(endpoint, SLOW, SOON) as worker:
        checkpointer = AsyncCheckpointer(endpoint=endpoint)
        handle = save(checkpointer, tmp_path, 1)
        checkpointer.close()
        with pytest.raises(CheckpointerClosedError, match="the worker continues with the copy"):
            handle.mirrored.result(0)
        worker.kill()
    assert "not copied yet" in command("inspect", str(tmp_path / "runs" / "step-1")).stdout
    assert command("report", str(tmp_path / "runs")).returncode == 0
    assert "not in the mirror yet" in (tmp_path / "runs" / "report.html").read_text()
    options = ("--mirror", str(tmp_path / "runs"), "--idle-exit-s", "0.1", "--endpoint", endpoint)
    assert command("worker", "start", *options).returncode == 0, "it ends when nothing is left to copy"
    assert torch.equal(asyncckpt.load(tmp_path / "mirror" / "step-1")["w"], STATE["w"])
    assert "(copied)" in command("inspect", str(tmp_path / "runs" / "step-1")).stdout


def test_a_copy_that_cannot_succeed_fails_with_the_reason(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path
) -> None:
    taken = tmp_path / "mirror" / "step-1"
    with SyncCheckpointer() as other:
        other.save({"x": 1}, taken)
    handle = save(checkpointer, tmp_path, 1)
    with pytest.raises(MirrorError, match="already holds a committed checkpoint") as caught:
        handle.mirrored.result(DEADLINE_S)
    assert caught.value.mirror == str(taken) and asyncckpt.load(taken) == {"x": 1}


def test_a_restore_takes_the_newest_of_both_places(checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path) -> None:
    runs, mirror = tmp_path / "runs", tmp_path / "mirror"
    for step in (1, 2):
        save(checkpointer, tmp_path, step, {"n": step}).mirrored.result(DEADLINE_S)
    assert asyncckpt.latest_checkpoint(runs, mirror=mirror) == str(runs / "step-2")
    data = next(one for one in (runs / "step-2").iterdir() if one.name.endswith(".objects.json"))
    data.write_bytes(b"damaged")
    found = asyncckpt.restore_latest(runs, mirror=mirror, source="disk")
    assert found is not None and (found.path, found.state_dict) == (str(mirror / "step-2"), {"n": 2})
    fresh = tmp_path / "new disk"
    assert asyncckpt.restore_latest(fresh, source="disk") is None
    found = asyncckpt.restore_latest(fresh, mirror=mirror, source="disk")
    assert found is not None and found.step == 2
    assert asyncckpt.latest_checkpoint(fresh, mirror=mirror) == str(mirror / "step-2")
    mirror_file = tmp_path / "file"
    mirror_file.write_text("")
    found = asyncckpt.restore_latest(runs, mirror=mirror_file / "x", source="disk")
    assert found is not None and found.step == 1, "a mirror that cannot be listed does not keep from restoring"


def test_a_mirror_whose_file_system_hangs_does_not_keep_from_restoring(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, mirror, ends = tmp_path / "runs", tmp_path / "mirror", threading.Event()
    save(checkpointer, tmp_path, 1, {"n": 1}).mirrored.result(DEADLINE_S)
    monkeypatch.setattr(catalog, "MIRROR_LOOK_S", 0.2)
    listdir = Files.listdir

    def hangs(self: Files, path: str) -> list[str]:
        if path.startswith(str(mirror)):
            assert ends.wait(DEADLINE_S), "nobody waits for this long"
        return listdir(self, path)

    monkeypatch.setattr(Files, "listdir", hangs)
    try:
        found = asyncckpt.restore_latest(runs, mirror=mirror, source="disk")
        assert found is not None and found.path == str(runs / "step-1")
        assert asyncckpt.latest_checkpoint(runs, mirror=mirror) == str(runs / "step-1")
        with CheckpointManager(runs, checkpointer=checkpointer, mirror=mirror) as manager:
            assert manager.latest_step() == 1
    finally:
        ends.set()


def test_on_a_new_disk_a_run_is_newer_than_those_in_the_mirror(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path
) -> None:
    mirror, fresh = tmp_path / "mirror", tmp_path / "new disk"
    began_before = SaveId(epoch_by_clock(time.time() - CLOCK_EPOCH_S), 900, "0" * 12)
    with Snapshot({"n": 900}, save_id=began_before) as earlier:
        earlier.save(str(mirror / "step-1"), step=1)
    handle = checkpointer.save({"n": 1}, fresh / "step-1", step=1, mirror=mirror / "step-2")
    handle.mirrored.result(DEADLINE_S)  # type: ignore[union-attr]
    assert asyncckpt.latest_checkpoint(tmp_path / "another disk", mirror=mirror) == str(mirror / "step-2")


@pytest.mark.parametrize("way", ["restore_latest", "latest_checkpoint", "sync"])
def test_on_a_new_disk_a_run_is_newer_than_what_it_goes_on_from_also_if_its_first_save_has_no_mirror(
    worker: RealWorker, tmp_path: pathlib.Path, way: str
) -> None:
    mirror, fresh = tmp_path / "mirror", tmp_path / "new disk"
    for step in (1, 2, 3):
        with AsyncCheckpointer(endpoint=worker.endpoint) as earlier:
            save(earlier, tmp_path, step, {"n": step}).mirrored.result(DEADLINE_S)
    if way == "latest_checkpoint":
        assert asyncckpt.latest_checkpoint(fresh, mirror=mirror) == str(mirror / "step-3")
    else:
        found = asyncckpt.restore_latest(fresh, mirror=mirror, source="disk")
        assert found is not None and found.step == 3
    if way == "sync":
        with SyncCheckpointer() as alone:
            alone.save({"n": 4}, fresh / "step-4", step=4)
        assert asyncckpt.latest_checkpoint(fresh, mirror=mirror) == str(fresh / "step-4")
        return
    with AsyncCheckpointer(endpoint=worker.endpoint) as checkpointer:
        for step in (4, 5, 6, 7):
            place = mirror / f"step-{step}" if step % 2 else None
            handle = checkpointer.save({"n": step}, fresh / f"step-{step}", step=step, mirror=place)
            handle.written.result(DEADLINE_S)
            assert asyncckpt.latest_checkpoint(fresh, mirror=mirror) == str(fresh / f"step-{step}")
    newest = save_id_of(mirror / "step-3").epoch
    assert {save_id_of(fresh / f"step-{step}").epoch for step in (4, 5, 6, 7)} == {newest + 1}


@pytest.mark.parametrize("is_managed", [False, True])
def test_the_first_save_of_a_run_does_not_wait_for_a_mirror_that_hangs(
    worker: RealWorker, tmp_path: pathlib.Path, is_managed: bool
) -> None:
    pytest.importorskip("obstore", reason="the extra cloud is not installed")
    runs, mirror = tmp_path / "runs", "s3://bucket/hangs"
    with object_proxy.SilentServer() as silent, contextlib.ExitStack() as stack:
        options = {"endpoint": worker.endpoint, "storage_options": silent.options}
        if is_managed:
            handle = stack.enter_context(CheckpointManager(runs, mirror=mirror, **options)).save(1, STATE)
        else:
            checkpointer = stack.enter_context(AsyncCheckpointer(**options))
            handle = checkpointer.save(STATE, runs / "step-1", mirror=f"{mirror}/step-1")
        assert handle is not None
        handle.written.result(DEADLINE_S)
        assert silent.n_listings("hangs") == 0, f"nobody has asked it for an epoch: {silent.asked}"


def test_a_run_is_newer_than_what_it_goes_on_from_also_if_that_is_ahead_of_the_clock(
    worker: RealWorker, tmp_path: pathlib.Path
) -> None:
    mirror, now = tmp_path / "mirror", epoch_by_clock(time.time())
    for step in (1, 2, 3):
        with Snapshot({"n": step}, save_id=SaveId(now + step, 0, f"{step:012d}")) as earlier:
            earlier.save(str(mirror / f"step-{step:08d}"), step=step)
    with CheckpointManager(tmp_path / "new disk", mirror=mirror, endpoint=worker.endpoint) as manager:
        found = manager.restore(step=1, source="disk")
        assert found is not None
        manager.save(10, {"n": 10}).mirrored.result(DEADLINE_S)  # type: ignore[union-attr]
        assert manager.latest_step() == 10


def test_a_manager_keeps_what_is_not_mirrored_and_removes_it_afterwards(
    worker: RealWorker, tmp_path: pathlib.Path
) -> None:
    runs, mirror = tmp_path / "runs", tmp_path / "mirror"
    mirror.write_text("away")
    options: dict[str, Any] = {"max_to_keep": 1, "mirror": mirror, "mirror_max_to_keep": 2, "endpoint": worker.endpoint}
    with CheckpointManager(runs, **options) as manager:
        handles = [manager.save(step, STATE) for step in range(4)]
        manager.wait()
        assert manager.all_steps() == [0, 1, 2, 3], "none is removed before it is in the mirror"
        mirror.unlink()
        for handle in handles:
            assert handle is not None and handle.mirrored is not None
            handle.mirrored.result(DEADLINE_S)
        manager.save(4, STATE).mirrored.result(DEADLINE_S)  # type: ignore[union-attr]
        wait_until(lambda: names(runs) & {f"step-{n:08d}" for n in range(9)} == {"step-00000004"}, "one is kept here")
        wait_until(lambda: len([n for n in names(mirror) if n.startswith("step")]) == 2, "two are kept there")
        assert manager.all_steps() == [3, 4] and manager.latest_step() == 4
    with CheckpointManager(tmp_path / "new disk", **options) as manager:
        found = manager.restore()
        assert found is not None and found.step == 4 and found.path.startswith(str(mirror))
        found = manager.restore(step=3)
        assert found is not None and found.step == 3


def steps_in(root: pathlib.Path) -> list[int]:
    """Return the steps of a manager's checkpoints in `root`, which may be removed meanwhile."""
    return sorted(int(name[5:]) for name in names(root) if name.startswith("step-"))


def test_in_the_mirror_what_a_run_has_restored_from_stays_until_a_checkpoint_of_the_run_is_there(
    worker: RealWorker, tmp_path: pathlib.Path
) -> None:
    mirror = tmp_path / "mirror"
    options: dict[str, Any] = {"mirror": mirror, "endpoint": worker.endpoint}
    with CheckpointManager(tmp_path / "runs", **options) as manager:
        for step in range(1, 5):
            manager.save(step, STATE).mirrored.result(DEADLINE_S)  # type: ignore[union-attr]
    (mirror / "step-00000005").write_text("no copy can be made")
    with CheckpointManager(tmp_path / "new disk", mirror_max_to_keep=2, **options) as manager:
        assert manager.restore(step=1, source="disk") is not None
        copied = manager.save(5, STATE)
        assert copied is not None
        copied.written.result(DEADLINE_S)
        wait_until(lambda: steps_in(mirror) in ([1, 3, 4, 5], [3, 4, 5]), "older ones were removed")
        assert (mirror / "step-00000001" / "manifest.json").exists()
        (mirror / "step-00000005").unlink()
        assert copied.mirrored is not None
        copied.mirrored.result(DEADLINE_S)
        manager.save(6, STATE).mirrored.result(DEADLINE_S)  # type: ignore[union-attr]
        wait_until(lambda: steps_in(mirror) == [5, 6], "the abandoned branch and its origin were removed")


def test_a_damaged_copy_that_was_replaced_counts_as_sound(worker: RealWorker, tmp_path: pathlib.Path) -> None:
    mirror = tmp_path / "mirror"
    options: dict[str, Any] = {"mirror": mirror, "endpoint": worker.endpoint}
    with CheckpointManager(tmp_path / "runs", **options) as manager:
        for step in range(1, 4):
            manager.save(step, STATE).mirrored.result(DEADLINE_S)  # type: ignore[union-attr]
    next((mirror / "step-00000003").glob("*.objects.json")).write_bytes(b"damaged")
    with CheckpointManager(tmp_path / "new disk", mirror_max_to_keep=2, **options) as manager:
        found = manager.restore(source="disk")
        assert found is not None and found.step == 2 and found.skipped[0].path == str(mirror / "step-00000003")
        for step in (3, 4):
            manager.save(step, STATE).mirrored.result(DEADLINE_S)  # type: ignore[union-attr]
        wait_until(lambda: len(steps_in(mirror)) == 2, "older ones were removed")
        assert steps_in(mirror) == [3, 4]


def test_a_bound_on_what_waits_for_the_mirror_is_kept(worker: RealWorker, tmp_path: pathlib.Path) -> None:
    mirror = tmp_path / "mirror"
    mirror.write_text("away")
    with CheckpointManager(
        tmp_path / "runs", max_to_keep=1, max_unmirrored=2, mirror=mirror, endpoint=worker.endpoint
    ) as manager:
        for step in range(6):
            manager.save(step, STATE)
        manager.wait()
        assert manager.all_steps() == [3, 4, 5]


def test_a_save_waits_for_the_mirror_until_the_limit_where_the_user_wants_that(
    endpoint: str, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"max_to_keep": 1, "max_unmirrored": 1, "on_unmirrored": "wait"}
    with (
        running(endpoint, "--max-mirror-bandwidth=20M", SOON),
        CheckpointManager(tmp_path / "runs", mirror=tmp_path / "mirror", endpoint=endpoint, **options) as manager,
    ):
        handles = []
        for step in range(8):  # 4 MB each: quicker saved than copied
            handle = manager.save(step, STATE)
            assert handle is not None and handle.mirrored is not None
            handles.append(handle)
            assert sum(not one.mirrored.done() for one in handles) <= 2, "max_to_keep + max_unmirrored"
        for one in handles:
            one.mirrored.result(DEADLINE_S)
        assert steps_in(tmp_path / "mirror") == list(range(8))
    assert "is removed before it is in its mirror" not in caplog.text


def test_a_save_waits_for_a_mirror_that_is_away_once_and_not_after_a_signal(
    worker: RealWorker, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    mirror = tmp_path / "mirror"
    mirror.write_text("away")
    options: dict[str, Any] = {"max_to_keep": 1, "max_unmirrored": 1, "on_unmirrored": "wait", "mirror": mirror}
    limits: dict[str, Any] = {"endpoint": worker.endpoint, "slot_timeout_s": 1.0, "preemption_signal": ()}
    took = []
    with CheckpointManager(tmp_path / "runs", **options, **limits) as manager:
        for step in range(6):
            began = time.monotonic()
            manager.save(step, STATE).written.result(DEADLINE_S)  # type: ignore[union-attr]
            took.append(time.monotonic() - began >= 1.0)
        manager.wait()
        assert manager.all_steps() == [4, 5], "as many as without waiting"
    assert took[2] and caplog.text.count("are not in the mirror") == 1, took
    slow = {**limits, "slot_timeout_s": DEADLINE_S}
    with CheckpointManager(tmp_path / "more", **{**options, "mirror": tmp_path / "mirror" / "more"}, **slow) as manager:
        for step in (1, 2):
            manager.save(step, STATE)
        manager.preempt()
        began = time.monotonic()
        manager.save(3, STATE).written.result(DEADLINE_S)  # type: ignore[union-attr]
        assert time.monotonic() - began < DEADLINE_S / 2


@pytest.mark.parametrize("where", ["runs/step-1", "runs/step-1/inside", "runs"])
def test_a_mirror_in_the_checkpoint_or_around_it_is_refused(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path, where: str
) -> None:
    with pytest.raises(ConfigError, match="is inside the other"):
        checkpointer.save(STATE, tmp_path / "runs" / "step-1", mirror=tmp_path / where)


def test_wrong_mirrors_are_refused_early(checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path) -> None:
    with pytest.raises(UnsupportedPathError, match="scheme 'ftp'"):
        checkpointer.save(STATE, tmp_path / "a", mirror="ftp://host/x")
    with SyncCheckpointer() as other, pytest.raises(ConfigError, match="use AsyncCheckpointer"):
        other.save(STATE, tmp_path / "a", mirror=tmp_path / "b")
    with pytest.raises(ConfigError, match="is inside the other"):
        CheckpointManager(tmp_path / "runs", mirror=tmp_path / "runs")
    with pytest.raises(ConfigError, match="give mirror="):
        CheckpointManager(tmp_path / "runs", max_unmirrored=1)
    for given in ({"max_unmirrored": 1}, {"max_to_keep": 1}):
        with pytest.raises(ConfigError, match="needs mirror=, max_to_keep= and max_unmirrored="):
            CheckpointManager(tmp_path / "runs", mirror=tmp_path / "mirror", on_unmirrored="wait", **given)
    with pytest.raises(ConfigError, match="expected 'remove' or 'wait'"):
        CheckpointManager(tmp_path / "runs", mirror=tmp_path / "mirror", on_unmirrored="skip")
    assert names(tmp_path) == set()


def test_a_slow_mirror_delays_no_save(endpoint: str, tmp_path: pathlib.Path) -> None:
    with running(endpoint, SLOW, SOON), AsyncCheckpointer(endpoint=endpoint) as checkpointer:
        save(checkpointer, tmp_path, 0)
        began = time.monotonic()
        handles = [save(checkpointer, tmp_path, step) for step in range(1, 4)]
        assert not handles[-1].mirrored.done() and time.monotonic() - began < DEADLINE_S / 2


BAD_MIRRORS = ("hangs", "refuses", "full", "gone")


@contextlib.contextmanager
def bad_mirror(kind: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield a mirror that takes no checkpoint: it does not answer, refuses, has no room, or is not there."""
    if kind == "full":
        if os.geteuid():
            pytest.skip("mounts need root")
        with mounts.tmpfs(tmp_path / "small", "size=64k") as place:
            yield str(place)
        return
    pytest.importorskip("obstore", reason="the extra cloud is not installed")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.setenv(name, "test")
    with contextlib.ExitStack() as stack:
        if kind == "refuses":
            proxy = stack.enter_context(object_proxy.running("http://127.0.0.1:9"))
            proxy.fault = lambda method, path: object_proxy.REFUSED
            url = proxy.url
        else:
            port = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            url = f"http://127.0.0.1:{port}"
            if kind == "gone":
                stack.close()
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        yield "s3://bucket/mirror"


@pytest.mark.parametrize("kind", BAD_MIRRORS)
def test_a_mirror_that_takes_nothing_costs_no_save_and_no_time(
    endpoint: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    n_saves, seconds = 12, dict[str, list[float]](mirror=[], none=[])
    with bad_mirror(kind, tmp_path, monkeypatch) as mirror, running(endpoint, SOON) as worker:
        with AsyncCheckpointer(endpoint=endpoint) as checkpointer:
            handles = []
            for step in range(n_saves):
                for way, times in seconds.items():  # in turn, so that what else the machine does meets both
                    place = f"{mirror}/step-{step}" if way == "mirror" else None
                    began = time.monotonic()
                    handle = checkpointer.save(STATE, tmp_path / way / f"step-{step}", step=step, mirror=place)
                    times.append(time.monotonic() - began)
                    handle.written.result(DEADLINE_S)
                    handles.append(handle)
            if kind in ("refuses", "full"):
                wait_until(lambda: [row for row in worker.status()["mirrors"] if row["error"]], "a copy has failed")
            assert not any(handle.mirrored.done() for handle in handles if handle.mirrored is not None)
            assert len(worker.status()["mirrors"]) == n_saves, "all of them wait"
        for way in seconds:
            assert asyncckpt.latest_checkpoint(tmp_path / way) == str(tmp_path / way / f"step-{n_saves - 1}")
            assert names(tmp_path / way) >= {f"step-{step}" for step in range(n_saves)}
        print(seconds)
        assert seconds["mirror"][0] < seconds["none"][0] + 1.0, "the first save asks it for nothing"
        assert statistics.median(seconds["mirror"][1:]) < statistics.median(seconds["none"][1:]) + 0.25


@mounts.needs_root
def test_without_room_the_oldest_goes_though_it_is_not_in_the_mirror(
    worker: RealWorker, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    mirror = tmp_path / "mirror"
    mirror.write_text("away")
    with mounts.tmpfs(tmp_path / "small", "size=20m") as place:
        options: dict[str, Any] = {"max_to_keep": 1, "mirror": mirror, "endpoint": worker.endpoint}
        with CheckpointManager(place / "runs", **options) as manager:
            for step in range(8):  # of 4 MB each
                handle = manager.save(step, STATE)
                assert handle is not None
                handle.written.result(DEADLINE_S)
            wait_until(lambda: len(manager.all_steps()) <= 3, "there is room for two more")
            assert manager.latest_step() == 7
    assert "is removed before it is in its mirror: there is no room for two more checkpoints" in caplog.text
