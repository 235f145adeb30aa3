"""The life of one save as the worker sees it. The table is the program; a missing cell is an error.

Two rules: a phase changes only through `advance`, and nothing leaves a phase of `ENDED`.

    begun       the trainer is staging; the directory exists
    submitted   sealed: the snapshot no longer needs the trainer
    writing     its files are being written
    durable     its files and index are fsynced
    committed   the manifest stands
    failed      ended with an error; nothing was published
    unknown     ended with an error at the manifest itself; nobody knows whether it stands
    abandoned   ended before it was sealed: trainer dead, gone or withdrawn
"""

from __future__ import annotations

BEGUN = "begun"
SUBMITTED = "submitted"
WRITING = "writing"
DURABLE = "durable"
COMMITTED = "committed"
FAILED = "failed"
UNKNOWN = "unknown"
ABANDONED = "abandoned"

TRANSITIONS: dict[str, dict[str, str]] = {
    BEGUN: {"submit": SUBMITTED, "fail": FAILED, "abandon": ABANDONED},
    SUBMITTED: {"write": WRITING, "fail": FAILED},
    WRITING: {"finish": DURABLE, "fail": FAILED},
    DURABLE: {"commit": COMMITTED, "fail": FAILED, "lose": UNKNOWN},
    COMMITTED: {},
    FAILED: {},
    UNKNOWN: {},
    ABANDONED: {},
}

PHASES = frozenset(TRANSITIONS)
ENDED = frozenset(phase for phase, row in TRANSITIONS.items() if not row)
IN_FLIGHT = frozenset({SUBMITTED, WRITING, DURABLE})
"""The worker reads the slot, or needs it for a rewrite."""


def advance(phase: str, event: str) -> str:
    """Return the phase that follows `phase` on `event`.

    Raises:
        ValueError: The table has no such cell: our own bug.
    """
    try:
        return TRANSITIONS[phase][event]
    except KeyError:
        raise ValueError(f"a save in phase {phase!r} cannot {event!r}") from None
