"""What the adapters for training frameworks add to a step, and what a save costs: beside the framework's own saving.

    make .venv-frameworks/.stamp && .venv-frameworks/bin/python -m benchmarks.adapters [--dir D] [--rounds N]

The same model is trained by the framework alone and with our adapter, in turn, in one process. Steady state is the
second half of the steps between two saves: the checkpoint before is mostly published then. What a save costs is what
its step and the next one, behind which the copies run, take longer. CPU seconds are those of the whole process. On a
busy machine the quietest rounds of both say more than the medians.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.save_load import RESULTS

STEPS, EVERY = 48, 16
VOCABULARY, LENGTH, BATCH, LAYERS, WIDTH = 512, 64, 4, 4, 128
WARM = 4
"""Steps at the beginning of a run that are not counted: the first ones allocate."""

Training = Callable[[Path, bool, "Clock"], None]
"""Trains below a directory, with our adapter or without, and ticks after every step."""


class Clock:
    """Wall and CPU seconds from step to step; what follows a step that saves counts to it."""

    def __init__(self) -> None:
        self._ticks: list[tuple[float, float]] = []

    def tick(self) -> None:
        """A step begins."""
        self._ticks.append((time.perf_counter(), time.process_time()))

    def steady(self) -> list[tuple[float, float]]:
        """Return (wall, CPU) of the steps in the second half between two saves."""
        return [s for n, s in enumerate(self._spent(), 1) if n > WARM and n % EVERY > EVERY // 2]

    def saves(self) -> list[float]:
        """Return wall seconds of each step that saves and the one after it, behind which the copies may run."""
        spent = self._spent()
        pairs = zip(enumerate(spent, 1), spent[1:], strict=False)
        return [a[0] + b[0] for (n, a), b in pairs if n % EVERY == 0]

    def _spent(self) -> list[tuple[float, float]]:
        pairs = zip(self._ticks, self._ticks[1:], strict=False)
        return [(b[0] - a[0], b[1] - a[1]) for a, b in pairs]


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


def measure(name: str, directory: Path, rounds: int) -> dict[str, Any]:
    """Train by the framework alone and with the adapter, in turn; return medians, and ratios of each round."""
    found: list[dict[str, float]] = []
    for number in range(rounds + 1):
        row: dict[str, float] = {}
        for label in ("stock", "ours") if number % 2 else ("ours", "stock"):
            place, clock = directory / f"{label}-{number}", Clock()
            place.mkdir()
            TRAININGS[name][1](place, label == "ours", clock)
            shutil.rmtree(place)
            steady = clock.steady()
            row[f"{label} step s"] = statistics.median(s[0] for s in steady)
            row[f"{label} step CPU s"] = statistics.median(s[1] for s in steady)
            row[f"{label} save s"] = statistics.median(clock.saves()) - 2 * row[f"{label} step s"]
        found.append(row)
    found = found[1:]  # the first round starts the worker, and imports
    result: dict[str, Any] = {key: statistics.median(row[key] for row in found) for key in sorted(found[0])}
    for unit in ("step s", "step CPU s"):
        ratios = sorted(row[f"ours {unit}"] / row[f"stock {unit}"] for row in found)
        result[f"{unit} ratio"] = statistics.median(ratios)
        result[f"{unit} ratios"] = ratios
        quietest = [min(row[f"{label} {unit}"] for row in found) for label in ("ours", "stock")]
        result[f"{unit} ratio, quietest rounds"] = quietest[0] / quietest[1]
    return result


def hook_seconds() -> float:
    """Return what the adapter itself does in a step that saves nothing: the question whether anything is pending."""
    from asyncckpt.integrations.exporter_process import ExporterProcess
    from asyncckpt.integrations.pending_saves import PendingSaves

    pending = PendingSaves(ExporterProcess(timeout_s=1.0))
    began = time.perf_counter()
    for _ in range(10_000):
        pending.poll()
    return (time.perf_counter() - began) / 10_000


def main() -> None:
    """Measure, print, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="where to write (default: below the temporary directory)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--result", type=Path, default=RESULTS / "adapters.json")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # two that wait for each other measure how busy the machine is
    directory = Path(tempfile.mkdtemp(prefix="asyncckpt-bench-", dir=args.dir))
    os.environ["ASYNCCKPT_JOB"] = f"bench-{secrets.token_hex(4)}"
    os.environ["HF_HUB_OFFLINE"] = "1"
    result: dict[str, Any] = {"machine": machine.describe(directory), "steps": STEPS, "every": EVERY}
    result |= {"layers": LAYERS, "width": WIDTH, "rounds": args.rounds, "hook s": hook_seconds(), "frameworks": {}}
    try:
        for name, (package, _) in TRAININGS.items():
            if importlib.util.find_spec(package) is None:
                print(f"{name}: {package} is not installed")
                continue
            place = directory / name.replace(" ", "-")
            place.mkdir()
            found = result["frameworks"][name] = measure(name, place, args.rounds)
            print(
                f"{name:11s} step {found['stock step s'] * 1e3:6.1f} ms, with ours {found['step s ratio']:.3f} times "
                f"(CPU {found['step CPU s ratio']:.3f}; "
                f"in the quietest rounds {found['step s ratio, quietest rounds']:.3f}); "
                f"a save costs {found['stock save s'] * 1e3:6.1f} ms, "
                f"ours {found['ours save s'] * 1e3:6.1f} ms",
                flush=True,
            )
    finally:
        subprocess.run([sys.executable, "-m", "asyncckpt", "worker", "stop"], capture_output=True, check=False)
        shutil.rmtree(directory)
    args.result.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
