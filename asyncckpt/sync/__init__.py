"""The synchronous save: the caller's process stages, writes and commits, without a worker.

`writer` is the part that `SyncCheckpointer` calls, `local_save` what one rank does, `collective_save` how several ranks
agree on each step. What asynchronous saves share with it (planning, staging, files, commit) lives in those packages.
"""
