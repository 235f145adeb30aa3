"""Servers on loopback that speak as S3, Google Cloud Storage and Azure do, for tests of object stores."""

from __future__ import annotations

import base64
import contextlib
import email.utils
import hashlib
import hmac
import importlib.util
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from asyncckpt.storage import locate
from tests import gcs_server

BUCKET = "bucket"
STARTS_WITHIN_S = 60.0
ENDS_WITHIN_S = 60.0

SCHEMES = ("s3", "gs", "az")
"""Those whose stores `running` starts a server of: moto, `gcs_server`, azurite."""

AZURITE = Path(__file__).parent.parent / ".azurite" / "node_modules" / ".bin" / "azurite-blob"
"""Where `make .azurite/.stamp` installs it."""

NO_CONNECTION_STAYS = {"pool_max_idle_per_host": "0"}
"""Options for stores in a test's own process, where connections that wait for the next request seem leaked."""

AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The account that every azurite has, and its key: both are public."""


@dataclass(frozen=True)
class Server:
    """A server that holds one bucket (Azure: a container).

    Attributes:
        scheme: Of its URLs.
        url: Where it listens.
    """

    scheme: str
    url: str

    @property
    def root(self) -> str:
        """URL of the bucket."""
        return f"{self.scheme}://{BUCKET}"

    def options(self, url: str = "") -> dict[str, str]:
        """Return obstore's options that lead to it, or to what listens at `url` in front of it."""
        url = url or self.url
        if self.scheme == "s3":
            return {"endpoint": url, "access_key_id": "test", "secret_access_key": "test", "region": "us-east-1"}
        if self.scheme == "gs":
            return {"base_url": url, "bearer_token": gcs_server.TOKEN}
        return {"endpoint": f"{url}/{AZURE_ACCOUNT}", "account_name": AZURE_ACCOUNT, "account_key": AZURE_KEY}

    def environment(self, url: str = "") -> dict[str, str]:
        """Return the variables that do what `options` do."""
        return {_VARIABLES[self.scheme][name]: value for name, value in self.options(url).items()}


_VARIABLES: Mapping[str, Mapping[str, str]] = {
    "s3": {
        "endpoint": "AWS_ENDPOINT_URL",
        "access_key_id": "AWS_ACCESS_KEY_ID",
        "secret_access_key": "AWS_SECRET_ACCESS_KEY",
        "region": "AWS_REGION",
    },
    "gs": {"base_url": "GOOGLE_BASE_URL", "bearer_token": "GOOGLE_BEARER_TOKEN"},
    "az": {
        "endpoint": "AZURE_STORAGE_ENDPOINT",
        "account_name": "AZURE_STORAGE_ACCOUNT_NAME",
        "account_key": "AZURE_STORAGE_ACCOUNT_KEY",
    },
}


def memory_store() -> Any:
    """Return a store of obstore's that keeps objects in memory, and skip the test where obstore is not installed."""
    return pytest.importorskip("obstore.store", reason="the extra cloud is not installed").MemoryStore()


def start_runtime() -> None:
    """Start what obstore keeps until a process ends, threads and descriptors, so that no test seems to leak it."""
    if importlib.util.find_spec("obstore") is not None:
        memory_store().put("warm", b"")


def free_port() -> int:
    """Return a port of loopback that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextlib.contextmanager
def running(scheme: str) -> Iterator[Server]:
    """Run a server that holds one empty bucket. Skips where it is not installed, and says what is missing."""
    if importlib.util.find_spec("obstore") is None:
        pytest.skip("the extra cloud is not installed")
    with {"s3": _s3, "gs": _gs, "az": _az}[scheme]() as url:
        yield Server(scheme, url)


@contextlib.contextmanager
def in_environment(server: Server, url: str = "") -> Iterator[None]:
    """Set the variables by which programs find the server, or what listens at `url` in front of it.

    Stores that tests before have opened in this process are forgotten: they lead to servers that have ended.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(locate, "_stores", {})
        for name, value in server.environment(url).items():
            patch.setenv(name, value)
        yield


@contextlib.contextmanager
def _s3() -> Iterator[str]:
    for name in ("moto", "flask"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    request = urllib.request.Request(f"{url}/{BUCKET}", method="PUT")
    with _process([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], request):
        yield url


@contextlib.contextmanager
def _gs() -> Iterator[str]:
    with gcs_server.running(BUCKET) as url:
        yield url


@contextlib.contextmanager
def _az() -> Iterator[str]:
    if not AZURITE.exists() or shutil.which("node") is None:
        pytest.skip("azurite is not installed: `make .azurite/.stamp` does it where npm is")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [str(AZURITE), "--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence"]
    command += ["--silent", "--skipApiVersionCheck", "--disableTelemetry"]
    with _process(command, _new_container(url)):
        yield url


def _new_container(url: str) -> urllib.request.Request:
    """Return the request that makes the container, signed (Azure's "Authorize with Shared Key")."""
    headers = {"x-ms-date": email.utils.formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    named = "".join(f"{name}:{value}\n" for name, value in headers.items())
    text = "PUT" + "\n" * 12 + f"{named}/{AZURE_ACCOUNT}/{AZURE_ACCOUNT}/{BUCKET}\nrestype:container"
    digest = hmac.new(base64.b64decode(AZURE_KEY), text.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {AZURE_ACCOUNT}:{base64.b64encode(digest).decode()}"
    where = f"{url}/{AZURE_ACCOUNT}/{BUCKET}?restype=container"
    return urllib.request.Request(where, headers=headers, method="PUT")


@contextlib.contextmanager
def _process(command: Sequence[str], first: urllib.request.Request) -> Iterator[None]:
    """Run a program until it has answered the first request, and then as long as the block lasts."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            _asked(first, server)
            yield
        finally:
            server.kill()
            server.wait(ENDS_WITHIN_S)


def _asked(request: urllib.request.Request, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + STARTS_WITHIN_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            if time.monotonic() > deadline or server.poll() is not None:
                raise
            time.sleep(0.1)
