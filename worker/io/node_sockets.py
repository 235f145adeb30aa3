"""The sockets between the workers of several nodes: a ROUTER for followers, and a DEALER for each followed run.

Sockets are created when they are needed. CURVE encrypts and authenticates. The ZAP handler (ZeroMQ RFC 27) maps a
client's key to its run, so that a client can send messages for that run only.
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import zmq
from zmq.utils import z85

from asyncckpt.basics.failpoints import reach
from asyncckpt.errors import AsyncCkptError, EndpointError, WorkerUnavailableError
from asyncckpt.protocol.codec import decode, encode
from asyncckpt.protocol.messages import Message
from asyncckpt.protocol.node_tables import MAX_NODE_FRAME_NBYTES, NODE_MESSAGES
from asyncckpt_worker.core.actions import LeaderAddress

HIGH_WATER_MARK = 64
"""Maximum queued messages per peer and direction: 32 MiB of pages. Chosen, not measured."""

BATCH = 64
CLOSE_LINGER_MS = 500
ZAP_ENDPOINT = "inproc://zeromq.zap.01"
MAX_ZAP_FRAMES = 8
MAX_FRAMES = 3

_OPTIONS: dict[int, int] = {
    zmq.LINGER: 0,
    zmq.SNDHWM: HIGH_WATER_MARK,
    zmq.RCVHWM: HIGH_WATER_MARK,
    zmq.MAXMSGSIZE: MAX_NODE_FRAME_NBYTES,
    zmq.RECONNECT_IVL: 100,
    zmq.RECONNECT_IVL_MAX: 2000,
    zmq.CONNECT_TIMEOUT: 5000,
    zmq.HEARTBEAT_IVL: 2000,  # reconnect if the other side has disappeared without closing
    zmq.HEARTBEAT_TIMEOUT: 10_000,
    zmq.HANDSHAKE_IVL: 10_000,  # disconnect a peer that has not authenticated by then
    zmq.IMMEDIATE: 1,
}


class NodeSockets:
    """The sockets between this worker and those of other nodes. Used from the control loop's thread only.

    Args:
        advertise: Name or address of this node by which followers reach it.
        port: Port to listen at; 0: any.
        run_of: Returns the run that a client's public key belongs to, or None.
        count: Called with the name of a counter.
    """

    def __init__(
        self, advertise: str, port: int, run_of: Callable[[str], str | None], count: Callable[[str], None]
    ) -> None:
        self._advertise, self._port, self._run_of, self._count = advertise, port, run_of, count
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._zap: zmq.Socket[bytes] | None = None
        self._router: zmq.Socket[bytes] | None = None
        self._dealers: dict[str, zmq.Socket[bytes]] = {}

    # ---- connections ------------------------------------------------------------------------------------------------

    def listen(self, port: int, secret: str) -> tuple[str, str, str]:
        """Listen for followers.

        Args:
            port: 0 is the configured one.
            secret: Secret key to use, in Z85; "" creates a key pair.

        Returns:
            Address, public key and secret key.

        Raises:
            EndpointError: The port is in use, or this machine does not have the address.
        """
        public_key, secret_key = _key_pair(secret)
        if self._zap is None:
            # IMPORTANT: before the ROUTER is bound: without a handler, libzmq admits any client with the server key.
            self._zap = self._new_socket(zmq.REP)
            self._zap.bind(ZAP_ENDPOINT)
        host = _bracketed(self._advertise)
        router = self._new_socket(zmq.ROUTER)
        try:
            router.setsockopt(zmq.CURVE_SERVER, 1)
            router.setsockopt(zmq.CURVE_SECRETKEY, secret_key)
            router.setsockopt(zmq.ZAP_DOMAIN, b"asyncckpt")
            router.bind(f"tcp://{_interface(self._advertise)}:{port or self._port or '*'}")
            bound = router.getsockopt(zmq.LAST_ENDPOINT)
        except zmq.ZMQError as error:
            router.close(0)
            address = f"tcp://{host}:{port or self._port}"
            raise EndpointError(
                f"cannot listen for the workers of other nodes at {address}: {error}; choose --advertise and --port",
                endpoint=address,
                detail=str(error),
            ) from error
        assert isinstance(bound, bytes)
        self._router = router
        number = bound.rstrip(b"\0").decode().rpartition(":")[2]
        return f"tcp://{host}:{number}", public_key.decode(), secret_key.decode()

    def connect(self, leader: LeaderAddress) -> None:
        """Connect to the worker that leads a run. Does not wait: libzmq retries.

        Raises:
            WorkerUnavailableError: The address or a key is not valid.
        """
        self.disconnect(leader.run)
        dealer = self._new_socket(zmq.DEALER, leader.address)
        try:
            dealer.setsockopt(zmq.CURVE_SERVERKEY, leader.server_public.encode())
            dealer.setsockopt(zmq.CURVE_PUBLICKEY, leader.client_public.encode())
            dealer.setsockopt(zmq.CURVE_SECRETKEY, leader.client_secret.encode())
            dealer.connect(leader.address)
        except zmq.ZMQError as error:
            dealer.close(0)
            raise WorkerUnavailableError(
                f"cannot connect to the worker at {leader.address}: {error}",
                endpoint=leader.address,
                detail="leader",
            ) from error
        self._dealers[leader.run] = dealer

    def disconnect(self, run: str) -> None:
        """Close the connection of a run, if there is one."""
        dealer = self._dealers.pop(run, None)
        if dealer is not None:
            try:
                reach("peers: disconnecting")
            finally:
                dealer.close(CLOSE_LINGER_MS)

    def _new_socket(self, kind: int, address: str = "") -> zmq.Socket[bytes]:
        if self._context is None:
            self._context = zmq.Context()
        socket = self._context.socket(kind)
        for option, value in _OPTIONS.items():
            socket.setsockopt(option, value)
        if ":" in self._advertise or "[" in address:
            socket.setsockopt(zmq.IPV6, 1)
        return socket

    # ---- messages ---------------------------------------------------------------------------------------------------

    def sockets(self) -> list[zmq.Socket[bytes]]:
        """Return the sockets to poll."""
        return [s for s in (self._zap, self._router, *self._dealers.values()) if s is not None]

    def receive(self) -> Iterator[tuple[str, bytes, Message]]:
        """Yield run, route (b"": the run's leader) and message; at most `BATCH` from each socket."""
        self._authenticate()
        if self._router is not None:
            for frames in self._frames(self._router):
                message = self._decoded(frames[1:])
                run = frames[1].get("User-Id") if message is not None else None
                if message is not None and run is not None:
                    yield str(run), frames[0].bytes, message
        for run, dealer in list(self._dealers.items()):
            for frames in self._frames(dealer):
                message = self._decoded(frames)
                if message is not None:
                    yield run, b"", message

    def _frames(self, socket: zmq.Socket[bytes]) -> Iterator[Sequence[Any]]:
        for _ in range(BATCH):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
                reach("peers: received")
            except (zmq.ZMQError, OSError):
                return
            self._count("relays_received")
            yield frames

    def _decoded(self, frames: Sequence[Any]) -> Message | None:
        """Return the message; None if it does not decode. It is dropped, since all messages are repeated."""
        try:
            return decode([f.bytes for f in frames[:MAX_FRAMES]], NODE_MESSAGES, MAX_NODE_FRAME_NBYTES)
        except AsyncCkptError:
            self._count("relays_malformed")
            return None

    def send(self, run: str, route: bytes, message: Message) -> None:
        """Send a message without waiting. If the receiver is disconnected or does not read, the message is lost."""
        socket = self._router if route else self._dealers.get(run)
        frames = encode(message, MAX_NODE_FRAME_NBYTES)
        try:
            if socket is not None:
                reach("peers: sending")
                socket.send_multipart([route, *frames] if route else frames, zmq.NOBLOCK)
        except (zmq.ZMQError, OSError):
            self._count("relays_lost")

    def _authenticate(self) -> None:
        """Answer the authentication requests of libzmq."""
        while self._zap is not None and self._zap.poll(0):
            frames = self._zap.recv_multipart()[:MAX_ZAP_FRAMES]
            version, request = [*frames, b"", b""][:2]
            curve = len(frames) == 7 and frames[5] == b"CURVE" and len(frames[6]) == 32
            run = self._run_of(z85.encode(frames[6]).decode()) if curve else None
            if run is None:
                self._count("followers_refused")
                self._zap.send_multipart([version, request, b"400", b"no run has this key", b"", b""])
            else:
                self._zap.send_multipart([version, request, b"200", b"OK", run.encode(), b""])

    def close(self) -> None:
        """Close everything. Idempotent.

        Blocks: for peers that do not read, at most `CLOSE_LINGER_MS`.
        """
        for socket in self.sockets():
            socket.close(0 if socket is self._zap else CLOSE_LINGER_MS)
        self._zap = self._router = None
        self._dealers.clear()
        if self._context is not None:
            self._context.term()
            self._context = None


def _key_pair(secret: str) -> tuple[bytes, bytes]:
    if not secret:
        return zmq.curve_keypair()
    return zmq.curve_public(secret.encode()), secret.encode()


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _interface(advertise: str) -> str:
    """Return the interface to bind: the advertised address; all interfaces for a name, which may be any of them."""
    with contextlib.suppress(ValueError):
        return _bracketed(str(ipaddress.ip_address(advertise)))
    return "127.0.0.1" if advertise == "localhost" else "*"
