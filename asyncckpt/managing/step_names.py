"""The names of a manager's checkpoints: from a step to that of its directory."""

from __future__ import annotations

import os

from asyncckpt.errors import ConfigError
from asyncckpt.format.names import is_quarantined
from asyncckpt.paths import absolute_path
from asyncckpt.steps import checked_step


class StepNames:
    """See the module.

    Args:
        root: Absolute path of the directory that holds them.
        step_format: With one field, `step`, as `str.format` has it.

    Raises:
        ConfigError: It gives no names of directories, or the same one for different steps.
    """

    def __init__(self, root: str, step_format: str) -> None:
        self._root, self._format = root, step_format
        try:
            names = {self.name(step) for step in (0, 7, 12_345_678, 123_456_789_012)}
        except (ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
            raise self._refused(f"{error!r}") from error
        if len(names) < 4:
            raise self._refused("different steps get the same name")
        for name in names:
            is_hidden = name.startswith(".") or is_quarantined(name)
            if not name or is_hidden or os.sep in name or "\0" in name or os.path.basename(name) != name:
                raise self._refused(f"{name!r} is no name of a directory that is looked at")

    def _refused(self, detail: str) -> ConfigError:
        return ConfigError(
            f"step_format={self._format!r}: {detail}; expected something like 'step-{{step:08d}}'",
            field="step_format",
            value=repr(self._format)[:80],
        )

    def name(self, step: int) -> str:
        """Return the name of the directory of `step`."""
        return self._format.format(step=step)

    def path(self, step: int) -> str:
        """Return its absolute path.

        Raises:
            ConfigError: `step` is no step.
        """
        return absolute_path(os.path.join(self._root, self.name(checked_step(step))))
