"""Trainings on a GPU that come back: in place, from memory, in windows, sharded, through DCP, replayed by a graph."""

from __future__ import annotations

import pathlib
from typing import Any

import dcp_calls
import pytest
import rank_processes
import states
import torch
import torch.distributed as dist
from real_worker import DEADLINE_S, RealWorker
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import asyncckpt
from asyncckpt import AsyncCheckpointer, CheckpointManager
from asyncckpt.dcp import StorageReader, StorageWriter

STEPS = 4


class Trainer:
    """A small network that is trained in bfloat16 with a fused AdamW and a scaler, as on any GPU.

    Args:
        seed: Of its parameters. Its batches are drawn from the GPU's generator.
        width: Of its layers: 2 * width**2 parameters.
    """

    def __init__(self, seed: int, width: int = 512) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(width, width)
        ).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.scaler = torch.amp.GradScaler("cuda")
        self.width = width

    def step(self) -> torch.Tensor:
        """Train on one random batch; return the loss, on the GPU."""
        batch = torch.randn(64, self.width, device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = (self.model(batch) - batch).square().mean()
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def state(self) -> dict[str, Any]:
        """Return what is saved, the generator's state included."""
        return {
            "model": self.model,
            "optim": self.optimizer,
            "scaler": self.scaler,
            "rng": torch.cuda.get_rng_state(),
        }

    def bits(self) -> dict[str, bytes]:
        """Return every bit of the parameters and of the optimizer's state."""
        held = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for number, found in self.optimizer.state_dict()["state"].items():
            held |= {f"optim.{number}.{name}": tensor for name, tensor in found.items()}
        return {name: states.bits_of(tensor.detach().cpu()) for name, tensor in held.items()}


def resumed(into: Trainer, **found: Any) -> None:
    """Set the generator as a checkpoint has it, and assert that the tensors are where they were."""
    torch.cuda.set_rng_state(found["rng"])
    assert all(parameter.is_cuda for parameter in into.model.parameters())


@pytest.mark.parametrize("staging", ["overlap", "device", "blocking"])
def test_a_training_goes_on_bit_for_bit(worker: RealWorker, tmp_path: pathlib.Path, staging: str) -> None:
    first = Trainer(1)
    with AsyncCheckpointer(endpoint=worker.endpoint, staging=staging) as checkpointer:
        checkpointer.attach(first.optimizer)
        for _ in range(STEPS):
            first.step()
        checkpointer.save(first.state(), tmp_path / "step-4")
        expected = [first.step() for _ in range(STEPS)]
        checkpointer.wait(DEADLINE_S)
    second = Trainer(2)
    found = asyncckpt.restore_latest(tmp_path, state := second.state())
    assert found is not None
    resumed(second, rng=state["rng"])
    assert [loss.item() for loss in [second.step() for _ in range(STEPS)]] == [loss.item() for loss in expected]
    assert second.bits() == first.bits()


def test_a_kept_snapshot_comes_back_to_the_gpu_from_memory(worker: RealWorker, tmp_path: pathlib.Path) -> None:
    first, second = Trainer(1), Trainer(2)
    with AsyncCheckpointer(endpoint=worker.endpoint, keep_in_memory="latest") as checkpointer:
        first.step()
        checkpointer.save(first.state(), tmp_path / "a").written.result(DEADLINE_S)
        second.step()  # so that its optimizer has a state to be filled
        checkpointer.load(tmp_path / "a", second.state(), source="memory")
    assert second.bits() == first.bits()


@pytest.mark.parametrize("staging", ["overlap", "blocking"])
def test_a_state_that_is_larger_than_the_memory_is_exact(
    worker: RealWorker, tmp_path: pathlib.Path, staging: str
) -> None:
    first = Trainer(1, width=4096)  # 400 MB with the optimizer's state
    first.step()
    expected = first.bits()
    with AsyncCheckpointer(endpoint=worker.endpoint, staging=staging, arena_limit_bytes=128 << 20) as checkpointer:
        checkpointer.attach(first.optimizer)
        handle = checkpointer.save(first.state(), tmp_path / "a")
        first.step()
        handle.written.result(DEADLINE_S)
    second = Trainer(2, width=4096)
    second.step()
    asyncckpt.load(tmp_path / "a", second.state())
    assert second.bits() == expected


def test_what_a_load_needs_of_the_host_has_a_bound(tmp_path: pathlib.Path) -> None:
    tensor = torch.randn(96 << 20, device="cuda")  # 384 MiB
    with asyncckpt.SyncCheckpointer() as checkpointer:
        checkpointer.save({"w": tensor}, tmp_path / "a")
    for low_memory in (True, False):
        target = {"w": torch.empty_like(tensor)}
        asyncckpt.load(tmp_path / "a", target, low_memory=low_memory)
        assert torch.equal(target["w"], tensor)
    assert asyncckpt.load(tmp_path / "a", default_map_location="cuda")["w"].is_cuda


@pytest.mark.parametrize("use_worker", [True, False])
def test_dcp_saves_and_loads_what_is_on_the_gpu(worker: RealWorker, tmp_path: pathlib.Path, use_worker: bool) -> None:
    first, second = Trainer(1), Trainer(2)
    endpoint = worker.endpoint if use_worker else None
    writer = StorageWriter(tmp_path / "a", use_worker=use_worker, endpoint=endpoint)
    dcp_calls.save({"model": first.model.state_dict()}, writer)
    writer.close()
    dcp_calls.load({"model": second.model.state_dict()}, StorageReader(tmp_path / "a"))
    assert second.bits() == first.bits()


def test_a_manager_saves_and_restores_a_training(worker: RealWorker, tmp_path: pathlib.Path) -> None:
    first, second = Trainer(1), Trainer(2)
    with (
        AsyncCheckpointer(endpoint=worker.endpoint) as checkpointer,
        CheckpointManager(tmp_path, checkpointer=checkpointer) as manager,
    ):
        for step in range(1, STEPS):
            first.step()
            manager.save(step, first.state())
        manager.wait(DEADLINE_S)
        manager.restore(second.state())
    assert second.bits() == first.bits()


def test_between_replays_of_a_graph_a_fence_makes_a_save_exact(worker: RealWorker, tmp_path: pathlib.Path) -> None:
    tensors = [torch.zeros(1 << 22, device="cuda") for _ in range(4)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch._foreach_add_(tensors, 0)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        torch._foreach_add_(tensors, 1)
    with AsyncCheckpointer(endpoint=worker.endpoint, staging="overlap") as checkpointer:
        for n in range(1, 11):
            checkpointer.fence()
            graph.replay()
            checkpointer.save({"w": tensors}, tmp_path / str(n))
        checkpointer.wait(DEADLINE_S)
    for n in range(1, 11):
        for tensor in asyncckpt.load(tmp_path / str(n))["w"]:
            assert torch.equal(tensor.cpu(), torch.full(tensor.shape, float(n)))


def save_and_restore_sharded(rank: int, root: str, endpoint: str) -> bool:
    """Shard a model over NCCL, which is the only backend, train it, and get it back."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:

        def made(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
            torch.manual_seed(seed)
            model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256)).cuda()
            for layer in model:
                fully_shard(layer)
            fully_shard(model)
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            model(torch.randn(8, 256, device="cuda")).square().mean().backward()
            optimizer.step()
            return model, optimizer

        (model, optimizer), (other, others) = made(1), made(2)
        with AsyncCheckpointer(endpoint=endpoint) as checkpointer:
            checkpointer.attach(optimizer)
            checkpointer.save({"model": model, "optim": optimizer}, f"{root}/step-1").written.result(DEADLINE_S)
        assert asyncckpt.restore_latest(root, {"model": other, "optim": others}) is not None
        pairs = list(zip(model.state_dict().values(), other.state_dict().values(), strict=True))
        return all(isinstance(a, DTensor) and torch.equal(a.to_local(), b.to_local()) for a, b in pairs)
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_nccl_available(), reason="torch has no NCCL")
def test_a_sharded_model_over_nccl_alone_comes_back(worker: RealWorker, tmp_path: pathlib.Path) -> None:
    assert rank_processes.run(1, save_and_restore_sharded, str(tmp_path), worker.endpoint, group=False) == [True]


def save_replicated(rank: int, root: str, endpoint: str) -> str:
    """Two ranks hold the same parameters on one GPU, as DDP has them."""
    torch.manual_seed(1)
    model = torch.nn.Linear(512, 512).cuda()
    with AsyncCheckpointer(endpoint=endpoint) as checkpointer:
        checkpointer.save({"model": model}, f"{root}/step-1").written.result(DEADLINE_S)
    found = asyncckpt.load(f"{root}/step-1", {"model": torch.nn.Linear(512, 512).cuda()})
    return "same" if torch.equal(found["model"].weight, model.weight) else "other"


def test_two_ranks_with_one_gpu_save_what_they_share(worker: RealWorker, tmp_path: pathlib.Path) -> None:
    assert rank_processes.run(2, save_replicated, str(tmp_path), worker.endpoint) == ["same", "same"]
