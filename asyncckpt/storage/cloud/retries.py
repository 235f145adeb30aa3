"""How long requests to an object store are repeated, and with which pauses; by obstore, and where it repeats none."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

RETRY_FOR_S = 60.0
"""How long one request is repeated. Chosen: a store that throttles answers within seconds; a save has more time."""

FIRST_PAUSE_S = 0.1
LAST_PAUSE_S = 10.0


def tries() -> Iterator[bool]:
    """Yield, with growing pauses between, whether this is the last try: `RETRY_FOR_S` are over."""
    deadline, pause_s = time.monotonic() + RETRY_FOR_S, FIRST_PAUSE_S
    while time.monotonic() < deadline:
        yield False
        time.sleep(pause_s * random.uniform(0.5, 1.0))
        pause_s = min(2 * pause_s, LAST_PAUSE_S)
    yield True
