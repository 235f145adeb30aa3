"""P12: what a DataLoader forks lives on while the trainer ends or is killed, and keeps nothing of ours alive."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest
import torch
from real_worker import DEADLINE_S, RealWorker, wait_until

import asyncckpt
from asyncckpt.protocol.identity import start_ticks
from tests.warm_python import WarmPython

TRAINER = """
import os, signal, sys, torch, warnings
from asyncckpt import AsyncCheckpointer
warnings.simplefilter("ignore")
endpoint, directory = sys.argv[1:]
class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 1000
    def __getitem__(self, number):
        return torch.tensor([number, os.getpid()])
checkpointer = AsyncCheckpointer(endpoint=endpoint)
state = {"w": torch.arange(1_000_000.0)}
checkpointer.save(state, f"{directory}/0").written.result(60)
loader = torch.utils.data.DataLoader(Numbers(), num_workers=1, multiprocessing_context="fork")
batches = iter(loader)  # forked while a slot is mapped, with the worker's socket open
(_, pid), = next(batches).tolist()
checkpointer.save(state, f"{directory}/1").written.result(60)
print(pid, flush=True)
sys.stdin.readline()
"""


def slots_of(pid: int) -> set[int]:
    """Return the inodes of the slots that a process has mapped or holds open."""
    found = set()
    try:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "memfd:asyncckpt" in line:
                found.add(int(line.split()[4]))
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                if "memfd:asyncckpt" in os.readlink(f"/proc/{pid}/fd/{fd}"):
                    found.add(os.stat(f"/proc/{pid}/fd/{fd}").st_ino)
    except (FileNotFoundError, PermissionError, ProcessLookupError):
        pass  # it has ended, or is not ours
    return found


def holders_of(slots: set[int]) -> list[int]:
    """Return all processes of this machine that hold any of these slots."""
    return [pid for name in os.listdir("/proc") if name.isdigit() and slots_of(pid := int(name)) & slots]


@pytest.mark.parametrize("way", ["ends", "killed"])
def test_a_data_loader_s_process_keeps_no_memory_and_no_socket_of_a_trainer_that_is_gone(
    worker: RealWorker, endpoint_dir: Path, tmp_path: Path, way: str, warm_python: WarmPython
) -> None:
    with warm_python.talking(TRAINER, worker.endpoint, str(tmp_path)) as (trainer, stdin, stdout):
        began = None
        try:
            loader = int(stdout.readline())
            began = start_ticks(loader)
            slots = slots_of(trainer.pid)
            assert began is not None and slots
            assert not slots_of(loader), "a forked child has closed and unmapped them"
            if way == "killed":
                os.kill(loader, signal.SIGSTOP)  # it would see that its parent is gone, and end
                trainer.kill()
                worker.kill()
            else:
                stdin.write("go\n")
                stdin.flush()
            assert trainer.wait(DEADLINE_S) == (-signal.SIGKILL if way == "killed" else 0)
            if way == "killed":
                assert start_ticks(loader) == began, "it lives on"
            else:
                worker.stop()
            wait_until(lambda: not holders_of(slots), "nobody holds the slots' memory")
        finally:
            trainer.kill()
            if began is not None and start_ticks(loader) == began:
                os.kill(loader, signal.SIGCONT)
    wait_until(lambda: start_ticks(loader) != began, "the data loader's process ends too")
    left = {"w.sock", "w.sock.lock"} if way == "killed" else {"w.sock.lock"}
    assert {entry.name for entry in endpoint_dir.glob("w.sock*")} == left, "of a killed worker its socket's name stays"
    assert torch.equal(asyncckpt.load(tmp_path / "1")["w"], torch.arange(1_000_000.0))
