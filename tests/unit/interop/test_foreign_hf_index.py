"""A Hugging Face directory and its index: which files are meant, which copy of a tensor, and an index that lies."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import states
import torch
from conversions import Workdir

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
TWICE = f"'a' is in {NAMES[0]} and {NAMES[1]}"


def verify(path: Path) -> None:
    for fault in verify_any(str(path), FILES).faults:
        raise fault


READERS: list[Callable[[Path], Any]] = [
    asyncckpt.load,
    lambda path: asyncckpt.convert(path, path.with_name("b"), to="torch"),
    verify,
]


def write(work: Workdir, weight_map: dict[str, Any], *copies: torch.Tensor) -> Path:
    """Write two files: `b` is in the first, `c` in the second, and copies of `a` in one or both; and the index."""
    (work / "a").mkdir()
    shards: list[dict[str, torch.Tensor]] = [{"b": B}, {"c": C}]
    for name, shard, copy in zip(NAMES, shards, [*copies, None, None][:2], strict=True):
        safetensors_torch.save_file(shard if copy is None else shard | {"a": copy}, work / "a" / name)
    where = {fqn: NAMES[place] if isinstance(place, int) else place for fqn, place in weight_map.items()}
    (work / "a" / INDEX).write_text(json.dumps({"weight_map": where}))
    return work / "a"


@pytest.mark.parametrize("to", ["asyncckpt", "torch", "hf"])
@pytest.mark.parametrize("meant", [0, 1])
def test_the_copy_that_the_index_names_is_read_and_the_other_is_reported(meant: int, to: str, work: Workdir) -> None:
    path = write(work, {"a": meant, "b": 0, "c": 1}, *COPIES)
    expected = {"a": COPIES[meant], "b": B, "c": C}
    states.assert_same(asyncckpt.load(path), expected)
    (said,) = [line for line in work.convert(to).changed if "copies" in line]
    states.assert_same(work.load(), expected)
    assert said.endswith(f": a (not from {NAMES[1 - meant]})")
    assert work.convert(to, target="c", keys=["b"]).changed == ()
    for fast in (False, True):
        verdict = verify_any(str(path), FILES, fast=fast)
        assert verdict.state == "ok" and f"a (not from {NAMES[1 - meant]})" in verdict.unchecked


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    "other",
    [torch.ones(3), torch.ones(2, 1), torch.ones(2, dtype=torch.float64), torch.ones(4, dtype=torch.float16)],
    ids=["length", "shape", "dtype", "both"],
)
def test_copies_of_other_shapes_or_dtypes_are_refused_by_name(other: torch.Tensor, read: Any, work: Workdir) -> None:
    path = write(work, {"a": 0, "b": 0, "c": 1}, COPIES[0], other)
    with pytest.raises(CorruptCheckpointError, match=TWICE) as caught:
        read(path)
    assert caught.value.fqn == "a"


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("has_index", [True, False])
def test_copies_of_a_tensor_that_the_index_lacks_are_refused_by_name(has_index: bool, read: Any, work: Workdir) -> None:
    path = write(work, {"b": 0, "c": 1}, *COPIES)
    if not has_index:
        (path / INDEX).unlink()
    with pytest.raises(CorruptCheckpointError, match=TWICE) as caught:
        read(path)
    assert caught.value.fqn == "a"


def test_a_copy_that_is_a_part_of_a_tensor_is_refused_by_name(work: Workdir) -> None:
    path = write(work, {"a": 0, "b": 0, "c": 1}, *COPIES)
    metadata = {"DCP_SHARDING_INFO": json.dumps({"a": {"saved_offsets": [2]}}), "DCP_VERSION": "1.0"}
    safetensors_torch.save_file({"a": COPIES[1], "c": C}, path / NAMES[1], metadata=metadata)
    with pytest.raises(CorruptCheckpointError, match=TWICE):
        asyncckpt.load(path)


def test_a_tensor_that_the_index_lacks_is_read_as_transformers_does(work: Workdir) -> None:
    write(work, {"b": 0, "c": 1}, COPIES[1])
    work.convert("asyncckpt")
    for name in ("a", "b"):
        states.assert_same(work.load(name), {"a": COPIES[1], "b": B, "c": C})


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (1, r"model-00002-of-00002.* lacks tensor 'a'"),
        ("../../secret.safetensors", "leads out"),
        *((name, "") for name in ("../x", "/x", "a\0", "m" * 5000, "m/" * 3000, "\ud800", "", ".", "a/../../x")),
    ],
)
def test_an_index_that_names_another_file_or_one_outside_is_refused(place: Any, said: str, work: Workdir) -> None:
    path = write(work, {"a": place, "b": 0, "c": 1}, COPIES[0])
    with pytest.raises(CorruptCheckpointError, match=said or None):
        asyncckpt.load(path)
