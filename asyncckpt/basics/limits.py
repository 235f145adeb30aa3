"""Limits that files, messages and the command line share."""

MAX_RANKS = 100_000
"""Ranks of a save."""

MAX_PARTS = 1_000
"""Shard files of a rank."""
