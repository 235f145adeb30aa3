"""What obstore lacks for S3, by the library boto3 (extra `aws`): credentials of profiles, and unfinished uploads."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime, timedelta, timezone
from typing import Any
from urllib.parse import parse_qs, urlsplit

from asyncckpt.basics.urls import location_of
from asyncckpt.storage.cloud.store_errors import message_of
from asyncckpt.storage.store import UnfinishedUpload, UnsupportedByStoreError

PROFILE = "profile"
"""Option: name of a profile in the files of the AWS CLI."""

INSTALL = "pip install 'asyncckpt[aws]'"

TTL = timedelta(minutes=6)
"""For how long obstore may use what a profile gives; it asks again five minutes before. botocore gives credentials that
are valid for ten minutes at least."""

TIMEOUT_S = 60.0
"""Of one request for unfinished uploads."""

_PREFIX = re.compile(r"aws_", re.IGNORECASE)
_CREDENTIALS = {
    *("access_key_id", "secret_access_key", "token", "session_token", "skip_signature"),
    *("role_arn", "role_session_name", "endpoint_url_sts", "web_identity_token_file"),
    *("container_credentials_relative_uri", "container_credentials_full_uri", "container_authorization_token_file"),
}
"""Options that say where credentials come from."""

_CONTAINERS = ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI")
"""Variables that come before a profile that nobody has named."""

_PROFILE_VARIABLES = ("AWS_DEFAULT_PROFILE", "AWS_PROFILE")
_FILES = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}
_SOURCES = {
    *("aws_access_key_id", "role_arn", "credential_process", "web_identity_token_file"),
    *("sso_session", "sso_start_url", "login_session"),
}
"""What a profile that gives credentials has at least one of."""

_OF_CONNECTIONS = {"proxy_url", "proxy_excludes", "proxy_ca_certificate", "root_certificate"}

_logger = logging.getLogger("asyncckpt.storage")


class ProfileCredentials:
    """A provider of credentials for obstore's S3 store, which calls it before they expire.

    Args:
        session: A session of botocore with the profile.
        region: Region of the store; "": it is given elsewhere.

    Attributes:
        config: What obstore takes from it besides.
        session: The session of botocore.
        secrets: What the last call has returned.
    """

    def __init__(self, session: Any, region: str) -> None:
        self.config = {"region": region} if region else {}
        self.session = session
        self.secrets: tuple[str, ...] = ()

    def __call__(self) -> dict[str, Any]:
        """Return credentials, from files, or from a program or service that the profile names.

        Raises:
            RuntimeError: There are none.
        """
        try:
            frozen = self.session.get_credentials().get_frozen_credentials()
        except Exception as error:  # whose text may be what a program has printed
            who = f"profile {self.session.profile or 'default'!r} of the AWS CLI"
            raise RuntimeError(f"{who} gives no credentials: {type(error).__name__}") from None
        self.secrets = tuple(filter(None, frozen))
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(timezone.utc) + TTL,
        }


def is_profile(name: str) -> bool:
    """Return whether an option of this name is `profile`, which obstore does not know."""
    return PROFILE in by_name({name: ""})


class Secrets:
    """What no error may show: the values of options, and what a profile has given. May be iterated again and again.

    Args:
        options: Options of the store.
        profile: Its credentials, if they are those of a profile.
    """

    def __init__(self, options: Mapping[str, str], profile: ProfileCredentials | None = None) -> None:
        self._values = tuple(value for name, value in options.items() if not is_profile(name))
        self._profile = profile

    def __iter__(self) -> Iterator[str]:
        """Iterate over the values."""
        yield from self._values
        yield from () if self._profile is None else self._profile.secrets


def by_name(options: Mapping[str, str]) -> dict[str, str]:
    """Return options without the `aws_` and the capitals that obstore allows in their names."""
    return {_PREFIX.sub("", name, count=1).lower(): value for name, value in options.items()}


def profile_credentials(options: Mapping[str, str]) -> ProfileCredentials | None:
    """Return the credentials of the profile that is asked for; None: obstore finds credentials by itself.

    The option `profile` comes first, then keys and other sources of credentials in the options, keys or a web identity
    in the environment, a profile that the environment names, a container's role, and a profile "default".

    Args:
        options: Options of the store, with `profile` if there is one.

    Raises:
        ValueError: There is no such profile; credentials are given as well; or boto3 is not installed.
    """
    given, environment = by_name(options), os.environ
    named = given.get(PROFILE, "")
    if named and _CREDENTIALS & given.keys():
        raise ValueError("the options give both a profile and credentials")
    if not named and (
        _CREDENTIALS & given.keys()
        or environment.get("AWS_ACCESS_KEY_ID")
        or environment.get("AWS_WEB_IDENTITY_TOKEN_FILE")
        or _is_true(environment.get("AWS_SKIP_SIGNATURE", ""))
    ):
        return None
    is_named = bool(named or any(map(environment.get, _PROFILE_VARIABLES)))
    if not is_named and (any(map(environment.get, _CONTAINERS)) or not _has_files()):
        return None
    if importlib.util.find_spec("boto3") is None:
        if named:
            raise ValueError(f"credentials of profiles are read by boto3: {INSTALL}")
        if is_named:
            _logger.warning("AWS_PROFILE is set, but is not used, since boto3 is not installed: %s", INSTALL)
        return None
    from botocore.session import Session

    try:
        session = Session(profile=named or None)
        found = session.get_scoped_config()
        has_region = "region" in given or "default_region" in given or any(map(environment.get, _REGIONS))
        region = "" if has_region else str(session.get_config_variable("region") or "")
    except Exception as error:
        raise ValueError(f"the profile of the AWS CLI cannot be used: {error}") from None
    return ProfileCredentials(session, region) if is_named or _SOURCES & found.keys() else None


_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")


def _has_files() -> bool:
    paths = (os.environ.get(name, usual) for name, usual in _FILES.items())
    return any(os.path.isfile(os.path.expanduser(path)) for path in paths)


def _is_true(text: str) -> bool:
    return text.lower() in ("1", "true", "on", "yes", "y")


class UnfinishedUploads:
    """Lists and aborts unfinished uploads in a bucket.

    Args:
        root: URL of the bucket.
        options: Options of the store.
        store: obstore's store of the bucket.
        profile: Credentials of this store, if they are those of a profile.
        secrets: As of `message_of`.

    Raises:
        UnsupportedByStoreError: boto3 is not installed, or cannot be made to use the same server.
        OSError: The store cannot be used.
    """

    def __init__(
        self,
        root: str,
        options: Mapping[str, str],
        store: Any,
        profile: ProfileCredentials | None,
        secrets: Iterable[str],
    ) -> None:
        self._bucket, self._root, self._secrets = root.partition("://")[2], root, secrets
        with self._os_errors(root):
            self._client = self._opened(by_name(options), store, profile)

    def below(self, prefix: str, is_wanted: Callable[[str], bool]) -> Iterator[UnfinishedUpload]:
        """Implement `Store.unfinished_uploads`."""
        key, client = location_of(prefix).key, self._client
        uploads, parts = client.get_paginator("list_multipart_uploads"), client.get_paginator("list_parts")
        with self._os_errors(prefix):
            pages = uploads.paginate(Bucket=self._bucket, Prefix=f"{key}/" if key else "")
            for one in (upload for page in pages for upload in page.get("Uploads", ())):
                name = f"{self._root}/{one['Key']}"
                if not is_wanted(name):
                    continue
                sent = parts.paginate(Bucket=self._bucket, Key=one["Key"], UploadId=one["UploadId"])
                try:
                    found = [part for page in sent for part in page.get("Parts", ())]
                except client.exceptions.NoSuchUpload:  # it has ended meanwhile
                    continue
                changed = max(one["Initiated"], *(part["LastModified"] for part in found))
                yield UnfinishedUpload(name, one["UploadId"], sum(part["Size"] for part in found), changed.timestamp())

    def abort(self, upload: UnfinishedUpload) -> None:
        """Implement `Store.abort_upload`."""
        key = location_of(upload.name).key
        with self._os_errors(upload.name), contextlib.suppress(self._client.exceptions.NoSuchUpload):
            self._client.abort_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload.id)

    def _opened(self, given: Mapping[str, str], store: Any, profile: ProfileCredentials | None) -> Any:
        """Return a client of boto3 for the server and the region that obstore uses."""
        if importlib.util.find_spec("boto3") is None:
            raise self._unable(f"without boto3: {INSTALL}")
        if _is_true(given.get("skip_signature", os.environ.get("AWS_SKIP_SIGNATURE", ""))):
            raise self._unable("without credentials")
        if _OF_CONNECTIONS & given.keys():
            raise self._unable("through a proxy, or with certificates that options name")
        import boto3
        import obstore
        from botocore.config import Config
        from botocore.session import Session

        try:
            signed = urlsplit(obstore.sign(store, "GET", "x", timedelta(seconds=60)))
            _, _, region, *_ = parse_qs(signed.query)["X-Amz-Credential"][0].split("/")
        except (KeyError, ValueError):
            raise self._unable("with what obstore signs") from None
        if signed.path == f"/{self._bucket}/x":
            host, style = signed.netloc, "path"
        elif signed.netloc.startswith(f"{self._bucket}."):
            host, style = signed.netloc.removeprefix(f"{self._bucket}."), "virtual"
        else:
            raise self._unable("at an endpoint that is of one bucket only")
        session = boto3.Session(botocore_session=Session() if profile is None else profile.session)
        return session.client(
            "s3",
            endpoint_url=f"{signed.scheme}://{host}",
            region_name=region,
            aws_access_key_id=given.get("access_key_id"),
            aws_secret_access_key=given.get("secret_access_key"),
            aws_session_token=given.get("session_token") or given.get("token"),
            verify=False if _is_true(given.get("allow_invalid_certificates", "")) else None,
            config=Config(
                connect_timeout=TIMEOUT_S,
                read_timeout=TIMEOUT_S,
                retries={"mode": "standard", "max_attempts": 5},
                s3={"addressing_style": style},
            ),
        )

    def _unable(self, when: str) -> UnsupportedByStoreError:
        return UnsupportedByStoreError(f"list of unfinished uploads that can be read {when}", self._root)

    @contextlib.contextmanager
    def _os_errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if isinstance(error, UnsupportedByStoreError):
                raise
            raise OSError(error.errno or errno.EREMOTEIO, message_of(error, self._secrets), name) from None
        except Exception as error:  # of boto3, obstore, or what reads credentials
            response = getattr(error, "response", None)
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(response, dict) else 0
            number = errno.EACCES if status in (401, 403) else errno.EREMOTEIO
            raise OSError(number, message_of(error, self._secrets), name) from None
