"""The copy of a committed checkpoint to its mirror: what is sent, what is believed, and what is refused."""

from __future__ import annotations

import errno
import os
import pathlib
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from storage_samples import OTHER_ID, SAVE_ID, Snapshot, manifest_of

from asyncckpt.basics.failpoints import observed
from asyncckpt.errors import (
    CheckpointExistsError,
    CheckpointNotCommittedError,
    CommitUnknownError,
    CorruptCheckpointError,
    UnsupportedFormatError,
    UnsupportedPathError,
)
from asyncckpt.format.names import MANIFEST_NAME, SaveId, copied_shard_name, mirror_record_name, owner_of, shard_name
from asyncckpt.maintenance import mirroring
from asyncckpt.maintenance.gc import write_tombstone
from asyncckpt.maintenance.mirroring import MirrorReport, copy_to_mirror, is_mirrored, umask_of, unmirrored_in
from asyncckpt.storage.checkpoint_dir import manifest_if_readable, prepare_directory
from asyncckpt.storage.cloud.object_store import ObjectStore
from asyncckpt.storage.commit import publish
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import LocalStore
from asyncckpt.storage.store import Store
from asyncckpt.storage.verification import leftovers, verify_checkpoint
from asyncckpt_worker.bandwidth import RateLimiter
from asyncckpt_worker.mirrors.jobs import cannot_succeed
from tests import object_servers
from tests.failing_process import At, fail
from tests.saving import ENVIRONMENT, ROOT

object_servers.start_runtime()

LENGTHS = {"a": 5_000_000, "b": 300_000, "c": 3}
POINTS = (
    "mirror: begun",
    "mirror: shard written",
    "mirror: file copied",
    "mirror: files copied",
    "mirror: committed",
)


@pytest.fixture(params=["files", "objects"])
def mirror(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[tuple[Store, str]]:
    """A store for copies, and the place of one in it."""
    if request.param == "files":
        yield LocalStore(), str(tmp_path / "mirror" / "step-1")
    else:
        yield ObjectStore("s3://bucket", client=object_servers.memory_store()), "s3://bucket/mirror/step-1"


def saved(path: pathlib.Path | str, mirror: str | None, save_id: SaveId = SAVE_ID, **changes: Any) -> None:
    """Save a checkpoint whose manifest names a mirror."""
    with Snapshot(LENGTHS, save_id=save_id, n_parts=2, seed=save_id.sequence) as snapshot:
        store = LocalStore()
        prepare_directory(str(path), save_id=save_id, store=store, fsync=True, overwrite=True)
        result = snapshot.write(str(path), overwrite=True, mirror=mirror or "", **changes)
        manifest = replace(manifest_of(result, save_id=save_id), mirror=mirror)
        publish(str(path), manifest, store=store, overwrite=True)


def copy(path: pathlib.Path | str, mirror: tuple[Store, str], save_id: SaveId = SAVE_ID, **kw: Any) -> MirrorReport:
    store, place = mirror
    return copy_to_mirror(str(path), save_id, place, source=LocalStore(), target=store, **kw)


def contents(store: Store, path: str) -> dict[str, bytes]:
    return {one.name: store.read_whole(f"{path}/{one.name}", one.nbytes) for one in store.entries(path)}


def test_the_copy_has_the_same_files_verifies_and_is_recorded(tmp_path: pathlib.Path, mirror: Any) -> None:
    path, (store, place) = str(tmp_path / "step-1"), mirror
    saved(path, place)
    assert [one.path for one in unmirrored_in(str(tmp_path), LocalStore())] == [path]
    seen: list[int] = []
    report = copy(path, mirror, progress=seen.append)
    assert report.nbytes == report.copied_nbytes == sum(seen) > 5_300_000
    local = contents(LocalStore(), path)
    record = local.pop(mirror_record_name(SAVE_ID))
    copied = contents(store, place)
    assert place.encode() in record and place.encode() in copied.pop(mirror_record_name(SAVE_ID)) and copied == local
    assert verify_checkpoint(place, store.as_files()).state == "ok"
    assert is_mirrored(path, SAVE_ID, LocalStore()) and unmirrored_in(str(tmp_path), LocalStore()) == []
    found = verify_checkpoint(path, Files())
    assert found.contents is not None and leftovers(path, Files(), found.contents) == []
    again = copy(path, mirror)
    assert (again.nbytes, again.copied_nbytes) == (report.nbytes, 0), "it stands there already"


@pytest.mark.parametrize("point", POINTS)
def test_a_copy_that_was_cut_off_goes_on_and_sends_no_file_twice(
    tmp_path: pathlib.Path, mirror: Any, point: str
) -> None:
    path, (store, place) = str(tmp_path / "step-1"), mirror
    saved(path, place)
    sent = 0

    def count(nbytes: int) -> None:
        nonlocal sent
        sent += nbytes

    with observed(cut := At(point, fail)), pytest.raises((OSError, CommitUnknownError)):
        copy(path, mirror, pace=count)
    assert cut.met and not is_mirrored(path, SAVE_ID, LocalStore())
    stands = manifest_if_readable(place, store) is not None
    assert stands == (point == "mirror: committed")
    report = copy(path, mirror, pace=count)
    # Only a shard of files that was written and had no name yet is sent again.
    largest = max(len(data) for data in contents(store, place).values())
    allowed = largest if (point, store.shards_appear_whole) == ("mirror: shard written", False) else 0
    assert sent <= report.nbytes + allowed
    assert verify_checkpoint(place, store.as_files()).state == "ok" and is_mirrored(path, SAVE_ID, LocalStore())
    assert not [name for name in contents(store, place) if name.endswith(".tmp")]


def test_a_copy_that_fails_removes_nothing_that_another_worker_has_committed(
    tmp_path: pathlib.Path, mirror: Any
) -> None:
    path, (store, place) = tmp_path / "step-1", mirror
    saved(path, place)
    paced: list[int] = []

    def overtaken(nbytes: int) -> None:
        paced.append(nbytes)
        if len(paced) == 2:  # within the first shard
            copy(path, mirror)
            raise OSError(errno.EACCES, "the token has expired")

    with pytest.raises(OSError, match="the token has expired"):
        copy(path, mirror, pace=overtaken)
    assert verify_checkpoint(place, store.as_files()).state == "ok"
    assert is_mirrored(str(path), SAVE_ID, LocalStore())


@pytest.mark.parametrize("kind", [".safetensors", ".index", ".objects.json"])
@pytest.mark.parametrize("damage", ["gone", "short"])
def test_a_copy_that_is_committed_and_lacks_a_file_is_completed(
    tmp_path: pathlib.Path, mirror: Any, damage: str, kind: str
) -> None:
    path, (store, place) = tmp_path / "step-1", mirror
    saved(path, place)
    nbytes = copy(path, mirror).nbytes
    name = next(name for name in sorted(contents(store, place)) if name.endswith(kind))
    if damage == "gone":
        store.remove(f"{place}/{name}")
    else:
        store.put(f"{place}/{name}", b"{", replace=True)
    (path / mirror_record_name(SAVE_ID)).unlink()
    assert 0 < copy(path, mirror).copied_nbytes < nbytes
    assert verify_checkpoint(place, store.as_files()).state == "ok"
    assert is_mirrored(str(path), SAVE_ID, LocalStore())


def test_a_file_that_a_dead_process_had_begun_is_not_taken_for_whole(tmp_path: pathlib.Path) -> None:
    path, mirror = str(tmp_path / "step-1"), (LocalStore(), str(tmp_path / "mirror" / "step-1"))
    saved(path, mirror[1])
    name = shard_name(SAVE_ID, 0, 0)
    os.makedirs(mirror[1])
    nbytes = os.path.getsize(os.path.join(path, name))
    pathlib.Path(mirror[1], copied_shard_name(name, "0" * 12)).write_bytes(
        bytes(nbytes)
    )  # as long as it must be, and zeros
    assert copy(path, mirror).copied_nbytes > nbytes
    assert verify_checkpoint(mirror[1], Files()).state == "ok"
    assert not [one for one in os.listdir(mirror[1]) if one.endswith(".tmp")]


def test_a_copy_takes_as_long_as_the_limit_of_bandwidth_says(tmp_path: pathlib.Path, mirror: Any) -> None:
    saved(tmp_path / "step-1", mirror[1])
    slept: list[float] = []
    limiter = RateLimiter(1_000_000, lambda: 100.0 + sum(slept), slept.append)
    report = copy(tmp_path / "step-1", mirror, pace=limiter.wait)
    assert report.copied_nbytes == report.nbytes > 5_300_000
    most = report.nbytes / 1_000_000
    # What was sent last is not waited for: at most one extent.
    assert most - mirroring.EXTENT_NBYTES / 1_000_000 <= sum(slept) <= most


def test_small_files_are_compared_not_only_measured(tmp_path: pathlib.Path, mirror: Any) -> None:
    path, (store, place) = str(tmp_path / "step-1"), mirror
    saved(path, place)
    with observed(At("mirror: files copied", fail)), pytest.raises(OSError):
        copy(path, mirror)
    index = next(name for name in contents(store, place) if name.endswith(".index"))
    store.put(f"{place}/{index}", bytes(len(contents(store, place)[index])), replace=True)
    copy(path, mirror)
    assert verify_checkpoint(place, store.as_files()).state == "ok"


@pytest.mark.parametrize("damage", ["flipped", "short", "long", "gone"])
@pytest.mark.parametrize("kind", [".safetensors", ".index", ".objects.json"])
def test_a_damaged_checkpoint_is_never_committed_in_the_mirror(
    tmp_path: pathlib.Path, mirror: Any, damage: str, kind: str
) -> None:
    path, (store, place) = tmp_path / "step-1", mirror
    saved(path, place)
    victim = next(one for one in sorted(path.iterdir()) if one.name.endswith(kind))
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.unlink()
    if damage != "gone":
        victim.write_bytes({"flipped": data, "short": data[:-1], "long": data + b"x"}[damage])
    with pytest.raises(CorruptCheckpointError, match="cannot be copied to its mirror") as caught:
        copy(path, mirror)
    assert caught.value.file == victim.name
    assert manifest_if_readable(place, store) is None and not is_mirrored(str(path), SAVE_ID, LocalStore())


def test_a_checkpoint_that_was_removed_or_replaced_is_not_copied(tmp_path: pathlib.Path, mirror: Any) -> None:
    path, (store, place) = tmp_path / "step-1", mirror
    with pytest.raises(CheckpointNotCommittedError, match="was removed before"):
        copy(path, mirror)
    saved(path, place, OTHER_ID)
    with pytest.raises(CheckpointNotCommittedError, match=f"was replaced by save {OTHER_ID}"):
        copy(path, mirror)
    with pytest.raises(FileNotFoundError):
        list(store.entries(place))


def test_a_checkpoint_that_goes_while_it_is_copied_is_not_called_damaged(tmp_path: pathlib.Path, mirror: Any) -> None:
    path, (_, place) = tmp_path / "step-1", mirror
    saved(path, place)

    def remove() -> None:
        for one in [path / MANIFEST_NAME, *path.iterdir()]:
            one.unlink(missing_ok=True)

    with observed(At("mirror: file copied", remove)), pytest.raises(CheckpointNotCommittedError, match="was removed"):
        copy(path, mirror)


def test_an_earlier_copy_is_replaced_and_its_files_go(tmp_path: pathlib.Path, mirror: Any) -> None:
    path, (store, place) = tmp_path / "step-1", mirror
    saved(path, place)
    copy(path, mirror)
    saved(path, place, OTHER_ID)
    copy(path, mirror, OTHER_ID)
    assert {owner_of(name) for name in contents(store, place)} - {None} == {OTHER_ID}
    assert verify_checkpoint(place, store.as_files()).state == "ok"
    with pytest.raises(CheckpointNotCommittedError):
        copy(path, mirror)


def test_another_checkpoint_in_the_mirror_is_left_alone(tmp_path: pathlib.Path) -> None:
    path, place = tmp_path / "step-1", str(tmp_path / "mirror" / "step-1")
    saved(place, None)
    saved(path, place, OTHER_ID)
    before = contents(LocalStore(), place)
    with pytest.raises(CheckpointExistsError, match="already holds a committed checkpoint"):
        copy(path, (LocalStore(), place), OTHER_ID)
    assert contents(LocalStore(), place) == before


def test_what_was_given_up_in_the_mirror_is_not_put_there(tmp_path: pathlib.Path, mirror: Any) -> None:
    path, (store, place) = tmp_path / "step-1", mirror
    saved(path, place)
    with observed(At("mirror: files copied", fail)), pytest.raises(OSError):
        copy(path, mirror)
    write_tombstone(place, SAVE_ID, store, package="0", replaces=None)
    with pytest.raises(CheckpointExistsError, match="was given up"):
        copy(path, mirror)


def test_the_oldest_comes_first_and_what_is_its_own_mirror_is_none(tmp_path: pathlib.Path) -> None:
    for number in (2, 0, 1):
        saved(tmp_path / f"step-{9 - number}", f"/mirror/{number}", SAVE_ID.with_parts(sequence=number))
    saved(tmp_path / "step-10", str(tmp_path / "step-10"), SAVE_ID.with_parts(sequence=3))
    saved(tmp_path / "step-11", None, SAVE_ID.with_parts(sequence=4))
    assert [one.mirror for one in unmirrored_in(str(tmp_path), LocalStore())] == ["/mirror/0", "/mirror/1", "/mirror/2"]


def test_a_checkpoint_that_was_removed_after_it_was_copied_counts_as_copied(
    tmp_path: pathlib.Path, mirror: Any
) -> None:
    path = tmp_path / "step-1"
    saved(path, mirror[1])
    nbytes = copy(path, mirror).nbytes
    shutil.rmtree(path)
    assert (copy(path, mirror).nbytes, copy(path, mirror).copied_nbytes) == (nbytes, 0)


def test_a_mirror_that_is_the_checkpoint_itself_by_a_link_is_refused(tmp_path: pathlib.Path) -> None:
    saved(tmp_path / "step-1", str(tmp_path / "linked" / "step-1"))
    (tmp_path / "linked").symlink_to(tmp_path)
    with pytest.raises(UnsupportedPathError, match="is the directory of the checkpoint"):
        copy(tmp_path / "step-1", (LocalStore(), str(tmp_path / "linked" / "step-1")))


def test_a_record_of_another_save_does_not_count(tmp_path: pathlib.Path) -> None:
    path, mirror = tmp_path / "step-1", (LocalStore(), str(tmp_path / "mirror" / "step-1"))
    saved(path, mirror[1])
    copy(path, mirror)
    saved(path, mirror[1], OTHER_ID)
    assert not is_mirrored(str(path), OTHER_ID, LocalStore())
    assert [one.save_id for one in unmirrored_in(str(tmp_path), LocalStore())] == [OTHER_ID]


def test_the_copy_has_the_permissions_of_the_checkpoint(tmp_path: pathlib.Path) -> None:
    path, place = tmp_path / "step-1", tmp_path / "mirror" / "step-1"
    saved(path, str(place))
    path.chmod(0o750)
    umask = umask_of(str(path), Files())
    copy_to_mirror(str(path), SAVE_ID, str(place), source=LocalStore(), target=LocalStore(umask=umask))
    modes = {stat.S_IMODE(one.stat().st_mode) for one in place.iterdir()}
    assert (umask, modes, stat.S_IMODE(place.stat().st_mode)) == (0o027, {0o640}, 0o750)
    assert umask_of("s3://bucket/x", Files()) == 0o022


def test_blocks_that_do_not_divide_what_is_copied_at_a_time_are_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, mirror = tmp_path / "step-1", (LocalStore(), str(tmp_path / "mirror"))
    saved(path, mirror[1])
    monkeypatch.setattr(mirroring, "BLOCK_NBYTES", 4096)
    with pytest.raises(UnsupportedFormatError, match="blocks of 262144 bytes, expected a divisor of 4096"):
        copy(path, mirror)


class FullFiles(Files):
    """A file system that takes so many bytes of shards."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def pwrite(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Write, while there is room."""
        if len(buffer) > self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= len(buffer)
        return super().pwrite(fd, buffer, offset)

    def fallocate(self, fd: int, nbytes: int) -> None:
        """As a file system without it."""
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


def test_a_full_mirror_keeps_what_is_whole_and_nothing_else(tmp_path: pathlib.Path) -> None:
    path, place = tmp_path / "step-1", str(tmp_path / "mirror" / "step-1")
    saved(path, place)
    files = FullFiles(room=5_100_000)
    with pytest.raises(OSError) as caught:
        copy_to_mirror(str(path), SAVE_ID, place, source=LocalStore(), target=LocalStore(files))
    assert caught.value.errno == errno.ENOSPC and not [n for n in os.listdir(place) if n.endswith(".tmp")]
    files.room = 1 << 30
    report = copy_to_mirror(str(path), SAVE_ID, place, source=LocalStore(), target=LocalStore(files))
    assert 0 < report.copied_nbytes < report.nbytes, "the first shard was whole"
    assert verify_checkpoint(place, Files()).state == "ok"


class Flaky:
    """Lets one read of a manifest in a store fail."""

    def __init__(self, store: Store, visit: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left, self._read = visit, store.read_whole
        monkeypatch.setattr(store, "read_whole", self.read_whole)

    def read_whole(self, name: str, max_nbytes: int) -> bytes:
        """Read, or fail."""
        self.left -= os.path.basename(name) == MANIFEST_NAME
        if self.left == 0:
            self.left = -1
            raise OSError(errno.EIO, "503 for a minute", name)
        return self._read(name, max_nbytes)


@pytest.mark.parametrize("stands", ["an earlier copy", "the copy", "the copy alone"])
def test_a_manifest_in_the_mirror_that_cannot_be_read_at_one_moment_ends_no_copy_for_good(
    tmp_path: pathlib.Path, mirror: Any, monkeypatch: pytest.MonkeyPatch, stands: str
) -> None:
    store, save_id = mirror[0], OTHER_ID if stands == "an earlier copy" else SAVE_ID
    for visit in range(1, 20):
        path, there = tmp_path / "runs" / f"step-{visit}", (store, f"{mirror[1]}-{visit}")
        saved(path, there[1])
        copy(path, there)
        if stands == "an earlier copy":
            saved(path, there[1], OTHER_ID)
        elif stands == "the copy alone":
            shutil.rmtree(path)
        with monkeypatch.context() as patched:
            flaky = Flaky(store, visit, patched)
            try:
                copy(path, there, save_id)
            except Exception as error:
                assert not cannot_succeed(error), error
        assert copy(path, there, save_id).nbytes > 0
        assert verify_checkpoint(there[1], store.as_files()).state == "ok"
        if flaky.left > 0:
            break
    assert flaky.left > 0 and visit > 1


class KilledError(BaseException):
    """The process is no more."""


class DyingFiles(Files):
    """Those of a process that is killed while it writes a manifest."""

    is_dead = False

    def pwrite(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Write; of a manifest only a part."""
        if b"asyncckpt_manifest" not in bytes(buffer[:100]):
            return super().pwrite(fd, buffer, offset)
        super().pwrite(fd, buffer[:100], offset)
        self.is_dead = True
        raise KilledError

    def unlink(self, path: str) -> None:
        """Remove a file, if alive."""
        if self.is_dead:
            raise OSError(errno.EIO, "the process is dead", path)
        super().unlink(path)


def test_a_manifest_that_a_killed_worker_had_begun_is_not_published_by_another_that_copies_the_same(
    tmp_path: pathlib.Path,
) -> None:
    path, mirror = tmp_path / "step-1", (LocalStore(), str(tmp_path / "mirror" / "step-1"))
    saved(path, mirror[1])

    def another_is_killed() -> None:
        with pytest.raises(KilledError):
            copy(path, (LocalStore(DyingFiles()), mirror[1]))

    with observed(At("put: flushed", another_is_killed)):
        copy(path, mirror)
    assert verify_checkpoint(mirror[1], Files()).state == "ok"
    assert is_mirrored(str(path), SAVE_ID, LocalStore())
    assert not [one for one in os.listdir(mirror[1]) if one.endswith(".tmp")]


def test_a_manifest_that_cannot_be_read_back_is_not_recorded(tmp_path: pathlib.Path, mirror: Any) -> None:
    path, (store, place) = tmp_path / "step-1", mirror
    saved(path, place)

    def damage() -> None:
        store.put(f"{place}/{MANIFEST_NAME}", b"{", replace=True)

    with observed(At("mirror: committed", damage)), pytest.raises(CommitUnknownError, match="cannot be read back"):
        copy(path, mirror)
    assert not is_mirrored(str(path), SAVE_ID, LocalStore())


KILLED = """
import sys
from asyncckpt.basics.failpoints import observed
from asyncckpt.format.names import SaveId
from asyncckpt.maintenance.mirroring import copy_to_mirror
from asyncckpt.storage.local import LocalStore
from tests.failing_process import At, kill

path, save_id, mirror, point = sys.argv[1:]
with observed(At(point, kill)):
    copy_to_mirror(path, SaveId.parse(save_id), mirror, source=LocalStore(), target=LocalStore())
"""


@pytest.mark.parametrize("point", ["shard: reserved", "shard: cut", "shard: closed"])
def test_a_shard_whose_writer_was_killed_is_not_taken_for_whole(tmp_path: pathlib.Path, point: str) -> None:
    path, mirror = tmp_path / "step-1", (LocalStore(), str(tmp_path / "mirror" / "step-1"))
    saved(path, mirror[1])
    command = [sys.executable, "-c", KILLED, str(path), str(SAVE_ID), mirror[1], point]
    assert subprocess.run(command, env=ENVIRONMENT, cwd=ROOT, timeout=60, check=False).returncode == -9
    assert standing_in(mirror) is None
    copy(path, mirror)
    assert verify_checkpoint(mirror[1], Files()).state == "ok"


def standing_in(mirror: tuple[Store, str]) -> Any:
    return manifest_if_readable(mirror[1], mirror[0])
