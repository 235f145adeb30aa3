"""The synchronous save: the caller's process stages, writes and commits, without a worker.

`SyncCheckpointer` calls `writer`; `local_save` has the steps of one rank, `collective_save` coordinates several ranks.
What asynchronous saves do too is in the packages for planning, staging, files and commit.
"""
