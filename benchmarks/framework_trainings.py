"""Small trainings by the frameworks, each with our adapter or without: for `adapters`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.in_turn import Clock, Training

STEPS, EVERY = 120, 40
VOCABULARY, LENGTH, BATCH, LAYERS, WIDTH = 512, 64, 4, 4, 128


def _network() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [
        torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(LAYERS)
    ]
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), *layers, torch.nn.Linear(WIDTH, 1))


def _batch() -> torch.Tensor:
    return torch.randn(BATCH, LENGTH, WIDTH)


def hugging_face(directory: Path, ours: bool, clock: Clock) -> None:
    """GPT-2, by the Trainer."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    from asyncckpt.integrations.transformers import AsyncTrainer

    class Ticks(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            clock.tick()

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=LAYERS,
        n_head=4,
        n_embd=WIDTH,
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        bos_token_id=0,
        eos_token_id=0,
    )
    tokens = torch.randint(0, VOCABULARY, (BATCH * STEPS, LENGTH))
    settings = TrainingArguments(
        str(directory),
        max_steps=STEPS,
        save_steps=EVERY,
        per_device_train_batch_size=BATCH,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    kind = AsyncTrainer if ours else Trainer
    data = [{"input_ids": t, "labels": t} for t in tokens]
    trainer = kind(model=GPT2LMHeadModel(config), args=settings, train_dataset=data, callbacks=[Ticks()])
    trainer.train()


def lightning(directory: Path, ours: bool, clock: Clock) -> None:
    """Transformer layers, by Lightning's Trainer with a ModelCheckpoint."""
    import lightning as L
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint

    from asyncckpt.integrations.lightning import AttachOptimizers, WorkerCheckpointIO

    class Network(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = _network()

        def training_step(self, batch: torch.Tensor, number: int) -> Any:
            return self.layers(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    class Ticks(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            clock.tick()

    keep = ModelCheckpoint(directory, "{step}", every_n_train_steps=EVERY, save_top_k=-1)
    trainer = L.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Ticks(), keep, *([AttachOptimizers()] if ours else [])],
        plugins=[WorkerCheckpointIO()] if ours else [],
    )
    data: Any = [_batch()[0] for _ in range(BATCH * STEPS)]
    trainer.fit(Network(), torch.utils.data.DataLoader(data, batch_size=BATCH))


def accelerate(directory: Path, ours: bool, clock: Clock) -> None:
    """Transformer layers, in a loop with Accelerate."""
    from accelerate import Accelerator

    from asyncckpt.integrations.accelerate import AsyncAccelerator

    accelerator = (AsyncAccelerator if ours else Accelerator)(cpu=True)
    model = _network()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for step in range(1, STEPS + 1):
        clock.tick()
        accelerator.backward(model(_batch()).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY == 0:
            accelerator.save_state(str(directory / f"step-{step}"))
    accelerator.end_training()
    accelerator.free_memory()


def torchtitan(directory: Path, ours: bool, clock: Clock) -> None:
    """Transformer layers, with torchtitan's methods; without the adapter `dcp.save`."""
    import torch.distributed.checkpoint.state_dict_saver as dcp

    from asyncckpt.integrations.torchtitan import CheckpointManager

    model = _network()
    optimizer = torch.optim.AdamW(model.parameters())
    manager = CheckpointManager(
        None, [model], optimizer, None, {}, folder=directory, interval=EVERY, enable=ours, attach=[optimizer]
    )
    for step in range(1, STEPS + 1):
        clock.tick()
        model(_batch()).square().mean().backward()
        manager.maybe_wait_for_staging()
        optimizer.step()
        optimizer.zero_grad()
        if ours:
            manager.save(step)
        elif step % EVERY == 0:
            dcp.save(
                {**model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=directory / f"step-{step}"
            )
    manager.close()


TRAININGS: dict[str, tuple[str, Training]] = {
    "HF Trainer": ("transformers", hugging_face),
    "Lightning": ("lightning", lightning),
    "Accelerate": ("accelerate", accelerate),
    "torchtitan": ("torch", torchtitan),
}
