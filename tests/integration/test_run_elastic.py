"""`asyncckpt run -- torchrun`: one worker over all restarts, and what a killed rank has staged is committed."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import psutil
from real_worker import manifest_of, wait_until

import asyncckpt

ROOT = pathlib.Path(__file__).parents[2]

RANK = """
import os, signal, sys, time
import torch
import asyncckpt
from asyncckpt.cli.worker_requests import status_of

root, rank, restart = sys.argv[1], int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
with asyncckpt.AsyncCheckpointer(rank_info=asyncckpt.RankInfo(0, 1)) as checkpointer:
    state = {"w": torch.full((1000,), 10 * restart + rank), "step": restart}
    checkpointer.save(state, f"{root}/rank{rank}/restart{restart}").staged.result(60)
    with open(f"{root}/workers", "a") as file:
        file.write(f"{status_of(os.environ['ASYNCCKPT_ENDPOINT'])['pid']}\\n")
    if restart == 0:
        while rank == 1 and len(open(f"{root}/workers").readlines()) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else time.sleep(60)
"""


def test_worker_is_the_same_over_restarts_and_nothing_is_left(
    endpoint_dir: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "train.py").write_text(RANK)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1")
    words = [sys.executable, *torchrun, str(tmp_path / "train.py"), str(tmp_path)]
    path = os.pathsep.join(map(str, (ROOT, ROOT / ".typing")))
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
            assert asyncckpt.load(path)["w"].eq(10 * restart + rank).all()
    assert [p for p in endpoint_dir.rglob("*") if not p.is_dir()] == []
    wait_until(lambda: not _processes_of(tmp_path), "all that was started has ended")


def _processes_of(root: pathlib.Path) -> list[int]:
    return [p.pid for p in psutil.process_iter(["cmdline"]) if str(root) in " ".join(p.info["cmdline"] or ())]
