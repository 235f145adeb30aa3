"""Copies of committed checkpoints to their mirrors: `schedule` decides which is next, `jobs` copies.

`schedule` is a part of the state machine of `worker/core`: no I/O.
"""
