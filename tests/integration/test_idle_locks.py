"""An idle checkpointer has few locks: each is one more order in which two can be taken."""

from __future__ import annotations

import gc
import pathlib
import threading
import types
from collections import deque
from concurrent.futures import Future
from typing import Any

import real_worker
import torch
from real_worker import DEADLINE_S

from asyncckpt import AsyncCheckpointer

LOCKS = (type(threading.Lock()), type(threading.RLock()))
FOREIGN = (type, types.ModuleType, types.FrameType, Future, threading.Thread, torch.Tensor)
"""Not looked into: what is no checkpointer's own."""


def reached_from(start: Any) -> list[Any]:
    """Return every object that belongs to `start`."""
    seen: dict[int, Any] = {}
    left: deque[Any] = deque([start])
    while left:
        one = left.popleft()
        if id(one) in seen or isinstance(one, FOREIGN):
            continue
        seen[id(one)] = one
        if isinstance(one, types.FunctionType):  # not its globals
            left.extend((*(one.__closure__ or ()), *(one.__defaults__ or ())))
        else:
            left.extend(gc.get_referents(one))
    return list(seen.values())


def test_an_idle_checkpointer_has_at_most_eight_locks(
    tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker
) -> None:
    state = {"w": torch.zeros(1000)}
    model = torch.nn.Linear(4, 4)
    with AsyncCheckpointer(endpoint=shared_worker.endpoint) as checkpointer:
        checkpointer.attach(torch.optim.AdamW(model.parameters()))
        for step in range(3):
            checkpointer.save(state, tmp_path / f"{step}", step=step).written.result(DEADLINE_S)
        found = [one for one in reached_from(checkpointer) if isinstance(one, LOCKS)]
        assert 1 <= len(found) <= 8
