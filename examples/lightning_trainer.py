"""Lightning Trainer with a dataloader that knows where it is: killed, it goes on in the middle of an epoch.

    python -m asyncckpt.examples.lightning_trainer --dir runs/lightning --steps 20
    python -m asyncckpt.examples.lightning_trainer --dir runs/lightning --steps 40 --stock

With --stock the checkpoints are read and written by Lightning alone. Lines that concern checkpoints in the background:
`# <-`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

from asyncckpt.examples.digests import digest_of
from asyncckpt.integrations.lightning import AttachOptimizers, RandomStates, WorkerCheckpointIO  # <-

WIDTH, SAMPLES, BATCH = 16, 64, 4


class Network(L.LightningModule):
    """A small network with dropout, so that random numbers matter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1))

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        loss: torch.Tensor = (self.layers(batch).squeeze(1) - batch.sin().sum(1)).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class ShowSteps(Callback):
    """Says where the training is."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        print(f"step {trainer.global_step}", flush=True)


def main(arguments: Sequence[str] | None = None) -> str:
    """Train; return the digest of the weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--attach", action="store_true", help="saves copy behind forward and backward")
    parser.add_argument("--stock", action="store_true")
    args = parser.parse_args(arguments)

    torch.manual_seed(0)
    network = Network()
    data = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
    loader = StatefulDataLoader(data, batch_size=BATCH, shuffle=True)
    keep = ModelCheckpoint(
        args.dir, "{step}", monitor="loss", save_top_k=2, save_last=True, every_n_train_steps=args.every
    )
    callbacks: list[Callback] = [keep, RandomStates(), ShowSteps()]
    plugins = []
    if not args.stock:
        storage = WorkerCheckpointIO()  # <-
        storage.recover(args.dir)  # <- what a run that was killed had staged is published before anybody looks
        plugins.append(storage)  # <-
        if args.attach:
            callbacks.append(AttachOptimizers())  # <- only step() and load_state_dict() may change the weights
    trainer = L.Trainer(
        max_steps=args.steps,
        accelerator="cpu",
        devices=args.ranks,
        strategy="ddp" if args.ranks > 1 else "auto",
        use_distributed_sampler=False,
        callbacks=callbacks,
        plugins=plugins,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(network, loader, ckpt_path="last", weights_only=False)
    digest = digest_of(network.state_dict())
    print(f"at step {trainer.global_step} the weights are {digest}", flush=True)
    return digest


if __name__ == "__main__":
    main()
