"""Helpers for all other packages: system calls, paths, units, signals, threads that end with the process.

Nothing here knows about checkpoints. Modules import no torch, and of this project only `errors` and `dtypes`.
"""
