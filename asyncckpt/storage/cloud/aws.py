"""What obstore lacks for S3, with boto3 (extra `aws`): credentials of AWS profiles; incomplete multipart uploads."""

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
from asyncckpt.storage.store import IncompleteUpload, UnsupportedByStoreError

PROFILE = "profile"
"""Storage option: name of a profile in the shared AWS config and credentials files."""

INSTALL = "pip install 'asyncckpt[aws]'"

TTL = timedelta(minutes=6)
"""Lifetime that obstore is told for credentials of a profile. It asks again five minutes before, so about every minute;
botocore gives credentials that are valid for ten minutes at least."""

TIMEOUT_S = 60.0
"""Of connecting, and of reading an answer, in requests that boto3 makes."""

_PREFIX = re.compile(r"aws_", re.IGNORECASE)

_CREDENTIAL_OPTIONS = {
    *("access_key_id", "secret_access_key", "token", "session_token"),
    *("role_arn", "role_session_name", "endpoint_url_sts", "web_identity_token_file"),
    *("container_credentials_relative_uri", "container_credentials_full_uri", "container_authorization_token_file"),
}
"""Options of obstore that say where credentials come from."""

_CONNECTION_OPTIONS = {"proxy_url", "proxy_excludes", "proxy_ca_certificate", "root_certificate"}
"""Options of obstore that are not passed on to boto3."""

_CONTAINER_VARIABLES = ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI")
_PROFILE_VARIABLES = ("AWS_DEFAULT_PROFILE", "AWS_PROFILE")
_REGION_VARIABLES = ("AWS_REGION", "AWS_DEFAULT_REGION")
_FILE_VARIABLES = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}
"""Variables with the path of a file, and where it is if they are not set."""

_PROFILE_CREDENTIAL_KEYS = {
    *("aws_access_key_id", "role_arn", "credential_process", "web_identity_token_file"),
    *("sso_session", "sso_start_url", "login_session"),
}
"""Keys of a profile, of which it has at least one if it gives credentials."""

_PRINTS_SECRETS = ("CredentialRetrievalError",)
"""Exceptions of botocore with the output of a program in their text."""

_logger = logging.getLogger("asyncckpt.storage")


class ProfileCredentials:
    """A provider of credentials for obstore's S3 store, which calls it before they expire.

    Args:
        session: A session of botocore with the profile.
        region: Region of the store; empty if it is configured elsewhere.

    Attributes:
        config: Settings of the store that obstore reads from the provider: the region.
        session: The session of botocore.
        secrets: Keys and token that the last call has returned.
    """

    def __init__(self, session: Any, region: str) -> None:
        self.config = {"region": region} if region else {}
        self.session = session
        self.secrets: tuple[str, ...] = ()

    def __call__(self) -> dict[str, Any]:
        """Return the credentials of the profile.

        Raises:
            RuntimeError: There are none.
        """
        try:
            frozen = self.session.get_credentials().get_frozen_credentials()
        except Exception as error:  # whose text may be what a program has printed
            who = f"AWS profile {self.session.profile or 'default'!r}"
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
    return PROFILE in normalized_names({name: ""})


class Secrets:
    """Values to remove from error messages: those of options, and what a profile has given.

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


def normalized_names(options: Mapping[str, str]) -> dict[str, str]:
    """Return options without the `aws_` and the capitals that obstore allows in their names."""
    return {_PREFIX.sub("", name, count=1).lower(): value for name, value in options.items()}


def profile_credentials(options: Mapping[str, str]) -> ProfileCredentials | None:
    """Return the credentials of the AWS profile to use; None: obstore finds credentials by itself.

    The option `profile` comes first, then credentials in the options, keys or a web identity in the environment, a
    profile that the environment names, a container's role, and a profile `default` that has credentials.

    Args:
        options: Options of the store, with `profile` if there is one.

    Raises:
        ValueError: There is no such profile; credentials are given as well; or boto3 is not installed.
    """
    given, environment = normalized_names(options), os.environ
    named = given.get(PROFILE, "")
    is_unsigned = _is_unsigned(given)
    if named and (is_unsigned or _CREDENTIAL_OPTIONS & given.keys()):
        raise ValueError("the storage option 'profile' cannot be combined with credentials")
    has_keys = environment.get("AWS_ACCESS_KEY_ID") and environment.get("AWS_SECRET_ACCESS_KEY")
    has_others = is_unsigned or has_keys or environment.get("AWS_WEB_IDENTITY_TOKEN_FILE")
    if not named and (has_others or _CREDENTIAL_OPTIONS & given.keys()):
        return None
    variable = next((name for name in _PROFILE_VARIABLES if environment.get(name)), "")
    is_named = bool(named or variable)
    if not is_named and (any(map(environment.get, _CONTAINER_VARIABLES)) or not _has_files()):
        return None
    if importlib.util.find_spec("boto3") is None:
        if named:
            raise ValueError(f"the storage option 'profile' requires boto3: {INSTALL}")
        if variable:
            _logger.warning("%s is set, but is not used, since boto3 is not installed: %s", variable, INSTALL)
        return None
    try:
        from botocore.session import Session

        session = Session(profile=named or None)
        found = session.get_scoped_config()
        has_region = "region" in given or "default_region" in given or any(map(environment.get, _REGION_VARIABLES))
        region = "" if has_region else str(session.get_config_variable("region") or "")
    except Exception as error:
        raise ValueError(f"the AWS profile cannot be used: {error}") from None
    return ProfileCredentials(session, region) if is_named or _PROFILE_CREDENTIAL_KEYS & found.keys() else None


def _has_files() -> bool:
    paths = (os.environ.get(name, usual) for name, usual in _FILE_VARIABLES.items())
    return any(os.path.isfile(os.path.expanduser(path)) for path in paths)


def _is_unsigned(given: Mapping[str, str]) -> bool:
    return _is_true(given.get("skip_signature", os.environ.get("AWS_SKIP_SIGNATURE", "")))


def _is_true(text: str) -> bool:
    return text.lower() in ("1", "true", "on", "yes", "y")


class IncompleteUploads:
    """Lists and aborts incomplete uploads in a bucket.

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
            self._client = self._opened(normalized_names(options), store, profile)

    def list_below(self, prefix: str, is_wanted: Callable[[str], bool]) -> Iterator[IncompleteUpload]:
        """Implement `Store.incomplete_uploads`."""
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
                changed = max([one["Initiated"], *(part["LastModified"] for part in found)])
                yield IncompleteUpload(name, one["UploadId"], sum(part["Size"] for part in found), changed.timestamp())

    def abort(self, upload: IncompleteUpload) -> None:
        """Implement `Store.abort_upload`."""
        key = location_of(upload.name).key
        with self._os_errors(upload.name), contextlib.suppress(self._client.exceptions.NoSuchUpload):
            self._client.abort_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload.id)

    def _opened(self, given: Mapping[str, str], store: Any, profile: ProfileCredentials | None) -> Any:
        """Return a client of boto3 for the server, the region and the credentials that obstore uses."""
        if importlib.util.find_spec("boto3") is None:
            raise self._unable(f"boto3 is not installed: {INSTALL}")
        if _is_unsigned(given):
            raise self._unable("requests are not signed")
        if _CONNECTION_OPTIONS & given.keys():
            raise self._unable("options name a proxy or certificates")
        import boto3
        import obstore
        from botocore.config import Config
        from botocore.session import Session

        try:
            signed = urlsplit(obstore.sign(store, "GET", "x", timedelta(seconds=60)))
            access_key, _, region, *_ = parse_qs(signed.query)["X-Amz-Credential"][0].split("/")
        except (KeyError, ValueError):
            raise self._unable("obstore signs in another way") from None
        if signed.path == f"/{self._bucket}/x":
            host, style = signed.netloc, "path"
        elif signed.netloc.startswith(f"{self._bucket}."):
            host, style = signed.netloc.removeprefix(f"{self._bucket}."), "virtual"
        else:
            raise self._unable("the endpoint is of one bucket only")
        session = boto3.Session(botocore_session=Session() if profile is None else profile.session)
        if not given.get("access_key_id"):
            found = session.get_credentials()
            if found is None or found.get_frozen_credentials().access_key != access_key:
                raise self._unable("boto3 finds other credentials than obstore")
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

    def _unable(self, reason: str) -> UnsupportedByStoreError:
        return UnsupportedByStoreError(f"list of incomplete uploads that can be read here ({reason})", self._root)

    @contextlib.contextmanager
    def _os_errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if isinstance(error, UnsupportedByStoreError):
                raise
            raise OSError(error.errno or errno.EREMOTEIO, message_of(error, self._secrets), name) from None
        except Exception as error:  # of boto3, obstore, or what reads credentials
            if type(error).__name__ in _PRINTS_SECRETS:
                raise PermissionError(errno.EACCES, f"no credentials: {type(error).__name__}", name) from None
            response = getattr(error, "response", None)
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(response, dict) else 0
            number = errno.EACCES if status in (401, 403) else errno.EREMOTEIO
            raise OSError(number, message_of(error, self._secrets), name) from None
