"""Targets that are meta or fake tensors, and calls where torch makes no real ones: typed errors, and plans."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dcp_calls
import pytest
import states
import torch
from in_process_writer import StorageWriter
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import asyncckpt
from asyncckpt import CheckpointManager, SyncCheckpointer
from asyncckpt.dcp import StorageReader
from asyncckpt.errors import UnsupportedLeafError


def a_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def a_state() -> dict[str, Any]:
    return {"w": torch.arange(24.0).reshape(4, 6).t(), "b": torch.ones(3), "n": 7}


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[dict[str, str]]:
    """What every test here begins with, in three formats."""
    model = a_model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    with SyncCheckpointer(fsync=False) as checkpointer:
        checkpointer.save({"m": model, "o": optimizer, **a_state()}, tmp_path / "root" / "step-1")
    torch.save(a_state(), tmp_path / "f.pt")
    with SyncCheckpointer(fsync=False) as checkpointer:
        checkpointer.save({"w": a_state()["w"], "b": a_state()["b"]}, tmp_path / "t")
    asyncckpt.convert(str(tmp_path / "t"), str(tmp_path / "s"), to="safetensors")
    names = {"ours": "root/step-1", "torch": "f.pt", "safetensors": "s"}
    yield {name: str(tmp_path / at) for name, at in names.items()} | {"root": str(tmp_path / "root")}


def on_meta() -> dict[str, Callable[[], dict[str, Any]]]:
    def adam() -> dict[str, Any]:
        return {"o": torch.optim.AdamW(a_model().to("meta").parameters())}

    return {
        "a tensor": lambda: {"b": torch.empty(3, device="meta")},
        "a parameter in a list": lambda: {"b": nn.Parameter(torch.empty(3, device="meta"))},
        "a tensor of another dtype": lambda: {"b": torch.empty(3, device="meta", dtype=torch.float64)},
        "a module": lambda: {"m": a_model().to("meta")},
        "a module's state": lambda: {"m": a_model().to("meta").state_dict()},
        "a compiled module": lambda: {"m": torch.compile(a_model().to("meta"), backend="eager")},
        "one buffer of a module": half_on_meta,
        "an optimizer of such parameters": adam,
    }


def half_on_meta() -> dict[str, Any]:
    model = a_model()
    model[1].running_var = model[1].running_var.to("meta")  # type: ignore[index, union-attr, operator]
    return {"m": model}


def fake(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    with FakeTensorMode():
        return make()


def is_read(path: str, target: dict[str, Any]) -> None:
    asyncckpt.load(path, target)


def is_restored(path: str, target: dict[str, Any]) -> None:
    asyncckpt.restore_latest(str(Path(path).parent), target)


def is_restored_by_a_manager(path: str, target: dict[str, Any]) -> None:
    checkpointer = SyncCheckpointer(fsync=False)
    with CheckpointManager(str(Path(path).parent), checkpointer=checkpointer, preemption_signal=()) as manager:
        manager.restore(target)


READS: list[Callable[[str, dict[str, Any]], None]] = [is_read, is_restored, is_restored_by_a_manager]


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("kind", on_meta())
def test_loading_into_a_target_on_the_meta_device_says_what_to_do(
    saved: dict[str, str], kind: str, read: Callable[[str, dict[str, Any]], None]
) -> None:
    first = torch.zeros(3)
    target = {"w": torch.zeros(6, 4), **on_meta()[kind]()}
    with pytest.raises(UnsupportedLeafError) as caught:
        read(saved["ours"], target)
    text = str(caught.value)
    assert "loaded into" in text and "meta" in text and "to_empty" in text and "assign=True" in text
    assert "stored" not in text
    assert caught.value.leaf is not None and caught.value.leaf.split(".")[0] in {"b", "m", "o"}
    assert not target["w"].any() and not first.any()


def test_the_advice_for_a_module_on_the_meta_device_works(saved: dict[str, str]) -> None:
    expected = asyncckpt.load(saved["ours"])["m"]
    one, other = (a_model().to("meta") for _ in range(2))
    asyncckpt.load(saved["ours"], {"m": one.to_empty(device="cpu")}, strict=True)
    other.load_state_dict(asyncckpt.load(saved["ours"])["m"], assign=True)
    states.assert_same(one.state_dict(), expected)
    states.assert_same(other.state_dict(), expected)


def test_what_is_left_out_or_lacks_in_the_checkpoint_may_be_on_the_meta_device(saved: dict[str, str]) -> None:
    target = {"b": torch.zeros(3), "m": a_model().to("meta"), "unknown": torch.empty(2, device="meta")}
    asyncckpt.load(saved["ours"], target, keys=["b"])
    assert target["b"].all()  # type: ignore[union-attr, operator]
    asyncckpt.load(saved["ours"], {"b": target["b"], "unknown": target["unknown"]}, strict=False)


@pytest.mark.parametrize("kind", on_meta())
def test_a_plan_is_made_for_targets_on_the_meta_device(saved: dict[str, str], kind: str) -> None:
    meta = asyncckpt.plan_load(saved["ours"], on_meta()[kind]())
    real = asyncckpt.plan_load(saved["ours"], real_ones()[kind]())
    assert meta == real and meta.fits and meta.nbytes > 0


def real_ones() -> dict[str, Callable[[], dict[str, Any]]]:
    model: Callable[[], dict[str, Any]] = lambda: {"m": a_model()}  # noqa: E731
    tensor: Callable[[], dict[str, Any]] = lambda: {"b": torch.zeros(3)}  # noqa: E731
    found = {kind: tensor if "tensor" in kind or "parameter in" in kind else model for kind in on_meta()}
    return found | {"an optimizer of such parameters": lambda: {"o": torch.optim.AdamW(a_model().parameters())}}


def test_a_plan_for_a_meta_target_names_what_does_not_fit(saved: dict[str, str]) -> None:
    target = {"b": torch.empty(4, device="meta"), "new": torch.empty(1, device="meta")}
    plan = asyncckpt.plan_load(saved["ours"], target)
    assert [(leaf.fqn, leaf.saved, leaf.wanted) for leaf in plan.mismatched] == [("b", (3,), (4,))]
    assert plan.missing == ("new",) and not plan.fits


def test_two_names_of_one_meta_parameter_are_one_tensor_to_a_plan(tmp_path: Path) -> None:
    tied = torch.ones(8)
    with SyncCheckpointer(fsync=False) as checkpointer:
        checkpointer.save({"a": tied, "b": tied}, tmp_path / "c")
    meta = torch.empty(8, device="meta")
    assert asyncckpt.plan_load(tmp_path / "c", {"a": meta, "b": meta}).nbytes == 32


def test_a_plan_counts_only_the_shard_of_a_dtensor_on_the_meta_device(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    with SyncCheckpointer(fsync=False) as checkpointer:
        checkpointer.save({"w": torch.arange(32.0)}, tmp_path / "c")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        local = torch.empty(32, device="meta")
        target = {"w": DTensor.from_local(local, mesh, [Shard(0)], run_check=False)}
        plan = asyncckpt.plan_load(tmp_path / "c", target)
        assert plan.fits and plan.nbytes == 128
        with pytest.raises(UnsupportedLeafError, match=r"loaded into.*'w'.*meta.*to_empty"):
            asyncckpt.load(tmp_path / "c", target)
        with (
            pytest.raises(UnsupportedLeafError, match="cannot be stored"),
            SyncCheckpointer(fsync=False) as checkpointer,
        ):
            checkpointer.save(target, tmp_path / "d")
    finally:
        torch.distributed.destroy_process_group()


# ---- fake tensors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("make", [lambda: {"b": torch.zeros(3)}, lambda: {"m": a_model()}], ids=["tensor", "module"])
def test_loading_into_fake_tensors_is_refused_by_name(
    saved: dict[str, str], make: Any, read: Callable[[str, dict[str, Any]], None]
) -> None:
    with pytest.raises(UnsupportedLeafError, match=r"loaded into target tensor '(b|m\.0\.weight)'.*fake"):
        read(saved["ours"], fake(make))


def test_a_plan_is_made_for_fake_targets(saved: dict[str, str]) -> None:
    target = fake(lambda: {"m": a_model(), "b": torch.zeros(3)})
    real = {"m": a_model(), "b": torch.zeros(3)}
    assert asyncckpt.plan_load(saved["ours"], target) == asyncckpt.plan_load(saved["ours"], real)


CALLS: dict[str, Callable[[dict[str, str], dict[str, Any]], Any]] = {
    "load": lambda at, _: asyncckpt.load(at["ours"]),
    "load of one key": lambda at, _: asyncckpt.load(at["ours"], keys="b"),
    "load by copies": lambda at, _: asyncckpt.load(at["ours"], low_memory=False),
    "load without checksums": lambda at, _: asyncckpt.load(at["ours"], verify=False),
    "load into real tensors": lambda at, real: asyncckpt.load(at["ours"], real),
    "restore_latest": lambda at, real: asyncckpt.restore_latest(at["root"], real),
    "tensor": lambda at, _: asyncckpt.open_checkpoint(at["ours"]).tensor("w"),
    "a slice": lambda at, _: asyncckpt.open_checkpoint(at["ours"]).tensor("w", (slice(1, 3),)),
    "a mapped tensor": lambda at, _: asyncckpt.open_checkpoint(at["ours"]).tensor("w", mmap=True),
    "a torch file": lambda at, _: asyncckpt.load(at["torch"]),
    "a tensor of a torch file": lambda at, _: asyncckpt.open_checkpoint(at["torch"]).tensor("w"),
    "safetensors": lambda at, _: asyncckpt.load(at["safetensors"]),
    "a tensor of safetensors": lambda at, _: asyncckpt.open_checkpoint(at["safetensors"]).tensor("w"),
    "save of real tensors": lambda at, real: SyncCheckpointer(fsync=False).save(real, at["root"] + "/step-2"),
    "save of new tensors": lambda at, _: SyncCheckpointer(fsync=False).save({"x": torch.ones(2)}, at["root"] + "/2"),
}


@pytest.mark.parametrize("where", ["FakeTensorMode", "functionalize"])
@pytest.mark.parametrize("what", CALLS)
def test_calls_where_torch_makes_no_real_tensors_are_refused(saved: dict[str, str], what: str, where: str) -> None:
    real = a_state()
    seen: list[BaseException] = []

    def call(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(UnsupportedLeafError, match=r"Fake|fake|transform") as caught:
            CALLS[what](saved, real)
        seen.append(caught.value)
        return x

    if where == "FakeTensorMode":
        with FakeTensorMode():
            call(torch.ones(1))
    else:
        torch.func.functionalize(call)(torch.ones(1))  # type: ignore[no-untyped-call]
    assert len(seen) == 1
    states.assert_same(real, a_state())
    assert not Path(saved["root"], "step-2").exists()


def test_a_state_dict_of_fake_tensors_is_refused_at_save_by_name(tmp_path: Path) -> None:
    state = fake(lambda: {"a": {"x": torch.ones(3)}})
    with (
        pytest.raises(UnsupportedLeafError, match=r"'a\.x'.*cannot be stored.*fake"),
        SyncCheckpointer(fsync=False) as checkpointer,
    ):
        checkpointer.save(state, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_a_plan_is_made_in_fake_tensor_mode(saved: dict[str, str]) -> None:
    with FakeTensorMode():
        assert asyncckpt.plan_load(saved["ours"], {"m": a_model()}).fits
        assert asyncckpt.open_checkpoint(saved["ours"]).tensors["w"].shape == (6, 4)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_stock_dcp_with_our_reader_and_writer_refuses_fake_tensors(tmp_path: Path) -> None:
    dcp_calls.save({"w": torch.ones(4)}, StorageWriter(tmp_path / "c"))
    real = torch.zeros(4)
    target = fake(lambda: {"w": torch.zeros(4)})
    calls: list[Callable[[], Any]] = [
        lambda: dcp_calls.load(target, StorageReader(tmp_path / "c")),
        lambda: dcp_calls.load({"w": real}, StorageReader(tmp_path / "c")),
        lambda: dcp_calls.save({"w": real}, StorageWriter(tmp_path / "d")),
    ]
    for n, call in enumerate(calls):
        with pytest.raises(torch.distributed.checkpoint.CheckpointException) as caught:
            if n == 0:
                call()
            else:
                with FakeTensorMode():
                    call()
        assert isinstance(dcp_calls.reason(caught.value), UnsupportedLeafError)
    assert not real.any() and not (tmp_path / "d").exists()


@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_a_tensor_of_a_transform_is_refused_at_save_and_load(saved: dict[str, str], transform: str) -> None:
    seen: list[int] = []

    def call(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(UnsupportedLeafError, match=r"transform|no memory"):
            asyncckpt.load(saved["ours"], {"b": x})
        with pytest.raises(UnsupportedLeafError), SyncCheckpointer(fsync=False) as checkpointer:
            checkpointer.save({"b": x}, saved["root"] + "/step-2")
        seen.append(1)
        return x.sum()

    if transform == "vmap":
        torch.vmap(call)(torch.ones(2, 3))
    else:
        torch.func.grad(call)(torch.ones(3))
    assert seen == [1] and not Path(saved["root"], "step-2").exists()


def test_a_default_device_that_has_no_memory_disturbs_nothing(saved: dict[str, str], tmp_path: Path) -> None:
    target = {"w": torch.zeros(6, 4), "b": torch.zeros(3), "n": 0}
    with torch.device("meta"):
        found = asyncckpt.load(saved["ours"])
        asyncckpt.load(saved["ours"], target, strict=True)
        with SyncCheckpointer(fsync=False) as checkpointer:
            checkpointer.save(target, tmp_path / "c")
    states.assert_same(target, a_state())
    states.assert_same({key: found[key] for key in target}, a_state())
    states.assert_same(asyncckpt.load(tmp_path / "c"), a_state())


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")
@pytest.mark.parametrize("n_others", [0, 3000])
@pytest.mark.parametrize("low_memory", [True, False])
def test_a_target_over_memory_that_is_mapped_read_only_is_refused(
    tmp_path: Path, low_memory: bool, n_others: int
) -> None:
    others = {f"{n:04}": torch.ones(2) for n in range(n_others)}
    with SyncCheckpointer(fsync=False) as checkpointer:
        checkpointer.save({**others, "w": torch.ones(1024)}, tmp_path / "c")
    (tmp_path / "file").write_bytes(bytes(4096))
    with open(tmp_path / "file", "rb") as file:
        closed = mmap.mmap(file.fileno(), 4096, access=mmap.ACCESS_READ)
    target = {**{name: torch.zeros(2) for name in others}, "w": torch.frombuffer(closed, dtype=torch.float32)}
    with pytest.raises(UnsupportedLeafError, match=r"'w'.*read-only") as caught:
        asyncckpt.load(tmp_path / "c", target, low_memory=low_memory)
    assert caught.value.leaf == "w" and not any(value.any() for value in target.values())


def test_targets_over_a_mapping_that_may_be_written_to_are_filled(tmp_path: Path) -> None:
    with SyncCheckpointer(fsync=False) as checkpointer:
        checkpointer.save({"private": torch.ones(1024), "shared": torch.ones(1024)}, tmp_path / "c")
    (tmp_path / "file").write_bytes(bytes(4096))
    with open(tmp_path / "file", "r+b") as file:
        maps = {
            "private": mmap.mmap(file.fileno(), 4096, access=mmap.ACCESS_COPY),
            "shared": mmap.mmap(file.fileno(), 4096, access=mmap.ACCESS_WRITE),
        }
    target = {name: torch.frombuffer(found, dtype=torch.float32) for name, found in maps.items()}
    asyncckpt.load(tmp_path / "c", target)
    assert all(bool((value == 1).all()) for value in target.values())
