"""Where a worker listens: names, directories that only their user can enter, and the lock that is held before bind."""

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
"""sun_path holds 107 bytes (unix(7)); a few are left for libzmq's own use."""

_LOCK_ATTEMPTS = 10
"""A lock that is taken, and whose file is gone each time: whoever does that is a living worker. Chosen."""

_RUNTIME_NAME = "asyncckpt"
_TEMPORARY = ("/tmp", "/var/tmp", "/dev/shm")
"""Where sockets lie if no variable names a usable directory: the first in which no other user has taken the name."""

_NAME_NBYTES = len("0" * 16 + ".sock")
"""Length of the longest socket name that is made here: `run-` and 12 letters are as long as 16 digits."""

JOB_VARIABLES = ("ASYNCCKPT_JOB", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")
_log = logging.getLogger("asyncckpt")
_said = set[str]()


def socket_path(endpoint: str) -> str:
    """Return the socket's path of an `ipc://` endpoint.

    Raises:
        ConfigError: Not an absolute ipc endpoint, or longer than a Unix socket's name may be.
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
    """A directory that this user's sockets may lie in.

    Attributes:
        directory: Its path. It may be missing: then it can be made.
        refusal: Why it is passed over; "" where it is fit.
    """

    directory: str
    refusal: str


def default_endpoint(environ: Mapping[str, str], *, uid: int, package: str, interpreter: str) -> str:
    """Return the endpoint that trainers and workers of one job, version and interpreter meet at.

    It lies in the first fit place of `places`; what was passed over is logged once. Where none is fit, using the
    endpoint fails with EndpointError.

    Args:
        environ: For `XDG_RUNTIME_DIR`, `TMPDIR` and the job's name (`JOB_VARIABLES`, first one set).
        uid: The user's id, part of the directory's name below the temporary directory.
        package: asyncckpt's version.
        interpreter: Which Python installation or virtual environment: `sys.prefix`. Not the executable, which has
            several names in one environment.
    """
    job = next((environ[name] for name in JOB_VARIABLES if environ.get(name)), "")
    scope = "\0".join((str(PROTOCOL_VERSION), package, interpreter, job))
    name = hashlib.sha256(scope.encode(errors="surrogateescape")).hexdigest()[:16]
    return _in_users_directory(name, environ, uid)


def private_endpoint(environ: Mapping[str, str], *, uid: int, token: str) -> str:
    """Return an endpoint that nobody meets at by chance, beside the default ones.

    Args:
        environ: As in `default_endpoint`.
        uid: As in `default_endpoint`.
        token: Random letters that make it the caller's own.
    """
    return _in_users_directory(f"run-{token}", environ, uid)


def is_users_directory(directory: str, uid: int) -> bool:
    """Whether `directory` is one in which endpoints are made here, and which nothing else uses."""
    return os.path.basename(directory) in (_RUNTIME_NAME, _temporary_name(uid))


def _temporary_name(uid: int) -> str:
    return f"asyncckpt-{uid}"


def places(environ: Mapping[str, str], uid: int) -> list[Place]:
    """Return where this user's sockets may lie, the preferred place first.

    All processes of a user with the same environment find the same place: it depends only on the environment and on
    the owners of the directories.

    Args:
        environ: For `XDG_RUNTIME_DIR` and `TMPDIR`. One that is not set names no place.
        uid: Whose directories are fit.
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
    """Look at one place.

    Args:
        origin: The variable that names `base`, or "".
        base: A directory.
        name: Name of the directory in `base`.
        uid: Whose it must be.
        owned: `base` must be this user's too. IMPORTANT: `sudo -E` and `su` keep the variable of another user: a
            directory that root makes there shuts that user out for good.
    """
    said, directory = f"{origin}={base}" if origin else base, os.path.join(base, name)
    return Place(directory, _refusal(said, base, directory, uid, owned=owned))


def _refusal(said: str, base: str, directory: str, uid: int, *, owned: bool) -> str:
    if not base.startswith("/") or "\0" in base:
        return f"{said} is no absolute path"
    nbytes = len(os.fsencode(directory)) + 1 + _NAME_NBYTES
    if nbytes > MAX_SOCKET_PATH_BYTES:
        return (
            f"{said} is too long for a socket: a path of {nbytes} bytes, at most {MAX_SOCKET_PATH_BYTES} are possible"
        )
    try:
        above = os.stat(base)
    except OSError as error:
        return f"{said} cannot be used: {error.strerror}"
    if not stat.S_ISDIR(above.st_mode):
        return f"{said} is no directory"
    if owned and above.st_uid != uid:
        return f"{said} belongs to uid {above.st_uid}, and this process has uid {uid}"
    try:
        there: os.stat_result | None = os.lstat(directory)
    except FileNotFoundError:
        there = None
    except OSError as error:
        return f"{directory} cannot be looked at: {error.strerror}"
    if there is None:
        return "" if _is_writable(base) else f"{said} is not writable for this user"
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
        _say_once(f"{'; '.join(refusals)}: the socket of the worker lies in {directory}")
    return f"{SCHEME}{directory}/{name}.sock"


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        _log.warning("%s", text)


def make_directory(endpoint: str) -> str:
    """Make the endpoint's directory, mode 0700, and prove that only this user can enter it.

    Returns:
        The socket's path.

    Raises:
        EndpointError: It belongs to somebody else, is open to others, or cannot be made.
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
            f"cannot make {directory} for the worker's socket: {error.strerror}", endpoint=endpoint, path=directory
        ) from error
    _refuse_open(endpoint, directory, found)
    return path


def check_directory(endpoint: str) -> None:
    """Check that only this user can enter the endpoint's directory: another user could listen in our place there.

    Raises:
        EndpointError: The directory is there, and belongs to somebody else or is open to others, or cannot be seen.
        ConfigError: The endpoint is malformed.
    """
    directory = os.path.dirname(socket_path(endpoint))
    try:
        found = os.lstat(directory)
    except FileNotFoundError:
        return
    except OSError as error:
        text = f"cannot look at {directory}, where the worker's socket is: {error.strerror}"
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
    """Make missing parents with mode 0755 at most, whatever the umask: write access allows replacing what is inside."""
    if not os.path.isdir(directory):
        _make_parents(os.path.dirname(directory))
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, 0o755)


def acquire_lock(path: str) -> int | None:
    """Take the lock of the socket at `path`; it is held as long as the returned fd is open.

    Returns:
        The fd, or None when another worker holds it.

    Raises:
        OSError: The lock file cannot be made.
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
