"""Checks of a place in an object store, in a scratch name that is removed again."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator

from asyncckpt.doctor.findings import OK, Check, Finding, fail, findings_of, ok
from asyncckpt.format.checksums import OBJECT_BLOCK_NBYTES
from asyncckpt.storage.store import Store

_CONTENT = bytes(range(256)) * 4
_RANGE = (100, 200)

_ACCESS = "check the URL, the endpoint and region, and that these credentials may list, put, get and delete there"


def bucket_checks(url: str, store: Store) -> Iterator[Finding]:
    """Yield the findings about a place in an object store.

    Args:
        url: As `checkpoint_path` returns it; nothing need be below it.
        store: Store that holds it.
    """
    scratch = f"{url}/.asyncckpt-doctor-{secrets.token_hex(6)}"
    name = f"{scratch}/probe"
    try:
        for found in findings_of(
            (
                Check("listing", lambda: _listing(url, store), f"{url} cannot be listed", _ACCESS),
                Check("commit", lambda: _commit(name, store), "no save can be committed", _ACCESS),
                Check("reading", lambda: _reading(name, store), "a range cannot be read", _ACCESS),
            )
        ):
            yield found
            if found.status != OK:
                return
        yield from findings_of(
            (
                Check("uploads", lambda: _uploads(f"{scratch}/part", store), "nothing can be uploaded", _ACCESS),
                Check("removal", lambda: _removal(name, store), "objects cannot be removed", _ACCESS),
            )
        )
    finally:
        for one in (name, f"{scratch}/part"):
            with contextlib.suppress(OSError):
                store.remove(one)


def _listing(url: str, store: Store) -> Finding:
    try:
        count = len(store.names(url))
    except FileNotFoundError as error:
        if "nothing is there" not in str(error):  # no such bucket
            raise
        count = 0
    return ok(f"{count} names are below {url}", names=count)


def _commit(name: str, store: Store) -> Finding:
    store.put_if_absent(name, _CONTENT, temporary="")
    with contextlib.suppress(FileExistsError):
        store.put_if_absent(name, _CONTENT[1:], temporary="")
        text = "a second put of one name is not refused: of two saves to one path the later one would replace the other"
        return fail(text, "use a store that has conditional puts; an option of obstore may turn them off")
    return ok("a second put of one name is refused, as commits need it")


def _reading(name: str, store: Store) -> Finding:
    start, nbytes = _RANGE
    found = store.read(name, start, nbytes)
    if found != _CONTENT[start : start + nbytes] or store.read_whole(name, len(_CONTENT)) != _CONTENT:
        return fail("what was read is not what was put", "something between here and the store changes what it passes")
    return ok("ranges are read as they were put")


def _uploads(name: str, store: Store) -> Finding:
    shard = store.shard_writer(
        name, memoryview(_CONTENT), 0, len(_CONTENT), block_nbytes=OBJECT_BLOCK_NBYTES, aligned=False, fsync=True
    )
    try:
        shard.write_extent(0, len(_CONTENT))
        shard.finish()
    except BaseException:
        shard.abandon()
        raise
    return ok(
        "a shard was uploaded. Killed workers leave incomplete multipart uploads: in S3 `asyncckpt gc` aborts them if "
        "boto3 is installed; or let a lifecycle rule of the bucket do it"
    )


def _removal(name: str, store: Store) -> Finding:
    store.remove(name)
    with contextlib.suppress(FileNotFoundError):
        store.stat(name)
        return fail("an object is still there after it was removed", _ACCESS)
    return ok("objects are removed")
