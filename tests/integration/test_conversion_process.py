"""Conversions in processes of their own: how much memory they take, and what a full disk or a Ctrl-C leaves."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from real_worker import wait_until

import asyncckpt
from asyncckpt import cli
from asyncckpt.errors import SaveFailedError
from asyncckpt.storage.files import Files
from tests.warm_python import WarmPython

TARGETS = ("asyncckpt", "dcp", "torch", "safetensors", "hf")
DEADLINE_S = 60
ATTEMPTS = 20
"""A conversion may end before this process, on a busy machine, has seen it begin."""

LARGEST_NBYTES = 320_000_000
LIMIT_NBYTES = 256_000_000

MEASURED = """
import sys
import asyncckpt
from asyncckpt.interop import convert
from asyncckpt.interop.diff import compare
import torch
torch.ones(10).view(torch.uint8).sum()
def of(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))
for order in sys.argv[1:]:
    source, target, to = order.split()
    open("/proc/self/clear_refs", "w").write("5")  # forget the peak so far: proc(5)
    before = of("VmRSS")
    if to == "compare":
        assert compare(source, target).differences[0].max_abs_difference == 1
    elif to == "halves":
        halves = asyncckpt.TensorRule("t", ["left", "right"], dim=1)
        asyncckpt.convert(source, target, to="hf", rules=[halves], dtype="bfloat16")
    else:
        asyncckpt.convert(source, target, to=to)
    print(of("VmHWM") - before)
"""


def peaks_of(*orders: str) -> list[int]:
    """Return the bytes of memory that each of these takes, one after the other: "source target kind"."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("the peak of memory cannot be reset here")
    command = [sys.executable, "-c", MEASURED, *orders]
    done = subprocess.run(command, capture_output=True, timeout=2 * DEADLINE_S, check=True, text=True)
    return [int(line) for line in done.stdout.split()]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A torch file with one large tensor, its transposed twin in another storage, and many small ones."""
    path = tmp_path_factory.mktemp("large") / "a.pt"
    big = torch.arange(LARGEST_NBYTES // 4, dtype=torch.int32).reshape(1000, -1)
    torch.save({"big": big, "small": {str(n): torch.full((1000, 100), float(n)) for n in range(200)}}, path)
    yield path
    path.unlink()


def test_memory_is_bounded_whatever_the_size(large: Path, tmp_path: Path) -> None:
    there = [f"{large} {tmp_path}/{to} {to}" for to in TARGETS]
    peaks = peaks_of(*there, *(f"{tmp_path}/{to} {tmp_path}/back-{to}.pt torch" for to in TARGETS))
    assert max(peaks) < LIMIT_NBYTES, f"not even the largest tensor is in memory at once: {peaks}"


def test_a_comparison_takes_no_more_than_its_slabs_and_a_transposed_tensor_its_own_size(
    tmp_path: Path,
) -> None:
    for name in ("a", "b"):
        torch.save({"t": torch.full((64 << 20,), ord(name), dtype=torch.uint8)}, tmp_path / name)
    torch.save({"t": torch.arange(LARGEST_NBYTES // 4, dtype=torch.int32).reshape(1000, -1).t()}, tmp_path / "t")
    root = tmp_path
    compared, turned = peaks_of(f"{root}/a {root}/b compare", f"{root}/t {root}/out safetensors")
    assert compared < LIMIT_NBYTES
    assert turned < LARGEST_NBYTES + LIMIT_NBYTES


def test_a_tensor_that_is_split_and_cast_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    whole = torch.arange(LARGEST_NBYTES // 4, dtype=torch.float32).reshape(1000, -1)
    torch.save({"t": whole}, tmp_path / "a.pt")
    orders = (f"{tmp_path}/a.pt {tmp_path}/ours asyncckpt", f"{tmp_path}/ours {tmp_path}/b halves")
    peaks = peaks_of(*orders, f"{tmp_path}/a.pt {tmp_path}/c halves")
    assert max(peaks) < LIMIT_NBYTES
    for name in ("b", "c"):
        found = asyncckpt.load(tmp_path / name)
        assert torch.equal(torch.cat([found["left"], found["right"]], 1), whole.bfloat16())


@pytest.mark.parametrize(
    ("number", "to"), [*((signal.SIGINT, kind) for kind in TARGETS), (signal.SIGTERM, "dcp"), (signal.SIGHUP, "torch")]
)
def test_ctrl_c_and_a_scheduler_s_end_leave_nothing_behind(
    number: int, to: str, large: Path, tmp_path: Path, warm_python: WarmPython
) -> None:
    # Whoever runs the tests in the background of a shell has Ctrl-C ignored, and what is ignored stays so.
    default = "default_int_handler" if number == signal.SIGINT else "SIG_DFL"
    heard = "import faulthandler, signal, sys; faulthandler.register(signal.SIGUSR1)"
    heard += f"; signal.signal({int(number)}, signal.{default})"
    command = f"{heard}; from asyncckpt.cli import main; sys.exit(main(sys.argv[1:]))"
    for attempt in range(ATTEMPTS):
        root = tmp_path / str(attempt)
        root.mkdir()
        with (
            (tmp_path / "stderr").open("wb") as stderr,
            warm_python.running(
                command, "convert", str(large), str(root / "out"), "--to", to, stderr=stderr
            ) as process,
        ):
            wait_until(lambda root=root: os.listdir(root), "it writes")  # type: ignore[misc]
            process.send_signal(number)
            try:
                code = process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGUSR1)
                wait_until(lambda: "most recent call first" in (tmp_path / "stderr").read_text(), "where it is")
                pytest.fail(f"it has not ended; its threads are at\n{(tmp_path / 'stderr').read_text()}")
        if code:
            assert code == 128 + number
            assert not os.listdir(root)
            return
        assert os.listdir(root) == ["out"], "it had ended before"
    pytest.fail("no conversion heard the signal")


INTERRUPTED = """
import importlib, os, signal, sys
from asyncckpt.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)
module, step, number = importlib.import_module(sys.argv[1]), sys.argv[2], int(sys.argv[3])
real = getattr(module, step)
def step_of(*arguments, **kw):
    os.kill(os.getpid(), number)
    return real(*arguments, **kw)
setattr(module, step, step_of)
sys.exit(main(sys.argv[4:]))
"""


@pytest.mark.parametrize(
    ("module", "step", "number", "stands"),
    [
        ("convert", "verify_bytes", signal.SIGINT, "old"),
        ("convert", "put_into_place", signal.SIGTERM, "old"),
        ("publish", "fsync_directory", signal.SIGTERM, "new"),
        ("publish", "_replace", signal.SIGHUP, "new"),
    ],
    ids=str,
)
def test_a_signal_while_a_checkpoint_is_replaced_leaves_the_old_or_the_new_one_whole(
    module: str, step: str, number: int, stands: str, tmp_path: Path, warm_python: WarmPython
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    for name, value in (("old", 1.0), ("new", 2.0)):
        torch.save({name: torch.full((400_000,), value)}, tmp_path / f"{name}.pt")
    asyncckpt.convert(tmp_path / "old.pt", root / "out", to="asyncckpt")
    where = [f"asyncckpt.interop.{module}", step, str(int(number))]
    arguments = ["convert", str(tmp_path / "new.pt"), str(root / "out"), "--to", "asyncckpt", "--overwrite"]
    assert warm_python.run(INTERRUPTED, *where, *arguments, timeout_s=DEADLINE_S).returncode == 128 + number
    assert os.listdir(root) == ["out"]
    ((name, tensor),) = asyncckpt.load(root / "out").items()
    assert name == stands
    assert torch.equal(tensor, torch.full((400_000,), {"old": 1.0, "new": 2.0}[name]))


@pytest.mark.parametrize("kind", ["asyncckpt", "torch"])
@pytest.mark.parametrize(
    ("module", "step", "stands"),
    [
        ("publish", "_check_replaceable", "old"),
        ("convert", "verify_bytes", "old"),
        ("publish", "publish", "old"),
        ("publish", "_replace", "old"),
        ("publish", "fsync_directory", "new"),
    ],
    ids=str,
)
def test_a_kill_while_a_checkpoint_is_replaced_leaves_the_old_or_the_new_one_and_what_gc_removes(
    module: str, step: str, stands: str, kind: str, tmp_path: Path, warm_python: WarmPython
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    for name in ("old", "new"):
        torch.save({name: torch.ones(1000)}, tmp_path / f"{name}.pt")
    asyncckpt.convert(tmp_path / "old.pt", root / "out", to=kind)
    where = [f"asyncckpt.interop.{module}", step, str(int(signal.SIGKILL))]
    arguments = ["convert", str(tmp_path / "new.pt"), str(root / "out"), "--to", kind, "--overwrite"]
    assert warm_python.run(INTERRUPTED, *where, *arguments, timeout_s=DEADLINE_S).returncode == -signal.SIGKILL
    assert list(asyncckpt.load(root / "out")) == [stands]
    left = [name for name in os.listdir(root) if name != "out"]
    assert all(name.startswith(".out.") and name.endswith(".converting") for name in left)
    asyncckpt.convert(tmp_path / "new.pt", root / "out", to=kind, overwrite=True)
    assert list(asyncckpt.load(root / "out")) == ["new"]
    assert cli.main(["gc", str(root), "--older-than", "0", "--delete"]) == 0
    assert os.listdir(root) == ["out"]


EXPORTED = """
import os, signal, sys, torch, asyncckpt
root, steps_left = sys.argv[1], int(sys.argv[2])
class Model(torch.nn.Linear):
    config = {"model_type": "none"}
def step(done, total):
    global steps_left
    steps_left -= 1
    if not steps_left:
        os.kill(os.getpid(), signal.SIGKILL)
asyncckpt.export_hf(Model(3000, 2000), root + "/out", overwrite=True, progress=step)
"""


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_kill_during_an_export_of_a_model_leaves_the_old_one_and_what_gc_removes(
    steps: int, tmp_path: Path, warm_python: WarmPython
) -> None:
    """Killed while weights are written, and while they are read back."""
    root = tmp_path / "root"
    root.mkdir()
    torch.save({"old": torch.ones(1000)}, tmp_path / "old.pt")
    asyncckpt.convert(tmp_path / "old.pt", root / "out", to="hf")
    assert warm_python.run(EXPORTED, str(root), str(steps), timeout_s=DEADLINE_S).returncode == -signal.SIGKILL
    assert list(asyncckpt.load(root / "out")) == ["old"]
    left = [name for name in os.listdir(root) if name != "out"]
    assert len(left) == 2, "the state dict, and the target"
    assert all(name.startswith(".out.") and name.endswith(".converting") for name in left)
    assert asyncckpt.latest_checkpoint(root) is None
    assert cli.main(["gc", str(root), "--older-than", "0", "--delete"]) == 0
    assert os.listdir(root) == ["out"]


STARTING = """
import os, signal, sys, threading, time
from asyncckpt.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)
main_thread, names, armed, second = threading.get_ident(), [sys.argv[1]], [], []
enter, start = threading.Condition.__enter__, threading.Thread.start
def entering(self):
    if threading.get_ident() != main_thread:
        second.append(self)
        return enter(self)
    found = enter(self)
    if armed:
        armed.clear()
        while self not in second:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)
    return found
def starting(self):
    if names and self.name.startswith(names[0]):
        armed.append(names.pop())
    start(self)
    assert not armed, "it did not wait for the thread"
threading.Condition.__enter__, threading.Thread.start = entering, starting
sys.exit(main(sys.argv[2:]))
"""
"""Ctrl-C in the instant in which the main thread has the lock under which a new thread says that it has begun."""


@pytest.mark.parametrize(
    "name", ["asyncckpt-convert", "asyncckpt-prove", "asyncckpt-sums", "asyncckpt-read", "asyncckpt-read of a load"]
)
def test_a_ctrl_c_while_threads_are_started_ends_the_process(
    name: str, tmp_path: Path, warm_python: WarmPython
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    if name.endswith("load"):
        with asyncckpt.SyncCheckpointer(fsync=False) as checkpointer:
            checkpointer.save({f"w{n}": torch.ones(1 << 18) for n in range(8)}, tmp_path / "a")
        program = STARTING.replace("sys.exit(main(sys.argv[2:]))", "import asyncckpt; asyncckpt.load(sys.argv[2])")
        arguments, code = [str(tmp_path / "a")], -signal.SIGINT
    else:
        torch.save({"a": torch.ones(1000), "b": torch.ones(3, 2)}, tmp_path / "a.pt")
        program = STARTING
        arguments, code = ["convert", str(tmp_path / "a.pt"), str(root / "out"), "--to", "dcp"], 128 + signal.SIGINT
    done = warm_python.run(program, name.removesuffix(" of a load"), *arguments, timeout_s=DEADLINE_S)
    assert done.returncode == code
    assert os.listdir(root) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MB."""
    if os.geteuid():
        pytest.skip("mounting needs root")
    target = tmp_path / "small"
    target.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(target)], check=False)
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    yield target
    subprocess.run(["umount", str(target)], check=True)


@pytest.mark.root
@pytest.mark.parametrize("to", TARGETS)
def test_a_disk_that_is_or_becomes_full_holds_nothing_afterwards(
    to: str, small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({str(n): torch.full((1000, 1000), float(n)) for n in range(6)}, tmp_path / "a.pt")
    with pytest.raises(SaveFailedError, match="its file system has"):
        asyncckpt.convert(tmp_path / "a.pt", small_disk / "x", to=to)
    assert not os.listdir(small_disk)
    roomy = os.statvfs("/")
    monkeypatch.setattr(Files, "statvfs", lambda self, path: roomy)  # as if somebody filled it meanwhile
    with pytest.raises(SaveFailedError) as caught:
        asyncckpt.convert(tmp_path / "a.pt", small_disk / "x", to=to)
    assert caught.value.code == errno.errorcode[errno.ENOSPC]
    assert not os.listdir(small_disk)
    assert threading.active_count() == 1 or all("asyncckpt" not in t.name for t in threading.enumerate())
