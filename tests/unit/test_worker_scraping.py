"""Who asks for metrics, and how badly: everybody else is answered all the same."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from asyncckpt_worker.scraping import MAX_VISITS, Scraped

DEADLINE_S = 60.0
PAGE = "asyncckpt_info 1\n"


@pytest.fixture
def scraped() -> Iterator[Scraped]:
    """One that serves `PAGE`."""
    found = Scraped("127.0.0.1:0")
    found.page = PAGE
    yield found
    found.close()
    found.close()


def connected(scraped: Scraped) -> socket.socket:
    return socket.create_connection(("127.0.0.1", scraped.port), timeout=DEADLINE_S)


def answer_to(scraped: Scraped, request: bytes) -> bytes:
    """Return everything that is said to a request."""
    found = b""
    with connected(scraped) as connection, contextlib.suppress(ConnectionResetError, BrokenPipeError):
        connection.sendall(request)
        while piece := connection.recv(65536):
            found += piece
    return found


def asked(scraped: Scraped) -> str:
    head, _, body = answer_to(scraped, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 200 OK\r\n") and f"Content-Length: {len(body)}".encode() in head
    return body.decode()


def test_the_page_is_given_whole_also_a_large_one(scraped: Scraped) -> None:
    assert asked(scraped) == PAGE
    scraped.page = PAGE * 200_000
    assert asked(scraped) == PAGE * 200_000


def test_connections_that_say_nothing_hold_up_nobody_and_are_closed(scraped: Scraped) -> None:
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connected(scraped)) for _ in range(2 * MAX_VISITS)]
        silent[-1].sendall(b"GET /met")
        assert asked(scraped) == PAGE
        assert all(connection.recv(1) == b"" for connection in silent)


def test_one_that_reads_nothing_is_left_at_its_deadline_and_holds_up_nobody(scraped: Scraped) -> None:
    scraped.page = PAGE * 1_000_000
    with connected(scraped) as idle:
        idle.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert idle.recv(1) == b"H"
        scraped.page = PAGE
        assert asked(scraped) == PAGE


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"404"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"GET /metrics\r\n\r\n", b"405"),
        (b"\xff\xfe\x00 \x80 x\r\n\r\n", b"405"),
        (b"\n\n", b"405"),
        (b"\0" * 10_000, b""),
    ],
)
def test_strange_requests_are_refused_and_the_next_is_answered(
    scraped: Scraped, request_: bytes, status: bytes
) -> None:
    found = answer_to(scraped, request_)
    assert found.split(b" ")[1:2] == [status] if status else found == b""
    assert asked(scraped) == PAGE


def test_head_gives_the_length_only(scraped: Scraped) -> None:
    found = answer_to(scraped, b"HEAD /metrics HTTP/1.1\r\n\r\n")
    assert found.endswith(b"\r\n\r\n") and f"Content-Length: {len(PAGE)}\r\n".encode() in found
