"""Servers on loopback that speak as S3 does, for tests of checkpoints in object stores."""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

BUCKET = "bucket"
STARTS_WITHIN_S = 60.0


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
def s3() -> Iterator[None]:
    """Run a server of S3 that holds one empty bucket, and set the environment in which programs find it."""
    for name in ("moto", "flask", "obstore"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            _create_bucket(f"http://127.0.0.1:{port}/{BUCKET}", server)
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
                for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
                    patch.setenv(name, "test")
                patch.setenv("AWS_REGION", "us-east-1")
                yield
        finally:
            server.terminate()
            server.wait(10)


def _create_bucket(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + STARTS_WITHIN_S
    while True:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=5):
                return
        except (urllib.error.URLError, OSError):
            if time.monotonic() > deadline or server.poll() is not None:
                raise
            time.sleep(0.1)
