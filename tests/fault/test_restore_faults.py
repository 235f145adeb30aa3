"""A checkpoint goes after `restore_latest` has listed it: the one before it is loaded, or the error is typed.

Promise P2. Whoever cleans up, retention of another process or `rm`, does so at any time.
"""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt import RankInfo, SyncCheckpointer
from asyncckpt.basics.failpoints import observed
from asyncckpt.errors import (
    CheckpointNotCommittedError,
    CheckpointNotFoundError,
    NoSoundCheckpointError,
)
from asyncckpt.format.names import LAYOUTS
from asyncckpt.maintenance.retention import remove_checkpoint
from asyncckpt.storage.catalog import read_manifest
from asyncckpt.storage.local import LocalStore
from tests.failing_process import At, fail

pytestmark = pytest.mark.fault

N = 70_000
LISTED = "restore: candidates listed"


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((N,), float(step)), "step": step}


def is_state(found: Any, step: int) -> bool:
    return bool(found["step"] == step and torch.equal(found["w"], state(step)["w"]))


@pytest.fixture(scope="module", params=LAYOUTS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    root = tmp_path_factory.mktemp("restores")
    with SyncCheckpointer(layout=request.param, fsync=False, rank_info=RankInfo(0, 1)) as checkpointer:
        for step in (1, 2):
            checkpointer.save(state(step), root / f"s{step}")
    return root


@pytest.fixture
def root(saved: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """Checkpoints of steps 1 and 2."""
    return pathlib.Path(shutil.copytree(saved, tmp_path / "root"))


def remove_manifest(path: pathlib.Path) -> None:
    (path / "manifest.json").unlink()


def retire(path: pathlib.Path) -> None:
    store = LocalStore()
    remove_checkpoint(str(path), read_manifest(str(path), store).save_id, store, package="test")


WAYS: dict[str, tuple[Callable[[pathlib.Path], None], type[Exception]]] = {
    "its manifest": (remove_manifest, CheckpointNotCommittedError),
    "all of it": (shutil.rmtree, CheckpointNotFoundError),
    "by retention": (retire, CheckpointNotFoundError),
}


@pytest.mark.parametrize("quarantine", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_one_that_goes_before_it_is_read_is_skipped_for_the_one_before_it(
    root: pathlib.Path, way: str, quarantine: bool
) -> None:
    remove, refusal = WAYS[way]
    target, observer = state(0), At(LISTED, lambda: remove(root / "s2"))
    with observed(observer):
        found = asyncckpt.restore_latest(root, target, quarantine=quarantine)
    assert observer.met
    assert found is not None and (found.path, found.step) == (str(root / "s1"), 1)
    assert is_state(target, 1)
    (skipped,) = found.skipped
    assert (skipped.path, skipped.step, skipped.moved_to) == (str(root / "s2"), 2, None)
    assert isinstance(skipped.error, refusal)
    again = asyncckpt.restore_latest(root)
    assert again is not None and again.step == 1 and not again.skipped


@pytest.mark.parametrize("way", WAYS)
def test_if_the_last_one_goes_the_error_names_it_and_the_target_stays(root: pathlib.Path, way: str) -> None:
    shutil.rmtree(root / "s1")
    target, observer = state(0), At(LISTED, lambda: WAYS[way][0](root / "s2"))
    with observed(observer), pytest.raises(NoSoundCheckpointError, match="s2") as caught:
        asyncckpt.restore_latest(root, target)
    assert observer.met and len(caught.value.tried) == 1
    assert is_state(target, 0)
    assert asyncckpt.restore_latest(root) is None


def test_an_error_before_anything_is_read_is_raised_and_the_target_stays(root: pathlib.Path) -> None:
    target, observer = state(0), At(LISTED, fail)
    with observed(observer), pytest.raises(OSError, match=r"Input/output error"):
        asyncckpt.restore_latest(root, target)
    assert observer.met and is_state(target, 0)
    found = asyncckpt.restore_latest(root, target)
    assert found is not None and is_state(target, 2)


@pytest.mark.parametrize("point", ["load: manifest read", "load: index read", "load: shard opened"])
@pytest.mark.parametrize("way", WAYS)
def test_one_that_goes_while_it_is_read_gives_its_own_values_or_those_of_the_one_before_it(
    root: pathlib.Path, way: str, point: str
) -> None:
    target, observer = state(0), At(point, lambda: WAYS[way][0](root / "s2"))
    with observed(observer):
        found = asyncckpt.restore_latest(root, target)
    assert observer.met
    assert found is not None and is_state(target, found.step)
    assert [one.path for one in found.skipped] == ([] if found.step == 2 else [str(root / "s2")])
