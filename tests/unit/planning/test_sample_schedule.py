"""Which replicas are compared when, and digests of tensors wherever and however they lie."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import msgpack  # noqa: E402
import states  # noqa: E402

from asyncckpt.format.checksums import block_digest  # noqa: E402
from asyncckpt.planning import replica_checks  # noqa: E402
from asyncckpt.planning.contributions import TensorKey  # noqa: E402
from asyncckpt.planning.replica_checks import Samples, replica_digests, tensor_digest  # noqa: E402
from asyncckpt.planning.sample_schedule import WINDOW_NBYTES, SampleSchedule, assign_schedules, window_of  # noqa: E402
from asyncckpt.state_dict.flatten import flatten  # noqa: E402


def keys(prefix: str, n: int) -> list[TensorKey]:
    return [(f"{prefix}{i:04d}", "float32", (8,)) for i in range(n)]


def test_few_replicas_are_compared_at_every_save() -> None:
    turns = assign_schedules(dict.fromkeys(keys("a", 12), frozenset({0, 1})), 12)
    assert {turn.period for turn in turns.values()} == {1}


def test_many_replicas_take_turns_and_none_is_forgotten() -> None:
    held = {
        **dict.fromkeys(keys("all", 100), frozenset(range(4))),
        **dict.fromkeys(keys("left", 250), frozenset({0, 1})),
        **dict.fromkeys(keys("right", 30), frozenset({2, 3})),
    }
    turns = assign_schedules(held, 50)
    for rank in range(4):
        for sequence in range(20):
            now = [k for k, ranks in held.items() if rank in ranks and window_of(turns[k], 8, 4, sequence)]
            assert len(now) <= 50 + 2
    seen = {k for sequence in range(7) for k in held if window_of(turns[k], 8, 4, sequence)}
    assert seen == set(held)


@pytest.mark.parametrize("n_windows", [1, 2, 3, 7, 64, 100])
@pytest.mark.parametrize("itemsize", [1, 2, 16])
def test_every_window_is_visited_before_one_comes_again(n_windows: int, itemsize: int) -> None:
    per_window = WINDOW_NBYTES // itemsize
    n_elements = n_windows * per_window - (per_window // 2)
    found = [window_of(SampleSchedule(1, 3), n_elements, itemsize, 3 * n + 1) for n in range(n_windows)]
    assert sum(w.n for w in found if w) == n_elements
    assert len({w.start for w in found if w}) == n_windows
    assert window_of(SampleSchedule(1, 3), n_elements, itemsize, 3) is None


def test_nothing_is_compared_of_an_empty_tensor() -> None:
    assert window_of(SampleSchedule(0, 1), 0, 4, 0) is None


@pytest.mark.parametrize("name", sorted(states.every_tensor()))
def test_a_digest_is_that_of_the_elements_in_row_major_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_checks, "TEMPORARY_NBYTES", 100)
    tensor = flatten({"x": states.every_tensor()[name]}).tensors[0]  # it resolves conjugates
    assert tensor_digest(tensor) == block_digest(states.bits_of(tensor))


def test_digests_come_in_the_order_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_checks, "THREADED_NBYTES", 0)
    monkeypatch.setattr(replica_checks.os, "sched_getaffinity", lambda _: {0, 1, 2})
    state = {f"t{n}": torch.full((5,), n + 2.0) for n in range(9)}
    found = replica_digests(flatten(state), [7, 0, 3])
    assert found == b"".join(block_digest(states.bits_of(state[f"t{n}"])) for n in (7, 0, 3))


def test_samples_travel_as_the_request_has_them() -> None:
    assert Samples([], b"", b"").encode() == b""
    found = msgpack.unpackb(Samples(["a", "b"], b"\0\1", b"1" * 16).encode())
    assert found == {"names": ["a", "b"], "split": b"\0\1", "digests": b"1" * 16}
