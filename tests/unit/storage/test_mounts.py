"""Saves on mounts that lack links, renames, locks or random writes: what is found out, refused, and committed how."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from storage_samples import OTHER_ID, SAVE_ID, RecordingFiles, Snapshot, manifest_of

from asyncckpt.basics.failpoints import observed
from asyncckpt.errors import (
    CheckpointExistsError,
    CheckpointNotCommittedError,
    CommitUnknownError,
    CorruptCheckpointError,
    UnsupportedPathError,
)
from asyncckpt.format.manifest import encode_manifest
from asyncckpt.format.names import MANIFEST_NAME, owner_of, temporary_manifest_name
from asyncckpt.maintenance.gc import GarbageRules, collect, garbage_at
from asyncckpt.storage import files as storage_files
from asyncckpt.storage.catalog import CORRUPT, INCOMPLETE, candidates_in, found_at, read_manifest
from asyncckpt.storage.checkpoint_dir import tombstone_if_readable
from asyncckpt.storage.commit import publish, remove_leftovers
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import LocalStore
from asyncckpt.storage.mounts.abilities import BY_CREATION, BY_LINK, BY_RENAME
from asyncckpt.storage.mounts.probe import probe
from asyncckpt.storage.verification import verify_checkpoint
from tests import mounts
from tests.failing_process import At
from tests.limited_files import LimitedFiles
from tests.mounts import needs_root

pytestmark = pytest.mark.usefixtures("unprobed")

ALL_OLD = GarbageRules(now=4e9, older_than_s=60.0)
STORE = LocalStore()


def stem(root: Path) -> str:
    return str(root / temporary_manifest_name(SAVE_ID))


# ---- what a mount can do --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lacks", "expected"),
    [
        ((), {"publishes_by": BY_LINK}),
        (("hard links",), {"publishes_by": BY_RENAME}),
        (("links",), {"publishes_by": BY_CREATION}),
        (("links of rclone",), {"publishes_by": BY_CREATION}),
        (("links", "locks"), {"publishes_by": None, "locks": False}),
        (("locks",), {"publishes_by": BY_LINK, "locks": False}),
        (("renames",), {"replaces": False}),
        (("random writes",), {"writes_anywhere": False, "truncates": False}),
        (("cuts",), {"truncates": False, "keeps_content": True}),
        (("removal",), {"removes": False}),
        (("fsync",), {"flushes": False}),
    ],
)
def test_what_a_mount_lacks_is_found_out_by_doing_it(
    tmp_path: Path, lacks: tuple[str, ...], expected: dict[str, object]
) -> None:
    whole = {
        "publishes_by": BY_LINK,
        "writes_anywhere": True,
        "truncates": True,
        "keeps_content": True,
        "flushes": True,
    }
    whole |= {"replaces": True, "locks": True, "removes": True}
    if "random writes" in lacks:
        whole["keeps_content"] = False  # nobody has looked
    found = probe(stem(tmp_path), LimitedFiles(*lacks))
    assert {name: getattr(found, name) for name in whole} == {**whole, **expected}
    left = os.listdir(tmp_path)
    assert left == [] or lacks == ("removal",)
    assert all(owner_of(name) == SAVE_ID for name in left), "gc would know them"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.ESTALE])
def test_an_error_that_is_no_refusal_says_nothing_of_the_mount_and_fails_that_save_alone(
    tmp_path: Path, code: int
) -> None:
    class Failing(LimitedFiles):
        def before(self, name: str, args: object) -> None:
            if name == "pwrite":
                raise OSError(code, "now")

    with Snapshot({"a": 10}) as snapshot:
        with pytest.raises(OSError, match="now") as caught:
            snapshot.save(str(tmp_path / "x"), Failing())
        assert caught.value.errno == code and os.listdir(tmp_path) == []
        snapshot.save(str(tmp_path / "x"), LimitedFiles())


@pytest.mark.parametrize(
    ("lacks", "said"),
    [
        (("random writes",), "in order only"),
        (("links", "locks"), "open.O_EXCL. together with flock"),
        (("removal",), "the removal of files"),
        (("fsync",), "fsync=False does without"),
    ],
)
def test_a_mount_that_cannot_carry_a_save_is_refused_by_name_before_anything_is_written(
    tmp_path: Path, lacks: tuple[str, ...], said: str
) -> None:
    files = LimitedFiles(*lacks)
    with Snapshot({"a": 10}) as snapshot, pytest.raises(UnsupportedPathError, match=said) as caught:
        snapshot.save(str(tmp_path / "x"), files)
    assert caught.value.path == str(tmp_path / "x") and "Nothing was written" in str(caught.value)
    assert not any("safetensors" in str(where) for _, where in files.calls)
    assert os.listdir(tmp_path) == [] or lacks == ("removal",)


@pytest.mark.parametrize(
    ("lacks", "said"), [("renames", "rename that replaces"), ("locks", "flock, as overwrite=True")]
)
def test_overwrite_is_refused_where_nothing_can_be_replaced_in_one_step_and_plain_saves_are_not(
    tmp_path: Path, lacks: str, said: str
) -> None:
    with Snapshot({"a": 10}) as snapshot, Snapshot({"a": 10}, save_id=OTHER_ID) as other:
        snapshot.save(str(tmp_path / "x"), LimitedFiles(lacks))
        with pytest.raises(UnsupportedPathError, match=said):
            other.save(str(tmp_path / "x"), LimitedFiles(lacks), overwrite=True)
    assert read_manifest(str(tmp_path / "x"), STORE).save_id == SAVE_ID
    assert verify_checkpoint(str(tmp_path / "x"), Files()).faults == []


def test_layout_dcp_is_refused_where_nothing_can_be_replaced_in_one_step(tmp_path: Path) -> None:
    with Snapshot({"a": 10}) as snapshot, pytest.raises(UnsupportedPathError, match="layout='dcp'"):
        snapshot.write(str(tmp_path), LimitedFiles("renames"), layout="dcp")
    assert os.listdir(tmp_path) == []


def test_what_was_known_of_another_mount_with_the_same_number_costs_one_save(tmp_path: Path) -> None:
    with Snapshot({"a": 10}) as snapshot:
        snapshot.save(str(tmp_path / "x"), LimitedFiles())
        with pytest.raises(OSError) as caught:
            snapshot.save(str(tmp_path / "y"), LimitedFiles("links"))
        assert caught.value.errno == errno.EINVAL
        snapshot.save(str(tmp_path / "z"), LimitedFiles("links"))


def test_a_mount_is_probed_once_a_process_and_a_disk_never(tmp_path: Path) -> None:
    def probes(files: RecordingFiles, number: int) -> int:
        with Snapshot({"a": 10}) as snapshot:
            snapshot.save(str(tmp_path / f"{number}{files.__class__.__name__}"), files)
        return sum(method == "open" and where.endswith(("-1", "-2")) for method, where in files.calls)

    assert [probes(LimitedFiles("links"), n) > 0 for n in range(3)] == [True, False, False]
    assert [probes(RecordingFiles(), n) for n in range(2)] == [0, 0]


def test_a_shard_is_written_in_its_own_length_where_it_cannot_be_cut(tmp_path: Path) -> None:
    with Snapshot({"a": 300_001}) as snapshot:
        snapshot.save(str(tmp_path / "x"), LimitedFiles("cuts"))
    assert verify_checkpoint(str(tmp_path / "x"), Files()).faults == []


# ---- the commit by exclusive creation -------------------------------------------------------------------------------


@pytest.fixture(params=["calls", pytest.param("mount", marks=[pytest.mark.root, needs_root])])
def linkless(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, Callable[[], Files]]]:
    """A directory on a mount without links, and what makes its calls."""
    if request.param == "calls":
        yield tmp_path, lambda: LimitedFiles("links")
        return
    with mounts.fuse(tmp_path / "mounted") as served:
        served.tell(lacks=["links"])
        yield served.path, Files


def test_a_manifest_is_put_whole_and_flushed_before_the_temporary_one_goes(tmp_path: Path) -> None:
    files = LimitedFiles("links")
    LocalStore(files).put_if_absent(f"{tmp_path}/a", b"x", temporary=f"{tmp_path}/t")
    done = [call for call in files.calls if call[0] in ("pwrite", "fsync", "unlink") and call[1][-2] not in "-"]
    assert done == [
        ("unlink", f"{tmp_path}/t"),
        ("pwrite", f"{tmp_path}/t"),
        ("fsync", f"{tmp_path}/t"),
        ("fsync", f"{tmp_path}"),
        ("pwrite", f"{tmp_path}/a"),
        ("fsync", f"{tmp_path}/a"),
        ("fsync", f"{tmp_path}"),
        ("unlink", f"{tmp_path}/t"),
    ]


def committed(path: Path, files: Files, save_id: object = SAVE_ID, **more: bool) -> None:
    with Snapshot({"a": 70_000, "b": 3}, save_id=save_id) as snapshot:  # type: ignore[arg-type]
        snapshot.save(str(path), files, **more)
    assert read_manifest(str(path), LocalStore(files)).save_id == save_id
    assert verify_checkpoint(str(path), files).faults == []


def test_saves_and_overwrites_on_a_mount_without_links(linkless: tuple[Path, Callable[[], Files]]) -> None:
    root, files = linkless
    committed(root / "x", files())
    with Snapshot({"a": 10}, save_id=OTHER_ID) as snapshot, pytest.raises(CheckpointExistsError):
        snapshot.save(str(root / "x"), files())
    committed(root / "x", files(), OTHER_ID, overwrite=True)
    remove_leftovers(str(root / "x"), OTHER_ID, store=LocalStore(files()))
    assert {owner_of(name) for name in os.listdir(root / "x")} == {None, OTHER_ID}


def torn(path: Path, found: bytes, whole: bytes, *, beside: bool = True) -> None:
    """Leave what a writer leaves that dies while it fills the manifest; `beside`: with its temporary one."""
    (path / MANIFEST_NAME).write_bytes(found)
    if beside:
        (path / temporary_manifest_name(SAVE_ID)).write_bytes(whole)


def written(path: Path, files: Files) -> bytes:
    """Write a rank's files, and return the manifest that commits them."""
    path.mkdir(exist_ok=True)
    with Snapshot({"a": 70_000}) as snapshot:
        return encode_manifest(manifest_of(snapshot.write(str(path), files)))


PARTS: list[Callable[[bytes], bytes]] = [
    lambda whole: b"",
    lambda whole: whole[:1],
    lambda whole: whole[: len(whole) // 2],
    lambda whole: whole[:-1],
    lambda whole: bytes(len(whole)),
    lambda whole: whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2),
]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("then", ["save", "gc"])
def test_a_torn_manifest_commits_nothing_and_is_in_nobodys_way(
    linkless: tuple[Path, Callable[[], Files]], part: Callable[[bytes], bytes], then: str
) -> None:
    root, files = linkless
    path, store = root / "x", LocalStore(files())
    whole = written(path, files())
    torn(path, part(whole), whole)
    with pytest.raises(CheckpointNotCommittedError):
        read_manifest(str(path), store)
    found = found_at(str(path), store)
    assert found is not None and found.state == INCOMPLETE and candidates_in(str(root), store) == []
    if then == "save":
        committed(path, files(), OTHER_ID)
        return
    done = collect(str(path), store, ALL_OLD, package="test")
    assert done is not None and done.error is None and not done.garbage.kept
    assert os.listdir(path) == [MANIFEST_NAME] and tombstone_if_readable(str(path), store) is not None


@pytest.mark.parametrize("end", [b"", b"more"])
def test_a_manifest_that_another_machine_is_writing_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: bytes
) -> None:
    """The lock of a FUSE mount does not reach it."""
    path = tmp_path / "x"
    whole = written(path, LimitedFiles("links"))
    torn(path, whole[:10], whole)
    goes_on = whole if not end else whole[:200]
    monkeypatch.setattr("time.sleep", lambda s: (path / MANIFEST_NAME).write_bytes(goes_on))
    with Snapshot({"a": 10}, save_id=OTHER_ID) as snapshot, pytest.raises(OSError) as caught:
        snapshot.save(str(path), LimitedFiles("links"))
    assert isinstance(caught.value, CheckpointExistsError) or caught.value.errno == errno.EAGAIN
    assert (path / MANIFEST_NAME).read_bytes() == goes_on


@pytest.mark.parametrize("part", PARTS)
def test_a_damaged_manifest_that_nobody_was_writing_is_left_alone(
    tmp_path: Path, part: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "x"
    whole = written(path, LimitedFiles("links"))
    torn(path, part(whole), whole, beside=False)
    with pytest.raises(CorruptCheckpointError):
        read_manifest(str(path), STORE)
    found = found_at(str(path), STORE)
    assert found is not None and found.state == CORRUPT and len(candidates_in(str(tmp_path), STORE)) == 1
    with Snapshot({"a": 10}, save_id=OTHER_ID) as snapshot, pytest.raises(CheckpointExistsError):
        snapshot.save(str(path), LimitedFiles("links"), overwrite=True)
    garbage = garbage_at(str(path), STORE, ALL_OLD)
    assert garbage is not None and garbage.kept and (path / MANIFEST_NAME).read_bytes() == part(whole)


def test_a_manifest_that_differs_from_the_temporary_one_beside_it_is_damaged_and_not_torn(tmp_path: Path) -> None:
    path = tmp_path / "x"
    whole = written(path, Files())
    torn(path, b"{" + whole[2:40], whole)
    with pytest.raises(CorruptCheckpointError):
        read_manifest(str(path), STORE)


def test_a_reader_that_meets_the_writer_at_work_reads_what_it_completed(tmp_path: Path) -> None:
    path = tmp_path / "x"
    whole = written(path, Files())
    torn(path, whole[:100], whole)

    class Meanwhile(RecordingFiles):
        def before(self, name: str, args: object) -> None:
            if name == "listdir":  # between the look at the manifest and the one at what is beside it
                (path / MANIFEST_NAME).write_bytes(whole)
                (path / temporary_manifest_name(SAVE_ID)).unlink(missing_ok=True)

    assert read_manifest(str(path), LocalStore(Meanwhile())).save_id == SAVE_ID


# ---- errors and rivals ----------------------------------------------------------------------------------------------


class Broken(LimitedFiles):
    """Fails each of some calls once, upon the manifest's own name."""

    def __init__(self, *broken: str) -> None:
        super().__init__("links")
        self.broken = list(broken)

    def before(self, name: str, args: object) -> None:
        super().before(name, args)  # type: ignore[arg-type]
        path = args[0]  # type: ignore[index]
        with self.lock:
            where = self.paths.get(path, path) if isinstance(path, int) else path
        if name in self.broken and str(where).endswith(f"/{MANIFEST_NAME}"):
            self.broken.remove(name)
            raise OSError(errno.EIO, "injected", str(where))


@pytest.mark.parametrize("call", ["pwrite", "fsync", "close"])
def test_a_manifest_that_cannot_be_filled_is_taken_away_again_and_the_save_has_failed(
    tmp_path: Path, call: str
) -> None:
    with Snapshot({"a": 10}) as snapshot, pytest.raises(OSError, match="injected") as caught:
        snapshot.save(str(tmp_path / "x"), Broken(call))
    assert caught.value.errno == errno.EIO and not isinstance(caught.value, CommitUnknownError)
    names = os.listdir(tmp_path / "x")
    assert MANIFEST_NAME not in names and temporary_manifest_name(SAVE_ID) not in names


def test_a_manifest_that_can_neither_be_filled_nor_removed_is_unknown_even_if_it_reads_as_whole(tmp_path: Path) -> None:
    with Snapshot({"a": 10}) as snapshot, pytest.raises(CommitUnknownError):
        snapshot.save(str(tmp_path / "x"), Broken("close", "unlink"))


def test_what_another_machine_has_put_meanwhile_is_left_alone(tmp_path: Path) -> None:
    """The lock of a FUSE mount does not reach other machines."""
    path = tmp_path / "x"
    with Snapshot({"a": 10}, save_id=OTHER_ID) as other:
        path.mkdir()
        theirs = encode_manifest(manifest_of(other.write(str(path)), save_id=OTHER_ID))
    replaced = At("put: filled", lambda: (path / MANIFEST_NAME).write_bytes(theirs) and None)
    with Snapshot({"a": 10}) as snapshot, observed(replaced), pytest.raises(CheckpointExistsError):
        snapshot.save(str(path), LimitedFiles("links"))
    assert replaced.met and read_manifest(str(path), STORE).save_id == OTHER_ID


def test_a_save_whose_files_another_machine_removes_while_it_publishes_is_no_success(tmp_path: Path) -> None:
    path = tmp_path / "x"

    def remove() -> None:
        for file in path.glob("rank-*.index"):
            file.unlink()

    removed = At("put: created", remove)
    with Snapshot({"a": 10}) as snapshot, observed(removed), pytest.raises(CommitUnknownError, match="another machine"):
        snapshot.save(str(path), LimitedFiles("links"))


def test_of_two_saves_to_one_path_the_first_to_create_the_name_wins(linkless: tuple[Path, Callable[[], Files]]) -> None:
    root, files = linkless
    path, store = root / "x", LocalStore(files())
    with Snapshot({"a": 10}) as one, Snapshot({"a": 20}, save_id=OTHER_ID) as two:
        path.mkdir()
        first, second = manifest_of(one.write(str(path))), manifest_of(two.write(str(path)), save_id=OTHER_ID)
        refused: list[OSError] = []

        def rival() -> None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("asyncckpt.storage.commit.LOCK_TIMEOUT_S", 0.05)
                try:
                    publish(str(path), second, store=LocalStore(files()))
                except OSError as error:
                    refused.append(error)

        with observed(At("put: created", rival)):
            publish(str(path), first, store=store)
        assert len(refused) == 1 and refused[0].errno == errno.EWOULDBLOCK
        with pytest.raises(CheckpointExistsError):
            publish(str(path), second, store=store)
    assert read_manifest(str(path), store).save_id == SAVE_ID


# ---- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.root
@needs_root
@pytest.mark.parametrize("lacks", [["sizes"], ["sizes", "links"], ["links", "cuts", "modes"]])
def test_a_size_that_a_mount_shows_late_is_waited_for(tmp_path: Path, lacks: list[str]) -> None:
    with mounts.fuse(tmp_path / "mounted") as served:
        served.tell(lacks=lacks)
        committed(served.path / "x", Files())


def test_a_length_that_stays_wrong_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_files, "SEEN_WITHIN_S", 0.1)

    class Longer(RecordingFiles):
        def ftruncate(self, fd: int, nbytes: int) -> None:
            super().ftruncate(fd, nbytes + 1)

    with Snapshot({"a": 10}) as snapshot, pytest.raises(OSError, match="bytes long after"):
        snapshot.save(str(tmp_path / "x"), Longer())


@pytest.mark.root
@needs_root
def test_a_mount_of_new_files_in_order_only_is_refused(tmp_path: Path) -> None:
    """As mountpoint-s3, and rclone without a cache, are."""
    with mounts.fuse(tmp_path / "mounted") as served:
        served.tell(lacks=["links", "renames", "random writes", "modes"])
        with Snapshot({"a": 10}) as snapshot, pytest.raises(UnsupportedPathError, match="in order only"):
            snapshot.save(str(served.path / "x"))
        assert os.listdir(served.path) == []
