"""Requests by which the workers of several nodes are linked for a run: one leads it, the others follow.

Part of `messages`. Rank 0's trainer makes or keeps the keys, so that the worker that takes the place of a dead leader
can be found where the dead one was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from asyncckpt.protocol import fields as check
from asyncckpt.protocol.fields import Check
from asyncckpt.protocol.message import Message


@dataclass(frozen=True, kw_only=True, slots=True)
class Lead(Message):
    """Lead `run`: listen for the workers that follow. The session joins the run.

    `client_public`: the key that they prove. `port`, `server_secret`: of the worker that has led this run before, so
    that its followers find this one; 0 and "" leave both to the worker.
    """

    id: int
    run: str
    port: int
    server_secret: str
    client_public: str
    name: ClassVar[str] = "lead"
    checks: ClassVar[dict[str, Check]] = {
        "id": check.uint,
        "run": check.hex12,
        "port": check.port,
        "server_secret": check.curve_key_or_none,
        "client_public": check.curve_key,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Leading(Message):
    """The answer to Lead: where this worker listens, and the key pair that it proves."""

    id: int
    address: str
    server_public: str
    server_secret: str
    name: ClassVar[str] = "leading"
    checks: ClassVar[dict[str, Check]] = {
        "id": check.uint,
        "address": check.address,
        "server_public": check.curve_key,
        "server_secret": check.curve_key,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Follow(Message):
    """Follow the worker that leads `run`. The session joins the run. Answered when that worker has answered.

    `attempt`: goes up with every Follow of this rank, whatever worker it is for, so that the latest counts.
    `timeout_s`: refused with `worker_unavailable` if it has not answered until then; the worker goes on trying.
    """

    id: int
    run: str
    address: str
    server_public: str
    client_public: str
    client_secret: str
    attempt: int
    timeout_s: float
    name: ClassVar[str] = "follow"
    checks: ClassVar[dict[str, Check]] = {
        "id": check.uint,
        "run": check.hex12,
        "address": check.address,
        "server_public": check.curve_key,
        "client_public": check.curve_key,
        "client_secret": check.curve_key,
        "attempt": check.uint,
        "timeout_s": check.timeout,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Following(Message):
    """The answer to Follow: the leader's instance."""

    id: int
    leader: str
    name: ClassVar[str] = "following"
    checks: ClassVar[dict[str, Check]] = {"id": check.uint, "leader": check.hex16}
