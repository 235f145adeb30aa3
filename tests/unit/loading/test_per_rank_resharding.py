"""PerRank(reshard=...): at another world size it gets the values of all ranks, and its result is loaded."""

from __future__ import annotations

import gc
import os
import weakref
from collections import Counter, OrderedDict, deque
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from many_ranks import save_ranks
from storage_samples import RecordingFiles

import asyncckpt
from asyncckpt import PerRank, SyncCheckpointer, plan_load
from asyncckpt.config import RankInfo
from asyncckpt.errors import (
    ConfigError,
    CorruptCheckpointError,
    MissingKeysError,
    PerRankUnavailableError,
    ReshardError,
    StateLoadError,
)
from asyncckpt.format.names import SaveId
from asyncckpt.loading.load import DefaultReader

SAVED = 3


def read(path: str, rank: int, world_size: int, target: Any, **kw: Any) -> Any:
    return DefaultReader(rank_info=RankInfo(rank, world_size)).read(path, target, **kw)[0]


def state_of(rank: int) -> dict[str, Any]:
    return {
        "w": torch.arange(12.0),
        "rng": PerRank({"cpu": torch.full((5,), rank, dtype=torch.uint8), "seed": 100 + rank}),
        "data": {"seen": PerRank(10 + rank), "epoch": 3},
        "step": 7,
    }


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_ranks(tmp_path_factory.mktemp("ranks") / "c", [state_of(rank) for rank in range(SAVED)])


class Calls:
    """A `reshard` that records its arguments, and returns `result` or what that makes of them."""

    def __init__(self, result: Any) -> None:
        self.result, self.calls = result, []  # type: ignore[var-annotated]

    def __call__(self, values: list[Any], rank: int, world_size: int) -> Any:
        self.calls.append((values, rank, world_size))
        return self.result(values, rank, world_size) if callable(self.result) else self.result


def never(values: list[Any], rank: int, world_size: int) -> Any:
    raise AssertionError("reshard was called")


@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (1, 2), (4, 5)])
def test_the_values_of_all_ranks_come_in_the_order_of_the_ranks_and_the_result_is_loaded(
    path: str, rank: int, world_size: int
) -> None:
    total = Calls(lambda values, *_: sum(values))
    rng = Calls(lambda values, rank, world_size: values[rank % len(values)])
    target = {
        "w": torch.zeros(12),
        "rng": PerRank({"cpu": torch.zeros(5, dtype=torch.uint8), "seed": 0}, reshard=rng),
        "data": {"seen": PerRank(0, total), "epoch": 0},
        "step": 0,
    }
    read(path, rank, world_size, target)
    assert total.calls == [([10, 11, 12], rank, world_size)]
    ((values, *where),) = rng.calls
    assert where == [rank, world_size]
    assert [(v["cpu"].tolist(), v["seed"]) for v in values] == [([r] * 5, 100 + r) for r in range(SAVED)]
    assert target["data"]["seen"].value == 33  # type: ignore[index]
    assert target["rng"].value["seed"] == 100 + rank % SAVED  # type: ignore[attr-defined]
    assert target["rng"].value["cpu"].tolist() == [rank % SAVED] * 5  # type: ignore[attr-defined]
    assert target["step"] == 7 and target["data"]["epoch"] == 3 and target["w"].tolist() == list(range(12))  # type: ignore[index,attr-defined]


def test_it_is_never_called_at_the_world_size_of_the_save(path: str) -> None:
    target = {"rng": PerRank({"cpu": torch.zeros(5, dtype=torch.uint8), "seed": 0}, never)}
    read(path, 1, SAVED, target)
    assert target["rng"].value["seed"] == 101


def test_without_it_the_values_are_refused_and_the_error_names_it(path: str) -> None:
    with pytest.raises(PerRankUnavailableError, match=r"'data\.seen'.*reshard=") as caught:
        read(path, 0, 1, {"data": {"seen": PerRank(0)}})
    assert caught.value.keys == ["data.seen"]
    with pytest.raises(PerRankUnavailableError):
        read(path, 0, 1, None)


def test_arrays_long_bytes_and_typed_containers_come_as_they_were_saved(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    states = [
        {
            "own": PerRank(
                {
                    "a": numpy.full(4, r),
                    "b": bytes([r]) * 70_000,
                    "c": Counter(x=r),
                    "d": OrderedDict([(2, (r, [])), ("k", deque([torch.tensor(r)], maxlen=2))]),
                    "same": torch.ones(3),
                }
            )
        }
        for r in range(2)
    ]
    path = save_ranks(tmp_path / "c", states)
    target: dict[str, Any] = {"own": PerRank(None, Calls(lambda values, *_: values))}
    read(path, 0, 1, target)
    for r, found in enumerate(target["own"].value):
        wanted = states[r]["own"].value
        assert found["a"].tolist() == wanted["a"].tolist() and found["b"] == wanted["b"] and found["c"] == wanted["c"]
        assert type(found["c"]) is Counter and type(found["d"]) is OrderedDict and type(found["d"]["k"]) is deque
        assert found["d"][2] == (r, []) and found["d"]["k"][0].item() == r and found["same"].tolist() == [1] * 3


def test_a_container_of_common_and_own_values_comes_whole(path: str) -> None:
    reshard = Calls(lambda values, *_: values[-1])
    target: dict[str, Any] = {"data": PerRank({"seen": 0, "epoch": 0}, reshard)}
    plan = plan_load(path, target, rank_info=RankInfo(0, 1))
    assert plan.fits and not set(plan.unexpected) & {"data.seen", "data.epoch"}
    read(path, 0, 1, target)
    assert reshard.calls[0][0] == [{"seen": 10 + r, "epoch": 3} for r in range(SAVED)]
    assert target["data"].value == {"seen": 12, "epoch": 3}


def test_a_part_of_what_one_mark_saved_is_resharded_alone(path: str) -> None:
    target = {"rng": {"seed": PerRank(0, lambda values, *_: max(values))}}
    read(path, 0, 1, target)
    assert target["rng"]["seed"].value == 102
    with pytest.raises(PerRankUnavailableError) as caught:
        read(path, 0, 1, {"rng": {"seed": PerRank(0, never), "cpu": torch.zeros(5, dtype=torch.uint8)}})
    assert caught.value.keys == ["rng.cpu"]


def test_what_was_not_saved_per_rank_is_loaded_without_it(path: str) -> None:
    target = {"step": PerRank(0, never), "w": PerRank(torch.zeros(12), never)}
    read(path, 0, 1, target)
    assert target["step"].value == 7 and target["w"].value.sum() == 66


def test_a_name_that_was_never_saved_is_missing(path: str) -> None:
    with pytest.raises(MissingKeysError) as caught:
        read(path, 0, 1, {"new": PerRank(0, never), "step": 0})
    assert caught.value.keys == ["new"]


def test_a_rank_that_saved_none_is_an_error(tmp_path: Path) -> None:
    path = save_ranks(tmp_path / "c", [{"x": PerRank(1), "y": 1}, {"y": 1}])
    with pytest.raises(PerRankUnavailableError, match="if all ranks have saved one"):
        read(path, 0, 1, {"x": PerRank(0, never)})
    assert plan_load(path, {"x": PerRank(0, never)}, rank_info=RankInfo(0, 1)).unavailable == ("x",)


def test_the_same_world_size_gives_no_value_of_another_rank(tmp_path: Path) -> None:
    path = save_ranks(tmp_path / "c", [{"x": PerRank(1), "y": 1}, {"y": 1}])
    with pytest.raises(PerRankUnavailableError, match="belong to other ranks than 1"):
        read(path, 1, 2, {"x": PerRank(0, never)})


def test_a_mark_inside_another_has_no_effect(path: str) -> None:
    outer = Calls(lambda values, *_: {"cpu": values[0]["cpu"], "seed": 5})
    target = {"rng": PerRank({"cpu": torch.zeros(5, dtype=torch.uint8), "seed": PerRank(0, never)}, outer)}
    read(path, 0, 1, target)
    assert target["rng"].value["seed"].value == 5
    with pytest.raises(PerRankUnavailableError):
        read(path, 0, 1, {"data": {"seen": PerRank(PerRank(0, never))}})


@pytest.mark.parametrize("wrong", [3, "values", ()])
def test_what_cannot_be_called_is_refused_when_the_mark_is_made(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="reshard"):
        PerRank(0, wrong)


def test_a_save_ignores_it_and_stores_nothing_of_it(tmp_path: Path) -> None:
    with SyncCheckpointer(rank_info=RankInfo(0, 1)) as checkpointer:
        checkpointer.save({"x": PerRank(torch.ones(3), never)}, tmp_path / "a")
        checkpointer.save({"x": PerRank(torch.ones(3))}, tmp_path / "b")
        for name in ("a", "b"):
            assert checkpointer.load(tmp_path / name)["x"].tolist() == [1] * 3
    found = [[one for one in (tmp_path / name).iterdir() if one.name != "manifest.json"] for name in ("a", "b")]
    sizes = [sorted(os.path.getsize(one) for one in files) for files in found]  # the manifest has times
    assert sizes[0] == sizes[1]


# ---- what its result does to the target -----------------------------------------------------------------------------


def test_dicts_and_tensors_of_the_target_are_filled_in_place(path: str) -> None:
    tensor, inner = torch.zeros(5, dtype=torch.uint8), {"seed": 0}
    value = {"cpu": tensor, "seed": 0}
    version = tensor._version
    target = {"rng": PerRank(value, lambda values, *_: {**values[2], "more": 1}), "data": inner}
    read(path, 0, 1, target, keys="rng")
    assert target["rng"].value is value and value["cpu"] is tensor  # type: ignore[attr-defined]
    assert tensor.tolist() == [2] * 5 and tensor._version > version
    assert set(value) == {"cpu", "seed"} and value["seed"] == 102


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(4, dtype=torch.uint8),
        torch.zeros(5),
        torch.zeros(1, dtype=torch.uint8).expand(5),
        torch.zeros(5, dtype=torch.uint8, device="meta"),
        None,
        "text",
    ],
)
def test_what_the_result_does_not_fit_is_replaced(path: str, wrong: Any) -> None:
    target = {"rng": PerRank({"cpu": wrong}, lambda values, *_: values[1])}
    read(path, 0, 1, target)
    assert target["rng"].value["cpu"].tolist() == [1] * 5


@pytest.mark.parametrize("empty", [None, {}, OrderedDict(), [], 0, "text"])
def test_an_empty_container_or_any_leaf_takes_the_whole_result(path: str, empty: Any) -> None:
    found: Any = [1, {"a": 2}] if isinstance(empty, list) else {"a": 1, "b": [2]}
    mark = PerRank(empty, lambda *_: found)
    read(path, 0, 1, {"rng": mark})
    assert mark.value == found
    assert not isinstance(empty, (dict, list)) or mark.value is empty


def test_tuples_and_mappings_that_cannot_be_changed_are_replaced(path: str) -> None:
    tensor = torch.zeros(2)
    mark = PerRank((tensor, [1, 2], MappingProxyType({"a": 1})), lambda *_: [torch.ones(2), [3, 4], {"b": 2}])
    read(path, 0, 1, {"rng": mark})
    assert mark.value[0] is tensor and tensor.tolist() == [1, 1] and mark.value[1:] == ([3, 4], {"b": 2})


def test_keys_of_any_type_find_their_part_of_the_result(path: str) -> None:
    value = {0: -1, "": -1, None: [torch.zeros(1)], 2.5: {(1, "a"): -1}}
    mark = PerRank(value, lambda *_: {0: 1, "": 2, None: [torch.ones(1)], 2.5: {(1, "a"): 4}})
    read(path, 0, 1, {"rng": mark})
    assert str(value) == str({0: 1, "": 2, None: [torch.ones(1)], 2.5: {(1, "a"): 4}}) and mark.value is value


class Stateful:
    def __init__(self) -> None:
        self.states: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {"at": 0}

    def load_state_dict(self, state: Any) -> None:
        self.states.append(state)
        if state == "wrong":
            raise ValueError("not mine")


def test_an_object_gets_its_part_of_the_result(tmp_path: Path) -> None:
    saved = [{"one": PerRank(Stateful()), "in": PerRank({"a": Stateful(), "l": [Stateful(), 1]})} for _ in range(2)]
    path = save_ranks(tmp_path / "c", saved)
    one, two, three = Stateful(), Stateful(), Stateful()
    inner = {"a": two, "l": [three, 0]}
    made = {"a": {"at": 2}, "l": [{"at": 3}, 9]}
    target = {"one": PerRank(one, lambda values, *_: {"at": len(values)}), "in": PerRank(inner, lambda *_: made)}
    read(path, 0, 1, target)
    assert target["one"].value is one and one.states == [{"at": 2}]
    assert inner == {"a": two, "l": [three, 9]} and two.states == [{"at": 2}] and three.states == [{"at": 3}]


def test_a_module_gets_the_state_that_the_result_names(tmp_path: Path) -> None:
    def module(value: float) -> torch.nn.Module:
        made = torch.nn.Linear(2, 1)
        torch.nn.init.constant_(made.weight, value)
        torch.nn.init.constant_(made.bias, value)
        return made

    path = save_ranks(tmp_path / "c", [{"m": PerRank(module(r)), "w": module(1)} for r in range(2)])
    mine, common = module(-1), module(-1)
    mean = lambda values, *_: {k: sum(v[k] for v in values) / len(values) for k in values[0]}  # noqa: E731
    read(path, 0, 1, {"m": PerRank(mine, mean), "w": common})
    assert mine.weight.tolist() == [[0.5, 0.5]] and mine.bias.item() == 0.5
    assert common.weight.tolist() == [[1, 1]]


# ---- when it fails --------------------------------------------------------------------------------------------------


def whole_target(reshard: Any) -> dict[str, Any]:
    return {
        "w": torch.zeros(12),
        "data": {"seen": PerRank(0, total), "epoch": 0},
        "rng": PerRank({"cpu": torch.zeros(5, dtype=torch.uint8), "seed": 0}, reshard),
        "step": 0,
    }


def total(values: list[Any], rank: int, world_size: int) -> Any:
    return sum(values)


def is_unchanged(target: dict[str, Any]) -> bool:
    rng = target["rng"].value
    tensors = not target["w"].any() and not rng["cpu"].any()
    return tensors and (rng["seed"], target["step"], target["data"]["epoch"], target["data"]["seen"].value) == (0,) * 4


def test_its_error_is_raised_as_one_that_names_the_key_and_nothing_has_changed(path: str) -> None:
    def fails(values: list[Any], rank: int, world_size: int) -> Any:
        raise KeyError("lost")

    target = whole_target(fails)
    with pytest.raises(ReshardError, match=r"'rng', for rank 1 of 2, raised on the values of 3 ranks.*lost") as caught:
        read(path, 1, 2, target)
    error = caught.value
    assert (error.path, error.fqn, error.saved, error.wanted) == (path, "rng", 3, 2)
    assert isinstance(error.__cause__, KeyError) and "KeyError" in error.detail
    assert is_unchanged(target)


def test_an_error_of_ours_that_it_raises_is_not_taken_for_damage(path: str) -> None:
    def fails(values: list[Any], rank: int, world_size: int) -> Any:
        raise CorruptCheckpointError("not this checkpoint")

    with pytest.raises(ReshardError):
        asyncckpt.restore_latest(os.path.dirname(path), whole_target(fails), rank_info=RankInfo(0, 1))


def test_an_interrupt_in_it_is_not_wrapped(path: str) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    target = whole_target(interrupted)
    with pytest.raises(KeyboardInterrupt):
        read(path, 0, 1, target)
    assert is_unchanged(target)


@pytest.mark.parametrize(
    ("value", "result", "lacks"),
    [
        ({"cpu": 0, "seed": 0}, {"seed": 1}, ["rng.cpu"]),
        ({"a": {1: 0, None: 0}}, {"a": {1: 1}}, ["rng.a.None"]),
        ({"a": Stateful()}, {"a": 1, "b": 2}, []),
        ({"a": {"b": Stateful()}}, {"a": 5}, ["rng.a"]),
        ([Stateful(), 1], [{"at": 0}], ["rng"]),
        ((PerRank(Stateful()),), None, ["rng"]),
    ],
)
def test_a_result_that_lacks_a_part_of_the_target_is_refused(path: str, value: Any, result: Any, lacks: Any) -> None:
    target = {"w": torch.zeros(12), "rng": PerRank(value, lambda *_: result)}
    if not lacks:
        read(path, 0, 1, target)
        return
    with pytest.raises(ReshardError, match="which the target has; nothing was changed") as caught:
        read(path, 0, 1, target)
    assert caught.value.fqn == "rng" and all(name in caught.value.detail for name in lacks)
    assert not target["w"].any() and target["rng"].value is value  # type: ignore[union-attr]


def test_an_object_that_refuses_its_part_is_a_state_load_error(path: str) -> None:
    with pytest.raises(StateLoadError, match=r"load_state_dict\(\) of 'rng'.*not mine"):
        read(path, 0, 1, {"rng": PerRank(Stateful(), lambda *_: "wrong")})


def test_damage_in_a_value_of_another_rank_is_found_before_anything_changes(tmp_path: Path) -> None:
    root = tmp_path / "root"
    older = save_ranks(root / "step-1", [state_of(rank) for rank in range(SAVED)])
    newer = SaveId(2, 0, "0123456789ab")
    path = save_ranks(root / "step-2", [state_of(rank) for rank in range(SAVED)], save_id=newer, step=2)
    (shard,) = Path(path).glob("rank-00002-part*")
    found = shard.read_bytes()
    assert found.count(bytes([2] * 5)) == 1
    shard.write_bytes(found.replace(bytes([2] * 5), bytes([2, 2, 2, 2, 3])))
    target = whole_target(never)
    with pytest.raises(CorruptCheckpointError):
        read(path, 0, 1, target)
    assert is_unchanged(target)
    target = whole_target(lambda values, *_: values[2])
    restored = asyncckpt.restore_latest(root, target, rank_info=RankInfo(0, 1))
    assert restored is not None and restored.path == older and [one.step for one in restored.skipped] == [2]
    assert target["rng"].value["seed"] == 102 and target["data"]["seen"].value == 33


# ---- options of a load ----------------------------------------------------------------------------------------------


def test_keys_select_a_mark_as_a_whole(path: str) -> None:
    target = whole_target(never)
    read(path, 0, 1, target, keys=["step", "data"])
    assert target["step"] == 7 and target["data"]["seen"].value == 33 and target["rng"].value["seed"] == 0
    with pytest.raises(ConfigError, match="keys selects a part of 'rng'"):
        read(path, 0, 1, target, keys=["rng.seed"])
    target["rng"].reshard = lambda values, *_: values[1]
    read(path, 0, 1, target, keys="rng")
    assert target["rng"].value["seed"] == 101


def test_key_map_maps_the_name_of_the_mark(path: str) -> None:
    target = {"generators": PerRank({"seed": 0}, lambda values, *_: values[1])}
    read(path, 0, 1, target, key_map={"generators": "rng"})
    assert target["generators"].value["seed"] == 101


def test_strict_false_still_calls_it_and_missing_keys_beside_it_stay(path: str) -> None:
    target = {"data": {"seen": PerRank(0, lambda values, *_: sum(values)), "new": 5}}
    read(path, 0, 1, target, strict=False)
    assert target["data"]["seen"].value == 33 and target["data"]["new"] == 5  # type: ignore[attr-defined]


def test_a_subtree_of_which_only_a_mark_was_saved_is_not_absent(path: str) -> None:
    target = {"data": {"seen": PerRank(0, lambda values, *_: sum(values)), "a": 5, "b": 6}}
    read(path, 0, 1, target, strict=False)
    assert target["data"]["seen"].value == 33  # type: ignore[attr-defined]


def test_low_memory_false_and_verify_false_read_the_same(path: str) -> None:
    for options in ({"low_memory": False}, {"verify": False}, {"threads": 1}):
        target = whole_target(lambda values, *_: values[2])
        read(path, 0, 1, target, **options)
        assert target["rng"].value["cpu"].tolist() == [2] * 5 and target["w"][-1] == 11


def test_a_default_device_of_tensors_is_not_that_of_the_values(path: str) -> None:
    devices: list[Any] = []
    target = whole_target(lambda values, *_: [devices.append(v["cpu"].device.type) for v in values] and values[0])
    read(path, 0, 1, target, map_location="meta")
    assert devices == ["cpu"] * SAVED


def test_plan_load_counts_the_values_of_all_ranks_and_calls_nothing(path: str) -> None:
    target = whole_target(never)
    target["data"]["seen"].reshard = never
    plan = plan_load(path, target, rank_info=RankInfo(0, 1))
    assert plan.fits and not plan.unexpected and plan.nbytes == 12 * 4 + SAVED * 5
    same = plan_load(path, target, rank_info=RankInfo(1, SAVED))
    assert same.fits and same.nbytes == 12 * 4 + 5
    target["rng"].reshard = None
    refused = plan_load(path, target, rank_info=RankInfo(0, 1))
    assert refused.unavailable == ("rng.cpu", "rng.seed") and refused.nbytes == 12 * 4


def test_values_of_other_ranks_are_read_only_for_it(path: str, tmp_path: Path) -> None:
    large = [{"step": 1, "own": PerRank(torch.full((100_000,), float(r)))} for r in range(SAVED)]
    where = save_ranks(tmp_path / "c", large)

    def shards_read(target: Any, rank: int, world_size: int, **options: Any) -> int:
        files = RecordingFiles()
        DefaultReader(files, RankInfo(rank, world_size)).read(where, target, **options)
        return len({str(call[1]) for call in files.calls if call[0] == "open" and "safetensors" in str(call[1])})

    mark = PerRank(torch.zeros(100_000), lambda values, *_: values[1])
    assert shards_read({"step": 0, "own": mark}, 1, SAVED) == 1
    assert shards_read({"step": 0, "own": mark}, 0, 1, keys="step") == 0
    assert shards_read({"step": 0, "own": mark}, 0, 1) == SAVED and bool((mark.value == 1).all())


def test_the_values_of_all_ranks_are_freed_before_the_load_returns(path: str) -> None:
    alive: list[Any] = []

    def reshard(values: list[Any], rank: int, world_size: int) -> Any:
        alive.extend(weakref.ref(value["cpu"]) for value in values)
        return values[0]

    read(path, 0, 1, {"rng": PerRank({"cpu": torch.zeros(5, dtype=torch.uint8)}, reshard)})
    gc.collect()
    assert len(alive) == SAVED and not any(ref() for ref in alive)
