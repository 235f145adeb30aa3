"""`reuse="auto"`: what has not changed is not written again, and each checkpoint stands alone all the same."""

from __future__ import annotations

import itertools
import json
import logging
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import overlapping
import pytest
import states
import torch
from real_worker import DEADLINE_S, RealWorker, manifest_of, stop_whoever_serves, wait_until, written

import asyncckpt
from asyncckpt import AsyncCheckpointer, CheckpointManager, SyncCheckpointer, cli
from asyncckpt.client import slot_stream
from asyncckpt.errors import CheckpointNotCommittedError
from asyncckpt.storage.files import Files
from asyncckpt.storage.verification import verify_checkpoint
from tests import object_proxy, object_servers

MIB = 1 << 20
ADAPTER_NBYTES = 64 << 10


def state_of(step: int, *, side: int = 512, layers: int = 4) -> dict[str, Any]:
    """Return a state whose base (4 MiB) is always the same, and whose adapter of 64 KiB never is."""
    generator = torch.Generator().manual_seed(0)
    base = {f"layers.{n}.weight": torch.randn(side, side, generator=generator) for n in range(layers)}
    adapter = {"a": torch.full((8, 1024), float(step)), "b": torch.full((1024, 8), float(-step))}
    return {"base": base, "adapter": adapter, "step": step}


LARGE = {"side": 1024, "layers": 16}
"""Of `state_of`, for a base of 64 MiB."""


def lora_state(step: int, adapter_nbytes: int) -> dict[str, Any]:
    """Return a Llama of 16 layers under the names of PEFT: 113 matrices (63 MiB) and 32 norms that never change, and an
    adapter of 64 tensors that always does."""
    generator, width, n = torch.Generator().manual_seed(0), 320, adapter_nbytes // 256
    model = {"embed_tokens.weight": torch.randn(768, width, generator=generator)}
    for layer in range(16):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weight = torch.randn(width, width, generator=generator)
            if name not in ("q_proj", "v_proj"):
                model[f"layers.{layer}.self_attn.{name}.weight"] = weight
                continue
            model[f"layers.{layer}.self_attn.{name}.base_layer.weight"] = weight
            model[f"layers.{layer}.self_attn.{name}.lora_A.default.weight"] = torch.full((1, n), float(step))
            model[f"layers.{layer}.self_attn.{name}.lora_B.default.weight"] = torch.full((n, 1), float(-step))
        for name in ("gate_proj", "up_proj", "down_proj"):
            model[f"layers.{layer}.mlp.{name}.weight"] = torch.randn(2 * width, width, generator=generator)
        for name in ("input_layernorm", "post_attention_layernorm"):
            model[f"layers.{layer}.{name}.weight"] = torch.randn(width, generator=generator)
    assert len(model) == 113 + 32 + 64
    return {"model": {f"base_model.model.model.{name}": tensor for name, tensor in model.items()}, "step": step}


def own_nbytes(path: pathlib.Path, which: str = "*") -> int:
    """Return the bytes of the files that only this checkpoint has."""
    found = [one.stat() for one in path.glob(which)]
    return sum(one.st_size for one in found if one.st_nlink == 1)


def check(path: str | pathlib.Path, state: dict[str, Any]) -> None:
    """Check that a checkpoint is sound, and loads from the disk bit for bit."""
    states.assert_same(asyncckpt.load(path, source="disk"), state)
    if isinstance(path, pathlib.Path):
        assert verify_checkpoint(str(path), Files()).faults == []


def has_linked(path: pathlib.Path) -> bool:
    return any(one.stat().st_nlink > 1 for one in path.iterdir())


@pytest.mark.parametrize("how", ["worker", "overlap", "dcp", "sync"])
def test_the_second_save_of_a_frozen_base_writes_little_more_than_the_adapter(
    shared_worker: RealWorker, tmp_path: pathlib.Path, how: str
) -> None:
    fields: dict[str, Any] = {"overlap": {"staging": "overlap"}, "dcp": {"layout": "dcp"}}.get(how, {})
    kind: Any = SyncCheckpointer if how == "sync" else AsyncCheckpointer
    with kind(
        reuse="auto", **fields, **({} if how == "sync" else {"endpoint": shared_worker.endpoint})
    ) as checkpointer:
        for step in range(3):
            handle = checkpointer.save(state_of(step, **LARGE), tmp_path / f"step-{step}")
            if handle is not None:
                assert (handle.durable.result(DEADLINE_S).details["reused_nbytes"] >= 64 * MIB) == (step > 0)
                written(handle)
    for step in range(3):
        check(tmp_path / f"step-{step}", state_of(step, **LARGE))
        # layout dcp has a `.metadata`, which grows with the number of tensors
        counted = "*.distcp" if how == "dcp" else "*"
        assert step == 0 or own_nbytes(tmp_path / f"step-{step}", counted) <= 1.1 * ADAPTER_NBYTES
    assert manifest_of(tmp_path / "step-2")["ranks"][0]["nbytes"] > 64 * MIB, "what it holds, not what was written"


@pytest.mark.parametrize(("adapter_nbytes", "times"), [(64 << 10, 1.9), (MIB, 1.1)])
def test_beside_many_matrices_and_norms_an_adapter_of_many_tensors_is_written_with_their_names_only(
    tmp_path: pathlib.Path, adapter_nbytes: int, times: float
) -> None:
    with SyncCheckpointer(reuse="auto") as checkpointer:
        for step in range(3):
            checkpointer.save(lora_state(step, adapter_nbytes), tmp_path / f"step-{step}", step=step)
    for step in range(3):
        check(tmp_path / f"step-{step}", lora_state(step, adapter_nbytes))
        assert step == 0 or own_nbytes(tmp_path / f"step-{step}") <= times * adapter_nbytes


def test_without_it_everything_is_written(shared_worker: RealWorker, tmp_path: pathlib.Path) -> None:
    with AsyncCheckpointer(endpoint=shared_worker.endpoint) as checkpointer:
        for step in range(2):
            report = written(checkpointer.save(state_of(step), tmp_path / f"step-{step}"))
            assert "reused_nbytes" not in report.details
    assert not has_linked(tmp_path / "step-1")
    assert len(list((tmp_path / "step-1").glob("*.safetensors"))) == 1


def test_bytes_decide_and_not_requires_grad(shared_worker: RealWorker, tmp_path: pathlib.Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 200))
    model[0].requires_grad_(False)
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, reuse="auto") as checkpointer:
        for step in range(4):
            if step == 2:
                with torch.no_grad():
                    model[0].weight[299, 299] += 1  # frozen by name only
            written(checkpointer.save({"model": model}, tmp_path / f"step-{step}"))
            found = asyncckpt.load(tmp_path / f"step-{step}", source="disk")["model"]
            states.assert_same(dict(found), dict(model.state_dict()))
    inodes = [{one.stat().st_ino for one in (tmp_path / f"step-{step}").glob("*.safetensors")} for step in range(4)]
    assert inodes[0] == inodes[1] and len(inodes[1] & inodes[2]) == len(inodes[1]) - 1 and inodes[2] == inodes[3]


def test_retention_leaves_each_checkpoint_whole(shared_worker: RealWorker, tmp_path: pathlib.Path) -> None:
    with (
        AsyncCheckpointer(endpoint=shared_worker.endpoint, reuse="auto") as checkpointer,
        CheckpointManager(tmp_path, checkpointer=checkpointer, max_to_keep=1, preemption_signal=()) as manager,
    ):
        for step in range(4):
            manager.save(step, state_of(step))
            manager.wait()
        wait_until(lambda: manager.all_steps() == [3], "the others are removed")
    (path,) = (one for one in tmp_path.iterdir() if one.name.startswith("step-"))
    assert not has_linked(path) and own_nbytes(path) > 4 * MIB
    states.assert_same(asyncckpt.load(path, source="disk")["base"], state_of(3)["base"])
    assert verify_checkpoint(str(path), Files()).faults == []


def test_a_checkpoint_that_is_replaced_gives_its_files_to_the_next(
    shared_worker: RealWorker, tmp_path: pathlib.Path
) -> None:
    inodes = []
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, reuse="auto", overwrite=True) as checkpointer:
        for step in range(3):
            written(checkpointer.save(state_of(step), tmp_path / "latest"))
            check(tmp_path / "latest", state_of(step))
            inodes.append({one.stat().st_ino for one in (tmp_path / "latest").glob("*.safetensors")})
    assert len(inodes[0]) == 3 and len(inodes[0] & inodes[1] & inodes[2]) == 1, "the adapter has two"


def test_after_the_death_of_a_worker_everything_is_written_once(
    default_dir: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    with AsyncCheckpointer(reuse="auto", worker_start_timeout_s=DEADLINE_S) as checkpointer:
        try:
            for step in range(4):
                if step == 2:
                    RealWorker(checkpointer._process.endpoint).kill()  # type: ignore[attr-defined]
                written(checkpointer.save(state_of(step), tmp_path / f"step-{step}"))
                check(tmp_path / f"step-{step}", state_of(step))
        finally:
            stop_whoever_serves(checkpointer._process.endpoint)  # type: ignore[attr-defined]
    inodes = [{one.stat().st_ino for one in (tmp_path / f"step-{n}").glob("*.safetensors")} for n in range(4)]
    assert inodes[0] & inodes[1] and not inodes[1] & inodes[2] and inodes[2] & inodes[3]


def test_a_state_that_goes_through_the_memory_in_segments_is_written(
    shared_worker: RealWorker, tmp_path: pathlib.Path
) -> None:
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, reuse="auto", arena_limit_bytes=3 * MIB) as checkpointer:
        for step in range(2):
            report = written(checkpointer.save(state_of(step), tmp_path / f"step-{step}"))
            assert report.details["ring_nbytes"] and report.details["reused_nbytes"] == 0
            check(tmp_path / f"step-{step}", state_of(step))
    assert not has_linked(tmp_path / "step-1")


def test_a_state_that_could_be_written_early_is_linked_once_it_is_sealed(
    shared_worker: RealWorker, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_stream, "MIN_STREAMED_NBYTES", 1)
    overlapping.copy_all_behind(monkeypatch.setattr)
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, reuse="auto", staging="overlap") as checkpointer:
        for step in range(3):
            report = written(checkpointer.save(state_of(step), tmp_path / f"step-{step}"))
            assert (report.details["reused_nbytes"] > 4 * MIB) == (step > 0)
            check(tmp_path / f"step-{step}", state_of(step))


def test_a_mirror_has_the_whole_checkpoint(shared_worker: RealWorker, tmp_path: pathlib.Path) -> None:
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, reuse="auto") as checkpointer:
        for step in range(2):
            mirror = tmp_path / "mirror" / f"step-{step}"
            handle = checkpointer.save(state_of(step), tmp_path / "runs" / f"step-{step}", mirror=mirror)
            handle.mirrored.result(DEADLINE_S)
    shutil.rmtree(tmp_path / "runs")
    for step in range(2):
        check(tmp_path / "mirror" / f"step-{step}", state_of(step))
        assert not has_linked(tmp_path / "mirror" / f"step-{step}")


@pytest.mark.parametrize("layout", ["safetensors", "dcp"])
@pytest.mark.parametrize("source", ["memory", "auto"])
def test_a_committed_checkpoint_with_links_is_read_from_memory(
    default_dir: pathlib.Path, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, source: str, layout: str
) -> None:
    fields: dict[str, Any] = {"layout": layout, "keep_in_memory": "latest", "worker_start_timeout_s": DEADLINE_S}
    state, path = state_of(1), tmp_path / "step-1"
    checkpointer = AsyncCheckpointer(reuse="auto", **fields)
    try:
        with checkpointer, caplog.at_level(logging.INFO):
            for step in range(2):
                report = written(checkpointer.save(state_of(step), tmp_path / f"step-{step}"))
            assert report.details["reused_nbytes"] > 4 * MIB
            assert [held.step for held in asyncckpt.held_snapshots(path)] == [1]
            caplog.clear()
            states.assert_same(asyncckpt.load(path, source=source), state)
            target = state_of(0)
            asyncckpt.load(path, target, source=source)
            states.assert_same(target, state)
            target = state_of(0)
            restored = asyncckpt.restore_latest(tmp_path, target, source=source)
            assert restored is not None and restored.path == str(path)
            states.assert_same(target, state)
            assert caplog.text.count("from the worker's memory") == 3
            with asyncckpt.open_checkpoint(path, source=source) as opened:
                assert opened.objects["step"] == 1
                for name, mmap in itertools.product(state["base"], (False, True)):
                    assert torch.equal(opened.tensor(f"base.{name}", mmap=mmap), state["base"][name])
                assert torch.equal(opened.tensor("adapter.a"), state["adapter"]["a"])
            assert "from disk" not in caplog.text
            assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    finally:
        stop_whoever_serves(checkpointer._process.endpoint)  # type: ignore[attr-defined]


def test_two_runs_in_one_directory_do_not_disturb_each_other(shared_worker: RealWorker, tmp_path: pathlib.Path) -> None:
    fields: dict[str, Any] = {"endpoint": shared_worker.endpoint, "reuse": "auto"}
    with AsyncCheckpointer(**fields) as one, AsyncCheckpointer(**fields) as other:
        for step in range(3):
            handles = [c.save(state_of(10 * n + step), tmp_path / f"{n}-{step}") for n, c in enumerate((one, other))]
            list(map(written, handles))
    for name in sorted(os.listdir(tmp_path)):
        run, _, step = name.partition("-")
        check(tmp_path / name, state_of(10 * int(run) + int(step)))
        assert step == "0" or has_linked(tmp_path / name), "of two first saves, the later ones link to one"


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    capsys.readouterr()
    assert cli.main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_commands_show_what_is_shared_and_a_copy_is_whole(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "no worker"))
    with SyncCheckpointer(reuse="auto", fsync=False) as checkpointer:
        for step in range(3):
            checkpointer.save(state_of(step), tmp_path / "runs" / f"step-{step}")
    usage = printed(capsys, "du", str(tmp_path / "runs"))
    assert [4 * MIB < row["shared_nbytes"] < 5 * MIB for row in usage["checkpoints"]] == [True] * 3
    assert usage["totals"]["committed"]["allocated_nbytes"] < 5 * MIB < usage["totals"]["committed"]["nbytes"]
    described = printed(capsys, "inspect", str(tmp_path / "runs" / "step-2"))
    first = manifest_of(tmp_path / "runs" / "step-0")["save_id"]
    assert {shard["origin"] for shard in described["shards"]} == {None, first}
    assert 4 * MIB < described["reused_nbytes"] < described["nbytes"]
    (row,) = printed(capsys, "verify", str(tmp_path / "runs" / "step-2"))
    assert row["state"] == "ok" and row["reused_nbytes"] == described["reused_nbytes"]

    shutil.copytree(tmp_path / "runs" / "step-2", tmp_path / "copy")
    shutil.rmtree(tmp_path / "runs")
    check(tmp_path / "copy", state_of(2))
    assert cli.main(["convert", str(tmp_path / "copy"), str(tmp_path / "whole"), "--to", "asyncckpt"]) == 0
    check(tmp_path / "whole", state_of(2))
    assert printed(capsys, "inspect", str(tmp_path / "whole"))["reused_nbytes"] == 0


# ---- object stores --------------------------------------------------------------------------------------------------

object_servers.start_runtime()


@pytest.fixture
def proxy() -> Iterator[object_proxy.FaultyProxy]:
    with (
        object_servers.running("s3") as server,
        object_proxy.running(server.url) as found,
        object_servers.in_environment(server, found.url),
    ):
        yield found


def test_an_object_store_copies_what_is_unchanged_by_itself(proxy: object_proxy.FaultyProxy) -> None:
    root = f"s3://{object_servers.BUCKET}/runs"
    sent = []
    with SyncCheckpointer(reuse="auto", storage_options=object_servers.NO_CONNECTION_STAYS) as checkpointer:
        for step in range(3):
            before = proxy.nbytes_sent
            checkpointer.save(state_of(step, **LARGE), f"{root}/step-{step}", step=step)
            sent.append(proxy.nbytes_sent - before)
        assert sent[0] > 64 * MIB and max(sent[1:]) <= 1.1 * ADAPTER_NBYTES
        assert cli.main(["prune", root, "--keep", "1", "--delete"]) == 0
        with pytest.raises(CheckpointNotCommittedError):
            asyncckpt.load(f"{root}/step-1")
        check(f"{root}/step-2", state_of(2, **LARGE))

        proxy.refuses_copies = True
        checkpointer.save(state_of(3), f"{root}/step-3", step=3)
    check(f"{root}/step-3", state_of(3))
