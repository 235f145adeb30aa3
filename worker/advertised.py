"""Is the name that other nodes are to reach this worker by a name at all? Asked once, when the worker starts."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading

from asyncckpt.errors import ConfigError

RESOLVE_TIMEOUT_S = 15.0
"""How long the resolver may take. Chosen: above two tries of resolv.conf(5), which wait 5 s each."""


def check_advertised(host: str, timeout_s: float = RESOLVE_TIMEOUT_S) -> None:
    """Prove that `host` is an address, or a name that can be resolved here.

    Raises:
        ConfigError: It is neither.

    Blocks: for the resolver, at most `timeout_s`.
    """
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return
    answers: list[OSError | UnicodeError | None] = []

    def ask() -> None:
        try:
            socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            answers.append(error)
        else:
            answers.append(None)

    # In a thread: getaddrinfo(3) knows no deadline. It has ended, or the worker does not start, before anything forks.
    thread = threading.Thread(target=ask, name="asyncckpt-resolver", daemon=True)
    thread.start()
    thread.join(timeout_s)
    error = answers[0] if answers else TimeoutError(f"no answer within {timeout_s:g} s")
    if error is not None:
        raise ConfigError(
            f"advertise is {host!r}, which cannot be resolved: {error}; expected a name or address of this node by "
            "which the other nodes reach it",
            field="advertise",
            value=host,
        ) from error
