"""asyncckpt.load: what comes back, into what, and what is refused."""

from __future__ import annotations

import gc
import inspect
import logging
import os
import shutil
import time
from collections import OrderedDict, namedtuple
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from storage_samples import RecordingFiles, flip_byte, shard_paths

import asyncckpt
from asyncckpt.dtypes import DTYPES
from asyncckpt.errors import (
    AliasMismatchError,
    CheckpointNotCommittedError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    LeafTypeMismatchError,
    MissingKeysError,
    ShapeMismatchError,
    StateLoadError,
    UnsupportedPathError,
)
from asyncckpt.format.checksums import BLOCK_NBYTES
from asyncckpt.loading.load import DefaultReader, LoadOptions, load


def save(path: Path, state: dict[Any, Any]) -> str:
    with asyncckpt.SyncCheckpointer(fsync=False) as checkpointer:
        checkpointer.save(state, path)
    return str(path)


def random_tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return random bytes of `dtype`: NaN payloads and all."""
    count = 1
    for n in shape:
        count *= n
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8)
    if dtype == torch.bool:
        raw &= 1
    return raw.view(dtype).reshape(shape)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    flat = [t.detach().contiguous().flatten() for t in (a, b)]
    return flat[0].numel() == 0 or torch.equal(*(t.view(torch.uint8) for t in flat))


HERE = [name for name in DTYPES if hasattr(torch, name)]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", HERE)
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, name: str) -> None:
    dtype = getattr(torch, name)
    state = {"a": random_tensor(dtype, 7, 33), "b": random_tensor(dtype, 5), "c": torch.empty(0, 3, dtype=dtype)}
    if not name.startswith("float4"):
        state["d"] = random_tensor(dtype, 1).reshape(())
    path = save(tmp_path / "c", state)
    new = load(path)
    assert all(same_bits(new[k], state[k]) for k in state)
    target = {k: torch.empty_like(v) for k, v in state.items()}
    for value in target.values():
        if value.numel():
            value.flatten().view(torch.uint8).zero_()
    filled = load(path, target)
    assert filled is target
    assert all(same_bits(target[k], state[k]) for k in state)


@pytest.mark.skipif(not hasattr(torch, "complex32"), reason="this torch has no complex32")
def test_complex32_is_loaded_without_torchs_warning(tmp_path: Path) -> None:
    numbers = random_tensor(torch.int32, 4, 6)
    bits, path = numbers.view(torch.complex32), save(tmp_path / "c", {"a": numbers.view(torch.complex32)})
    torch.set_warn_always(True)  # else only the first warning of the process would be seen
    try:
        new = load(path)["a"]
        moved = load(path, default_map_location=lambda storage, _: storage.clone())["a"]
        strided = {"a": torch.zeros(6, 4, dtype=torch.int32).view(torch.complex32).t()}
        wider = {"a": torch.zeros(4, 6, dtype=torch.complex64)}
        load(path, strided)
        load(path, wider)
    finally:
        torch.set_warn_always(False)
    assert new.dtype == moved.dtype == torch.complex32
    assert not new._is_view() and not moved._is_view()
    assert all(torch.equal(found.view(torch.int32), numbers) for found in (new, moved, strided["a"]))
    assert torch.equal(wider["a"].nan_to_num(), bits.to(torch.complex64).nan_to_num())


def test_nesting_objects_and_key_types_come_back(tmp_path: Path) -> None:
    state: dict[Any, Any] = {
        "d": {"x": torch.ones(2), 3: {"deep": [1, (2, "three", None)]}, "empty": {}},
        "l": [torch.zeros(1), {"y": 2.5}, []],
        "t": (torch.arange(3), b"bytes", 1 << 70),
        "big": os.urandom(70_000),
        "dtype": torch.float16,
        "size": torch.Size([1, 2]),
        "o": OrderedDict(z=1, a=torch.ones(1)),
        "s": {1, 2},
    }
    new = load(save(tmp_path / "c", state))
    assert list(new) == list(state)
    assert torch.equal(new["d"]["x"], torch.ones(2)) and new["d"][3] == state["d"][3] and new["d"]["empty"] == {}
    assert new["l"][1:] == [{"y": 2.5}, []] and new["t"][1:] == state["t"][1:]
    for key in ("big", "dtype", "size", "s"):
        assert new[key] == state[key] and type(new[key]) is type(state[key])
    assert isinstance(new["o"], OrderedDict) and list(new["o"]) == ["z", "a"]


def test_a_modules_state_dict_keeps_its_metadata(tmp_path: Path) -> None:
    state = torch.nn.BatchNorm1d(3).state_dict()
    new = load(save(tmp_path / "c", {"model": state}))["model"]
    assert dict(new._metadata) == dict(state._metadata)  # type: ignore[attr-defined]
    fresh = torch.nn.BatchNorm1d(3)
    fresh.load_state_dict(new)


def test_aliases_come_back_as_one_tensor(tmp_path: Path) -> None:
    tied = torch.randn(4)
    new = load(save(tmp_path / "c", {"a": tied, "b": {"c": tied}, "d": tied.clone()}))
    assert new["a"] is new["b"]["c"]
    assert new["d"].data_ptr() != new["a"].data_ptr()


def test_tensors_are_filled_in_place_and_objects_replaced(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"w": torch.arange(6.0), "o": {"lr": 0.5, "betas": (0.9, 0.99)}, "n": [1, 2, 3]})
    weight = torch.zeros(6)
    inner: dict[str, Any] = {"lr": 0.0, "betas": (0, 0)}
    target = {"w": weight, "o": inner, "n": [9]}
    load(path, target)
    assert target["w"] is weight and torch.equal(weight, torch.arange(6.0))
    assert target["o"] is inner and inner == {"lr": 0.5, "betas": (0.9, 0.99)}
    assert target["n"] == [1, 2, 3]


def test_objects_inside_lists_and_tuples_of_tensors_are_replaced(tmp_path: Path) -> None:
    pair = namedtuple("pair", "tensor number")
    path = save(tmp_path / "c", {"l": [torch.ones(1), 5], "t": (torch.ones(2), 6), "n": pair(torch.ones(3), 7)})
    target = {"l": [torch.zeros(1), 0], "t": (torch.zeros(2), 0), "n": pair(torch.zeros(3), 0)}
    kept = [target["l"], target["t"][0], target["n"][0]]
    load(path, target)
    assert target["l"] is kept[0] and target["t"][0] is kept[1] and target["n"].tensor is kept[2]
    assert (target["l"][1], target["t"][1], target["n"].number) == (5, 6, 7)
    assert bool(kept[1].all()) and bool(kept[2].all())


def test_only_the_targets_keys_are_read(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"a": torch.ones(3), "b": torch.ones(1 << 20), "x": 1})
    target = {"a": torch.zeros(3)}
    files = RecordingFiles()
    DefaultReader(files).read(path, target)
    assert list(target) == ["a"] and bool(target["a"].all())
    assert sum(n for at, n in files.read_ranges if n >= 4096) <= 2 * BLOCK_NBYTES


NONCONTIGUOUS = {
    "transposed": lambda: torch.zeros(30, 20).t(),
    "strided": lambda: torch.zeros(40, 30)[::2],
    "inner slice": lambda: torch.zeros(20, 60)[:, 5:35],
    "channels last": lambda: torch.zeros(1, 20, 30).permute(1, 2, 0)[:, :, 0],
}


@pytest.mark.parametrize("kind", NONCONTIGUOUS)
def test_a_target_that_is_not_contiguous_is_filled(tmp_path: Path, kind: str) -> None:
    value = torch.randn(20, 30)
    path = save(tmp_path / "c", {"w": value})
    target = NONCONTIGUOUS[kind]()
    load(path, {"w": target})
    assert torch.equal(target, value)


def test_a_view_of_a_larger_tensor_is_filled_and_nothing_around_it(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"w": torch.ones(10)})
    whole = torch.zeros(30)
    load(path, {"w": whole[10:20]})
    assert torch.equal(whole, torch.cat([torch.zeros(10), torch.ones(10), torch.zeros(10)]))


def test_a_large_target_that_is_not_contiguous_is_gathered_from_many_pieces(tmp_path: Path) -> None:
    value = torch.randn(1500, 2000)
    path = save(tmp_path / "c", {"w": value})
    target = torch.zeros(2000, 1500).t()
    load(path, {"w": target}, threads=3)
    assert torch.equal(target, value)


def test_another_dtype_is_converted_and_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save(tmp_path / "c", {"a": torch.arange(5.0), "b": torch.ones(3, dtype=torch.int64)})
    target = {"a": torch.zeros(5, dtype=torch.bfloat16), "b": torch.zeros(3, dtype=torch.float64)}
    with caplog.at_level(logging.WARNING, "asyncckpt"):
        load(path, target)
    assert torch.equal(target["a"], torch.arange(5.0).bfloat16()) and target["b"].tolist() == [1, 1, 1]
    assert len([r for r in caplog.records if "converted" in r.message]) == 1


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [("float32", "int32"), ("float32", "bool"), ("int64", "bool"), ("complex64", "float32"), ("bfloat16", "uint8")],
)
def test_a_kind_of_numbers_that_cannot_hold_the_values_is_refused(tmp_path: Path, saved: str, wanted: str) -> None:
    path = save(tmp_path / "c", {"a": torch.arange(3.0), "w": torch.full((3,), 2.5).to(getattr(torch, saved))})
    target = {"a": torch.zeros(3), "w": torch.ones(3, dtype=getattr(torch, wanted))}
    with pytest.raises(LeafTypeMismatchError, match=f"saved as {saved}, the target is {wanted}") as caught:
        load(path, target)
    assert (caught.value.fqn, caught.value.saved, caught.value.wanted) == ("w", saved, wanted)
    assert not target["a"].any() and target["w"].all()
    assert [tuple(leaf) for leaf in asyncckpt.plan_load(path, target).mismatched] == [("w", saved, wanted)]


def test_a_conjugated_target_is_filled_with_the_values_that_it_shows(tmp_path: Path) -> None:
    value = torch.randn(4, dtype=torch.complex64)
    target = torch.zeros(4, dtype=torch.complex64).conj()
    load(save(tmp_path / "c", {"w": value}), {"w": target})
    assert torch.equal(target.resolve_conj(), value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_parameter_is_filled_although_it_requires_grad(tmp_path: Path, dtype: torch.dtype) -> None:
    path = save(tmp_path / "c", {"w": torch.ones(3)})
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=dtype))
    before = parameter._version
    load(path, {"w": parameter})
    assert parameter.requires_grad and parameter.is_leaf and parameter.grad_fn is None
    assert bool((parameter == 1).all())
    assert parameter._version > before  # autograd learns that it changed


def test_an_inference_tensor_is_filled(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"w": torch.ones(3)})
    with torch.inference_mode():
        targets = [torch.zeros(3), torch.zeros(3, dtype=torch.float64), torch.zeros(6)[::2]]
    for target in targets:
        load(path, {"w": target})
        assert bool((target == 1).all())


@pytest.mark.parametrize("target", [torch.zeros(6).unfold(0, 4, 1), torch.zeros(9).as_strided((3, 2), (2, 4))])
def test_a_target_whose_elements_lie_upon_each_other_is_refused(tmp_path: Path, target: torch.Tensor) -> None:
    path = save(tmp_path / "c", {"a": torch.ones(3), "w": torch.arange(float(target.numel())).reshape(target.shape)})
    first = torch.zeros(3)
    with pytest.raises(ConfigError, match="its elements share memory") as caught:
        load(path, {"a": first, "w": target})
    assert caught.value.value == "w"
    assert not bool(first.any()) and not bool(target.any())


def test_a_target_whose_dimensions_are_interleaved_is_filled(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"w": torch.arange(6.0).reshape(2, 3)})
    target = torch.zeros(20).as_strided((2, 3), (3, 2))
    load(path, {"w": target})
    assert target.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_an_expanded_target_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"w": torch.ones(3)})
    with pytest.raises(ConfigError, match="expanded"):
        load(path, {"w": torch.zeros(1).expand(3)})


def test_one_target_under_two_names_is_filled_from_one_saved_tensor(tmp_path: Path) -> None:
    saved = torch.ones(3)
    path = save(tmp_path / "c", {"a": saved, "b": saved})
    tied = torch.zeros(3)
    load(path, {"a": tied, "b": tied})
    assert bool(tied.all())


@pytest.mark.parametrize("second", ["the same", "a view", "a parameter"])
def test_one_target_for_two_saved_tensors_is_refused_and_nothing_changes(tmp_path: Path, second: str) -> None:
    path = save(tmp_path / "c", {"first": torch.ones(2), "x": torch.ones(3), "y": torch.zeros(3)})
    tied = torch.full((3,), 7.0)
    other = {"the same": tied, "a view": tied.view(3), "a parameter": torch.nn.Parameter(tied)}[second]
    target = {"first": torch.zeros(2), "x": tied, "y": other}
    with pytest.raises(AliasMismatchError, match=r"'x' and 'y'.*nothing was changed") as caught:
        load(path, target)
    assert (caught.value.path, caught.value.fqn, caught.value.other_fqn) == (path, "x", "y")
    assert not bool(target["first"].any()) and tied.tolist() == [7, 7, 7]
    load(path, target, keys=["first", "x"])
    assert tied.tolist() == [1, 1, 1]


def test_one_target_for_two_saved_tensors_of_another_shape_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"x": torch.ones(3), "y": torch.ones(4)})
    tied = torch.zeros(3)
    with pytest.raises(ShapeMismatchError, match="'y'"):
        load(path, {"x": tied, "y": tied})
    assert not bool(tied.any())


def test_one_empty_target_for_two_saved_tensors_has_nothing_to_lose(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"x": torch.ones(0), "y": torch.zeros(0)})
    empty = torch.zeros(0)
    load(path, {"x": empty, "y": empty}, strict=True)


def test_key_map_may_join_two_names_of_one_target(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"x": torch.ones(3), "y": torch.zeros(3)})
    tied = torch.zeros(3)
    load(path, {"x": tied, "y": tied}, key_map={"y": "x"})
    assert tied.tolist() == [1, 1, 1]


def test_one_saved_tensor_fills_two_targets(tmp_path: Path) -> None:
    tied = torch.randn(5)
    target = {"a": torch.zeros(5), "b": torch.zeros(5)}
    load(save(tmp_path / "c", {"a": tied, "b": tied}), target)
    assert torch.equal(target["a"], tied) and torch.equal(target["b"], tied)


STATE = {"model": {"w": 1.0, "b": 2.0}, "model2": 3.0, "opt": {"l": [4.0, 5.0]}}


def tensors_of(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {k: tensors_of(v) for k, v in tree.items()}
    return [tensors_of(v) for v in tree] if isinstance(tree, list) else torch.full((2,), tree)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("model", {"model": {"w": 1.0, "b": 2.0}}),
        (["model.b", "model2"], {"model": {"b": 2.0}, "model2": 3.0}),
        (["opt.l.1"], {"opt": {"l": [5.0]}}),
        ([], {}),
    ],
)
def test_keys_select_names_and_prefixes(tmp_path: Path, keys: Any, expected: Any) -> None:
    path = save(tmp_path / "c", tensors_of(STATE))
    assert str(load(path, keys=keys)) == str(tensors_of(expected))


def test_keys_leave_the_rest_of_a_target_alone(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"a": torch.ones(2), "b": torch.ones(2), "n": 1})
    target = {"a": torch.zeros(2), "b": torch.zeros(2), "n": 0, "other": object}
    del target["other"]
    load(path, target, keys=["a"], strict=True)
    assert bool(target["a"].all()) and not bool(target["b"].any()) and target["n"] == 0


def test_a_partial_load_reads_only_the_blocks_of_its_tensors(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {f"t{i}": torch.randn(100_000) for i in range(20)})
    files = RecordingFiles()
    loaded, missing = DefaultReader(files).read(path, keys=["t11"])
    assert list(loaded) == ["t11"] and missing == []
    assert sum(n for at, n in files.read_ranges if n > 4096) <= 3 * BLOCK_NBYTES + os.path.getsize(
        next(Path(path).glob("*.index"))
    )


@pytest.mark.parametrize("into", [True, False])
@pytest.mark.parametrize("keys", ["typo", ["typo", "tipo"]])
def test_keys_of_which_none_is_there_are_an_error_though_nobody_is_strict(
    tmp_path: Path, keys: str | list[str], into: bool
) -> None:
    path = save(tmp_path, {"a": torch.ones(3)})
    target = {"a": torch.zeros(3)} if into else None
    with pytest.raises(MissingKeysError) as caught:
        load(path, target, keys=keys, strict=False)
    assert caught.value.keys == sorted([keys] if isinstance(keys, str) else keys)
    assert target is None or not target["a"].any()
    assert load(path, keys=["a", "typo"], strict=False).keys() == {"a"}
    assert load(path, keys=[]) == {}


def test_missing_keys_are_logged_and_returned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save(tmp_path / "c", {"a": torch.ones(2)})
    target = {"a": torch.zeros(2), "new": torch.full((2,), 7.0), "n": 3}
    with caplog.at_level(logging.WARNING, "asyncckpt"):
        _, missing = DefaultReader().read(path, target, strict=False)
    assert missing == ["new", "n"]
    assert target["new"].tolist() == [7, 7] and target["n"] == 3 and bool(target["a"].all())
    assert "new, n" in caplog.text


def test_strict_lists_all_missing_keys_and_changes_nothing(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"a": torch.ones(2)})
    target = {"a": torch.zeros(2), **{f"new{i}": torch.zeros(1) for i in range(30)}}
    with pytest.raises(MissingKeysError, match="new29") as caught:
        load(path, target)
    assert caught.value.keys == [f"new{i}" for i in range(30)]
    assert not bool(target["a"].any())


def test_keys_that_select_nothing_are_missing(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"a": torch.ones(2)})
    with pytest.raises(MissingKeysError) as caught:
        load(path, keys=["a", "typo"])
    assert caught.value.keys == ["typo"]


@pytest.mark.parametrize("target", [None, {}, {"a": {}}, {"a": None}, {"a": {"b": 0, "c": 0}}], ids=str)
def test_a_key_below_another_one_selects_nothing_new(tmp_path: Path, target: Any) -> None:
    path = save(tmp_path / "c", {"a": {"b": 1, "c": 2}, "d": 3})
    assert load(path, target, keys=["a", "a.b"]) == {"a": {"b": 1, "c": 2}}
    with pytest.raises(MissingKeysError, match="1 keys are not in the checkpoint;") as caught:
        load(path, None if target is None else {"a": {}}, keys=["a", "a.b", "a.typo"])
    assert caught.value.keys == ["a.typo"]


@pytest.mark.parametrize("target", [None, {"a": {}}, {"a": None}, {"a": {"b": 0, "e": {}}}], ids=str)
def test_a_key_of_an_empty_dict_below_another_one_selects_nothing_new(tmp_path: Path, target: Any) -> None:
    path = save(tmp_path / "c", {"a": {"b": 1, "e": {}}, "d": 3})
    assert load(path, target, keys=["a", "a.e"]) == {"a": {"b": 1, "e": {}}}


def test_thousands_of_keys_below_another_one_take_no_time(tmp_path: Path) -> None:
    """The time must not grow with the number of keys times the number of leaves, which took a minute."""
    members = {f"k{n}": n for n in range(20_000)}
    path, keys = save(tmp_path / "c", {"a": members}), ["a", *(f"a.{name}" for name in members)]
    begin = time.process_time()
    assert load(path, {"a": {}}, keys=keys) == {"a": members}
    assert time.process_time() - begin < 8


def test_a_key_below_an_object_that_is_loaded_as_a_whole_selects_nothing_new(tmp_path: Path) -> None:
    saved, target = (torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=lr) for lr in (0.1, 0.5))
    path = save(tmp_path / "c", {"optim": saved})
    load(path, {"optim": target}, keys=["optim", "optim.param_groups"])
    assert target.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("kind", ["asyncckpt", "torch"])
def test_an_optimizer_whose_state_was_not_saved_is_refused(tmp_path: Path, kind: str) -> None:
    """An empty state would have been saved as such: the moments would be lost without a word."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    parameter.grad = torch.ones(2)
    optimizer.step()
    saved = {"optim": {"param_groups": optimizer.state_dict()["param_groups"]}}
    if kind == "torch":
        torch.save(saved, tmp_path / "c")
    else:
        save(tmp_path / "c", saved)
    with pytest.raises(StateLoadError, match="state"):
        load(str(tmp_path / "c"), {"optim": optimizer})
    assert optimizer.state[parameter]["momentum_buffer"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("keys", "where"),
    [(["b"], "the target"), (["a", "b"], "the target"), (["a", "b", "typo"], "the checkpoint or the target")],
)
def test_a_key_that_only_the_target_lacks_is_not_said_to_be_missing_in_the_checkpoint(
    tmp_path: Path, keys: list[str], where: str
) -> None:
    path = save(tmp_path / "c", {"a": torch.ones(2), "b": 3})
    with pytest.raises(MissingKeysError, match=f" keys are not in {where};") as caught:
        load(path, {"a": torch.zeros(2)}, keys=keys)
    assert caught.value.keys == [key for key in keys if key != "a"]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("target", [None, {"a": torch.zeros(2)}], ids=["new", "target"])
def test_keys_none_of_which_selects_anything_are_said_to_be_wrong(tmp_path: Path, strict: bool, target: Any) -> None:
    path = save(tmp_path / "c", {"a": torch.ones(2)})
    with pytest.raises(MissingKeysError, match=r"none of them selects anything.*top level a\. It lacks") as caught:
        load(path, target, keys=["typo"], strict=strict)
    assert "pass strict=False" not in str(caught.value)


@pytest.mark.parametrize(
    ("saved", "wanted", "prefix", "where"),
    [
        ("w", "module.w", "module.", "the target"),
        ("module.w", "w", "module.", "the checkpoint"),
        ("w", "_orig_mod.w", "_orig_mod.", "the target"),
        ("model._orig_mod.w", "model.w", "_orig_mod.", "the checkpoint"),
        ("module._orig_mod.w", "module.w", "_orig_mod.", "the checkpoint"),
    ],
)
def test_a_wrappers_prefix_is_pointed_out(tmp_path: Path, saved: str, wanted: str, prefix: str, where: str) -> None:
    path = save(tmp_path / "c", {saved: torch.ones(1)})
    with pytest.raises(MissingKeysError) as caught:
        load(path, {wanted: torch.zeros(1)}, strict=True)
    assert f"only {where} has the prefix {prefix!r}" in str(caught.value)


@pytest.mark.parametrize("key_map", [{"module.w": "w"}, lambda fqn: fqn.removeprefix("module.")])
def test_key_map_renames(tmp_path: Path, key_map: Any) -> None:
    path = save(tmp_path / "c", {"w": torch.ones(2), "b": torch.ones(1)})
    target = {"module.w": torch.zeros(2), "b": torch.zeros(1)}
    load(path, target, key_map=key_map, strict=True)
    assert bool(target["module.w"].all()) and bool(target["b"].all())


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        ({"x": torch.ones(1)}, {"x": 1}),
        ({"x": 1}, {"x": torch.ones(1)}),
        ({"x": {"y": torch.ones(1)}}, {"x": torch.ones(1)}),
        ({"x": torch.ones(1)}, {"x": {"y": torch.ones(1)}}),
        ({"x": [1, 2]}, {"x": [torch.ones(1), 2]}),
    ],
)
def test_a_tensor_in_the_place_of_something_else_is_refused_and_nothing_changes(
    tmp_path: Path, saved: dict[str, Any], wanted: dict[str, Any]
) -> None:
    path = save(tmp_path / "c", {"first": torch.ones(1), **saved})
    target = {"first": torch.zeros(1), **wanted}
    with pytest.raises(LeafTypeMismatchError, match="nothing was changed") as caught:
        load(path, target)
    assert caught.value.fqn in ("x", "x.0", "x.1")
    assert not bool(target["first"].any())


@pytest.mark.parametrize("shape", [(4,), (2, 2), (), (3, 1)])
def test_another_shape_is_refused_and_nothing_changes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = save(tmp_path / "c", {"first": torch.ones(1), "x": torch.ones(3)})
    target = {"first": torch.zeros(1), "x": torch.zeros(shape)}
    with pytest.raises(ShapeMismatchError) as caught:
        load(path, target)
    assert (caught.value.fqn, caught.value.saved, caught.value.wanted) == ("x", [3], list(shape))
    assert not bool(target["first"].any())


@pytest.mark.parametrize("damage", ["cut", "extended", "missing", "swapped", "link"])
def test_a_damaged_shard_is_found_before_anything_changes(tmp_path: Path, damage: str) -> None:
    path = save(tmp_path / "c", {"a": torch.ones(100_000), "n": 1})
    shard = shard_paths(path)[0]
    if damage == "cut":
        os.truncate(shard, os.path.getsize(shard) - 4096)
    elif damage == "extended":
        os.truncate(shard, os.path.getsize(shard) + 1)
    elif damage == "swapped":
        other = shard_paths(save(tmp_path / "d", {"a": torch.full((100_000,), 2.0), "n": 1}))[0]
        assert os.path.getsize(other) == os.path.getsize(shard)
        shutil.copy(other, shard)
    else:
        os.rename(shard, tmp_path / "away")
        if damage == "link":
            os.symlink(tmp_path / "away", shard)
    target = {"a": torch.zeros(100_000), "n": 0}
    for verify in (True, False):
        with pytest.raises(CorruptCheckpointError) as caught:
            load(path, target, verify=verify)
        assert caught.value.file == os.path.basename(shard)
        assert target["n"] == 0 and not bool(target["a"].any())


def test_a_flipped_byte_is_named_and_no_object_is_replaced(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"a": torch.ones(100_000), "b": torch.ones(400_000), "n": 1})
    shard = shard_paths(path)[0]
    flip_byte(shard, os.path.getsize(shard) - 10)
    target = {"a": torch.zeros(100_000), "b": torch.zeros(400_000), "n": 0}
    with pytest.raises(CorruptCheckpointError, match="'b'") as caught:
        load(path, target)
    assert caught.value.fqn == "b" and caught.value.offset % BLOCK_NBYTES == 0
    assert target["n"] == 0
    with pytest.raises(CorruptCheckpointError):
        load(path)
    assert bool(load(path, keys=["a"])["a"].all())


def test_without_verification_damage_is_not_noticed(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"a": torch.ones(100_000)})
    shard = shard_paths(path)[0]
    flip_byte(shard, os.path.getsize(shard) - 1)
    assert not bool((load(path, verify=False)["a"] == 1).all())


def test_damaged_objects_are_found_before_anything_changes(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"a": torch.ones(3), "n": 1})
    flip_byte(str(next(Path(path).glob("*.objects.json"))), 40)
    target = {"a": torch.zeros(3), "n": 0}
    with pytest.raises(CorruptCheckpointError):
        load(path, target)
    assert not bool(target["a"].any())


def test_nothing_there_and_never_committed_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        load(tmp_path / "nowhere")
    path = save(tmp_path / "c", {"a": torch.ones(3)})
    os.unlink(os.path.join(path, "manifest.json"))
    with pytest.raises(CheckpointNotCommittedError):
        load(path)


def test_a_copied_checkpoint_loads_and_a_partial_copy_is_found(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"a": torch.ones(100_000), "n": 1})
    shutil.copytree(path, tmp_path / "copy")
    assert bool(load(tmp_path / "copy")["a"].all())
    for name in os.listdir(path):
        if name == "manifest.json":
            continue
        shutil.copytree(path, tmp_path / f"without-{name}")
        os.unlink(tmp_path / f"without-{name}" / name)
        with pytest.raises(CorruptCheckpointError) as caught:
            load(tmp_path / f"without-{name}")
        assert caught.value.file == name


@pytest.mark.parametrize("path", ["ftp://host/x", "", 7, b"bytes"])
def test_what_is_no_path_is_refused(path: Any) -> None:
    with pytest.raises(UnsupportedPathError):
        load(path)


def test_arguments_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"a": torch.ones(3)})
    with pytest.raises(ConfigError, match="key_map"):
        load(path, key_map={"a": "b"})
    for threads in (0, -1, 1.5, True):
        with pytest.raises(ConfigError, match="threads"):
            load(path, threads=threads)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="typo"):
        DefaultReader().read(path, typo=1)


@pytest.mark.parametrize("function", [load, asyncckpt.plan_load, asyncckpt.open_checkpoint])
def test_options_of_one_name_have_one_default(function: Any) -> None:
    defaults = {"default_map_location" if f.name == "map_location" else f.name: f.default for f in fields(LoadOptions)}
    taken = {name: p.default for name, p in inspect.signature(function).parameters.items() if name in defaults}
    assert taken == {name: defaults[name] for name in taken}
    assert function is not load or taken == defaults


@pytest.mark.parametrize("location", ["cpu", torch.device("cpu"), {"cuda:0": "cpu"}, {"cpu": "cpu"}, None])
def test_map_location_as_device_string_or_dict(tmp_path: Path, location: Any) -> None:
    path = save(tmp_path / "c", {"a": torch.ones(3)})
    assert load(path, default_map_location=location)["a"].tolist() == [1, 1, 1]


def test_map_location_as_callable_gets_each_storage_once(tmp_path: Path) -> None:
    tied = torch.arange(4.0)
    path = save(tmp_path / "c", {"a": tied, "b": tied, "c": torch.ones(2, 2), "n": 1})
    seen: list[str] = []

    def move(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
        seen.append(location)
        return storage.clone() if len(seen) == 1 else None

    new = load(path, default_map_location=move)
    assert seen == ["cpu", "cpu"]
    assert new["a"] is new["b"] and new["a"].tolist() == [0, 1, 2, 3] and new["c"].tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_any_number_of_threads_gives_the_same(tmp_path: Path, threads: int) -> None:
    state = {f"t{i}": torch.randn(50_000 + i) for i in range(60)}
    new = load(save(tmp_path / "c", state), threads=threads)
    assert all(torch.equal(new[k], v) for k, v in state.items())


def test_several_shard_files_are_read(tmp_path: Path) -> None:
    state = {f"t{i}": torch.randn(50_000 + i) for i in range(20)}
    with asyncckpt.SyncCheckpointer(fsync=False, files_per_rank=5) as checkpointer:
        checkpointer.save(state, tmp_path / "c")
    assert len(shard_paths(str(tmp_path / "c"))) == 5
    new = load(tmp_path / "c")
    assert all(torch.equal(new[k], v) for k, v in state.items())


def test_loading_opens_nothing_outside_the_directory(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"a": torch.ones(300_000), "n": 1})
    files = RecordingFiles()
    DefaultReader(files).read(path)
    assert {os.path.dirname(where) for name, where in files.calls if name == "open"} == {path}


def test_loading_opens_a_handful_of_files_whatever_the_number_of_tensors(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {f"t{i}": torch.ones(10) for i in range(2000)})
    files = RecordingFiles()
    DefaultReader(files).read(path)
    assert files.names().count("open") <= 7
    assert files.names().count("preadv") <= 20


@pytest.mark.parametrize("method", ["open", "preadv", "fstat"])
def test_a_failing_call_raises_and_a_second_load_works(tmp_path: Path, method: str) -> None:
    path = save(tmp_path / "c", {"a": torch.ones(300_000), "n": 1})

    class Failing(RecordingFiles):
        nth = 0

        def before(self, name: str, args: Sequence[Any]) -> None:
            if name == method:
                self.nth -= 1
                if self.nth == 0:
                    raise OSError(5, "injected")

    for nth in range(1, 7):
        files = Failing()
        files.nth = nth
        try:
            loaded, _ = DefaultReader(files).read(path)
        except OSError as error:
            assert "injected" in str(error)
        else:
            assert bool((loaded["a"] == 1).all())
        assert bool((load(path)["a"] == 1).all())


def test_the_collector_is_on_again_after_a_load_that_failed(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        load(tmp_path / "nowhere")
    assert gc.isenabled()


def test_the_newest_checkpoint_is_told_and_what_is_passed_over_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with asyncckpt.SyncCheckpointer() as checkpointer:
        for step in (5, 3):
            checkpointer.save({"x": torch.ones(2)}, tmp_path / str(step), step=step)
    assert asyncckpt.latest_checkpoint(tmp_path) == str(tmp_path / "3")
    assert asyncckpt.latest_checkpoint(tmp_path / "none") is None
    (tmp_path / "3" / "manifest.json").write_text("{")
    assert asyncckpt.latest_checkpoint(tmp_path) == str(tmp_path / "5")
    assert f"{tmp_path / '3'} is skipped, it is corrupt" in caplog.text
    with pytest.raises(NotADirectoryError):
        asyncckpt.latest_checkpoint(tmp_path / "5" / "manifest.json")


def test_keys_that_are_no_names_are_refused(tmp_path: Path) -> None:
    with asyncckpt.SyncCheckpointer() as checkpointer:
        checkpointer.save({"x": torch.ones(2)}, tmp_path / "a")
    with pytest.raises(ConfigError, match="keys holds 3"):
        asyncckpt.load(tmp_path / "a", keys=[3])
