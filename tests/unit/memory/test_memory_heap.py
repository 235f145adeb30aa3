"""What is freed is given back to the kernel, where the C library lets that be asked for."""

from __future__ import annotations

import gc

import pytest

from asyncckpt.memory import heap


class Library:
    """A C library that notes what it is asked for; `names`: what it has."""

    def __init__(self, *names: str) -> None:
        self.asked: list[tuple[object, ...]] = []
        for name in names:
            setattr(self, name, lambda *given, name=name: self.asked.append((name, *given)))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library("malloc_trim", "mallopt")
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda name: found)
    return found


def test_what_is_freed_is_given_back(library: Library) -> None:
    heap.trim_heap()
    assert library.asked == [("malloc_trim", 0)]


def test_python_gives_its_own_back_first_where_that_is_wanted(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heap.gc, "collect", lambda: library.asked.append(("collect",)))
    heap.trim_heap(collect=True)
    assert library.asked == [("collect",), ("malloc_trim", 0)]


def test_large_pieces_are_not_kept(library: Library) -> None:
    heap.return_large_blocks()
    assert library.asked == [("mallopt", -3, heap.LARGE_NBYTES)]


def test_a_c_library_that_has_neither_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda name: Library())
    heap.trim_heap()
    heap.return_large_blocks()


def test_the_library_of_this_machine_takes_the_calls() -> None:
    heap.trim_heap(collect=True)
    assert gc.isenabled()
