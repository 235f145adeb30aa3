"""Every reader of bytes that somebody else made, under a mutator and under hypothesis: refusals of ours, within bounds.

`make fuzz` runs the same targets for as long as one likes.
"""

from __future__ import annotations

import os
import random
import resource
import time
from collections.abc import Callable, Iterator

import pytest
from mutations import altered, packed

from tests.fuzz.mutator import mutated
from tests.fuzz.targets import CORPUS, TARGETS, corpus_of

N_MUTATIONS = int(os.environ.get("ASYNCCKPT_TEST_MUTATIONS", "400"))
ROOM_NBYTES = 512 << 20
"""Beside what the process has: a document of a megabyte at most must not make a reader take more."""

MAX_SECONDS = 2.0
"""Of processor time, for one document. Chosen; the slowest took 0.1 s."""


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    for name in TARGETS:  # what makes them maps far more than is left below
        corpus_of(name)
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + ROOM_NBYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def _tried(name: str, data: bytes) -> None:
    started = time.process_time()
    try:
        TARGETS[name].read(data)
    except BaseException as error:
        raise AssertionError(f"{type(error).__name__} left {name}: {error}; its input: {data[:2000]!r}") from error
    assert time.process_time() - started < MAX_SECONDS, f"{name} took too long; its input: {data[:2000]!r}"


@pytest.mark.parametrize("name", TARGETS)
def test_mutated_documents_raise_only_errors_of_ours_in_bounded_time_and_memory(
    name: str, rng: random.Random, record_property: Callable[[str, object], None]
) -> None:
    record_property("count", N_MUTATIONS)
    seeds = corpus_of(name)
    assert seeds and all(seeds)
    for seed in seeds:
        _tried(name, seed)
    for _ in range(N_MUTATIONS):
        _tried(name, mutated(seeds, rng))


@pytest.mark.parametrize("name", TARGETS)
def test_arbitrary_bytes_and_documents_raise_only_errors_of_ours(name: str, rng: random.Random) -> None:
    hypothesis = pytest.importorskip("hypothesis")
    st = pytest.importorskip("hypothesis.strategies")
    leaves = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary()
    values = st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)
    seeds = corpus_of(name)
    prefixes = st.sampled_from(seeds).flatmap(lambda s: st.integers(0, len(s)).map(lambda n: s[:n]))

    @hypothesis.given(st.binary(max_size=200) | values.map(packed) | st.tuples(prefixes, st.binary()).map(b"".join))
    @hypothesis.settings(max_examples=40)
    def holds(data: bytes) -> None:
        _tried(name, data)

    hypothesis.seed(rng.getrandbits(32))(holds)()


@pytest.mark.parametrize("name", ["index", "structure", "message", "reply", "node-tables", "request", "samples"])
def test_altered_values_inside_sound_documents_raise_only_errors_of_ours(
    name: str, rng: random.Random, record_property: Callable[[str, object], None]
) -> None:
    record_property("count", N_MUTATIONS // 3)
    import msgpack

    documents = [msgpack.unpackb(seed, strict_map_key=False) for seed in TARGETS[name].seeds()]
    for _ in range(N_MUTATIONS // 3):
        _tried(name, packed(altered(rng.choice(documents), rng)))


def test_what_is_kept_in_the_corpus_belongs_to_a_target_and_is_small() -> None:
    assert {p.name for p in CORPUS.iterdir() if p.is_dir()} <= set(TARGETS)
    assert sum(p.stat().st_size for p in CORPUS.rglob("*") if p.is_file()) < 256 << 10
