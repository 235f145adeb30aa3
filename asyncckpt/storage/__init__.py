"""Checkpoints in storage: write a rank's files, commit, recover, find, read, verify. Imports no torch.

`store` is what commit and catalog need of storage, `local` does it by files, `files` is the seam to system calls.
COMMIT.md is the writer's protocol. What removes checkpoints is `maintenance`, what fills tensors `loading`.
"""
