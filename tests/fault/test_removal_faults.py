"""Every call of gc and of retention fails once, in every way: what stays is whole, and nothing foreign goes.

Promises P1, P2 and P10. The failure is told: a removal that an error breaks off leaves a checkpoint as it was or none
at all, and the next one comes to the same end.
"""

from __future__ import annotations

import errno
import os
import pathlib
import re
import shutil
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from asyncckpt import CheckpointerConfig, RankInfo, SyncCheckpointer
from asyncckpt.commit_hooks import HookRunner
from asyncckpt.distributed.run_agreement import Coordination
from asyncckpt.format.names import LOCK_NAME, MANIFEST_NAME, SaveId, is_temporary, owner_of
from asyncckpt.maintenance.gc import GarbageRules, collect
from asyncckpt.maintenance.quarantine import quarantine_checkpoint
from asyncckpt.maintenance.retention import finish_removal, remove_checkpoint
from asyncckpt.storage.catalog import ABANDONED, COMMITTED, INCOMPLETE, found_at, read_manifest
from asyncckpt.storage.checkpoint_dir import manifest_or_error
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import LocalStore
from asyncckpt.storage.verification import verify_checkpoint
from asyncckpt.sync.writer import SyncWriter
from tests.storage_samples import FailingFiles, RecordingFiles, failing

pytestmark = pytest.mark.fault

CODES = [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ESTALE, errno.EINTR]
DISKS = RecordingFiles
"""Flushes nothing, so that the thousands of tries are quick."""
ANSWERS = ("its manifest cannot be read", "its parent has no committed checkpoint")
"""Of gc, when it is not sure that it may remove something."""


def save(path: pathlib.Path, layout: str = "safetensors") -> SaveId:
    config = CheckpointerConfig(rank_info=RankInfo(0, 1), layout=layout)  # type: ignore[arg-type]
    ranks = Coordination(RankInfo(0, 1), config, lambda: pytest.fail("no ranks here"), package="test")
    with SyncCheckpointer(SyncWriter(config, ranks, HookRunner(None), DISKS()), rank_info=RankInfo(0, 1)) as saver:
        saver.save({"w": torch.arange(300), "n": [7]}, path)
    return read_manifest(str(path), LocalStore()).save_id


def leave(path: pathlib.Path, scenario: str) -> pathlib.Path:
    """Leave at `path` what there is to remove, beside what is somebody else's; returns where it lies then."""
    save_id = save(path, "dcp" if "dcp" in scenario else "safetensors")
    (path / "notes.txt").write_text("mine")
    if scenario == "gc of an attempt":
        (path / MANIFEST_NAME).unlink()
    elif scenario == "gc of an unfinished dcp":
        (path / ".metadata").unlink()
    elif scenario == "gc beside a checkpoint":
        save(path.with_name("other"))
        for file in path.with_name("other").glob("rank-*"):
            file.rename(path / file.name)
        shutil.rmtree(path.with_name("other"))
    elif scenario == "gc of a tombstone":
        (path / MANIFEST_NAME).unlink()
        collected(path, DISKS())
    elif scenario == "gc of a broken one":
        aside = quarantine_checkpoint(str(path), save_id, LocalStore(DISKS()))
        assert aside is not None
        return pathlib.Path(aside)
    elif scenario.startswith("retention that goes on"):
        with pytest.raises(OSError, match="Input/output"):
            removed(path, failing("unlink", errno.EIO, at="/rank"))
    return path


SCENARIOS = (
    "gc of an attempt",
    "gc of an unfinished dcp",
    "gc beside a checkpoint",
    "gc of a tombstone",
    "gc of a broken one",
    "retention",
    "retention of dcp",
    "retention that goes on",
    "retention that goes on with dcp",
)


def collected(path: pathlib.Path, files: Files, *, tombstones: bool = False) -> str:
    rules = GarbageRules(now=time.time() + 3600, older_than_s=60, broken=True, tombstones=tombstones)
    done = collect(str(path), LocalStore(files), rules, package="test")
    if done is not None and done.error is not None:
        raise done.error
    return "" if done is None else done.garbage.kept


def removed(path: pathlib.Path, files: Files) -> str:
    """Remove what retention has chosen, or goes on with."""
    standing = manifest_or_error(str(path), LocalStore())
    if standing is None:
        finish_removal(str(path), LocalStore(files))
        return ""
    assert remove_checkpoint(str(path), standing.save_id, LocalStore(files), package="test"), (
        "it says that another one is there"
    )
    return ""


def work(scenario: str, path: pathlib.Path, files: Files) -> str:
    """Do what is under test; returns why nothing was done, where that is an answer."""
    if scenario.startswith("retention"):
        return removed(path, files)
    return collected(path, files, tombstones=scenario == "gc of a tombstone")


def ours(path: pathlib.Path) -> set[str]:
    """The names of ours that take room."""
    return {name for name in os.listdir(path) if name not in ("notes.txt", LOCK_NAME, MANIFEST_NAME)}


def check_left(scenario: str, path: pathlib.Path, what: str, *, done: bool) -> None:
    """Whole or no checkpoint, and nothing foreign is gone; `done`: there is nothing left to remove."""
    assert (path / "notes.txt").read_text() == "mine", what
    found = found_at(str(path), LocalStore())
    state = None if found is None else found.state
    if state == COMMITTED:
        assert verify_checkpoint(str(path), DISKS()).faults == [], what
    if scenario == "gc beside a checkpoint":
        assert state == COMMITTED, what
        owners = {owner_of(name) for name in ours(path)}
        assert not done or owners == {read_manifest(str(path), LocalStore()).save_id}, what
        return
    assert state in (None, ABANDONED, INCOMPLETE) or not scenario.startswith("gc ") or "broken" in scenario, what
    if done:
        assert state in (None, ABANDONED), f"{what}: {state}"
        assert ours(path) == set(), what


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_failure_of_any_call_of_a_removal_leaves_what_stays_whole_and_is_made_good_by_the_next(
    memory_path: pathlib.Path, scenario: str, late: bool
) -> None:
    """All codes; `late`: the call is done, and answers with an error all the same."""
    root = memory_path / "root"
    save(root / "earlier")
    path = leave(root / "x", scenario)
    template = shutil.move(path, memory_path / "template")
    told = 0
    for code in CODES:
        for nth in range(1, 500):
            files = FailingFiles(code, nth=nth, wanted=lambda *_: True, late=late)
            shutil.copytree(template, path)
            fds, answer, error = set(os.listdir("/proc/self/fd")), "", None
            try:
                answer = work(scenario, path, files)
            except OSError as caught:
                error = caught
            what = f"{errno.errorcode[code]} of call {nth}, {files.failed}: {error or answer or 'done'}"
            assert set(os.listdir("/proc/self/fd")) == fds, what
            assert error is None or error.errno == code, what
            assert not answer or any(said in answer for said in ANSWERS), what
            is_told = error is not None or bool(answer)
            told += is_told
            if not is_told:  # at worst the temporary name of the tombstone stays
                with_temporary = {one for one in ours(path) if is_temporary(one)}
                assert files.failed == "unlink" or not with_temporary or scenario == "gc beside a checkpoint", what
                for one in with_temporary:
                    (path / one).unlink()
            check_left(scenario, path, what, done=not is_told)
            assert work(scenario, path, DISKS()) == "", what
            check_left(scenario, path, f"the next one, after {what}", done=True)
            shutil.rmtree(path)
            if files.failed is None:
                break
        assert nth > 10, "few calls were reached"
    assert told > 5 * len(CODES)
    assert verify_checkpoint(str(root / "earlier"), Files()).state == "ok"


@pytest.mark.parametrize("method", ["open", "fstat", "preadv", "close"])
@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_a_manifest_that_cannot_be_read_is_not_taken_for_that_of_another_save(
    tmp_path: pathlib.Path, code: int, method: str
) -> None:
    path = tmp_path / "x"
    save_id = save(path)

    def is_of_manifest(name: str, args: Sequence[Any]) -> bool:
        return name == method and files.paths.get(args[0], args[0]) == str(path / MANIFEST_NAME)

    files = FailingFiles(code, wanted=is_of_manifest)
    with pytest.raises(OSError, match=re.escape(os.strerror(code))) as caught:
        remove_checkpoint(str(path), save_id, LocalStore(files), package="test")
    assert caught.value.errno == code
    assert verify_checkpoint(str(path), Files()).state == "ok"
    assert LOCK_NAME not in os.listdir(path)
