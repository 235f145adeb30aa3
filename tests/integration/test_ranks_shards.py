"""Sharded states of real ranks: one checkpoint, every byte stored once, equal to the full state bit for bit."""

from __future__ import annotations

import itertools
import os
import pathlib
import subprocess
import sys
from typing import Any

import overlapping
import pytest
import rank_processes
import real_worker
import states
import torch
from distributed_calls import DistributedCalls
from real_worker import DEADLINE_S
from sharded_samples import full
from torch import nn

import asyncckpt
from asyncckpt import AsyncCheckpointer, FlatShard, ShardedSlice, SyncCheckpointer, describe_tp
from asyncckpt.errors import AsyncCkptError, ReplicaMismatchError, SaveFailedError

pytestmark = pytest.mark.filterwarnings("ignore")


def run(worker: real_worker.RealWorker, world_size: int, function: Any, *arguments: Any) -> Any:
    return rank_processes.run(world_size, function, *arguments, environ={"ASYNCCKPT_ENDPOINT": worker.endpoint})


class Model(nn.Module):
    """Odd sizes, so that shards are uneven, and a tensor with fewer rows than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 22), nn.Linear(22, 7, bias=False)
        self.norm = nn.LayerNorm(7)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(self.first(x).relu())) * self.scale


def mesh_of(*shape: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=("a", "b", "c")[: len(shape)])


def parallel(kind: str) -> nn.Module:
    """The model, laid out over all ranks."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model: nn.Module = Model()
    if kind == "FSDP2":
        fully_shard(model)
    elif kind == "HSDP":
        fully_shard(model, mesh=mesh_of(2, 2))
    elif kind in ("TP", "FSDP2 x TP"):
        whole = mesh_of(2) if kind == "TP" else mesh_of(2, 2)
        tp = whole if kind == "TP" else whole["b"]
        parallelize_module(model, tp, {"first": ColwiseParallel(), "second": RowwiseParallel()})
        if kind == "FSDP2 x TP":
            fully_shard(model, mesh=whole["a"])
    return model


def trains(rank: int, kind: str, root: str) -> Any:
    model = parallel(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    with AsyncCheckpointer() as checkpointer:
        checkpointer.attach(optimizer)
        for step in (1, 2, 3):
            model(torch.randn(4, 10, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:  # all counters are one then, which is not taken for a replica at once
                continue
            state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": step}
            handle = checkpointer.save(state, f"{root}/step-{step}")
            expected = full({"model": dict(state["model"]), "optim": state["optim"]})  # the copies may still run
            assert handle.written.exception(DEADLINE_S) is None
    return expected if rank == 0 else None


@pytest.mark.parametrize(("kind", "world_size"), [("FSDP2", 2), ("TP", 2), ("HSDP", 4), ("FSDP2 x TP", 4)])
def test_a_sharded_model_and_its_optimizer_are_stored_once_and_load_whole(
    kind: str, world_size: int, tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker
) -> None:
    expected = run(shared_worker, world_size, trains, kind, str(tmp_path))[0]
    found = asyncckpt.load(tmp_path / "step-3", keys=["model", "optim"])
    states.assert_same({**found, "model": dict(found["model"])}, expected)
    assert stored_nbytes(tmp_path / "step-3") == whole_nbytes(expected)


def counts_calls(rank: int, root: str) -> tuple[dict[str, int], set[str]]:
    """Count what reaches torch.distributed, in any of our threads too, during three later saves."""
    calls = DistributedCalls()
    model = parallel("FSDP2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):  # after one step its counters are ones, and the ranks meet for these once more
        model(torch.randn(4, 10)).square().mean().backward()
        optimizer.step()
    large = torch.arange(12.0).view(6, 2)
    kept = [
        {"model": dict(model.state_dict()), "optim": optimizer.state_dict(), "n": torch.arange(3.0) + s}
        for s in range(4)
    ]
    for state in kept:
        state["slice"] = ShardedSlice(large[3 * rank : 3 * rank + 3], (6, 2), (3 * rank, 0))
    kept[3]["new"] = kept[3]["model"]["first.weight"]
    kept[3]["other"] = model.first.bias.detach()  # type: ignore[union-attr,operator]
    overlapping.copy_all_behind()
    with AsyncCheckpointer() as checkpointer:
        checkpointer.attach(optimizer)
        assert checkpointer.save(kept[0], f"{root}/step-0").written.exception(DEADLINE_S) is None
        with calls.counted():
            for step in (1, 2, 3):
                assert checkpointer.save(kept[step], f"{root}/step-{step}").written.exception(DEADLINE_S) is None
    return dict(calls.found), calls.threads


def test_after_the_first_save_of_a_sharded_state_nothing_calls_torch_distributed(
    tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker
) -> None:
    for found, threads in run(shared_worker, 2, counts_calls, str(tmp_path)):
        assert found == {} and {"MainThread", "asyncckpt-client", overlapping.COPIER} <= threads


def overlaps(rank: int, root: str) -> tuple[list[tuple[set[int], set[int]]], int, bool]:
    """Say which tensors each save has copied, which of them behind the training, how many there are, and whether what
    was saved is what was there at save()."""
    from asyncckpt.staging.overlap import Overlap

    model = parallel("FSDP2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.randn(4, 10)).square().mean().backward()
    optimizer.step()
    found: list[tuple[set[int], set[int]]] = []
    n_tensors: list[int] = []
    choose_deferred = Overlap.choose_deferred

    def spy(self: Any, tensors: Any, among: Any) -> Any:
        numbers, owners = choose_deferred(self, tensors, among)
        found.append((set(among), set(numbers)))
        n_tensors[:] = [len(tensors)]
        return numbers, owners

    overlapping.copy_all_behind()
    Overlap.choose_deferred = spy  # type: ignore[method-assign]
    same = True
    with AsyncCheckpointer(overlap_check="hash") as checkpointer:
        checkpointer.attach(optimizer)
        for step in range(3):
            model(torch.randn(4, 10)).square().mean().backward()
            expected = full(dict(model.state_dict()))
            handle = checkpointer.save({"model": model, "optim": optimizer}, f"{root}/step-{step}")
            optimizer.step()
            assert handle.written.exception(DEADLINE_S) is None
            loaded = asyncckpt.load(f"{root}/step-{step}", keys=["model"])["model"]
            same = same and all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    Overlap.choose_deferred = choose_deferred  # type: ignore[method-assign]
    return found, n_tensors[0], same


def test_what_an_fsdp2_optimizer_owns_is_copied_behind_the_training(
    tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker
) -> None:
    (zero, n_tensors, zero_same), (one, _, one_same) = run(shared_worker, 2, overlaps, str(tmp_path))
    assert zero_same and one_same
    for saves in (zero, one):
        assert [behind for _, behind in saves] == [copied for copied, _ in saves], (
            "nothing is copied before save() ends"
        )
    # A rank copies no empty shards, and of the counters, once the ranks have agreed on them, those that it writes.
    for (zeros, _), (ones, _) in zip(zero, one, strict=True):
        assert zeros | ones == set(range(n_tensors))


def by_hand(rank: int) -> dict[str, Any]:
    whole = torch.arange(35.0 * 4).view(35, 4)
    column = describe_tp({"w": whole[:, 2 * rank : 2 * rank + 2]}, {"w": (35, 4)}, tp_rank=rank, tp_size=2)["w"]
    flat, cut = torch.arange(60.0), (0, 23, 60)
    return {
        "column": column,
        "row": ShardedSlice(whole[20 * rank : 20 + 15 * rank], (35, 4), (20 * rank, 0)),
        "flat": FlatShard(flat[cut[rank] : cut[rank + 1]], (3, 4, 5), cut[rank]),
        "copy": ShardedSlice(whole, (35, 4), (0, 0), replica_id=rank),
    }


def saves_by_hand(rank: int, root: str, hole: bool, sync: bool) -> str:
    state = by_hand(rank)
    if hole and rank:
        del state["flat"]
    if sync:
        with SyncCheckpointer() as synchronous:
            try:
                synchronous.save(state, f"{root}/step-1")
            except SaveFailedError as caught:
                return f"{caught.code} {caught}"
        return ""
    with AsyncCheckpointer() as checkpointer:
        error = checkpointer.save(state, f"{root}/step-1").written.exception(DEADLINE_S)
    return "" if error is None else f"{error.code} {error}"  # type: ignore[attr-defined]


@pytest.mark.parametrize("sync", [False, True])
def test_slices_and_flat_ranges_by_hand_are_joined(
    sync: bool, tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker
) -> None:
    assert run(shared_worker, 2, saves_by_hand, str(tmp_path), False, sync) == ["", ""]
    whole = torch.arange(35.0 * 4).view(35, 4)
    expected = {"column": whole, "row": whole, "flat": torch.arange(60.0).view(3, 4, 5), "copy": whole}
    found = asyncckpt.load(tmp_path / "step-1")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert stored_nbytes(tmp_path / "step-1") == whole_nbytes(expected)


@pytest.mark.parametrize("sync", [False, True])
def test_a_hole_ends_the_save_on_all_ranks_by_name(
    sync: bool, tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker
) -> None:
    for text in run(shared_worker, 2, saves_by_hand, str(tmp_path), True, sync):
        assert text.startswith("coverage") and "'flat'" in text and "23 of 60 elements" in text
    assert not (tmp_path / "step-1" / "manifest.json").exists()


def diverges(rank: int, root: str) -> list[str]:
    from torch.distributed.tensor import Replicate, distribute_tensor

    weight = distribute_tensor(torch.arange(8.0), mesh_of(2), [Replicate()])
    found = []
    with AsyncCheckpointer() as checkpointer:
        for step in range(2):
            error = checkpointer.save({"w": weight}, f"{root}/step-{step}").written.exception(DEADLINE_S)
            found.append("" if error is None else f"{type(error).__name__} {error.fqn} {error}")  # type: ignore[attr-defined]
            weight._local_tensor[rank] = -1.0
    return found


def test_a_replica_of_a_mesh_that_diverges_fails_its_save_and_says_what_to_do(
    tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker
) -> None:
    for first, second in run(shared_worker, 2, diverges, str(tmp_path)):
        assert first == ""
        assert second.startswith(f"{ReplicaMismatchError.__name__} w ") and "synchronise it" in second


def overlaps_later(rank: int, root: str) -> list[str]:
    """Add slices that overlap after the first save, and correct them in the end."""
    whole, found = torch.arange(12.0).view(6, 2), []
    with AsyncCheckpointer() as checkpointer:
        for step in range(14):
            state: dict[str, Any] = {"w": whole}
            first = 0 if rank == 0 else 2 if 0 < step < 10 else 3
            if step:
                state["s"] = ShardedSlice(whole[first : first + 3], (6, 2), (first, 0))
            error = checkpointer.save(state, f"{root}/step-{step}").written.exception(DEADLINE_S)
            found.append("" if error is None else f"{type(error).__name__}: {error}")
    return found


BOTH_BOXES = (
    ("SaveFailedError", "rank 0 stores [0:3,0:2] and rank 1 [2:5,0:2]"),
    ("OverlappingShardsError", "offsets [0, 0] sizes [3, 2] on rank 0", "offsets [2, 0] sizes [3, 2] on rank 1"),
)
"""As who commits says it, until the ranks have compared what is new; and as they say it from then on."""


def test_slices_that_come_to_overlap_fail_by_name_until_they_are_corrected(
    tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker
) -> None:
    for texts in run(shared_worker, 2, overlaps_later, str(tmp_path)):
        assert texts[0] == ""
        for text in texts[1:10]:
            assert "'s'" in text and any(all(part in text for part in parts) for parts in BOTH_BOXES), text
        assert texts[9].startswith("OverlappingShardsError")
        assert texts[10:] == [""] * 4
    assert torch.equal(asyncckpt.load(tmp_path / "step-13")["s"], torch.arange(12.0).view(6, 2))


def lies_outside(rank: int, root: str, sync: bool) -> list[tuple[str, dict[str, Any]]]:
    """Rank 1's slice lies outside of its tensor in the first save, and in the third."""
    whole, found = torch.arange(12.0).view(6, 2), []
    with SyncCheckpointer() if sync else AsyncCheckpointer() as checkpointer:
        for step in range(4):
            first = 3 * rank + (rank if step % 2 == 0 else 0)
            state = {"model": {"s": ShardedSlice(whole[3 * rank : 3 * rank + 3], (6, 2), (first, 0))}}
            try:
                handle = checkpointer.save(state, f"{root}/step-{step}")
                if handle is not None:
                    handle.written.result(DEADLINE_S)
                found.append(("", {}))
            except AsyncCkptError as error:
                found.append((f"{error.wire_code} {error}", error.facts()))
    return found


@pytest.mark.parametrize("sync", [False, True])
def test_a_slice_outside_of_its_tensor_is_named_with_both_boxes_and_ends_the_save_on_all_ranks(
    tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker, sync: bool
) -> None:
    others, own = run(shared_worker, 2, lies_outside, str(tmp_path), sync)
    boxes = ["offsets [4, 0] sizes [3, 2]", "offsets [0, 0] sizes [6, 2]"]
    for step in (0, 2):
        text, facts = own[step]
        assert text.startswith("shard_out_of_range") and (facts["fqn"], facts["boxes"]) == ("model.s", boxes)
        text, facts = others[step]
        assert facts["rank"] == 1 and "model.s" in text and "[4, 0]" in text, text
        assert not (tmp_path / f"step-{step}").exists() or not os.listdir(tmp_path / f"step-{step}")
    for step in (1, 3):
        assert own[step][0] == others[step][0] == ""
        assert torch.equal(asyncckpt.load(tmp_path / f"step-{step}")["model"]["s"], torch.arange(12.0).view(6, 2))


def moving(rank: int, kind: str, step: int) -> dict[str, Any]:
    """What a rank holds of tensors that lie otherwise from step 2 on."""
    whole, state, later = torch.arange(12.0).view(6, 2), {"plain": torch.ones(3) * step}, step >= 2
    if kind == "to another rank" and rank == int(later):
        state["w"] = ShardedSlice(whole, (6, 2), (0, 0))
    if kind == "a copy less" and not (rank and later):
        state |= {f"w{n}": ShardedSlice(whole + n, (6, 2), (0, 0), replica_id=rank) for n in range(4)}
    if kind == "cut in two" and (later or rank == 0):
        rows = slice(3 * rank, 3 * rank + 3) if later else slice(0, 6)
        state["w"] = ShardedSlice(whole[rows], (6, 2), (rows.start, 0))
    if kind == "twice" and (step < 2 or rank == 0 or 12 <= step < 14):  # the copy goes, comes back and goes again
        state |= {f"w{n}": ShardedSlice(whole + n, (6, 2), (0, 0), replica_id=rank) for n in range(4)}
    return state


def saves_what_moves(rank: int, root: str, kind: str, sync: bool) -> list[str]:
    found = []
    with SyncCheckpointer() if sync else AsyncCheckpointer() as checkpointer:
        for step in range(24 if kind == "twice" else 14):
            try:
                handle = checkpointer.save(moving(rank, kind, step), f"{root}/step-{step}")
                if handle is not None:
                    handle.written.result(DEADLINE_S)
                found.append("")
            except AsyncCkptError as error:
                found.append(f"{error.wire_code} {error}")
    return found


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("kind", ["to another rank", "a copy less", "cut in two", "twice"])
def test_shards_that_a_rank_holds_no_longer_are_agreed_on_anew(
    kind: str, sync: bool, tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker
) -> None:
    for texts in run(shared_worker, 2, saves_what_moves, str(tmp_path), kind, sync):
        n_moves = 3 if kind == "twice" else 1
        assert texts[:2] == ["", ""] and sum(map(bool, texts)) <= n_moves, texts  # one failed save costs one save
    found = asyncckpt.load(tmp_path / f"step-{len(texts) - 1}")
    for n, name in enumerate(sorted(found.keys() - {"plain"})):
        assert torch.equal(found[name], torch.arange(12.0).view(6, 2) + n)


def stages(rank: int, root: str) -> str:
    """Pipeline stages: other keys on each rank, and an expert of each beside shared dense weights."""
    from torch.distributed.tensor import Shard, distribute_tensor

    dense = distribute_tensor(torch.arange(30.0).view(5, 6), mesh_of(2), [Shard(0)])
    state = {
        "dense": dense,
        f"stage.{rank}": {"w": torch.full((4, 4), float(rank))},
        "expert": {rank: torch.ones(3) * rank},
    }
    with AsyncCheckpointer() as checkpointer:
        return str(checkpointer.save(state, f"{root}/step-1").written.exception(DEADLINE_S))


def test_stages_and_experts_with_keys_of_their_own_make_one_checkpoint(
    tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker
) -> None:
    assert run(shared_worker, 2, stages, str(tmp_path)) == ["None", "None"]
    found = asyncckpt.load(tmp_path / "step-1")
    assert torch.equal(found["dense"], torch.arange(30.0).view(5, 6))
    assert [float(found[f"stage.{n}"]["w"].mean()) for n in (0, 1)] == [0.0, 1.0]
    assert [float(found["expert"][n][0]) for n in (0, 1)] == [0.0, 1.0]


def odd_meshes(rank: int, root: str) -> dict[str, Any]:
    """Every kind of placement on meshes of one to three dimensions, uneven and empty shards, and the legacy type."""
    from torch.distributed._shard.sharded_tensor import Shard as OldShard
    from torch.distributed._shard.sharded_tensor import init_from_local_shards
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    meshes = [(mesh_of(4), 1), (mesh_of(2, 2), 2), (mesh_of(2, 1, 2), 3)]
    kinds = [Replicate(), Shard(0), Shard(1), _StridedShard(0, split_factor=2)]
    state: dict[str, Any] = {}
    whole: dict[str, Any] = {}
    for n, (rows, columns) in enumerate([(7, 3), (1, 2), (0, 5), (13, 4)]):
        for mesh, n_dims in meshes:
            for placements in itertools.product(kinds, repeat=n_dims):
                name = f"{n}.{n_dims}." + "".join(str(kinds.index(p)) for p in placements)
                whole[name] = torch.arange(float(rows * columns)).view(rows, columns)
                if any(type(p) is _StridedShard for p in placements):
                    local = whole[name]
                    for d, placement in enumerate(placements):
                        if type(placement) is not Replicate:
                            split = placement._split_tensor(local, mesh.size(d), with_padding=False)[0]
                            local = split[mesh.get_coordinate()[d]]
                    size = {"shape": whole[name].shape, "stride": whole[name].stride()}
                    state[name] = DTensor.from_local(local.contiguous(), mesh, placements, run_check=False, **size)
                else:
                    state[name] = distribute_tensor(whole[name], mesh, placements)
    old = OldShard.from_tensor_and_offsets(torch.full((2, 3), float(rank)), [2 * rank, 0], rank)
    state["old"], whole["old"] = init_from_local_shards([old], 8, 3), torch.arange(4.0).repeat_interleave(6).view(8, 3)
    with AsyncCheckpointer() as checkpointer:
        for step in (1, 2):
            assert checkpointer.save(state, f"{root}/step-{step}").written.exception(DEADLINE_S) is None
    return whole


def test_every_placement_on_every_mesh_is_stored_once(
    tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker
) -> None:
    whole = run(shared_worker, 4, odd_meshes, str(tmp_path))[0]
    for step in (1, 2):
        found = asyncckpt.load(tmp_path / f"step-{step}")
        assert set(found) == set(whole)
        assert [name for name, tensor in whole.items() if not torch.equal(found[name], tensor)] == []
        assert stored_nbytes(tmp_path / f"step-{step}") == whole_nbytes(whole)


def test_whoever_has_no_shards_does_not_import_dtensor() -> None:
    code = "import asyncckpt, torch; asyncckpt.ShardedSlice; from asyncckpt.state_dict.flatten import flatten; "
    code += "import sys; before = set(sys.modules); flatten({'w': torch.ones(2), 'x': ()}); "
    code += "print([n for n in set(sys.modules) - before if 'distributed' in n])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "[]"


def whole_nbytes(state: Any) -> int:
    if isinstance(state, torch.Tensor):
        return state.numel() * state.element_size()
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    return sum(map(whole_nbytes, values))


def stored_nbytes(path: pathlib.Path) -> int:
    """Bytes of tensors in the shard files, from their headers."""
    import json

    total = 0
    for file in path.glob("*.safetensors"):
        data = file.read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        total += sum(e["data_offsets"][1] - e["data_offsets"][0] for n, e in header.items() if n != "__metadata__")
    return total
