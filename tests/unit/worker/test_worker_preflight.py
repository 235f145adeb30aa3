"""What is looked at before memory is lent or a save begins, on made-up cgroup trees and file systems."""

from __future__ import annotations

import errno
import os
import pathlib

import pytest

from asyncckpt.errors import ConfigError, InsufficientMemoryError, SaveFailedError
from asyncckpt.memory import headroom
from asyncckpt.storage.files import Files
from asyncckpt_worker.config import WorkerConfig
from asyncckpt_worker.io import writer


def tree(root: pathlib.Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


V1 = {
    "memory/job/memory.limit_in_bytes": "4096\n",
    "memory/job/memory.usage_in_bytes": "1000\n",
    "memory/job/memory.stat": "inactive_file 1\ntotal_inactive_file 96\n",
    "memory/memory.limit_in_bytes": "9223372036854771712\n",
    "memory/memory.usage_in_bytes": "1\n",
    "memory/memory.stat": "total_inactive_file 0\n",
}
V2 = {"job/memory.max": "1000\n", "job/memory.current": "700\n", "job/memory.stat": "anon 1\ninactive_file 200\n"}
INNER = {
    f"job/step/memory.{name}": text
    for name, text in (("max", "max\n"), ("current", "5\n"), ("stat", "inactive_file 0\n"))
}


@pytest.mark.parametrize(
    ("files", "membership", "limit"),
    [
        pytest.param(V2, "0::/job\n", (1000, 500), id="reclaimable cache counts as free"),
        pytest.param({**V2, **INNER}, "0::/job/step\n", (1000, 500), id="a parent that is tighter counts"),
        pytest.param(V1, "4:cpu,memory:/job\n0::/\n", (4096, 904), id="version 1"),
        *(pytest.param({}, text, (None, 0), id=f"none: {text!r}") for text in ("", "0::/nowhere\n", "garbage\n")),
    ],
)
def test_limit_of_the_cgroup_is_found(
    tmp_path: pathlib.Path, files: dict[str, str], membership: str, limit: tuple[int | None, int]
) -> None:
    root = tree(tmp_path / "root", {**files, "../membership": membership})
    assert headroom.cgroup_limit(root, str(tmp_path / "membership")) == limit


def test_slot_beyond_the_cgroup_is_refused_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headroom, "cgroup_limit", lambda root: (1 << 30, (1 << 30) - headroom.RESERVE_NBYTES - 4096))
    headroom.check_memory(4096, 0)
    with pytest.raises(InsufficientMemoryError) as caught:
        headroom.check_memory(4097, 0)
    assert (caught.value.nbytes, caught.value.available, caught.value.limit) == (4097, 4096, 1 << 30)  # type: ignore[attr-defined]


def test_promised_memory_that_has_no_pages_yet_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = headroom.RESERVE_NBYTES + (1 << 20)
    monkeypatch.setattr(headroom, "cgroup_limit", lambda root: (limit, 0))
    with pytest.raises(InsufficientMemoryError):
        headroom.check_memory(4096, 1 << 20)
    headroom.check_memory(4096, 0)


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        *(("root", True), ("root/a/b", True), ("rootless", False), ("root/../x", False), ("link/a", False)),
        *(("root/link/a", False), ("root/link", False), ("x", False)),
    ],
)
def test_paths_must_lie_below_a_root_links_followed(tmp_path: pathlib.Path, path: str, allowed: bool) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to("/")
    (tmp_path / "link").symlink_to("/tmp")
    where = str(tmp_path / path)
    if allowed:
        writer.check_root(where, [str(tmp_path / "root")])
    else:
        with pytest.raises(SaveFailedError, match="--root") as caught:
            writer.check_root(where, [str(tmp_path / "root")])
        assert caught.value.code == "EPERM"  # type: ignore[attr-defined]
    writer.check_root(where, [])


class Disk(Files):
    """A file system with given free room."""

    def __init__(self, blocks: int, inodes: int, all_inodes: int = 100) -> None:
        self._found = os.statvfs_result((4096, 4096, 1000, blocks, blocks, all_inodes, inodes, inodes, 0, 255))

    def statvfs(self, path: str) -> os.statvfs_result:
        return self._found


@pytest.mark.parametrize(
    ("disk", "fits"), [(Disk(2, 50), True), (Disk(1, 50), False), (Disk(9, 2), False), (Disk(9, 0, 0), True)]
)
def test_disk_room_and_inodes_are_checked(disk: Disk, fits: bool) -> None:
    if fits:
        writer.check_disk("/", 8192, disk)
    else:
        with pytest.raises(OSError) as caught:
            writer.check_disk("/", 8192, disk)
        assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("endpoint", "tcp://x"),
        ("idle_exit_s", -1.0),
        ("drain_timeout_s", float("inf")),
        ("threads", 1000),
        ("max_write_bandwidth", 5),
        ("log_format", "xml"),
        ("roots", ("relative",)),
    ],
)
def test_impossible_settings_are_refused_by_name(field: str, value: object) -> None:
    fields: dict[str, object] = {"endpoint": "ipc:///tmp/x.sock", field: value}
    with pytest.raises(ConfigError) as caught:
        WorkerConfig(**fields)  # type: ignore[arg-type]
    assert caught.value.field == field  # type: ignore[attr-defined]
