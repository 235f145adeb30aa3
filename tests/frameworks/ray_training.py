"""Two runs of Ray Train with FSDP2 on two ranks, in one cluster: one that nothing disturbs, one whose rank 1 is killed.

A program: Ray's processes get the functions by value.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import sys
from typing import Any

import ray.train
import ray.train.torch
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from asyncckpt.examples.digests import digest_of
from asyncckpt.integrations.ray import RayCheckpointManager

WIDTH, BATCH = 16, 4


def train(config: dict[str, Any]) -> None:
    """The training function; Ray runs it on every rank."""
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 33), nn.GELU(), nn.Linear(33, 1))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.randn(config["steps"], world_size, BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    with RayCheckpointManager(**config["options"]) as checkpoints:
        found = checkpoints.restore(state)
        began = 0 if found is None else found.step
        for step in range(began + 1, config["steps"] + 1):
            batch = data[step - 1, rank]
            loss = (model(batch).squeeze(1) - batch.sin().sum(1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            metrics = {"step": step, "began": began}
            if step == config["steps"]:
                metrics["digest"] = _digest_of(model)
            checkpoints.report(metrics, {**state, "step": step}, step=step)
            _kill_once(config, rank, step)


def _digest_of(model: nn.Module) -> str:
    whole = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.state_dict().items()}
    return digest_of(whole)


def _kill_once(config: dict[str, Any], rank: int, step: int) -> None:
    killed = pathlib.Path(config["killed"])
    if rank == 1 and step == config["kill_at"] and not killed.exists():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def fit(directory: str, steps: int, options: dict[str, Any], s3: str, kill_at: int = 0) -> dict[str, Any]:
    """Train on two ranks; return the last metrics: the digest of the weights, the step the last attempt began at.

    Args:
        directory: Where the run's directory is, in the file system or in a bucket of `s3`.
        options: Of `RayCheckpointManager`.
        s3: Address of a server that speaks as S3 does; empty: the file system.
    """
    storage = {"storage_path": directory}
    if s3:
        from pyarrow.fs import S3FileSystem

        keys = {"access_key": "test", "secret_key": "test", "region": "us-east-1"}
        name = pathlib.Path(directory).name
        filesystem = S3FileSystem(endpoint_override=s3.removeprefix("http://"), scheme="http", **keys)
        storage = {"storage_path": f"bucket/{name}", "storage_filesystem": filesystem}
        pathlib.Path(directory).mkdir()
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={
            "steps": steps,
            "kill_at": kill_at,
            "killed": f"{directory}/killed",
            "options": options,
        },
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            name="run",
            **storage,
            failure_config=ray.train.FailureConfig(max_failures=1),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=3),
        ),
    )
    metrics = trainer.fit().metrics
    assert metrics is not None
    return {name: metrics[name] for name in ("step", "began", "digest")}


if __name__ == "__main__":
    short, root, steps, kill_at, s3, given = sys.argv[1:]
    options = json.loads(given)
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=80_000_000,
        _temp_dir=short,
        _node_ip_address="127.0.0.1",
    )
    found = [
        fit(f"{root}/whole", int(steps), options, s3),
        fit(f"{root}/killed", int(steps), options, s3, int(kill_at)),
    ]
    ray.shutdown()
    print(json.dumps(found))
