"""FSDP2 with a policy, on CPU ranks: what is computed in bfloat16, or lies offloaded, is saved bit for bit."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import rank_processes
import real_worker
import states
import torch
from real_worker import DEADLINE_S
from sharded_samples import full
from torch import nn

import asyncckpt
from asyncckpt import AsyncCheckpointer, SyncCheckpointer

pytestmark = pytest.mark.filterwarnings("ignore")
POLICIES = ("mixed precision", "CPU offload")


def plain(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(10, 7), nn.LayerNorm(7), nn.Linear(7, 3, bias=False))


def sharded(policy: str, seed: int) -> nn.Module:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    model = plain(seed)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: dict[str, Any] = (
        {"mp_policy": half} if policy == "mixed precision" else {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    )
    for layer in model:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def trained(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in (1, 2):
        x = torch.randn(4, 10, generator=torch.Generator().manual_seed(step))
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": dict(model.state_dict()), "optim": optimizer.state_dict()}


def saves_and_loads_back(rank: int, root: str) -> dict[str, Any]:
    """Train, save; then load that into a model of another seed, and a plain checkpoint into the same one."""
    found = {}
    for policy in POLICIES:
        model = sharded(policy, seed=0)
        optimizer = trained(model)
        with AsyncCheckpointer() as checkpointer:
            handle = checkpointer.save(state_of(model, optimizer), f"{root}/{policy}")
            expected = full(state_of(model, optimizer))
            assert handle.written.exception(DEADLINE_S) is None
        kinds = {str(p.dtype) for p in model.parameters()} | {p.device.type for p in model.parameters()}
        other = sharded(policy, seed=1)
        target = state_of(other, trained(other))
        asyncckpt.load(f"{root}/{policy}", target)
        again = full(target)
        asyncckpt.load(f"{root}/plain", target)
        found[policy] = expected, again, full(target), kinds
    return found


@pytest.fixture(scope="module")
def saved(
    tmp_path_factory: pytest.TempPathFactory, shared_worker: real_worker.RealWorker
) -> tuple[pathlib.Path, dict[str, Any], Any]:
    """Where the checkpoints are, what rank 0 found for each policy, and the plain state."""
    root = tmp_path_factory.mktemp("policies")
    ours = plain(seed=2)
    kept = state_of(ours, trained(ours))
    with SyncCheckpointer() as checkpointer:
        checkpointer.save(kept, root / "plain")
    environ = {"ASYNCCKPT_ENDPOINT": shared_worker.endpoint}
    return root, rank_processes.run(2, saves_and_loads_back, str(root), environ=environ)[0], kept


@pytest.mark.parametrize("policy", POLICIES)
def test_a_model_of_fsdp2_with_a_policy_goes_to_plain_and_back(
    policy: str, saved: tuple[pathlib.Path, dict[str, Any], Any]
) -> None:
    root, found, kept = saved
    expected, again, from_plain, kinds = found[policy]
    assert kinds == {"torch.float32", "cpu"}, "the master weights are saved, not what is computed with"
    states.assert_same(asyncckpt.load(root / policy), expected)
    states.assert_same(again, expected)
    states.assert_same(from_plain, kept)
    fresh = plain(seed=3)
    target = state_of(fresh, trained(fresh))
    asyncckpt.load(root / policy, target)
    states.assert_same(target, expected)
