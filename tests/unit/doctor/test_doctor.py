"""doctor: what each check says where something is missing, and that nothing is left behind."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from storage_samples import RecordingFiles, failing

from asyncckpt import cli
from asyncckpt.doctor import directory, machine
from asyncckpt.doctor.findings import FAIL, OK, WARN, Finding
from asyncckpt.storage.files import Files

GB = 10**9
REPOSITORY = Path(__file__).resolve().parents[3]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def by_name(found: Iterable[Finding]) -> dict[str, Finding]:
    return {one.name: one for one in found}


def storage_of(path: Path, files: Files | None = None, state: int | None = None, ranks: int = 1) -> dict[str, Finding]:
    return by_name(directory.directory_checks(str(path), state, ranks, files or Files()))


def processes_of(
    state: int | None = None, ranks: int = 1, environ: Mapping[str, str] | None = None
) -> dict[str, Finding]:
    return by_name(machine.machine_checks(state, ranks, dict(os.environ) if environ is None else environ))


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    capsys.readouterr()
    code = cli.main(["doctor", *map(str, arguments)])
    return code, capsys.readouterr().out


@pytest.fixture(autouse=True)
def small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "MAX_WRITE_NBYTES", directory.CHUNK_NBYTES)


# ---- the command ----------------------------------------------------------------------------------------------------


def test_a_machine_that_runs_these_tests_is_fit_in_about_a_second(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    code, out = run(capsys, tmp_path, "--state-bytes", "1MB", "--ranks", 2, "--json")
    found = json.loads(out)
    assert time.monotonic() - began < 100  # it took 1.0 s when nothing else ran
    assert code == 0 and found["ok"] and len(found["checks"]) >= 24
    for one in found["checks"]:
        assert one["status"] in (OK, WARN, FAIL) and one["text"] and (one["advice"] or one["status"] == OK), one
    assert os.listdir(tmp_path) == []


def test_text_says_status_and_advice_and_what_was_not_checked(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "--state-bytes", "1000TB")
    assert code == 1 and "fail  memory: " in out and "-> save less" in out
    assert "no directory was checked" in out and "1 failed" in out


# ---- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "available", "limit", "status"),
    [
        (None, 10 * GB, (None, 0), OK),
        (3 * GB, 10 * GB, (None, 0), OK),
        (7 * GB, 10 * GB, (None, 0), WARN),
        (11 * GB, 10 * GB, (None, 0), FAIL),
        (3 * GB, 10 * GB, (4 * GB, 2 * GB), FAIL),
        (3 * GB, 10 * GB, (6 * GB, 1 * GB), WARN),
    ],
)
def test_memory_is_compared_with_the_state_and_the_cgroup_counts(
    monkeypatch: pytest.MonkeyPatch, state: int | None, available: int, limit: tuple[int | None, int], status: str
) -> None:
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: SimpleNamespace(available=available))
    monkeypatch.setattr(machine, "cgroup_limit", lambda: limit)
    assert by_name(machine.machine_checks(state, 1, os.environ))["memory"].status == status


def fails_with(code: int) -> Any:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(code, "seccomp")

    return fail


@pytest.mark.parametrize(
    ("what", "instead", "name", "status", "said"),
    [
        ("os.memfd_create", fails_with(errno.EPERM), "slots", FAIL, ("EPERM", "seccomp")),
        ("asyncckpt.memory.mapping.Mapping.populate", lambda *_, **__: False, "slots", WARN, ()),
        ("os.pidfd_open", fails_with(errno.ENOSYS), "pidfd", WARN, ("/proc",)),
        ("time.time", lambda: 0.0, "clock", WARN, ()),
    ],
)
def test_what_the_machine_lacks_is_said(
    what: str, instead: Any, name: str, status: str, said: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(what, instead)
    found = processes_of()[name]
    assert found.status == status and all(word in found.text + (found.advice or "") for word in said)


# ---- processes ------------------------------------------------------------------------------------------------------


def test_processes_that_may_not_open_each_others_slots_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refused(path: Any, *args: Any, **kw: Any) -> int:
        if str(path).startswith("/proc/") and "/fd/" in str(path):
            raise PermissionError(errno.EACCES, "no", path)
        return real(path, *args, **kw)

    monkeypatch.setattr(os, "open", refused)
    found = processes_of()["processes"]
    assert found.status == FAIL and "trainer's slots" in found.text and "one user" in found.advice
    monkeypatch.setattr(os, "open", real)
    monkeypatch.setattr(machine, "_CHILD", machine._CHILD.replace("{sys.argv[1]}", "1999999999"))
    found = processes_of()["processes"]
    assert found.status == FAIL and "worker's slots" in found.text


def test_a_second_process_that_hangs_is_killed_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_CHILD", "import time; time.sleep(600)")
    monkeypatch.setattr(machine, "CHILD_TIMEOUT_S", 0.5)
    found = processes_of()["processes"]
    assert found.status == FAIL and "printed no error" in found.text and "hidepid" in found.facts


def test_limits_are_compared_with_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {resource.RLIMIT_NOFILE: (150, 4096), resource.RLIMIT_FSIZE: (GB, GB), resource.RLIMIT_MEMLOCK: (8, 8)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    assert processes_of(ranks=1)["open files"].status == OK
    found = processes_of(state=2 * GB, ranks=8)
    assert found["open files"].status == WARN and "ulimit -n 256" in found["open files"].advice
    assert found["file size"].status == FAIL and processes_of()["file size"].status == WARN


@pytest.mark.parametrize(
    ("what", "status"), [("mine", OK), ("open to others", FAIL), ("a file", FAIL), ("new", OK), ("too long", FAIL)]
)
def test_the_sockets_directory_must_be_this_users_alone(tmp_path: Path, what: str, status: str) -> None:
    name = "x" * 200 if what == "too long" else "d"
    if what in ("mine", "open to others"):
        (tmp_path / "d").mkdir(mode=0o700)
        (tmp_path / "d").chmod(0o700 if what == "mine" else 0o755)
    if what == "a file":
        (tmp_path / "d").touch()
    found = processes_of(environ={"ASYNCCKPT_ENDPOINT": f"ipc://{tmp_path}/{name}/s.sock"})["endpoint"]
    assert found.status == status
    assert what != "new" or not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    ("version", "status"), [("2.5.1", FAIL), ("2.6", OK), ("2.13.0+cpu", OK), (None, FAIL), ("x", FAIL)]
)
def test_versions_are_compared_as_numbers_and_torch_is_not_imported(
    monkeypatch: pytest.MonkeyPatch, version: str | None, status: str
) -> None:
    real = machine._version_of
    monkeypatch.setattr(machine, "_version_of", lambda name: version if name == "torch" else real(name))
    found = processes_of()["software"]
    assert found.status == status and (status == OK or "torch>=2.6" in found.advice)


def test_the_versions_that_are_needed_are_those_of_the_package() -> None:
    listed = (REPOSITORY / "pyproject.toml").read_text().partition("dependencies = [")[2].partition("]")[0]
    assert {f"{name}>={version}" for name, version in machine.NEEDED.items()} == {
        line.strip().strip('",') for line in listed.splitlines() if line.strip()
    }


# ---- storage --------------------------------------------------------------------------------------------------------


def test_a_directory_that_is_not_there_is_checked_above_it_and_not_made(tmp_path: Path) -> None:
    found = storage_of(tmp_path / "a" / "b")
    assert found["permissions"].status == OK and str(tmp_path / "a" / "b") in found["permissions"].text
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["file", "link", "link/x"])
def test_a_file_or_a_link_to_nothing_in_the_way_fails_as_a_save_does(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    found = storage_of(tmp_path / name)["permissions"]
    assert found.status == FAIL and (name == "file" or "link" in found.text)
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]


# What fails once, and which check says so.
CALLS: list[tuple[str, int, str, str]] = [
    ("mkdir", errno.EACCES, "permissions", FAIL),
    ("mkdir", errno.EROFS, "permissions", FAIL),
    ("stat", errno.EACCES, "permissions", FAIL),
    ("set_direct", errno.EINVAL, "writing", WARN),
    ("pwrite", errno.ENOSPC, "writing", FAIL),
    ("pwrite", errno.EIO, "writing", FAIL),
    ("fsync", errno.EIO, "writing", FAIL),
    ("flock", errno.ENOLCK, "locks", WARN),
    ("rename", errno.EPERM, "overwrite", WARN),
    ("statvfs", errno.EIO, "free space", WARN),
]


@pytest.mark.parametrize(("method", "code", "name", "status"), CALLS)
def test_a_call_that_fails_is_said_where_it_matters_and_nothing_is_left(
    tmp_path: Path, method: str, code: int, name: str, status: str
) -> None:
    found = storage_of(tmp_path, failing(method, code))
    assert found[name].status == status and (status == WARN or errno.errorcode[code] in found[name].text)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("refused", "way", "statuses"),
    [
        (("link",), "renameat2", (OK, OK, OK)),
        (("link", "rename_noreplace"), "exclusive creation", (WARN, WARN, WARN)),
        (("link", "rename_noreplace", "flock"), None, (FAIL, OK, OK)),
        (("fsync",), "link", (OK, OK, FAIL)),
    ],
)
def test_how_a_file_system_commits_and_which_promise_is_weaker_there_is_said_in_one_line_each(
    tmp_path: Path, refused: tuple[str, ...], way: str | None, statuses: tuple[str, ...]
) -> None:
    found = storage_of(tmp_path, _Refusing(*refused))
    lines = [found[name] for name in ("commit", "overwrite", "durability")]
    assert lines[0].facts["publishes_by"] == way and tuple(line.status for line in lines) == statuses
    for line, promise in zip(lines, ("P14", "P10", "P3"), strict=True):
        assert (promise in line.text) == (line.status == WARN) and "\n" not in line.text
    assert os.listdir(tmp_path) == []


class _Refusing(RecordingFiles):
    """Refuses every call of some methods."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self._names = names

    def before(self, name: str, args: Any) -> None:
        if name in self._names:
            raise OSError(errno.EPERM, "refused")


class Unflushed(Files):
    """Directories cannot be flushed."""

    def fsync(self, fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EINVAL, "no")
        super().fsync(fd)


class Lying(Files):
    """What is read is not what was written."""

    def preadv(self, fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
        count = super().preadv(fd, buffers, offset, flags)
        buffers[0][0] ^= 1
        return count


class Unlocked(Files):
    """A lock that two can hold."""

    def flock(self, fd: int) -> None:
        """Take no lock."""


@pytest.mark.parametrize(
    ("files", "name", "status", "said"),
    [
        (Unflushed, "directory fsync", WARN, ""),
        (Lying, "writing", FAIL, "not what was written"),
        (Unlocked, "locks", WARN, ""),
    ],
)
def test_storage_that_does_not_do_what_it_is_told_is_said(
    tmp_path: Path, files: type[Files], name: str, status: str, said: str
) -> None:
    found = storage_of(tmp_path, files())[name]
    assert found.status == status and said in found.text


def test_a_slow_flush_and_a_storage_clock_that_differs_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.time
    monkeypatch.setattr(directory, "SLOW_FSYNC_S", 0.0)
    monkeypatch.setattr(time, "time", lambda: real() - 4000)
    found = storage_of(tmp_path)
    assert found["fsync"].status == found["storage clock"].status == WARN


@pytest.mark.parametrize(
    ("free", "state", "inodes", "space", "names"),
    [
        (10 * GB, None, 1000, OK, OK),
        (10 * GB, 4 * GB, 1000, OK, OK),
        (10 * GB, 6 * GB, 1000, WARN, OK),
        (10 * GB, 11 * GB, 1000, FAIL, OK),
        (10 * GB, 4 * GB, 10, OK, FAIL),
    ],
)
def test_room_is_compared_with_the_state(
    tmp_path: Path, free: int, state: int | None, inodes: int, space: str, names: str
) -> None:
    class Sized(Files):
        def statvfs(self, path: str) -> Any:
            return SimpleNamespace(f_bfree=free, f_bavail=free, f_frsize=1, f_files=10**6, f_favail=inodes)

    found = storage_of(tmp_path, Sized(), state, ranks=4)
    assert (found["free space"].status, found["inodes"].status) == (space, names)


def test_a_table_of_mounts_that_cannot_be_read_costs_one_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(all: bool) -> list[Any]:
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(directory.psutil, "disk_partitions", refused)
    found = storage_of(tmp_path)
    assert found["file system"].status == WARN and "EACCES" in found["file system"].text
    assert found["storage clock"].status == OK


# ---- for real -------------------------------------------------------------------------------------------------------


def _doctor(*arguments: str, before: list[str] | None = None) -> tuple[int, dict[str, Any]]:
    command = [*(before or []), sys.executable, "-m", "asyncckpt", "doctor", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout, done.stderr
    return done.returncode, {one["name"]: one for one in json.loads(done.stdout)["checks"]}


def test_real_limits_are_seen(tmp_path: Path) -> None:
    limited = ["prlimit", "--fsize=1000000", "--nofile=100", "--"]
    code, found = _doctor(str(tmp_path), "--state-bytes", "2MB", "--ranks", "4", before=limited)
    assert code == 1 and found["file size"]["status"] == FAIL and found["open files"]["status"] == WARN
    assert found["writing"]["status"] == FAIL and "EFBIG" in found["writing"]["text"]
    assert os.listdir(tmp_path) == []


@needs_root
@pytest.mark.parametrize("name", ["plain", "a b\tc\\d"])
def test_a_small_file_system_in_memory_and_a_read_only_one(name: str, tmp_path: Path) -> None:
    tmp_path = tmp_path / name
    tmp_path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=20", "none", str(tmp_path)], check=True)
    try:
        code, found = _doctor(str(tmp_path), "--state-bytes", "2MB", "--ranks", "8")
        assert code == 1 and found["free space"]["status"] == FAIL and found["inodes"]["status"] == FAIL
        assert found["file system"]["status"] == WARN and "in memory" in found["file system"]["text"]
        assert found["writing"]["status"] in (OK, WARN)  # a probe that fits
        assert os.listdir(tmp_path) == []
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
        code, found = _doctor(str(tmp_path))
        assert code == 1 and found["file system"]["status"] == FAIL and "EROFS" in found["permissions"]["text"]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
