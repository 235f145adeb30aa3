"""What every other package may use: system calls, paths, units, signals, threads that end with the process, test hooks.

Nothing here knows of checkpoints, imports torch, or imports other modules of ours but `errors` and `dtypes`.
"""
