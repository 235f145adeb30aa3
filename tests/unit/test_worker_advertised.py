"""worker.advertised: a name that leads nowhere is found when the worker starts, not at the first save of two nodes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from asyncckpt.errors import ConfigError
from asyncckpt_worker.advertised import check_advertised


def raising(error: Exception) -> Callable[..., Any]:
    """Return a resolver that fails."""

    def resolve(*_: Any, **__: Any) -> Any:
        raise error

    return resolve


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "10.1.2.3"])
def test_an_address_is_not_asked_for(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", raising(AssertionError("the resolver was asked")))
    check_advertised(host)


def test_a_name_that_resolves_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_, **__: asked.append(host))
    check_advertised("node7")
    assert asked == ["node7"]


@pytest.mark.parametrize(
    "error", [socket.gaierror(socket.EAI_NONAME, "Name or service not known"), UnicodeError("label too long")]
)
def test_a_name_that_does_not_resolve_is_named(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", raising(error))
    with pytest.raises(ConfigError, match=r"'node7', which cannot be resolved: .*(not known|too long)") as caught:
        check_advertised("node7")
    assert (caught.value.field, caught.value.value) == ("advertise", "node7")


def test_a_resolver_that_does_not_answer_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: over.wait(60))
    try:
        with pytest.raises(ConfigError, match=r"no answer within 0\.05 s"):
            check_advertised("node7", timeout_s=0.05)
    finally:
        over.set()
        for thread in threading.enumerate():
            if thread.name == "asyncckpt-resolver":
                thread.join(60)
