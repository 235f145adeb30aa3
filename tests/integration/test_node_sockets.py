"""The sockets between workers: who may come in, what gets through, and what is never open."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

import pytest
import zmq
from real_worker import wait_until

from asyncckpt.errors import EndpointError, WorkerUnavailableError
from asyncckpt.protocol.node_tables import Outcomes
from asyncckpt_worker.core.actions import LeaderAddress
from asyncckpt_worker.io.node_sockets import NodeSockets

RUN = "a" * 12
BEAT = Outcomes(sender="1" * 16, counter=1, to="2" * 16, saves=(), epochs=(), decided=(), gone=(), error={})


def key_pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


class Side:
    """One worker's sockets."""

    def __init__(self, *, port: int = 0, advertise: str = "127.0.0.1") -> None:
        self.keys: dict[str, str] = {}
        self.counts: Counter[str] = Counter()
        self.peers = NodeSockets(advertise, port, self.keys.get, lambda name: self.counts.update([name]))
        self.heard: list[tuple[str, bytes, object]] = []

    def turn(self) -> int:
        self.heard += self.peers.receive()
        return len(self.heard)


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    found = Side(), Side()
    yield found
    for side in found:
        side.peers.close()
        side.peers.close()


def connected(leader: Side, follower: Side, *, known: bool = True, server: str = "", run: str = RUN) -> str:
    """Let the follower connect, with the key of a known run or another one; return the leader's address."""
    address, public, _ = leader.peers.listen(0, "")
    client_public, client_secret = key_pair()
    leader.keys[client_public if known else key_pair()[0]] = RUN
    follower.peers.connect(
        LeaderAddress(
            run=run,
            address=address,
            server_public=server or public,
            client_public=client_public,
            client_secret=client_secret,
        )
    )
    return address


def tries(leader: Side, follower: Side, times: int = 50) -> None:
    """Let the follower send, as it does until it is answered."""
    for _ in range(times):
        follower.peers.send(RUN, b"", BEAT)
        if leader.turn():
            return
        zmq.zmq_poll([(s, zmq.POLLIN) for s in leader.peers.sockets()], 20)


def test_nothing_is_open_before_it_is_needed() -> None:
    assert Side().peers.sockets() == []


def test_a_follower_with_the_key_of_a_run_is_heard_for_that_run_and_answered(sides: tuple[Side, Side]) -> None:
    leader, follower = sides
    connected(leader, follower)
    tries(leader, follower)
    run, route, message = leader.heard[0]
    assert (run, message) == (RUN, BEAT) and route
    leader.peers.send(RUN, route, BEAT)
    wait_until(follower.turn, "the answer comes")
    assert follower.heard[0] == (RUN, b"", BEAT)


@pytest.mark.parametrize("wrong", ["client", "server"])
def test_a_wrong_key_is_refused(sides: tuple[Side, Side], wrong: str) -> None:
    leader, follower = sides
    connected(leader, follower, known=wrong != "client", server=key_pair()[0] if wrong == "server" else "")
    tries(leader, follower)
    assert not leader.heard
    assert wrong == "server" or leader.counts["followers_refused"]


def test_who_speaks_without_a_key_is_not_heard(sides: tuple[Side, Side]) -> None:
    leader, _ = sides
    address, _, _ = leader.peers.listen(0, "")
    with zmq.Context() as context, context.socket(zmq.DEALER) as plain:
        plain.setsockopt(zmq.LINGER, 0)
        plain.connect(address)
        for _ in range(30):
            with contextlib.suppress(zmq.Again):
                plain.send_multipart([b"ACKP\1\0", b"x"], zmq.NOBLOCK)
            assert not leader.turn()
            zmq.zmq_poll([(s, zmq.POLLIN) for s in leader.peers.sockets()], 10)


def test_another_worker_listens_where_the_dead_one_did_and_followers_come_back(sides: tuple[Side, Side]) -> None:
    first, follower = sides
    address, public, secret = first.peers.listen(0, "")
    client_public, client_secret = key_pair()
    first.keys[client_public] = RUN
    keys = {"server_public": public, "client_public": client_public, "client_secret": client_secret}
    follower.peers.connect(LeaderAddress(run=RUN, address=address, **keys))
    tries(first, follower)
    first.peers.close()
    second = Side()
    second.keys[client_public] = RUN
    try:
        port = int(address.rpartition(":")[2])
        assert second.peers.listen(port, secret) == (address, public, secret)
        tries(second, follower, times=300)
        assert second.heard[0][0] == RUN
    finally:
        second.peers.close()


def test_a_follower_whose_own_address_is_of_another_kind_reaches_an_ipv6_leader(sides: tuple[Side, Side]) -> None:
    _, follower = sides
    leader = Side(advertise="::1")
    try:
        assert connected(leader, follower).startswith("tcp://[::1]:")
        tries(leader, follower)
        assert leader.heard
    except EndpointError:
        pytest.skip("no IPv6 here")
    finally:
        leader.peers.close()


def test_a_key_that_makes_no_sense_is_an_error(sides: tuple[Side, Side]) -> None:
    public, secret = key_pair()
    keys = {"server_public": "#" * 40, "client_public": public, "client_secret": secret}
    with pytest.raises(WorkerUnavailableError):
        sides[1].peers.connect(LeaderAddress(run=RUN, address="tcp://127.0.0.1:9", **keys))
