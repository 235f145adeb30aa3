"""One save of a stock writer at a time: who has it, also after signals and in forked children."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("numpy")  # torch.distributed.checkpoint

from asyncckpt.dcp.storage_writer import OneAtATime
from asyncckpt.errors import ReentrantCallError


class Interrupted:
    """A lock at whose taking, or giving back, Ctrl-C comes once."""

    def __init__(self, before: bool) -> None:
        self._lock, self._before, self._came = threading.Lock(), before, False

    def _interrupt(self) -> None:
        if not self._came:
            self._came = True
            signal.raise_signal(signal.SIGINT)

    def acquire(self, blocking: bool = True) -> bool:
        if self._before:
            self._interrupt()
        taken = self._lock.acquire(blocking)
        self._interrupt()
        return taken

    def release(self) -> None:
        self._lock.release()


def elsewhere(call: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(call).result(10)


@pytest.mark.parametrize("before", [True, False])
def test_an_interrupt_where_a_step_begins_leaves_nobody_in_it(before: bool) -> None:
    one = OneAtATime()
    one._at_work = Interrupted(before)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt), one.beginning():
        pytest.fail("not reached")
    with one.beginning():
        pass
    with one.going_on():
        pass


def test_one_thread_s_step_refuses_another_s_and_its_own() -> None:
    one = OneAtATime()

    def begin() -> None:
        with pytest.raises(ReentrantCallError), one.beginning():
            pytest.fail("not reached")

    with one.beginning():
        begin()
        elsewhere(begin)
    with one.going_on():
        begin()
        elsewhere(begin)


def test_a_thread_that_begins_between_steps_takes_the_writer() -> None:
    one = OneAtATime()
    with one.beginning():
        pass

    def take() -> None:
        with one.beginning():
            pass

    elsewhere(take)
    with pytest.raises(ReentrantCallError, match="this one has ended"), one.going_on():
        pytest.fail("not reached")
    with one.beginning():
        pass


def test_a_forked_child_does_not_go_on_with_its_parent_s_save() -> None:
    one = OneAtATime()
    with one.beginning():
        if not (pid := os.fork()):
            code = 1
            try:
                with one.beginning():
                    pass
                with one.going_on():
                    code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
