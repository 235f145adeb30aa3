"""For tests of copies behind the training: a gate in front of them, and what a thread does while they wait."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from real_worker import DEADLINE_S, wait_until

from asyncckpt.staging import cpu_copy, overlap
from asyncckpt.staging.cpu_copy import CopyWork, SlotImage
from asyncckpt.staging.deferred_copy import BackgroundCopier

COPIER = "asyncckpt-overlap"


def copy_all_behind(put: Callable[[object, str, Any], None] = setattr) -> None:
    """Let copies run behind the training whatever they cost: also of small tensors, and on cores that are all busy."""
    put(cpu_copy, "MIN_DEFERRED_NBYTES", 0)
    put(overlap, "has_idle_core", lambda: True)


class Gate:
    """Holds every deferred copy up before it moves a byte, until it is opened.

    Attributes:
        reached: A copy has come.
        waited: Somebody has begun to wait for copies.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.waited, self._open = threading.Event(), threading.Event(), threading.Event()
        copy, wait = SlotImage.copy, BackgroundCopier.wait

        def held(image: SlotImage, tensors: Sequence[torch.Tensor], work: CopyWork, *options: Any) -> None:
            if threading.current_thread().name == COPIER:
                self.reached.set()
                assert self._open.wait(DEADLINE_S)
            copy(image, tensors, work, *options)

        def noted(copier: BackgroundCopier, timeout_s: float, **options: Any) -> Any:
            self.waited.set()
            return wait(copier, timeout_s, **options)

        monkeypatch.setattr(SlotImage, "copy", held)
        monkeypatch.setattr(BackgroundCopier, "wait", noted)

    def open(self) -> None:
        """Let them go."""
        self._open.set()

    def close(self) -> None:
        """Hold the next ones up."""
        self._open.clear()
        self.reached.clear()
        self.waited.clear()

    @contextlib.contextmanager
    def held_back(self, work: Callable[[], Any]) -> Iterator[threading.Thread]:
        """Inside, `work` has begun to wait for the copies, in a thread of its own; at the end, both have ended."""
        failed: list[BaseException] = []

        def run() -> None:
            try:
                work()
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            wait_until(lambda: self.waited.is_set() or not thread.is_alive(), "it waits for the copies")
            assert thread.is_alive(), f"it did not wait: {failed}"
            yield thread
        finally:
            self.open()
            thread.join(DEADLINE_S)
        assert not thread.is_alive() and not failed, failed


def linear(width: int = 64, **options: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a small model and an AdamW with state."""
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    backward(model)
    optimizer.step()
    return model, optimizer


def backward(model: torch.nn.Module) -> None:
    """Fill the gradients."""
    model(torch.randn(4, next(model.parameters()).shape[-1])).square().mean().backward()


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, **more: Any) -> dict[str, Any]:
    """Return their state dicts."""
    return {"model": model.state_dict(), "optim": optimizer.state_dict(), **more}
