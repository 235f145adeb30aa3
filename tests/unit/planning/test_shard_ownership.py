"""Shards of several ranks: each element written once, evenly, and whatever contradicts itself refused."""

from __future__ import annotations

import random
from typing import Any

import pytest
import states
import torch
from sharded_states import OnGrid, grid_of, grids, random_grid
from simulated_ranks import Ranks

from asyncckpt import PerRank, ShardedSlice
from asyncckpt.errors import OverlappingShardsError, RanksDisagreeError, ReplicaMismatchError, UnsupportedLeafError
from asyncckpt.format.coverage import uncovered
from asyncckpt.planning.planner import PlanCache
from asyncckpt.planning.shard_ownership import MeshSharding, ShardOwnership
from asyncckpt.sharding.shard_claims import ShardClaim
from asyncckpt.state_dict.flatten import flatten
from tests.bytecodes import bytecodes

__all__ = ["grids"]
MESHES = {
    "FSDP": grid_of((4,), 0),
    "FSDP x TP": grid_of((2, 2), (0, 2), 0),
    "FSDP x TP along columns": grid_of((2, 2), 0, 1),
    "HSDP": grid_of((2, 2), None, 0),
    "replicated": grid_of((4,), None),
    "three dimensions": grid_of((2, 1, 2), None, 1, 0),
    "strided alone": grid_of((4,), (0, 3)),
}


def whole(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def loads_of(ranks: Ranks) -> list[int]:
    return [plan.tensor_nbytes for plan in ranks.made]


@pytest.mark.usefixtures("grids")
@pytest.mark.parametrize("agreed", [True, False])
@pytest.mark.parametrize("mesh", MESHES)
def test_tensors_on_a_mesh_are_stored_once_and_evenly(mesh: str, agreed: bool) -> None:
    tensors = {
        f"w{n}": whole(*shape, seed=n) for n, shape in enumerate([(4096, 640), (7, 3), (1, 5), (0, 4), (513, 9)])
    }
    ranks = Ranks(4)
    held = [{name: OnGrid(t, MESHES[mesh], rank) for name, t in tensors.items()} for rank in range(4)]
    if agreed:
        ranks.exchange(held)
    found = ranks.save(held)
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert states.bits_of(found[name]) == states.bits_of(tensor), name
    assert uncovered([plan.structure for plan in ranks.made]) == []
    loads, total = loads_of(ranks), sum(t.numel() * 4 for t in tensors.values())
    assert sum(loads) == total
    if agreed:
        assert max(loads) - min(loads) <= 2 << 20
    assert [bool(plan.unagreed) for plan in ranks.made] == [not agreed] * 4


@pytest.mark.usefixtures("grids")
def test_random_meshes_with_plain_tensors_beside_them_are_stored_once() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(40):
        world_size = rng.choice([1, 2, 3, 4, 6, 8])
        tensors, held = {}, [{"plain": whole(3, 4)} for _ in range(world_size)]
        for n in range(rng.randint(1, 5)):
            shape = [rng.choice([0, 1, 2, 5, 8, 13]) for _ in range(rng.randint(1, 3))]
            if rng.random() < 0.3:
                shape[rng.randrange(len(shape))] = 700  # of one dimension: of three it would be gigabytes
            tensors[f"w{n}"] = whole(*shape, seed=n)
            grid = random_grid(rng, world_size, len(shape))
            for rank in range(world_size):
                held[rank][f"w{n}"] = OnGrid(tensors[f"w{n}"], grid, rank)  # type: ignore[assignment]
        ranks = Ranks(world_size)
        if rng.random() < 0.7:
            ranks.exchange(held)
            tensors["plain"] = whole(3, 4)
        found = ranks.save(held)
        for name, tensor in tensors.items():
            assert states.bits_of(found[name]) == states.bits_of(tensor), name


@pytest.mark.usefixtures("grids")
def test_replicas_on_a_mesh_are_levelled_with_what_ranks_write_anyway() -> None:
    grid, large, expert = grid_of((2, 2), None, 0), whole(4096, 512), whole(1024, 512, seed=1)
    held: list[Any] = [{"w": OnGrid(large, grid, rank), "rest": whole(2048, 512, seed=2)} for rank in range(4)]
    held[0]["expert"] = expert
    ranks = Ranks(4)
    ranks.exchange(held)
    found = ranks.save(held)
    assert states.bits_of(found["w"]) == states.bits_of(large)
    loads = loads_of(ranks)
    assert sum(loads) == large.nbytes + expert.nbytes + held[0]["rest"].nbytes
    assert max(loads) - min(loads) <= 2 << 20


@pytest.mark.usefixtures("grids")
def test_replicas_stay_with_their_writers_when_the_ranks_meet_for_something_else() -> None:
    """They save two structures in turn, and meet for what is new in one: the layout of the other stays."""
    grid, large = grid_of((2, 2), None, 0), whole(4096, 512)
    weights: list[Any] = [{"w": OnGrid(large, grid, rank), "dense": whole(2048, 512, seed=2)} for rank in range(4)]
    more: list[Any] = [{**weights[rank], "critic": whole(512, 512, seed=3)} for rank in range(4)]
    more[0]["expert"] = whole(1024, 512, seed=1)
    ranks = Ranks(4)
    ranks.exchange(weights)
    ranks.save(weights)
    layouts = [plan.layout for plan in ranks.made]
    ranks.exchange(more)
    ranks.save(weights)
    assert all(plan.layout is layout for plan, layout in zip(ranks.made, layouts, strict=True))
    ranks.save(more)
    assert not any(ranks.changed(more)) and uncovered([plan.structure for plan in ranks.made]) == []


@pytest.mark.usefixtures("grids")
def test_equal_meshes_of_different_ranks_hold_replicas_of_one_another() -> None:
    tensor = whole(4096, 300)
    held = [{"w": OnGrid(tensor, grid_of((2,), 0, ranks=(r // 2 * 2, r // 2 * 2 + 1)), r)} for r in range(4)]
    ranks = Ranks(4)
    ranks.exchange(held)
    assert states.bits_of(ranks.save(held)["w"]) == states.bits_of(tensor)
    assert max(loads_of(ranks)) < tensor.nbytes / 3


@pytest.mark.usefixtures("grids")
def test_meshes_of_different_shapes_that_cut_alike_hold_replicas_too() -> None:
    tensor = whole(64, 30)
    one, two = grid_of((2,), 0, ranks=(0, 1)), grid_of((2, 1), 0, None, ranks=(2, 3))
    held = [{"w": OnGrid(tensor, one if rank < 2 else two, rank)} for rank in range(4)]
    ranks = Ranks(4)
    ranks.exchange(held)
    assert states.bits_of(ranks.save(held)["w"]) == states.bits_of(tensor)
    assert sum(loads_of(ranks)) == tensor.nbytes


@pytest.mark.usefixtures("grids")
def test_experts_of_each_rank_and_shared_dense_weights() -> None:
    dense, grid = whole(50, 8), grid_of((2,), 0)
    held: list[Any] = [{"dense": OnGrid(dense, grid, r), f"expert.{r}": whole(9, 9, seed=r)} for r in range(2)]
    ranks = Ranks(2)
    ranks.exchange(held)
    found = ranks.save(held)
    assert set(found) == {"dense", "expert.0", "expert.1"}
    assert states.bits_of(found["dense"]) == states.bits_of(dense)


def tp(tensor: torch.Tensor, rank: int, n: int, replica_id: int = 0) -> ShardedSlice:
    rows = len(tensor) // n
    return ShardedSlice(tensor[rank * rows : (rank + 1) * rows].clone(), tensor.shape, (rank * rows, 0), replica_id)


def test_slices_are_stored_once_each_and_equal_ones_are_split() -> None:
    large, small = whole(2048, 600), whole(8, 2)
    held = [{"l": tp(large, rank % 2, 2), "s": tp(small, rank % 2, 2)} for rank in range(4)]
    ranks = Ranks(4)
    ranks.exchange(held)
    found = ranks.save(held)
    assert states.bits_of(found["l"]) == states.bits_of(large)
    assert states.bits_of(found["s"]) == states.bits_of(small)
    assert max(loads_of(ranks)) < large.nbytes / 2 * 0.8
    assert not any(plan.unagreed for plan in ranks.made)


def test_slices_that_are_new_are_written_by_the_first_replica() -> None:
    large = whole(2048, 600)
    held = [{"l": tp(large, rank % 2, 2, replica_id=rank // 2)} for rank in range(4)]
    ranks = Ranks(4)
    assert states.bits_of(ranks.save(held)["l"]) == states.bits_of(large)
    assert loads_of(ranks)[2:] == [0, 0]


def test_new_slices_that_all_call_themselves_first_are_found_to_be_stored_twice() -> None:
    held = [{"l": tp(whole(8, 2), rank % 2, 2)} for rank in range(4)]
    plans = [PlanCache(files_per_rank=1, rank=r, agreement=Ranks(4).agreement).plan_for(held[r])[0] for r in range(4)]
    ((fqn, why),) = uncovered([plan.structure for plan in plans])
    assert fqn == "l" and "twice" in why


@pytest.mark.parametrize("ids", [(0, 0), (0, 1), (1, 0)])
def test_an_optimizer_s_slices_that_come_after_the_first_save_lie_as_its_weights_do(ids: tuple[int, int]) -> None:
    weight, moment = whole(2048, 600), whole(2048, 600, seed=1)
    ranks = Ranks(4)
    held = [{"w": tp(weight, rank % 2, 2, ids[rank // 2])} for rank in range(4)]
    ranks.exchange(held)
    more = [{**held[rank], "moment": tp(moment, rank % 2, 2, ids[rank // 2])} for rank in range(4)]
    found = ranks.save(more)
    assert states.bits_of(found["moment"]) == states.bits_of(moment)
    assert all(plan.unagreed for plan in ranks.made)
    ranks.meet(more)
    assert states.bits_of(ranks.save(more)["moment"]) == states.bits_of(moment)
    assert max(loads_of(ranks)) < moment.nbytes * 0.8  # one replica writes each half, the other of the weight more


def pair(rank: int, placement: int | None = 0) -> Any:
    """The mesh of two ranks in which a rank of four is: tensor parallelism, of which there are replicas."""
    return grid_of((2,), placement, ranks=(rank // 2 * 2, rank // 2 * 2 + 1))


@pytest.mark.usefixtures("grids")
def test_an_optimizer_s_shards_on_meshes_of_some_ranks_lie_as_its_weights_do() -> None:
    weight, moment, other = whole(2048, 600), whole(2048, 600, seed=1), whole(6, 2)
    ranks = Ranks(4)
    held: list[Any] = [{"w": OnGrid(weight, pair(rank), rank)} for rank in range(4)]
    ranks.exchange(held)
    more = [
        {**held[rank], "moment": OnGrid(moment, pair(rank), rank), "x": OnGrid(other, pair(rank), rank)}
        for rank in range(4)
    ]
    found = ranks.save(more)
    assert states.bits_of(found["moment"]) == states.bits_of(moment)
    assert states.bits_of(found["x"]) == states.bits_of(other)
    assert all(plan.unagreed for plan in ranks.made)
    ranks.meet(more)
    assert states.bits_of(ranks.save(more)["moment"]) == states.bits_of(moment)


@pytest.mark.usefixtures("grids")
def test_what_comes_later_on_the_mesh_of_one_stage_is_that_stage_s_alone() -> None:
    """Stages share an embedding: its meshes are joined, those of their own layers are not."""
    ranks = Ranks(4)
    shared, own = whole(10, 2), whole(6, 2)
    held: list[Any] = [
        {"emb": OnGrid(shared, pair(rank), rank), f"layer{rank // 2}": OnGrid(own, pair(rank), rank)}
        for rank in range(4)
    ]
    ranks.exchange(held)
    for rank in range(4):
        new = {"m.emb": shared, f"m.layer{rank // 2}": own, f"y{rank // 2}": whole(4, 4)}
        held[rank] |= {name: OnGrid(tensor, pair(rank), rank) for name, tensor in new.items()}
    found = ranks.save(held)
    expected = {"m.emb": shared, "m.layer0": own, "m.layer1": own, "y0": whole(4, 4), "y1": whole(4, 4)}
    assert set(found) == {"emb", "layer0", "layer1", *expected}
    assert all(states.bits_of(found[name]) == states.bits_of(tensor) for name, tensor in expected.items())


def test_a_hole_is_found() -> None:
    plan, _ = PlanCache(files_per_rank=1).plan_for({"w": ShardedSlice(whole(3, 4), (4, 4), (0, 0))})
    ((fqn, why),) = uncovered([plan.structure])
    assert fqn == "w" and why.startswith("12 of 16 elements are stored: [3:4,0:4] is missing")


def test_slices_that_overlap_on_two_ranks_are_refused_with_both_boxes() -> None:
    held = [{"w": ShardedSlice(whole(3, 4), global_shape=(5, 4), offsets=(rank, 0))} for rank in range(2)]
    with pytest.raises(OverlappingShardsError, match=r"offsets \[0, 0\].*rank 0; offsets \[1, 0\].*rank 1") as caught:
        Ranks(2).exchange(held)
    assert caught.value.fqn == "w" and len(caught.value.boxes) == 2


def test_stages_that_mean_different_tensors_by_one_name_are_told_to_use_names() -> None:
    held = [{"0": ShardedSlice(whole(3, 4), (6, 4 + rank), (0, 0))} for rank in range(2)]
    with pytest.raises(RanksDisagreeError, match="get_optimizer_state_dict") as caught:
        Ranks(2).exchange(held)
    assert "'0'" in str(caught.value)


def test_a_name_is_a_shard_on_all_ranks_or_on_none() -> None:
    held = [{"w": whole(2, 2)}, {"w": tp(whole(4, 2), 1, 2)}]
    with pytest.raises(RanksDisagreeError, match="plain tensor"):
        Ranks(2).exchange(held)


@pytest.mark.usefixtures("grids")
@pytest.mark.parametrize("kind", ["grid", "slices"])
def test_unequal_replicas_of_shards_are_an_error_and_never_stored_per_rank(kind: str) -> None:
    grid = grid_of((2, 2), None, 0)
    tensors = [whole(8, 4, seed=r // 2) for r in range(4)]
    held: list[Any] = [
        {
            "a": OnGrid(whole(4, 4), grid, r),
            "w": OnGrid(tensors[r], grid, r) if kind == "grid" else tp(tensors[r], r % 2, 2),
        }
        for r in range(4)
    ]
    with pytest.raises(ReplicaMismatchError, match=r"ranks 0 and 2.*'w'") as caught:
        Ranks(4).exchange(held)
    assert caught.value.fqn == "w" and list(caught.value.ranks) == [0, 2]


@pytest.mark.usefixtures("grids")
@pytest.mark.parametrize("orders", [("ab", "ba"), ("abc", "acb"), ("axb", "ab"), ("ab", "axb")])
def test_replicas_are_compared_whatever_order_their_ranks_hold_them_in(orders: tuple[str, str]) -> None:
    both, alone = grid_of((2,), None), [grid_of((2,), None, ranks=(rank, 2 + rank)) for rank in range(2)]
    held: list[Any] = [{}, {}, {}, {}]
    for rank in range(4):
        for name in orders[rank % 2]:  # "x" lies on another mesh, between the others
            grid = alone[rank % 2] if name == "x" else grid_of((4,), None) if name == "c" else both
            held[rank][name] = OnGrid(whole(4, 4), grid, rank)
    Ranks(4).exchange(held)
    held[1]["b"] = OnGrid(whole(4, 4, seed=1), both, 1)
    with pytest.raises(ReplicaMismatchError) as caught:
        Ranks(4).exchange(held)
    assert (caught.value.fqn, caught.value.ranks) == ("b", [0, 1])


@pytest.mark.usefixtures("grids")
@pytest.mark.parametrize("rows", [7, 4096])
def test_replicas_that_come_later_are_compared_in_every_save_from_their_first_on(rows: int) -> None:
    mesh = grid_of((2, 2), None, 0)
    held: list[Any] = [{"w": OnGrid(whole(4, 4), mesh, rank)} for rank in range(4)]
    ranks = Ranks(4)
    ranks.exchange(held)
    for rank in range(4):
        held[rank]["m"] = OnGrid(whole(rows, 640, seed=int(rank == 2)), mesh, rank)
    found = ranks.samples(held, 5)
    assert [s.names[-1] for s in found[:3]] == [f"m [0:{-(-rows // 2)},0:640]", found[1].names[-1], found[0].names[-1]]
    assert {s.split[-1] for s in found} == {0}
    assert found[0].digests[-8:] != found[2].digests[-8:] and found[1].digests[-8:] == found[3].digests[-8:]


@pytest.mark.usefixtures("grids")
@pytest.mark.parametrize("kind", ["grid", "slices"])
def test_replicas_that_come_later_are_written_whole_by_one_until_they_have_been_compared(kind: str) -> None:
    """They differ by one element in each half, far from the windows of most samples."""
    ranks, mesh = Ranks(4), MESHES["HSDP"]
    ranks.exchange([{"w": OnGrid(whole(4, 4), mesh, rank)} for rank in range(4)])
    replicas = [whole(4096, 640), whole(4096, 640)]
    replicas[1][2000, 3] = replicas[1][4000, 3] = 0
    held: list[Any] = [{"m": OnGrid(replicas[rank // 2], mesh, rank)} for rank in range(4)]
    if kind == "slices":
        held = [{"m": tp(replicas[rank // 2], rank % 2, 2, rank // 2)} for rank in range(4)]
    found = ranks.save(held)["m"]
    boxes = [(spec.offsets, spec.sizes) for plan in ranks.made for spec in plan.specs]
    assert sorted(boxes) == [((0, 0), (2048, 640)), ((2048, 0), (2048, 640))]
    assert any(torch.equal(found, replica) for replica in replicas)
    with pytest.raises(ReplicaMismatchError):
        ranks.meet(held)


@pytest.mark.usefixtures("grids")
def test_replicas_that_came_later_are_spread_once_the_ranks_have_met_again() -> None:
    ranks, mesh = Ranks(4), MESHES["HSDP"]
    ranks.exchange([{"w": OnGrid(whole(4, 4), mesh, rank)} for rank in range(4)])
    held = [{"m": OnGrid(whole(4096, 640), mesh, rank)} for rank in range(4)]
    ranks.save(held)
    assert sorted(loads_of(ranks))[:2] == [0, 0]
    ranks.meet(held)
    ranks.save(held)
    assert max(loads_of(ranks)) - min(loads_of(ranks)) <= 2 << 20


@pytest.mark.usefixtures("grids")
def test_replicas_on_meshes_of_different_shapes_are_compared_too() -> None:
    meshes = [grid_of((2,), 0, ranks=(0, 1)), grid_of((1, 2), None, 0, ranks=(2, 3))]
    held = [{"w": OnGrid(whole(4, 4, seed=int(rank == 3)), meshes[rank // 2], rank)} for rank in range(4)]
    with pytest.raises(ReplicaMismatchError) as caught:
        Ranks(4).exchange(held)
    assert (caught.value.fqn, caught.value.ranks) == ("w", [1, 3])


@pytest.mark.usefixtures("grids")
def test_replicas_that_were_initialised_with_zeros_are_replicas() -> None:
    grid, zeros = grid_of((2,), None), torch.zeros(600, 600)
    ranks, held = Ranks(2), [{"w": OnGrid(zeros, grid, rank)} for rank in range(2)]
    ranks.meet(held)
    assert set(ranks.save(held)) == {"w"}


@pytest.mark.usefixtures("grids")
def test_what_is_shared_is_compared_in_every_save_box_by_box() -> None:
    grid, tensor = grid_of((2, 2), None, 0), whole(8, 4)
    held = [{"w": OnGrid(tensor, grid, rank)} for rank in range(4)]
    ranks = Ranks(4)
    ranks.exchange(held)
    zero, one, two, three = ranks.samples(held, 1)
    assert zero.names == two.names == ["w [0:4,0:4]"] and one.names == three.names == ["w [4:8,0:4]"]
    assert zero.digests == two.digests != one.digests == three.digests


@pytest.mark.usefixtures("grids")
def test_a_tensor_that_comes_later_is_stored_at_once_and_agreed_upon_then() -> None:
    grid, one, two = grid_of((2, 2), None, 0), whole(8, 4), whole(4096, 128, seed=1)
    ranks = Ranks(4)
    ranks.exchange([{"one": OnGrid(one, grid, rank)} for rank in range(4)])
    held = [{"one": OnGrid(one, grid, rank), "two": OnGrid(two, grid, rank)} for rank in range(4)]
    assert states.bits_of(ranks.save(held)["two"]) == states.bits_of(two)
    assert all(plan.unagreed for plan in ranks.made)
    ranks.meet(held)
    assert states.bits_of(ranks.save(held)["two"]) == states.bits_of(two)
    assert not any(plan.unagreed for plan in ranks.made)


@pytest.mark.usefixtures("grids")
def test_a_plan_is_found_again_for_shards_of_the_same_boxes_only() -> None:
    grid = grid_of((2,), 0)
    plans = PlanCache(files_per_rank=1)
    first, _ = plans.plan_for({"w": OnGrid(whole(6, 2), grid, 0), "s": tp(whole(4, 2), 0, 2)})
    again, flat = plans.plan_for({"w": OnGrid(whole(6, 2, seed=1), grid, 0), "s": tp(whole(4, 2), 0, 2)})
    assert again is first and flat.shards
    assert plans.plan_for({"w": OnGrid(whole(6, 2), grid, 0), "s": tp(whole(4, 2), 1, 2)})[0] is not first
    assert plans.plan_for({"w": whole(3, 2), "s": tp(whole(4, 2), 0, 2)})[0] is not first


@pytest.mark.usefixtures("grids")
def test_tied_shards_are_stored_once_also_where_a_rank_holds_none_of_them() -> None:
    tensor = whole(1, 4)
    for rank in range(2):
        shard = OnGrid(tensor, grid_of((2,), 0), rank)
        assert len(flatten({"a": shard, "b": shard}).fqns) == 1


def test_a_shard_inside_per_rank_is_refused() -> None:
    with pytest.raises(UnsupportedLeafError, match="PerRank") as caught:
        flatten({"a": {"b": PerRank({"c": tp(whole(4, 2), 0, 2)})}})
    assert caught.value.leaf == "a.b.c"


def test_loads_of_grids_are_what_their_boxes_say() -> None:
    from math import prod

    from asyncckpt.planning.shard_ownership import MeshSharding, add_grid_loads

    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(200):
        world_size = rng.choice([1, 2, 4, 6, 8])
        shape = tuple(rng.choice([0, 1, 3, 8, 13]) for _ in range(rng.randint(1, 3)))
        grid = random_grid(rng, world_size, len(shape))
        totals: dict[int, int] = {}
        add_grid_loads(totals, [MeshSharding(grid, shape, 4)])
        for at, rank in enumerate(grid.ranks):
            held = sum(prod(sizes) * 4 for _, sizes in grid.boxes(shape, grid.coordinate(at)))
            assert totals.get(rank, 0) == held // grid.n_replicas


@pytest.mark.usefixtures("grids")
def test_a_rank_whose_number_is_not_that_of_its_mesh_is_told_so() -> None:
    held = {"w": OnGrid(whole(4, 4), grid_of((2,), 0), 0)}
    with pytest.raises(RanksDisagreeError, match="a shard of 'w' that another rank"):
        PlanCache(files_per_rank=1, rank=1, agreement=Ranks(2).agreement).plan_for(held)


@pytest.mark.usefixtures("grids")
def test_a_mesh_of_ranks_that_do_not_save_is_refused() -> None:
    held = [{"w": OnGrid(whole(4, 4), grid_of((3,), 0), rank)} for rank in range(2)]
    with pytest.raises(RanksDisagreeError, match="mesh with rank 2"):
        Ranks(2).exchange(held)


@pytest.mark.usefixtures("grids")
def test_a_mesh_of_which_a_rank_says_nothing_leaves_a_hole_and_is_no_news_for_ever() -> None:
    held: list[Any] = [{"w": OnGrid(whole(4, 4), grid_of((2,), 0), 0)}, {"other": whole(2, 2)}]
    ranks = Ranks(2)
    ranks.exchange(held)
    made = [plans.plan_for(state)[0] for plans, state in zip(ranks.plans, held, strict=True)]
    assert uncovered([plan.structure for plan in made]) == [
        ("w", "8 of 16 elements are stored: [2:4,0:4] is missing (rank 0 holds [0:2,0:4] beside it)")
    ]
    assert not made[0].unagreed


def test_a_stager_in_host_memory_gives_slices() -> None:
    from asyncckpt import FlatShard
    from asyncckpt.staging.stager import HostStager

    state = {
        "s": tp(whole(4, 2), 1, 2),
        "f": FlatShard(torch.arange(4.0), (3, 3), 2),
        "e": FlatShard(torch.ones(0), (2,), 0),
    }
    found = HostStager().stage(state)
    assert isinstance(found["s"], ShardedSlice) and found["s"].offsets == (2, 0)
    assert torch.equal(found["s"].tensor, state["s"].tensor) and found["s"].tensor is not state["s"].tensor
    assert [part.offsets for part in found["f"]] == [(0, 2), (1, 0)] and found["e"] == []


@pytest.mark.parametrize("seed", range(3))
def test_nonsense_in_a_claim_is_refused(seed: int) -> None:
    from asyncckpt.sharding.shard_claims import ShardClaim, decode_claims, encode_claims

    rng = random.Random(seed)
    grids = [
        grid_of((2, 3), None, 0, ranks=[4, 2, 9, 0, 1, 3]),
        grid_of((2, 2), 0, (1, 2)),
        grid_of((4,), 0, ranks=[1, 3, 5, 7]),
    ]
    claims = tuple(ShardClaim(f"w{n}", "float32", (5, 6), grid, ()) for n, grid in enumerate(grids))
    claims += (ShardClaim("b", "int8", (5, 6), None, (((0, 0), (2, 6)), ((2, 0), (3, 1)))),)
    data = encode_claims(claims)
    assert decode_claims(data) == claims
    for _ in range(300):
        broken = bytearray(data)
        broken[rng.randrange(len(data))] = rng.randrange(256)
        try:
            found = decode_claims(bytes(broken))
        except Exception as error:
            assert isinstance(error, (ValueError, TypeError, IndexError, KeyError, OverflowError)), repr(error)
        else:
            for claim in found:
                for rank in range(10):
                    claim.boxes_of_rank(rank)


def boxes_by_hand(n_ranks: int, n_tensors: int) -> list[tuple[tuple[int, ...], tuple[ShardClaim, ...]]]:
    """What ranks say of tensors of which each holds two rows, without a mesh."""
    return [
        (
            (rank,),
            tuple(
                ShardClaim(f"w{n}", "float32", (2 * n_ranks, 3), None, (((2 * rank, 0), (2, 3)),))
                for n in range(n_tensors)
            ),
        )
        for rank in range(n_ranks)
    ]


def test_boxes_by_hand_are_noted_in_steps_linear_in_ranks() -> None:
    few, many = boxes_by_hand(32, 4), boxes_by_hand(512, 4)
    short = bytecodes(lambda: ShardOwnership(32).extended(few, {}))
    assert bytecodes(lambda: ShardOwnership(512).extended(many, {})) < 32 * short  # 16 times as much, squared 256


@pytest.mark.usefixtures("grids")
def test_meshes_that_are_joined_are_the_same_one_for_all_tensors() -> None:
    held = [
        {f"w{n}": OnGrid(whole(4, 4), grid_of((2,), 0, ranks=(rank // 2 * 2, rank // 2 * 2 + 1)), rank) for n in (0, 1)}
        for rank in range(4)
    ]
    ranks = Ranks(4)
    ranks.exchange(held)  # type: ignore[arg-type]
    one, other = (ranks.agreement.shards.sharding_of(f"w{n}") for n in (0, 1))
    assert isinstance(one, MeshSharding) and isinstance(other, MeshSharding)
    assert one.grid is other.grid and one.grid.ranks == (0, 1, 2, 3)
