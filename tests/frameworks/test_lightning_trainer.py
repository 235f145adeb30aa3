"""Lightning: its checkpoints, made behind the training, are what Lightning makes and resumes from."""

from __future__ import annotations

import os
import pathlib
import random
import warnings
from typing import Any

import pytest
import rank_processes
import real_worker
import torch
import trainings

pytest.importorskip("lightning", reason="`make test-frameworks` installs lightning", exc_type=ImportError)
pytest.importorskip("torchdata", reason="`make test-frameworks` installs torchdata")
pytestmark = pytest.mark.timeout(600)


def in_a_process(function: Any, *arguments: Any) -> Any:
    """Return what `function` returns in a process of its own, which has the frameworks imported."""
    return rank_processes.run(1, _quiet, function, arguments, group=False, timeout_s=trainings.TIMEOUT_S)[0]


def _quiet(rank: int, function: Any, arguments: tuple[Any, ...]) -> Any:
    warnings.simplefilter("ignore")
    os.environ.pop("RANK"), os.environ.pop("WORLD_SIZE")
    return function(*arguments)


def test_files_are_those_that_stock_writes_and_stock_goes_on_from_them(
    worker: real_worker.RealWorker, tmp_path: pathlib.Path
) -> None:
    ours, stock = str(tmp_path / "ours"), str(tmp_path / "stock")
    trainings.result("lightning_trainer", ["--dir", ours, "--steps", "20"], worker.endpoint)
    trainings.result("lightning_trainer", ["--dir", stock, "--steps", "20", "--stock"], worker.endpoint)
    assert sorted(os.listdir(ours)) == sorted(os.listdir(stock)), "save_top_k=2 and save_last, as stock keeps them"
    for name in os.listdir(ours):
        a, b = (torch.load(pathlib.Path(d) / name, weights_only=False) for d in (ours, stock))
        assert a["loops"].keys() == b["loops"].keys() and a["global_step"] == b["global_step"]
        assert all(torch.equal(a["state_dict"][key], b["state_dict"][key]) for key in b["state_dict"])
    resumed = [
        trainings.result("lightning_trainer", ["--dir", d, "--steps", "27", "--stock"], worker.endpoint)
        for d in (ours, stock)
    ]
    assert resumed[0] == resumed[1]


def test_interrupted_in_the_middle_of_an_epoch_it_ends_as_an_uninterrupted_stock_training(
    worker: real_worker.RealWorker, tmp_path: pathlib.Path, rng: random.Random
) -> None:
    arguments = ["--dir", str(tmp_path / "killed"), "--steps", "50", "--attach"]
    found = trainings.interrupted("lightning_trainer", arguments, worker.endpoint, tmp_path, rng, last_step=40)
    stock = ["--dir", str(tmp_path / "whole"), "--steps", "50", "--stock"]
    assert [found] == trainings.result("lightning_trainer", stock, worker.endpoint)


def test_fsdp2_on_two_ranks_is_gone_on_with_by_the_stock_strategy(
    worker: real_worker.RealWorker, tmp_path: pathlib.Path
) -> None:
    ours, stock = str(tmp_path / "ours"), str(tmp_path / "stock")
    trainings.result("lightning_fsdp2", ["--dir", ours, "--steps", "7"], worker.endpoint, world_size=2)
    assert sorted(os.listdir(ours)) == ["step=3.ckpt", "step=6.ckpt"]
    found = set(os.listdir(tmp_path / "ours" / "step=6.ckpt"))
    assert {"meta.pt", ".metadata", "manifest.json"} <= found
    resumed = trainings.result(
        "lightning_fsdp2", ["--dir", ours, "--steps", "12", "--stock"], worker.endpoint, world_size=2
    )
    whole = trainings.result(
        "lightning_fsdp2", ["--dir", stock, "--steps", "12", "--stock"], worker.endpoint, world_size=2
    )
    assert resumed == whole


def test_ddp_on_two_ranks_is_gone_on_with_by_stock(worker: real_worker.RealWorker, tmp_path: pathlib.Path) -> None:
    def run(name: str, *options: str) -> list[Any]:
        arguments = ["--dir", str(tmp_path / name), "--ranks", "2", *options]
        return trainings.result("lightning_trainer", arguments, worker.endpoint, world_size=2)

    run("ours", "--steps", "7")
    assert run("ours", "--steps", "12", "--stock") == run("stock", "--steps", "12", "--stock")


def _same_names(root: str, endpoint: str, kind: str) -> dict[str, tuple[int, float]]:
    """Train twice in one directory, with names that repeat; return what the files hold."""
    import lightning as L
    from lightning.pytorch.callbacks import ModelCheckpoint

    from asyncckpt.integrations.lightning import WorkerCheckpointIO

    class Model(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: torch.Tensor, number: int) -> Any:
            self.log("score", float(number % 5))
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    for _ in range(2):
        L.seed_everything(1, verbose=False)
        keep = ModelCheckpoint(root, "best", monitor="score", mode="max", save_top_k=2, every_n_train_steps=1)
        trainer = L.Trainer(
            max_steps=12,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            plugins=[WorkerCheckpointIO(endpoint=endpoint)] if kind == "ours" else [],
            callbacks=[keep],
        )
        trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(12, 4)))
    found = {}
    for name in os.listdir(root):
        state = torch.load(f"{root}/{name}", weights_only=False)
        found[name] = state["global_step"], float(state["state_dict"]["layer.weight"].sum())
    return found


def test_what_is_still_being_saved_keeps_its_name(worker: real_worker.RealWorker, tmp_path: pathlib.Path) -> None:
    ours, stock = (in_a_process(_same_names, str(tmp_path / kind), worker.endpoint, kind) for kind in ("ours", "stock"))
    assert ours == stock and len(ours) == 4


def _fabric(root: str, endpoint: str) -> tuple[bool, list[str]]:
    import lightning as L

    from asyncckpt.integrations.lightning import WorkerCheckpointIO

    storage = WorkerCheckpointIO(endpoint=endpoint)
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=[storage])
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = fabric.setup(model, optimizer)
    fabric.backward(model(torch.randn(2, 4)).sum())
    optimizer.step()
    fabric.save(f"{root}/one.ckpt", {"model": model, "optimizer": optimizer, "step": 1})
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    found = fabric.load(f"{root}/one.ckpt", {"model": model, "optimizer": optimizer})
    same = torch.equal(model.weight, before) and found == {"step": 1}
    storage.teardown()
    L.Fabric(accelerator="cpu", devices=1).load(f"{root}/one.ckpt", {"model": model})
    return same and torch.equal(model.weight, before), os.listdir(root)


def test_fabric_saves_by_the_worker_and_loads_what_is_still_being_saved(
    worker: real_worker.RealWorker, tmp_path: pathlib.Path
) -> None:
    assert in_a_process(_fabric, str(tmp_path), worker.endpoint) == (True, ["one.ckpt"])
