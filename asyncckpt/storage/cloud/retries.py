"""Retries of requests to an object store: for how long, and with which pauses. obstore uses the same numbers."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

RETRY_FOR_S = 60.0
"""How long one request is retried. Chosen: a store that throttles answers within seconds; a save has more time."""

BRIEF_RETRY_FOR_S = 5.0
"""The same for what a trainer waits for. It does so for `worker_timeout_s`, 10 s by default, and is told the store's
words if the retries end before."""

FIRST_PAUSE_S = 0.1
LAST_PAUSE_S = 10.0
MAX_RETRIES = round(RETRY_FOR_S / FIRST_PAUSE_S)
"""More than there is time for: `RETRY_FOR_S` ends the retries. obstore chooses each pause at random, from the first on,
so that a dozen of them can be over within two seconds."""

PAUSE_SHARE = 1 / 6
"""Longest pause as a share of the time for retries, so that they do not end much later."""


def attempts() -> Iterator[bool]:
    """Yield once for each attempt, pausing between attempts.

    The value is True for the last attempt, which begins after `RETRY_FOR_S`.
    """
    deadline, pause_s = time.monotonic() + RETRY_FOR_S, FIRST_PAUSE_S
    while time.monotonic() < deadline:
        yield False
        time.sleep(pause_s * random.uniform(0.5, 1.0))
        pause_s = min(2 * pause_s, LAST_PAUSE_S)
    yield True
