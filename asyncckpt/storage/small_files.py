"""A rank's files beside its shards: index, objects, items of layout dcp; written new, or in the place of what stands.

IMPORTANT: what stands is replaced in one step. Of several ranks another node's worker has heard that these files are
durable, and may have committed them by now.
"""

from __future__ import annotations

import contextlib
import os

from asyncckpt.failpoints import reach
from asyncckpt.format.names import DCP, index_name, items_name, objects_name, replacing_name
from asyncckpt.storage.files import Files, write_new_file
from asyncckpt.storage.rank_job import RankJob


def small_paths(job: RankJob) -> list[str]:
    """Return the paths of these files, the index first: it says that the others are whole."""
    names = [index_name(job.save_id, job.rank), objects_name(job.save_id, job.rank)]
    names += [items_name(job.save_id, job.rank)] if job.layout == DCP else []
    return [os.path.join(job.path, name) for name in names]


class SmallFiles:
    """See the module. Of one rank's save.

    Args:
        job: Where to.
        mode: Permission bits.
        files: The storage seam.

    Attributes:
        created: Paths to be removed if the save fails.
        stand: They are there already: see `stand_already`.
    """

    def __init__(self, job: RankJob, mode: int, files: Files) -> None:
        self._job, self._mode, self._files = job, mode, files
        self.created: list[str] = []
        self.stand = False

    def stand_already(self) -> None:
        """From here on `write` replaces, and what stands stays if the save fails: unless nobody else can commit it."""
        self.stand = True
        if self._job.world_size == 1:
            self.created = small_paths(self._job)

    def write(self, name: str, data: bytes) -> None:
        """Write one file, flushed if the job says so.

        Raises:
            OSError: A call failed; what stood before stands.
        """
        path = os.path.join(self._job.path, name)
        if self.stand:
            return self._replace(path, data)
        try:
            self._write(path, data)
        except FileExistsError:
            raise
        except BaseException:
            self.created.append(path)
            raise
        return self.created.append(path)

    def _replace(self, path: str, data: bytes) -> None:
        temporary = replacing_name(path)
        with contextlib.suppress(FileNotFoundError):
            self._files.unlink(temporary)  # of a worker that died here
        try:
            self._write(temporary, data)
            reach("small file: replacing")
            self._files.rename(temporary, path)
            reach("small file: replaced")
        except BaseException:
            with contextlib.suppress(OSError):
                self._files.unlink(temporary)
            raise

    def _write(self, path: str, data: bytes) -> None:
        write_new_file(self._files, path, data, mode=self._mode, fsync=self._job.fsync)
