"""`asyncckpt.dcp`'s stand-ins for torch's `format_utils`."""

from __future__ import annotations

import errno
import inspect
import os
import pathlib
import subprocess
import sys
import warnings
from typing import Any

import dcp_calls
import foreign_samples
import pytest
import states
import torch
import torch.distributed.checkpoint as dcp

import asyncckpt.dcp
from asyncckpt.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    MissingKeysError,
    SaveFailedError,
    UnsupportedFormatError,
)
from asyncckpt.storage.files import Files

pytest.importorskip("numpy")

STATE: dict[str, Any] = {
    "model": {"w": torch.arange(12.0).reshape(3, 4), "t": torch.arange(6).reshape(2, 3).t()},
    "optim": {"groups": [{"lr": 0.5, "betas": (0.9, 0.99)}]},
    "step": 3,
}


# ---- the functions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["dcp_to_torch_save", "torch_save_to_dcp", "BroadcastingTorchSaveReader", "DynamicMetaLoadPlanner"]
)
def test_arguments_of_torch_come_first_in_their_order(name: str) -> None:
    stock: Any = pytest.importorskip("torch.distributed.checkpoint.format_utils")
    theirs = inspect.signature(getattr(stock, name)).parameters
    ours = inspect.signature(getattr(asyncckpt.dcp, name)).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    assert all(p.kind is p.KEYWORD_ONLY for p in list(ours.values())[len(theirs) :])
    assert [p.default for p in list(ours.values())[: len(theirs)]] == [p.default for p in theirs.values()]


def test_both_ways_and_back_are_what_stock_tools_read(tmp_path: pathlib.Path) -> None:
    foreign_samples.save_dcp(STATE, tmp_path / "a")
    report = asyncckpt.dcp.dcp_to_torch_save(tmp_path / "a", tmp_path / "b.pt")
    assert (report.tensors, report.objects) == (2, 3)
    found = torch.load(tmp_path / "b.pt", weights_only=True)
    states.assert_same(found["model"]["w"], STATE["model"]["w"])
    assert (found["optim"], found["step"]) == (STATE["optim"], 3)
    asyncckpt.dcp.torch_save_to_dcp(str(tmp_path / "b.pt"), str(tmp_path / "not" / "yet" / "there"))
    target: Any = {"model": {"w": torch.zeros(3, 4), "t": torch.zeros(3, 2, dtype=torch.int64)}, "step": 0}
    foreign_samples.load_dcp(target, tmp_path / "not" / "yet" / "there")
    states.assert_same(target["model"]["t"], STATE["model"]["t"].contiguous())
    assert target["step"] == 3


def test_only_some_keys_are_taken(tmp_path: pathlib.Path) -> None:
    foreign_samples.save_dcp(STATE, tmp_path / "a")
    asyncckpt.dcp.dcp_to_torch_save(tmp_path / "a", tmp_path / "b.pt", keys=["model.w", "optim"])
    found = torch.load(tmp_path / "b.pt", weights_only=True)
    assert (list(found), list(found["model"])) == (["model", "optim"], ["w"])


def test_a_target_is_replaced_as_torch_does_unless_told_otherwise(tmp_path: pathlib.Path) -> None:
    foreign_samples.save_dcp(STATE, tmp_path / "a")
    torch.save({"old": 1}, tmp_path / "b.pt")
    with pytest.raises(CheckpointExistsError):
        asyncckpt.dcp.dcp_to_torch_save(tmp_path / "a", tmp_path / "b.pt", overwrite=False)
    asyncckpt.dcp.dcp_to_torch_save(tmp_path / "a", tmp_path / "b.pt")
    assert "old" not in torch.load(tmp_path / "b.pt", weights_only=True)
    (tmp_path / "notes").write_text("no checkpoint")
    with pytest.raises(CheckpointExistsError):
        asyncckpt.dcp.dcp_to_torch_save(tmp_path / "a", tmp_path / "notes")


def test_what_is_no_checkpoint_is_not_replaced_and_directories_that_were_made_go_again(tmp_path: pathlib.Path) -> None:
    torch.save(STATE, tmp_path / "b.pt")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("x")
    with pytest.raises(CheckpointExistsError):
        asyncckpt.dcp.torch_save_to_dcp(tmp_path / "b.pt", tmp_path / "mine")
    with pytest.raises(MissingKeysError):
        asyncckpt.dcp.torch_save_to_dcp(tmp_path / "b.pt", tmp_path / "made" / "here" / "d", keys=["nothing"])
    with pytest.raises(MissingKeysError):
        asyncckpt.dcp.torch_save_to_dcp(tmp_path / "b.pt", tmp_path / "mine" / "more" / "d", keys=["nothing"])
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["b.pt", "mine", "notes"]
    asyncckpt.dcp.torch_save_to_dcp(tmp_path / "b.pt", tmp_path / "made" / "here" / "d")
    assert asyncckpt.load(tmp_path / "made" / "here" / "d")["step"] == 3


def test_a_source_that_is_missing_or_something_else_is_an_error(tmp_path: pathlib.Path) -> None:
    torch.save(STATE, tmp_path / "b.pt")
    foreign_samples.save_dcp(STATE, tmp_path / "a")
    with pytest.raises(CheckpointNotFoundError):
        asyncckpt.dcp.torch_save_to_dcp(tmp_path / "no.pt", tmp_path / "x")
    with pytest.raises(UnsupportedFormatError, match=r"no file of torch\.save"):
        asyncckpt.dcp.torch_save_to_dcp(tmp_path / "a", tmp_path / "x")
    with pytest.raises(UnsupportedFormatError, match=r"no directory of torch\.distributed"):
        asyncckpt.dcp.dcp_to_torch_save(tmp_path / "b.pt", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_names_are_looked_up_when_they_are_used() -> None:
    assert set(asyncckpt.dcp.__all__) <= set(dir(asyncckpt.dcp))
    assert all(hasattr(asyncckpt.dcp, name) for name in asyncckpt.dcp.__all__)
    with pytest.raises(AttributeError, match="no_such"):
        _ = asyncckpt.dcp.no_such


# ---- one process ----------------------------------------------------------------------------------------------------


def stock_load(state: dict[str, Any], path: pathlib.Path, flatten: bool = True, **kw: Any) -> None:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(
            state,
            checkpoint_id=str(path),
            storage_reader=asyncckpt.dcp.BroadcastingTorchSaveReader(**kw),
            planner=asyncckpt.dcp.DynamicMetaLoadPlanner(flatten_state_dict=flatten),
            no_dist=True,
        )


def test_objects_of_a_file_under_keys_that_are_no_text_get_to_their_places(tmp_path: pathlib.Path) -> None:
    def state(n: int) -> Any:
        return {"state": {0: {"step": n, "m": torch.full((2,), float(n))}, None: {(1, "x"): n}}}

    torch.save(state(3), tmp_path / "a.pt")
    found: Any = state(0)
    stock_load(found, tmp_path / "a.pt")
    states.assert_same(found, state(3))


@pytest.mark.parametrize("kind", ["torch", "legacy", "safetensors", "hf"])
def test_a_file_without_metadata_fills_a_target_without_a_group(kind: str, tmp_path: pathlib.Path) -> None:
    path = foreign_samples.write(kind, tmp_path)
    large = torch.zeros(300, 1000)
    state: Any = {"large": large, "transposed": torch.zeros(6, 8)}
    stock_load(state if kind in ("safetensors", "hf") else {"model": state}, path)
    states.assert_same(large, foreign_samples.model()["large"])
    states.assert_same(state["transposed"], foreign_samples.model()["transposed"].contiguous())


def test_a_stateful_object_and_a_whole_value_are_loaded(tmp_path: pathlib.Path) -> None:
    model = torch.nn.Linear(3, 2)
    torch.save({"net": model.state_dict(), "betas": (0.9, torch.ones(2)), "l": [{"x": torch.ones(1)}]}, tmp_path / "a")
    state: Any = {"net": torch.nn.Linear(3, 2), "betas": None, "l": [{"x": torch.zeros(1)}]}
    stock_load(state, tmp_path / "a")
    states.assert_same(dict(state["net"].state_dict()), dict(model.state_dict()))
    states.assert_same(state["betas"], (0.9, torch.ones(2)))
    states.assert_same(state["l"], [{"x": torch.ones(1)}])
    flat: Any = {"net": None, "betas": None}
    stock_load(flat, tmp_path / "a", flatten=False)
    states.assert_same(dict(flat["net"]), dict(model.state_dict()))


def test_nothing_of_a_hostile_file_is_run(tmp_path: pathlib.Path) -> None:
    from torch.distributed.checkpoint.api import CheckpointException

    class Hostile:
        def __reduce__(self) -> Any:
            return (pathlib.Path(tmp_path / "ran").touch, ())

    torch.save({"w": torch.ones(2), "x": Hostile()}, tmp_path / "a.pt")
    state: Any = {"w": torch.zeros(2)}
    stock_load(state, tmp_path / "a.pt")
    states.assert_same(state["w"], torch.ones(2))
    with pytest.raises(CheckpointException) as caught:
        stock_load({"w": torch.zeros(2), "x": None}, tmp_path / "a.pt")
    assert isinstance(caught.value.failures[0][0], UnsupportedFormatError)
    with pytest.raises(UnsupportedFormatError, match="x: "):
        asyncckpt.dcp.torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "d")
    asyncckpt.dcp.torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "d", partial=True)
    assert not (tmp_path / "ran").exists()


def contents_of(directory: pathlib.Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("kind", ["stock", "ours"])
def test_a_file_may_be_made_in_the_directory_that_it_is_made_of(tmp_path: pathlib.Path, kind: str) -> None:
    directory = tmp_path / "d"
    if kind == "stock":
        foreign_samples.save_dcp(STATE, directory)
    else:
        with asyncckpt.SyncCheckpointer() as checkpointer:
            checkpointer.save(STATE, directory)
    (directory / "notes.txt").write_text("mine")
    (directory / "sub").mkdir()
    before = contents_of(directory)
    for name in ("model.pt", "sub/again.pt", "model.pt"):  # the last one is replaced, as torch's function would
        asyncckpt.dcp.dcp_to_torch_save(directory, directory / name)
        states.assert_same(torch.load(directory / name, weights_only=True)["model"]["w"], STATE["model"]["w"])
    with pytest.raises(CheckpointExistsError):
        asyncckpt.dcp.dcp_to_torch_save(directory, directory / "model.pt", overwrite=False)
    with pytest.raises(CheckpointExistsError):
        asyncckpt.dcp.dcp_to_torch_save(directory, directory / "notes.txt")
    after = contents_of(directory)
    assert {name: after[name] for name in before} == before and set(after) == {*before, "model.pt", "sub/again.pt"}
    states.assert_same(asyncckpt.load(directory)["model"]["w"], STATE["model"]["w"])


@pytest.mark.parametrize("name", [".", "__0_0.distcp", "__9_9.distcp", ".metadata", "x.metadata"])
def test_a_file_that_would_be_a_part_of_its_source_is_refused(tmp_path: pathlib.Path, name: str) -> None:
    foreign_samples.save_dcp(STATE, tmp_path / "d")
    before = contents_of(tmp_path)
    with pytest.raises((ConfigError, CheckpointExistsError)):
        asyncckpt.dcp.dcp_to_torch_save(tmp_path / "d", tmp_path / "d" / name)
    assert contents_of(tmp_path) == before


@pytest.mark.parametrize("above", ["", "sub/deeper"])
def test_a_directory_may_be_made_around_the_file_that_it_is_made_of(tmp_path: pathlib.Path, above: str) -> None:
    directory = tmp_path / "d"
    source = directory / above / "model.pt"
    source.parent.mkdir(parents=True)
    torch.save(STATE, source)
    (directory / "notes.txt").write_text("mine")
    (tmp_path / "link").symlink_to(directory)
    before = contents_of(directory)
    asyncckpt.dcp.torch_save_to_dcp(source, tmp_path / "link" if above else directory)
    after = contents_of(directory)
    assert {name: after[name] for name in before} == before and ".metadata" in after
    assert not [name for name in after if "converting" in name]
    target = {"model": {"w": torch.zeros(3, 4)}}
    dcp_calls.load(target, dcp.FileSystemReader(directory))
    states.assert_same(target["model"]["w"], STATE["model"]["w"])
    with pytest.raises(CheckpointExistsError, match=r"\.metadata"):
        asyncckpt.dcp.torch_save_to_dcp(source, directory)
    assert contents_of(directory) == after


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "manifest.json", "model.safetensors"])
def test_a_directory_around_the_source_with_a_checkpoint_in_it_is_left_untouched(
    tmp_path: pathlib.Path, name: str
) -> None:
    torch.save(STATE, tmp_path / "model.pt")
    (tmp_path / name).write_bytes(b"x" * 99)
    before = contents_of(tmp_path)
    for to in ("dcp", "asyncckpt"):
        with pytest.raises(CheckpointExistsError):
            asyncckpt.convert(tmp_path / "model.pt", tmp_path, to=to, overwrite=True)
    assert contents_of(tmp_path) == before


def test_a_target_around_its_source_that_fails_leaves_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(STATE, tmp_path / "model.pt")
    before = contents_of(tmp_path)
    real = Files.link

    def failing(self: Files, source: str, target: str) -> None:
        if target.endswith(".metadata"):
            raise OSError(errno.EIO, "no")
        real(self, source, target)

    monkeypatch.setattr(Files, "link", failing)
    with pytest.raises(SaveFailedError):
        asyncckpt.dcp.torch_save_to_dcp(tmp_path / "model.pt", tmp_path)
    assert contents_of(tmp_path) == before and os.listdir(tmp_path) == ["model.pt"]
    monkeypatch.undo()
    asyncckpt.convert(tmp_path / "model.pt", tmp_path, to="asyncckpt")
    states.assert_same(asyncckpt.load(tmp_path)["model"]["w"], STATE["model"]["w"])
    assert (tmp_path / "model.pt").read_bytes() == before["model.pt"]


def test_a_hugging_face_model_gets_a_torch_file_beside_it_and_no_second_model(tmp_path: pathlib.Path) -> None:
    asyncckpt.convert(_torch_file(tmp_path / "s.pt"), tmp_path / "hf", to="hf")
    asyncckpt.convert(tmp_path / "hf", tmp_path / "hf" / "pytorch_model.bin", to="torch")
    found = torch.load(tmp_path / "hf" / "pytorch_model.bin", weights_only=True)
    assert torch.equal(found["w"], torch.ones(3)) and torch.equal(asyncckpt.load(tmp_path / "hf")["w"], torch.ones(3))
    for to, name in (("safetensors", "more.safetensors"), ("torch", "x.safetensors"), ("hf", "sub")):
        with pytest.raises(ConfigError):
            asyncckpt.convert(tmp_path / "hf", tmp_path / "hf" / name, to=to)


def _torch_file(path: pathlib.Path) -> pathlib.Path:
    torch.save({"w": torch.ones(3)}, path)
    return path


def test_arguments_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError):
        asyncckpt.dcp.BroadcastingTorchSaveReader(read_on="moon")
    with pytest.raises(ConfigError):
        asyncckpt.dcp.BroadcastingTorchSaveReader().set_up_storage_reader(None, True)  # type: ignore[arg-type]


MEASURED = """
import sys, warnings
import torch, torch.distributed.checkpoint as dcp
from asyncckpt.dcp import BroadcastingTorchSaveReader, DynamicMetaLoadPlanner
warnings.simplefilter("ignore")
state = {"big": torch.ones(1000, 60_000), "turned": torch.ones(1000, 1000)}
open("/proc/self/clear_refs", "w").write("5")  # forget the peak so far: proc(5)
def peak(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))
before = peak("VmRSS")
dcp.load(state, checkpoint_id=sys.argv[1], storage_reader=BroadcastingTorchSaveReader(),
         planner=DynamicMetaLoadPlanner(), no_dist=True)
assert state["big"][999, 59_999] == 2
print(peak("VmHWM") - before)
"""


def test_a_load_takes_little_memory_beside_its_target(tmp_path: pathlib.Path) -> None:
    try:
        open("/proc/self/clear_refs", "w").close()
    except OSError:
        pytest.skip("the peak of memory cannot be reset here")
    torch.save({"big": torch.full((1000, 60_000), 2.0), "turned": torch.zeros(1000, 1000).t()}, tmp_path / "a.pt")
    found = subprocess.run(
        [sys.executable, "-c", MEASURED, str(tmp_path / "a.pt")], capture_output=True, text=True, timeout=60, check=True
    )
    assert int(found.stdout) < 200_000_000, "the file has 244 MB; the original holds it whole"
