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
from command_calls import Command
from real_worker import wait_until

import asyncckpt
from asyncckpt.errors import UnmatchedTensorsError
from asyncckpt.interop.hf.architectures import HUB_RULES

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

STEP, TIMEOUT_S = 3, 120.0


def sharded(architecture: str) -> tuple[Any, Any]:
    """Return a model, sharded with FSDP2 over 2 ranks, and its optimizer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    model = tiny_models.model(architecture)
    mesh = init_device_mesh("cpu", (2,))
    for block in tiny_models.blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: Any, optimizer: Any, architecture: str, seed: int) -> None:
    model(**tiny_models.inputs(architecture, seed=seed)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def is_told_to_stop(rank: int, directory: str, step: int) -> bool:
    """Write the step down; return, alike on all ranks, whether the test has told them to stop."""
    Path(directory, f"steps-{rank}").write_text(str(step))
    stops = torch.tensor([float(rank == 0 and os.path.exists(os.path.join(directory, "stop")))])
    torch.distributed.broadcast(stops, 0)
    return bool(stops)


def training(rank: int, architecture: str, directory: str) -> int:
    """Train with FSDP2, save at `STEP`, say the logits, and go on until the test says so; return the steps."""
    model, optimizer = sharded(architecture)
    talk, step, is_told = rank_processes.talk(), 0, False
    with asyncckpt.AsyncCheckpointer() as checkpointer:
        while not is_told:
            step += 1
            train(model, optimizer, architecture, seed=step * 2 + rank)
            if step == STEP:
                said = tiny_models.logits(model, architecture)
                state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": step}
                checkpointer.save(state, os.path.join(directory, "step"), step=step).written.result(TIMEOUT_S)
                talk.say(said)
            elif step > STEP:
                is_told = is_told_to_stop(rank, directory, step)
        talk.say(tiny_models.logits(model, architecture))
        if architecture == "mixtral":
            asyncckpt.export_hf(model, os.path.join(directory, "live"))
    return step


def managed(rank: int, architecture: str, directory: str) -> int:
    """Train with FSDP2 and a manager that exports; say the logits of the step that it exports; go on until told."""
    model, optimizer = sharded(architecture)
    talk, is_told = rank_processes.talk(), False
    state = {"model": model, "optim": optimizer, "step": 0}
    with asyncckpt.CheckpointManager(
        os.path.join(directory, "runs"),
        save_interval_steps=1,
        max_to_keep=2,
        export_every=STEP,
        export_options={"tokenizer": tokenizer()},
    ) as manager:
        while not is_told:
            step = state["step"] = int(state["step"]) + 1
            train(model, optimizer, architecture, seed=step * 2 + rank)
            if step == STEP:
                talk.say(tiny_models.logits(model, architecture))
            if manager.should_save(step) and step <= STEP + 2:
                manager.save(step, state)
            if step > STEP:
                is_told = is_told_to_stop(rank, directory, step)
        assert manager.wait_exports(TIMEOUT_S)
    return int(state["step"])


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


def tokenizer() -> Any:
    """Return a tokenizer of transformers, of which each word is a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({f"w{n}": n for n in range(64)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w0")


def steps_of(directory: Path, rank: int) -> int:
    """Return the last step that a rank has told; 0: none yet."""
    path = directory / f"steps-{rank}"
    return int((path.read_text() if path.exists() else "") or 0)


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

        def both_go_on(done: int, total: int) -> None:
            assert not (tmp_path / "hf").exists() or done == total
            before = [steps_of(tmp_path, rank) for rank in range(2)]
            wait_until(
                lambda: all(steps_of(tmp_path, rank) > before[rank] for rank in range(2)), "a step of each", TIMEOUT_S
            )

        asyncckpt.export_hf(
            tmp_path / "step",
            tmp_path / "hf",
            config=twin,
            key="model",
            tokenizer=tokenizer(),
            progress=both_go_on,
        )
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


@pytest.mark.parametrize("architecture", ["llama", "gemma"])
def test_a_manager_exports_behind_the_training(
    architecture: str, worker: real_worker.RealWorker, tmp_path: Path
) -> None:
    environ = {"ASYNCCKPT_ENDPOINT": worker.endpoint, "HF_HUB_OFFLINE": "1"}
    target = tmp_path / "runs" / "hf" / f"step-{STEP:08d}"
    with rank_processes.running(2, managed, architecture, str(tmp_path), environ=environ) as ranks:
        said = [ranks.receive(rank, TIMEOUT_S) for rank in range(2)]
        assert torch.equal(*said)
        wait_until(target.exists, "the export", TIMEOUT_S)
        before = [steps_of(tmp_path, rank) for rank in range(2)]
        found = tiny_models.logits(opened(architecture, target), architecture)
        wait_until(lambda: all(steps_of(tmp_path, rank) > before[rank] for rank in range(2)), "steps", TIMEOUT_S)
        (tmp_path / "stop").touch()
        steps = ranks.results(TIMEOUT_S)
    assert steps[0] == steps[1] > STEP + 1
    assert found.dtype == torch.float32
    assert torch.equal(found, said[0])
    tiny_models.model(architecture).save_pretrained(tmp_path / "own")
    assert names_in(target) == names_in(tmp_path / "own")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((target / name).read_text()) == json.loads((tmp_path / "own" / name).read_text())
    assert (target / "tokenizer.json").exists()
    assert sorted(os.listdir(target.parent / ".exports")) == ["lock", "log", "root"], "no job and no failure is left"


def saved(model: Any, path: Path) -> Path:
    with asyncckpt.SyncCheckpointer(rank_info=asyncckpt.RankInfo(0, 1), fsync=False) as checkpointer:
        checkpointer.save({"model": model.state_dict(), "step": 1}, path)
    return path


@pytest.mark.parametrize("architecture", tiny_models.ARCHITECTURES)
def test_a_config_is_enough_and_tied_weights_are_then_under_each_name(architecture: str, tmp_path: Path) -> None:
    model = tiny_models.model(architecture)
    asyncckpt.export_hf(saved(model, tmp_path / "a"), tmp_path / "hf", config=model.config, key="model")
    said = tiny_models.logits(model, architecture)
    assert torch.equal(tiny_models.logits(opened(architecture, tmp_path / "hf"), architecture), said)
    tied = set(model.all_tied_weights_keys)
    assert tied <= set(names_in(tmp_path / "hf"))
    assert bool(tied) is (architecture in ("gemma", "t5", "whisper"))


def test_the_command_takes_config_and_tokenizer_from_a_directory(tmp_path: Path, command: Command) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = tiny_models.model("qwen3_moe")
    base = tmp_path / "base"
    tiny_models.model("qwen3_moe", seed=1).save_pretrained(base)
    words = tokenizer()
    words.save_pretrained(base)
    saved(model, tmp_path / "a")
    names = ("--keys", "model", "--rename", "model.=", "--config", base, "--tokenizer", base)
    code, out, err = command("convert", tmp_path / "a", tmp_path / "hf", "--to", "hf", *names)
    assert code == 0, err
    assert "4 tensors became 24 by rules" in out and "copied: generation_config.json" in out
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert torch.equal(tiny_models.logits(found, "qwen3_moe"), tiny_models.logits(model, "qwen3_moe"))
    assert AutoTokenizer.from_pretrained(tmp_path / "hf")("w3 w9").input_ids == words("w3 w9").input_ids == [3, 9]


def test_a_model_in_bfloat16_is_opened_as_that(tmp_path: Path) -> None:
    model = tiny_models.model("llama")
    path = saved(model, tmp_path / "a")
    asyncckpt.export_hf(path, tmp_path / "hf", config=model, key="model", dtype=torch.bfloat16, max_shard_bytes=20_000)
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists()
    found = opened("llama", tmp_path / "hf")
    assert found.dtype == torch.bfloat16 and model.dtype == torch.float32
    for name, tensor in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor.bfloat16())


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe"])
def test_experts_may_be_written_stacked_and_the_hub_s_can_be_stacked(architecture: str, tmp_path: Path) -> None:
    model, other = tiny_models.model(architecture), tiny_models.model(architecture, seed=1)
    path, said = saved(model, tmp_path / "a"), tiny_models.logits(model, architecture)
    asyncckpt.export_hf(path, tmp_path / "hf", config=model, key="model", rules=())
    assert names_in(tmp_path / "hf") == sorted(model.state_dict())
    assert torch.equal(tiny_models.logits(opened(architecture, tmp_path / "hf"), architecture), said)
    model.save_pretrained(tmp_path / "hub")
    rules = [rule.inverse() for rule in asyncckpt.hub_rules(architecture)]
    asyncckpt.convert(tmp_path / "hub", tmp_path / "stacked", to="asyncckpt", rules=rules)
    asyncckpt.load(tmp_path / "stacked", other.state_dict())
    assert torch.equal(tiny_models.logits(other, architecture), said)


@pytest.mark.parametrize("model_type", sorted(HUB_RULES))
def test_ready_rules_give_the_names_that_transformers_writes(model_type: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **tiny_models.MIXTURES[model_type]))
    assert any(name.endswith("experts.gate_up_proj") for name in model.state_dict())
    model.save_pretrained(tmp_path / "own")
    asyncckpt.export_hf(model, tmp_path / "hf")
    assert names_in(tmp_path / "hf") == names_in(tmp_path / "own")
    mine, theirs = asyncckpt.load(tmp_path / "hf"), asyncckpt.load(tmp_path / "own")
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_a_checkpoint_that_is_not_of_the_model_is_refused_by_name(tmp_path: Path) -> None:
    path = saved(tiny_models.model("llama"), tmp_path / "a")
    with pytest.raises(UnmatchedTensorsError) as caught:
        asyncckpt.export_hf(path, tmp_path / "hf", config=tiny_models.model("mixtral"), key="model")
    assert "model.layers.1.mlp.experts.down_proj" in caught.value.missing
    assert "model.layers.0.mlp.up_proj.weight" in caught.value.unused
    assert os.listdir(tmp_path) == ["a"]
