"""From a staging result to the process that writes it, and from there to the futures of a handle."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from typing import Any

from asyncckpt.client.pending_saves import StagedSnapshot
from asyncckpt.errors import AsyncCkptError, ConfigError, StagingError
from asyncckpt.handle import SaveHandle, SaveReport
from asyncckpt.parts import CheckpointProcess


def hand_over(
    process: CheckpointProcess, handle: SaveHandle, result: Any, arguments: Mapping[str, Any], kw: Mapping[str, Any]
) -> None:
    """Let `process` write what was staged, now or when its rest has been copied. Does not wait.

    Args:
        process: Writes it.
        handle: Its futures are completed, by whatever goes wrong with `process`, or with a copy, once it is begun.
        result: A stager's.
        arguments: `path`, `step`, `save_id`, `metadata` of the save.
        kw: The extra arguments of `save()`.

    Raises:
        StagingError: The rest of the copy could not be begun; the save is the caller's to take back.
    """
    if not isinstance(result, StagedSnapshot) or result.rest is None:
        _write(process, handle, result, arguments, kw)
        return
    handle.save_id = result.save_id

    def copied(error: AsyncCkptError | None) -> None:
        if error is not None:
            handle.fail(error)
            return
        try:
            _write(process, handle, result, arguments, kw)
        except BaseException as caught:  # nobody else hears of it: this is the copier's thread
            handle.fail(caught)
            raise

    rest, result.rest = result.rest, None
    try:
        rest(handle.staged, copied)
    except Exception as error:
        raise StagingError(
            f"step {result.step}: the copy behind the training could not be begun: {error!r}",
            save_id=str(result.save_id),
            step=result.step,
            path=result.path,
        ) from error


def _write(
    process: CheckpointProcess, handle: SaveHandle, result: Any, arguments: Mapping[str, Any], kw: Mapping[str, Any]
) -> None:
    if isinstance(result, StagedSnapshot):
        handle.save_id = result.save_id
        report = SaveReport(
            save_id=str(result.save_id), nbytes=result.nbytes, seconds=result.seconds, details=result.details
        )
    else:
        report = SaveReport(save_id=str(handle.save_id), nbytes=0)
    rest = {name: value for name, value in arguments.items() if name != "path"}
    try:
        future: Any = process.write(result, arguments["path"], **rest, **kw)
    except Exception as error:
        handle.fail(error)
        return
    try:
        with contextlib.suppress(InvalidStateError):  # an interrupt in `save()`, or `close()`, has failed it meanwhile
            handle.staged.set_result(report)
    finally:  # also after an exit by a callback of `staged`
        if isinstance(future, Future):
            handle.follow(future)
        else:
            kind = type(future).__name__
            handle.fail(ConfigError(f"write() returned a {kind}, expected a Future", field="checkpoint_process"))
