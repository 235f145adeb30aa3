"""No setting and no argument is accepted and ignored: each is listed here with the files of tests that show its effect.

A new field or argument fails these tests until it has its line. What API.md promises and is not there yet is refused
by name.
"""

from __future__ import annotations

import dataclasses
import inspect
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import asyncckpt  # noqa: E402
from asyncckpt import (  # noqa: E402
    AsyncCheckpointer,
    CheckpointerConfig,
    CheckpointProcess,
    CheckpointStager,
    SyncCheckpointer,
)
from asyncckpt.errors import ConfigError  # noqa: E402
from asyncckpt.loading.open_checkpoint import OpenCheckpoint  # noqa: E402

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]

FIELDS = {
    "integration/test_async_ends": "worker_shutdown_timeout_s",
    "integration/test_async_leaves": "allow_pickle",
    "integration/test_async_saving": "slots on_busy slot_timeout_s",
    "integration/test_async_settings": "on_error fsync files_per_rank max_shard_bytes write_threads "
    "commit_timeout_s worker_timeout_s rank_info",
    "integration/test_bounded_memory": "arena_limit_bytes",
    "integration/test_keep_in_memory": "keep_in_memory",
    "integration/test_overlap": "staging",
    "integration/test_overlap_ends": "overlap_check",
    "integration/test_prepare": "arena_limit_bytes",
    "integration/test_ranks_arguments": "replicated",
    "integration/test_ranks_async": "plan_timeout_s hook_timeout_s commit_timeout_s",
    "integration/test_ranks_layout_dcp": "layout",
    "integration/test_ranks_overwrite": "overwrite",
    "integration/test_save_errors": "arena_limit_bytes worker_start_timeout_s",
    "integration/test_worker_looked_at": "events",
    "integration/test_worker_loss": "on_worker_loss",
    "integration/test_worker_resubmission": "on_worker_loss",
    "unit/test_keeping": "keep_in_memory",
    "unit/test_layout_dcp": "layout",
    "unit/test_slot_pool": "slots on_busy slot_timeout_s arena_limit_bytes",
    "unit/test_staging_devices": "use_pinned_memory use_non_blocking_copy",
    "unit/test_staging_snapshots": "staging",
    "unit/test_staging_torn": "overlap_check",
    "unit/test_thread_arguments": "write_threads",
}
"""Test file -> fields of `CheckpointerConfig` whose effect it shows."""
SYNC_FIELDS = {
    "integration/test_overlap_devices": "use_pinned_memory use_non_blocking_copy",
    "integration/test_ranks_arguments": "replicated commit_timeout_s",
    "integration/test_ranks_overwrite": "overwrite",
    "integration/test_ranks_sync": "plan_timeout_s rank_info",
    "integration/test_sync_checkpointer": "arena_limit_bytes fsync files_per_rank max_shard_bytes",
    "unit/test_allow_pickle": "allow_pickle",
    "unit/test_layout_dcp": "layout",
    "unit/test_thread_arguments": "write_threads",
}
SURFACE: list[tuple[Callable[..., Any], dict[str, str]]] = [
    (
        AsyncCheckpointer.save,
        {
            "integration/test_async_saving": "state_dict path step metadata",
            "integration/test_async_settings": "kw",
            "integration/test_staging_hazards": "kw",
        },
    ),
    (SyncCheckpointer.save, {"integration/test_sync_checkpointer": "state_dict path step metadata kw"}),
    (AsyncCheckpointer.load, {"integration/test_async_settings": "kw", "unit/test_loading_load": "path state_dict"}),
    (
        SyncCheckpointer.load,
        {
            "integration/test_async_settings": "default_map_location kw",
            "unit/test_loading_load": "path state_dict strict",
        },
    ),
    (
        AsyncCheckpointer.__init__,
        {
            "integration/test_async_settings": "config checkpoint_stager checkpoint_process reader fields",
            "integration/test_ranks_async": "commit_hook",
            "integration/test_save_errors": "endpoint",
        },
    ),
    (
        SyncCheckpointer.__init__,
        {
            "integration/test_ranks_sync": "commit_hook",
            "integration/test_sync_checkpointer": "writer reader fields",
            "unit/test_every_argument": "config",
        },
    ),
    (AsyncCheckpointer.attach, {"integration/test_overlap": "optimizers"}),
    (AsyncCheckpointer.detach, {}),
    (AsyncCheckpointer.fence, {}),
    (AsyncCheckpointer.pending, {}),
    (AsyncCheckpointer.prepare, {"integration/test_prepare": "state_dict"}),
    (AsyncCheckpointer.wait, {"integration/test_async_ends": "timeout"}),
    (AsyncCheckpointer.close, {"integration/test_async_ends": "timeout_s"}),
    (
        AsyncCheckpointer.latest_checkpoint,
        {
            "integration/test_ranks_arguments": "timeout_s",
            "integration/test_ranks_async": "root",
            "integration/test_recall": "source",
        },
    ),
    (asyncckpt.restore_latest, {"unit/test_restoring": "strict root state_dict quarantine rank_info options"}),
    (
        SyncCheckpointer.restore_latest,
        {
            "integration/test_ranks_restoring": "timeout_s",
            "unit/test_restoring": "root state_dict strict quarantine options",
        },
    ),
    (
        asyncckpt.make_async_checkpointer,
        {"integration/test_ranks_async": "rank_info commit_hook", "unit/test_every_argument": "config"},
    ),
    (
        asyncckpt.make_sync_checkpointer,
        {"integration/test_ranks_sync": "commit_hook", "unit/test_every_argument": "config rank_info"},
    ),
    (
        asyncckpt.load,
        {
            "integration/test_ranks_shared_load": "redundant_reads",
            "integration/test_recall": "source",
            "unit/test_allow_pickle": "allow_pickle",
            "unit/test_loading_load": "path state_dict keys default_map_location strict verify key_map",
            "unit/test_loading_targets": "low_memory",
            "unit/test_thread_arguments": "threads",
        },
    ),
    (
        asyncckpt.plan_load,
        {"integration/test_recall": "source", "unit/test_plan_load": "path state_dict keys key_map rank_info"},
    ),
    (
        asyncckpt.open_checkpoint,
        {
            "integration/test_recall": "source",
            "unit/test_allow_pickle": "allow_pickle",
            "unit/test_open_checkpoint": "path rank_info",
        },
    ),
    (
        OpenCheckpoint.tensor,
        {
            "unit/test_foreign_reading": "mmap",
            "unit/test_open_checkpoint": "fqn slices verify",
            "unit/test_thread_arguments": "threads",
        },
    ),
    (OpenCheckpoint.objects_of, {"unit/test_open_checkpoint": "rank"}),
    (
        asyncckpt.ShardedSlice,
        {"unit/test_shard_ownership": "tensor offsets replica_id", "unit/test_shard_types": "global_shape"},
    ),
    (asyncckpt.FlatShard, {"unit/test_shard_types": "tensor global_shape start"}),
    (asyncckpt.describe_tp, {"unit/test_shard_types": "state_dict global_shapes tp_rank tp_size"}),
    (asyncckpt.register_shard_type, {"unit/test_shard_types": "kind to_shards from_shards"}),
    (asyncckpt.held_snapshots, {"integration/test_recall": "root endpoint"}),
    (asyncckpt.latest_checkpoint, {"unit/test_loading_load": "root"}),
    (
        asyncckpt.CheckpointManager.__init__,
        {
            "integration/test_manager": "root checkpointer max_to_keep keep_period save_interval_steps save_interval_s "
            "save_on_steps save_when best_fn best_mode step_format preemption_signal grace_s mtbf_s quarantine fields",
            "integration/test_manager_root": "shared",
            "integration/test_ranks_manager": "save_interval_s",
        },
    ),
    (asyncckpt.CheckpointManager.should_save, {"integration/test_manager": "step"}),
    (asyncckpt.CheckpointManager.reached_preemption, {"integration/test_manager": "step"}),
    (asyncckpt.CheckpointManager.preempt, {}),
    (asyncckpt.CheckpointManager.save, {"integration/test_manager": "step state metrics metadata kw"}),
    (
        asyncckpt.CheckpointManager.restore,
        {"integration/test_manager": "state step options", "unit/test_restoring": "strict"},
    ),
    (asyncckpt.CheckpointManager.pin, {"integration/test_manager": "step"}),
    (asyncckpt.CheckpointManager.unpin, {"integration/test_manager": "step"}),
    (asyncckpt.CheckpointManager.wait, {"integration/test_manager": "timeout"}),
    (asyncckpt.CheckpointManager.close, {}),
    (asyncckpt.optimal_interval, {"unit/test_managing": "save_cost_s mtbf_s"}),
    (asyncckpt.refresh_master_params, {"unit/test_managing": "optimizer but"}),
]
GENERAL = (
    *("kw", "fields", "options", "tensor", "kind", "global_shapes", "path", "root", "optimizers", "rank"),
    "state_dict",
)
"""Arguments that are given by position: a test need not name them."""


def arguments_of(function: Callable[..., Any]) -> set[str]:
    """Return the names of what may be given; `NoReturn` marks what is there only to be refused."""
    found = inspect.signature(function).parameters
    return {name for name, one in found.items() if name != "self" and one.annotation != "NoReturn"}


def shown(files: dict[str, str], *, spared: tuple[str, ...] = ()) -> set[str]:
    """Return the arguments that `files` show; every file exists, and speaks of those that are not `spared`."""
    for file, names in files.items():
        text = (REPOSITORY / "tests" / f"{file}.py").read_text()
        assert [name for name in names.split() if name not in text and name not in spared] == [], file
    return {name for names in files.values() for name in names.split()}


def test_every_field_of_the_config_has_tests_of_its_effect() -> None:
    assert shown(FIELDS) == {field.name for field in dataclasses.fields(CheckpointerConfig)}


@pytest.mark.parametrize(("function", "files"), SURFACE, ids=[f.__qualname__ for f, _ in SURFACE])
def test_every_argument_has_tests_of_its_effect(function: Callable[..., Any], files: dict[str, str]) -> None:
    assert shown(files, spared=GENERAL) == arguments_of(function)


def test_the_synchronous_checkpointer_refuses_the_fields_that_it_has_no_use_for() -> None:
    taken = shown(SYNC_FIELDS)
    for field in dataclasses.fields(CheckpointerConfig):
        given = {field.name: field.default}
        if field.name in taken:
            SyncCheckpointer(**given).close()
        else:
            with pytest.raises(ConfigError, match=f"{field.name} is about the worker"):
                SyncCheckpointer(**given)


# ---- replaced parts


class Process(CheckpointProcess):
    """Writes nothing."""

    def write(self, staging_result: Any, path: str, **kw: Any) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        pass


class Stager(CheckpointStager):
    """Copies nothing."""

    def stage(self, state_dict: Any, **kw: Any) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        pass


KEPT = ("allow_pickle", "on_error", "worker_shutdown_timeout_s", "rank_info")


@pytest.mark.parametrize("field", dataclasses.fields(CheckpointerConfig), ids=lambda field: field.name)
def test_fields_of_a_replaced_process_are_refused_by_name(field: dataclasses.Field[Any]) -> None:
    given = {field.name: field.default}
    if field.name in KEPT:
        AsyncCheckpointer(checkpoint_process=Process(), **given).close()
    else:
        with pytest.raises(ConfigError, match=f"{field.name} is about the worker") as caught:
            AsyncCheckpointer(checkpoint_process=Process(), **given)
        assert caught.value.field == field.name


@pytest.mark.parametrize("name", ["staging", "overlap_check", "max_shard_bytes", "fsync", "write_threads"])
def test_fields_of_a_replaced_stager_are_refused_by_name(name: str) -> None:
    given = {name: getattr(CheckpointerConfig(), name)}
    with pytest.raises(ConfigError, match=f"{name} is about the default stager"):
        AsyncCheckpointer(checkpoint_stager=Stager(), **given)


# ---- factories


def test_factories_take_a_config(tmp_path: pathlib.Path) -> None:
    config = CheckpointerConfig(files_per_rank=2, slots=3)
    with asyncckpt.make_sync_checkpointer(config=config) as checkpointer:
        checkpointer.save({"a": torch.ones(1000), "b": torch.ones(1000)}, tmp_path / "a")
    assert len(list((tmp_path / "a").glob("*.safetensors"))) == 2


def test_factories_take_a_rank(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with asyncckpt.make_sync_checkpointer(rank_info=asyncckpt.RankInfo(0, 1)) as checkpointer:
        checkpointer.save({"a": 1}, tmp_path / "a")
    assert asyncckpt.load(tmp_path / "a") == {"a": 1}
