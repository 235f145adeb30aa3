"""What tells the save that a rank of a stock `dcp.load` has found, and how ranks hold theirs against each other."""

from __future__ import annotations

import enum
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import dcp_calls
import foreign_samples
import pytest
import torch
from in_process_writer import StorageWriter
from torch.distributed.checkpoint.planner import LoadPlan

import asyncckpt
from asyncckpt.dcp import storage_reader
from asyncckpt.dcp.storage_reader import FoundSave, OwnSave, compare_saves, found_in
from asyncckpt.errors import CorruptCheckpointError, RanksDisagreeError
from asyncckpt.interop.sources.detect import read_any
from asyncckpt.storage import contents
from asyncckpt.storage.files import Files

pytest.importorskip("numpy")
pytest.importorskip("safetensors")

HERE, ELSEWHERE = "machine", "another"
ASK = """
import sys
from asyncckpt.dcp.storage_reader import found_in
from asyncckpt.interop.sources.detect import read_any
from asyncckpt.storage.files import Files
for path in sys.argv[1:]:
    print(found_in(read_any(path, Files()), Files()))
"""


class Colour(enum.Enum):
    RED, GREEN = range(2)


class Thing:
    pass


class Other(Thing):
    pass


def unordered(*, known: bool) -> dict[str, Any]:
    """Leaves whose members a process has in an order of its own, of their hashes or of where they lie in memory."""
    texts = [f"text {n}" for n in range(50)]
    found: dict[str, Any] = {
        "w": torch.arange(3.0),
        "set": set(texts),
        "frozenset": frozenset(texts),
        "deep": {frozenset(texts[n : n + 9]) for n in range(9)},
        "inside": [{"a": (set(texts), 1)}, {frozenset(texts): "key", "other": None}],
        "none": {None, float("nan"), 1.5, b"bytes", *texts},
    }
    if not known:
        found |= {"enum": Colour.RED, "enums": {Colour.RED, Colour.GREEN}, "strangers": {Thing(), Other(), *Colour}}
    return found


def without_sums(save: Callable[[], Any]) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        save()
    finally:
        torch.serialization.set_crc32_options(before)


def found_at(path: pathlib.Path) -> FoundSave:
    return found_in(read_any(str(path), Files()), Files())


def plan(load_id: str, found: FoundSave) -> LoadPlan:
    return LoadPlan([], storage_data=OwnSave(load_id, found))


def touched(path: pathlib.Path) -> None:
    for file in [path, *path.rglob("*")]:
        os.utime(file, (1, 1))


@pytest.mark.parametrize("kind", foreign_samples.KINDS)
def test_other_files_of_the_same_content_are_the_same_save_on_another_machine_only(
    kind: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = foreign_samples.write(kind, tmp_path)
    first = found_at(path)
    assert not first.differs(found_at(path))
    touched(path)
    if kind != "dcp":  # whose metadata name the save
        assert first.differs(found_at(path))
    monkeypatch.setattr(storage_reader, "machine", lambda: "another")
    assert not first.differs(found_at(path))


@pytest.mark.parametrize("kind", ["ours", "dcp", "torch"])
def test_saves_that_differ_in_their_elements_only_differ_on_any_machine(
    kind: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    path = tmp_path / "c"
    for n in range(2):
        state = {"a": torch.full((3,), float(n))}
        if kind == "ours":
            dcp_calls.save(state, StorageWriter(path))
        elif kind == "dcp":
            foreign_samples.save_dcp(state, path)
        else:
            torch.save(state, path)
        monkeypatch.setattr(storage_reader, "machine", str(n).__str__)
        found.append(found_at(path))
    assert found[0].differs(found[1])


def test_every_process_finds_the_same_whatever_the_order_of_its_sets(tmp_path: pathlib.Path) -> None:
    paths = {kind: tmp_path / kind for kind in ("torch", "without sums", "legacy", "dcp", "safetensors", "ours")}
    torch.save(unordered(known=False), paths["torch"])
    without_sums(lambda: torch.save(unordered(known=False), paths["without sums"]))
    torch.save(unordered(known=False), paths["legacy"], _use_new_zipfile_serialization=False)
    foreign_samples.save_dcp(unordered(known=False), paths["dcp"])
    foreign_samples.save_safetensors({"a": torch.ones(2), "b": torch.zeros(3)}, paths["safetensors"])
    dcp_calls.save(unordered(known=True), StorageWriter(paths["ours"]))
    paths["converted"] = tmp_path / "converted"
    asyncckpt.convert(paths["ours"], paths["converted"], to="dcp", keys=["w", "set", "none"])
    here = [str(found_at(path)) for path in paths.values()]
    there = subprocess.run(
        [sys.executable, "-c", ASK, *map(str, paths.values())],
        env={**os.environ, "PYTHONHASHSEED": "1"},  # this process has another one, by chance
        check=True,
        timeout=120,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout.splitlines()
    assert dict(zip(paths, here, strict=True)) == dict(zip(paths, there, strict=True))


@pytest.mark.parametrize("kind", ["torch", "without sums", "legacy"])
def test_files_that_differ_in_what_is_no_tensor_differ_on_any_machine(
    kind: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, path = [], tmp_path / "c"
    for n in range(2):
        state = {"a": torch.ones(3), "members": {"a", "b", f"c{n}"}}
        if kind == "without sums":
            without_sums(lambda state=state: torch.save(state, path))  # type: ignore[misc]
        else:
            torch.save(state, path, _use_new_zipfile_serialization=kind == "torch")
        monkeypatch.setattr(storage_reader, "machine", str(n).__str__)
        found.append(found_at(path))
    assert found[0].differs(found[1])


def test_two_conversions_of_one_structure_to_dcp_are_told_apart_on_one_machine(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, path = [], tmp_path / "c"
    for n in range(2):
        torch.save({"a": torch.full((3,), float(n))}, tmp_path / "source")
        asyncckpt.convert(tmp_path / "source", path, to="dcp", overwrite=True)
        found.append(found_at(path))
    assert found[0].save == found[1].save
    assert found[0].differs(found[1])
    again = found_at(path)
    assert not found[1].differs(again)
    monkeypatch.setattr(storage_reader, "machine", lambda: "another")
    touched(path)
    assert not again.differs(found_at(path))


@pytest.mark.parametrize("kind", foreign_samples.KINDS)
def test_one_file_on_two_mounts_of_one_machine_is_one_save(
    kind: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = foreign_samples.write(kind, tmp_path)
    first = found_at(path)
    stamp_of = contents.stamp_of
    monkeypatch.setattr(contents, "stamp_of", lambda found: (stamp_of(found)[0] + 1, *stamp_of(found)[1:]))
    assert not first.differs(found_at(path))


@pytest.mark.parametrize("kind", ["dcp", "torch"])
def test_an_overwrite_before_it_is_told_is_found(kind: str, tmp_path: pathlib.Path) -> None:
    path = foreign_samples.write(kind, tmp_path)
    contents = read_any(str(path), Files())
    changed = path / ".metadata" if path.is_dir() else path
    changed.write_bytes(changed.read_bytes()[:-30])
    with pytest.raises(CorruptCheckpointError) as caught:
        found_in(contents, Files())
    assert caught.value.file == changed.name


ONE, TWO = FoundSave("/c", "1", HERE), FoundSave("/c", "2", HERE)
SAME = [FoundSave("/c", "1", HERE, "x"), FoundSave("/c", "1", ELSEWHERE, "y")]
OWN_PATHS = [ONE, FoundSave("/d", "2", HERE)]
OTHER_TIMES = [FoundSave("/c", "1", HERE, "x"), FoundSave("/c", "1", HERE, "y")]


@pytest.mark.parametrize("founds", [SAME, OWN_PATHS])
def test_ranks_of_one_save_or_with_paths_of_their_own_keep_their_plans(founds: list[FoundSave]) -> None:
    plans = [plan(str(n), found) for n, found in enumerate(founds)]
    assert compare_saves(plans, "0", founds[0]) == plans


@pytest.mark.parametrize(
    ("founds", "coordinator", "ranks", "said"),
    [
        ([ONE, ONE, TWO], 0, [0, 2], "saves 1 and 2"),
        ([ONE, ONE, TWO], 1, [1, 2], "saves 1 and 2"),
        ([ONE, ONE, TWO], 2, [0, 2], "saves 1 and 2"),
        (OTHER_TIMES, 0, [0, 1], "files of different times"),
    ],
)
def test_the_first_rank_that_differs_from_the_coordinator_is_named(
    founds: list[FoundSave], coordinator: int, ranks: list[int], said: str
) -> None:
    with pytest.raises(RanksDisagreeError, match=said) as caught:
        compare_saves([plan(str(n), f) for n, f in enumerate(founds)], str(coordinator), founds[coordinator])
    assert (caught.value.path, caught.value.ranks) == ("/c", ranks)
