"""The socket for trainers: a ROUTER. It decodes frames into messages, and refuses those that it cannot decode."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import zmq

from asyncckpt.basics.failpoints import reach
from asyncckpt.errors import AsyncCkptError, EndpointError, ProtocolError, to_wire
from asyncckpt.protocol.codec import MAX_FRAME_NBYTES, decode, encode, request_id
from asyncckpt.protocol.messages import REQUESTS, Message, Refused, Saves
from asyncckpt_worker.service.endpoint_lock import claim

HIGH_WATER_MARK = 1000
"""Maximum queued messages per peer and direction; the default of zmq_setsockopt(3). Beyond it, messages to a peer that
does not read are lost, which the protocol allows."""

BATCH = 256
"""Maximum messages per call of `receive`, so that a flood of messages does not block other events."""

CLOSE_LINGER_MS = 500
"""LINGER at `close`; before that, it is 0. Chosen: a running peer reads its messages within this time."""

MAX_FRAMES = 3
"""Identity, header, body."""


class Server:
    """Owns socket, context, lock and socket file. Used from the control loop's thread only.

    Args:
        endpoint: `ipc://...`.
        count: Called with the name of a counter.
        claimed: Result of `endpoint_lock.claim`, if the caller has the lock already. The server then owns the lock.
    """

    def __init__(self, endpoint: str, count: Callable[[str], None], claimed: tuple[str, int] | None = None) -> None:
        self._count = count
        self._path, self._lock_fd = claimed or claim(endpoint)
        self._context = zmq.Context()
        try:
            self._bind(endpoint)
        except BaseException:
            self.close()
            raise

    def _bind(self, endpoint: str) -> None:
        # IMPORTANT: only with the lock. A second bind would take the path of a running worker without an error.
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
        except OSError as error:
            text = f"cannot listen on {endpoint}: cannot remove the file at its path: {error.strerror}"
            raise EndpointError(text, endpoint=endpoint, path=self._path) from error
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_NBYTES)
        try:
            self._socket.bind(endpoint)
            os.chmod(self._path, 0o600)
        except (zmq.ZMQError, OSError) as error:
            raise EndpointError(f"cannot listen on {endpoint}: {error}", endpoint=endpoint, path=self._path) from error

    def poll(self, name: str, others: Mapping[int | zmq.Socket[bytes], str], timeout_s: float) -> set[str]:
        """Wait for a message, or until one of the descriptors and sockets in `others` is readable.

        Args:
            name: Returned if there is a message.
            others: Descriptor or socket -> name to return if it is readable.
            timeout_s: How long to wait.

        Blocks: at most `timeout_s`.

        Returns:
            The names of what is ready.
        """
        names = {self._socket: name, **others}
        poller = zmq.Poller()
        for source in names:
            poller.register(source, zmq.POLLIN)
        return {names[source] for source, _ in poller.poll(max(0, int(timeout_s * 1000) + 1))}

    def receive(self) -> Iterator[tuple[bytes, Message]]:
        """Yield peer and message of what has arrived, at most `BATCH`; messages that do not decode are refused."""
        for _ in range(BATCH):
            try:
                peer, frames = self._next()
            except zmq.Again:
                return
            self._count("messages_received")
            try:
                message = decode(frames, REQUESTS)
            except Exception as error:  # no message may end the worker
                self._count("messages_malformed")
                if not isinstance(error, AsyncCkptError):
                    error = ProtocolError(f"the message does not decode: {error!r}", detail="body")
                self.send(peer, Refused(id=request_id(frames[:2]), error=to_wire(error)))
            else:
                yield peer, message

    def _next(self) -> tuple[bytes, list[bytes]]:
        frames: list[bytes] = []
        while True:
            frame = self._socket.recv(zmq.NOBLOCK)
            if len(frames) <= MAX_FRAMES:
                frames.append(frame)
            if not self._socket.getsockopt(zmq.RCVMORE):
                return frames[0], frames[1:]

    def send(self, peer: bytes, message: Message) -> None:
        """Send a message without waiting. If the peer is disconnected or does not read, the message is lost.

        Rows of saves that do not fit into one frame are sent in several messages.

        Raises:
            ProtocolError: The message cannot be encoded: a bug. A request that it answers is refused.
        """
        try:
            frames = encode(message)
        except ProtocolError as error:
            if isinstance(message, Saves) and len(message.saves) > 1:
                half = len(message.saves) // 2
                for rows in (message.saves[:half], message.saves[half:]):
                    self.send(peer, replace(message, saves=rows))
                return
            if (id := getattr(message, "id", 0)) and not isinstance(message, Refused):
                self.send(peer, Refused(id=id, error=to_wire(error)))
            raise
        try:
            reach("worker: sending")
            self._socket.send_multipart([peer, *frames], zmq.NOBLOCK)
        except (zmq.ZMQError, OSError):
            self._count("messages_lost")

    def close(self) -> None:
        """Close the socket, remove its file, and release the lock. Idempotent.

        Blocks: for peers that do not read, at most `CLOSE_LINGER_MS`.
        """
        if self._lock_fd < 0:
            return
        if hasattr(self, "_socket"):
            # With LINGER 0, a message that was just queued, such as the last "committed", would be dropped.
            self._socket.close(CLOSE_LINGER_MS)
        self._context.term()
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        # IMPORTANT: the lock file stays. If it was removed, a second worker that has opened it could lock the old file
        # while a third one locks a new file: two workers on one endpoint.
        os.close(self._lock_fd)
        self._lock_fd = -1
