"""The phases of a rank's part in a save, as they are told on the wire. `asyncckpt_worker.core.model` moves them.

open        the trainer is staging
sealed      the snapshot no longer needs the trainer; its directory is being made
writing     its files are being written
durable     its files and index are fsynced
recovering  a dead worker may have written or committed it: the directory is being looked at first
committed   the manifest stands
failed      ended with an error; nothing was published
unknown     ended with an error at the manifest itself; nobody knows whether it stands
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
"""Nothing leaves these."""

NOT_AGREED = "no agreement: "
"""How the reason begins of a rank that withdraws since it has not agreed with the others: all ranks meet again."""

PHASES = frozenset({OPEN, SEALED, WRITING, DURABLE, RECOVERING}) | ENDED
