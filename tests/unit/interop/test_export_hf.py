"""Exports without transformers: which files are written, which tensors, and what is refused before anything is."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conversions import Workdir, read_by_stock_tools

import asyncckpt
from asyncckpt import TensorRule
from asyncckpt.errors import (
    AsyncCkptError,
    CheckpointExistsError,
    ConfigError,
    CorruptCheckpointError,
    MissingKeysError,
    ShapeMismatchError,
    UnmatchedTensorsError,
    UnsupportedLeafError,
    UnsupportedPathError,
)
from asyncckpt.interop.hf.architectures import HUB_RULES
from asyncckpt.storage.files import Files

pytest.importorskip("safetensors")

CONFIG = {"model_type": "gpt2", "dtype": "bfloat16"}


class Saved:
    """An object with `save_pretrained`, which writes these files."""

    def __init__(self, **files: Any) -> None:
        self._files = {name.replace("__", "."): value for name, value in files.items()}

    def save_pretrained(self, directory: str) -> None:
        for name, value in self._files.items():
            Path(directory, name).write_text(json.dumps(value))


class HasDict:
    def to_dict(self) -> dict[str, Any]:
        return dict(CONFIG)


class Model(torch.nn.Module):
    """Two layers; the second weight is tied to the first."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, width)
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, 6, bias=False)
        self.head.weight = self.embed.weight
        self.config = Saved(config__json={"model_type": "small"})
        self.generation_config = Saved(generation_config__json={"eos_token_id": 2})

    def can_generate(self) -> bool:
        return True


def weights(work: Workdir, name: str = "b") -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = read_by_stock_tools("hf", work / name)
    return found


def in_json(work: Workdir, file: str = "config.json", name: str = "b") -> Any:
    return json.loads((work / name / file).read_text())


def export(work: Workdir, source: Any = None, target: str = "b", **options: Any) -> Any:
    return asyncckpt.export_hf(work / "a" if source is None else source, work / target, **{"config": CONFIG, **options})


# ---- config, generation config, tokenizer ---------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["dict", "to_dict", "save_pretrained", "directory", "file"])
def test_a_config_may_be_an_object_a_dict_or_a_path_and_gets_the_dtype_of_the_weights(form: str, work: Workdir) -> None:
    (work / "base").mkdir()
    (work / "base" / "config.json").write_text(json.dumps(CONFIG))
    (work / "base" / "generation_config.json").write_text('{"top_k": 3}')
    given = {
        "dict": CONFIG,
        "to_dict": HasDict(),
        "save_pretrained": Saved(config__json=CONFIG),
        "directory": str(work / "base"),
        "file": work / "base" / "config.json",
    }[form]
    work.ours({"w": torch.randn(3, 4), "ids": torch.arange(900)})
    report = export(work, config=given)
    assert in_json(work) == {"model_type": "gpt2", "dtype": "float32"}
    beside = ("config.json", "generation_config.json") if form in ("directory", "file") else ("config.json",)
    assert report.copied == beside
    assert sorted(os.listdir(work / "b")) == [*beside, "model.safetensors"]
    assert json.loads((work / "base" / "config.json").read_text()) == CONFIG and CONFIG["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"torch_dtype": "float32"}, {"torch_dtype": "float16"}),
        ({"dtype": "float32", "torch_dtype": "float32"}, {"dtype": "float16", "torch_dtype": "float16"}),
        ({}, {"dtype": "float16"}),
    ],
)
def test_the_dtype_is_written_under_the_key_that_the_config_has(
    config: dict[str, str], expected: dict[str, str], work: Workdir
) -> None:
    work.ours({"w": torch.randn(30, 4), "statistics": torch.randn(3, dtype=torch.float64)})
    export(work, config=config, dtype="float16")
    assert in_json(work) == expected
    assert {tensor.dtype for tensor in weights(work).values()} == {torch.float16}


def test_tokenizers_are_saved_or_copied_and_the_weights_beside_them_are_not(work: Workdir) -> None:
    work.ours({"w": torch.ones(1)})
    export(work, tokenizer=Saved(tokenizer__json={"a": 1}, chat_template__jinja="x"))
    assert in_json(work, "tokenizer.json") == {"a": 1}
    base = work / "base"
    base.mkdir()
    for name in ("tokenizer.json", "merges.txt", "spiece.model", "model.safetensors", "README.md", "tokenizer.py"):
        (base / name).write_text(f'"{name}"')
    report = export(work, target="c", tokenizer=base)
    assert report.copied == ("config.json", "merges.txt", "spiece.model", "tokenizer.json")
    assert in_json(work, "spiece.model", "c") == "spiece.model"


class Failing:
    def save_pretrained(self, directory: str) -> None:
        raise RuntimeError("no vocabulary")


class InFolders:
    def save_pretrained(self, directory: str) -> None:
        os.mkdir(os.path.join(directory, "additional_chat_templates"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"config": None}, "from_pretrained needs a config"),
        ({"config": 3}, "config is a int: expected a config or model of transformers"),
        ({"config": "nowhere"}, "cannot be read as JSON"),
        ({"config": {"x": {1, 2}}}, "config cannot be written as JSON"),
        ({"config": Saved(other__json={})}, "has written no config.json"),
        ({"config": Failing()}, "no vocabulary"),
        ({"generation_config": 3}, "generation_config is a int"),
        ({"tokenizer": 3}, r"tokenizer is a int: expected an object with save_pretrained\(\)"),
        ({"tokenizer": "nowhere"}, "expected a directory with the files of a tokenizer"),
        ({"tokenizer": Failing()}, "no vocabulary"),
        ({"tokenizer": InFolders()}, "'additional_chat_templates', which is a directory"),
        ({"tokenizer": Saved(pytorch_model__bin=1)}, "'pytorch_model.bin', which is a directory or holds weights"),
        ({"config": torch.nn.Linear(1, 1)}, "from_pretrained needs a config"),
        ({"rules": [("a", "b")]}, "found a tuple, expected objects of TensorRule"),
        ({"rules": 3}, "found a int"),
        ({"key": ""}, "expected an FQN"),
        ({"max_shard_bytes": 0}, "max_shard_bytes=0"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"source": torch.ones(1)}, "source is a Tensor"),
    ],
)
def test_arguments_without_sense_are_refused_and_nothing_is_written(
    options: dict[str, Any], said: str, work: Workdir
) -> None:
    work.ours({"w": torch.ones(1)})
    with pytest.raises(ConfigError, match=said):
        export(work, **options)
    assert work.names() == ["a"]


def test_a_target_that_is_a_url_is_refused_without_its_secrets(work: Workdir) -> None:
    work.ours({"w": torch.ones(1)})
    with pytest.raises(UnsupportedPathError) as caught:
        asyncckpt.export_hf(work / "a", "s3://user:secret@bucket/x", config=CONFIG)
    assert "secret" not in str(caught.value) + str(caught.value.path)


# ---- which tensors --------------------------------------------------------------------------------------------------


def test_the_model_of_a_training_state_is_exported_by_its_key(work: Workdir) -> None:
    state = {"model": {"model.embed": torch.randn(2, 3), "head": torch.randn(3)}, "optim": {"lr": 0.1}, "step": 3}
    work.ours(state)
    with pytest.raises(UnsupportedLeafError, match=r"optim\.lr"):
        export(work)
    with pytest.raises(MissingKeysError):
        export(work, key="modell")
    export(work, key="model", key_map={"head": "lm_head"})
    assert weights(work).keys() == {"model.embed", "lm_head"}
    assert torch.equal(weights(work)["model.embed"], state["model"]["model.embed"])  # type: ignore[index]
    assert work.names() == ["a", "b"]


def test_each_name_of_a_tied_tensor_is_written_unless_the_model_ties_it(work: Workdir) -> None:
    model = Model()
    work.ours(model.state_dict())
    report = export(work)
    assert weights(work).keys() == model.state_dict().keys()
    assert any(said.startswith("tied tensors are stored once for each name: head.weight") for said in report.changed)
    with torch.device("meta"):
        twin = Model()
    report = export(work, target="c", config=twin)
    assert weights(work, "c").keys() == model.state_dict().keys() - {"head.weight"}
    assert "stored once, as the model ties them: head.weight (= embed.weight)" in report.changed
    assert in_json(work, name="c") == {"model_type": "small", "dtype": "float32", "architectures": ["Model"]}
    assert in_json(work, "generation_config.json", "c") == {"eos_token_id": 2}


def test_what_a_model_declares_decides_which_name_of_a_tied_tensor_stays(work: Workdir) -> None:
    model = Model()
    model.all_tied_weights_keys = {"embed.weight": "head.weight"}
    work.ours(model.state_dict())
    export(work, config=model)
    assert "head.weight" in weights(work) and "embed.weight" not in weights(work)


def test_tensors_that_the_model_ties_and_that_were_saved_apart_are_both_written(work: Workdir) -> None:
    state = {name: tensor.clone() for name, tensor in Model().state_dict().items()}
    state["head.weight"] += 1
    work.ours(state)
    export(work, config=Model())
    assert torch.equal(weights(work)["head.weight"], state["head.weight"])


def test_a_checkpoint_of_another_model_is_refused_with_all_names(work: Workdir) -> None:
    state = {name: tensor for name, tensor in Model().state_dict().items() if name not in ("norm.bias", "norm.weight")}
    work.ours({**state, "norms.weight": torch.ones(4), "more": torch.ones(2)})
    with pytest.raises(UnmatchedTensorsError) as caught:
        export(work, config=Model())
    assert sorted(caught.value.missing) == ["norm.bias", "norm.weight"]
    assert sorted(caught.value.unused) == ["more", "norms.weight"]
    assert all(name in str(caught.value) for name in (*caught.value.missing, *caught.value.unused))
    work.ours(Model(width=5).state_dict(), "wide")
    with pytest.raises(ShapeMismatchError, match=r"'embed.weight' has shape \[6, 5\], and \[6, 4\] in Model"):
        export(work, work / "wide", config=Model())
    assert work.names() == ["a", "wide"]


def test_numpy_arrays_which_become_tensors_are_compared_with_the_model_too(work: Workdir) -> None:
    np = pytest.importorskip("numpy")

    class WithArray(Model):
        def get_extra_state(self) -> Any:
            return np.ones(3)

        def set_extra_state(self, state: Any) -> None:
            raise NotImplementedError

    work.ours({**Model().state_dict(), "more": np.ones(2)})
    with pytest.raises(UnmatchedTensorsError) as caught:
        export(work, config=Model())
    assert caught.value.unused == ["more"] and work.names() == ["a"]
    export(work, WithArray(), config=None)
    assert weights(work)["_extra_state"].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("model_type", sorted(HUB_RULES))
def test_stacked_experts_are_written_one_by_one_or_as_they_are(model_type: str, work: Workdir) -> None:
    state = {
        "model.layers.0.mlp.experts.gate_up_proj": torch.randn(3, 8, 5),
        "model.layers.0.mlp.experts.down_proj": torch.randn(3, 5, 4),
        "model.layers.0.mlp.gate.weight": torch.randn(3, 5),
    }
    work.ours(state)
    export(work, config={"model_type": model_type})
    block, gate, down, up = (
        ("block_sparse_moe", "w1", "w2", "w3")
        if model_type == "mixtral"
        else ("mlp", "gate_proj", "down_proj", "up_proj")
    )
    expected = {f"model.layers.0.{block}.gate.weight": state["model.layers.0.mlp.gate.weight"]}
    for n in range(3):
        at = f"model.layers.0.{block}.experts.{n}"
        pair = state["model.layers.0.mlp.experts.gate_up_proj"][n].chunk(2)
        expected |= {f"{at}.{gate}.weight": pair[0], f"{at}.{up}.weight": pair[1]}
        expected[f"{at}.{down}.weight"] = state["model.layers.0.mlp.experts.down_proj"][n]
    found = weights(work)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    export(work, target="c", config={"model_type": model_type}, rules=())
    assert weights(work, "c").keys() == state.keys()
    work.convert("torch", "b", "again", rules=[rule.inverse() for rule in asyncckpt.hub_rules(model_type)])
    again = work.load("again")
    assert again.keys() == state.keys() and all(torch.equal(again[name], tensor) for name, tensor in state.items())


def test_ready_rules_need_not_match_and_given_ones_must(work: Workdir) -> None:
    work.ours({"w": torch.ones(1)})
    export(work, config={"model_type": "mixtral"})
    with pytest.raises(UnmatchedTensorsError):
        export(work, target="c", rules=asyncckpt.hub_rules("mixtral"))
    with pytest.raises(ConfigError, match="there are rules for deepseek_v2"):
        asyncckpt.hub_rules("none")


def test_large_models_are_cut_into_shards_with_an_index(work: Workdir) -> None:
    work.ours({f"w{n}": torch.full((1000,), float(n)) for n in range(6)})
    export(work, max_shard_bytes=8000, rules=[TensorRule("w{n}", "v{n}")])
    index = in_json(work, "model.safetensors.index.json")
    assert index["metadata"] == {"total_size": 24000} and len(set(index["weight_map"].values())) == 3
    assert {name: float(tensor[0]) for name, tensor in weights(work).items()} == {f"v{n}": n for n in range(6)}


# ---- a model --------------------------------------------------------------------------------------------------------


def test_a_model_is_exported_and_its_temporary_checkpoint_is_gone(work: Workdir) -> None:
    model = Model()
    report = export(work, model, config=None, dtype=torch.bfloat16)
    assert work.names() == ["b"] and report.to == "hf"
    expected = {name: tensor.bfloat16() for name, tensor in model.state_dict().items() if name != "head.weight"}
    assert weights(work).keys() == expected.keys()
    assert all(torch.equal(weights(work)[name], tensor) for name, tensor in expected.items())
    assert in_json(work) == {"model_type": "small", "dtype": "bfloat16", "architectures": ["Model"]}
    with pytest.raises(ConfigError, match="source is a model: leave it out"):
        export(work, model, key="model")


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
@pytest.mark.parametrize("wrap", [torch.compile, torch.nn.DataParallel])
def test_a_wrapped_model_is_exported_as_the_bare_one(work: Workdir, wrap: Callable[[torch.nn.Module], Any]) -> None:
    model = Model()
    export(work, wrap(model), config=None)
    assert weights(work).keys() == model.state_dict().keys() - {"head.weight"}
    assert in_json(work)["architectures"] == ["Model"]


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
@pytest.mark.parametrize("wrap", [torch.compile, torch.nn.DataParallel])
def test_a_model_with_wrapped_submodules_is_exported_as_the_bare_one(
    work: Workdir, wrap: Callable[[torch.nn.Module], Any]
) -> None:
    model, names = Model(), Model().state_dict().keys() - {"head.weight"}
    model.head, model.norm = wrap(model.head), wrap(model.norm)
    export(work, model, config=None)
    work.ours({"model": model})
    export(work, target="c", config=model, key="model")
    assert weights(work).keys() == weights(work, "c").keys() == names


def test_the_state_of_a_model_is_taken_once_as_it_may_be_a_collective_of_all_ranks(work: Workdir) -> None:
    class Counting(Model):
        n_calls = 0

        def state_dict(self, *arguments: Any, **keywords: Any) -> Any:
            self.n_calls += 1
            return super().state_dict(*arguments, **keywords)

    model = Counting()
    export(work, model, config=None)
    assert model.n_calls == 1 and "embed.weight" in weights(work)


def test_an_export_of_a_model_that_fails_leaves_nothing(work: Workdir) -> None:
    with pytest.raises(ConfigError, match="no vocabulary"):
        export(work, Model(), config=None, tokenizer=Failing())
    assert work.names() == []
    (work / "b").mkdir()
    (work / "b" / "notes").touch()
    with pytest.raises(CheckpointExistsError):
        export(work, Model(), config=None)
    assert work.names() == ["b"]


# ---- all of it or nothing -------------------------------------------------------------------------------------------


def test_a_place_that_is_taken_is_refused_before_a_tokenizer_is_saved(work: Workdir) -> None:
    (work / "taken").mkdir()
    (work / "taken" / "file").write_text("mine")
    called = []

    class Tokenizer:
        def save_pretrained(self, directory: str) -> None:
            called.append(directory)

    with pytest.raises(CheckpointExistsError):
        asyncckpt.export_hf(work / "none", work / "taken", config={}, tokenizer=Tokenizer())
    assert not called


def test_an_export_replaces_another_in_one_step_and_keeps_its_other_files(work: Workdir) -> None:
    work.ours({"w": torch.ones(2)})
    export(work, tokenizer=Saved(tokenizer__json={"a": 1}))
    (work / "b" / "README.md").write_text("mine")
    with pytest.raises(CheckpointExistsError):
        export(work)
    work.ours({"v": torch.ones(2)}, "later")
    report = export(work, work / "later", overwrite=True)
    assert report.carried_over == ("README.md", "tokenizer.json")
    assert weights(work).keys() == {"v"}


class FailingFiles(Files):
    """Fails the n-th call that opens, writes, flushes or renames."""

    left = 0

    def _count(self) -> None:
        FailingFiles.left -= 1
        if FailingFiles.left == 0:
            raise OSError(28, "No space left on device")


for _name in ("open", "pwrite", "fsync", "rename"):

    def _failing(self: Any, *arguments: Any, _name: str = _name, **keywords: Any) -> Any:
        self._count()
        return getattr(Files, _name)(self, *arguments, **keywords)

    setattr(FailingFiles, _name, _failing)


def test_whatever_call_fails_nothing_of_the_target_is_there(work: Workdir, monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncckpt.interop import convert

    work.ours({"w": torch.randn(300, 40)})
    monkeypatch.setattr(convert, "Files", FailingFiles)
    failures = 0
    for n in range(1, 200):
        FailingFiles.left = n
        try:
            export(work, target=f"b{n}", tokenizer=Saved(tokenizer__json={}))
        except (AsyncCkptError, OSError):
            failures += 1
            assert work.names() == ["a"]
        else:
            assert sorted(os.listdir(work / f"b{n}")) == ["config.json", "model.safetensors", "tokenizer.json"]
            break
    assert failures > 3 and work.names() == ["a", f"b{failures + 1}"]


def test_a_damaged_checkpoint_is_not_exported(work: Workdir) -> None:
    work.ours({"w": torch.randn(300, 40)})
    file = next((work / "a").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptCheckpointError):
        export(work, dtype="bfloat16")
    assert work.names() == ["a"]
