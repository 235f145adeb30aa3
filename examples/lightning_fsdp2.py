"""Lightning with FSDP2 on several ranks: checkpoints are directories in DCP's layout, staged in the background.

    torchrun --standalone --nproc-per-node 2 -m asyncckpt.examples.lightning_fsdp2 --dir runs/fsdp2 --steps 6
    torchrun --standalone --nproc-per-node 2 -m asyncckpt.examples.lightning_fsdp2 --dir runs/fsdp2 --steps 12 --stock

With --stock the strategy is Lightning's own, which goes on from the same checkpoints. Lines that concern checkpoints in
the background: `# <-`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchdata.stateful_dataloader import StatefulDataLoader

from asyncckpt.examples.digests import digest_of
from asyncckpt.integrations.lightning import WorkerModelParallelStrategy  # <-

WIDTH, SAMPLES, BATCH = 16, 64, 4


class Network(L.LightningModule):
    """A small network, each layer of it sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 33), nn.GELU(), nn.Linear(33, 1))

    def configure_model(self) -> None:
        if not isinstance(self.layers, torch.distributed.fsdp.FSDPModule):
            assert self.device_mesh is not None
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        loss: torch.Tensor = (self.layers(batch).squeeze(1) - batch.sin().sum(1)).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main(arguments: Sequence[str] | None = None) -> str:
    """Train under torchrun; return the digest of this rank's part of the weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", required=True)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--stock", action="store_true")
    args = parser.parse_args(arguments)

    torch.manual_seed(0)
    network = Network()
    data = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
    kind = ModelParallelStrategy if args.stock else WorkerModelParallelStrategy  # <-
    strategy = kind(data_parallel_size=int(os.environ["WORLD_SIZE"]), tensor_parallel_size=1)
    callbacks: list[L.Callback] = [ModelCheckpoint(args.dir, "{step}", every_n_train_steps=3, save_top_k=-1)]
    trainer = L.Trainer(
        max_steps=args.steps,
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=strategy,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    steps = (
        [int(name[5:-5]) for name in os.listdir(args.dir) if name.startswith("step=")]
        if os.path.isdir(args.dir)
        else []
    )
    newest = f"{args.dir}/step={max(steps)}.ckpt" if steps else None
    trainer.fit(network, StatefulDataLoader(data, batch_size=BATCH), ckpt_path=newest, weights_only=False)
    digest = digest_of({name: value.to_local() for name, value in network.state_dict().items()})
    print(f"rank {trainer.global_rank} at step {trainer.global_step} has {digest}", flush=True)
    return digest


if __name__ == "__main__":
    main()
