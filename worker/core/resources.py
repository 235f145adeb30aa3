"""What the core asks its surroundings for and gets at once: watches, slots, sockets. Nothing here waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class Connection:
    """Where the worker that leads a run listens, and the keys of the run."""

    run: str
    address: str
    server_public: str
    client_public: str
    client_secret: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Listener:
    """Where this worker listens for followers, and its key pair."""

    address: str
    public: str
    secret: str


class Resources(Protocol):
    """Performed in the thread of the control loop."""

    def watch(self, session: str, pid: int, pid_start: int) -> bool:
        """Watch a process; return whether it is there, with that start time, and watched from now on.

        Raises:
            AsyncCkptError: Why that cannot be known.
        """

    def create_slot(self, number: int, nbytes: int, *, populate: bool) -> tuple[int, bytes]:
        """Check the memory and make a memfd; return its number and token.

        Raises:
            AsyncCkptError: `InsufficientMemoryError`, or why the system gives none.
        """

    def listen(self, port: int, secret: str) -> Listener:
        """Listen for followers. `port`: 0 takes the configured one. `secret`: of a key pair to take; "" makes one.

        Raises:
            AsyncCkptError: The port is taken, or there is no such address here.
        """

    def connect(self, connection: Connection) -> None:
        """Connect to the worker that leads a run.

        Raises:
            AsyncCkptError: There can be no connection.
        """

    def disconnect(self, run: str) -> None:
        """End the connection of a followed run, if there is one."""
