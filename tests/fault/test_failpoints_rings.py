"""A worker's death, an error, a long wait at every named instant of going on with a dead worker's ring (docs/adr/0044).

Promises P1, P3 and P4: what it has left is in the end as the trainer has staged it, or no file of it is left.
"""

from __future__ import annotations

import errno
import pathlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from ring_trainer import Trainer, contents
from storage_samples import RecordingFiles, Snapshot

from asyncckpt.failpoints import observed
from tests.failing_process import At, fail
from tests.failpoint_groups import RINGS, cases

pytestmark = pytest.mark.fault

LENGTHS = {f"t{n}": 300_000 + n for n in range(8)}
CODES = [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE]


class KilledError(BaseException):
    """The worker's process is gone."""


class Mortal(RecordingFiles):
    """Files of a process that does nothing any more once it is dead; `feed`: whom it tells nothing more then."""

    def __init__(self, feed: Trainer) -> None:
        super().__init__()
        self.dead = False
        wrote, freed = Trainer.wrote, Trainer.freed

        def tell(call: Callable[..., None], *arguments: Any) -> None:
            if self.dead:
                raise KilledError
            call(feed, *arguments)

        feed.wrote = lambda *arguments: tell(wrote, *arguments)  # type: ignore[method-assign]
        feed.freed = lambda *arguments: tell(freed, *arguments)  # type: ignore[method-assign]

    def before(self, name: str, args: Sequence[Any]) -> None:
        if self.dead and name != "close":  # the kernel closes what a dead one had open
            raise KilledError

    def die(self) -> None:
        self.dead = True
        raise KilledError


class Case:
    """A ring of which one worker has written four segments, and died."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path, whole = path / "ring", path / "whole"
        self.path.mkdir(parents=True)
        whole.mkdir()
        self.snapshot = Snapshot(LENGTHS, n_parts=3)
        self.snapshot.write(str(whole))
        self.wanted = contents(whole)
        self.trainer = Trainer(self.snapshot, 1, 3)
        files = Mortal(self.trainer)
        with pytest.raises(KilledError), observed(At("ring: segments freed", lambda: None)):
            self._until(4, files)
        self.live()

    def _until(self, count: int, files: Mortal) -> None:
        freed = self.trainer.freed

        def noted(number: int) -> None:
            freed(number)
            if number >= count:
                files.die()

        self.trainer.freed = noted  # type: ignore[method-assign]
        self.trainer.write(self.path, files, threads=1)

    def live(self) -> None:
        """From now on the trainer hears what it is told."""
        del self.trainer.wrote, self.trainer.freed

    def goes_on(self, files: RecordingFiles | None = None) -> None:
        self.trainer.take_over(self.path, files, threads=1)

    def assert_whole(self) -> None:
        assert contents(self.path) == self.wanted

    def close(self) -> None:
        self.trainer.close()
        self.snapshot.memory.close()


@pytest.fixture
def make(tmp_path: pathlib.Path) -> Iterator[Callable[[], Case]]:
    made: list[Case] = []

    def case() -> Case:
        made.append(Case(tmp_path / str(len(made))))
        return made[-1]

    yield case
    for one in made:
        one.close()


def trace_of(case: Case) -> list[tuple[str, int]]:
    observer = At("ring: taking over", lambda: None)
    with observed(observer):
        case.goes_on()
    case.assert_whole()
    assert {point for _, point in cases(RINGS)} <= set(observer.trace)
    return [(point, observer.trace[: n + 1].count(point)) for n, point in enumerate(observer.trace)]


def test_a_worker_that_dies_while_it_goes_on_is_followed_by_one_that_ends_it(make: Callable[[], Case]) -> None:
    for point, visit in trace_of(make()):
        case = make()
        files = Mortal(case.trainer)
        with pytest.raises(KilledError), observed(At(point, files.die, visit)):
            case.goes_on(files)
        case.live()
        case.goes_on()
        case.assert_whole()


def test_an_error_while_one_goes_on_is_raised_and_leaves_no_file(make: Callable[[], Case], rng: random.Random) -> None:
    for point, visit in trace_of(make()):
        case, code = make(), rng.choice(CODES)
        observer = At(point, lambda code=code: fail(code), visit)  # type: ignore[misc]
        with observed(observer), pytest.raises(OSError) as caught:
            case.goes_on()
        assert observer.met and caught.value.errno == code, point
        assert not case.path.exists() or list(case.path.iterdir()) == [], point


def test_a_long_wait_while_one_goes_on_changes_nothing(make: Callable[[], Case]) -> None:
    """Until it ends there is no index, which would say that the files are whole."""
    for point, visit in trace_of(make()):
        if not point.startswith("ring: "):
            continue
        case, seen = make(), list[str]()
        look = At(point, lambda case=case, seen=seen: seen.extend(contents(case.path)), visit)  # type: ignore[misc]
        with observed(look):
            case.goes_on()
        assert look.met and not any(name.endswith(".index") for name in seen), point
        case.assert_whole()
