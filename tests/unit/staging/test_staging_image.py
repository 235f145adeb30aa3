"""The image of the shard files in a slot: what is copied where, and by whom."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from simulated_saves import bits as bits_of

from asyncckpt.client.slot_stream import Watermark
from asyncckpt.format.layout import PAGE_NBYTES, SAVE_ID_OFFSET
from asyncckpt.format.names import SaveId
from asyncckpt.memory.mapping import Mapping
from asyncckpt.memory.slot import STAGED_OFFSET
from asyncckpt.planning.planner import PlanCache
from asyncckpt.staging import cpu_copy, memcopy
from asyncckpt.staging.cpu_copy import LARGE_NBYTES, SlotImage
from asyncckpt.staging.memcopy import PIECE_NBYTES

SAVE_ID = SaveId(3, 7, "0123456789ab")
DIRTY = 0xA5


class Staged:
    """A state in private memory that was dirty before."""

    def __init__(self, files_per_rank: int = 1) -> None:
        self.plans = PlanCache(files_per_rank=files_per_rank)
        self.memory: Mapping | None = None

    def stage(self, state: dict[str, Any]) -> list[bytes]:
        """Return the bytes of every tensor as they lie in the image."""
        self.plan, self.flat = self.plans.plan_for(state)
        if self.memory is None:
            self.memory = Mapping(-1, PAGE_NBYTES + self.plan.body_nbytes)
            self.memory.view()[:] = bytes([DIRTY]) * self.memory.nbytes
            self.image = SlotImage(self.memory.address, self.plan)
        self.image.fill(self.flat.tensors, SAVE_ID)
        ranges = self.plan.part_ranges()
        view = self.memory.view()
        starts = [(ranges[c.part].offset + c.offset_bytes, c.nbytes) for c in self.plan.layout.chunks]
        return [bytes(view[at : at + nbytes]) for at, nbytes in starts]

    def close(self) -> None:
        self.image = None  # type: ignore[assignment]
        if self.memory is not None:
            self.memory.close()


@pytest.fixture
def staged() -> Iterator[Staged]:
    one = Staged()
    yield one
    one.close()


@pytest.fixture
def helped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second thread helps with five small tensors or more."""
    monkeypatch.setattr(cpu_copy, "MIN_SHARED_TENSORS", 5)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})


SMALL = {str(n): torch.full((100,), float(n)) for n in range(7)}


def bits(state: dict[str, Any]) -> list[bytes]:
    return [bits_of(tensor) for tensor in state.values()]


def test_views_of_larger_storages_store_only_their_own_elements(staged: Staged) -> None:
    storage = torch.arange(1 << 16, dtype=torch.float32)
    state = {"row": storage.view(256, 256)[3], "column": storage.view(256, 256)[:, 5], "few": storage[10:20:2]}
    found = staged.stage(state)
    assert found == bits(state)
    assert staged.plan.tensor_nbytes == (256 + 256 + 5) * 4


def test_small_and_large_contiguous_and_strided_tensors_are_copied(staged: Staged, rng: random.Random) -> None:
    torch.manual_seed(rng.getrandbits(32))
    side = 384  # 590 kB: moved by a thread when contiguous, by torch when not
    state = {
        "small": torch.randn(7, 3),
        "large": torch.randn(side, side),
        "transposed": torch.randn(side, side).t(),
        "pieces": torch.randint(0, 255, (2 * PIECE_NBYTES + 12345,), dtype=torch.uint8),
        "scalar": torch.tensor(1.5),
        "empty": torch.zeros(0, 4),
        "every other": torch.randn(2 * LARGE_NBYTES)[::2],
    }
    for _ in range(2):
        assert staged.stage(state) == bits(state)
        for tensor in state.values():
            tensor.add_(1)  # which replaces every byte of the first


def refuse(*_: Any) -> None:
    raise RuntimeError("can't start new thread")


def test_where_no_thread_can_be_started_the_caller_copies_alone(
    staged: Staged, helped: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading.Thread, "start", refuse)
    state = {"a": torch.arange(8 << 20, dtype=torch.int32), **SMALL}
    assert staged.stage(state) == bits(state)


def test_many_small_tensors_are_shared_with_a_second_thread_whose_error_is_raised(
    staged: Staged, helped: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied_by: list[str] = []
    batch = cpu_copy._copy_batch

    def noted(targets: list[Any], sources: list[Any]) -> None:
        copied_by.append(threading.current_thread().name)
        batch(targets, sources)

    monkeypatch.setattr(cpu_copy, "_copy_batch", noted)
    assert staged.stage(SMALL) == bits(SMALL)
    assert sorted(copied_by) == ["MainThread", "asyncckpt-copy"]

    def fails(targets: list[Any], sources: list[Any]) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("mine")
        batch(targets, sources)

    monkeypatch.setattr(cpu_copy, "_copy_batch", fails)
    with pytest.raises(RuntimeError, match="mine"):
        staged.stage(SMALL)
    monkeypatch.setattr(cpu_copy, "_copy_batch", batch)
    assert staged.stage(SMALL) == bits(SMALL)


def test_a_helper_that_ctrl_c_hid_while_it_started_copies_nothing_any_more(
    staged: Staged, helped: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged.stage(SMALL)
    hidden: list[threading.Thread] = []

    def interrupted(thread: threading.Thread) -> None:
        hidden.append(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            staged.stage({name: value + 1 for name, value in SMALL.items()})
    tensors = staged.image.targets(range(7))
    before = [bits_of(tensor) for tensor in tensors]
    (late,) = hidden
    late.run()
    assert [bits_of(tensor) for tensor in tensors] == before
    assert staged.stage(SMALL) == bits(SMALL)


def test_when_torch_cannot_copy_no_thread_and_no_move_is_left(staged: Staged, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"a": torch.zeros(8 << 20), "b": torch.zeros(3), "strided": torch.arange(60_000.0).view(300, 200).t()}
    staged.stage(state)
    before = set(threading.enumerate())
    with monkeypatch.context() as patch:
        patch.setattr(cpu_copy.torch, "_foreach_copy_", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            staged.stage(state)
    assert set(threading.enumerate()) == before and not staged.image._queue
    assert staged.stage(state) == bits(state)


def test_parameters_hang_no_autograd_history_on_the_slot(staged: Staged) -> None:
    parameter = torch.nn.Parameter(torch.randn(16))
    for _ in range(3):
        assert staged.stage({"p": parameter}) == [bits_of(parameter)]
    assert all(t.grad_fn is None and not t.requires_grad for t in staged.image._targets)


def test_headers_carry_the_save_id_and_the_bytes_behind_a_file_are_zero() -> None:
    staged = Staged(files_per_rank=3)
    try:
        staged.stage({str(n): torch.full((n + 1,), n, dtype=torch.int16) for n in range(7)})
        assert staged.memory is not None and len(staged.plan.layout.parts) == 3
        view = staged.memory.view()
        for where, part in zip(staged.plan.part_ranges(), staged.plan.layout.parts, strict=True):
            mark = where.offset + SAVE_ID_OFFSET
            assert bytes(view[mark : mark + 28]) == str(SAVE_ID).encode()
            end = where.offset + part.nbytes
            assert not any(view[end : where.offset + part.padded_nbytes])
    finally:
        staged.close()


def test_dtypes_that_torch_copies_badly_keep_their_bits(staged: Staged) -> None:
    names = ("float8_e8m0fnu", "float4_e2m1fn_x2", "float8_e4m3fnuz", "float8_e5m2fnuz", "complex32")
    dtypes = [getattr(torch, name) for name in names if hasattr(torch, name)]
    raw = torch.arange(256, dtype=torch.uint8)
    state = {str(d): raw.view(d) for d in dtypes}
    assert staged.stage(state) == [bits_of(raw)] * len(dtypes)


def test_an_interrupt_is_raised_only_when_nothing_moves_any_more(
    staged: Staged, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_copy.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    state = {"a": torch.zeros(16 << 20, dtype=torch.int32)}
    staged.stage(state)
    join, interrupts = threading.Thread.join, []

    def interrupted_join(self: threading.Thread, timeout: float | None = None) -> None:
        if len(interrupts) < 3:
            interrupts.append(self)
            raise KeyboardInterrupt
        join(self, timeout)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", interrupted_join)
        with pytest.raises(KeyboardInterrupt):
            staged.stage(state)
    assert len(interrupts) == 3
    assert not [t for t in threading.enumerate() if t.name == "asyncckpt-copy"]


def test_a_copy_whose_watermark_cannot_be_told_leaves_no_move_for_the_next_one(staged: Staged) -> None:
    image, tensors = prepared(staged, {"a": torch.arange(100_000.0), "small": torch.arange(5)})

    def tell(nbytes: int) -> None:
        raise OSError(errno.EIO, "nobody is told")

    with pytest.raises(OSError, match="nobody is told"):
        image.copy(tensors, image._all, True, Watermark(0, 1 << 62, tell))
    assert not image._queue and image._queue.on_copied is None
    image.copy(tensors, image._all)
    assert torch.equal(image._targets[0], tensors[image._numbers[0]])


# ---- how hard a copy works


def test_one_thread_copies_alone_where_no_more_are_allowed(staged: Staged, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    state = {"a": torch.randn(12 << 20)}
    image, tensors = prepared(staged, state)
    started: list[str] = []
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda self: (started.append(self.name), start(self)))
    monkeypatch.setattr(cpu_copy, "MAX_THREADS", 1)
    image.copy(tensors, image._all)
    assert not started
    monkeypatch.setattr(cpu_copy, "MAX_THREADS", 3)
    image.copy(tensors, image._all)
    assert started == ["asyncckpt-copy"] * 2
    assert torch.equal(image._targets[0], state["a"])


def prepared(staged: Staged, state: dict[str, Any]) -> tuple[SlotImage, list[Any]]:
    """Return an image of `state`, with nothing of it copied yet, and the tensors by number."""
    staged.stage(state)
    for target in staged.image._targets:
        target.zero_()
    return staged.image, list(staged.flat.tensors)


# ---- how far a copy has come


def test_a_copy_says_how_far_it_is_after_every_few_pieces(staged: Staged, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"a": torch.randn(1 << 20), "b": torch.randn(1 << 18), "small": torch.arange(5)}
    image, tensors = prepared(staged, state)
    assert staged.memory is not None
    word = ctypes.c_uint64.from_address(staged.memory.address + STAGED_OFFSET)
    word.value = 7  # what was copied before `save()` returned, say
    seen: list[int] = []

    def one_after_the_other(queue: memcopy.CopyQueue, fault_safe: bool) -> None:
        while queue:
            target, source, nbytes = queue.popleft()
            ctypes.memmove(target, source, nbytes)
            seen.append(word.value - 7)

    monkeypatch.setattr(cpu_copy, "copy_all", one_after_the_other)
    monkeypatch.setattr(cpu_copy, "MARK_NBYTES", 2 << 20)
    monkeypatch.setattr(cpu_copy, "MAX_THREADS", 1)
    monkeypatch.setattr(cpu_copy, "PIECE_NBYTES", 1 << 20)
    image.copy(tensors, image._all)
    assert sorted(set(seen)) == [0, 2 << 20, 4 << 20] and seen == sorted(seen)
    assert word.value - 7 == 5 << 20
    for n, tensor in enumerate(tensors):
        assert torch.equal(image._targets[image._numbers.index(n)], tensor)


# ---- memory that goes away under a copy


def test_a_careful_copy_reports_memory_that_has_gone_and_the_next_one_works(staged: Staged) -> None:
    state = {"a": torch.randn(12 << 20), "small": torch.arange(5)}
    image, tensors = prepared(staged, state)
    number = image._numbers.index(next(n for n, t in enumerate(tensors) if t.numel() > 5))
    with pytest.raises(OSError, match="Bad address") as caught:
        image.copy([Gone(t) if t.numel() > 5 else t for t in tensors], image._all, fault_safe=True)
    assert caught.value.errno == errno.EFAULT
    assert not image._queue and not [t for t in threading.enumerate() if t.name == "asyncckpt-copy"]
    image.copy(tensors, image._all, fault_safe=True)
    assert torch.equal(image._targets[number], state["a"])


class Gone:
    """A tensor whose second half is not mapped any more."""

    def __init__(self, tensor: Any) -> None:
        self.device, half = tensor.device, tensor.numel() * tensor.element_size() // 2
        self._mapping = Mapping(-1, 2 * half)
        libc = ctypes.CDLL(None)
        libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        assert libc.mprotect(self._mapping.address + half, half, 0) == 0

    def is_contiguous(self) -> bool:
        return True

    def data_ptr(self) -> int:
        return self._mapping.address


@pytest.mark.parametrize("refusal", [errno.ENOSYS, errno.EPERM, errno.EFAULT])
def test_where_the_kernel_refuses_a_careful_copy_it_is_made_all_the_same(
    monkeypatch: pytest.MonkeyPatch, refusal: int
) -> None:
    """In a sandbox; and EFAULT for memory that a driver has mapped, such as tensors that torch has pinned."""

    def refused(*_: Any) -> int:
        ctypes.set_errno(refusal)
        return -1

    source, target = torch.arange(400_000), torch.zeros(400_000, dtype=torch.int64)
    with open("/proc/self/maps") as maps:  # the kernel's clock is mapped like a driver's memory everywhere
        for clock in (int(line.partition("-")[0], 16) for line in maps if line.endswith("[vvar]\n")):
            memcopy.fault_safe_copy(target.data_ptr(), clock, 4096)
    monkeypatch.setattr(memcopy, "_read", refused)
    memcopy.fault_safe_copy(target.data_ptr(), source.data_ptr(), 3_200_000)
    assert torch.equal(target, source)


def test_a_careful_copy_that_comes_in_parts_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    read, asked = memcopy._read, []

    def in_parts(pid: int, here: Any, n: int, there: Any, *rest: int) -> int:
        for one in (here, there):
            one._obj.nbytes = min(one._obj.nbytes, 300_000)
        asked.append(there._obj.nbytes)
        return int(read(pid, here, n, there, *rest))

    source, target = torch.arange(100_000), torch.zeros(100_000, dtype=torch.int64)
    monkeypatch.setattr(memcopy, "_read", in_parts)
    memcopy.fault_safe_copy(target.data_ptr(), source.data_ptr(), 800_000)
    assert torch.equal(target, source) and asked == [300_000, 300_000, 200_000]


def test_pieces_are_gathered_and_read_one_by_one_where_the_kernel_does_not_take_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, read = torch.arange(100_000), memcopy._read
    places = [5, 70_000, 20, 6, 99_992]
    addresses = [source.data_ptr() + 8 * at for at in places]
    expected = torch.cat([source[at : at + 8] for at in places])

    def refused(*_: Any) -> int:
        ctypes.set_errno(errno.EPERM)
        return -1

    def half(pid: int, here: Any, n: int, there: Any, n_ranges: int, flags: int) -> int:
        return int(read(pid, here, n, there, max(1, n_ranges // 2), flags))

    for answer in (read, refused, half):
        monkeypatch.setattr(memcopy, "_read", answer)
        target = torch.zeros(40, dtype=torch.int64)
        memcopy.fault_safe_gather(target.data_ptr(), addresses, 64)
        assert torch.equal(target, expected)


def test_pieces_of_memory_that_has_gone_are_an_error() -> None:
    source, target = torch.arange(1000), torch.zeros(24, dtype=torch.int64)
    gone = Gone(torch.zeros(8192, dtype=torch.uint8))
    with pytest.raises(OSError, match="Bad address"):
        memcopy.fault_safe_gather(target.data_ptr(), [source.data_ptr(), gone.data_ptr() + 4096, source.data_ptr()], 64)
