"""Slots as memfds, and mappings: who may map what, and that nothing stays behind."""

from __future__ import annotations

import fcntl
import mmap
import os
import pathlib
from collections.abc import Iterator

import pytest

from asyncckpt.memory import arena
from asyncckpt.memory.arena import SlotMemory
from asyncckpt.memory.mapping import Mapping
from asyncckpt.memory.slot import MAX_SLOT_NBYTES, PAGE_NBYTES, SlotError

NBYTES = 8 * PAGE_NBYTES


@pytest.fixture
def slot() -> Iterator[SlotMemory]:
    """A new slot."""
    made = SlotMemory.create(NBYTES)
    yield made
    made.close()


def _attach(slot: SlotMemory, **changes: int | bytes) -> SlotMemory:
    facts = {"pid": os.getpid(), "fd_number": slot.fd, "nbytes": slot.nbytes, "token": slot.token, **changes}
    return SlotMemory.attach(**facts)  # type: ignore[arg-type]


def test_two_owners_see_the_same_bytes(slot: SlotMemory) -> None:
    other = _attach(slot)
    try:
        other.mapping.view()[PAGE_NBYTES : PAGE_NBYTES + 5] = b"hello"
        other.control.open(1)
        other.control.seal(b"request", 2 * PAGE_NBYTES)
        assert bytes(slot.mapping.view()[PAGE_NBYTES : PAGE_NBYTES + 5]) == b"hello"
        assert slot.control.read_request() == (1, b"request")
    finally:
        other.close()


def test_reader_sees_the_bytes_and_cannot_change_them(slot: SlotMemory) -> None:
    slot.mapping.view()[PAGE_NBYTES] = 7
    reader = _attach(slot, writable=False)
    try:
        assert reader.mapping.view()[PAGE_NBYTES] == 7
        (mapped,) = [line for line in _maps() if line.startswith(f"{reader.mapping.address:x}-")]
        assert mapped.split()[1] == "r--s"
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(reader.fd, b"x", PAGE_NBYTES)
    finally:
        reader.close()


def _maps() -> list[str]:
    return pathlib.Path("/proc/self/maps").read_text().splitlines()


def test_memory_outlives_the_one_who_made_it() -> None:
    made = SlotMemory.create(NBYTES)
    made.mapping.view()[PAGE_NBYTES] = 7
    other = _attach(made)
    made.close()
    assert other.mapping.view()[PAGE_NBYTES] == 7
    other.close()


def test_slot_cannot_be_resized(slot: SlotMemory) -> None:
    for nbytes in (PAGE_NBYTES, 2 * NBYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(slot.fd, nbytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(slot.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_slot_is_not_inherited_by_programs(slot: SlotMemory) -> None:
    assert not os.get_inheritable(slot.fd)


@pytest.mark.parametrize("nbytes", [0, PAGE_NBYTES, NBYTES + 1, MAX_SLOT_NBYTES + PAGE_NBYTES, -PAGE_NBYTES])
def test_size_that_cannot_be_a_slots_is_refused(nbytes: int, slot: SlotMemory) -> None:
    with pytest.raises(SlotError, match="bytes"):
        SlotMemory.create(nbytes)
    with pytest.raises(SlotError, match="bytes"):
        _attach(slot, nbytes=nbytes)


def test_slot_of_another_size_or_token_is_refused(slot: SlotMemory) -> None:
    with pytest.raises(SlotError, match="expected"):
        _attach(slot, nbytes=NBYTES + PAGE_NBYTES)
    with pytest.raises(SlotError, match="token"):
        _attach(slot, token=bytes(16))


def test_fd_that_is_no_slot_is_refused(tmp_path: pathlib.Path, slot: SlotMemory) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(NBYTES))
    unsealed = os.memfd_create("asyncckpt-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, NBYTES)
    with open(path, "rb+") as file:
        for fd in (file.fileno(), unsealed):
            with pytest.raises(SlotError, match="sealed"):
                _attach(slot, fd_number=fd)
    os.close(unsealed)


def test_fd_or_process_that_is_not_there_is_an_os_error(slot: SlotMemory) -> None:
    with pytest.raises(FileNotFoundError):
        _attach(slot, fd_number=999_999)
    with pytest.raises(FileNotFoundError):
        _attach(slot, pid=(1 << 22) + 1)


def test_creation_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "no memory")

    monkeypatch.setattr(arena, "Mapping", refuse)
    with pytest.raises(OSError, match="no memory"):
        SlotMemory.create(NBYTES)


def test_slot_may_be_closed_twice(slot: SlotMemory) -> None:
    slot.close()
    slot.close()
    assert slot.fd == -1
    with pytest.raises(ValueError, match="closed"):
        slot.mapping.view()


def test_forked_child_has_no_pages_and_closes_nothing_of_its_parents(slot: SlotMemory) -> None:
    slot.mapping.view()[PAGE_NBYTES] = 9
    pid = os.fork()
    if pid == 0:  # pragma: no cover
        slot.close_inherited_fd()
        slot.close()
        mapped = any(
            "memfd:asyncckpt-slot" in line for line in pathlib.Path("/proc/self/maps").read_text().splitlines()
        )
        os._exit(1 if mapped or slot.fd != -1 else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert slot.mapping.view()[PAGE_NBYTES] == 9


def test_private_mapping_is_zeroed_and_closes_once() -> None:
    with Mapping(-1, mmap.PAGESIZE) as mapping:
        mapping.populate(0, mmap.PAGESIZE)
        assert bytes(mapping.view()) == bytes(mmap.PAGESIZE)
        assert not mapping.closed
    mapping.close()
    assert mapping.closed
    mapping.populate(0, mmap.PAGESIZE)


def test_mapping_that_the_kernel_refuses_is_an_os_error(slot: SlotMemory) -> None:
    with pytest.raises(OSError, match="mmap"):
        Mapping(-1, 0)
    with pytest.raises(OSError, match="mmap"):
        Mapping(-1, 1 << 60)


def test_populated_pages_are_resident(slot: SlotMemory) -> None:
    slot.mapping.populate(PAGE_NBYTES, 1 << 40)
    assert os.fstat(slot.fd).st_blocks * 512 >= NBYTES - PAGE_NBYTES


def test_memory_that_cannot_be_mapped_leaves_no_addresses_taken() -> None:
    none = os.open("/dev", os.O_RDONLY)
    try:
        before = len(_maps())
        with pytest.raises(OSError, match="mmap of"):
            Mapping(none, 4 << 20)
        assert len(_maps()) <= before
    finally:
        os.close(none)
