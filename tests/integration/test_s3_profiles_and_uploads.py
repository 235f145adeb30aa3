"""What boto3 adds for S3: credentials by profiles of the AWS CLI, and incomplete uploads that `asyncckpt gc` finds."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from real_worker import running

from asyncckpt.cli import worker_requests
from asyncckpt.cli.commands import gc
from asyncckpt.errors import ConfigError, UnsupportedPathError
from asyncckpt.maintenance.gc import GarbageRules
from asyncckpt.maintenance.uploads import uploads_in
from asyncckpt.storage import locate
from asyncckpt.storage.cloud import aws
from asyncckpt.storage.cloud.object_store import ObjectStore
from asyncckpt.storage.locate import store_at, with_storage_options
from asyncckpt.storage.store import IncompleteUpload, UnsupportedByStoreError
from tests import object_proxy, object_servers
from tests.object_servers import BUCKET, Server
from tests.warm_python import WarmPython

boto3 = pytest.importorskip("boto3", reason="the extra aws is not installed")
object_servers.start_runtime()

OWN = f"rank-00000-part-000.000001-00000009-{'a' * 12}.safetensors"
KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_DEFAULT_PROFILE")
DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with object_servers.running("s3") as found:
        yield found


@pytest.fixture(autouse=True)
def files(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of the AWS CLI with two profiles, and no keys in the environment."""
    monkeypatch.setattr(locate, "_stores", {})  # those of other tests were opened in another environment
    for name in KEYS:
        monkeypatch.delenv(name, raising=False)
    keys = "aws_access_key_id = {0}KEY\naws_secret_access_key = {0}-secret\n"
    (tmp_path / "credentials").write_text("[default]\n" + keys.format("A") + "[other]\n" + keys.format("B"))
    (tmp_path / "config").write_text("[default]\nregion = us-east-1\n[profile other]\nregion = us-east-1\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def key_of(options: dict[str, str]) -> str | None:
    """Return the key that a profile gives; None: obstore finds one by itself."""
    profile = aws.profile_credentials(options)
    return None if profile is None else profile()["access_key_id"]


def test_keys_come_from_the_profile_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert key_of({}) == "AKEY"
    monkeypatch.setenv("AWS_PROFILE", "other")
    assert key_of({}) == "BKEY"
    for name in ("profile", "aws_profile", "AWS_PROFILE"):
        assert key_of({name: "default"}) == "AKEY"
    assert key_of({"AWS_ACCESS_KEY_ID": "y"}) is None and key_of({"role_arn": "y"}) is None
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://127.0.0.1:9")
    assert key_of({}) == "BKEY", "it is named"
    monkeypatch.delenv("AWS_PROFILE")
    assert key_of({}) is None, "nobody has named the default profile"
    monkeypatch.setenv("AWS_PROFILE", "other")
    for before in (("AWS_WEB_IDENTITY_TOKEN_FILE",), ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")):
        with monkeypatch.context() as changed:
            for name in before:
                changed.setenv(name, "x")
            assert key_of({}) is None and key_of({"profile": "default"}) == "AKEY"


@pytest.mark.parametrize("change", [{"AWS_SKIP_SIGNATURE": "true"}, {"HOME": "/nowhere"}, {"HOME": "/proc/1/root/x"}])
def test_without_need_or_files_obstore_looks_for_credentials(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, str]
) -> None:
    if "HOME" in change:
        monkeypatch.delenv("AWS_SHARED_CREDENTIALS_FILE")
        monkeypatch.delenv("AWS_CONFIG_FILE")
    for name, value in change.items():
        monkeypatch.setenv(name, value)
    assert key_of({}) is None


def test_a_region_of_a_profile_counts_if_no_other_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def region(**options: str) -> str | None:
        profile = aws.profile_credentials({"profile": "other", **options})
        assert profile is not None
        return profile.config.get("region")

    monkeypatch.delenv("AWS_REGION", raising=False)
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    assert region() == "us-east-1" and region(region="x") is None
    monkeypatch.setenv("AWS_REGION", "y")
    assert region() is None


def test_a_profile_that_is_not_there_or_has_a_rival_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedPathError, match=r"profile \(missing\) could not be found"):
        ObjectStore("s3://bucket", {"profile": "missing"})
    with pytest.raises(UnsupportedPathError, match="cannot be combined with credentials"):
        ObjectStore("s3://bucket", {"profile": "other", "access_key_id": "x"})
    with with_storage_options({"profile": "missing"}), pytest.raises(ConfigError, match="profile"):
        store_at("s3://a-bucket/x")
    monkeypatch.setenv("AWS_PROFILE", "missing")
    with pytest.raises(UnsupportedPathError, match=r"profile \(missing\) could not be found"):
        ObjectStore("s3://bucket")


def test_a_profile_without_boto3_is_refused_by_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    assert key_of({}) is None and not caplog.records
    with pytest.raises(UnsupportedPathError, match=r"asyncckpt\[aws\]"):
        ObjectStore("s3://bucket", {"profile": "other"})
    monkeypatch.setenv("AWS_PROFILE", "other")  # an instance's role may be meant
    assert key_of({}) is None
    assert "asyncckpt[aws]" in caplog.text


PROGRAM = "[profile p]\nregion = us-east-1\ncredential_process = {}\n"


@pytest.mark.parametrize("program", ["/nowhere/tool", "/bin/echo []", "/bin/sh -c 'echo a-secret >&2; exit 1'"])
def test_a_program_that_gives_no_credentials_fails_the_request_and_shows_nothing(
    program: str, tmp_path: pathlib.Path, server: Server
) -> None:
    (tmp_path / "config").write_text(PROGRAM.format(program))
    options = {"endpoint": server.url, "profile": "p", **object_servers.NO_CONNECTION_STAYS}
    store = ObjectStore(server.root, options)
    with pytest.raises(OSError, match="profile 'p'") as caught:
        store.stat(f"{server.root}/x")
    assert "a-secret" not in str(caught.value)
    with pytest.raises(OSError) as caught:
        list(store.incomplete_uploads(server.root, lambda name: True))
    assert "a-secret" not in str(caught.value)


def test_a_program_that_hangs_delays_no_other_store(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config").write_text(PROGRAM.format("/bin/sleep 60"))
    began = time.monotonic()
    ObjectStore("s3://bucket", {"profile": "p"})
    assert time.monotonic() - began < 30.0, "it is called with the first request"


def test_keys_of_a_profile_are_shown_in_no_error() -> None:
    told = b"<Error><Code>AccessDenied</Code><Message>refused AKEY with A-secret</Message></Error>"

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(403)
            self.send_header("Content-Length", str(len(told)))
            self.end_headers()
            self.wfile.write(told)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{listening.server_port}"
            store = ObjectStore("s3://bucket", {"endpoint": url, **object_servers.NO_CONNECTION_STAYS})
            with pytest.raises(PermissionError) as caught:
                store.read_whole("s3://bucket/x", 10)
        finally:
            listening.shutdown()
            thread.join()
    assert "refused" in str(caught.value)
    assert "AKEY" not in str(caught.value) and "A-secret" not in str(caught.value)


def test_a_variable_that_would_be_used_in_place_of_an_option_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://b.example:1")
    with pytest.raises(UnsupportedPathError, match="AWS_ENDPOINT_URL_S3"):
        ObjectStore("s3://bucket", {"endpoint": "http://a.example:1"})
    ObjectStore("s3://bucket", {"endpoint": "http://b.example:1"})


TRAINER = """
import sys, torch, asyncckpt

root, options = sys.argv[1], {"endpoint": sys.argv[2], **({"profile": sys.argv[3]} if sys.argv[3] else {})}
state = {"w": torch.arange(3_000_000.0)}
with asyncckpt.AsyncCheckpointer(storage_options=options) as checkpointer:
    checkpointer.save(state, f"{root}/step-1", step=1).written.result(60)
assert torch.equal(asyncckpt.load(f"{root}/step-1", source="disk", storage_options=options)["w"], state["w"])
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    print(done.stdout, done.stderr)
    return done


@pytest.mark.parametrize("profile", ["", "other"])
def test_trainer_and_worker_save_with_the_keys_of_a_profile(
    server: Server, profile: str, endpoint: str, monkeypatch: pytest.MonkeyPatch, warm_python: WarmPython
) -> None:
    monkeypatch.setenv("ASYNCCKPT_ENDPOINT", endpoint)
    root = f"{server.root}/by-{profile or 'default'}"
    with running(endpoint):
        done = warm_python.run(TRAINER, root, server.url, profile)
    assert done.returncode == 0, done.stderr
    assert "-secret" not in done.stderr + done.stdout
    options = ["--storage-option", f"endpoint={server.url}"]
    assert run("-m", "asyncckpt", "ls", root, *options).returncode == 0


def client_of(server: Server) -> Any:
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
    return boto3.client("s3", endpoint_url=server.url, **keys)


def begun(client: Any, key: str, nbytes: int = 0) -> str:
    """Begin an upload, as a program that is killed in the middle; return its ID."""
    upload = str(client.create_multipart_upload(Bucket=BUCKET, Key=key)["UploadId"])
    if nbytes:
        client.upload_part(Bucket=BUCKET, Key=key, UploadId=upload, PartNumber=1, Body=b"x" * nbytes)
    return upload


def test_gc_finds_and_aborts_uploads_of_ours_that_were_never_completed(server: Server, monkeypatch: Any) -> None:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    client, root = client_of(server), f"{server.root}/gc"
    keys = {
        *(f"gc/step-9/{OWN}", "gc/step-9/notes.bin"),  # another program's stays
        *(f"gc/deep/er/step-8/{OWN}", f"other/step-9/{OWN}"),
    }
    ids = {key: begun(client, key, 7) for key in sorted(keys)}
    begun(client, "gc/step-9/foreign")  # of which no part came
    (found,) = store_at(root).incomplete_uploads(root, lambda name: "/deep/" in name)
    assert found[:3] == (f"{root}/deep/er/step-8/{OWN}", ids[f"gc/deep/er/step-8/{OWN}"], 7)
    assert abs(time.time() - found.changed_s) < 3600.0, "moto says that all uploads began in 2010; a part came now"

    def rows(*more: str) -> list[dict[str, Any]]:
        done = run("-m", "asyncckpt", "gc", root, "--json", *more)
        assert done.returncode in (0, 4)
        return list(json.loads(done.stdout)["found"]) if done.returncode == 0 else []

    (row,) = rows("--delete")
    assert (row["kind"], row["path"], row["files"], row["nbytes"]) == ("upload", f"{root}/step-9", [OWN], 7)
    assert row["action"] == "kept" and "may be in progress" in row["why"]
    assert [one["action"] for one in rows("--older-than", "0s")] == ["would go"]
    (row,) = rows("--older-than", "0s", "--delete")
    assert row["action"] == "removed" and row["removed"] == [OWN]
    assert rows("--older-than", "0s") == []
    assert len(rows("--older-than", "0s", "--recursive", "--delete")) == 1
    left = {one["Key"] for one in client.list_multipart_uploads(Bucket=BUCKET)["Uploads"]}
    assert left == {"gc/step-9/notes.bin", "gc/step-9/foreign", f"other/step-9/{OWN}"}
    client.close()


def test_an_upload_is_as_young_as_its_save(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    client, root = client_of(server), f"{server.root}/young"
    index = OWN.replace("-part-000", "").replace("safetensors", "index")
    for path in ("without", "with-object", "with-upload"):
        begun(client, f"young/{path}/{OWN}")  # no part came; moto says that it began in 2010
    client.put_object(Bucket=BUCKET, Key=f"young/with-object/{index}", Body=b"x")
    begun(client, f"young/with-upload/{OWN.replace('part-000', 'part-001')}", 7)
    client.close()
    rules = GarbageRules(now=time.time(), older_than_s=86_400.0)
    found = list(uploads_in(root, store_at(root), rules))
    assert sorted((os.path.basename(one.path), bool(one.kept)) for one, _ in found) == [
        *(("with-object", True), ("with-upload", True), ("with-upload", True), ("without", False))
    ]


def test_credentials_of_two_sources_are_not_mixed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ObjectStore(server.root, {"endpoint": server.url, **object_servers.NO_CONNECTION_STAYS})
    assert list(store.incomplete_uploads(f"{server.root}/none", lambda name: True)) == []
    other = {"access_key_id": "C", "secret_access_key": "D", "expires_at": datetime.now(timezone.utc) + aws.TTL}
    monkeypatch.setattr(aws.ProfileCredentials, "__call__", lambda self: other)
    store = ObjectStore(server.root, {"endpoint": server.url, **object_servers.NO_CONNECTION_STAYS})
    with pytest.raises(UnsupportedByStoreError, match="other credentials"):
        list(store.incomplete_uploads(f"{server.root}/none", lambda name: True))


def test_an_upload_that_has_ended_meanwhile_counts_as_aborted(server: Server) -> None:
    store = ObjectStore(server.root, {**server.options(), **object_servers.NO_CONNECTION_STAYS})
    store.abort_upload(IncompleteUpload(f"{server.root}/a/{OWN}", "no-such-upload", 0, 0.0))


def test_gc_keeps_uploads_of_a_save_and_of_a_copy_that_are_in_progress(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    client, root = client_of(server), f"{server.root}/busy"
    for path in ("save", "copy", "failed"):
        begun(client, f"busy/{path}/{OWN}", 7)
    client.close()
    report = {
        "saves": [{"path": f"{root}/save", "phase": "open"}],
        "mirrors": [
            {"path": "/disk/1", "mirror": f"{root}/copy", "phase": "copying"},
            {"path": "/disk/2", "mirror": f"{root}/failed", "phase": "failed"},
        ],
    }
    monkeypatch.setattr(worker_requests, "status_of", lambda endpoint: report)
    args = argparse.Namespace(root=root, recursive=False, delete=False, endpoint=None, older_than=0.0, json=True)
    args.tombstones = args.locks = args.broken = False
    printed: list[Any] = []
    monkeypatch.setattr(gc, "print_removals", lambda args, facts, *rest: printed.append(facts) or 0)
    assert gc.run(args) == 0
    found = {os.path.basename(row["path"]): row["action"] for row in printed[0]["found"]}
    assert found == {"save": "kept", "copy": "kept", "failed": "would go"}


def test_gc_says_why_it_does_not_show_uploads(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    client = client_of(server)
    client.put_object(Bucket=BUCKET, Key="hidden/notes.txt", Body=b"x")
    client.close()
    hides = "import sys; sys.modules['boto3'] = None; from asyncckpt.cli import main; sys.exit(main())"
    done = run("-c", hides, "gc", f"{server.root}/hidden")
    assert done.returncode == 0 and "asyncckpt[aws]" in done.stdout
    done = run("-c", hides, "gc", f"{server.root}/hidden", "--json")
    assert "asyncckpt[aws]" in json.loads(done.stdout)["uploads_error"]


def test_a_refusal_of_the_list_is_told_without_secrets() -> None:
    with object_proxy.running("http://127.0.0.1:9") as proxy:
        proxy.fault = lambda method, path: object_proxy.REFUSED
        options = {"endpoint": proxy.url, "access_key_id": "an-access-key", "secret_access_key": "a-secret-key"}
        store = ObjectStore("s3://bucket", {**options, **object_servers.NO_CONNECTION_STAYS})
        with pytest.raises(PermissionError) as caught:
            list(store.incomplete_uploads("s3://bucket/x", lambda name: True))
    assert "an-access-key" not in str(caught.value) and "a-secret-key" not in str(caught.value)


@pytest.mark.parametrize(
    "options", [{"virtual_hosted_style_request": "true"}, {"proxy_url": "http://127.0.0.1:9"}, {"skip_signature": "1"}]
)
def test_what_boto3_cannot_be_told_alike_is_not_asked(options: dict[str, str]) -> None:
    """It might list another server's uploads, and abort them."""
    keys = {} if "skip_signature" in options else {"access_key_id": "x", "secret_access_key": "y"}
    store = ObjectStore("s3://bucket", {"endpoint": "http://127.0.0.1:9", "region": "x", **keys, **options})
    with pytest.raises(UnsupportedByStoreError):
        list(store.incomplete_uploads("s3://bucket/x", lambda name: True))
