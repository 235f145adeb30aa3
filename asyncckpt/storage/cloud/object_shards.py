"""A shard that is uploaded while its bytes are given: in parts, several at a time, with bounded memory."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Collection
from typing import Any

from asyncckpt.storage.cloud.retries import tries
from asyncckpt.storage.cloud.store_errors import translated
from asyncckpt.storage.shard_writer import Image, ShardWriter
from asyncckpt.storage.store import Entry

PART_NBYTES = 6 << 20
"""Of an upload, at least. Chosen: S3 takes no less than 5 MiB, and what is on its way is a copy in memory."""

MAX_PARTS = 9_000
"""S3 and GCS take 10,000."""

PARTS_AT_A_TIME = 4
UPLOADS_AT_A_TIME = 2
"""Of one process: 48 MiB of memory are on their way, and `PIECE_NBYTES` for each."""

PIECE_NBYTES = 1 << 20
"""What is copied for an upload at a time."""

UPLOAD_WAIT_S = 60.0
"""How long an upload waits for others to end; then it begins all the same: one of them may wait for its trainer."""

_uploads = threading.BoundedSemaphore(UPLOADS_AT_A_TIME)

TURN_TIMEOUT_S = 600.0
"""How long one extent waits for those before it: longer than the store's own retries of them take."""


class ObjectShardWriter(ShardWriter):
    """Uploads a shard in the order of its bytes. Threads digest their extents at the same time, and wait their turn.

    Args:
        path, image, offset, nbytes: As of `ShardWriter`.
        open_upload: Begins an upload of obstore's, whose `write` takes bytes and whose `close` lets the object appear.
            Takes the name, the bytes of a part, and how many parts may be on their way.
        stat: Says what the store has under a name.
        secrets: Values that no error may show.
    """

    def __init__(
        self,
        path: str,
        image: Image,
        offset: int,
        nbytes: int,
        *,
        open_upload: Callable[[str, int, int], Any],
        stat: Callable[[str], Entry],
        secrets: Collection[str] = (),
    ) -> None:
        super().__init__(path, image, offset, nbytes)
        self._open_upload, self._stat, self._secrets = open_upload, stat, secrets
        self._upload: Any = None
        self._is_counted = False
        self._part_nbytes = max(PART_NBYTES, -(-nbytes // MAX_PARTS))
        self._first_part: list[bytes] = []
        self._given = 0
        self._stopped = False
        self._turn = threading.Condition()

    def _open(self) -> None:
        with self._turn:
            if self._upload is None and not self._stopped:
                self._is_counted = _uploads.acquire(timeout=UPLOAD_WAIT_S)
                self._begin()
                self.created = True

    def _begin(self) -> None:
        with translated(self.path, self._secrets):
            self._upload = self._open_upload(self.path, self._part_nbytes, PARTS_AT_A_TIME)

    def _write(self, view: memoryview, start: int) -> None:
        with self._turn:
            if not self._turn.wait_for(lambda: self._stopped or self._given == start, TURN_TIMEOUT_S):
                raise TimeoutError(errno.ETIMEDOUT, f"the bytes before {start} were not uploaded", self.path)
            if self._stopped:
                raise OSError(errno.ECANCELED, "another part of this save has failed", self.path)
        # No lock: it is this extent's turn, and nobody else's.
        try:
            for at in range(0, len(view), PIECE_NBYTES):
                # IMPORTANT: a copy. The library keeps what it is given until it is sent, which may be after the slot
                # is gone.
                piece = bytes(view[at : at + PIECE_NBYTES])
                if start + at < self._part_nbytes:
                    self._write_first_part(piece)
                else:
                    self._first_part.clear()
                    with translated(self.path, self._secrets):
                        self._upload.write(piece)
        except BaseException:
            self.stop()
            raise
        with self._turn:
            self._given = start + len(view)
            self._turn.notify_all()

    def _write_first_part(self, piece: bytes) -> None:
        """Write a piece; it is the last one of the first part that begins the upload at the store.

        Of GCS, the library does not repeat the request that does so: the upload begins again with what was given.
        """
        self._first_part.append(piece)
        pieces = [piece]
        for is_last in tries():
            try:
                with translated(self.path, self._secrets):
                    for one in pieces:
                        self._upload.write(one)
                return
            except (FileNotFoundError, PermissionError):
                raise
            except OSError:
                if is_last:
                    raise
                pieces = self._first_part
                self._begin()

    def flush(self) -> None:
        """As of `ShardWriter`: nothing is known to be there before the end."""

    def finish(self) -> None:
        """As of `ShardWriter`: end the upload, by which the object appears, and look at its length."""
        upload, self._upload = self._upload, None
        failed: OSError | None = None
        try:
            with translated(self.path, self._secrets):
                upload.close()
        except OSError as error:  # its answer may have been lost: nobody else gives this name
            failed = error
        finally:
            self._uncount()
        try:
            found = self._stat(self.path).nbytes
        except OSError:
            if failed is not None:
                raise failed from None
            raise
        if found != self.nbytes:
            raise OSError(errno.EREMOTEIO, f"{found} bytes long after {self.nbytes} were uploaded", self.path)

    def abandon(self) -> None:
        """As of `ShardWriter`: the object does not appear. Parts that the store has are left to its lifecycle rules."""
        self._upload = None
        self._uncount()

    def _uncount(self) -> None:
        with self._turn:
            is_counted, self._is_counted = self._is_counted, False
        if is_counted:
            _uploads.release()

    def stop(self) -> None:
        """As of `ShardWriter`."""
        with self._turn:
            self._stopped = True
            self._turn.notify_all()
