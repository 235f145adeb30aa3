"""Who is connected to a socket that listens: how many, and whether that is too many.

Whoever reaches a port can connect to it without any key, and each connection costs a file descriptor until its
handshake has failed. Strangers must not be able to take them all: then no save could open a file any more.
"""

from __future__ import annotations

import contextlib
import resource
from typing import Any

import zmq

MAX_CONNECTIONS = 8192
"""Two of every stream that a worker knows: one that is over may still be open. Chosen."""

SHARE = 0.5
"""Of the file descriptors that this process may have. The rest is for files, and the processes of this node."""

_EVENTS = int(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
_ACCEPTED = int(zmq.EVENT_ACCEPTED)


def max_connections() -> int:
    """Return how many may be open. Takes all file descriptors that the system lets this process have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, int(soft * SHARE))


class Door:
    """Counts the connections of one listening socket. Used from the socket's thread.

    Args:
        context: Of the socket.
        listener: The socket, before it is bound.
        limit: More are too many.

    Attributes:
        events: What to poll: something has changed.
    """

    def __init__(self, context: zmq.Context[Any], listener: zmq.Socket[bytes], limit: int) -> None:
        self._listener, self._limit, self._open = listener, limit, 0
        address = f"inproc://asyncckpt.door.{id(self):x}"
        listener.monitor(address, _EVENTS)
        self.events: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self.events.setsockopt(zmq.LINGER, 0)
        self.events.setsockopt(zmq.RCVHWM, 0)  # libzmq's thread would wait for room, and all connections with it
        self.events.connect(address)

    def is_crowded(self) -> bool:
        """Take what has happened, and say whether too many are connected."""
        while True:
            try:
                frame = self.events.recv_multipart(zmq.NOBLOCK)[0]
            except zmq.ZMQError:
                return self._open > self._limit
            arrived = int.from_bytes(frame[:2], "little") == _ACCEPTED
            self._open = max(0, self._open + (1 if arrived else -1))

    def emptied(self) -> None:
        """The socket has dropped all connections."""
        self.is_crowded()
        self._open = 0

    def close(self) -> None:
        """Stop counting."""
        self._listener.disable_monitor()
        self.events.close(0)
