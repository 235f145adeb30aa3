"""Copies behind the training that do not end as they should: every future completes, and no interrupt is lost."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from asyncckpt.async_checkpointer import hand_over
from asyncckpt.client.pending_saves import StagedSnapshot, WriteFuture
from asyncckpt.errors import AsyncCkptError, StagingError
from asyncckpt.format.names import SaveId
from asyncckpt.save_handle import SaveHandle
from asyncckpt.staging.deferred_copy import BackgroundCopier, DeferredCopy

SAVE_ID = SaveId(1, 2, "0123456789ab")
DEADLINE_S = 60.0


class Raising:
    """A copy, its check, and the process of a worker: each raises what it is given, or does nothing."""

    has_work = False

    def __init__(self, raised: BaseException | None = None) -> None:
        self.raised, self.future = raised, WriteFuture()

    def _do(self) -> None:
        if self.raised is not None:
            raise self.raised

    def run(self, fault_safe: bool = False) -> None:
        self._do()

    def write(self, *_: Any, **__: Any) -> Any:
        self._do()
        return self.future

    def check(self) -> None: ...

    def cancel(self) -> None: ...

    def close(self) -> None: ...

    def source_storage_ptrs(self) -> set[int]:
        return {7}


class Save:
    """One save whose copy is handed over; `trusted` says who sees to its end.

    Args:
        **raised: What `copying`, `withdrawing`, `writing` or `entrusting` raises.
    """

    def __init__(self, **raised: BaseException) -> None:
        self.handle = SaveHandle(step=1, path="/x", save_id=SAVE_ID)
        self.process, self.copier = Raising(raised.get("writing")), BackgroundCopier()
        self.trusted: list[int] = []
        self.withdrawn: list[BaseException] = []

        def take_over_rollback() -> None:
            self.trusted.append(1)
            if "entrusting" in raised:
                raise raised["entrusting"]

        def roll_back_save(error: BaseException) -> AsyncCkptError:
            self.withdrawn.append(error)
            if "withdrawing" in raised:
                raise raised["withdrawing"]
            return error if isinstance(error, AsyncCkptError) else StagingError(str(error))

        job: Any = Raising(raised.get("copying"))
        self.copy = DeferredCopy(
            job, job, seal=lambda: None, roll_back_save=roll_back_save, take_over_rollback=take_over_rollback,
            give_back_rollback=self.trusted.clear, seconds={"copy": 0.0},
        )  # fmt: skip
        slot: Any = None
        self.snapshot = StagedSnapshot(
            save_id=SAVE_ID, step=1, path="/x", slot=slot, nbytes=3, seconds={}, began=0.0, extra={},
            start_deferred=lambda staged, on_end: self.copier.submit(self.copy, staged, on_end),
        )  # fmt: skip

    def begin(self) -> None:
        hand_over(self.process, self.handle, self.snapshot, {"path": "/x", "step": 1}, {})

    def ended(self) -> list[type[BaseException]]:
        """Return what the futures hold, once they have completed."""
        found = [future.exception(DEADLINE_S) for future in self.handle.futures()]
        assert self.copier.join(DEADLINE_S) and not self.copier.busy
        return [type(error) for error in found if error is not None]


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)


def test_an_exit_in_write_ends_every_future() -> None:
    save = Save(writing=SystemExit(3))
    save.begin()
    assert save.ended() == [SystemExit] * 3


@pytest.mark.parametrize("raised", [OSError("gone"), SystemExit(3)])
def test_a_withdrawal_that_fails_ends_every_future_with_both_reasons(raised: BaseException) -> None:
    save = Save(copying=RuntimeError("torch"), withdrawing=raised)
    save.begin()
    assert save.ended() == [StagingError] * 3
    error = save.handle.written.peek()[1]
    assert "torch" in str(error) and repr(raised) in str(error)


def test_a_future_that_was_failed_meanwhile_keeps_its_error_and_the_others_follow() -> None:
    save = Save()
    save.handle.staged.set_exception(KeyboardInterrupt())
    hand_over(save.process, save.handle, {}, {"path": "/x", "step": 1}, {})
    save.process.future.durable.set_result("durable")  # type: ignore[arg-type]
    save.process.future.set_result("written")  # type: ignore[arg-type]
    assert [type(f.peek()[1]) for f in save.handle.futures()] == [KeyboardInterrupt, type(None), type(None)]
    save.handle.fail(OSError("late"))  # and nothing happens to what has completed
    assert save.handle.written.peek() == ("written", None)


def test_an_exit_by_a_callback_of_staged_leaves_the_other_futures_followed() -> None:
    save = Save()

    def leave(_: Future[Any]) -> None:
        raise SystemExit(3)

    save.handle.staged.add_done_callback(leave)
    with pytest.raises(SystemExit):
        hand_over(save.process, save.handle, {}, {"path": "/x", "step": 1}, {})
    save.process.future.durable.set_result("durable")  # type: ignore[arg-type]
    save.process.future.set_result("written")  # type: ignore[arg-type]
    assert save.handle.written.done() and save.handle.durable.done()


@pytest.mark.usefixtures("no_threads")
@pytest.mark.parametrize("raised", [KeyboardInterrupt(), SystemExit(), RuntimeError("torch")])
def test_what_a_copy_in_the_callers_thread_raises_ends_the_save_and_an_interrupt_is_raised_too(
    raised: BaseException,
) -> None:
    save = Save(copying=raised)
    is_interrupt = not isinstance(raised, Exception)
    with pytest.raises(type(raised)) if is_interrupt else contextlib.nullcontext():
        save.begin()
    assert save.ended() == [StagingError] * 3
    assert len(save.withdrawn) == 1
    assert save.trusted, "it was withdrawn already: nobody else may do so once more"


@pytest.mark.parametrize(("raised", "error"), [(KeyboardInterrupt(), KeyboardInterrupt), (MemoryError(), StagingError)])
def test_whatever_comes_while_a_copy_is_entrusted_gives_it_back(
    raised: BaseException, error: type[BaseException]
) -> None:
    save = Save(entrusting=raised)
    with pytest.raises(error):
        save.begin()
    assert not save.trusted, "the save is its caller's to take back"
    assert not save.copier.busy


def test_what_is_being_copied_is_known_until_it_has_ended() -> None:
    save = Save()
    assert save.copy.source_storage_ptrs() == {7}
    save.begin()
    save.handle.staged.result(DEADLINE_S)
    assert save.copy.source_storage_ptrs() == set()
    assert save.copier.join(DEADLINE_S)
    assert save.copier.source_storage_ptrs() == set()
    save.process.future.fail(OSError())
