"""Models that FSDP2 trains on two ranks, exported meanwhile: `from_pretrained` says what the model said at the step."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import rank_processes
import real_worker
import tiny_models
import torch

import asyncckpt

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

STEP, TIMEOUT_S = 3, 120.0


def training(rank: int, architecture: str, directory: str) -> int:
    """Train with FSDP2, save at `STEP`, say the logits, and go on until the test says so; return the steps."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    model = tiny_models.model(architecture)
    mesh = init_device_mesh("cpu", (2,))
    for block in tiny_models.blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    talk, step, stops = rank_processes.talk(), 0, torch.zeros(1)
    with asyncckpt.AsyncCheckpointer() as checkpointer:
        while not stops:
            step += 1
            model(**tiny_models.inputs(architecture, seed=step * 2 + rank)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == STEP:
                said = tiny_models.logits(model, architecture)
                state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": step}
                checkpointer.save(state, os.path.join(directory, "step"), step=step).written.result(TIMEOUT_S)
                talk.say(said)
            elif step > STEP:
                stops = torch.tensor([float(rank == 0 and os.path.exists(os.path.join(directory, "stop")))])
                dist.broadcast(stops, 0)
        talk.say(tiny_models.logits(model, architecture))
        if architecture == "mixtral":
            asyncckpt.export_hf(model, os.path.join(directory, "live"))
    return step


@pytest.fixture(autouse=True)
def one_quiet_thread() -> Iterator[None]:
    """Sums of floating point numbers depend on how many threads add them. A progress bar would leave a thread."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def opened(architecture: str, path: Path) -> Any:
    """Return the model that `from_pretrained` makes of a directory; it may lack nothing and ignore nothing."""
    model, info = tiny_models.model_class(architecture).from_pretrained(path, output_loading_info=True)
    assert not any(info.values()), info
    return model


def names_in(path: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(path / "model.safetensors", "pt") as file:
        return sorted(file.keys())


def tokenizer(path: Path) -> Any:
    """Return a tokenizer of transformers, of which each word is a token."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({f"w{n}": n for n in range(64)}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w0")


@pytest.mark.parametrize("architecture", tiny_models.ARCHITECTURES)
def test_ranks_train_on_while_their_checkpoint_is_exported(
    architecture: str, worker: real_worker.RealWorker, tmp_path: Path
) -> None:
    environ = {"ASYNCCKPT_ENDPOINT": worker.endpoint, "HF_HUB_OFFLINE": "1"}
    with rank_processes.running(2, training, architecture, str(tmp_path), environ=environ) as ranks:
        said = [ranks.receive(rank, TIMEOUT_S) for rank in range(2)]
        assert torch.equal(*said)
        with torch.device("meta"):
            twin = tiny_models.model_class(architecture)(tiny_models.model(architecture).config)
        asyncckpt.export_hf(tmp_path / "step", tmp_path / "hf", config=twin, key="model", tokenizer=tokenizer(tmp_path))
        (tmp_path / "stop").touch()
        later = [ranks.receive(rank, TIMEOUT_S) for rank in range(2)]
        steps = ranks.results(TIMEOUT_S)
    assert steps[0] == steps[1] > STEP + 1
    assert not torch.equal(later[0], said[0])
    found = tiny_models.logits(opened(architecture, tmp_path / "hf"), architecture)
    assert found.dtype == torch.float32
    assert torch.equal(found, said[0])
    tiny_models.model(architecture).save_pretrained(tmp_path / "own")
    assert names_in(tmp_path / "hf") == names_in(tmp_path / "own")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "hf" / name).read_text()) == json.loads((tmp_path / "own" / name).read_text())
    if architecture == "mixtral":
        live = tiny_models.logits(opened(architecture, tmp_path / "live"), architecture)
        assert torch.equal(live, later[0])
        assert not [name for name in os.listdir(tmp_path) if name.endswith(".converting")]
