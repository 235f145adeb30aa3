"""What obstore lacks for S3, by the library boto3 (extra `aws`): credentials of profiles, and unfinished uploads."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncckpt.basics.urls import location_of
from asyncckpt.storage.cloud.store_errors import message_of
from asyncckpt.storage.store import UnfinishedUpload, UnsupportedByStoreError

PROFILE = "profile"
"""Option: name of a profile in the files of the AWS CLI."""

INSTALL = "pip install 'asyncckpt[aws]'"

TIMEOUT_S = 60.0
"""Of one request for unfinished uploads."""

_PROFILE_VARIABLES = ("AWS_PROFILE", "AWS_DEFAULT_PROFILE")
_FILES = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}
_PREFIX = re.compile(r"aws_", re.IGNORECASE)
_CREDENTIALS = {"access_key_id", "secret_access_key", "token", "session_token", "skip_signature"}


def credential_provider(options: Mapping[str, str]) -> Any:
    """Return a provider of credentials for obstore's S3 store; None: obstore has them, or finds them by itself.

    Keys in the options or in the environment come before profiles, but not before the option `profile`.

    Args:
        options: Options of the store, with `profile` if there is one.

    Raises:
        ValueError: A profile is named, and there is no such profile, keys are given as well, or boto3 is not installed.
    """
    given, environment = _by_name(options), os.environ
    named = options.get(PROFILE, "")
    if named and _CREDENTIALS & given.keys():
        raise ValueError("options give both a profile and credentials")
    if not named and (_CREDENTIALS & given.keys() or "AWS_ACCESS_KEY_ID" in environment):
        return None
    from_variable = next((environment[name] for name in _PROFILE_VARIABLES if environment.get(name)), "")
    has_file = any(Path(environment.get(name, usual)).expanduser().is_file() for name, usual in _FILES.items())
    if not (named or from_variable or has_file):
        return None
    if importlib.util.find_spec("boto3") is None:
        if named or from_variable:
            raise ValueError(f"credentials of profile {named or from_variable!r} are read by boto3: {INSTALL}")
        return None
    from obstore.auth.boto3 import Boto3CredentialProvider

    with _errors_of_boto(options):
        session = _session(named)
        return Boto3CredentialProvider(session) if session.get_credentials() is not None else None


def unfinished_uploads(prefix: str, options: Mapping[str, str]) -> Iterator[UnfinishedUpload]:
    """Yield the uploads below a prefix that were begun and neither completed nor aborted.

    Args:
        prefix: URL of the prefix.
        options: Options of the store.

    Raises:
        UnsupportedByStoreError: boto3 is not installed.
        OSError: The store does not list them.
    """
    root, key = location_of(prefix)
    bucket = root.partition("://")[2]
    client = _client(prefix, options)
    uploads, parts = client.get_paginator("list_multipart_uploads"), client.get_paginator("list_parts")
    with _os_errors(prefix, options), contextlib.closing(client):
        pages = uploads.paginate(Bucket=bucket, Prefix=f"{key}/" if key else "")
        for one in (upload for page in pages for upload in page.get("Uploads", ())):
            sent = parts.paginate(Bucket=bucket, Key=one["Key"], UploadId=one["UploadId"])
            try:
                nbytes = sum(part["Size"] for page in sent for part in page.get("Parts", ()))
            except client.exceptions.NoSuchUpload:  # it has ended meanwhile
                continue
            yield UnfinishedUpload(f"{root}/{one['Key']}", one["UploadId"], nbytes, one["Initiated"].timestamp())


def abort_upload(upload: UnfinishedUpload, options: Mapping[str, str]) -> None:
    """Abort an upload, and remove its parts. Succeeds also if it has ended meanwhile.

    Raises:
        UnsupportedByStoreError: boto3 is not installed.
        OSError: The store has not aborted it.
    """
    root, key = location_of(upload.name)
    client = _client(upload.name, options)
    has_ended = contextlib.suppress(client.exceptions.NoSuchUpload)
    with _os_errors(upload.name, options), contextlib.closing(client), has_ended:
        client.abort_multipart_upload(Bucket=root.partition("://")[2], Key=key, UploadId=upload.id)


def _by_name(options: Mapping[str, str]) -> dict[str, str]:
    """Return the options without the `aws_` that obstore allows before their names."""
    return {_PREFIX.sub("", name.lower(), count=1): value for name, value in options.items()}


def _session(profile: str) -> Any:
    import boto3

    return boto3.Session(profile_name=profile or None)


def _client(name: str, options: Mapping[str, str]) -> Any:
    """Return a client of boto3 for the store that obstore reaches with these options."""
    if importlib.util.find_spec("boto3") is None:
        raise UnsupportedByStoreError(f"list of unfinished uploads that can be read without boto3: {INSTALL}", name)
    from botocore import UNSIGNED
    from botocore.config import Config

    given, environment = _by_name(options), os.environ
    endpoint = next((given[one] for one in ("endpoint", "endpoint_url") if one in given), None)
    endpoint = endpoint or environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
    endpoint = endpoint or environment.get("AWS_ENDPOINT")
    is_virtual = given.get("virtual_hosted_style_request", "").lower() in ("1", "true", "yes", "on")
    config = {
        "connect_timeout": TIMEOUT_S,
        "read_timeout": TIMEOUT_S,
        "retries": {"mode": "standard", "max_attempts": 5},
        "s3": {"addressing_style": "virtual" if is_virtual or not endpoint else "path"},
        **({"signature_version": UNSIGNED} if "skip_signature" in given else {}),
    }
    with _os_errors(name, options):
        return _session(options.get(PROFILE, "")).client(
            "s3",
            endpoint_url=endpoint,
            region_name=given.get("region") or given.get("default_region") or environment.get("AWS_REGION"),
            aws_access_key_id=given.get("access_key_id"),
            aws_secret_access_key=given.get("secret_access_key"),
            aws_session_token=given.get("session_token") or given.get("token"),
            config=Config(**config),
        )


@contextlib.contextmanager
def _errors_of_boto(options: Mapping[str, str]) -> Iterator[None]:
    from botocore.exceptions import BotoCoreError

    try:
        yield
    except BotoCoreError as error:
        raise ValueError(message_of(error, options.values())) from None


@contextlib.contextmanager
def _os_errors(name: str, options: Mapping[str, str]) -> Iterator[None]:
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except ClientError as error:
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        kind: type[OSError] = PermissionError if status in (401, 403) else OSError
        number = errno.EACCES if kind is PermissionError else errno.EREMOTEIO
        raise kind(number, message_of(error, options.values()), name) from None
    except (BotoCoreError, ValueError) as error:
        raise OSError(errno.EREMOTEIO, message_of(error, options.values()), name) from None
