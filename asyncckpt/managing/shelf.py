"""What a manager's user may ask of its root: which steps are there, which is the best, which must stay."""

from __future__ import annotations

import os

from asyncckpt.managing.housekeeping import Housekeeping
from asyncckpt.managing.step_names import StepNames
from asyncckpt.paths import absolute_path


class Shelf:
    """See the module.

    Args:
        root: The directory of the checkpoints.
        step_format: The name of a step's directory.

    Attributes:
        root: Its absolute path.

    Raises:
        ConfigError: `step_format` gives no names of directories.
        UnsupportedPathError: `root` is none.
    """

    _house: Housekeeping

    def __init__(self, root: str | os.PathLike[str], step_format: str) -> None:
        self.root = absolute_path(root)
        self._names = StepNames(self.root, step_format)

    def latest_step(self) -> int | None:
        """Return the step of the newest committed checkpoint, by lineage; None: there is none. Reads the manifests."""
        return self._house.latest_step()

    def all_steps(self) -> list[int]:
        """Return the steps of all committed checkpoints, ascending; also of those that a rollback has left behind."""
        return self._house.all_steps()

    def best_step(self) -> int | None:
        """Return the step of the best checkpoint; None: none has metrics of which `best_fn` makes a number."""
        return self._house.best_step()

    def pin(self, step: int) -> None:
        """Keep the committed checkpoint of `step` for ever, over restarts too.

        Raises:
            ConfigError: `step` is no step.
            CheckpointNotFoundError, CheckpointNotCommittedError: There is none.
            OSError: It may be pinned or not.
        """
        self._house.pin(self._names.path(step))

    def unpin(self, step: int) -> bool:
        """Take the pin of `step` off. Returns whether there was one.

        Raises:
            ConfigError: `step` is no step.
            OSError: A call failed.
        """
        return self._house.unpin(self._names.path(step))
