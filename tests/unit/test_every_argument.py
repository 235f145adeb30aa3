"""No setting and no argument is accepted and ignored: each is given by name in a test, and some are refused by name."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import pathlib
import re
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

SYNC_FIELDS = {
    "use_pinned_memory",
    "use_non_blocking_copy",
    "replicated",
    "commit_timeout_s",
    "overwrite",
    "plan_timeout_s",
    "rank_info",
    "arena_limit_bytes",
    "fsync",
    "files_per_rank",
    "max_shard_bytes",
    "allow_pickle",
    "layout",
    "reuse",
    "write_threads",
    "storage_options",
}
"""Fields of `CheckpointerConfig` that a `SyncCheckpointer` takes."""
SURFACE: list[Callable[..., Any]] = [
    AsyncCheckpointer.save,
    SyncCheckpointer.save,
    AsyncCheckpointer.load,
    SyncCheckpointer.load,
    AsyncCheckpointer.__init__,
    SyncCheckpointer.__init__,
    AsyncCheckpointer.attach,
    AsyncCheckpointer.detach,
    AsyncCheckpointer.fence,
    AsyncCheckpointer.pending,
    AsyncCheckpointer.prepare,
    AsyncCheckpointer.wait,
    AsyncCheckpointer.close,
    AsyncCheckpointer.latest_checkpoint,
    asyncckpt.restore_latest,
    SyncCheckpointer.restore_latest,
    asyncckpt.make_async_checkpointer,
    asyncckpt.make_sync_checkpointer,
    asyncckpt.load,
    asyncckpt.plan_load,
    asyncckpt.open_checkpoint,
    OpenCheckpoint.tensor,
    OpenCheckpoint.objects_of,
    asyncckpt.ShardedSlice,
    asyncckpt.FlatShard,
    asyncckpt.describe_tp,
    asyncckpt.register_shard_type,
    asyncckpt.held_snapshots,
    asyncckpt.latest_checkpoint,
    asyncckpt.CheckpointManager.__init__,
    asyncckpt.CheckpointManager.should_save,
    asyncckpt.CheckpointManager.reached_preemption,
    asyncckpt.CheckpointManager.preempt,
    asyncckpt.CheckpointManager.save,
    asyncckpt.CheckpointManager.restore,
    asyncckpt.CheckpointManager.pin,
    asyncckpt.CheckpointManager.unpin,
    asyncckpt.CheckpointManager.wait,
    asyncckpt.CheckpointManager.close,
    asyncckpt.optimal_interval,
    asyncckpt.refresh_master_params,
]
GENERAL = (
    *(
        "kw",
        "fields",
        "options",
        "tensor",
        "kind",
        "from_shards",
        "global_shapes",
        "path",
        "root",
        "optimizers",
        "rank",
    ),
    "state_dict",
)
"""Arguments that are given by position: a test need not name them."""


def arguments_of(function: Callable[..., Any]) -> set[str]:
    """Return the names of what may be given; `NoReturn` marks what is there only to be refused."""
    found = inspect.signature(function).parameters
    return {name for name, one in found.items() if name != "self" and one.annotation != "NoReturn"}


def name_of(function: Callable[..., Any]) -> str:
    """Return what a call of a function is written as: the class's name for a constructor."""
    *_, owner, name = f".{function.__qualname__}".split(".")
    return owner if name == "__init__" else name


@functools.cache
def texts_of_tests() -> list[str]:
    files = [*(REPOSITORY / "tests").glob("unit/**/test_*.py"), *(REPOSITORY / "tests").glob("integration/test_*.py")]
    return [file.read_text() for file in files]


def named_in_a_test(argument: str, function: str = "") -> bool:
    """Return whether a test file gives an argument by name, or has it in a table, and calls the function."""
    given = re.compile(rf"\b{argument}=|\"{argument}\"")
    called = re.compile(rf"\b{function}\b")
    return any(given.search(text) and called.search(text) for text in texts_of_tests())


def test_every_field_of_the_config_is_given_in_a_test() -> None:
    fields = [field.name for field in dataclasses.fields(CheckpointerConfig)]
    assert [name for name in fields if not named_in_a_test(name)] == []


@pytest.mark.parametrize("function", SURFACE, ids=lambda function: function.__qualname__)
def test_every_argument_is_given_in_a_test(function: Callable[..., Any]) -> None:
    arguments = arguments_of(function) - {*GENERAL}
    assert [name for name in sorted(arguments) if not named_in_a_test(name, name_of(function))] == []


def test_the_synchronous_checkpointer_refuses_the_fields_that_it_has_no_use_for() -> None:
    for field in dataclasses.fields(CheckpointerConfig):
        given = {field.name: field.default}
        if field.name in SYNC_FIELDS:
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


KEPT = ("allow_pickle", "on_error", "worker_shutdown_timeout_s", "rank_info", "storage_options")


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
