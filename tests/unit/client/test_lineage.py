"""Which epoch a run gets: looked up once per run and directory, and briefly where that has just failed."""

from __future__ import annotations

import pytest

from asyncckpt.basics import seen_saves
from asyncckpt.basics.seen_saves import MAX_SEEN, all_seen, newest_seen, note_seen
from asyncckpt.client.epochs import EpochCache
from asyncckpt.format.names import SaveId

RUN, OTHER_RUN = "0123456789ab", "ffffffffffff"


@pytest.fixture(autouse=True)
def nothing_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seen_saves, "_seen", type(seen_saves._seen)())


class Directory:
    """Answers as the worker would, and remembers what it was asked."""

    def __init__(self, **epochs: int) -> None:
        self.epochs = epochs
        self.asked: list[tuple[str, str, bool]] = []
        self.error: Exception | None = None

    def ask(self, path: str, run: str, least: int, brief: bool) -> int:
        self.asked.append((path, run, brief))
        if self.error is not None:
            raise self.error
        return max(least, self.epochs[path.split("/")[1]])


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


def test_what_was_found_beside_a_mirror_counts_with_the_first_save_that_has_one_there() -> None:
    directory = Directory(a=1)
    epochs = EpochCache(directory.ask)
    note_seen(["/m"], [SaveId(3, 0, OTHER_RUN)])
    note_seen(["/n"], [SaveId(2, 0, OTHER_RUN)])
    mirrors = ["", "/m/2", "", "/m/4", "/n/5"]
    assert [epochs.epoch_for(f"/a/{n}", RUN, mirror) for n, mirror in enumerate(mirrors)] == [1, 4, 4, 4, 4]
    assert [path for path, _, _ in directory.asked] == ["/a/0", "/a/1"], "that of /n is large enough"
    first = EpochCache(directory.ask)
    assert [first.epoch_for("/a/6", RUN, mirror) for mirror in ("/n/6", "")] == [3, 3] and len(directory.asked) == 3


@pytest.mark.parametrize("where", ["/a", "/m"])
def test_a_run_is_newer_than_what_the_process_has_looked_at_to_restore_from(where: str) -> None:
    note_seen([where], [SaveId(5, 3, OTHER_RUN), SaveId(4, 9, OTHER_RUN)])
    assert EpochCache(Directory(a=1, m=1).ask).epoch_for("/a/x", RUN, "/m/x") == 6
    assert EpochCache(Directory(a=1, m=1).ask).epoch_for("/a/x", OTHER_RUN, "/m/x") == 5, "its own checkpoint"
    assert EpochCache(Directory(b=1).ask).epoch_for("/b/x", RUN) == 1, "another training"


def test_a_run_that_looks_at_a_newer_one_stays_the_older_one() -> None:
    epochs = EpochCache(Directory(a=1).ask)
    assert epochs.epoch_for("/a/0", RUN) == 1
    note_seen(["/a"], [SaveId(3, 0, OTHER_RUN)])
    assert epochs.epoch_for("/a/1", RUN) == 1


def test_ranks_that_disagreed_ask_again() -> None:
    directory = Directory(a=1)
    epochs = EpochCache(directory.ask)
    assert epochs.epoch_for("/a/0", RUN) == 1
    directory.epochs["a"] = 4  # another rank has seen a later run beside a mirror
    epochs.forget()
    assert epochs.epoch_for("/a/1", RUN) == 4


def test_what_was_seen_is_bounded() -> None:
    for number in range(MAX_SEEN + 1):
        note_seen([f"/{number}"], [SaveId(1, 0, RUN)])
    note_seen(["/2"], [])
    assert len(all_seen()) == MAX_SEEN and newest_seen("/0") == "" and newest_seen("/0", "/1") == SaveId(1, 0, RUN)
