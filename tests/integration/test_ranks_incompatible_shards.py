"""DTensors of a subclass whose context, or uncut component, differs between ranks: who may read which parts of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rank_processes
import torch
import torch.distributed as dist
from real_worker import RealWorker

import asyncckpt
from asyncckpt.config import RankInfo
from asyncckpt.errors import PerRankUnavailableError
from asyncckpt.format.state_tree import composite_nodes, context_digest_of
from asyncckpt.staging import save_request
from asyncckpt.storage.contents import read_contents
from asyncckpt.storage.files import Files
from tests.composite_samples import Sample, same

ROWS, COLUMNS = 12, 8


class Scaled(Sample):
    """Codes whose scale is in the context, as the device that they were made on; any slice is possible."""

    components = ("codes",)
    context = ("scale", "made_on")

    def slice(self, dim: int, start: int, end: int) -> Scaled:
        return Scaled(self.codes.narrow(dim, start, end - start), self.scale, self.made_on)


class OwnScale(Sample):
    """Codes with one scale for all elements, as a tensor."""

    components = ("codes", "scale")
    context = ("made_on",)

    def slice(self, dim: int, start: int, end: int) -> OwnScale:
        return OwnScale(self.codes.narrow(dim, start, end - start), self.scale, self.made_on)


class MaybeScaled(Sample):
    """Codes with a scale, or with none."""

    components = ("codes", "scale")

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes"] if self.scale is None else ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, tensors: Any, context: Any, size: Any, stride: Any) -> MaybeScaled:
        return cls(tensors["codes"], tensors.get("scale"))

    def changed(self, change: Any) -> MaybeScaled:
        return MaybeScaled(change(self.codes), None if self.scale is None else change(self.scale))

    def slice(self, dim: int, start: int, end: int) -> MaybeScaled:
        return MaybeScaled(self.codes.narrow(dim, start, end - start), self.scale)


class Tabled(Sample):
    """Codes with a table that is never cut."""

    components = ("codes", "table")
    context = ("scale",)

    def slice(self, dim: int, start: int, end: int) -> Tabled:
        return Tabled(self.codes.narrow(dim, start, end - start), self.table, self.scale)


class RowScaled(Sample):
    """Codes with a scale for each row."""

    components = ("codes", "scale")

    def slice(self, dim: int, start: int, end: int) -> RowScaled:
        codes = self.codes.narrow(dim, start, end - start)
        return RowScaled(codes, self.scale if dim else self.scale[start:end])


NAME = f"{Scaled.__module__}.Scaled"
UNLIKE = rf"'f', a {NAME}, cannot be joined: rank 0 has saved it with another class, context or components than"


def _codes(seed: int) -> torch.Tensor:
    return torch.arange(float(ROWS * COLUMNS)).reshape(ROWS, COLUMNS) + seed


def _scaled(codes: torch.Tensor, scale: float) -> Scaled:
    return Scaled(codes.clone(), scale, torch.device("cuda", dist.get_rank() if dist.is_initialized() else 0))


def _own_scale(codes: torch.Tensor, scale: float) -> OwnScale:
    return OwnScale(codes.clone(), torch.tensor(scale), torch.device("cuda", dist.get_rank()))


def _maybe_scaled(codes: torch.Tensor, scale: float) -> MaybeScaled:
    return MaybeScaled(codes.clone(), torch.tensor(scale) if scale else None)


def _row_scaled(codes: torch.Tensor, scale: float) -> RowScaled:
    return RowScaled(codes.clone(), torch.full(codes.shape[:1], scale))


def _placed(seed: int, scale: float, placements: str = "rows", make: Any = _scaled, mesh: Any = None) -> Any:
    """Return a DTensor of which this rank's part has a scale of its own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    kinds = {"rows": [Shard(0)], "columns": [Shard(1)], "all": [Replicate()], "hsdp": [Replicate(), Shard(0)]}
    mesh = mesh or init_device_mesh("cpu", (2, 2) if placements == "hsdp" else (dist.get_world_size(),))
    codes = _codes(seed)
    for at, kind, n in zip(mesh.get_coordinate(), kinds[placements], mesh.mesh.shape, strict=True):
        if isinstance(kind, Shard):
            codes = dict(enumerate(codes.chunk(n, kind.dim))).get(at, codes.narrow(kind.dim, 0, 0))
    shape, stride = torch.Size((ROWS, COLUMNS)), (COLUMNS, 1)
    local = make(codes, scale) if codes.numel() else codes.clone()
    return DTensor.from_local(local, mesh, kinds[placements], run_check=False, shape=shape, stride=stride)


def _save(path: str, state: Any) -> None:
    with asyncckpt.SyncCheckpointer(fsync=False) as checkpointer:
        checkpointer.save(state, path)


def _save_scales(rank: int, path: str, scales: list[float], placements: str = "rows", make: Any = _scaled) -> None:
    _save(path, {"f": _placed(0, scales[rank], placements, make), "x": torch.ones(3)})


def _loaded(rank: int, path: str, scales: list[float], placements: str, make: Any, **options: Any) -> str:
    """Load in place. Returns whether this rank got its part, or the error, if it has left everything as it was."""
    target = {"f": _placed(50, scales[rank], placements, make), "x": torch.zeros(3)}
    try:
        asyncckpt.load(path, target, **options)
    except PerRankUnavailableError as error:
        assert same(target["f"]._local_tensor, _placed(50, scales[rank], placements, make)._local_tensor)
        assert target["x"].tolist() == [0, 0, 0] and error.keys == ["f"]
        return str(error)
    assert target["x"].tolist() == [1, 1, 1]
    return str(same(target["f"]._local_tensor, _placed(0, scales[rank], placements, make)._local_tensor))


def _load_in_place(
    rank: int, path: str, scales: list[float], placements: str = "rows", make: Any = _scaled, reads: str = "each"
) -> str:
    return _loaded(rank, path, scales, placements, make, redundant_reads=reads)


def _register() -> None:
    for kind in (Scaled, OwnScale, MaybeScaled, Tabled, RowScaled):
        asyncckpt.register_subclass(kind)


def _load_new(rank: int, path: str) -> str:
    _register()
    assert asyncckpt.load(path, keys="x")["x"].tolist() == [1, 1, 1]
    with pytest.raises(PerRankUnavailableError) as caught:
        asyncckpt.load(path)
    return str(caught.value)


@pytest.fixture
def unlike(tmp_path: Path) -> str:
    """A checkpoint of two ranks with unequal contexts."""
    path = str(tmp_path / "c")
    rank_processes.run(2, _save_scales, path, [1.0, 2.0])
    return path


def _matches(pattern: str, found: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        raise ValueError(found)


def test_each_rank_gets_back_its_own_part(unlike: str) -> None:
    assert rank_processes.run(2, _load_in_place, unlike, [1.0, 2.0]) == ["True", "True"]
    assert rank_processes.run(2, _load_in_place, unlike, [1.0, 2.0], "rows", _scaled, "broadcast") == ["True", "True"]


def test_parts_with_unlike_contexts_make_no_new_tensor(unlike: str) -> None:
    _matches(UNLIKE, rank_processes.run(1, _load_new, unlike)[0])
    own, other = rank_processes.run(2, _load_new, unlike)
    _matches(UNLIKE, own)
    _matches("rank 1 has saved it with another class, context or components than rank 0", other)


@pytest.mark.parametrize("reads", ["each", "broadcast"])
@pytest.mark.parametrize("placements", ["columns", "all"])
def test_parts_with_unlike_contexts_are_not_joined_for_another_placement(
    placements: str, reads: str, unlike: str
) -> None:
    for found in rank_processes.run(2, _load_in_place, unlike, [1.0, 2.0], placements, _scaled, reads):
        _matches("nothing was changed. Load it with 2 ranks", found)


def test_parts_with_unlike_contexts_are_not_joined_on_one_rank(unlike: str) -> None:
    _matches(UNLIKE, rank_processes.run(1, _load_in_place, unlike, [1.0])[0])


def test_a_part_with_the_context_of_the_tree_may_be_read(unlike: str) -> None:
    with asyncckpt.open_checkpoint(unlike) as opened:
        with pytest.raises(PerRankUnavailableError, match=UNLIKE):
            opened.tensor("f.codes")
        with pytest.raises(PerRankUnavailableError, match=UNLIKE):
            opened.tensor("f.codes", slice(None, None, 5), mmap=True)
        assert torch.equal(opened.tensor("f.codes", slice(0, 6)), _codes(0)[:6])
        assert torch.equal(opened.tensor("f.codes", (slice(0, 10, 5), 3)), _codes(0)[:10:5, 3])
        assert torch.equal(opened.tensor("f.codes", slice(6, 6)), _codes(0)[6:6])
    with asyncckpt.open_checkpoint(unlike, rank_info=RankInfo(1, 2)) as opened:
        with pytest.raises(PerRankUnavailableError, match="rank 1 has saved it with another class"):
            opened.tensor("f.codes", 0)
        assert torch.equal(opened.tensor("f.codes", slice(6, 12)), _codes(0)[6:])


def _plan(rank: int, path: str, placements: str) -> tuple[tuple[str, ...], bool]:
    plan = asyncckpt.plan_load(path, {"f": _placed(50, [1.0, 2.0][rank], placements), "x": torch.zeros(3)})
    return plan.unavailable, plan.fits


def test_a_plan_of_a_load_names_unlike_parts(unlike: str) -> None:
    assert rank_processes.run(2, _plan, unlike, "rows") == [((), True)] * 2
    assert rank_processes.run(2, _plan, unlike, "columns") == [(("f",), False)] * 2


@pytest.mark.parametrize("to", ["asyncckpt", "dcp", "torch", "safetensors", "hf"])
def test_parts_with_unlike_contexts_are_not_converted(to: str, unlike: str, tmp_path: Path) -> None:
    target = tmp_path / ("t.pt" if to == "torch" else "t.safetensors" if to == "safetensors" else "t")
    with pytest.raises(PerRankUnavailableError, match=UNLIKE):
        asyncckpt.convert(unlike, target, to=to)
    assert not target.exists()
    assert asyncckpt.convert(unlike, target, to=to, keys=["x"]).tensors == 1


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_parts_with_unlike_contexts_are_not_joined_for_stock_dcp(unlike: str) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    from asyncckpt.dcp import StorageReader

    target = {"f": {"codes": torch.zeros(ROWS, COLUMNS)}, "x": torch.zeros(3)}
    with pytest.raises(dcp.api.CheckpointException, match="has saved it with another class"):
        dcp.load(target, storage_reader=StorageReader(unlike), no_dist=True)
    assert not target["f"]["codes"].any() and not target["x"].any()


class Momentum(torch.optim.Optimizer):
    """Its state is a subclass, sharded like its parameter, with a scale for each rank."""

    def __init__(self, params: Any, scale: float) -> None:
        super().__init__(params, {"lr": 0.1})
        self._scale = scale

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"m": _placed(0, self._scale)}


def _optimizer(rank: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parameter = distribute_tensor(torch.zeros(ROWS, COLUMNS), mesh, [Shard(0)])
    return Momentum([torch.nn.Parameter(parameter)], 1.0 + rank)


def _save_optimizer(rank: int, path: str) -> None:
    optimizer = _optimizer(rank)
    optimizer.step()
    _save(path, {"optim": optimizer})


def _load_optimizer(rank: int, path: str) -> str:
    asyncckpt.register_subclass(Scaled)
    optimizer = _optimizer(rank)
    try:
        asyncckpt.load(path, {"optim": optimizer})
    except PerRankUnavailableError as error:
        assert not optimizer.state
        return str(error)
    (state,) = optimizer.state.values()
    return str(same(state["m"]._local_tensor, _placed(0, 1.0 + rank)._local_tensor))


def test_a_new_optimizer_gets_this_ranks_part_or_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    rank_processes.run(2, _save_optimizer, path)
    assert rank_processes.run(2, _load_optimizer, path) == ["True", "True"]
    for n in (1, 3):
        _matches(r"'optim.state.0.m', a .*Scaled, cannot be joined", rank_processes.run(n, _load_optimizer, path)[-1])


def test_an_uncut_component_of_each_rank_is_not_joined_with_parts_of_others(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    rank_processes.run(2, _save_scales, path, [1.0, 2.0], "rows", _own_scale)
    assert rank_processes.run(2, _load_in_place, path, [1.0, 2.0], "rows", _own_scale) == ["True", "True"]
    refused = rank_processes.run(2, _load_in_place, path, [1.0, 2.0], "columns", _own_scale)
    refused += rank_processes.run(1, _load_in_place, path, [1.0], "rows", _own_scale)
    refused += rank_processes.run(2, _load_new, path)
    for found in refused:
        _matches(r"'f', a .*OwnScale, .* its component 'f.scale', which is not sharded, differs between", found)
    with asyncckpt.open_checkpoint(path) as opened:
        with pytest.raises(PerRankUnavailableError, match=r"'f\.scale', which is not sharded,"):
            opened.tensor("f.codes")
        assert opened.tensor("f.scale@rank1").item() == 2
    with pytest.raises(PerRankUnavailableError, match=r"'f\.scale', which is not sharded,"):
        asyncckpt.convert(path, tmp_path / "t.pt", to="torch")


@pytest.mark.parametrize("scales", [[2.0, 0.0], [0.0, 2.0]])
def test_parts_with_unlike_components_are_not_joined(scales: list[float], tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    rank_processes.run(2, _save_scales, path, scales, "rows", _maybe_scaled)
    assert rank_processes.run(2, _load_in_place, path, scales, "rows", _maybe_scaled) == ["True", "True"]
    found = rank_processes.run(1, _load_new, path) + rank_processes.run(2, _load_new, path)
    found += rank_processes.run(1, _load_in_place, path, scales, "rows", _maybe_scaled)
    for one in found:
        _matches("'f', a .*MaybeScaled, cannot be joined: rank . has saved it with another class", one)


def _save_a_scale_later(rank: int, path: str, scales: list[float], endpoint: str) -> None:
    """Rank 1 has no scale when the ranks meet first."""
    with asyncckpt.AsyncCheckpointer(endpoint=endpoint, fsync=False) as checkpointer:
        for n, scale in enumerate([0.0 if rank else scales[0], scales[rank]]):
            f = _placed(n - 1, scale, make=_maybe_scaled)
            checkpointer.save({"f": f, "x": torch.ones(3)}, f"{path}{n}").written.result(60)


def _load_one(rank: int, path: str) -> tuple[bool, float]:
    _register()
    found = asyncckpt.load(path)["f"]
    return torch.equal(found.codes, _codes(0)), found.scale.item()


@pytest.mark.parametrize("scale", [2.0, 9.0])
def test_a_component_of_one_rank_is_compared_with_what_another_rank_has_for_all(
    scale: float, shared_worker: RealWorker, tmp_path: Path
) -> None:
    path = str(tmp_path / "c")
    rank_processes.run(2, _save_a_scale_later, path, [2.0, scale], shared_worker.endpoint)
    for rank in range(2):
        with asyncckpt.open_checkpoint(path + "1", rank_info=RankInfo(rank, 2)) as opened:
            assert opened.tensors["f.scale"].stored_name == ["f.scale", "f.scale@rank1"][rank]
            if scale == 2:
                assert torch.equal(opened.tensor("f.codes"), _codes(0))
                continue
            with pytest.raises(PerRankUnavailableError, match=r"'f\.scale', which is not sharded, differs between"):
                opened.tensor("f.codes")
    if scale == 2:
        assert rank_processes.run(1, _load_one, path + "1") == [(True, 2.0)]
    else:
        _matches("'f.scale', which is not sharded,", rank_processes.run(1, _load_new, path + "1")[0])


def _sharing_codes(rank: int, order: str) -> Any:
    from torch.distributed.tensor import DTensor

    first = _placed(0, 1.0 + rank)
    local = OwnScale(first._local_tensor.codes, torch.tensor(1.0), None)
    other = DTensor.from_local(
        local, first.device_mesh, first.placements, run_check=False, shape=first.shape, stride=first.stride()
    )
    found = dict(zip(order, (first, other), strict=True))
    return {name: found[name] for name in "ab"}


def _save_sharing_codes(rank: int, path: str, order: str) -> None:
    _save(path, {**_sharing_codes(rank, order), "x": torch.ones(3)})


def _load_sharing_codes(rank: int, path: str, order: str) -> bool:
    target = {**_sharing_codes(rank, order), "x": torch.zeros(3)}
    target["a"]._local_tensor.codes.zero_()
    asyncckpt.load(path, target)
    return all(same(target[name]._local_tensor, was._local_tensor) for name, was in _sharing_codes(rank, order).items())


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_unlike_parts_are_not_joined_if_another_tensor_has_the_same_codes(order: str, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    rank_processes.run(2, _save_sharing_codes, path, order)
    with asyncckpt.open_checkpoint(path) as opened:
        assert opened.tensors["b.codes"].stored_name == "a.codes"
    _matches(f"{order[0]!r}, a {NAME}, cannot be joined: rank 0", rank_processes.run(1, _load_new, path)[0])
    assert rank_processes.run(2, _load_sharing_codes, path, order) == [True, True]


@pytest.mark.parametrize("placements", ["rows", "hsdp"])
def test_parts_that_are_too_small_to_know_how_they_are_cut_are_each_ranks_own(placements: str, tmp_path: Path) -> None:
    path, n = str(tmp_path / "c"), 4 if placements == "hsdp" else 2
    scales = [1.0] * n
    rank_processes.run(n, _with_two_rows, _save_scales, path, scales, placements, _row_scaled)
    found = rank_processes.run(n, _with_two_rows, _load_in_place, path, scales, placements, _row_scaled)
    assert found == ["True"] * n
    for one in rank_processes.run(1, _load_new, path) + rank_processes.run(n, _load_new, path):
        _matches("'f', a .*RowScaled, .*: of rank . it is not known which components are sharded", one)


# ---- What differs and does not matter


def _load_two_rows(rank: int, path: str) -> bool:
    _register()
    found = asyncckpt.load(path)["f"]
    return torch.equal(found.codes, _codes(0)) and bool((found.scale == 1.0).all())


@pytest.mark.parametrize(("make", "placements"), [(_own_scale, "rows"), (_row_scaled, "columns"), (_row_scaled, "all")])
def test_small_parts_are_joined_if_it_is_known_how_they_are_cut(make: Any, placements: str, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    rank_processes.run(2, _with_two_rows, _save_scales, path, [1.0, 1.0], placements, make)
    assert rank_processes.run(1, _with_two_rows, _load_two_rows, path) == [True]


def _save_sharing_a_table(rank: int, path: str) -> None:
    table = torch.arange(16.0)
    state = {name: _placed(n, 1.0 + n, make=lambda *one: Tabled(one[0], table, one[1])) for n, name in enumerate("ab")}
    _save(path, {**state, "x": torch.ones(3), **({} if rank else {"large": torch.ones(4096)})})


def _load_sharing_a_table(rank: int, path: str) -> bool:
    _register()
    found = asyncckpt.load(path)
    parts = [Tabled(_codes(n), torch.arange(16.0), 1.0 + n) for n in range(2)]
    return found["a"].table is found["b"].table and same([found["a"], found["b"]], parts)


def test_tensors_with_unlike_contexts_may_share_a_table(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    rank_processes.run(2, _save_sharing_a_table, path)
    with asyncckpt.open_checkpoint(path) as opened:
        assert [rank for rank, _ in opened._contents.tensors["a.table"].chunks] == [1]
    assert rank_processes.run(1, _load_sharing_a_table, path) == [True]


def _load_whole(rank: int, path: str, make: Any) -> bool:
    asyncckpt.register_subclass(Scaled)
    asyncckpt.register_subclass(OwnScale)
    return same(asyncckpt.load(path)["f"], make(_codes(0), 1.0))


@pytest.mark.parametrize("make", [_scaled, _own_scale])
def test_devices_in_contexts_may_differ_between_replicas_and_parts(make: Callable[..., Any], tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    rank_processes.run(4, _save_scales, path, [1.0] * 4, "hsdp", make)
    assert rank_processes.run(4, _load_in_place, path, [1.0] * 4, "hsdp", make) == ["True"] * 4
    assert rank_processes.run(4, _load_in_place, path, [1.0] * 4, "columns", make) == ["True"] * 4
    assert rank_processes.run(1, _load_whole, path, make) == [True]
    asyncckpt.convert(path, tmp_path / "t", to="asyncckpt")
    assert rank_processes.run(1, _load_whole, str(tmp_path / "t"), make) == [True]


def test_each_replica_gets_its_part_where_parts_differ(tmp_path: Path) -> None:
    path, scales = str(tmp_path / "c"), [1.0, 2.0, 1.0, 2.0]
    for make in (_scaled, _own_scale):
        rank_processes.run(4, _save_scales, path + make.__name__, scales, "hsdp", make)
        assert rank_processes.run(4, _load_in_place, path + make.__name__, scales, "hsdp", make) == ["True"] * 4


def _save_behind(rank: int, path: str, endpoint: str) -> None:
    with asyncckpt.AsyncCheckpointer(endpoint=endpoint, fsync=False) as checkpointer:
        checkpointer.save({"f": _placed(0, 1.0, make=_own_scale), "x": torch.ones(3)}, path).written.result(60)


def test_own_components_that_are_equal_fit_together(shared_worker: RealWorker, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    rank_processes.run(2, _save_behind, path, shared_worker.endpoint)
    with asyncckpt.open_checkpoint(path) as opened:  # the ranks have not compared it yet
        assert opened.tensors["f.scale"].stored_name == "f.scale@rank0"
        assert torch.equal(opened.tensor("f.codes"), _codes(0))
    assert rank_processes.run(1, _load_whole, path, _own_scale) == [True]
    assert rank_processes.run(2, _load_in_place, path, [1.0, 1.0], "columns", _own_scale) == ["True", "True"]
    asyncckpt.convert(path, tmp_path / "t", to="asyncckpt")
    assert rank_processes.run(1, _load_whole, str(tmp_path / "t"), _own_scale) == [True]


def _load_swapped(rank: int, path: str, scales: list[float]) -> bool:
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", [1, 0, 2])  # ranks 0 and 1 have changed places
    target = {"f": _placed(50, scales[rank], mesh=mesh)}
    asyncckpt.load(path, target)
    return same(target["f"]._local_tensor, _placed(0, scales[rank], mesh=mesh)._local_tensor)


def test_a_part_may_be_read_from_another_rank_with_the_same_context(tmp_path: Path) -> None:
    path, scales = str(tmp_path / "c"), [1.0, 1.0, 2.0]
    rank_processes.run(3, _save_scales, path, scales)
    assert rank_processes.run(3, _load_swapped, path, scales) == [True] * 3


def test_a_rank_that_has_stored_no_element_does_not_count(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    rank_processes.run(2, _save_scales, path, [1.0, 9.0], "all")
    with asyncckpt.open_checkpoint(path) as opened:
        assert [rank for rank, _ in opened._contents.tensors["f.codes"].chunks] == [0]
    assert rank_processes.run(1, _load_whole, path, _scaled) == [True]


def _with_two_rows(rank: int, function: Any, *arguments: Any) -> Any:
    globals()["ROWS"] = 2
    return function(rank, *arguments)


def test_a_rank_that_holds_no_element_of_unlike_parts_gets_back_what_it_had(tmp_path: Path) -> None:
    path, scales = str(tmp_path / "c"), [1.0, 2.0, 9.0]
    rank_processes.run(3, _with_two_rows, _save_scales, path, scales)
    assert rank_processes.run(3, _with_two_rows, _load_in_place, path, scales) == ["True"] * 3
    assert "rank 0 has saved it with another class" in rank_processes.run(1, _with_two_rows, _load_new, path)[0]
    for n in (2, 3):
        rank_processes.run(n, _with_two_rows, _save_optimizer, f"{path}{n}")
    assert rank_processes.run(3, _with_two_rows, _load_optimizer, path + "3") == ["True"] * 3
    first, second, third = rank_processes.run(3, _with_two_rows, _load_optimizer, path + "2")
    assert (first, third) == ("True", "True") and "rank 0 has saved it with another class" in second


def _save_without_digests(rank: int, path: str) -> None:
    save_request.ContextDigests.structure_of = lambda self, plan, leaves: plan.structure  # type: ignore[method-assign]
    _save_scales(rank, path, [1.0, 2.0])


def test_files_without_digests_are_read_as_before(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    rank_processes.run(2, _save_without_digests, path)
    assert rank_processes.run(1, _load_whole, path, _scaled) == [True]
    assert rank_processes.run(2, _load_in_place, path, [1.0, 2.0]) == ["True", "True"]
    assert rank_processes.run(2, _load_in_place, path, [1.0, 2.0], "columns") == ["True", "True"]


# ---- Saves


def _save_each(rank: int, path: str, scales: list[Any]) -> None:
    f = _placed(0, scales[0])
    with asyncckpt.SyncCheckpointer(fsync=False) as checkpointer:
        for n, f._local_tensor.scale in enumerate(scales):
            checkpointer.save({"f": f}, f"{path}/{n}")


def _digests(path: Path) -> list[bytes | None]:
    """Return the digests in a checkpoint, by rank."""
    contents = read_contents(str(path), Files())
    return [context_digest_of(node) for rank in contents.ranks for _, node in composite_nodes(rank.structure.tree)]


def test_a_context_that_is_equal_and_of_another_type_is_digested_again(tmp_path: Path) -> None:
    scales = [1, 1.0, True, 0.0, -0.0]
    rank_processes.run(2, _save_each, str(tmp_path), scales)
    assert len({tuple(_digests(tmp_path / str(n))) for n in range(len(scales))}) == len(scales)


def _save_often(rank: int, path: str, endpoint: str) -> list[int]:
    """Save three times, then with another context and again. Returns how often contexts were digested so far."""
    calls, counts, digest = [], [], save_request.context_digest
    save_request.context_digest = lambda raw, names: (calls.append(raw), digest(raw, names))[1]
    f = _placed(0, 1.0)
    with asyncckpt.AsyncCheckpointer(endpoint=endpoint, fsync=False) as checkpointer:
        for n, scale in enumerate([1.0, 1.0, 1.0, 2.0, 2.0]):
            f._local_tensor.scale = scale
            f._local_tensor.codes.add_(1)
            checkpointer.save({"f": f}, f"{path}/{n}").written.result(60)
            counts.append(len(calls))
        return counts


def test_a_context_is_digested_again_only_when_it_has_changed(shared_worker: RealWorker, tmp_path: Path) -> None:
    found = rank_processes.run(2, _save_often, str(tmp_path), shared_worker.endpoint)
    assert found == [[1, 1, 1, 2, 2]] * 2
    digests = [*_digests(tmp_path / "1"), *_digests(tmp_path / "3")]
    assert digests[0] == digests[1] != digests[2] == digests[3] and None not in digests
