"""The phases of a rank's part in a save, as on the wire. Their transitions are in `asyncckpt_worker.core.model`.

open        the trainer is staging
sealed      the snapshot no longer needs the trainer; its directory is being created
writing     its files are being written
durable     its files and index are fsynced
recovering  a dead worker may have written or committed it: its directory is checked first
committed   the manifest is published
failed      ended with an error; nothing was published
unknown     ended with an error; it is not known whether the manifest was published
abandoned   ended before it was sealed: the trainer died, left, or withdrew
"""

from __future__ import annotations

OPEN = "open"
SEALED = "sealed"
WRITING = "writing"
DURABLE = "durable"
RECOVERING = "recovering"
COMMITTED = "committed"
FAILED = "failed"
UNKNOWN = "unknown"
ABANDONED = "abandoned"

ENDED = frozenset({COMMITTED, FAILED, UNKNOWN, ABANDONED})
"""Final phases."""

NOT_AGREED = "no agreement: "
"""Prefix of the reason in Withdraw if the rank could not agree with the others: all ranks meet again."""

PHASES = frozenset({OPEN, SEALED, WRITING, DURABLE, RECOVERING}) | ENDED
