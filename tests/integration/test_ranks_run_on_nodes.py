"""`asyncckpt run` on each of several nodes, as docs/deployment has it: here they are two endpoints of one machine."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import torch
import torch.distributed as dist
from real_worker import manifest_of

import asyncckpt

ROOT = pathlib.Path(__file__).parents[2]
TRAINER = """
import os, sys, torch, torch.distributed as dist
from asyncckpt import AsyncCheckpointer, ShardedSlice
dist.init_process_group("gloo")
rank = dist.get_rank()
whole = torch.arange(12.0).view(6, 2)
with AsyncCheckpointer() as checkpointer:
    state = {"w": ShardedSlice(whole[3 * rank : 3 * rank + 3], (6, 2), (3 * rank, 0))}
    checkpointer.save(state, sys.argv[1], step=1).written.result(60)
print(os.environ["ASYNCCKPT_ENDPOINT"])
dist.destroy_process_group()
"""


def test_started_by_run_on_each_node_the_ranks_make_one_checkpoint(
    tmp_path: pathlib.Path, endpoint_dir: pathlib.Path
) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    path = os.pathsep.join(map(str, (ROOT, ROOT / ".typing")))
    environ = {**os.environ, "PYTHONPATH": path, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    nodes = []
    for rank in (0, 1):
        options = ("--endpoint", f"ipc://{endpoint_dir}/{rank}.sock", "--advertise", "127.0.0.1", "--port", "0")
        trainer = (sys.executable, "-c", TRAINER, str(tmp_path / "c"))
        nodes.append(
            subprocess.Popen(
                [sys.executable, "-m", "asyncckpt", "run", *options, "--", *trainer],
                env={**environ, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        ends = [(*node.communicate(timeout=120), node.returncode) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    assert [code for _, _, code in ends] == [0, 0], ends
    assert [said.strip()[-6:] for said, _, _ in ends] == ["0.sock", "1.sock"], "each had its own worker"
    assert torch.equal(asyncckpt.load(tmp_path / "c")["w"], torch.arange(12.0).view(6, 2))
    assert len(manifest_of(tmp_path / "c")["ranks"]) == 2
