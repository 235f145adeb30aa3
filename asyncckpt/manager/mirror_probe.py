"""Finds out whether a mirror answers, before the first save, which then need not wait for one that hangs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from asyncckpt.basics.process_lifecycle import BackgroundThread
from asyncckpt.basics.seen_saves import note_look, note_seen
from asyncckpt.format.names import SaveId
from asyncckpt.storage.catalog import MIRROR_ANSWER_S, epoch_by_hours

_log = logging.getLogger("asyncckpt")


def probe_mirror(root: str, ask: Callable[[], object]) -> None:
    """List a mirror in the background. If it does not answer within `MIRROR_ANSWER_S`, no worker asks it for epochs.

    Then the epochs of this process's runs that save to the mirror are one more than the hours since 1970 at least, and
    a worker need not know what is there. The ranks tell each other when they meet, for which a meeting waits. This
    holds until the second full hour from now.

    Args:
        root: The directory or URL below which the mirrors of a run's saves are.
        ask: Lists it.
    """

    answered, judged = threading.Event(), threading.Event()

    def judge() -> None:
        if not answered.wait(MIRROR_ANSWER_S):
            _log.warning(
                "the mirror %s does not answer; what is there counts as older than what is saved from now on", root
            )
            note_seen([root], [SaveId(epoch_by_hours(), 0, "0" * 12)])
        judged.set()

    def wait_for_answer() -> None:
        try:
            ask()
        except (FileNotFoundError, NotADirectoryError):
            pass  # nothing is there yet
        except Exception as error:
            _log.info("the mirror %s cannot be listed: %s", root, error)
            return
        answered.set()

    note_look(judged)
    try:
        BackgroundThread(judge, "asyncckpt-mirror-judge", end=answered.set).start()
        BackgroundThread(wait_for_answer, "asyncckpt-mirror-probe").start()
    except RuntimeError:  # can't start new thread; then the first save asks, as it does without a manager
        answered.set()
        judged.set()
        _log.warning("no thread can be started that asks the mirror %s whether it answers", root)
