"""Mirrors that take no checkpoint."""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
from collections.abc import Iterator

import mounts
import pytest

from tests import object_proxy

BAD_MIRRORS = ("hangs", "refuses", "full", "gone")


@contextlib.contextmanager
def bad_mirror(kind: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield a mirror that takes no checkpoint: it does not answer, refuses, has no room, or is not there."""
    if kind == "full":
        if os.geteuid():
            pytest.skip("mounts need root")
        with mounts.tmpfs(tmp_path / "small", "size=64k") as place:
            yield str(place)
        return
    pytest.importorskip("obstore", reason="the extra cloud is not installed")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.setenv(name, "test")
    with contextlib.ExitStack() as stack:
        if kind == "refuses":
            proxy = stack.enter_context(object_proxy.running("http://127.0.0.1:9"))
            proxy.fault = lambda method, path: object_proxy.REFUSED
            url = proxy.url
        else:
            port = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            url = f"http://127.0.0.1:{port}"
            if kind == "gone":
                stack.close()
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        yield "s3://bucket/mirror"
