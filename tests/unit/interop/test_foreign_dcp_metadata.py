"""DCP directories that are whole, and not as `DefaultSavePlanner` and `torch.save` make them: read, or refused."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign_samples
import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

import asyncckpt
from asyncckpt.errors import AsyncCkptError, CorruptCheckpointError, UnsupportedFormatError
from asyncckpt.format.state_tree import MAX_DEPTH, MAX_KEY_CHARS

pytest.importorskip("numpy")

STATE = {"a": {"w": torch.arange(3.0), "v": torch.ones(2)}, "n": 5}


def opened(path: Path) -> list[torch.Tensor]:
    found = asyncckpt.open_checkpoint(path)
    return [found.tensor(name) for name in found.tensors]


READERS: list[Callable[[Path], Any]] = [
    asyncckpt.load,
    opened,
    lambda path: asyncckpt.convert(path, path.parent / "target", to="torch"),
]


def with_planner_data(path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """Write `STATE`, and change what its planner has kept."""
    foreign_samples.save_dcp(STATE, path)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    changed = dataclasses.replace(metadata, planner_data=change(metadata.planner_data))
    (path / ".metadata").write_bytes(pickle.dumps(changed))
    return path


@pytest.mark.parametrize(
    ("change", "names", "flat"),
    [
        (lambda paths: paths, None, []),
        (lambda paths: None, None, ["a.w", "a.v", "n"]),
        (lambda paths: [1, 2], "the top level", ["a.w", "a.v", "n"]),
        (lambda paths: {**paths, "mine": {"own": 1}}, "'mine'", []),
        (lambda paths: {**paths, "a.w": {"own": 1}}, "a.w", ["a.w"]),
        (lambda paths: {**paths, "a.w": ()}, "a.w", ["a.w"]),
        (lambda paths: {**paths, "a.w": ("b", "w")}, "a.w", ["a.w"]),
        (lambda paths: {**paths, "a.w": ("a", ("w",))}, "a.w", ["a.w"]),
        (lambda paths: {**paths, "a.w": ("a",) * 5000}, "a.w", ["a.w"]),
        (lambda paths: {**paths, "a.w": ("k" * 100_000,)}, "a.w", ["a.w"]),
    ],
)
def test_planner_data_of_another_planner_cost_the_nesting_alone_and_are_named(
    change: Callable[[dict[str, Any]], Any], names: str | None, flat: list[str], tmp_path: Path
) -> None:
    path = with_planner_data(tmp_path / "d", change)
    found = asyncckpt.load(path)
    for fqn in ("a.w", "a.v", "n"):
        assert (fqn in found) is (fqn in flat or fqn == "n")
    assert torch.equal(found["a.w"] if "a.w" in flat else found["a"]["w"], STATE["a"]["w"])  # type: ignore[index]
    report = asyncckpt.convert(path, tmp_path / "t", to="torch")
    said = [line for line in report.changed if "planner" in line]
    assert said == ([] if names is None else [f"what a planner keeps that is no path was not read: {names}"])


def test_a_leaf_without_a_name_and_without_a_path_is_read(tmp_path: Path) -> None:
    foreign_samples.save_dcp({"": torch.ones(2)}, tmp_path / "d")
    metadata = pickle.loads((tmp_path / "d" / ".metadata").read_bytes())
    metadata.planner_data[""] = ()
    (tmp_path / "d" / ".metadata").write_bytes(pickle.dumps(metadata))
    assert torch.equal(asyncckpt.load(tmp_path / "d")[""], torch.ones(2))


def test_a_path_through_another_leaf_costs_the_nesting_alone(tmp_path: Path) -> None:
    state: dict[str, Any] = {"d": {"1": torch.ones(1), 1: {"k": torch.ones(2), "n": 3}}, "w": torch.ones(3)}
    foreign_samples.save_dcp(state, tmp_path / "d")
    found = asyncckpt.load(tmp_path / "d")
    assert torch.equal(found["d"]["1"], torch.ones(1)) and torch.equal(found["d.1.k"], torch.ones(2))
    assert found["d.1.n"] == 3 and list(found["d"]) == ["1"]
    report = asyncckpt.convert(tmp_path / "d", tmp_path / "t", to="torch")
    assert "whose path leads through another leaf is at the top level: d.1.k, d.1.n" in report.changed


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    ("key", "what"), [("k" * (MAX_KEY_CHARS + 1), "characters"), (".".join("d" * MAX_DEPTH), "nested deeper")]
)
def test_names_that_no_structure_of_ours_has_are_unsupported(
    key: str, what: str, read: Callable[[Path], Any], tmp_path: Path
) -> None:
    state: dict[str, Any] = {"w": torch.ones(1)}
    for part in reversed(key.split(".")):
        state = {part: state}
    foreign_samples.save_dcp(state, tmp_path / "d")
    with pytest.raises(UnsupportedFormatError, match=what):
        read(tmp_path / "d")
    assert not (tmp_path / "target").exists()


OF_ANOTHER_TYPE = (
    *(
        None,
        True,
        5,
        -1,
        1 << 20_000,
        1.5,
        "x",
        b"",
        (),
        [],
        {},
        frozenset({1}),
        (None,),
        [()],
        {5: 5},
        ("w", 1 << 20_000),
    ),
    *(torch.Size([1]), torch.float32, torch.device("cpu")),
)


def names_in(one: Any) -> list[str]:
    return [*(field.name for field in dataclasses.fields(one)), "other"]


def places_in(metadata: Metadata) -> list[Callable[[Any], None]]:
    """Return what sets each value in DCP's metadata to another one."""
    objects = [metadata, metadata.storage_meta, *metadata.storage_data, *metadata.storage_data.values()]
    for entry in metadata.state_dict_metadata.values():
        if isinstance(entry, TensorStorageMetadata):
            objects += [entry, *entry.chunks]
    found = [functools.partial(object.__setattr__, one, name) for one in objects for name in names_in(one)]
    for mapping in (metadata.state_dict_metadata, metadata.storage_data, metadata.planner_data):
        found += [functools.partial(mapping.__setitem__, key) for key in mapping]
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("value", OF_ANOTHER_TYPE, ids=lambda value: type(value).__name__)
def test_values_of_other_types_in_metadata_are_refused_or_change_no_tensor(value: Any, tmp_path: Path) -> None:
    path = tmp_path / "d"
    foreign_samples.save_dcp(STATE, path)
    sound = (path / ".metadata").read_bytes()
    saved = {"a.w": STATE["a"]["w"], "a.v": STATE["a"]["v"]}  # type: ignore[index]
    for number in range(len(places_in(pickle.loads(sound)))):
        metadata = pickle.loads(sound)
        places_in(metadata)[number](value)
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
        with contextlib.suppress(AsyncCkptError):
            found = asyncckpt.open_checkpoint(path)
            for name in found.tensors:
                assert torch.equal(found.tensor(name), saved[name])


@pytest.mark.parametrize("state", [(), (5,), (None, torch.float32), 5, "x", [], {}], ids=repr)
def test_properties_of_tensors_without_a_dtype_are_refused(
    state: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign_samples.save_dcp(STATE, tmp_path / "d")
    metadata = pickle.loads((tmp_path / "d" / ".metadata").read_bytes())
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda self: state)
    (tmp_path / "d" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptCheckpointError, match="no dtype"):
        asyncckpt.load(tmp_path / "d")


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("state", [{"w": torch.ones(3)}, STATE], ids=["one tensor", "several"])
def test_items_in_safetensors_are_unsupported_and_not_damaged(
    state: dict[str, Any], read: Callable[[Path], Any], tmp_path: Path
) -> None:
    filesystem = pytest.importorskip("torch.distributed.checkpoint.filesystem")
    if not hasattr(filesystem, "SerializationFormat"):
        pytest.skip("this torch writes items with torch.save only")
    foreign_samples.save_dcp(state, tmp_path / "d", serialization_format=filesystem.SerializationFormat.SAFETENSORS)
    with pytest.raises(UnsupportedFormatError, match=r"SerializationFormat\.SAFETENSORS") as caught:
        read(tmp_path / "d")
    assert caught.value.found == "SerializationFormat.SAFETENSORS"  # type: ignore[attr-defined]
    assert not (tmp_path / "target").exists()
