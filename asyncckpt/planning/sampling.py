"""Which replicas, and which bytes of them, are compared at a save: a rotation that all ranks know. Pure."""

from __future__ import annotations

WINDOW_NBYTES = 4096
"""Compared of one tensor at one save; a multiple of every itemsize. Chosen, not measured."""

SAMPLE_LIMIT = 512
"""Tensors compared at one save. Chosen: 512 windows are digested in about a millisecond."""
