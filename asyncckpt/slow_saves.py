"""Why saves do not end: the worker that has them does not answer, or its storage is slow."""

from __future__ import annotations

from asyncckpt.session import Session

SILENT_S = 1.0
"""The worker's control loop does no file I/O: it answers within milliseconds. Chosen."""

SLOW_STORAGE = "storage is slower than the saves come: save less often, or allow more slots"


def why_saves_do_not_end(session: Session | None) -> str:
    """Return it for people, as the end of a sentence."""
    if session is None or session.error is not None or session.silent_s < SILENT_S:
        return SLOW_STORAGE
    return (
        f"the worker (pid {session.worker.pid}) at {session.endpoint} has not answered for {session.silent_s:.0f} s: "
        "it hangs, or was stopped; its saves go on when it does"
    )
