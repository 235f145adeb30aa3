"""Finds out whether a mirror answers, before the first save, which then need not wait for one that hangs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from asyncckpt.basics.process_lifecycle import BackgroundThread
from asyncckpt.basics.seen_saves import note_look, note_seen, note_to_tell
from asyncckpt.format.names import NO_RUN, SaveId
from asyncckpt.storage.catalog import MIRROR_ANSWER_S, epoch_by_hours

_log = logging.getLogger("asyncckpt")
_probed: set[str] = set()


def probe_mirror(root: str, ask: Callable[[], object], *, is_alone: bool) -> None:
    """List a mirror in the background. If it does not answer within `MIRROR_ANSWER_S`, no worker asks it for epochs.

    Instead, a save of an unknown run is noted as seen there, with the hours since 1970 as its epoch: what this process
    saves counts as newer. Several ranks tell each other when they meet, for which a meeting waits. While a mirror is
    being listed it is not listed again.

    Args:
        root: The directory or URL below which the mirrors of a run's saves are.
        ask: Lists it.
        is_alone: Whether there is one rank only.
    """
    if root in _probed:
        return
    answered, judged = threading.Event(), threading.Event()

    def judge() -> None:
        if not answered.wait(MIRROR_ANSWER_S):
            _log.warning(
                "the mirror %s does not answer; what is there counts as older than what is saved from now on", root
            )
            expected = SaveId(epoch_by_hours(), 0, NO_RUN)
            if is_alone:
                note_seen([root], [expected])
            else:
                note_to_tell(root, expected)
        judged.set()

    def wait_for_answer() -> None:
        try:
            ask()
        except (FileNotFoundError, NotADirectoryError):
            pass  # nothing is there yet
        except Exception as error:
            _log.info("the mirror %s cannot be listed: %s", root, error)
            return
        finally:
            _probed.discard(root)
        answered.set()

    _probed.add(root)
    try:
        BackgroundThread(judge, "asyncckpt-mirror-judge", end=answered.set).start()
        BackgroundThread(wait_for_answer, "asyncckpt-mirror-probe").start()
    except RuntimeError:  # can't start new thread; then the first save asks, as it does without a manager
        answered.set()
        _probed.discard(root)
        _log.warning("no thread can be started that asks the mirror %s whether it answers", root)
        return
    if not is_alone:
        note_look(judged)
