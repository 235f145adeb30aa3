"""A Hugging Face directory of which several files have one tensor: the index says which is meant, aloud."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import states
import torch

import asyncckpt
from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.interop.sources.verify import verify_any
from asyncckpt.storage.files import Files

pytest.importorskip("numpy")
safetensors_torch = pytest.importorskip("safetensors.torch")

FILES = Files()
NAMES = [f"model-{n:05d}-of-00002.safetensors" for n in (1, 2)]
INDEX = "model.safetensors.index.json"
COPIES = [torch.ones(2), torch.full((2,), 7.0)]
B, C = torch.zeros(2), torch.arange(3.0)
READERS: dict[str, Callable[[pathlib.Path], Any]] = {
    "load": asyncckpt.load,
    "convert": lambda path: asyncckpt.convert(path, path.with_name("out"), to="torch"),
    "verify": lambda path: _raised(verify_any(str(path), FILES).faults),
}


def _raised(faults: list[Any]) -> None:
    for fault in faults:
        raise fault


def write(tmp_path: pathlib.Path, copies: list[torch.Tensor], weight_map: dict[str, int]) -> pathlib.Path:
    """A directory of two files that both have `a`; `b` is in the first, `c` in the second."""
    path = tmp_path / "hub"
    path.mkdir()
    for name, shard in zip(NAMES, [{"a": copies[0], "b": B}, {"a": copies[1], "c": C}], strict=True):
        safetensors_torch.save_file(shard, path / name)
    (path / INDEX).write_text(json.dumps({"weight_map": {fqn: NAMES[n] for fqn, n in weight_map.items()}}))
    return path


@pytest.mark.parametrize("meant", [0, 1])
def test_the_copy_that_the_index_names_is_loaded(meant: int, tmp_path: pathlib.Path) -> None:
    path = write(tmp_path, COPIES, {"a": meant, "b": 0, "c": 1})
    states.assert_same(asyncckpt.load(path), {"a": COPIES[meant], "b": B, "c": C})


@pytest.mark.parametrize("to", ["asyncckpt", "torch", "hf"])
@pytest.mark.parametrize("meant", [0, 1])
def test_convert_takes_the_copy_that_the_index_names_and_reports_the_other(
    meant: int, to: str, tmp_path: pathlib.Path
) -> None:
    path = write(tmp_path, COPIES, {"a": meant, "b": 0, "c": 1})
    report = asyncckpt.convert(path, tmp_path / "out", to=to)
    states.assert_same(asyncckpt.load(tmp_path / "out"), {"a": COPIES[meant], "b": B, "c": C})
    (said,) = [line for line in report.changed if "copies" in line]
    assert said.endswith(f": a (not from {NAMES[1 - meant]})")


def test_convert_of_something_else_reports_no_copy(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path, COPIES, {"a": 0, "b": 0, "c": 1})
    assert asyncckpt.convert(path, tmp_path / "out", to="torch", keys=["b"]).changed == ()


@pytest.mark.parametrize("fast", [False, True])
def test_verify_says_which_copy_was_not_read(fast: bool, tmp_path: pathlib.Path) -> None:
    verdict = verify_any(str(write(tmp_path, COPIES, {"a": 0, "b": 0, "c": 1})), FILES, fast=fast)
    assert verdict.state == "ok"
    assert f"a (not from {NAMES[1]})" in verdict.unchecked


@pytest.mark.parametrize("read", list(READERS))
@pytest.mark.parametrize(
    "other",
    [torch.ones(3), torch.ones(2, 1), torch.ones(2, dtype=torch.float64), torch.ones(4, dtype=torch.float16)],
    ids=["length", "shape", "dtype", "both"],
)
def test_copies_of_other_shapes_or_dtypes_are_refused_by_name(
    other: torch.Tensor, read: str, tmp_path: pathlib.Path
) -> None:
    path = write(tmp_path, [COPIES[0], other], {"a": 0, "b": 0, "c": 1})
    with pytest.raises(CorruptCheckpointError, match=f"'a' is in {NAMES[0]} and {NAMES[1]}") as caught:
        READERS[read](path)
    assert caught.value.fqn == "a"


@pytest.mark.parametrize("read", list(READERS))
@pytest.mark.parametrize("has_index", [True, False])
def test_copies_of_a_tensor_that_the_index_lacks_are_refused_by_name(
    has_index: bool, read: str, tmp_path: pathlib.Path
) -> None:
    path = write(tmp_path, COPIES, {"b": 0, "c": 1})
    if not has_index:
        (path / INDEX).unlink()
    with pytest.raises(CorruptCheckpointError, match=f"'a' is in {NAMES[0]} and {NAMES[1]}") as caught:
        READERS[read](path)
    assert caught.value.fqn == "a"


def test_a_copy_that_is_a_part_of_a_tensor_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path, COPIES, {"a": 0, "b": 0, "c": 1})
    sharding = json.dumps({"a": {"saved_offsets": [2]}})
    metadata = {"DCP_SHARDING_INFO": sharding, "DCP_VERSION": "1.0"}
    safetensors_torch.save_file({"a": COPIES[1], "c": C}, path / NAMES[1], metadata=metadata)
    with pytest.raises(CorruptCheckpointError, match=f"'a' is in {NAMES[0]} and {NAMES[1]}"):
        asyncckpt.load(path)
