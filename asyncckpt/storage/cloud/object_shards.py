"""Uploads a shard while its bytes are handed over: in parts, several at a time, with bounded memory."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from asyncckpt.storage.cloud.retries import attempts
from asyncckpt.storage.cloud.store_errors import as_os_errors
from asyncckpt.storage.shard_writer import Image, ShardWriter
from asyncckpt.storage.store import Entry

PART_NBYTES = 6 << 20
"""Minimum size of one part of an upload. S3 requires at least 5 MiB; each part in flight is a copy in memory."""

MAX_PARTS = 9_000
"""Maximum number of parts of an upload. S3 and GCS allow 10,000."""

PARTS_AT_A_TIME = 4
UPLOADS_AT_A_TIME = 2
"""Uploads that run at the same time in one process: 48 MiB of parts in memory."""

UPLOAD_WAIT_S = 60.0
"""If no running upload has sent anything for so long, one that waits starts anyway, and the limit is exceeded: each of
the running ones may wait for its trainer."""

ASK_EVERY_S = 0.5
"""How often an upload that waits checks whether it is still wanted."""

PIECE_NBYTES = 1 << 20
"""Bytes that are copied out of the slot at a time."""

TURN_TIMEOUT_S = 600.0
"""How long one extent waits for those before it: longer than all retries of their requests take."""


class UploadLimit:
    """Lets `UPLOADS_AT_A_TIME` uploads run; see `UPLOAD_WAIT_S`. Thread-safe."""

    def __init__(self) -> None:
        self._running, self._sent_at = 0, 0.0
        self._ended = threading.Condition()

    def acquire(self, is_wanted: Callable[[], bool]) -> bool:
        """Wait until an upload may start, or is not wanted any more.

        Returns:
            Whether it is counted, so that `release` must be called.
        """
        with self._ended:
            while self._running >= UPLOADS_AT_A_TIME:
                left_s = self._sent_at + UPLOAD_WAIT_S - time.monotonic()
                if left_s <= 0 or not is_wanted():
                    return False
                self._ended.wait(min(left_s, ASK_EVERY_S))
            self._running += 1
        self.note_sent()
        return True

    def note_sent(self) -> None:
        """Record that an upload has sent something."""
        self._sent_at = time.monotonic()

    def release(self) -> None:
        """End a counted upload."""
        with self._ended:
            self._running -= 1
            self._ended.notify()


_uploads = UploadLimit()


class ObjectShardWriter(ShardWriter):
    """Uploads a shard in the order of its bytes. Threads compute checksums concurrently, and wait for their turn.

    Args:
        path, image, offset, nbytes, block_nbytes: As of `ShardWriter`.
        open_upload: Starts an upload and returns a writer of obstore, whose `write` takes bytes and whose `close` makes
            the object appear. Its arguments: name, size of a part in bytes, how many parts may be in flight.
        stat: `Store.stat`.
        secrets: Values that no error may show.
    """

    def __init__(
        self,
        path: str,
        image: Image,
        offset: int,
        nbytes: int,
        *,
        block_nbytes: int,
        open_upload: Callable[[str, int, int], Any],
        stat: Callable[[str], Entry],
        secrets: Iterable[str] = (),
    ) -> None:
        super().__init__(path, image, offset, nbytes, block_nbytes)
        self._open_upload, self._stat, self._secrets = open_upload, stat, secrets
        self._upload: Any = None
        self._is_counted = False
        self._part_nbytes = max(PART_NBYTES, -(-nbytes // MAX_PARTS))
        self._first_part: list[bytes] = []
        self._given = 0
        self._stopped = False
        self._turn = threading.Condition()
        self._opening = threading.Lock()

    def _open(self) -> None:
        with self._opening:  # not `_turn`, which `stop` needs
            if self._upload is None and not self._stopped:
                self._is_counted = _uploads.acquire(lambda: not self._stopped)
                if not self._stopped:
                    self._begin()
                    self.created = True

    def _begin(self) -> None:
        with as_os_errors(self.path, self._secrets):
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
                    with as_os_errors(self.path, self._secrets):
                        self._upload.write(piece)
                if self._is_counted:
                    _uploads.note_sent()
        except BaseException:
            self.stop()
            raise
        with self._turn:
            self._given = start + len(view)
            self._turn.notify_all()

    def _write_first_part(self, piece: bytes) -> None:
        """Write a piece of the first part.

        The last piece of the first part starts the upload. obstore does not retry that request on GCS, so on failure
        the upload is started again and all pieces so far are sent again.
        """
        self._first_part.append(piece)
        pieces = [piece]
        for is_last in attempts():
            try:
                with as_os_errors(self.path, self._secrets):
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
        """Implement `ShardWriter.flush`: do nothing, since the object exists only after `finish`."""

    def finish(self) -> None:
        """Implement `ShardWriter.finish`: complete the upload, by which the object appears, and check its length."""
        upload, self._upload = self._upload, None
        failed: OSError | None = None
        try:
            with as_os_errors(self.path, self._secrets):
                upload.close()
        except OSError as error:
            # The response may have been lost. Only this save writes this name, so a length check decides.
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
            raise OSError(errno.EREMOTEIO, f"the uploaded object has {found} bytes, expected {self.nbytes}", self.path)

    def abandon(self) -> None:
        """Implement `ShardWriter.abandon`: the object does not appear.

        obstore's writers cannot abort an upload: its parts stay until `asyncckpt gc`, or a rule of the bucket, removes
        them.
        """
        self._upload = None
        self._uncount()

    def _uncount(self) -> None:
        with self._turn:
            is_counted, self._is_counted = self._is_counted, False
        if is_counted:
            _uploads.release()

    def stop(self) -> None:
        """Implement `ShardWriter.stop`: the threads that wait for their turn fail with ECANCELED."""
        with self._turn:
            self._stopped = True
            self._turn.notify_all()
