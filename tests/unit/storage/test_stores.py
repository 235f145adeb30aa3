"""storage.store: what every store does, and that commit, catalog, clean-up, retention and loads need nothing else."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from storage_samples import SAVE_ID, RecordingFiles, Snapshot, failing, manifest_of

from asyncckpt.doctor.directory import PROBES
from asyncckpt.errors import CheckpointExistsError, CheckpointNotCommittedError, CommitUnknownError
from asyncckpt.format.manifest import Manifest
from asyncckpt.format.names import LOCK_NAME, MANIFEST_NAME, SaveId, owner_of
from asyncckpt.maintenance.gc import (
    LOCK,
    TOMBSTONE,
    GarbageRules,
    collect,
    garbage_in,
    remove_temporary,
    temporaries_in,
    write_tombstone,
)
from asyncckpt.maintenance.pins import pin
from asyncckpt.maintenance.policy import RetentionPolicy
from asyncckpt.maintenance.quarantine import quarantine_checkpoint
from asyncckpt.maintenance.retention import finish_removal, prune, remove_checkpoint
from asyncckpt.storage.catalog import (
    ABANDONED,
    COMMITTED,
    candidates_in,
    found_at,
    next_epoch_beside,
    read_manifest,
    scan,
)
from asyncckpt.storage.checkpoint_dir import NO_IDENTITY, identity_of, prepare_directory, tombstone_if_readable
from asyncckpt.storage.cloud.object_store import ObjectStore
from asyncckpt.storage.commit import publish, remove_files_of, remove_leftovers
from asyncckpt.storage.local import LocalStore
from asyncckpt.storage.store import OBJECT, PREFIX, Store, UnknownOutcomeError, UnsupportedByStoreError, exclusively
from asyncckpt.storage.verification import verify_checkpoint
from tests import mounts, object_servers
from tests.limited_files import LimitedFiles
from tests.memory_store import MemoryStore
from tests.mounts import needs_root
from tests.object_servers import Server

object_servers.start_runtime()

RUN = SAVE_ID.run_id
ALL_OLD = GarbageRules(now=4e9, older_than_s=60.0)


SIMPLE = [
    "files",
    "files without links",
    pytest.param("mount", marks=[pytest.mark.root, needs_root]),
    "memory",
    "objects",
]


@pytest.fixture(scope="module", params=[*SIMPLE, *object_servers.SCHEMES])
def storage(request: pytest.FixtureRequest) -> Iterator[str | Server]:
    """What holds the objects: a server of an object store, or the name of something simpler."""
    if request.param not in object_servers.SCHEMES:
        yield request.param
        return
    with object_servers.running(request.param) as server:
        yield server


@pytest.fixture
def place(storage: str | Server, tmp_path: Path, unprobed: None) -> Iterator[tuple[Store, str]]:
    """A store, and a prefix in it that no other test has."""
    if isinstance(storage, Server):
        objects = ObjectStore(storage.root, {**storage.options(), **object_servers.NO_CONNECTION_STAYS})
        objects.put(f"{objects.root}/{tmp_path.name}/anchor/x", b"")
        yield objects, f"{objects.root}/{tmp_path.name}"
    elif storage == "files":
        yield LocalStore(), str(tmp_path)
    elif storage == "files without links":
        yield LocalStore(LimitedFiles("links", "cuts")), str(tmp_path)
    elif storage == "mount":
        with mounts.fuse(tmp_path / "mounted") as served:
            served.tell(lacks=["links", "cuts", "modes"])
            yield LocalStore(), str(served.path)
    elif storage == "objects":
        objects = ObjectStore("s3://bucket", client=object_servers.memory_store())
        objects.put("s3://bucket/store/anchor/x", b"")
        yield objects, "s3://bucket/store"
    else:
        store = MemoryStore()
        store.put("/store/anchor/x", b"")
        yield store, "/store"


def version_of(store: Store, name: str) -> str:
    return store.stat(name).version


# ---- what every store does ------------------------------------------------------------------------------------------


def test_a_link_has_the_content_and_stays_when_the_other_name_goes(place: tuple[Store, str]) -> None:
    store, root = place
    store.put(f"{root}/a", b"0123456789")
    version = store.link_version(f"{root}/a")
    try:
        store.link(f"{root}/a", f"{root}/b", version)
    except OSError as error:
        # a store without links says so, and makes nothing
        assert not isinstance(store, ObjectStore) or root.startswith("az://")
        assert error.errno in (errno.EOPNOTSUPP, errno.EPERM)
        assert set(store.names(root)) == {"a", "anchor"} - ({"anchor"} if isinstance(store, LocalStore) else set())
        return
    store.remove(f"{root}/a")
    assert store.read_whole(f"{root}/b", 10) == b"0123456789"


def test_what_has_changed_or_is_gone_is_not_linked(place: tuple[Store, str]) -> None:
    store, root = place
    store.put(f"{root}/a", b"0123456789")
    version = store.link_version(f"{root}/a")
    store.put(f"{root}/a", b"another", replace=True)
    for source in ("a", "absent"):
        with pytest.raises(OSError):
            store.link(f"{root}/{source}", f"{root}/b", version)
    assert "b" not in store.names(root)


def test_what_was_put_is_read_in_whole_and_in_part_and_is_listed(place: tuple[Store, str]) -> None:
    store, root = place
    store.put(f"{root}/a", b"0123456789")
    assert store.read_whole(f"{root}/a", 10) == b"0123456789"
    assert [store.read(f"{root}/a", *part) for part in ((0, 3), (8, 9), (10, 1), (99, 1))] == [b"012", b"89", b"", b""]
    found = store.stat(f"{root}/a")
    assert (found.kind, found.nbytes, found.is_object, found.mtime_ns > 0) == (OBJECT, 10, True, True)
    listed = {entry.name: entry for entry in store.entries(root)}
    assert listed["a"].nbytes == 10 and set(store.names(root)) == set(listed)
    store.put(f"{root}/a", b"another", replace=True)
    again = {entry.name: entry.version for entry in store.entries(root)}
    assert again["a"] != listed["a"].version and version_of(store, f"{root}/a") != found.version


def test_prefixes_are_listed_as_such_and_nothing_below_them_is(place: tuple[Store, str]) -> None:
    store, root = place
    store.make_prefix(f"{root}/p/q")
    store.put(f"{root}/p/q/a", b"x")
    assert {entry.name: entry.kind for entry in store.entries(root)}["p"] == PREFIX
    assert [(entry.name, entry.kind) for entry in store.entries(f"{root}/p/q")] == [("a", OBJECT)]


def test_what_is_absent_or_of_another_kind_is_an_error(place: tuple[Store, str]) -> None:
    store, root = place
    store.put(f"{root}/a", b"x")
    tells_removals = not isinstance(store, ObjectStore)
    for call in (store.stat, store.names, lambda name: store.read(name, 0, 1), *[store.remove] * tells_removals):
        with pytest.raises(FileNotFoundError):
            call(f"{root}/nothing")
    with pytest.raises(NotADirectoryError):
        list(store.entries(f"{root}/a"))
    with pytest.raises(OSError) as caught:
        store.read(root, 0, 1)
    assert caught.value.errno in (errno.EINVAL, errno.ENOENT)


def test_a_whole_that_is_too_long_is_not_read(place: tuple[Store, str]) -> None:
    store, root = place
    store.put(f"{root}/a", b"0123456789")
    with pytest.raises(OSError) as caught:
        store.read_whole(f"{root}/a", 9)
    assert caught.value.errno == errno.EFBIG


def test_a_name_that_is_taken_is_left_alone(place: tuple[Store, str]) -> None:
    store, root = place
    store.put(f"{root}/a", b"first")
    with pytest.raises(FileExistsError):
        store.put(f"{root}/a", b"second")
    with pytest.raises(FileExistsError):
        store.put_if_absent(f"{root}/a", b"third", temporary=f"{root}/t")
    assert store.read_whole(f"{root}/a", 99) == b"first" and "t" not in store.names(root)


def test_a_conditional_put_that_meets_its_own_success_succeeds(place: tuple[Store, str]) -> None:
    store, root = place
    for _ in range(2):
        store.put_if_absent(f"{root}/a", b"mine", temporary=f"{root}/t")
    version = version_of(store, f"{root}/a")
    for _ in range(2):
        store.replace_if(f"{root}/a", b"mine again", version, temporary=f"{root}/t")
    assert store.read_whole(f"{root}/a", 99) == b"mine again" and "t" not in store.names(root)


def test_only_what_was_seen_is_replaced(place: tuple[Store, str]) -> None:
    store, root = place
    store.put(f"{root}/a", b"one")
    seen = version_of(store, f"{root}/a")
    store.replace_if(f"{root}/a", b"two, and longer", seen, temporary=f"{root}/t")
    assert version_of(store, f"{root}/a") != seen
    with pytest.raises(FileExistsError):
        store.replace_if(f"{root}/a", b"three", seen, temporary=f"{root}/t")
    store.remove(f"{root}/a")
    with pytest.raises(FileExistsError):
        store.replace_if(f"{root}/a", b"four", seen, temporary=f"{root}/t")
    assert not {"a", "t"} & set(store.names(root))


def test_what_a_dead_process_left_under_the_temporary_name_is_in_nobodys_way(place: tuple[Store, str]) -> None:
    store, root = place
    store.put(f"{root}/t", b"half of it")
    store.put_if_absent(f"{root}/a", b"whole", temporary=f"{root}/t")
    assert store.read_whole(f"{root}/a", 99) == b"whole"


def test_loads_read_through_the_calls_of_files(place: tuple[Store, str]) -> None:
    store, root = place
    store.put(f"{root}/a", b"0123456789")
    files = store.as_files()
    fd = files.open(f"{root}/a", os.O_RDONLY)
    one, other = bytearray(4), bytearray(8)
    assert files.preadv(fd, [memoryview(one), other], 2) == 8 and one + other[:4] == b"23456789"
    assert files.fstat(fd).st_size == files.lstat(f"{root}/a").st_size == 10
    assert "a" in files.listdir(root)
    files.close(fd)


# ---- what only some do ----------------------------------------------------------------------------------------------


def test_what_a_store_lacks_is_a_typed_error() -> None:
    store = MemoryStore()
    store.put("/store/c/x", b"")
    for call in (lambda: store.lock("/store/c", 1.0), lambda: store.move("/store/c/x", "/store/c/y")):
        with pytest.raises(UnsupportedByStoreError, match="this storage has no"):
            call()
    with exclusively(store, "/store/c", 1.0) as is_locked:
        assert not is_locked
    assert (
        identity_of("/store/c", store) == NO_IDENTITY
        and store.is_own("/store/c")
        and store.resolve("/store/c") == "/store/c"
    )
    with pytest.raises(UnsupportedByStoreError):
        store.as_files().open("/store/c/y", os.O_WRONLY | os.O_CREAT)


def test_files_are_locked_by_one_holder(tmp_path: Path) -> None:
    with exclusively(LocalStore(), str(tmp_path), 1.0) as is_locked:
        assert is_locked
        with pytest.raises(OSError) as caught, LocalStore().lock(str(tmp_path), 0.05):
            pass
    assert caught.value.errno == errno.EWOULDBLOCK and os.listdir(tmp_path) == []


def test_a_put_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    for method in ("pwrite", "fsync", "close"):
        with pytest.raises(OSError):
            LocalStore(failing(method, errno.EIO)).put(f"{tmp_path}/a", b"x")
        with pytest.raises(OSError):
            LocalStore(failing(method, errno.EIO)).put_if_absent(f"{tmp_path}/a", b"x", temporary=f"{tmp_path}/t")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("method", "put"), [("link", "put_if_absent"), ("rename", "replace_if")])
def test_a_put_that_nobody_knows_the_end_of_says_so(tmp_path: Path, method: str, put: str) -> None:
    LocalStore().put(f"{tmp_path}/b", b"old")
    version = version_of(LocalStore(), f"{tmp_path}/b")

    def tried(files: RecordingFiles) -> None:
        store = LocalStore(files)
        if put == "put_if_absent":
            store.put_if_absent(f"{tmp_path}/a", b"new", temporary=f"{tmp_path}/t")
        else:
            store.replace_if(f"{tmp_path}/b", b"new", version, temporary=f"{tmp_path}/t")

    with pytest.raises(UnknownOutcomeError):
        tried(failing(method, errno.EIO))
    assert (tmp_path / "t").read_bytes() == b"new", "nothing was removed"
    tried(failing(method, errno.EIO, late=True))  # it is there: that is a success


def test_what_is_put_if_absent_is_flushed_with_all_names_beside_it_before_it_appears(tmp_path: Path) -> None:
    files = RecordingFiles()
    LocalStore(files).put_if_absent(f"{tmp_path}/a", b"x", temporary=f"{tmp_path}/t")
    done = [call for call in files.calls if call[0] in ("pwrite", "fsync", "link")]
    assert done == [
        ("pwrite", f"{tmp_path}/t"),
        ("fsync", f"{tmp_path}/t"),
        ("fsync", f"{tmp_path}"),
        ("link", f"{tmp_path}/t"),
    ]


# ---- commit, catalog, clean-up, retention and loads over a store of objects -----------------------------------------


def begun(store: Store, path: str, save_id: SaveId, scratch: Path, step: int = 0, **more: Any) -> Manifest:
    """Put a rank's files of a save at `path`, and return the manifest that commits them."""
    prepare_directory(path, save_id=save_id, store=store, fsync=True, **more)
    local = scratch / str(save_id)
    local.mkdir()
    with Snapshot({"a": 70_000, "b": 3}, save_id=save_id, seed=save_id.sequence) as snapshot:
        manifest = manifest_of(snapshot.write(str(local)), save_id=save_id, step=step)
    for file in local.iterdir():
        store.put(f"{path}/{file.name}", file.read_bytes())
    return manifest


def saved(store: Store, path: str, save_id: SaveId, scratch: Path, step: int = 0, *, overwrite: bool = False) -> None:
    manifest = begun(store, path, save_id, scratch, step, overwrite=overwrite)
    publish(path, manifest, store=store, overwrite=overwrite)
    remove_leftovers(path, save_id, store=store)


def stands(store: Store, path: str) -> SaveId:
    """Return the save that is committed at `path`, after a look at every byte of it."""
    assert verify_checkpoint(path, store.as_files()).faults == []
    return read_manifest(path, store).save_id


def ids(*sequences: int) -> Sequence[SaveId]:
    return [SaveId(1, sequence, RUN) for sequence in sequences]


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore()


@pytest.mark.usefixtures("no_clock")
def test_a_save_is_committed_found_and_read(memory: MemoryStore, tmp_path: Path) -> None:
    one, two = ids(1, 2)
    saved(memory, "/store/s1", one, tmp_path, 1)
    begun(memory, "/store/s2", two, tmp_path, 2)
    assert [(f.path, f.state) for f in scan("/store", memory)] == [
        ("/store/s1", "committed"),
        ("/store/s2", "incomplete"),
    ]
    assert [found.step for found in candidates_in("/store", memory)] == [1]
    assert next_epoch_beside("/store/s3", memory) == 2
    assert stands(memory, "/store/s1") == one
    with pytest.raises(CheckpointNotCommittedError):
        read_manifest("/store/s2", memory)
    with pytest.raises(CheckpointExistsError, match="lies inside"):
        prepare_directory("/store/s1/inner", save_id=two, store=memory, fsync=True)
    with pytest.raises(CheckpointExistsError, match="lies in it"):
        prepare_directory("/store", save_id=two, store=memory, fsync=True)


def test_a_load_fills_tensors_from_a_store_of_objects(memory: MemoryStore, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from asyncckpt.loading.load import DefaultReader

    saved(memory, "/store/s1", ids(1)[0], tmp_path, 1)
    with Snapshot({"a": 70_000, "b": 3}, save_id=ids(1)[0], seed=1) as snapshot:
        values = snapshot.values
    found, missing = DefaultReader(memory.as_files()).read("/store/s1", source="disk")
    assert missing == [] and {fqn: bytes(found[fqn].tolist()) for fqn in found} == values
    assert all(found[fqn].dtype == torch.uint8 for fqn in found)


def test_an_overwrite_replaces_what_it_has_seen_and_nothing_else(memory: MemoryStore, tmp_path: Path) -> None:
    old, middle, new = ids(1, 2, 3)
    saved(memory, "/store/s", old, tmp_path)
    manifest = begun(memory, "/store/s", new, tmp_path, overwrite=True)
    other = begun(memory, "/store/s", middle, tmp_path, overwrite=True)

    def another_is_faster(method: str, name: str) -> None:
        if method == "replace_if":
            memory.before = lambda *_: None
            publish("/store/s", other, store=memory, overwrite=True)

    memory.before = another_is_faster
    with pytest.raises(CheckpointExistsError):
        publish("/store/s", manifest, store=memory, overwrite=True)
    assert stands(memory, "/store/s") == middle
    publish("/store/s", manifest, store=memory, overwrite=True)
    remove_leftovers("/store/s", new, store=memory)
    assert stands(memory, "/store/s") == new
    assert {owner_of(name) for name in memory.names("/store/s")} == {None, new}


def test_an_answer_that_is_lost_is_no_failure_and_none_that_says_nothing_is_success(
    memory: MemoryStore, tmp_path: Path
) -> None:
    manifest = begun(memory, "/store/s", ids(1)[0], tmp_path)
    memory.lost_answers = 1
    publish("/store/s", manifest, store=memory)
    assert stands(memory, "/store/s") == ids(1)[0]

    def broken(method: str, name: str) -> None:
        if method == "put_if_absent":
            raise UnknownOutcomeError(errno.EIO, "the connection broke", name)

    manifest = begun(memory, "/store/t", ids(2)[0], tmp_path)
    memory.before = broken
    with pytest.raises(CommitUnknownError):
        publish("/store/t", manifest, store=memory)


def test_a_commit_that_was_frozen_finds_the_tombstone(memory: MemoryStore, tmp_path: Path) -> None:
    manifest = begun(memory, "/store/s", ids(1)[0], tmp_path)
    (garbage,) = garbage_in("/store", memory, ALL_OLD)

    def frozen(method: str, name: str) -> None:
        if method == "put_if_absent":
            memory.before = lambda *_: None
            done = collect(garbage.path, memory, ALL_OLD, package="test")
            assert done is not None and done.error is None and len(done.removed) == len(garbage.names)

    memory.before = frozen
    with pytest.raises(CheckpointExistsError, match="given up"):
        publish("/store/s", manifest, store=memory)
    assert memory.names("/store/s") == [MANIFEST_NAME]
    found = found_at("/store/s", memory)
    assert found is not None and found.state == ABANDONED
    saved(memory, "/store/s", ids(2)[0], tmp_path)
    assert stands(memory, "/store/s") == ids(2)[0]


def test_without_locks_only_what_can_never_be_committed_is_collected(memory: MemoryStore, tmp_path: Path) -> None:
    early, standing, late = ids(1, 2, 3)
    begun(memory, "/store/s", early, tmp_path)
    saved_manifest = begun(memory, "/store/s", standing, tmp_path)
    publish("/store/s", saved_manifest, store=memory)
    done = collect("/store/s", memory, ALL_OLD, package="test")
    assert done is not None and done.error is None and done.garbage.save_ids == (early,)
    begun(memory, "/store/s", late, tmp_path, overwrite=True)  # it may be replacing the manifest just now
    (listed,), done = garbage_in("/store", memory, ALL_OLD), collect("/store/s", memory, ALL_OLD, package="test")
    assert done is not None and done.garbage.kept == listed.kept != "" and done.removed == () and done.error is None
    assert stands(memory, "/store/s") == standing and any(owner_of(name) == late for name in memory.names("/store/s"))
    remove_files_of("/store/s", late, store=memory)  # its own writer may
    assert stands(memory, "/store/s") == standing


def test_without_locks_tombstones_and_lock_files_are_not_said_to_go(memory: MemoryStore, tmp_path: Path) -> None:
    early, standing = ids(1, 2)
    begun(memory, "/store/given-up", early, tmp_path)
    collect("/store/given-up", memory, ALL_OLD, package="test")
    saved(memory, "/store/s", standing, tmp_path)
    memory.put(f"/store/s/{LOCK_NAME}", b"")  # of a copy of a directory, say
    everything = replace(ALL_OLD, tombstones=True, locks=True)
    listed = garbage_in("/store", memory, everything)
    assert [(one.kind, "no locks" in one.kept) for one in listed] == [(TOMBSTONE, True), (LOCK, True)]
    for one in listed:
        done = collect(one.path, memory, everything, package="test")
        assert done is not None and done.removed == () and done.error is None and "no locks" in done.garbage.kept


def test_what_a_killed_doctor_has_left_is_removed_from_a_store(objects: ObjectStore) -> None:
    scratch = f"{objects.root}/runs/.asyncckpt-doctor-{'0' * 12}"
    for name in ("probe", "part"):
        objects.put(f"{scratch}/{name}", b"")
    (found,) = temporaries_in(f"{objects.root}/runs", objects, ALL_OLD, [PROBES])
    assert not found.kept and sorted(remove_temporary(found, objects)) == ["part", "probe"]
    with pytest.raises(FileNotFoundError):
        objects.names(scratch)


def test_retention_removes_what_the_policy_gives_up_behind_a_tombstone(memory: MemoryStore, tmp_path: Path) -> None:
    for number, save_id in enumerate(ids(1, 2, 3), 1):
        saved(memory, f"/store/s{number}", save_id, tmp_path, number)
    done = prune("/store", memory, RetentionPolicy(max_to_keep=2), package="test")
    assert [(one.stored.step, one.is_removed) for one in done] == [(1, True)]
    assert memory.names("/store/s1") == [MANIFEST_NAME], "a committer that was frozen must find it"
    tombstone = tombstone_if_readable("/store/s1", memory)
    assert tombstone is not None and tombstone.was_committed
    assert [found.step for found in candidates_in("/store", memory)] == [3, 2]
    assert finish_removal("/store/s1", memory)


def test_retention_leaves_what_another_save_has_replaced_meanwhile(memory: MemoryStore, tmp_path: Path) -> None:
    old, new = ids(1, 2)
    saved(memory, "/store/s", old, tmp_path)
    manifest = begun(memory, "/store/s", new, tmp_path, overwrite=True)

    def replaced(method: str, name: str) -> None:
        if method == "replace_if":
            memory.before = lambda *_: None
            publish("/store/s", manifest, store=memory, overwrite=True)

    memory.before = replaced
    assert not remove_checkpoint("/store/s", old, memory, package="test")
    assert stands(memory, "/store/s") == new


def test_what_needs_locks_or_renames_says_so_and_changes_nothing(memory: MemoryStore, tmp_path: Path) -> None:
    saved(memory, "/store/s", ids(1)[0], tmp_path)
    before = sorted(memory.names("/store/s"))
    with pytest.raises(UnsupportedByStoreError, match="locks"):
        pin("/store/s", memory)
    with pytest.raises(OSError):
        quarantine_checkpoint("/store/s", ids(1)[0], memory)
    manifest = begun(memory, "/store/d", ids(2)[0], tmp_path)
    with pytest.raises(UnsupportedByStoreError, match="locks"):
        publish("/store/d", manifest, store=memory, dcp_metadata=b"x")
    assert sorted(memory.names("/store/s")) == before and MANIFEST_NAME not in memory.names("/store/d")


def test_states_of_a_store_of_objects_are_those_of_files(memory: MemoryStore, tmp_path: Path) -> None:
    saved(memory, "/store/s", ids(1)[0], tmp_path)
    assert [found.state for found in scan("/store", memory, recursive=True)] == [COMMITTED]
    with pytest.raises(FileNotFoundError):
        scan("/elsewhere", memory)


# ---- requests to a store of objects ---------------------------------------------------------------------------------


class Counting:
    """A client of a store that counts its requests."""

    def __init__(self) -> None:
        self.counts, self.meet = Counter[str](), lambda: 0
        self._client = object_servers.memory_store()

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self.counts[name] += 1
            if name == "get":
                self.meet()
            return getattr(self._client, name)(*args, **options)

        return call


@pytest.fixture
def counting() -> Counting:
    return Counting()


@pytest.fixture
def objects(counting: Counting) -> ObjectStore:
    return ObjectStore("s3://bucket", client=counting)


def test_what_a_prune_asks_for_does_not_grow_with_what_was_removed_before(
    objects: ObjectStore, counting: Counting, tmp_path: Path
) -> None:
    counts = []
    for number, save_id in enumerate(ids(*range(1, 8)), 1):
        saved(objects, f"s3://bucket/run/s{number}", save_id, tmp_path, number)
        counting.counts.clear()
        prune("s3://bucket/run", objects, RetentionPolicy(max_to_keep=2), package="test", dead_after_s=0.0)
        counts.append(counting.counts.total())
    assert len(set(counts[3:])) == 1, counts
    assert [objects.names(f"s3://bucket/run/s{number}") for number in range(1, 6)] == [[MANIFEST_NAME]] * 5
    counting.counts.clear()
    assert [found.step for found in candidates_in("s3://bucket/run", objects)] == [7, 6]
    assert counting.counts == {"list": 1, "get": 2}
    assert [one.state for one in scan("s3://bucket/run", objects)] == [ABANDONED] * 5 + [COMMITTED] * 2


@pytest.mark.usefixtures("no_clock")
def test_what_stays_of_a_removed_checkpoint_counts_as_before_unless_it_is_old(
    objects: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (early,) = ids(1)
    manifest = begun(objects, "s3://bucket/run/early", early, tmp_path)
    for name, save_id in (("early", early), ("late", SaveId(7, 1, RUN))):
        write_tombstone(f"s3://bucket/run/{name}", save_id, objects, package="test", replaces=None)
    assert next_epoch_beside("s3://bucket/run/new", objects) == 8
    monkeypatch.setattr("asyncckpt.storage.catalog.OLD_TOMBSTONE_S", -1.0)
    assert next_epoch_beside("s3://bucket/run/new", objects) == early.epoch + 1, "whose files are there"
    with pytest.raises(CheckpointExistsError, match="given up"):
        publish("s3://bucket/run/early", manifest, store=objects)
    assert prune("s3://bucket/run", objects, RetentionPolicy(max_to_keep=1), package="test", dead_after_s=0.0) == []
    saved(objects, "s3://bucket/run/new", SaveId(8, 1, RUN), tmp_path, 1)
    prune("s3://bucket/run", objects, RetentionPolicy(max_to_keep=1), package="test", dead_after_s=0.0)
    assert objects.names("s3://bucket/run/early") == [MANIFEST_NAME], (
        "the files of a save that was given up are removed"
    )


def test_a_manifest_whose_files_are_gone_is_told_of(objects: ObjectStore, tmp_path: Path) -> None:
    for number, save_id in enumerate(ids(1, 2), 1):
        saved(objects, f"s3://bucket/run/s{number}", save_id, tmp_path, number)
    for name in set(objects.names("s3://bucket/run/s2")) - {MANIFEST_NAME}:
        objects.remove(f"s3://bucket/run/s2/{name}")
    assert [found.step for found in candidates_in("s3://bucket/run", objects)] == [2, 1]
    (kept,) = prune("s3://bucket/run", objects, RetentionPolicy(max_to_keep=1), package="test")
    assert not kept.is_removed and "not whole" in kept.kept


@pytest.mark.usefixtures("no_clock")
def test_manifests_of_a_listing_are_read_at_the_same_time(
    objects: ObjectStore, counting: Counting, tmp_path: Path
) -> None:
    for number, save_id in enumerate(ids(1, 2), 1):
        saved(objects, f"s3://bucket/run/s{number}", save_id, tmp_path, number)
    counting.meet = threading.Barrier(2, timeout=30).wait
    assert [found.step for found in candidates_in("s3://bucket/run", objects)] == [2, 1]
    assert next_epoch_beside("s3://bucket/run/s3", objects) == 2


def test_requests_are_made_while_the_interpreter_exits() -> None:
    pytest.importorskip("obstore", reason="the extra cloud is not installed")
    program = """
import atexit
from asyncckpt.storage.cloud.object_store import ObjectStore
from asyncckpt.storage.store import for_each
from obstore.store import MemoryStore

store = ObjectStore("s3://bucket", client=MemoryStore())
print(for_each(store, str, [1, 2]))
atexit.register(lambda: print(for_each(store, str, [3, 4])))
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=100)
    assert (done.stdout.splitlines(), done.stderr) == (["['1', '2']", "['3', '4']"], "")
