"""From a staging result to the process that writes it, and from there to the futures of a handle."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from asyncckpt.errors import AsyncCkptError, ConfigError
from asyncckpt.handle import SaveHandle, SaveReport
from asyncckpt.parts import CheckpointProcess
from asyncckpt.pending import StagedSnapshot


def hand_over(
    process: CheckpointProcess, handle: SaveHandle, result: Any, arguments: Mapping[str, Any], kw: Mapping[str, Any]
) -> None:
    """Let `process` write what was staged, now or when its rest has been copied. Does not wait.

    Args:
        process: Writes it.
        handle: Its futures are completed; whatever goes wrong is set on them.
        result: A stager's.
        arguments: `path`, `step`, `save_id`, `metadata` of the save.
        kw: The extra arguments of `save()`.
    """
    if not isinstance(result, StagedSnapshot) or result.rest is None:
        _write(process, handle, result, arguments, kw)
        return
    handle.save_id = result.save_id

    def copied(error: AsyncCkptError | None) -> None:
        if error is not None:
            handle.fail(error)
        else:
            _write(process, handle, result, arguments, kw)

    rest, result.rest = result.rest, None
    rest(handle.staged, copied)


def _write(
    process: CheckpointProcess, handle: SaveHandle, result: Any, arguments: Mapping[str, Any], kw: Mapping[str, Any]
) -> None:
    if isinstance(result, StagedSnapshot):
        handle.save_id = result.save_id
        report = SaveReport(save_id=str(result.save_id), nbytes=result.nbytes, seconds=result.seconds)
    else:
        report = SaveReport(save_id=str(handle.save_id), nbytes=0)
    rest = {name: value for name, value in arguments.items() if name != "path"}
    try:
        future: Any = process.write(result, arguments["path"], **rest, **kw)
    except Exception as error:
        handle.fail(error)
        return
    if not handle.staged.done():  # an interrupt in `save()` may have failed it meanwhile
        handle.staged.set_result(report)
    if isinstance(future, Future):
        handle.follow(future)
    else:
        kind = type(future).__name__
        handle.fail(ConfigError(f"write() returned a {kind}, expected a Future", field="checkpoint_process"))
