"""storage.cloud: shards in parts, errors of the store, URLs. What every store does is in test_stores."""

from __future__ import annotations

import errno
import http.server
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from storage_samples import SAVE_ID, Snapshot, manifest_of

from asyncckpt.basics.paths import absolute_path, checkpoint_path
from asyncckpt.basics.urls import location_of, parent_of
from asyncckpt.errors import ConfigError, UnsupportedPathError
from asyncckpt.format.checksums import BLOCK_NBYTES
from asyncckpt.format.names import SaveId
from asyncckpt.maintenance.gc import write_tombstone
from asyncckpt.storage.catalog import MAX_CLOCK_EPOCH, candidates_in, next_epoch_beside
from asyncckpt.storage.checkpoint_dir import is_pinned
from asyncckpt.storage.cloud import object_shards, object_store, retries
from asyncckpt.storage.cloud.object_shards import ObjectShardWriter
from asyncckpt.storage.cloud.object_store import ObjectStore
from asyncckpt.storage.cloud.store_errors import as_os_errors, message_of
from asyncckpt.storage.commit import publish
from asyncckpt.storage.local import store_over
from asyncckpt.storage.locate import files_at, store_at, with_storage_options
from asyncckpt.storage.store import OBJECT, PREFIX, UnknownOutcomeError, UnsupportedByStoreError
from asyncckpt.storage.verification import verify_checkpoint
from tests import gcs_server, object_servers
from tests.object_servers import Server

pytest.importorskip("obstore", reason="the extra cloud is not installed")
object_servers.start_runtime()

PATH = "s3://bucket/runs/a/step-1"
NO_BUCKET = r"NoSuchBucket|ContainerNotFound"


@pytest.fixture
def store() -> ObjectStore:
    return ObjectStore("s3://bucket", client=object_servers.memory_store())


@pytest.fixture(scope="module", params=object_servers.SCHEMES)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with object_servers.running(request.param) as found:
        yield found


@pytest.fixture
def served(server: Server) -> ObjectStore:
    """A bucket of a server."""
    return ObjectStore(server.root, {**server.options(), **object_servers.NO_CONNECTION_STAYS})


class Upload:
    """What `open_upload` returns: notes what it is given."""

    def __init__(self, fails_at: int = 1 << 60) -> None:
        self.data, self.closed, self._fails_at = bytearray(), False, fails_at

    def write(self, piece: bytes) -> None:
        if len(self.data) + len(piece) > self._fails_at:
            raise ConnectionResetError("the store went away")
        self.data += piece

    def close(self) -> None:
        self.closed = True


def shard_of(data: bytes, upload: Upload, nbytes_there: int | None = None, **more: Any) -> ObjectShardWriter:
    from asyncckpt.storage.store import OBJECT, Entry

    there = len(data) if nbytes_there is None else nbytes_there
    return ObjectShardWriter(
        "s3://bucket/x",
        memoryview(data),
        0,
        len(data),
        block_nbytes=BLOCK_NBYTES,
        **{"open_upload": lambda *_: upload, "stat": lambda name: Entry(name, OBJECT, there, 0, ""), **more},
    )


def in_threads(calls: Sequence[Any]) -> list[BaseException]:
    errors: list[BaseException] = []

    def run(call: Any) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return errors


# ---- shards ---------------------------------------------------------------------------------------------------------


def test_extents_of_several_threads_are_uploaded_in_the_order_of_the_shard() -> None:
    data, upload = os.urandom(8 << 20), Upload()
    shard = shard_of(data, upload)
    extents = [(at, at + (1 << 20)) for at in range(0, len(data), 1 << 20)]
    assert in_threads([lambda e=e: shard.write_extent(*e) for e in reversed(extents)]) == []
    shard.finish()
    assert bytes(upload.data) == data and upload.closed and not shard.direct


def test_an_upload_whose_beginning_fails_begins_again_with_all_that_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "FIRST_PAUSE_S", 0.01)
    data, begun = os.urandom(object_shards.PART_NBYTES + (1 << 20)), list[Upload]()

    def begin(*_: Any) -> Upload:
        begun.append(Upload(fails_at=3 << 20) if not begun else Upload())
        return begun[-1]

    shard = shard_of(data, Upload(), open_upload=begin)
    shard.write_extent(0, 2 << 20)
    shard.write_extent(2 << 20, len(data))
    shard.finish()
    assert len(begun) == 2 and bytes(begun[1].data) == data and begun[1].closed and not begun[0].closed


def test_a_thread_that_waits_for_its_turn_stops_when_another_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "RETRY_FOR_S", 0.0)
    shard = shard_of(bytes(4 << 20), Upload(fails_at=0))
    errors = in_threads([lambda: shard.write_extent(1 << 20, 2 << 20), lambda: shard.write_extent(0, 1 << 20)])
    numbers = [error.errno for error in errors if isinstance(error, OSError)]
    assert sorted(numbers) == sorted([errno.EREMOTEIO, errno.ECANCELED])
    shard.abandon()
    waiting = shard_of(bytes(4 << 20), Upload())
    threading.Timer(0.05, waiting.stop).start()
    with pytest.raises(OSError) as caught:
        waiting.write_extent(1 << 20, 2 << 20)
    assert caught.value.errno == errno.ECANCELED
    waiting.abandon()


def test_an_upload_whose_last_answer_was_lost_has_succeeded_if_the_object_is_there() -> None:
    class Lost(Upload):
        def close(self) -> None:
            raise OSError("the connection broke")

    def nothing(name: str) -> Any:
        raise FileNotFoundError(errno.ENOENT, "nothing", name)

    there, absent = shard_of(b"x", Lost()), shard_of(b"x", Lost(), stat=nothing)
    for shard in (there, absent):
        shard.write_extent(0, 1)
    there.finish()
    with pytest.raises(OSError, match="the connection broke") as caught:
        absent.finish()
    assert caught.value.errno == errno.EREMOTEIO


class RefusingServer(http.server.BaseHTTPRequestHandler):
    """Refuses each PUT as S3 does, and has no object."""

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        is_put = self.command == "PUT"
        body = b"<Error><Code>AccessDenied</Code></Error>" if is_put else b"<Error><Code>NoSuchKey</Code></Error>"
        self.send_response(self.refusal if is_put else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    refusal = 403
    do_GET = do_HEAD = do_PUT = _answer

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.mark.parametrize("status", [401, 403])
def test_a_small_shard_that_the_store_refuses_is_refused_as_other_puts_are(status: int) -> None:
    handler = type("Handler", (RefusingServer,), {"refusal": status})
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            key = {"access_key_id": "a", "secret_access_key": "b", "region": "us-east-1"}
            url = f"http://127.0.0.1:{server.server_port}"
            store = ObjectStore("s3://bucket", {**key, "endpoint": url, **object_servers.NO_CONNECTION_STAYS})
            shard = store.shard_writer(
                "s3://bucket/x", memoryview(b"x"), 0, 1, block_nbytes=4096, aligned=False, fsync=True
            )
            shard.write_extent(0, 1)
            with pytest.raises(PermissionError, match="AccessDenied") as caught:
                shard.finish()
            shard.abandon()
        finally:
            server.shutdown()
            thread.join()
    assert (caught.value.errno, caught.value.filename) == (errno.EACCES, "s3://bucket/x")


def test_an_object_that_is_shorter_than_what_was_uploaded_is_an_error() -> None:
    shard = shard_of(bytes(1 << 20), Upload(), nbytes_there=1 << 19)
    shard.write_extent(0, 1 << 20)
    with pytest.raises(OSError, match="has 524288 bytes, expected 1048576"):
        shard.finish()


def test_uploads_that_ended_in_any_way_make_room_for_others() -> None:
    for _ in range(3 * object_shards.UPLOADS_AT_A_TIME):
        done, given_up = shard_of(b"x", Upload()), shard_of(b"x", Upload())
        done.write_extent(0, 1)
        given_up.write_extent(0, 1)
        done.finish()
        given_up.abandon()
    assert object_shards._uploads._running == 0


def test_an_upload_waits_for_slow_ones_and_not_for_those_that_send_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(object_shards.time, "monotonic", lambda: now)
    limit, waits = object_shards.UploadLimit(), list[float]()

    def wait(timeout_s: float) -> None:
        nonlocal now
        waits.append(timeout_s)
        now += timeout_s
        if len(waits) < 5:
            limit.note_sent()

    monkeypatch.setattr(limit._ended, "wait", wait)
    n, wanted = object_shards.UPLOADS_AT_A_TIME, lambda: True
    assert [limit.acquire(wanted) for _ in range(n + 1)] == [True] * n + [False]
    assert sum(waits) == pytest.approx(object_shards.UPLOAD_WAIT_S + 4 * object_shards.ASK_EVERY_S)
    limit.release()
    assert limit.acquire(wanted)


def test_a_save_that_has_failed_does_not_wait_for_other_uploads(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = object_shards.UploadLimit()
    monkeypatch.setattr(object_shards, "_uploads", limit)
    for _ in range(object_shards.UPLOADS_AT_A_TIME):
        assert limit.acquire(lambda: True)
    upload = Upload()
    shard, caught = shard_of(b"x", upload), list[OSError]()

    def write() -> None:
        try:
            shard.write_extent(0, 1)
        except OSError as error:
            caught.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    shard.stop()
    thread.join(20)
    assert not thread.is_alive() and [error.errno for error in caught] == [errno.ECANCELED]
    assert not shard.created and limit._running == object_shards.UPLOADS_AT_A_TIME


def test_a_rank_is_written_in_parts_and_verifies(served: ObjectStore) -> None:
    path = f"{served.root}/runs/a/step-1"
    with Snapshot({"a": 3 * object_shards.PART_NBYTES, "b": 5}, save_id=SAVE_ID) as snapshot:
        result = snapshot.write(path, served.as_files())
    assert result.record.nbytes > 3 * object_shards.PART_NBYTES and not result.direct
    assert len(served.names(path)) == 3
    assert verify_checkpoint(path, served.as_files()).contents is None, "nothing is committed yet"


def test_a_shard_that_is_given_up_does_not_appear(served: ObjectStore) -> None:
    name, data = f"{served.root}/given-up", bytes(3 * object_shards.PART_NBYTES)
    shard = served.shard_writer(
        name, memoryview(data), 0, len(data), block_nbytes=BLOCK_NBYTES, aligned=False, fsync=True
    )
    shard.write_extent(0, 2 * object_shards.PART_NBYTES)
    shard.abandon()
    with pytest.raises(FileNotFoundError):
        served.stat(name)


# ---- the store ------------------------------------------------------------------------------------------------------


def test_listings_of_many_pages_are_complete(served: ObjectStore) -> None:
    names = [f"{served.root}/pages/{n:03}/x" for n in range(2 * gcs_server.PAGE_NAMES + 1)]
    for name in names:
        served.put(name, b"")
    assert sorted(served.names(f"{served.root}/pages")) == [name.split("/")[-2] for name in names]
    assert len(served.listed(f"{served.root}/pages").names(f"{served.root}/pages")) == len(names)


def test_names_with_spaces_percent_signs_and_letters_of_all_alphabets_are_kept(served: ObjectStore) -> None:
    name = f"{served.root}/odd/\u00fc a+b%20.x=1"
    served.put(name, b"odd")
    assert served.names(f"{served.root}/odd") == ["\u00fc a+b%20.x=1"] and served.read_whole(name, 9) == b"odd"


def test_of_threads_that_put_one_name_one_has_put_it(served: ObjectStore) -> None:
    name, done = f"{served.root}/one", list[int]()

    def put(number: int) -> None:
        served.put_if_absent(name, str(number).encode(), temporary="")
        done.append(number)

    errors = in_threads([lambda n=n: put(n) for n in range(8)])
    assert len(done) == 1 and {type(error) for error in errors} == {FileExistsError}
    assert served.read_whole(name, 9) == str(done[0]).encode()


def test_what_is_gone_is_removed_without_a_complaint(served: ObjectStore) -> None:
    served.put(f"{served.root}/gone", b"")
    for _ in range(2):
        served.remove(f"{served.root}/gone")
    with pytest.raises(FileNotFoundError):
        served.stat(f"{served.root}/gone")


def test_a_bucket_that_does_not_exist_is_called_so(server: Server) -> None:
    store = ObjectStore(f"{server.scheme}://nobodys", {**server.options(), **object_servers.NO_CONNECTION_STAYS})
    with pytest.raises(OSError, match=NO_BUCKET):
        store.read_whole(f"{server.scheme}://nobodys/x", 9)
    with pytest.raises(OSError, match=NO_BUCKET):
        store.put_if_absent(f"{server.scheme}://nobodys/x", b"", temporary="")


@pytest.mark.parametrize("scheme", ["gs", "az"])  # moto takes every key
def test_a_key_that_is_refused_is_an_error_at_once_and_is_not_shown(scheme: str) -> None:
    with object_servers.running(scheme) as server:
        wrong = {"gs": {"bearer_token": "SECRET"}, "az": {"account_key": "U0VDUkVU"}}[scheme]
        store = ObjectStore(server.root, {**server.options(), **wrong, **object_servers.NO_CONNECTION_STAYS})
        for call in (store.stat, lambda name: store.put_if_absent(name, b"", temporary="")):
            with pytest.raises(PermissionError) as caught:
                call(f"{server.root}/x")
            assert "SECRET" not in str(caught.value) and "U0VDUkVU" not in str(caught.value)


def test_a_listing_answers_for_all_that_is_below_and_asks_for_nothing_more(store: ObjectStore) -> None:
    for name in ("a/x", "a/y", "b/z", "top"):
        store.put(f"s3://bucket/root/{name}", name.encode())
    listed = store.listed("s3://bucket/root")
    store.put("s3://bucket/root/later", b"")
    assert sorted(listed.names("s3://bucket/root")) == ["a", "b", "top"]
    assert sorted(listed.names("s3://bucket/root/a")) == ["x", "y"]
    assert listed.stat("s3://bucket/root/a/x").nbytes == 3 and listed.read_whole("s3://bucket/root/a/x", 9) == b"a/x"
    for call in (listed.stat, listed.names, lambda name: listed.read_whole(name, 9)):
        with pytest.raises(FileNotFoundError):
            call("s3://bucket/root/later")
    with pytest.raises(NotADirectoryError):
        listed.names("s3://bucket/root/top")
    assert listed.listed("s3://bucket/root/a") is listed


def test_an_empty_object_does_not_hide_what_is_below_its_name(store: ObjectStore) -> None:
    for name in ("step-2", "step-2/manifest.json", "empty"):
        store.put(f"s3://bucket/run/{name}", b"" if "/" not in name else b"x")
    for listed in (store.listed("s3://bucket/run"), store.listed("s3://bucket")):
        assert {one.name: one.kind for one in listed.entries("s3://bucket/run")} == {
            "step-2": PREFIX,
            "empty": OBJECT,
        }
        assert listed.names("s3://bucket/run/step-2") == ["manifest.json"]
        with pytest.raises(FileNotFoundError):
            listed.names("s3://bucket/run/empty")
    with pytest.raises(FileNotFoundError):
        store.names("s3://bucket/run/empty")


def test_an_empty_bucket_has_no_entries_listed_or_not(store: ObjectStore) -> None:
    assert store.names("s3://bucket") == store.listed("s3://bucket").names("s3://bucket") == []
    with pytest.raises(FileNotFoundError):
        store.listed("s3://bucket/run").names("s3://bucket/run")
    assert candidates_in("s3://bucket", store) == []


def test_beside_a_bucket_there_is_nothing(store: ObjectStore) -> None:
    write_tombstone("s3://bucket/run", SaveId(MAX_CLOCK_EPOCH, 1, SAVE_ID.run_id), store, package="test", replaces=None)
    assert next_epoch_beside("s3://bucket", store) == MAX_CLOCK_EPOCH + 1
    assert not is_pinned("s3://bucket", store)


@pytest.mark.parametrize("server", ["s3"], indirect=True)
def test_a_checkpoint_with_a_directory_marker_is_found(server: Server, served: ObjectStore, tmp_path: Path) -> None:
    root = f"{served.root}/marked"

    def mark(prefix: str) -> None:  # as the console of S3, s3fs and Hadoop do
        request = urllib.request.Request(f"{server.url}/bucket/{prefix}/", method="PUT", data=b"")
        urllib.request.urlopen(request, timeout=10).close()

    mark("marked")
    with pytest.raises(FileNotFoundError):
        candidates_in(root, served)
    for number in (1, 2):
        path, save_id = f"{root}/step-{number}", SaveId(MAX_CLOCK_EPOCH + number, 1, SAVE_ID.run_id)
        with Snapshot({"a": 5}, save_id=save_id) as snapshot:
            result = snapshot.write(path, served.as_files())
        publish(path, manifest_of(result, save_id=save_id, step=number), store=served)
        mark(f"marked/step-{number}")
    assert [found.step for found in candidates_in(root, served)] == [2, 1]
    assert next_epoch_beside(f"{root}/step-3", served) == MAX_CLOCK_EPOCH + 3
    assert verify_checkpoint(f"{root}/step-2", served.as_files()).faults == []


def test_a_put_whose_answer_was_lost_has_succeeded_if_its_content_is_there(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "RETRY_FOR_S", 0.3)

    class Lost:
        def __init__(self, arrives: bool) -> None:
            self.arrives = arrives

        def put(self, key: str, data: bytes, **options: Any) -> None:
            if self.arrives:
                client.put(key, data)
            from obstore.exceptions import GenericError

            raise GenericError("the connection broke")

        def __getattr__(self, name: str) -> Any:
            return getattr(client, name)

    client = store._client
    arrived = ObjectStore("s3://bucket", client=Lost(arrives=True))
    arrived.put_if_absent("s3://bucket/a", b"mine", temporary="")
    with pytest.raises(UnknownOutcomeError) as caught:
        ObjectStore("s3://bucket", client=Lost(arrives=False)).put_if_absent("s3://bucket/b", b"mine", temporary="")
    assert caught.value.errno == errno.EREMOTEIO and "the connection broke" in str(caught.value)


class Scripted:
    """A client whose puts end as scripted, one after the other; those that are not scripted reach the store.

    `lost` takes effect and `broken` does not, and both break the connection. `refused` and `taken` are answers, and so
    is `absent`, of an object that was removed.
    """

    def __init__(self, client: Any, script: Sequence[str], *, reads_fail: bool) -> None:
        self._client, self._script, self._reads_fail, self.n_puts = client, list(script), reads_fail, 0

    def put(self, key: str, data: bytes, **options: Any) -> None:
        from obstore import exceptions

        self.n_puts += 1
        step = self._script.pop(0) if self._script else ""
        if step == "lost" or not step:
            self._client.put(key, data, **({} if step else options))
        errors = {
            "refused": exceptions.PermissionDeniedError("ExpiredToken"),
            "taken": exceptions.AlreadyExistsError(""),
        }
        if step == "absent":
            self._client.delete(key)
            raise FileNotFoundError("")
        if step:
            raise errors.get(step, exceptions.GenericError("it broke"))

    def get(self, key: str) -> Any:
        from obstore.exceptions import GenericError

        if self._reads_fail:
            raise GenericError("no answer")
        return self._client.get(key)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


def put_as_scripted(script: Sequence[str], *, mode: str, there: bytes | None, reads_fail: bool) -> int:
    """Put `mine` by `put_if_absent` or `replace_if`, and return how many requests that took."""
    client = object_servers.memory_store()
    if there is not None:
        client.put("a", there)
    version = ObjectStore("s3://bucket", client=client).stat("s3://bucket/a").version if mode == "replace" else ""
    scripted = Scripted(client, script, reads_fail=reads_fail)
    store = ObjectStore("s3://bucket", client=scripted)
    if mode == "replace":
        store.replace_if("s3://bucket/a", b"mine", version, temporary="")
    else:
        store.put_if_absent("s3://bucket/a", b"mine", temporary="")
    assert bytes(client.get("a").bytes()) == b"mine"
    return scripted.n_puts


@pytest.mark.parametrize(
    ("mode", "there", "script", "reads_fail", "expected"),
    [
        ("create", None, ["lost", *["taken"] * 9], True, UnknownOutcomeError),
        ("create", None, ["broken", "refused"], False, UnknownOutcomeError),
        ("create", None, ["broken", "absent"], False, UnknownOutcomeError),
        ("create", b"mine", ["taken"] * 9, True, UnknownOutcomeError),  # of an earlier call
        ("create", None, ["broken"] * 9, False, UnknownOutcomeError),
        ("create", b"other", ["broken", "taken"], False, FileExistsError),
        ("create", b"other", ["broken", "refused"], False, FileExistsError),
        ("create", b"longer than mine", ["broken"], False, FileExistsError),
        ("create", b"other", [], False, FileExistsError),
        ("create", None, ["refused"], False, PermissionError),
        ("create", None, ["absent"], False, FileNotFoundError),
        ("replace", b"old", ["broken", "absent"], False, UnknownOutcomeError),
        ("replace", b"old", ["broken", "refused"], False, UnknownOutcomeError),
        ("replace", b"old", ["broken"] * 9, False, UnknownOutcomeError),
        ("replace", b"old", ["broken", "taken"], False, FileExistsError),
        ("replace", b"old", ["absent"], False, FileExistsError),
        ("replace", b"old", ["refused"], False, PermissionError),
    ],
)
def test_a_put_is_lost_only_if_that_is_known(
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    there: bytes | None,
    script: Sequence[str],
    reads_fail: bool,
    expected: type[OSError],
) -> None:
    monkeypatch.setattr(retries, "RETRY_FOR_S", 0.3)
    with pytest.raises(OSError) as caught:
        put_as_scripted(script, mode=mode, there=there, reads_fail=reads_fail)
    assert caught.type is expected and caught.value.filename == "s3://bucket/a"


@pytest.mark.parametrize(
    ("mode", "there", "script", "n_puts"),
    [
        ("create", None, [], 1),
        ("create", None, ["broken", "broken"], 3),
        ("create", None, ["lost"], 1),
        ("create", None, ["taken"], 2),  # a concurrent put, which has come to nothing
        ("create", b"mine", [], 1),
        ("create", None, ["broken", "lost"], 2),
        ("replace", b"old", ["broken"], 2),
        ("replace", b"old", ["lost"], 1),
    ],
)
def test_a_put_goes_on_until_its_content_is_there(
    monkeypatch: pytest.MonkeyPatch, mode: str, there: bytes | None, script: Sequence[str], n_puts: int
) -> None:
    monkeypatch.setattr(retries, "FIRST_PAUSE_S", 0.01)
    assert put_as_scripted(script, mode=mode, there=there, reads_fail=False) == n_puts


@pytest.mark.parametrize(
    ("kind", "expected", "number"),
    [
        ("PermissionDeniedError", PermissionError, errno.EACCES),
        ("UnauthenticatedError", PermissionError, errno.EACCES),
        ("AlreadyExistsError", FileExistsError, errno.EEXIST),
        ("PreconditionError", FileExistsError, errno.EEXIST),
        ("NotSupportedError", OSError, errno.EOPNOTSUPP),
        ("GenericError", OSError, errno.EREMOTEIO),
    ],
)
def test_errors_of_the_store_become_ours_with_its_own_words(kind: str, expected: type[OSError], number: int) -> None:
    from obstore import exceptions

    with pytest.raises(expected) as caught, as_os_errors("s3://bucket/a"):
        raise getattr(exceptions, kind)("what the store said\n\nDebug source:\nmany lines")
    assert caught.value.errno == number and caught.value.filename in ("s3://bucket/a", None)
    assert expected is FileExistsError or "what the store said" in str(caught.value)


class Refusing:
    """A client whose requests all fail; the text of the error repeats what it was given, as stores do."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        def fail(*_: Any, **__: Any) -> Any:
            raise self._error

        return fail


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (
            "GET https://x.blob.core.windows.net/c/a?sig=SECRET&se=1 failed",
            "GET https://x.blob.core.windows.net/c/a?... failed",
        ),
        ("GET http://user:SECRET@host:9000/bucket/x failed", "GET http://...@host:9000/bucket/x failed"),
        ("proxy (http://user:SECRET@host), https://SECRET@b/", "proxy (http://...@host), https://...@b/"),
        (
            "<Code>ExpiredToken</Code><Message>expired</Message><Token-0>SECRET</Token-0><RequestId>X</RequestId>",
            "<Code>ExpiredToken</Code><Message>expired</Message><Token-0>...</Token-0><RequestId>X</RequestId>",
        ),
        (
            "<Error><Code>InvalidAccessKeyId</Code><AWSAccessKeyId>SECRET</AWSAccessKeyId>",
            "<Error><Code>InvalidAccessKeyId</Code><AWSAccessKeyId>...</AWSAccessKeyId>",
        ),
        (
            "<StringToSign>AWS4-HMAC-SHA256\nSECRET</StringToSign><StringToSignBytes>53 45 <SECRET",
            "<StringToSign>...</StringToSign><StringToSignBytes>...",
        ),
        ("key GIVENSECRET1, xGIVENSECRET1x, short ab, abba", "key ..., x...x, short ..., abba"),
        ("no route to http://127.0.0.1:9000", "no route to http://127.0.0.1:9000"),
        ("keys ENVIRONMENTSECRET and MORESECRET of ENVIRONMENTID in /a/file", "keys ... and ... of ... in /a/file"),
        ("a" * 700 + "SECRET", "a" * 600),
    ],
)
def test_secrets_are_not_repeated_in_texts_of_errors(monkeypatch: pytest.MonkeyPatch, said: str, shown: str) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "ENVIRONMENTSECRET")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "MORESECRET")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ENVIRONMENTID")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", "/a/file")
    assert message_of(RuntimeError(said), ["GIVENSECRET1", "ab", "0", ""]) == shown


def test_values_of_options_are_in_no_error_of_any_call(monkeypatch: pytest.MonkeyPatch) -> None:
    from obstore.exceptions import GenericError

    monkeypatch.setattr(retries, "RETRY_FOR_S", 0.0)
    monkeypatch.setattr("obstore.open_writer", lambda *_, **__: Refusing(OSError("the key GIVENSECRET1 is wrong")))
    options = {"secret_access_key": "GIVENSECRET1"}
    store = ObjectStore("s3://bucket", options, client=Refusing(GenericError("the key GIVENSECRET1 is wrong")))
    name = "s3://bucket/a"
    shard = store.shard_writer(name, memoryview(b"x"), 0, 1, block_nbytes=4096, aligned=False, fsync=True)
    for call in (
        lambda: store.put(name, b"", replace=True),
        lambda: store.put_if_absent(name, b"", temporary=""),
        lambda: store.replace_if(name, b"", "1", temporary=""),
        lambda: store.read(name, 0, 1),
        lambda: store.read_whole(name, 1),
        lambda: store.stat(name),
        lambda: store.names(name),
        lambda: store.listed(name),
        lambda: store.remove(name),
        lambda: shard.write_extent(0, 1),
        shard.finish,
    ):
        with pytest.raises(OSError, match=r"the key \.\.\. is wrong"):
            call()


@pytest.mark.parametrize(
    "wrong", ["http://user:SECRET@host:port", "http://host:99999", "host:9000", "http://", "http://a b"]
)
@pytest.mark.parametrize(
    ("url", "option", "variable"),
    [
        ("s3://bucket", "endpoint", "AWS_ENDPOINT_URL"),
        ("s3://bucket", "aws_endpoint_url", "AWS_ENDPOINT_URL_S3"),
        ("gs://bucket", "base_url", "GOOGLE_BASE_URL"),
        ("az://bucket", "endpoint", "AZURE_STORAGE_ENDPOINT"),
    ],
)
def test_an_endpoint_that_is_no_url_is_refused_before_a_request(
    monkeypatch: pytest.MonkeyPatch, wrong: str, url: str, option: str, variable: str
) -> None:
    account = {"account_name": "a", "account_key": "U0VDUkVU"} if url.startswith("az") else {}
    with (
        pytest.raises(ConfigError, match="http://HOST:PORT") as caught,
        with_storage_options({**account, option: wrong}),
    ):
        store_at(url)
    assert "SECRET" not in str(caught.value)
    monkeypatch.setenv(variable, wrong)
    with pytest.raises(UnsupportedPathError, match=f"{variable}.*http://HOST:PORT") as refused:
        ObjectStore(url)
    assert "SECRET" not in str(refused.value)


def test_a_panic_of_the_library_is_an_error() -> None:
    class PanicException(BaseException):
        """Has the name of the one that obstore raises, which cannot be imported."""

    store = ObjectStore("s3://bucket", client=Refusing(PanicException("called `Result::unwrap()`")))
    with pytest.raises(OSError, match=r"obstore.*unwrap") as caught:
        store.stat("s3://bucket/a")
    assert caught.value.errno == errno.EREMOTEIO


_FORKS = """
import os, signal
from asyncckpt.errors import ForkedError
from asyncckpt.storage.checkpoint_dir import manifest_if_readable
from asyncckpt.storage.cloud.object_store import ObjectStore
from obstore.store import MemoryStore

def write(store):
    store.put("s3://bucket/b", b"")

def look(store):
    manifest_if_readable("s3://bucket/a", store)

def in_child(store, do=write):
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        try:
            do(store)
        except ForkedError as error:
            os._exit(7 if "spawn" in str(error) else 8)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

one, other = ObjectStore("s3://bucket", client=MemoryStore()), ObjectStore("s3://bucket", client=MemoryStore())
before = in_child(one)
one.put("s3://bucket/a", b"")
print(before, in_child(one), in_child(other), in_child(one, look))
one.stat("s3://bucket/a")
"""


def test_a_forked_child_is_refused_at_once_if_its_parent_has_used_an_object_store() -> None:
    done = subprocess.run([sys.executable, "-c", _FORKS], check=False, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout.split()) == (0, ["0", "7", "7", "7"]), done.stderr


# ---- URLs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [("s3://bucket/a/b/", "s3://bucket/a/b"), ("gs://bucket", "gs://bucket"), ("az://box/a b", "az://box/a b")],
)
def test_urls_of_object_stores_are_paths_of_checkpoints(given: str, expected: str) -> None:
    assert checkpoint_path(given) == expected
    with pytest.raises(UnsupportedPathError, match="is a URL"):
        absolute_path(given)


@pytest.mark.parametrize(
    "wrong",
    [
        "ftp://host/a",
        "s3://",
        "s3:///a",
        "s3://key:SECRET@bucket/a",
        "s3://bucket/a?versionId=SECRET",
        "s3://bucket/a#b",
        "s3://bucket//a",
        "s3://bucket/a/../b",
        "s3://bucket/a\nb",
        "az://bucket/a\\b",
        "s3://bucket/" + "x" * 901,
    ],
)
def test_what_is_no_place_in_a_store_is_refused_and_no_secret_is_repeated(wrong: str) -> None:
    with pytest.raises(UnsupportedPathError) as caught:
        checkpoint_path(wrong)
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_a_url_that_pathlib_has_made_a_local_path_is_refused(scheme: str) -> None:
    for check in (checkpoint_path, absolute_path):
        for given in (Path(f"{scheme}://bucket/run") / "step-1", f"{scheme}:/key:SECRET@bucket"):
            with pytest.raises(UnsupportedPathError, match=f"expected '{scheme}://': pathlib") as caught:
                check(given)
            assert "SECRET" not in str(caught.value)
        assert check(f"./{scheme}:/bucket") == os.path.abspath(f"{scheme}:/bucket"), "a directory of this name"


def test_parents_end_at_the_bucket() -> None:
    assert parent_of("s3://bucket/a/b") == "s3://bucket/a" and parent_of("s3://bucket") == "s3://bucket"
    assert parent_of("/a") == "/" and location_of("s3://bucket/a/b") == ("s3://bucket", "a/b")


def test_a_path_leads_to_its_store(tmp_path: Any) -> None:
    files = files_at(PATH)
    assert isinstance(store_over(files), ObjectStore) and store_over(files) is store_at(PATH)
    assert not isinstance(store_at(str(tmp_path)), ObjectStore)


def test_options_are_checked_and_secrets_are_not_shown() -> None:
    with pytest.raises(UnsupportedPathError, match="cannot be opened"):
        ObjectStore("s3://bucket", {"nonsense": "x"})
    options = {"region": "us-east-1", "access_key_id": "SECRET", "secret_access_key": "SECRET"}
    assert repr(ObjectStore("s3://bucket", options)) == "ObjectStore('s3://bucket')"


@pytest.mark.parametrize("wrong", [{"overwrite": True}, {"layout": "dcp"}])
def test_settings_that_need_files_are_refused_before_anything_is_staged(wrong: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    from asyncckpt import SyncCheckpointer

    with SyncCheckpointer(**wrong) as checkpointer, pytest.raises(ConfigError, match="object stores"):
        checkpointer.save({"w": torch.zeros(1)}, PATH, step=1)


class Copying:
    """A client whose copies end with an error, or copy something else."""

    def __init__(self, below: Any, text: str, kind: str = "GenericError") -> None:
        self._below, self._text, self._kind = below, text, kind
        self.n_copies = 0

    def copy(self, source: str, target: str) -> None:
        from obstore import exceptions

        self.n_copies += 1
        if self._text:
            raise getattr(exceptions, self._kind, FileNotFoundError)(self._text)
        self._below.put(target, b"half")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)


ANSWERS = {
    "in 2 ms - Server returned non-2xx status code: 400 Bad Request: too large": False,
    "in 2 s, after 9 retries, max_retries: 12 - Server returned non-2xx status code: 501 Not Implemented: ": False,
    "in 2 s, after 9 retries, max_retries: 12 - Server returned non-2xx status code: 400 Bad Request: ": True,
    "in 2 s, after 9 retries, max_retries: 12 - Server returned non-2xx status code: 503 Slow Down: ": True,
    "error sending request": True,
}
"""Text of obstore's error -> whether the store may still be copying."""


@pytest.mark.parametrize("text", ANSWERS)
def test_a_copy_that_has_failed_is_told_from_one_that_may_still_be_made(store: ObjectStore, text: str) -> None:
    store.put("s3://bucket/a", b"content")
    failing = ObjectStore("s3://bucket", client=Copying(store._client, text))
    with pytest.raises(OSError, match=r"status code|sending") as caught:
        failing.link("s3://bucket/a", "s3://bucket/b", store.stat("s3://bucket/a").version)
    assert isinstance(caught.value, UnknownOutcomeError) == ANSWERS[text]


REFUSALS = {"FileNotFoundError": "404 Not Found: ", "PermissionDeniedError": "403 Forbidden: "}
"""Class of obstore's error -> what the store said at last."""


@pytest.mark.parametrize("n_retries", [0, 3])
@pytest.mark.parametrize("kind", REFUSALS)
def test_a_refusal_after_retries_does_not_say_that_no_copy_is_made(
    store: ObjectStore, kind: str, n_retries: int
) -> None:
    after = f", after {n_retries} retries" if n_retries else ""
    text = f"Error performing COPY in 2 s{after}, max_retries: 12 - Server returned: {REFUSALS[kind]}"
    store.put("s3://bucket/a", b"content")
    failing = ObjectStore("s3://bucket", client=Copying(store._client, text, kind))
    with pytest.raises(OSError) as caught:
        failing.link("s3://bucket/a", "s3://bucket/b", store.stat("s3://bucket/a").version)
    assert isinstance(caught.value, UnknownOutcomeError) == bool(n_retries)


def test_azure_is_not_asked_for_copies_since_one_may_be_pending_after_its_answer(store: ObjectStore) -> None:
    assert store.links_may_end_late
    client = Copying(store._client, "")
    azure = ObjectStore("az://bucket", client=client)
    assert not azure.links_may_end_late
    azure.put("az://bucket/a", b"content")
    with pytest.raises(UnsupportedByStoreError):
        azure.link("az://bucket/a", "az://bucket/b", azure.stat("az://bucket/a").version)
    assert client.n_copies == 0


def test_a_copy_of_another_length_is_removed(store: ObjectStore) -> None:
    store.put("s3://bucket/a", b"content")
    with pytest.raises(OSError, match="has 4 bytes, expected 7"):
        ObjectStore("s3://bucket", client=Copying(store._client, "")).link(
            "s3://bucket/a", "s3://bucket/b", store.stat("s3://bucket/a").version
        )
    with pytest.raises(FileNotFoundError):
        store.stat("s3://bucket/b")


def test_no_copy_is_asked_for_of_a_large_object(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "MAX_COPIED_NBYTES", 6)
    store.put("s3://bucket/a", b"content")
    client = Copying(store._client, "")
    with pytest.raises(OSError, match="at most 6 are copied"):
        ObjectStore("s3://bucket", client=client).link(
            "s3://bucket/a", "s3://bucket/b", store.stat("s3://bucket/a").version
        )
    assert client.n_copies == 0
