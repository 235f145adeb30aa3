"""What boto3 adds for S3: credentials by profiles of the AWS CLI, and unfinished uploads that `asyncckpt gc` finds."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from real_worker import running

from asyncckpt.errors import ConfigError, UnsupportedPathError
from asyncckpt.storage.cloud import aws
from asyncckpt.storage.cloud.object_store import ObjectStore
from asyncckpt.storage.locate import store_at, with_storage_options
from asyncckpt.storage.store import UnfinishedUpload
from tests import object_servers
from tests.object_servers import BUCKET, Server

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
    for name in KEYS:
        monkeypatch.delenv(name, raising=False)
    keys = "aws_access_key_id = {0}KEY\naws_secret_access_key = {0}-secret\n"
    (tmp_path / "credentials").write_text("[default]\n" + keys.format("A") + "[other]\n" + keys.format("B"))
    (tmp_path / "config").write_text("[default]\nregion = us-east-1\n[profile other]\nregion = us-east-1\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def key_of(options: dict[str, str]) -> str | None:
    provider = aws.credential_provider(options)
    return None if provider is None else provider()["access_key_id"]


def test_keys_come_from_the_profile_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert key_of({}) == "AKEY"
    monkeypatch.setenv("AWS_PROFILE", "other")
    assert key_of({}) == "BKEY"
    assert key_of({"profile": "default"}) == "AKEY"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    assert key_of({}) is None, "obstore takes it from the environment"
    assert key_of({"profile": "default"}) == "AKEY"
    assert key_of({"AWS_ACCESS_KEY_ID": "y"}) is None


def test_without_files_and_profile_obstore_looks_for_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    assert key_of({}) is None


def test_a_profile_that_is_not_there_or_has_a_rival_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedPathError, match=r"profile \(\.\.\.\) could not be found"):
        ObjectStore("s3://bucket", {"profile": "missing"})
    with pytest.raises(UnsupportedPathError, match="both a profile and credentials"):
        ObjectStore("s3://bucket", {"profile": "other", "access_key_id": "x"})
    with with_storage_options({"profile": "missing"}), pytest.raises(ConfigError, match="profile"):
        store_at("s3://a-bucket/x")
    monkeypatch.setenv("AWS_PROFILE", "missing")
    with pytest.raises(UnsupportedPathError, match=r"profile \(missing\) could not be found"):
        ObjectStore("s3://bucket")


def test_a_profile_without_boto3_is_refused_by_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    assert key_of({}) is None
    with pytest.raises(UnsupportedPathError, match=r"asyncckpt\[aws\]"):
        ObjectStore("s3://bucket", {"profile": "other"})
    monkeypatch.setenv("AWS_PROFILE", "other")
    with pytest.raises(UnsupportedPathError, match=r"asyncckpt\[aws\]"):
        ObjectStore("s3://bucket")


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
    server: Server, profile: str, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCCKPT_ENDPOINT", endpoint)
    root = f"{server.root}/by-{profile or 'default'}"
    with running(endpoint):
        done = run("-c", TRAINER, root, server.url, profile)
    assert done.returncode == 0 and "-secret" not in done.stderr + done.stdout
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
    client.put_object(Bucket=BUCKET, Key="gc/notes.txt", Body=b"x")
    keys = {
        *(f"gc/step-9/{OWN}", "gc/step-9/notes.bin"),  # another program's stays
        *(f"gc/deep/er/step-8/{OWN}", f"other/step-9/{OWN}"),
    }
    ids = {key: begun(client, key, 7) for key in sorted(keys)}
    assert sorted(store_at(root).unfinished_uploads(root))[0][1:3] == (ids[f"gc/deep/er/step-8/{OWN}"], 7)

    def rows(*more: str) -> list[dict[str, Any]]:
        done = run("-m", "asyncckpt", "gc", root, "--json", *more)
        assert done.returncode == 0
        return list(json.loads(done.stdout)["found"])

    (row,) = rows("--delete", "--older-than", "9000d")  # moto says that all uploads began in 2010
    assert (row["kind"], row["path"], row["files"], row["nbytes"]) == ("upload", f"{root}/step-9", [OWN], 7)
    assert row["action"] == "kept" and "may be in progress" in row["why"]
    assert [one["action"] for one in rows("--older-than", "0s")] == ["would go"]
    (row,) = rows("--older-than", "0s", "--delete")
    assert row["action"] == "removed" and row["removed"] == [OWN]
    assert rows("--older-than", "0s") == []
    assert len(rows("--older-than", "0s", "--recursive", "--delete")) == 1
    left = {one["Key"] for one in client.list_multipart_uploads(Bucket=BUCKET)["Uploads"]}
    assert left == {"gc/step-9/notes.bin", f"other/step-9/{OWN}"}
    client.close()


def test_an_upload_that_has_ended_meanwhile_counts_as_aborted(server: Server) -> None:
    aws.abort_upload(UnfinishedUpload(f"{server.root}/a/{OWN}", "no-such-upload", 0, 0.0), server.options())


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
    assert "asyncckpt[aws]" in json.loads(done.stdout)["uploads_not_shown"]


def test_a_refusal_of_the_list_is_told_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests import object_proxy

    with object_proxy.running("http://127.0.0.1:9") as proxy:
        proxy.fault = lambda method, path: object_proxy.REFUSED
        options = {"endpoint": proxy.url, "access_key_id": "an-access-key", "secret_access_key": "a-secret-key"}
        with pytest.raises(PermissionError) as caught:
            list(aws.unfinished_uploads("s3://bucket/x", options))
    assert "an-access-key" not in str(caught.value) and os.strerror(5) not in str(caught.value)
