"""Saves of several ranks, simulated: every stored tensor is covered exactly once, with the right bytes."""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import states  # noqa: E402
from simulated_ranks import Ranks  # noqa: E402

from asyncckpt.errors import DuplicateNameError, UnsupportedLeafError  # noqa: E402
from asyncckpt.format import state_tree as trees  # noqa: E402
from asyncckpt.format.names import is_reserved, per_rank_name, split_per_rank_name  # noqa: E402
from asyncckpt.per_rank import PerRank  # noqa: E402
from asyncckpt.planning import load_balancing  # noqa: E402
from asyncckpt.planning.planner import PlanCache, contribution_of, make_plan, signature_of  # noqa: E402
from asyncckpt.planning.sample_schedule import SAMPLE_LIMIT  # noqa: E402
from asyncckpt.planning.save_plan import SavePlan, SharedTensor  # noqa: E402
from asyncckpt.protocol.samples import MAX_SAMPLES, decode_samples, unequal  # noqa: E402
from asyncckpt.staging.stager import HostStager  # noqa: E402
from asyncckpt.state_dict.flatten import HOIST_NBYTES, flatten  # noqa: E402
from asyncckpt.state_dict.structure_match import flatten_along  # noqa: E402
from asyncckpt.state_dict.unflatten import unflatten  # noqa: E402


def assert_stored(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert states.bits_of(found[name]) == states.bits_of(tensor), name


def shared_of(ranks: Ranks) -> list[SharedTensor]:
    """What rank 0 compares with others'."""
    return [tensor for tensors in ranks.made[0].shared.values() for tensor in tensors]


@pytest.fixture
def fine_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small tensors be cut, so that tests are quick."""
    monkeypatch.setattr(load_balancing, "CUT_NBYTES", 256)


@pytest.mark.parametrize("files_per_rank", [1, 3])
@pytest.mark.parametrize("world_size", [2, 3])
def test_replicas_of_every_dtype_and_shape_are_stored_once(
    world_size: int, files_per_rank: int, fine_cuts: None, rng: random.Random
) -> None:
    torch.manual_seed(5)
    state = {**states.every_tensor(), "rows": torch.randn(40, 100), "inner": torch.randn(1, 1, 64, 32).transpose(2, 3)}
    ranks = Ranks(world_size, files_per_rank=files_per_rank)
    ranks.exchange([state] * world_size)
    found = ranks.save([state] * world_size)
    flat = flatten(state)
    assert_stored(found, dict(zip(flat.fqns, flat.tensors, strict=True)))
    loads = [plan.tensor_nbytes for plan in ranks.made]
    assert sum(loads) == sum(t.numel() * t.element_size() for t in flat.tensors)
    assert max(loads) - min(loads) <= 2 * 4000, "a row of the widest tensor"
    assert sum(plan.n_tensors for plan in ranks.made) == len(flat.tensors)
    assert {"rows", "inner", "large"} & {s.fqn for s in shared_of(ranks) if s.split}
    assert {s.fqn for s in shared_of(ranks) if s.split} == {
        name for name, tensor in ranks.tensors.items() if len(tensor.chunks) > 1
    }


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("dtype", states.ALL_DTYPES, ids=str)
def test_pieces_of_every_dtype_keep_their_bits(dtype: torch.dtype, across: bool, fine_cuts: None) -> None:
    tensor = states.tensor_of(dtype, (64, 33))
    state = {"x": tensor.t() if across else tensor}
    ranks = Ranks(3)
    ranks.exchange([state] * 3)
    assert_stored(ranks.save([state] * 3), state)
    assert len(ranks.tensors["x"].chunks) == 3


def test_large_tensors_are_cut_and_moved_from_where_they_lie() -> None:
    big = torch.arange(1 << 20, dtype=torch.int32).view(1, 1024, 1024)
    state = {"big": big, "turned": big.transpose(1, 2), "parameter": torch.nn.Parameter(torch.randn(700, 600))}
    ranks = Ranks(3)
    ranks.exchange([state] * 3)
    assert_stored(ranks.save([state] * 3), state)
    assert {s.fqn for s in shared_of(ranks) if s.split} >= {"big", "turned"}
    loads = [plan.tensor_nbytes for plan in ranks.made]
    assert max(loads) - min(loads) <= 2 << 20


def test_a_rank_that_writes_nothing_still_refers_to_everything() -> None:
    state = {"w": torch.ones(3), "tied": None}
    state["tied"] = state["w"]
    ranks = Ranks(2)
    ranks.exchange([state] * 2)
    assert_stored(ranks.save([state] * 2), {"w": state["w"]})
    assert sorted(plan.tensor_nbytes for plan in ranks.made) == [0, 12]
    for structure in ranks.structures:
        assert structure.tree == ("d", ("w", ("T", 0), "tied", ("T", 0)))


def test_batch_statistics_that_differ_are_stored_for_each_rank() -> None:
    weight = torch.randn(8, 8)
    given = [{"w": weight, "mean": torch.full((4,), float(rank))} for rank in range(3)]
    ranks = Ranks(3)
    ranks.exchange(given)
    expected = {"w": weight, **{f"mean@rank{rank}": given[rank]["mean"] for rank in range(3)}}
    assert_stored(ranks.save(given), expected)


@pytest.mark.parametrize("shapes", [((2, 6), (2, 6)), ((2, 6), (3, 6))])
def test_halves_that_users_cut_by_hand_are_both_stored(shapes: tuple[Any, Any]) -> None:
    given = [{"half": torch.randn(shape)} for shape in shapes]
    ranks = Ranks(2)
    ranks.exchange(given)
    assert_stored(ranks.save(given), {f"half@rank{n}": given[n]["half"] for n in range(2)})


def test_tensors_as_they_were_initialised_are_no_replicas_until_a_second_look() -> None:
    def state(rank: int, step: int) -> dict[str, Any]:
        trained = torch.arange(4.0) + step
        return {
            "weight": torch.arange(6.0),
            "bias": torch.zeros(4) if not step else trained,
            "mean": torch.zeros(4) if not step else trained * rank,
            "mask": torch.ones(2, 3, dtype=torch.int8),
        }

    ranks = Ranks(2)
    ranks.meet([state(r, 0) for r in (0, 1)])
    first = ranks.save([state(r, 0) for r in (0, 1)])
    assert set(first) == {"weight", *(f"{name}@rank{r}" for name in ("bias", "mean", "mask") for r in (0, 1))}
    ranks.meet([state(r, 1) for r in (0, 1)])
    later = ranks.save([state(r, 1) for r in (0, 1)])
    assert set(later) == {"weight", "bias", "mask", "mean@rank0", "mean@rank1"}
    assert torch.equal(later["mean@rank1"], state(1, 1)["mean"])


def test_integer_keys_of_two_pipeline_stages_do_not_meet() -> None:
    def stage(n: int) -> dict[str, Any]:
        return {
            "model": {f"layer{n}.weight": torch.randn(3, n + 2)},
            "optim": {"state": {0: {"step": torch.tensor(7.0), "exp_avg": torch.randn(3, n + 2)}}},
        }

    given = [stage(0), stage(1)]
    ranks = Ranks(2)
    ranks.exchange(given)
    expected = {f"model.layer{n}.weight": given[n]["model"][f"layer{n}.weight"] for n in range(2)}
    expected |= {f"optim.state.0.exp_avg@rank{n}": given[n]["optim"]["state"][0]["exp_avg"] for n in range(2)}
    expected["optim.state.0.step"] = torch.tensor(7.0)
    assert_stored(ranks.save(given), expected)


def test_assumed_replicas_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [{"w": torch.zeros(4)}, {"w": torch.zeros(4)}]
    ranks = Ranks(2)
    ranks.exchange(given, compare=False)
    assert_stored(ranks.save(given), {"w": given[0]["w"]})


def test_what_is_new_is_stored_per_rank_until_the_ranks_have_met() -> None:
    first = {"w": torch.ones(5)}
    ranks = Ranks(2)
    ranks.exchange([first, first])
    more = {**first, "new": torch.arange(3), "mine": torch.ones(2)}
    less = {**first, "new": torch.arange(3)}
    assert_stored(
        ranks.save([more, less]),
        {"w": first["w"], "new@rank0": more["new"], "new@rank1": more["new"], "mine@rank0": more["mine"]},
    )
    assert ranks.changed([more, less]) == [True, True]
    ranks.exchange([more, less])
    assert ranks.changed([more, less]) == [False, False]
    assert_stored(ranks.save([more, less]), {"w": first["w"], "new": more["new"], "mine": more["mine"]})
    assert ranks.changed([first, first]) == [False, False], "what is not held at a meeting stays agreed upon"


def test_a_name_that_proved_unequal_moves_to_each_rank() -> None:
    given = [{"w": torch.ones(5)}, {"w": torch.ones(5)}]
    ranks = Ranks(2)
    ranks.exchange(given)
    given[1]["w"][3] = 0
    one, other = ranks.samples(given, 0)
    assert (one.names, other.names) == (["w"], ["w"]) and one.digests != other.digests
    ranks.agree(ranks.agreement.after({}, ("w",)))
    assert_stored(ranks.save(given), {"w@rank0": given[0]["w"], "w@rank1": given[1]["w"]})
    assert ranks.samples(given, 1)[0].names == []


def test_any_state_is_stored_by_two_ranks_without_holes(rng: random.Random, fine_cuts: None) -> None:
    for _ in range(25):
        maker = states.StateMaker(rng)
        state = maker.state()
        other = maker.mutated(state)
        try:
            contribution_of(flatten(state)), contribution_of(flatten(other))
        except (UnsupportedLeafError, DuplicateNameError):
            continue
        ranks = Ranks(2, files_per_rank=rng.choice([1, 2]))
        ranks.exchange([state, other])
        found = ranks.save([state, other])
        for rank, value in enumerate((state, other)):
            flat = flatten(value)
            for number, entry in enumerate(ranks.structures[rank].tensors):
                assert states.bits_of(found[entry.fqn]) == states.bits_of(flat.tensors[number])


def test_samples_are_equal_wherever_replicas_lie(rng: random.Random) -> None:
    base = torch.randn(100, 90)
    given = [{"a": base, "b": torch.ones(3)}, {"b": torch.ones(3), "a": base.t().contiguous().t()}]
    ranks = Ranks(2)
    ranks.exchange(given)
    for sequence in range(12):
        one, other = (dict(zip(s.names, _eights(s.digests), strict=True)) for s in ranks.samples(given, sequence))
        assert one == other and set(one) == {"a", "b"}


def _eights(raw: bytes) -> list[bytes]:
    return [raw[n : n + 8] for n in range(0, len(raw), 8)]


def test_every_element_is_compared_some_time() -> None:
    given = [{"w": torch.zeros(50, 101)}, {"w": torch.zeros(50, 101)}]
    ranks = Ranks(2)
    ranks.exchange(given)
    given[1]["w"][49, 100] = 1
    found = [ranks.samples(given, sequence) for sequence in range(5)]
    assert sum(one.digests != other.digests for one, other in found) == 1


def test_thousands_of_small_replicas_that_differ_are_found_by_one_save() -> None:
    given = [{f"b{n}": torch.full((16,), 0.0) for n in range(2000)} for _ in range(2)]
    ranks = Ranks(2)
    ranks.exchange(given)
    for tensor in given[1].values():
        tensor[15] = 1.0
    one, other = ranks.samples(given, 3)
    found = unequal({rank: decode_samples(samples.encode()) for rank, samples in enumerate((one, other))})
    assert len(found) == 2000


def test_all_that_is_compared_at_one_save_travels() -> None:
    """One more for each set of holders may come on top."""
    assert SAMPLE_LIMIT < MAX_SAMPLES


def test_a_new_agreement_drops_the_plans() -> None:
    ranks = Ranks(2)
    state = {"w": torch.ones(2)}
    before = ranks.plans[0].plan_for(state)[0]
    assert ranks.plans[0].plan_for(state)[0] is before
    ranks.exchange([state, state])
    after = ranks.plans[0].plan_for(state)[0]
    assert before.fingerprint != after.fingerprint and before.unagreed and not after.unagreed


# ---- PerRank --------------------------------------------------------------------------------------------------------


def test_what_is_marked_is_stored_for_each_rank_even_when_equal() -> None:
    given = [{"rng": PerRank({"cpu": torch.arange(4), "n": rank}), "w": torch.ones(2)} for rank in range(2)]
    ranks = Ranks(2)
    ranks.exchange(given)
    expected = {"w": torch.ones(2), "rng.cpu@rank0": torch.arange(4), "rng.cpu@rank1": torch.arange(4)}
    assert_stored(ranks.save(given), expected)
    inner = ("d", ("cpu", ("T", 0), "n", ("O", 0)))
    assert ranks.structures[1].tree == ("d", ("rng", ("r", inner), "w", ("T", 1)))


def test_one_rank_marks_too() -> None:
    plan, _ = PlanCache(files_per_rank=1).plan_for({"a": PerRank(torch.ones(2)), "b": torch.ones(2)})
    assert b"a@rank0" in plan.structure and b"b@rank0" not in plan.structure and not plan.unagreed


def test_marked_tensors_are_no_ones_business_but_their_size_counts() -> None:
    found = contribution_of(flatten({"a": PerRank(torch.ones(5)), "b": torch.ones(2)}))
    assert [key[0] for key in found.tensors] == ["b"]
    assert found.own_nbytes == 20


def test_an_alias_of_a_marked_tensor_is_marked() -> None:
    tensor = torch.ones(3)
    state = {"first": tensor, "marked": PerRank([tensor, 1]), "other": torch.zeros(3)}
    flat = flatten(state)
    assert flat.fqns == ["first", "other"]
    assert (flat.per_rank, flat.common) == ({0}, [1])
    ranks = Ranks(2)
    ranks.exchange([state, state])
    assert sorted(ranks.save([state, state])) == ["first@rank0", "first@rank1", "other"]


def test_a_mark_inside_a_mark_means_nothing_more() -> None:
    flat = flatten({"a": PerRank({"b": PerRank(torch.ones(1)), "c": [PerRank(PerRank(1))]})})
    assert flat.tree == ("d", ("a", ("r", ("d", ("b", ("T", 0), "c", ("l", (("O", 0),)))))))
    assert [path for path, _ in trees.per_rank_nodes(flat.tree)] == [("a",)]
    assert flatten({"a": PerRank(PerRank(1))}).tree == ("d", ("a", ("r", ("O", 0))))


def test_a_mark_inside_itself_is_refused() -> None:
    ring = PerRank(None)
    ring.value = ring
    with pytest.raises(UnsupportedLeafError, match="inside itself"):
        flatten({"a": ring})


MARKED: dict[str, Any] = {
    "tensor": torch.ones(2),
    "scalar": 5,
    "flat list": [1, 2],
    "list": [torch.ones(1), {"x": None}],
    "tuple": (torch.ones(1),),
    "bytes": bytes(HOIST_NBYTES),
    "ordered": torch.nn.Linear(2, 2).state_dict(),
    "empty": {},
}


@pytest.mark.parametrize("name", MARKED)
def test_marked_values_match_come_back_and_are_checked(name: str) -> None:
    state = {"x": 1, "marked": PerRank(MARKED[name]), "list": [PerRank(MARKED[name])]}
    flat = flatten(state)
    again = flatten_along(*signature_of(flat), state)
    assert again is not None and again.tree == flat.tree and len(again.objects) == len(flat.objects)
    assert trees.checked(flat.tree, len(flat.tensors), len(flat.objects)) == flat.tree
    bare = {"x": 1, "marked": MARKED[name], "list": [MARKED[name]]}
    states.assert_same(unflatten(flat.tree, flat.tensors, flat.objects), bare)
    kept = unflatten(flat.tree, flat.tensors, flat.objects, marks=True)
    assert isinstance(kept["marked"], PerRank) and isinstance(kept["list"][0], PerRank)
    assert flatten_along(*signature_of(flat), bare) is None
    assert flatten_along(*signature_of(flatten(bare)), state) is None
    make_plan(flat, signature_of(flat), files_per_rank=1)


def test_a_copy_in_host_memory_keeps_the_mark() -> None:
    tensor = torch.ones(2)
    found = HostStager().stage({"a": PerRank({"b": tensor})})
    assert isinstance(found["a"], PerRank)
    assert found["a"].value["b"] is not tensor and torch.equal(found["a"].value["b"], tensor)


def test_a_tree_with_a_mark_inside_a_mark_is_refused() -> None:
    for raw in (["r", ["r", ["O", 0]]], ["r", ["d", ["a", ["r", ["O", 0]]]]], ["r", ["l", [["r", ["O", 0]]]]], ["r"]):
        with pytest.raises(ValueError, match=r"per-rank node|members"):
            trees.checked(raw, 0, 1)


def test_keys_inside_a_mark_are_checked() -> None:
    flat = flatten({"a": PerRank({1 << 70: 1})})
    with pytest.raises(UnsupportedLeafError):
        make_plan(flat, signature_of(flat), files_per_rank=1)


# ---- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["w@rank0", "w@rank17", "@rank3", "w@rank007", "w@rank12345678"])
def test_names_of_ranks_are_reserved_for_tensors(name: str) -> None:
    for state in ({name: torch.ones(1)}, {"a": {name: bytes(HOIST_NBYTES)}}, {"t": PerRank({name: torch.ones(1)})}):
        for build in (lambda f: make_plan(f, signature_of(f), files_per_rank=1), contribution_of):
            with pytest.raises(DuplicateNameError, match="reserved") as caught:
                build(flatten(state))
            assert caught.value.fqn.endswith(name)
    tied = torch.ones(1)
    with pytest.raises(DuplicateNameError):
        contribution_of(flatten({"fine": tied, name: tied}))
    contribution_of(flatten({name: 5, "o": OrderedDict({name: "text"})}))


@pytest.mark.parametrize("name", ["w@rank", "w@rank1.x", "w@ranks1", "rank1", "w@rank1 ", "w@rank1\n", "w@rank٣"])
def test_other_names_are_the_users(name: str) -> None:
    assert not is_reserved(name) and split_per_rank_name(name) is None
    contribution_of(flatten({name: torch.ones(1)}))


def test_a_name_of_a_rank_comes_apart_again() -> None:
    assert per_rank_name("a.b", 12) == "a.b@rank12"
    assert split_per_rank_name("a.b@rank12") == ("a.b", 12)
    assert split_per_rank_name("a\nb@rank0") == ("a\nb", 0)
    assert split_per_rank_name("a@rank" + "9" * 5000) is None


# ---- plans under an agreement that grows


def fresh(plans: PlanCache, plan: SavePlan, state: dict[str, Any]) -> SavePlan:
    """Return the plan as it would be made now."""
    return make_plan(flatten(state), plan.signature, files_per_rank=1, rank=0, agreement=plans.agreement)


def test_a_plan_keeps_its_layout_when_the_agreement_grows_by_something_else() -> None:
    torch.manual_seed(6)
    first, second = {"a": torch.randn(300_000), "own": PerRank(torch.ones(2))}, {"b": torch.randn(1000)}
    ranks = Ranks(2)
    ranks.exchange([first, first])
    plans = ranks.plans[0]
    plan, _ = plans.plan_for(first)
    made = plans.n_plans_made
    ranks.exchange([second, second])
    again, _ = plans.plan_for(first)
    assert again is not plan and again.layout is plan.layout
    assert again.agreement is plans.agreement and again.fingerprint != plan.fingerprint
    assert plans.n_plans_made == made + 1, "of the second structure"
    expected = fresh(plans, plan, first)
    assert (again.unagreed, dict(again.shared), again.boxes, again.specs, again.names, again.structure) == (
        expected.unagreed, dict(expected.shared), expected.boxes, expected.specs, expected.names, expected.structure
    )  # fmt: skip
    assert plans.plan_for(first)[0] is again
    assert_stored(ranks.save([first, first]), {"a": first["a"], "own@rank0": torch.ones(2), "own@rank1": torch.ones(2)})


def test_a_plan_is_laid_out_anew_when_the_agreement_says_something_else_of_it() -> None:
    torch.manual_seed(6)
    state = {"a": torch.randn(300_000), "b": torch.randn(1000)}
    ranks = Ranks(2)
    ranks.exchange([state, state])
    plans = ranks.plans[0]
    plan, _ = plans.plan_for(state)
    ranks.agree(ranks.agreement.after({}, ("a",)))
    again, _ = plans.plan_for(state)
    assert again.layout is not plan.layout
    assert (plan.names, again.names) == (("a", "b"), ("a@rank0", "b"))
    assert again.structure == fresh(plans, plan, state).structure
