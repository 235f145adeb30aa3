"""One small model with AdamW under every kind of parallelism, for tests that save it on one and load it on another.

Sizes are odd, so that shards are uneven and some are empty. Where stock tensor parallelism wants even ones, the model
has even ones, and `extra` holds odd tensors that were cut by `distribute_tensor`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

EXTRA = {"odd": (13, 5), "cube": (3, 7, 2), "short": (1, 4)}
N_EXPERTS = 2


class Net(torch.nn.Module):
    """Parts that a stage or a rank may lack."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(7, 12)
        self.down = torch.nn.Linear(12, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.experts = torch.nn.ModuleDict({str(n): torch.nn.Linear(6, 3 + 2 * n) for n in range(N_EXPERTS)})
        self.head = torch.nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = x.new_zeros(())
        if hasattr(self, "up"):
            x = self.down(torch.relu(self.up(x)))
            loss = loss + x.square().sum()
        x = x[:, :6]
        if hasattr(self, "head"):
            x = self.norm(x)
            loss = loss + self.head(x).square().sum()
            for expert in self.experts.values():
                loss = loss + expert(x).square().sum()
        return loss


class Job(NamedTuple):
    """A model in training.

    `wrapped` runs forward; `model` is what is saved; `shares_gradients`: all but those of the experts.
    """

    model: torch.nn.Module
    wrapped: torch.nn.Module
    optimizer: torch.optim.Optimizer
    extra: dict[str, Any]
    shares_gradients: bool


def _plain(rank: int) -> tuple[Net, Any]:
    return Net(), None


def _mesh(*shape: int, names: tuple[str, ...] = ("dp", "tp")) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=names[: len(shape)])


def _fully_sharded(model: Net, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model.experts["1"], mesh=mesh)
    fully_shard(model.head, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _tensor_parallel(model: Net, mesh: Any) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _extra(mesh: Any, *placements: Any) -> dict[str, Any]:
    """Return the tensors of `EXTRA`, cut in every way that the mesh allows."""
    from torch.distributed.tensor import distribute_tensor

    found = {}
    for name, shape in EXTRA.items():
        numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) + len(name)
        for n, kinds in enumerate(placements):
            fits = all(getattr(kind, "dim", 0) < len(shape) for kind in kinds)
            found[f"{name}.{n}"] = distribute_tensor(numbers + n, mesh, kinds if fits else kinds[::-1])
    return found


def _fsdp2(rank: int) -> tuple[Net, Any]:
    from torch.distributed.tensor import Replicate, Shard

    model, mesh = Net(), _mesh(dist.get_world_size())
    _fully_sharded(model, mesh)
    return model, _extra(mesh, [Shard(0)], [Shard(1)], [Replicate()])


def _tp2(rank: int) -> tuple[Net, Any]:
    from torch.distributed.tensor import Replicate, Shard

    model, mesh = Net(), _mesh(2, names=("tp",))
    _tensor_parallel(model, mesh)
    return model, _extra(mesh, [Shard(1)], [Shard(0)], [Replicate()])


def _fsdp_tp(rank: int) -> tuple[Net, Any]:
    from torch.distributed.tensor import Replicate, Shard

    model, mesh = Net(), _mesh(2, 2)
    _tensor_parallel(model, mesh["tp"])
    _fully_sharded(model, mesh["dp"])
    return model, _extra(mesh, [Shard(0), Shard(1)], [Shard(0), Shard(0)], [Shard(1), Replicate()])


def _hsdp(rank: int) -> tuple[Net, Any]:
    from torch.distributed.tensor import Replicate, Shard

    model, mesh = Net(), _mesh(2, 2, names=("replicas", "shards"))
    _fully_sharded(model, mesh)
    return model, _extra(mesh, [Replicate(), Shard(0)], [Replicate(), Shard(1)], [Replicate(), Replicate()])


def _pp2(rank: int) -> tuple[Net, Any]:
    model = Net()
    for name in ("norm", "experts", "head") if rank == 0 else ("up", "down"):
        delattr(model, name)
    return model, None


def _ep2(rank: int) -> tuple[Net, Any]:
    model = Net()
    del model.experts[str(1 - rank)]
    return model, None


class Arrangement(NamedTuple):
    """How many ranks (0: one process without a process group), and what makes the model on each."""

    world_size: int
    make: Callable[[int], tuple[Net, Any]]


SAVED = {
    "ddp2": Arrangement(2, _plain),
    "fsdp2": Arrangement(2, _fsdp2),
    "fsdp4": Arrangement(4, _fsdp2),
    "tp2": Arrangement(2, _tp2),
    "fsdp-tp": Arrangement(4, _fsdp_tp),
    "hsdp": Arrangement(4, _hsdp),
    "pp2": Arrangement(2, _pp2),
    "ep2": Arrangement(2, _ep2),
}
LOADED = {
    "alone": Arrangement(0, _plain),
    "fsdp2": Arrangement(2, _fsdp2),
    "fsdp3": Arrangement(3, _fsdp2),
    "fsdp4": Arrangement(4, _fsdp2),
    "tp2": Arrangement(2, _tp2),
    "fsdp-tp": Arrangement(4, _fsdp_tp),
}


def job(kind: Arrangement, rank: int, seed: int) -> Job:
    """Return the model in this arrangement, equal on all ranks that hold the same part; its optimizer has no state."""
    torch.manual_seed(seed)
    model, extra = kind.make(rank)
    if extra is None:
        extra = {}
        for name, shape in EXTRA.items():
            numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) + len(name)
            extra |= {f"{name}.{n}": numbers + n for n in range(3)}
    wrapped = model
    if kind.make is _plain and kind.world_size:
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    return Job(model, wrapped, optimizer, extra, kind.make is _ep2)


def train(job: Job, steps: int) -> None:
    """Train on the same batches on all ranks: what is replicated without wrappers stays equal."""
    torch.manual_seed(11)
    for _ in range(steps):
        job.wrapped(torch.randn(4, 7)).backward()
        if job.shares_gradients:
            for name, parameter in job.model.named_parameters():
                if "experts" not in name and parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
        job.optimizer.step()
        job.optimizer.zero_grad()


def state_of(job: Job, step: int) -> dict[str, Any]:
    """Return what is saved, or filled; the optimizer's under FQNs, flat, as pipeline stages need it."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    optim = get_optimizer_state_dict(job.model, job.optimizer, options=options)
    return {"model": job.model, "optim": optim, "extra": job.extra, "step": step}


def whole(state: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield (FQN, plain whole tensor or object) of every leaf; a collective where tensors are sharded."""
    for key, value in state.items():
        if isinstance(value, torch.nn.Module):
            yield from whole(value.state_dict(), (*path, key))
        elif isinstance(value, Mapping):
            yield from whole(value, (*path, key))
        else:
            if isinstance(value, torch.Tensor):
                value = value.detach()
                value = value.full_tensor() if hasattr(value, "full_tensor") else value
            yield ".".join((*path, key)), value
