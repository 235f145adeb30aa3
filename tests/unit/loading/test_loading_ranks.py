"""Loading what several ranks saved: whose value a reader gets, and what it does not get."""

from __future__ import annotations

import contextlib
import logging
import random
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from many_ranks import Cut, save_ranks
from states import StateMaker, assert_same

import asyncckpt
from asyncckpt import PerRank
from asyncckpt.config import RankInfo
from asyncckpt.errors import ConfigError, LeafTypeMismatchError, MissingKeysError, PerRankUnavailableError
from asyncckpt.format.structure import Box
from asyncckpt.loading.load import DefaultReader
from asyncckpt.loading.open_checkpoint import open_checkpoint

COMMON = torch.arange(24.0).reshape(6, 4)


def read(path: str, rank: int, world_size: int, target: Any = None, **kw: Any) -> Any:
    return DefaultReader(rank_info=RankInfo(rank, world_size)).read(path, target, **kw)[0]


def state_of(rank: int) -> dict[str, Any]:
    """Replicas, a tensor and an object that differ, one of each that only rank 1 has, and what is per rank."""
    return {
        "model": {"w": COMMON.clone(), "mean": torch.full((3,), float(rank))},
        "rng": PerRank({"cpu": torch.tensor([rank], dtype=torch.uint8), "seed": 100 + rank}),
        "step": 7,
        "seen": 10 * rank,
        **({"late": torch.ones(2), "note": "one"} if rank == 1 else {}),
    }


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_ranks(tmp_path_factory.mktemp("ranks") / "c", [state_of(rank) for rank in range(3)])


@pytest.mark.parametrize("rank", range(3))
def test_every_rank_gets_its_own_values_and_the_keys_of_all(path: str, rank: int) -> None:
    new = read(path, rank, 3)
    assert set(new) == {"model", "rng", "step", "seen", "late", "note"}
    assert torch.equal(new["model"]["w"], COMMON)
    assert new["model"]["mean"].tolist() == [rank] * 3
    assert new["rng"]["cpu"].tolist() == [rank] and new["rng"]["seed"] == 100 + rank
    assert (new["step"], new["seen"], new["note"]) == (7, 10 * rank, "one")
    assert new["late"].tolist() == [1, 1]


def test_own_values_are_nothing_to_speak_of(path: str, caplog: pytest.LogCaptureFixture) -> None:
    read(path, 1, 3)
    assert not caplog.records


@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (1, 2), (5, 8)])
def test_another_world_size_gets_the_lowest_ranks_values_and_is_told_once(
    path: str, rank: int, world_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "asyncckpt"):
        new = read(path, rank, world_size, keys=["model", "step", "seen", "late", "note"])
    assert new["model"]["mean"].tolist() == [0, 0, 0] and new["seen"] == 0 and new["note"] == "one"
    (record,) = caplog.records
    assert "2 values may differ between the 3 ranks" in record.getMessage()
    assert record.getMessage().endswith("model.mean, seen")


T = torch.ones(2)


@pytest.mark.parametrize(
    ("values", "unlike"),
    [
        ([None, T], ["x"]),
        ([T, {"y": T}], ["x"]),
        ([{"y": {"z": T}}, {"y": T}], ["x.y.z"]),
        ([[1, T], [1, T, T]], ["x.0", "x.1"]),
        ([(T,), [T]], ["x.0"]),
        ([{"y": T}, OrderedDict(y=T, z=T)], []),
    ],
    ids=str,
)
def test_a_value_of_another_kind_or_length_on_another_rank_is_told_too(
    tmp_path: Path, values: list[Any], unlike: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    path = save_ranks(tmp_path / "c", [{"x": value, "same": T} for value in values])
    for rank in range(2):
        read(path, rank, 2)
    assert not caplog.records
    read(path, 0, 1)
    told = [record.getMessage().rpartition("are loaded: ")[2] for record in caplog.records]
    assert told == ([", ".join(unlike)] if unlike else [])


def test_filling_a_target_follows_the_same_rules(path: str, caplog: pytest.LogCaptureFixture) -> None:
    target = {"model": {"mean": torch.zeros(3)}, "seen": -1, "step": 0}
    read(path, 2, 3, target)
    assert target["model"]["mean"].tolist() == [2, 2, 2] and target["seen"] == 20  # type: ignore[index]
    assert not caplog.records
    read(path, 2, 4, target)
    assert target["model"]["mean"].tolist() == [0, 0, 0] and target["seen"] == 0  # type: ignore[index]
    assert len(caplog.records) == 1


def test_what_a_rank_lacks_comes_from_the_lowest_that_has_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save_ranks(
        tmp_path / "c", [{"n": 0}, {"n": 1, "x": 1, "t": torch.ones(1)}, {"n": 2, "x": 2, "t": torch.zeros(1)}]
    )
    new = read(path, 0, 3)
    assert (new["n"], new["x"], new["t"].tolist()) == (0, 1, [1.0])
    (record,) = caplog.records
    assert record.getMessage().endswith(": t, x")


def trained(n_parameters: int, n_used: int, value: float) -> torch.optim.Optimizer:
    """Return an optimizer that has a state of the first `n_used` of its parameters, which differ between ranks."""
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(n_parameters)]
    for parameter in parameters[:n_used]:
        parameter.grad = torch.full((2,), value)
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("counts", [[(2, 2), (4, 4)], [(3, 2), (3, 3)], [(3, 0), (3, 3)]], ids=str)
def test_an_optimizer_gets_no_state_of_another_rank_s_parameters_of_these_numbers(
    tmp_path: Path, counts: list[tuple[int, int]]
) -> None:
    """Pipeline stages, and experts that were not used yet: what is number 2 here is another parameter there."""
    saved = [{"optim": trained(*count, 1.0 + rank).state_dict()} for rank, count in enumerate(counts)]
    path = save_ranks(tmp_path / "c", saved)
    for rank, (n_parameters, _) in enumerate(counts):
        assert_same(read(path, rank, 2), saved[rank])
        for n_used in (0, n_parameters):
            target = trained(n_parameters, n_used, 9.0)
            read(path, rank, 2, {"optim": target})
            assert_same(target.state_dict(), saved[rank]["optim"])


@pytest.mark.parametrize("n_used", [0, 2])
def test_groups_of_an_optimizer_get_nothing_that_only_another_rank_s_groups_have(tmp_path: Path, n_used: int) -> None:
    optimizers = [trained(2, n_used, 1.0) for _ in range(2)]
    torch.optim.lr_scheduler.StepLR(optimizers[1], 3)  # adds `initial_lr` to the groups
    saved = [{"optim": optimizer.state_dict()} for optimizer in optimizers]
    path = save_ranks(tmp_path / "c", saved)
    for rank in range(2):
        assert_same(read(path, rank, 2), saved[rank])


def test_named_states_of_an_optimizer_are_joined(tmp_path: Path) -> None:
    states = [{"optim": {"state": {name: {"m": torch.ones(1)}}, "param_groups": []}} for name in ("a.w", "b.w")]
    path = save_ranks(tmp_path / "c", states)
    for rank, world_size in ((0, 2), (1, 2), (0, 1)):
        assert read(path, rank, world_size)["optim"]["state"].keys() == {"a.w", "b.w"}


@pytest.mark.parametrize(
    "states",
    [
        ({"m": {"a.b": torch.zeros(3)}}, {"m": {"a": {"b": torch.ones(3)}}}),
        ({"m": {0: "zero"}}, {"m": {"0": "one"}}),
        ({"m": {"a.b": {"c": 0}}}, {"m": {"a": {"b": {"c": 1}}}}),
    ],
    ids=str,
)
def test_a_name_that_another_rank_has_at_another_path_is_the_rank_s_own(tmp_path: Path, states: Any) -> None:
    path = save_ranks(tmp_path / "c", states)
    for rank, saved in enumerate(states):
        assert_same(read(path, rank, 2, erased(saved)), saved)


def test_a_dict_that_is_made_of_names_holds_the_rank_s_own_values(tmp_path: Path) -> None:
    states = [{"m.a": {"b": torch.zeros(1)}}, {"m.a.b": torch.ones(1)}]
    path = save_ranks(tmp_path / "c", states)
    for rank in range(2):
        assert read(path, rank, 2, {"m": {}})["m"]["a.b"].tolist() == [rank]


def erased(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: erased(member) for key, member in value.items()}
    return torch.full_like(value, 9.0) if isinstance(value, torch.Tensor) else "old"


@pytest.mark.parametrize("first", [0, 1])
def test_a_tensor_that_one_rank_alone_has_stored_for_itself_is_told(
    tmp_path: Path, first: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Its structure has changed since the ranks met, while the others still share theirs."""
    states = [{"x": torch.ones(2)}, {"x": PerRank(torch.zeros(3))}]
    path = save_ranks(tmp_path / "c", states[::-1] if first else states)
    read(path, 1 - first, 2)
    assert not caplog.records
    assert read(path, 0, 1)["x"].tolist() == [1, 1]
    assert caplog.records[0].getMessage().endswith("are loaded: x")


def test_equal_objects_of_all_ranks_are_no_reason_to_warn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    states = [{"n": 1, "f": float("nan"), "rng": PerRank(rank)} for rank in range(2)]
    path = save_ranks(tmp_path / "c", states)
    read(path, 0, 1, keys=["n", "f"])
    assert not caplog.records


# ---- PerRank --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [None, {"step": 0, "rng": {"cpu": torch.zeros(1, dtype=torch.uint8), "seed": 0}}])
def test_per_rank_values_are_refused_at_another_world_size(path: str, target: Any) -> None:
    with pytest.raises(PerRankUnavailableError, match=r"rank 1 of 2; nothing was changed") as caught:
        read(path, 1, 2, target)
    error = caught.value
    assert (error.path, error.keys, error.saved, error.wanted) == (path, ["rng.cpu", "rng.seed"], 3, 2)
    assert isinstance(error, LookupError)
    assert target is None or target["step"] == 0


@pytest.mark.parametrize("value", [[PerRank({}), 1], {"a": PerRank({})}], ids=str)
def test_an_empty_dict_of_one_rank_is_one_of_its_values_too(tmp_path: Path, value: Any) -> None:
    path = save_ranks(tmp_path / "c", [{"x": value} for _ in range(2)])
    own = [{}, 1] if isinstance(value, list) else {"a": {}}
    assert read(path, 1, 2) == {"x": own}
    for target in (None, {"x": own}):
        with pytest.raises(PerRankUnavailableError, match=r"x\.(0|a)"):
            read(path, 0, 3, target)
    made = PerRank({}, reshard=lambda values, rank, world_size: {"n": len(values)})
    target = {"x": [made, 0]} if isinstance(value, list) else {"x": {"a": made}}
    read(path, 0, 3, target)
    assert made.value == {"n": 2}


def test_an_empty_dict_of_another_rank_takes_nothing_from_what_is_there(tmp_path: Path) -> None:
    path = save_ranks(tmp_path / "own", [{"x": PerRank({"k": 1})}, {"x": PerRank({})}])
    assert read(path, 0, 2, {"x": {"k": 0, "new": 5}}, strict=False) == {"x": {"k": 1, "new": 5}}
    with pytest.raises(MissingKeysError):
        read(path, 0, 2, {"x": {"k": 0, "new": 5}})
    for n, plain in enumerate(({"k": 1}, {})):
        path = save_ranks(tmp_path / f"plain{n}", [{"x": plain}, {"x": PerRank({})}])
        assert read(path, 0, 1) == {"x": plain}


@pytest.mark.parametrize("keys", [["rng"], ["step", "rng.seed"]])
def test_keys_that_name_per_rank_values_are_refused_at_another_world_size(path: str, keys: list[str]) -> None:
    with pytest.raises(PerRankUnavailableError):
        read(path, 0, 1, keys=keys)


def test_a_target_gets_what_keys_select_at_another_world_size(path: str) -> None:
    target = {"step": 0, "rng": {"seed": 5}}
    read(path, 0, 1, target, keys="step", strict=True)
    assert target == {"step": 7, "rng": {"seed": 5}}


def test_a_mark_in_the_target_stays_and_its_value_is_filled(path: str) -> None:
    tensor = torch.zeros(1, dtype=torch.uint8)
    mark, inner = PerRank({"cpu": tensor, "seed": PerRank(0)}), PerRank(1)
    target = {"rng": mark, "seen": inner}
    read(path, 2, 3, target, strict=True)
    assert target["rng"] is mark and mark.value["cpu"] is tensor and tensor.tolist() == [2]
    assert mark.value["seed"].value == 102
    assert target["seen"] is inner and inner.value == 20


def test_a_mark_around_a_single_value_or_inside_a_tuple_is_filled(tmp_path: Path) -> None:
    states = [
        {"a": PerRank(torch.full((2,), r)), "b": (torch.ones(1), PerRank(r)), "c": PerRank([r, {}])} for r in (3, 4)
    ]
    path = save_ranks(tmp_path / "c", states)
    target = {"a": PerRank(torch.zeros(2, dtype=torch.int64)), "b": (torch.zeros(1), PerRank(0)), "c": PerRank([0, {}])}
    read(path, 1, 2, target, strict=True)
    assert target["a"].value.tolist() == [4, 4]  # type: ignore[attr-defined]
    assert target["b"][0].tolist() == [1] and target["b"][1].value == 4  # type: ignore[index]
    assert target["c"].value == [4, {}]  # type: ignore[attr-defined]


def test_what_only_another_rank_marked_is_left_out_at_equal_world_size(tmp_path: Path) -> None:
    states = [{"x": 1, "data": {"at": PerRank(3)}, "l": [PerRank(1), torch.ones(1)]}, {"x": 1}]
    path = save_ranks(tmp_path / "c", states)
    assert str(read(path, 1, 2)) == str({"x": 1, "l": [torch.ones(1)]})
    assert read(path, 0, 2)["data"] == {"at": 3}
    with pytest.raises(PerRankUnavailableError, match="belong to other ranks than 1") as caught:
        read(path, 1, 2, keys=["x", "data"])
    assert (caught.value.keys, caught.value.saved, caught.value.wanted) == (["data.at"], 2, 2)
    with pytest.raises(PerRankUnavailableError) as caught:
        read(path, 1, 2, {"data": {"at": 0}})
    assert caught.value.keys == ["data.at"]


@pytest.mark.parametrize("target", [{"rng": 0}, {"rng": {"cpu": {"x": torch.zeros(1)}}}, {"rng": {"seed": [0]}}])
def test_per_rank_values_of_another_form_are_refused_too(path: str, target: dict[str, Any]) -> None:
    with pytest.raises(PerRankUnavailableError):
        read(path, 0, 1, target)
    with pytest.raises(LeafTypeMismatchError) if target != {"rng": {"seed": [0]}} else contextlib.nullcontext():
        read(path, 0, 3, target)


def test_what_was_never_saved_beside_per_rank_values_is_missing(path: str) -> None:
    target = {"rng": {"new": 0}, "step": 0, "new": 0}
    with pytest.raises(MissingKeysError) as caught:
        read(path, 0, 1, target, strict=False)
    assert caught.value.keys == ["rng.new", "new"]
    assert DefaultReader(rank_info=RankInfo(0, 1)).read(path, target, keys=["step", "new"], strict=False)[1] == ["new"]


def test_members_behind_one_of_another_rank_keep_their_place(tmp_path: Path) -> None:
    path = save_ranks(tmp_path / "c", [{"l": [PerRank(torch.zeros(1)), torch.ones(2), torch.ones(3)]}] * 2)
    target = {"l": [torch.full((1,), 5.0), torch.zeros(2), torch.zeros(3)]}
    read(path, 0, 1, target, keys=["l.1", "l.2"], strict=True)
    assert [t.sum().item() for t in target["l"]] == [5, 2, 3]
    assert str(read(path, 0, 1, keys=["l.2"])) == str({"l": [torch.ones(3)]})
    with pytest.raises(PerRankUnavailableError):
        read(path, 0, 1, keys=["l.0"])


def test_a_plain_value_of_another_rank_is_better_than_a_marked_one(tmp_path: Path) -> None:
    path = save_ranks(tmp_path / "c", [{"x": PerRank(0)}, {"x": 1}])
    assert [read(path, r, 2)["x"] for r in (0, 1)] == [0, 1]
    assert read(path, 0, 1)["x"] == 1


def test_a_tensor_with_a_name_outside_the_mark_too_is_found_there(tmp_path: Path) -> None:
    tensors = [torch.full((2,), float(rank)) for rank in range(2)]
    path = save_ranks(tmp_path / "c", [{"a": t, "own": PerRank(t)} for t in tensors])
    new = read(path, 1, 2)
    assert new["a"] is new["own"] and new["a"].tolist() == [1, 1]
    assert read(path, 0, 1, keys="a")["a"].tolist() == [0, 0]


def test_hoisted_bytes_of_each_rank_come_back(tmp_path: Path) -> None:
    long = [bytes([rank]) * 100_000 for rank in range(2)]
    path = save_ranks(tmp_path / "c", [{"b": x, "same": b"s" * 70_000, "own": PerRank(x)} for x in long])
    for rank in range(2):
        assert read(path, rank, 2) == {"b": long[rank], "same": b"s" * 70_000, "own": long[rank]}
    target = {"b": b"", "same": b""}
    assert read(path, 0, 3, target) == {"b": long[0], "same": b"s" * 70_000}


def test_without_a_process_group_one_process_reads_for_rank_zero_of_one(path: str) -> None:
    with pytest.raises(PerRankUnavailableError, match="rank 0 of 1"):
        asyncckpt.load(path)
    assert asyncckpt.load(path, keys="seen") == {"seen": 0}


def test_torchrun_s_environment_says_who_reads(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert asyncckpt.load(path)["rng"]["seed"] == 102
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match="RANK=2"):
        asyncckpt.load(path)


def test_a_checkpointer_reads_for_the_rank_that_it_was_given(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with asyncckpt.SyncCheckpointer(rank_info=RankInfo(0, 1)) as checkpointer:
        checkpointer.save({"own": PerRank(1)}, tmp_path / "c")
        assert checkpointer.load(tmp_path / "c") == {"own": 1}
    with pytest.raises(PerRankUnavailableError):
        asyncckpt.load(tmp_path / "c")


# ---- joining the trees ----------------------------------------------------------------------------------------------


def test_mappings_join_by_key_and_sequences_of_one_length_member_by_member(tmp_path: Path) -> None:
    states = [
        {"d": {"a": 1}, "l": [{"a": torch.zeros(1)}, 2], "k": [torch.zeros(1)], "m": {"x": 1}},
        {"d": {"b": 2}, "l": [{"b": torch.ones(1)}, 3], "k": [torch.ones(1), 4], "m": 5},
    ]
    path = save_ranks(tmp_path / "c", states)
    zero, one = torch.zeros(1), torch.ones(1)
    expected = [
        {"d": {"a": 1, "b": 2}, "l": [{"a": zero, "b": one}, 2], "k": [zero], "m": {"x": 1}},
        {"d": {"b": 2, "a": 1}, "l": [{"b": one, "a": zero}, 3], "k": [one, 4], "m": 5},
    ]
    assert [str(read(path, rank, 2)) for rank in range(2)] == list(map(str, expected))
    assert str(read(path, 3, 4)) == str(expected[0])


def test_key_types_order_and_metadata_are_the_first_ranks(tmp_path: Path) -> None:
    states = []
    for rank in range(2):
        module = OrderedDict([("w", torch.ones(2)), *([(1, rank)] if rank else [])])
        module._metadata = {"": {"version": rank}}  # type: ignore[attr-defined]
        states.append({"m": module})
    path = save_ranks(tmp_path / "c", states)
    new = [read(path, rank, 2)["m"] for rank in range(2)]
    assert [list(m) for m in new] == [["w", 1], ["w", 1]]
    assert [m._metadata[""]["version"] for m in new] == [0, 1]


def test_ties_of_each_rank_come_back(tmp_path: Path) -> None:
    tied = torch.arange(6.0)
    path = save_ranks(tmp_path / "c", [{"a": tied, "b": tied}, {"b": tied.clone(), "c": torch.ones(1)}])
    new = read(path, 0, 2)
    assert new["a"] is new["b"] and new["a"].tolist() == tied.tolist()
    other = read(path, 1, 2)
    assert other["b"].tolist() == tied.tolist() and other["a"].tolist() == tied.tolist()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_replicas_cut_over_ranks_are_whole_for_any_number_of_readers(tmp_path: Path, world_size: int) -> None:
    state = {"w": COMMON, "tiny": torch.tensor(3.0), "empty": torch.empty(0, 3), "row": torch.arange(5).reshape(1, 5)}
    path = save_ranks(tmp_path / "c", [state] * 4)
    for rank in (0, world_size - 1):
        new = read(path, rank, world_size)
        assert str(new) == str(state)
        target = {"w": torch.zeros(4, 6).t(), "row": torch.zeros(1, 5, dtype=torch.int32)}
        read(path, rank, world_size, target)
        assert torch.equal(target["w"], COMMON) and target["row"].tolist() == [[0, 1, 2, 3, 4]]


def test_empty_tensors_that_no_rank_wrote_are_there(tmp_path: Path) -> None:
    path = save_ranks(tmp_path / "c", [{"e": torch.empty(0, 3)}] * 2, cut=lambda fqn, shape, holders: {})
    assert tuple(read(path, 0, 1)["e"].shape) == (0, 3)


def test_a_mismatch_of_kinds_with_a_target_is_refused_as_ever(path: str) -> None:
    with pytest.raises(LeafTypeMismatchError):
        read(path, 0, 3, {"rng": {"cpu": 1}})


# ---- random states --------------------------------------------------------------------------------------------------


def random_rows(rng: random.Random) -> Cut:
    """Cut tensors in runs of rows, as many as come, for whoever; some of them empty."""

    def cut(fqn: str, shape: tuple[int, ...], holders: Sequence[int]) -> dict[int, list[Box]]:
        n_rows = shape[0] if shape else 0
        cuts = sorted(rng.randrange(n_rows + 1) for _ in range(rng.randrange(5))) if n_rows else []
        found: dict[int, list[Box]] = {}
        for low, high in pairwise([0, *cuts, n_rows]):
            box: Box = ((low, *(0,) * (len(shape) - 1)), (high - low, *shape[1:])) if shape else ((), ())
            found.setdefault(rng.choice(list(holders)), []).append(box)
        return found

    return cut


def test_random_states_cut_at_random_come_back_to_every_rank(tmp_path: Path, rng: random.Random) -> None:
    for n in range(40):
        maker = StateMaker(rng)
        state = maker.state()
        for tensor in maker.tensors:
            tensor.detach().copy_(torch.randint(0, 2, tensor.shape))
        world_size = rng.randrange(1, 5)
        states = [
            {**state, "mine": torch.full((3,), r), "own": PerRank({"n": r, "t": torch.tensor([r])})}
            for r in range(world_size)
        ]
        path = save_ranks(tmp_path / str(n), states, cut=random_rows(rng))
        for rank, saved in enumerate(states):
            assert_same(read(path, rank, world_size), {**saved, "own": saved["own"].value})
        keys = [fqn for fqn in open_checkpoint(path).keys() if not fqn.startswith("own.")]  # noqa: SIM118
        assert_same(read(path, 9, 10, keys=keys)["mine"], states[0]["mine"])
        for saved in (states[0], states[-1]):
            read(path, world_size - 1, world_size, saved, strict=True)
            assert saved["own"].value["n"] == saved["mine"][0].item() == world_size - 1
