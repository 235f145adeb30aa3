"""Nodes for tests, as root: network namespaces that share nothing but a hub, which loses frames and can be cut."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import random
import select
import struct
import subprocess
import threading
from collections.abc import Iterator

TUNSETIFF = 0x400454CA
TAP_WITHOUT_HEADER = 0x1002
"""IFF_TAP | IFF_NO_PI (linux/if_tun.h)."""

MAX_FRAME = 65536
_libc = ctypes.CDLL(None, use_errno=True)


def unavailable() -> str:
    """Return why there can be no such network here, or ""."""
    if os.geteuid():
        return "needs root"
    if not os.path.exists("/dev/net/tun"):
        return "needs /dev/net/tun"
    name = f"ackpt-try-{os.getpid()}"
    try:
        done = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    except FileNotFoundError:
        return "needs ip(8)"
    if done.returncode:
        return f"needs network namespaces: {done.stderr.decode().strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


class Network:
    """Nodes 0, 1, ... with the addresses 10.77.0.1, 10.77.0.2, ....

    Attributes:
        loss: Share of the frames that are lost.
        cut: Nodes whose frames reach nobody, and that get none.
    """

    def __init__(self, n_nodes: int, seed: int) -> None:
        self.names = [f"ackpt-{os.getpid()}-{n}" for n in range(n_nodes)]
        self.loss, self.cut = 0.0, set[int]()
        self._random = random.Random(seed)
        self._stop, self._thread = threading.Event(), threading.Thread(target=self._forward, name="hub")
        self._taps: list[int] = []
        for n, name in enumerate(self.names):
            _ip("netns", "add", name)
            self._taps.append(_tap(name))
            _ip("-n", name, "addr", "add", f"{self.address(n)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        self._thread.start()

    @staticmethod
    def address(n: int) -> str:
        """Return where the others reach node `n`."""
        return f"10.77.0.{n + 1}"

    def command(self, n: int, *words: str) -> list[str]:
        """Return the command that runs `words` on node `n`."""
        return ["ip", "netns", "exec", self.names[n], *words]

    def _forward(self) -> None:
        while not self._stop.is_set():
            ready, _, _ = select.select(self._taps, [], [], 0.1)
            for source in ready:
                with contextlib.suppress(BlockingIOError):
                    self._pass_on(self._taps.index(source), os.read(source, MAX_FRAME))

    def _pass_on(self, source: int, frame: bytes) -> None:
        for n, tap in enumerate(self._taps):
            if n != source and not {n, source} & self.cut and self._random.random() >= self.loss:
                with contextlib.suppress(OSError):  # its queue is full
                    os.write(tap, frame)

    def close(self) -> None:
        """Take everything away."""
        self._stop.set()
        self._thread.join()
        for tap in self._taps:
            os.close(tap)
        for name in self.names:
            _ip("netns", "del", name)


@contextlib.contextmanager
def network(n_nodes: int, seed: int) -> Iterator[Network]:
    """As `Network`, closed at the end."""
    made = Network(n_nodes, seed)
    try:
        yield made
    finally:
        made.close()


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (words, done.stderr)


def _tap(name: str) -> int:
    """Make `eth0` in a namespace; what is written to the returned fd arrives there."""
    here = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    there = os.open(f"/var/run/netns/{name}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _enter(there)
        tap = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH", b"eth0", TAP_WITHOUT_HEADER))
    finally:
        _enter(here)
        for fd in (here, there):
            os.close(fd)
    return tap


def _enter(namespace: int) -> None:
    assert _libc.setns(namespace, 0) == 0, os.strerror(ctypes.get_errno())


def environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return what torchrun would give a rank of one that runs on each node."""
    torchrun = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_PORT": port}
    named = {"MASTER_ADDR": Network.address(0), "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **named, **{name: str(value) for name, value in torchrun.items()}}
