"""Surroundings that refuse what trainer and worker use: saves work by another way, or say by a typed error what is
refused; the training goes on; and `asyncckpt doctor` says beforehand which of the two it will be."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
import sandbox
from real_worker import RealWorker, running, stop_whoever_serves

from tests.warm_python import WarmPython

DEADLINE_S = 150.0
Wrap = Callable[..., list[str]]

TRAINER = """
import json, os, signal, sys, time, torch, asyncckpt
told = []

def outcome(handle):
    error = handle.written.exception(100)
    return None if error is None else [type(error).__name__, str(error)]

try:
    checkpointer = asyncckpt.AsyncCheckpointer(worker_start_timeout_s=60, on_worker_loss="fail", worker_timeout_s=100)
except asyncckpt.errors.AsyncCkptError as error:
    print(json.dumps([[type(error).__name__, str(error)]]))
    sys.exit()
for n in range(3):
    handle = checkpointer.save({"w": torch.full((100,), float(n))}, f"{sys.argv[1]}/{n}")
    told.append(outcome(handle))
    if told[-1] is None:
        assert asyncckpt.load(handle.path)["w"].sum() == 100 * n
        assert asyncckpt.restore_latest(sys.argv[1]) is not None
if sys.argv[2:] == ["kill"]:
    session = checkpointer._process._connection.session
    os.kill(session.worker.pid, signal.SIGKILL)
    killed = time.monotonic()
    while session.error is None:
        assert time.monotonic() < killed + 100
        time.sleep(0.005)
    told.append(time.monotonic() - killed)
    told.append(outcome(checkpointer.save({"w": torch.ones(3)}, f"{sys.argv[1]}/after")))
checkpointer.close()
print(json.dumps(told))
"""


def trained(wrap: Wrap, root: pathlib.Path, *arguments: str) -> list[object]:
    """Return what a training says of its saves in these surroundings: None, or [type, text] of the error, for each."""
    command = wrap(sys.executable, "-c", TRAINER, str(root), *arguments)
    return told_by(subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False))


def told_by(done: subprocess.CompletedProcess[str]) -> list[object]:
    assert not done.returncode and "Traceback" not in done.stderr, done.stderr
    told: list[object] = json.loads(done.stdout.splitlines()[-1])
    return told


def forked(python: WarmPython, root: pathlib.Path, *arguments: str, before: str = "") -> list[object]:
    """As `trained`, of a training that is forked and runs the program `before` first."""
    return told_by(python.run(before + TRAINER, str(root), *arguments, timeout_s=DEADLINE_S))


def doctor(wrap: Wrap, root: pathlib.Path) -> tuple[bool, dict[str, str]]:
    """Return whether the doctor says that saves will work, and the status of each check."""
    command = wrap(sys.executable, "-m", "asyncckpt", "doctor", str(root), "--state-bytes", "1MB", "--json")
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr
    checks = json.loads(done.stdout)["checks"]
    return done.returncode == 0, {one["name"]: one["status"] for one in checks}


def refuses(call: str, code: int) -> Wrap:
    """Return what surrounds a command so that a system call is refused."""
    return lambda *command: sandbox.refusing((call,), code, *command)


def end_workers(directory: pathlib.Path) -> None:
    """End the workers that trainings have started below `directory`."""
    for lock in directory.rglob("*.sock.lock"):
        stop_whoever_serves(f"ipc://{lock}".removesuffix(".lock"))


@sandbox.has_seccomp
@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
def test_without_pidfds_saves_work_a_death_is_noticed_within_a_second_and_doctor_says_so(
    default_dir: pathlib.Path, tmp_path: pathlib.Path, warm_python: WarmPython, code: int
) -> None:
    try:
        works, checks = doctor(refuses("pidfd_open", code), tmp_path)
        assert works and checks["pidfd"] == "warn"
        refusal = sandbox.refusal(("pidfd_open",), code)
        *saves, noticed_s, after = forked(warm_python, tmp_path, "kill", before=refusal)
        assert saves == [None] * 3 and after is None
        assert isinstance(noticed_s, float) and noticed_s < 1.0, "P6"
    finally:
        end_workers(default_dir)


@sandbox.has_seccomp
@pytest.mark.parametrize(
    ("call", "code", "kind", "check"),
    [
        ("memfd_create", errno.EPERM, "UnsupportedPlatformError", "slots"),
        ("memfd_create", errno.ENOSYS, "UnsupportedPlatformError", "slots"),
        ("eventfd2", errno.EPERM, "WorkerUnavailableError", "open files"),
    ],
)
def test_what_cannot_be_done_without_is_a_typed_error_of_each_save_and_a_failed_check(
    default_dir: pathlib.Path,
    tmp_path: pathlib.Path,
    warm_python: WarmPython,
    call: str,
    code: int,
    kind: str,
    check: str,
) -> None:
    try:
        works, checks = doctor(refuses(call, code), tmp_path)
        assert not works and checks[check] == "fail"
        told = forked(warm_python, tmp_path, before=sandbox.refusal((call,), code))
        assert [one[0] for one in told] == [kind] * 3  # type: ignore[index]
        assert call != "memfd_create" or "seccomp" in told[0][1]  # type: ignore[index]
    finally:
        end_workers(default_dir)


@pytest.mark.root
@sandbox.needs_root
def test_without_proc_each_save_fails_with_an_error_that_names_it_and_doctor_says_so(
    default_dir: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    try:
        works, checks = doctor(sandbox.without_proc, tmp_path)
        assert not works and checks["processes"] == "fail"
        told = trained(sandbox.without_proc, tmp_path)
        assert [one[0] for one in told] == ["WorkerUnavailableError"] * 3  # type: ignore[index]
        assert all("/proc" in one[1] and "mount" in one[1] for one in told)  # type: ignore[index]
    finally:
        end_workers(default_dir)


@pytest.mark.root
@sandbox.needs_root
def test_a_checkpoint_is_loaded_without_proc_beside_a_worker_that_holds_it(
    worker: RealWorker, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, warm_python: WarmPython
) -> None:
    monkeypatch.setenv("ASYNCCKPT_ENDPOINT", worker.endpoint)
    assert forked(warm_python, tmp_path) == [None] * 3
    program = "import sys, asyncckpt; print(int(asyncckpt.load(sys.argv[1])['w'].sum()), asyncckpt.held_snapshots('/'))"
    command = sandbox.without_proc(sys.executable, "-c", program, str(tmp_path / "2"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.stdout.split() == ["200", "[]"], done.stderr


@pytest.mark.root
@sandbox.needs_root
def test_a_worker_of_another_pid_namespace_is_refused_by_name_and_doctor_says_so(
    worker: RealWorker, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCCKPT_ENDPOINT", worker.endpoint)
    works, checks = doctor(sandbox.in_own_pids, tmp_path)
    assert not works and checks["worker"] == "fail"
    ((kind, text),) = trained(sandbox.in_own_pids, tmp_path)  # type: ignore[misc]
    assert kind == "WorkerUnavailableError" and "PID namespace" in text  # type: ignore[has-type]


@sandbox.has_seccomp
@pytest.mark.parametrize("refused", ["the trainer", "the worker"])
def test_only_one_side_without_pidfds_does_as_well(
    endpoint: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, warm_python: WarmPython, refused: str
) -> None:
    monkeypatch.setenv("ASYNCCKPT_ENDPOINT", endpoint)
    if refused == "the trainer":
        with running(endpoint):
            refusal = sandbox.refusal(("pidfd_open",), errno.EPERM)
            assert forked(warm_python, tmp_path, before=refusal) == [None] * 3
        return
    start = refuses("pidfd_open", errno.EPERM)(
        sys.executable, "-m", "asyncckpt_worker", "--endpoint", endpoint, "--detach"
    )
    subprocess.run(start, check=True, timeout=DEADLINE_S)
    found = RealWorker(endpoint)
    try:
        assert forked(warm_python, tmp_path) == [None] * 3
    finally:
        found.stop()


def test_a_process_that_cannot_be_looked_at_is_not_taken_for_a_dead_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncckpt.protocol import identity

    def unreadable(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    started = identity.start_ticks(os.getpid())
    assert started is not None
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE) as child:
        began = identity.start_ticks(child.pid)
        assert began is not None
        monkeypatch.setattr("builtins.open", unreadable)
        monkeypatch.setattr(os, "listdir", unreadable)
        assert not identity.has_exited(os.getpid(), started) and not identity.has_exited(child.pid, began)
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert identity.has_exited(child.pid, began)
        assert identity.has_exited(0, 1) and identity.has_exited(1 << 40, 1)
