"""Finds out whether a mirror answers, before the first save, which then need not wait for one that hangs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from asyncckpt.basics.seen_saves import note_seen
from asyncckpt.format.names import SaveId
from asyncckpt.storage.catalog import MIRROR_ANSWER_S, epoch_by_hours

_log = logging.getLogger("asyncckpt")


def probe_mirror(root: str, ask: Callable[[], object]) -> None:
    """List a mirror in the background. If it does not answer within `MIRROR_ANSWER_S`, no worker asks it for epochs.

    Then the epochs of this process's runs that save to the mirror are one more than the hours since 1970 at least, and
    a worker need not know what is there. The ranks tell each other when they meet. This holds until the second full
    hour from now.

    Args:
        root: The directory or URL below which the mirrors of a run's saves are.
        ask: Lists it.
    """

    def give_up() -> None:
        _log.warning(
            "the mirror %s does not answer; what is there counts as older than what is saved from now on", root
        )
        note_seen([root], [SaveId(epoch_by_hours(), 0, "0" * 12)])

    def wait_for_answer() -> None:
        try:
            ask()
        except (FileNotFoundError, NotADirectoryError):
            pass  # nothing is there yet
        except Exception as error:
            _log.info("the mirror %s cannot be listed: %s", root, error)
            return
        silence.cancel()

    silence = threading.Timer(MIRROR_ANSWER_S, give_up)
    asking = threading.Thread(target=wait_for_answer, name="asyncckpt-mirror-probe", daemon=True)
    silence.name, silence.daemon = "asyncckpt-mirror-silence", True
    try:
        silence.start()
        asking.start()
    except RuntimeError:  # can't start new thread; without the probe, the first save asks as it does without a manager
        silence.cancel()
        _log.warning("no thread can be started that asks the mirror %s whether it answers", root)
