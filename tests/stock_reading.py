"""A program that reads checkpoints with stock tools alone, in a process where asyncckpt cannot be imported.

    python stock_reading.py DIRECTORY

DIRECTORY holds `expected.pt` and what `test_stock_tools.py` wrote. Prints, as JSON, what each way of reading gave:
"same", a reason to skip that begins with "skip: ", or what was wrong.
"""

from __future__ import annotations

import contextlib
import io
import json
import pathlib
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

WAYS: dict[str, Callable[[pathlib.Path, dict[str, Any]], None]] = {}


def way(function: Callable[[pathlib.Path, dict[str, Any]], None]) -> Callable[[pathlib.Path, dict[str, Any]], None]:
    """Note a way of reading."""
    WAYS[function.__name__] = function
    return function


def check_tensors(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    """Names, dtypes, shapes and bits."""
    assert set(found) == set(expected), sorted(set(found) ^ set(expected))
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(bits(found[name]), bits(tensor)), name


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def check_state(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """A whole training state: its model's tensors, and all other leaves."""
    check_tensors(dict(found["model"]), expected["model"])
    assert torch.equal(found["optim"]["state"]["w"], expected["optim"]["state"]["w"])
    assert found["optim"]["groups"] == expected["optim"]["groups"]
    assert (found["step"], found["name"]) == (expected["step"], expected["name"])


def zeros(expected: dict[str, Any]) -> dict[str, Any]:
    """A target for `expected`, nested as it is."""
    return {
        name: zeros(value) if isinstance(value, dict) else torch.zeros_like(value) if torch.is_tensor(value) else None
        for name, value in expected.items()
    }


def read_hf(path: pathlib.Path, expected: dict[str, torch.Tensor]) -> None:
    """By the reader of torch for Hugging Face directories."""
    target = zeros(expected)
    dcp.load(target, storage_reader=dcp.HuggingFaceStorageReader(str(path)), no_dist=True)
    check_tensors(target, expected)


def named(expected: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors under the names that a checkpoint of ours has for them."""
    found = {f"model.{name}": tensor for name, tensor in expected["model"].items()}
    return found | {"optim.state.w": expected["optim"]["state"]["w"]}


def consolidate(path: pathlib.Path, expected: dict[str, torch.Tensor]) -> None:
    """Shards into one file, by torch's own tool."""
    from safetensors.torch import load_file
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

    target = path.parent / f"{path.name}-consolidated"
    target.mkdir()
    consolidate_safetensors_files(str(path), str(target), dict.fromkeys(expected, 1))
    (file,) = target.glob("*.safetensors")
    check_tensors(load_file(file), expected)


def floats(expected: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What `consolidate` takes of the model."""
    return {n: t for n, t in expected["model"].items() if t.is_floating_point() and t.dim()}


def read_safetensors(path: pathlib.Path, expected: dict[str, torch.Tensor]) -> None:
    """All shard files together, by safetensors' own reader."""
    from safetensors.torch import load_file

    check_tensors({name: t for f in path.glob("*.safetensors") for name, t in load_file(f).items()}, expected)


@way
def ours_by_safetensors(root: pathlib.Path, expected: dict[str, Any]) -> None:
    read_safetensors(root / "ours", named(expected))


@way
def ours_by_hf_reader(root: pathlib.Path, expected: dict[str, Any]) -> None:
    read_hf(root / "ours", named(expected))


@way
def by_dcp_save_by_safetensors(root: pathlib.Path, expected: dict[str, Any]) -> None:
    read_safetensors(root / "by-dcp-save", named(expected))


@way
def by_dcp_save_by_hf_reader(root: pathlib.Path, expected: dict[str, Any]) -> None:
    read_hf(root / "by-dcp-save", named(expected))


@way
def by_dcp_save_by_consolidate(root: pathlib.Path, expected: dict[str, Any]) -> None:
    consolidate(root / "by-dcp-save-floats", floats(expected))


@way
def converted_by_safetensors(root: pathlib.Path, expected: dict[str, Any]) -> None:
    read_safetensors(root / "converted", named(expected))


@way
def converted_by_hf_reader(root: pathlib.Path, expected: dict[str, Any]) -> None:
    read_hf(root / "converted", named(expected))


@way
def converted_by_consolidate(root: pathlib.Path, expected: dict[str, Any]) -> None:
    consolidate(root / "converted-floats", floats(expected))


@way
def ours_of_two_ranks_by_hf_reader(root: pathlib.Path, expected: dict[str, Any]) -> None:
    read_hf(root / "ours-2", torch.load(root / "sharded.pt", weights_only=True))


@way
def ours_of_two_ranks_by_safetensors(root: pathlib.Path, expected: dict[str, Any]) -> None:
    """Every shard file opens; the pieces are joined by the offsets that stand in its header."""
    from safetensors import safe_open

    found = zeros(torch.load(root / "sharded.pt", weights_only=True))
    for shard in (root / "ours-2").glob("*.safetensors"):
        with safe_open(shard, framework="pt") as file:
            info = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            for name in file.keys():  # noqa: SIM118
                piece = file.get_tensor(name)
                start = info[name]["saved_offsets"]
                found[name][tuple(slice(o, o + n) for o, n in zip(start, piece.shape, strict=True))] = piece
    check_tensors(found, torch.load(root / "sharded.pt", weights_only=True))


@way
def ours_by_consolidate(root: pathlib.Path, expected: dict[str, Any]) -> None:
    consolidate(root / "floats", floats(expected))


@way
def ours_of_two_ranks_by_consolidate(root: pathlib.Path, expected: dict[str, Any]) -> None:
    consolidate(root / "floats-2", {"rows": torch.load(root / "sharded.pt", weights_only=True)["rows"]})


@way
def dcp_by_load(root: pathlib.Path, expected: dict[str, Any]) -> None:
    target = zeros(expected)
    target["optim"]["groups"] = [{"lr": 0, "betas": None}]
    dcp.load(target, checkpoint_id=str(root / "dcp"), no_dist=True)
    check_state(target, expected)


@way
def dcp_by_dcp_to_torch_save(root: pathlib.Path, expected: dict[str, Any]) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(str(root / "dcp"), str(root / "back.pt"))
    check_state(torch.load(root / "back.pt", weights_only=True), expected)


@way
def torch_by_load(root: pathlib.Path, expected: dict[str, Any]) -> None:
    check_state(torch.load(root / "a.pt", weights_only=True), expected)


@way
def torch_by_mapped_load(root: pathlib.Path, expected: dict[str, Any]) -> None:
    check_state(torch.load(root / "a.pt", weights_only=True, mmap=True), expected)


@way
def safetensors_by_load_file(root: pathlib.Path, expected: dict[str, Any]) -> None:
    from safetensors.torch import load_file

    check_tensors(load_file(root / "a.safetensors"), expected["model"])


@way
def hf_by_safetensors(root: pathlib.Path, expected: dict[str, Any]) -> None:
    from safetensors.torch import load_file

    files = list((root / "hf").glob("*.safetensors"))
    assert len(files) > 1
    check_tensors({name: t for file in files for name, t in load_file(file).items()}, expected["model"])


@way
def hf_by_hf_reader(root: pathlib.Path, expected: dict[str, Any]) -> None:
    read_hf(root / "hf", expected["model"])


def from_pretrained(path: pathlib.Path, name: str) -> None:
    """Transformers' model `name` in what ours wrote of it: its weights, dtypes and ties."""
    if not path.exists():
        raise ModuleNotFoundError("transformers is not installed")
    import transformers

    models = transformers.AutoModelForCausalLM
    model, said = models.from_pretrained(path, torch_dtype="auto", output_loading_info=True)
    assert not any(said.values()), (path, said)
    check_tensors(model.state_dict(), torch.load(path.parents[1] / "models" / f"{name}.pt", weights_only=True))
    is_tied = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert is_tied == ("tied" in name), path


@way
def hf_by_from_pretrained(root: pathlib.Path, expected: dict[str, Any]) -> None:
    from_pretrained(root / "pretrained" / "plain", "plain")
    from_pretrained(root / "pretrained" / "plain.pt", "plain")


@way
def hf_tied_by_from_pretrained(root: pathlib.Path, expected: dict[str, Any]) -> None:
    from_pretrained(root / "pretrained" / "tied", "tied")
    from_pretrained(root / "pretrained" / "tied.pt", "tied")


@way
def hf_bfloat16_by_from_pretrained(root: pathlib.Path, expected: dict[str, Any]) -> None:
    from_pretrained(root / "pretrained" / "bfloat16", "bfloat16")
    from_pretrained(root / "pretrained" / "bfloat16.pt", "bfloat16")


@way
def hf_tied_bfloat16_by_from_pretrained(root: pathlib.Path, expected: dict[str, Any]) -> None:
    from_pretrained(root / "pretrained" / "tied-bfloat16", "tied-bfloat16")
    from_pretrained(root / "pretrained" / "tied-bfloat16.pt", "tied-bfloat16")


@way
def safetensors_by_from_pretrained(root: pathlib.Path, expected: dict[str, Any]) -> None:
    from_pretrained(root / "pretrained" / "one", "plain")


def main() -> None:
    """Read in every way."""
    sys.modules["asyncckpt"] = sys.modules["asyncckpt_worker"] = None  # type: ignore[assignment]
    warnings.simplefilter("ignore")
    root = pathlib.Path(sys.argv[1])
    expected = torch.load(root / "expected.pt", weights_only=True)
    found = {}
    for name, read in WAYS.items():
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                read(root, expected)
            found[name] = "same"
        except ModuleNotFoundError as error:
            found[name] = f"skip: {error}"
        except Exception:
            found[name] = traceback.format_exc()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
