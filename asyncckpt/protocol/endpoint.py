"""Endpoints: names of sockets, their private directories, and the lock that a worker holds before it binds."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import logging
import os
import stat
from collections.abc import Mapping
from typing import NamedTuple

from asyncckpt.errors import ConfigError, EndpointError
from asyncckpt.protocol.messages import PROTOCOL_VERSION

SCHEME = "ipc://"
MAX_SOCKET_PATH_BYTES = 100
"""sun_path holds 107 bytes (unix(7)); libzmq needs a few of them."""

_LOCK_ATTEMPTS = 10
"""Attempts to lock the file while other processes remove it; then another worker counts as running. Chosen."""

_RUNTIME_NAME = "asyncckpt"
_TEMPORARY = ("/tmp", "/var/tmp", "/dev/shm")
"""Directories for sockets if no variable names a usable one: the first one in which this user can use the name."""

_NAME_NBYTES = len("0" * 16 + ".sock")
"""Length of the longest socket name: `run-` and 12 letters are as long as 16 digits."""

ALREADY_SERVED = "is already served by a running worker"
"""Text by which who starts a worker recognizes that another one has the lock of the endpoint."""

JOB_VARIABLES = ("ASYNCCKPT_JOB", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")
_log = logging.getLogger("asyncckpt")
_warned = set[str]()


def socket_path(endpoint: str) -> str:
    """Return the socket's path of an `ipc://` endpoint.

    Raises:
        ConfigError: It is not an absolute ipc endpoint, or too long for a Unix socket.
    """
    path = endpoint.removeprefix(SCHEME)
    if not endpoint.startswith(SCHEME) or not path.startswith("/") or "\0" in path or path.endswith("/"):
        raise ConfigError(
            f"endpoint {endpoint!r}: expected ipc:///absolute/path/of/a/socket", field="endpoint", value=endpoint
        )
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"endpoint {endpoint!r}: the path is longer than {MAX_SOCKET_PATH_BYTES} bytes; use a shorter directory",
            field="endpoint",
            value=endpoint,
        )
    return path


class Place(NamedTuple):
    """A candidate directory for this user's sockets.

    Attributes:
        directory: Its path; it may not exist yet.
        refusal: Why it cannot be used; "" if it can.
    """

    directory: str
    refusal: str


def default_endpoint(environ: Mapping[str, str], *, uid: int, package: str, interpreter: str) -> str:
    """Return the endpoint of the trainers and workers of one job, version and interpreter.

    It is in the first usable directory of `places`; skipped ones are logged once. If none is usable, the endpoint
    fails with EndpointError when it is used.

    Args:
        environ: Environment: `XDG_RUNTIME_DIR`, `TMPDIR`, and the job's name (the first set `JOB_VARIABLES`).
        uid: User ID, part of the name of a directory in a temporary directory.
        package: Version of asyncckpt.
        interpreter: `sys.prefix`, for the Python installation or virtual environment. Not the executable, which has
            several names in one environment.
    """
    job = next((environ[name] for name in JOB_VARIABLES if environ.get(name)), "")
    scope = "\0".join((str(PROTOCOL_VERSION), package, interpreter, job))
    name = hashlib.sha256(scope.encode(errors="surrogateescape")).hexdigest()[:16]
    return _in_users_directory(name, environ, uid)


def private_endpoint(environ: Mapping[str, str], *, uid: int, token: str) -> str:
    """Return an endpoint for one caller, in the directory of the default endpoints.

    Args:
        environ: As in `default_endpoint`.
        uid: As in `default_endpoint`.
        token: Random letters.
    """
    return _in_users_directory(f"run-{token}", environ, uid)


def is_users_directory(directory: str, uid: int) -> bool:
    """Whether `directory` is a directory of default endpoints, which is used for nothing else."""
    return os.path.basename(directory) in (_RUNTIME_NAME, _temporary_name(uid))


def _temporary_name(uid: int) -> str:
    return f"asyncckpt-{uid}"


def places(environ: Mapping[str, str], uid: int) -> list[Place]:
    """Return candidate directories for this user's sockets, the preferred one first.

    The result depends only on the environment and on the owners and modes of directories, so that all processes of a
    user find the same one.

    Args:
        environ: Environment: `XDG_RUNTIME_DIR` and `TMPDIR` are used if set.
        uid: User ID that must own a directory.
    """
    found, seen = [], set()
    runtime = environ.get("XDG_RUNTIME_DIR")
    if runtime:
        found.append(_place("XDG_RUNTIME_DIR", runtime, _RUNTIME_NAME, uid, owned=True))
    for origin, base in (("TMPDIR", environ.get("TMPDIR")), *(("", base) for base in _TEMPORARY)):
        if base and base.rstrip("/") not in seen:
            seen.add(base.rstrip("/"))
            found.append(_place(origin, base, _temporary_name(uid), uid, owned=False))
    return found


def _place(origin: str, base: str, name: str, uid: int, *, owned: bool) -> Place:
    """Check one candidate.

    Args:
        origin: The variable that names `base`, or "".
        base: A directory.
        name: Name of the directory in `base`.
        uid: User ID that must own it.
        owned: Whether `uid` must own `base` too. IMPORTANT: `sudo -E` and `su` keep the variable of another user: a
            directory that root creates there could not be used by that user any more.
    """
    subject, directory = f"{origin}={base}" if origin else base, os.path.join(base, name)
    return Place(directory, _refusal(subject, base, directory, uid, owned=owned))


def _refusal(subject: str, base: str, directory: str, uid: int, *, owned: bool) -> str:
    if not base.startswith("/") or "\0" in base:
        return f"{subject} is not an absolute path"
    nbytes = len(os.fsencode(directory)) + 1 + _NAME_NBYTES
    if nbytes > MAX_SOCKET_PATH_BYTES:
        return f"{subject} is too long for a socket: a path of {nbytes} bytes, the limit is {MAX_SOCKET_PATH_BYTES}"
    try:
        above = os.stat(base)
    except OSError as error:
        return f"{subject} cannot be used: {error.strerror}"
    if not stat.S_ISDIR(above.st_mode):
        return f"{subject} is not a directory"
    if owned and above.st_uid != uid:
        return f"{subject} belongs to uid {above.st_uid}, and this process has uid {uid}"
    try:
        there: os.stat_result | None = os.lstat(directory)
    except FileNotFoundError:
        there = None
    except OSError as error:
        return f"{directory} cannot be read: {error.strerror}"
    if there is None:
        return "" if _is_writable(base) else f"{subject} is not writable for this user"
    if not _is_private(there, uid):
        return f"{directory} {_found(there)}"
    return "" if _is_writable(directory) else f"{directory} is not writable for this user"


def _is_writable(directory: str) -> bool:
    return os.access(directory, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids)


def _in_users_directory(name: str, environ: Mapping[str, str], uid: int) -> str:
    found = places(environ, uid)
    refusals = list(itertools.takewhile(bool, (place.refusal for place in found)))
    if len(refusals) < len(found):
        directory = found[len(refusals)].directory
    else:
        directory = os.path.join(_TEMPORARY[0], _temporary_name(uid))
    if refusals:
        _warn_once(f"{'; '.join(refusals)}: the socket of the worker is in {directory}")
    return f"{SCHEME}{directory}/{name}.sock"


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        _log.warning("%s", text)


def make_directory(endpoint: str) -> str:
    """Create the endpoint's directory with mode 0700, and check that only this user can enter it.

    Returns:
        Path of the socket.

    Raises:
        EndpointError: It belongs to another user, has another mode, or cannot be created.
        ConfigError: The endpoint is malformed.
    """
    path = socket_path(endpoint)
    directory = os.path.dirname(path)
    try:
        _make_parents(os.path.dirname(directory))
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, 0o700)
        found = os.lstat(directory)
    except OSError as error:
        raise EndpointError(
            f"cannot create {directory} for the worker's socket: {error.strerror}", endpoint=endpoint, path=directory
        ) from error
    _refuse_open(endpoint, directory, found)
    return path


def check_directory(endpoint: str) -> None:
    """Check that only this user can enter the endpoint's directory: else another user could listen there.

    Raises:
        EndpointError: It belongs to another user, has another mode, or cannot be read. A missing one is not an error.
        ConfigError: The endpoint is malformed.
    """
    directory = os.path.dirname(socket_path(endpoint))
    try:
        found = os.lstat(directory)
    except FileNotFoundError:
        return
    except OSError as error:
        text = f"cannot read {directory}, the directory of the worker's socket: {error.strerror}"
        raise EndpointError(text, endpoint=endpoint, path=directory) from error
    _refuse_open(endpoint, directory, found)


def _refuse_open(endpoint: str, directory: str, found: os.stat_result) -> None:
    if not _is_private(found, os.geteuid()):
        raise EndpointError(f"{directory} {_found(found)}; choose another endpoint", endpoint=endpoint, path=directory)


def _is_private(found: os.stat_result, uid: int) -> bool:
    return stat.S_ISDIR(found.st_mode) and found.st_uid == uid and not found.st_mode & 0o077


def _found(found: os.stat_result) -> str:
    mode = stat.S_IMODE(found.st_mode)
    return f"must be a directory of this user with mode 0700 (found uid {found.st_uid}, mode {mode:04o})"


def _make_parents(directory: str) -> None:
    """Create missing parents with mode 0755 at most: with write access, other users could replace what is inside."""
    if not os.path.isdir(directory):
        _make_parents(os.path.dirname(directory))
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, 0o755)


def acquire_lock(path: str) -> int | None:
    """Take the lock of the socket at `path`; it is held until the returned descriptor is closed.

    Returns:
        A descriptor, or None if another worker holds the lock.

    Raises:
        OSError: The lock file cannot be created.
    """
    for _ in range(_LOCK_ATTEMPTS):
        fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # IMPORTANT: the last holder may have removed the file; the next process would then lock another file.
            if _is_at(fd, f"{path}.lock"):
                return fd
        except BlockingIOError:
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
    return None


def _is_at(fd: int, path: str) -> bool:
    """Whether `path` is the name of the open file."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False
