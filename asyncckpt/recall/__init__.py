"""Reads snapshots from the memory of this node's worker: asks for them, maps them, reads their files. No torch.

What a load does with them is `loading`; what the worker keeps, and for how long, is decided in `worker/core`.
"""
