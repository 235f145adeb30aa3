"""A checkpointer that starts its workers itself, at the default endpoint, and the one that it has just now."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from real_worker import DEADLINE_S, RealWorker, stop_whoever_serves, wait_until

import asyncckpt
from asyncckpt import AsyncCheckpointer
from asyncckpt.protocol.endpoint import default_endpoint, make_directory

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
STATE = {"w": torch.arange(100_000.0)}


@contextlib.contextmanager
def own_worker(**fields: Any) -> Iterator[AsyncCheckpointer]:
    """A checkpointer that starts its workers; they are ended after it. Wants the fixture `default_dir`."""
    # On a machine on which others work as well, a start takes longer than the default allows.
    checkpointer = AsyncCheckpointer(**{"worker_start_timeout_s": DEADLINE_S, **fields})
    endpoint = checkpointer._process.endpoint  # type: ignore[attr-defined]
    try:
        with checkpointer:
            yield checkpointer
    finally:
        stop_whoever_serves(endpoint)


@contextlib.contextmanager
def saved_once(root: pathlib.Path, **fields: Any) -> Iterator[AsyncCheckpointer]:
    """As `own_worker`, after a first save of `STATE`, to `root / "0"`."""
    with own_worker(**fields) as checkpointer:
        checkpointer.save(STATE, root / "0").written.result(DEADLINE_S)
        yield checkpointer


def worker_of(checkpointer: AsyncCheckpointer) -> RealWorker:
    """Return the worker that serves a checkpointer; waits until there is one."""
    return RealWorker(checkpointer._process.endpoint)  # type: ignore[attr-defined]


def lose(checkpointer: AsyncCheckpointer) -> None:
    """Kill the worker, and wait until that is noticed."""
    session = checkpointer._process._connection.session  # type: ignore[attr-defined]
    os.kill(session.worker.pid, 9)
    wait_until(lambda: session.error is not None, "the loss is noticed")


@contextlib.contextmanager
def dying_worker(kill: str, environ: Mapping[str, str] | None = None) -> Iterator[str]:
    """A worker at the default endpoint that dies at a call of its storage, see `killing_worker`; yields the endpoint.

    Args:
        kill: The call.
        environ: What processes that look for the endpoint add to this environment.
    """
    found = {**os.environ, **(environ or {})}
    endpoint = default_endpoint(found, uid=os.geteuid(), package=asyncckpt.__version__, interpreter=sys.prefix)
    make_directory(endpoint)
    process = subprocess.Popen([sys.executable, "-m", "tests.killing_worker", endpoint, kill], cwd=REPOSITORY)
    try:
        RealWorker(endpoint)
        yield endpoint
        assert process.wait(DEADLINE_S) == -9
    finally:
        process.kill()
        process.wait()
        stop_whoever_serves(endpoint)
