"""`asyncckpt run -- torchrun`: one worker over all restarts, and what a killed rank has staged is committed."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import psutil
from real_worker import manifest_of, wait_until

import asyncckpt
from tests.torch_free_client import Snapshot

ROOT = pathlib.Path(__file__).parents[2]

RANK = """
import os, signal, sys, time
from tests.torch_free_client import Client, Snapshot, new_save_id

root, rank, restart = sys.argv[1], int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
client, snapshot, save_id = Client(os.environ["ASYNCCKPT_ENDPOINT"]), Snapshot(seed=10 * restart + rank), new_save_id()
worker = client.hello().pid
slot = client.allocate(snapshot.slot_nbytes())
client.stage(slot, snapshot, save_id, f"{root}/rank{rank}/restart{restart}", step=restart)
client.submit(slot, save_id)
with open(f"{root}/workers", "a") as file:
    file.write(f"{worker}\\n")
if restart == 0:
    while rank == 1 and len(open(f"{root}/workers").readlines()) < 2:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else time.sleep(60)
os._exit(0)
"""
"""A rank without torch, which takes seconds to import."""


def test_worker_is_the_same_over_restarts_and_nothing_is_left(
    endpoint_dir: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "train.py").write_text(RANK)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1")
    words = [sys.executable, *torchrun, str(tmp_path / "train.py"), str(tmp_path)]
    path = os.pathsep.join(map(str, (ROOT, ROOT / ".typing", ROOT / "tests")))
    done = subprocess.run(
        [sys.executable, "-m", "asyncckpt", "run", "--", *words],
        env={**os.environ, "PYTHONPATH": path, "XDG_RUNTIME_DIR": str(endpoint_dir)},
        capture_output=True, text=True, timeout=220, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    workers = (tmp_path / "workers").read_text().split()
    assert len(workers) == 4 and len(set(workers)) == 1
    for rank in range(2):
        for restart in range(2):
            path = f"{tmp_path}/rank{rank}/restart{restart}"
            assert manifest_of(path)["step"] == restart
            found = asyncckpt.load(path)
            assert all(bytes(found[n].tolist()) == t for n, t in Snapshot(seed=10 * restart + rank).tensors.items())
    assert [p for p in endpoint_dir.rglob("*") if not p.is_dir()] == []
    wait_until(lambda: not _processes_of(tmp_path), "all that was started has ended")


def _processes_of(root: pathlib.Path) -> list[int]:
    return [p.pid for p in psutil.process_iter(["cmdline"]) if str(root) in " ".join(p.info["cmdline"] or ())]
