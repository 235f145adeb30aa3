"""Where a worker listens: names, directories that only their user can enter, and the lock that is held before bind."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
import tempfile
from collections.abc import Mapping

from asyncckpt.errors import ConfigError, EndpointError
from asyncckpt.protocol.messages import PROTOCOL_VERSION

SCHEME = "ipc://"
MAX_SOCKET_PATH_BYTES = 100
"""sun_path holds 107 bytes (unix(7)); a few are left for libzmq's own use."""

_LOCK_ATTEMPTS = 10
"""A lock that is taken, and whose file is gone each time: whoever does that is a living worker. Chosen."""

_RUNTIME_NAME = "asyncckpt"
JOB_VARIABLES = ("ASYNCCKPT_JOB", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")


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


def default_endpoint(environ: Mapping[str, str], *, uid: int, package: str, interpreter: str) -> str:
    """Return the endpoint that trainers and workers of one job, version and interpreter meet at.

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


def users_directory(environ: Mapping[str, str], uid: int) -> str | None:
    """Return where this user's own files of the moment lie, whatever the job; it need not be there. None: nowhere."""
    try:
        return os.path.dirname(socket_path(_in_users_directory("0" * 16, environ, uid)))
    except EndpointError:
        return None


def is_users_directory(directory: str, uid: int) -> bool:
    """Whether endpoints that were made up lie in `directory`: nobody else has a use for it."""
    return os.path.basename(directory) in (_RUNTIME_NAME, _temporary_name(uid))


def _temporary_name(uid: int) -> str:
    return f"asyncckpt-{uid}"


def _in_users_directory(name: str, environ: Mapping[str, str], uid: int) -> str:
    candidates = [environ.get("XDG_RUNTIME_DIR", ""), environ.get("TMPDIR", ""), tempfile.gettempdir(), "/tmp"]
    for base in candidates:
        if not base.startswith("/"):
            continue
        directory = _RUNTIME_NAME if base == environ.get("XDG_RUNTIME_DIR") else _temporary_name(uid)
        path = os.path.join(base, directory, f"{name}.sock")
        if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES and os.path.isdir(base):
            return SCHEME + path
    raise EndpointError(
        "no directory is fit for the worker's socket; set ASYNCCKPT_ENDPOINT=ipc:///short/dir/name.sock"
    )


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
    """Prove that whoever listens at the endpoint is this user: who can enter its directory can listen in its place.

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
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise EndpointError(
            f"{directory} must be a directory of this user with mode 0700 (found uid {found.st_uid}, "
            f"mode {stat.S_IMODE(found.st_mode):04o}); choose another endpoint",
            endpoint=endpoint,
            path=directory,
        )


def _make_parents(directory: str) -> None:
    """Make missing parents with mode 0755 at most, whatever the umask: who can write one can replace what is in it."""
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
            # IMPORTANT: who held it may have removed the file; the next to come would lock another one.
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
