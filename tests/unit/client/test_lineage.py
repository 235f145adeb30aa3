"""Which epoch a run gets: looked up once per run and directory, and briefly where that has just failed."""

from __future__ import annotations

import pytest

from asyncckpt.client.worker_client import EpochCache

RUN = "0123456789ab"


class Directory:
    """Answers as the worker would, and remembers what it was asked."""

    def __init__(self, **epochs: int) -> None:
        self.epochs = epochs
        self.asked: list[tuple[str, str, bool]] = []
        self.error: Exception | None = None

    def ask(self, path: str, mirror: str, run: str, brief: bool) -> int:
        assert mirror == ""
        self.asked.append((path, run, brief))
        if self.error is not None:
            raise self.error
        return self.epochs[path.split("/")[1]]


def test_a_directory_is_looked_at_once() -> None:
    directory = Directory(a=3)
    epochs = EpochCache(directory.ask)
    assert [epochs.epoch_for(f"/a/{n}", RUN) for n in range(3)] == [3, 3, 3]
    assert directory.asked == [("/a/0", RUN, False)]


def test_the_epoch_depends_on_the_directory_alone() -> None:
    epochs = EpochCache(Directory(a=3, b=7, c=1).ask)
    assert [epochs.epoch_for(f"/{name}/x", RUN) for name in "abca"] == [3, 7, 1, 3]
    assert EpochCache(Directory(a=3, b=7).ask).epoch_for("/a/y", RUN) == 3, "a rank that has not saved to b"


def test_another_run_asks_anew() -> None:
    directory = Directory(a=3)
    epochs = EpochCache(directory.ask)
    assert epochs.epoch_for("/a/0", RUN) == 3
    directory.epochs["a"] = 4
    assert epochs.epoch_for("/a/1", "another") == 4, "rank 0 has made a new checkpointer"
    assert epochs.epoch_for("/a/2", RUN) == 3
    assert directory.asked == [("/a/0", RUN, False), ("/a/1", "another", False)]


def test_after_a_failure_it_is_asked_for_briefly() -> None:
    directory = Directory(a=3)
    epochs = EpochCache(directory.ask)
    directory.error = OSError("wedged")
    for _ in range(2):
        with pytest.raises(OSError, match="wedged"):
            epochs.epoch_for("/a/x", RUN)
    directory.error = None
    assert epochs.epoch_for("/a/x", RUN) == 3
    assert [brief for _, _, brief in directory.asked] == [False, True, True]
