"""Every file call of a load fails once, in every way: the saved values, or an error that says what failed; never zeros.

Promise P2. The checkpoint itself is as it was, and the next load gives its values.
"""

from __future__ import annotations

import errno
import pathlib
from typing import Any

import pytest
import torch
from storage_samples import FailingFiles, RecordingFiles

from asyncckpt import RankInfo, SyncCheckpointer
from asyncckpt.errors import AsyncCkptError
from asyncckpt.loading.load import DefaultReader
from asyncckpt.storage.catalog import scan
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import LocalStore
from asyncckpt.storage.verification import verify_checkpoint

pytestmark = pytest.mark.fault

CODES = [
    *(errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ESTALE, errno.EINTR),
    *(errno.EINVAL, errno.EACCES, errno.ENOENT),
]


SAVED = {"large": torch.arange(90_000.0).view(300, 300), "small": torch.arange(7) - 3, "n": 5, "name": "x"}


def blank() -> dict[str, Any]:
    return {"large": torch.zeros(300, 300), "small": torch.zeros(7, dtype=torch.int64), "n": 0, "name": ""}


def is_saved(found: dict[str, Any]) -> bool:
    return bool(
        torch.equal(found["large"], SAVED["large"])
        and torch.equal(found["small"], SAVED["small"])
        and (found["n"], found["name"]) == (5, "x")
    )


def read(path: pathlib.Path, files: Files, *, into: bool) -> dict[str, Any]:
    found, missing = DefaultReader(files, RankInfo(0, 1)).read(path, blank() if into else None, threads=2)
    assert missing == []
    return dict(found)


@pytest.fixture(scope="module", params=["safetensors", "dcp"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("loads") / "x"
    with SyncCheckpointer(layout=request.param, files_per_rank=2, rank_info=RankInfo(0, 1)) as checkpointer:
        checkpointer.save(SAVED, path)
    return path


@pytest.mark.parametrize(
    ("code", "into", "late"),
    [
        *((code, bool(n % 2), False) for n, code in enumerate(CODES)),
        (errno.EIO, True, True),
        (errno.ESTALE, False, True),
    ],
)
def test_a_failing_call_of_a_load_gives_the_saved_values_or_an_error(
    saved: pathlib.Path, code: int, into: bool, late: bool
) -> None:
    """`late`: the call is done, and answers with an error all the same."""
    rehearsal = RecordingFiles()
    assert is_saved(read(saved, rehearsal, into=into))
    before, refused = {p.name: p.stat().st_mtime_ns for p in saved.iterdir()}, 0
    for nth in range(1, len(rehearsal.calls) + 1):
        files = FailingFiles(code, nth=nth, wanted=lambda *_: True, late=late)
        try:
            found = read(saved, files, into=into)
        except (AsyncCkptError, OSError) as error:
            assert str(error) and not isinstance(error, AssertionError)
            refused += 1
        else:
            assert is_saved(found), f"call {nth} ({files.failed}) failed unseen"
    assert refused > 8, "few failures count"
    assert {p.name: p.stat().st_mtime_ns for p in saved.iterdir()} == before
    assert is_saved(read(saved, Files(), into=into))


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_a_failing_call_never_makes_a_look_say_less_than_it_knows(saved: pathlib.Path, code: int) -> None:
    """`verify` and `ls`: they find the checkpoint sound, or say that they could not look; never that it is absent."""
    rehearsal = RecordingFiles()
    assert verify_checkpoint(str(saved), rehearsal).faults == []
    for nth in range(1, len(rehearsal.calls) + 1):
        files = FailingFiles(code, nth=nth, wanted=lambda *_: True)
        try:
            verdict = verify_checkpoint(str(saved), files)
        except (AsyncCkptError, OSError):
            continue
        assert verdict.faults or verdict.state == "ok", files.failed
    rehearsal = RecordingFiles()
    assert [found.state for found in scan(str(saved.parent), LocalStore(rehearsal))] == ["committed"]
    for nth in range(1, len(rehearsal.calls) + 1):
        files = FailingFiles(code, nth=nth, wanted=lambda *_: True)
        try:
            states = [found.state for found in scan(str(saved.parent), LocalStore(files))]
        except (AsyncCkptError, OSError):
            continue
        gone = code == errno.ENOENT  # what a file system says of a file that is not there must be believed
        assert gone or states in (["committed"], ["unreadable"], ["corrupt"]), (files.failed, states)
