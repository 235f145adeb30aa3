"""Checkpoints in storage: write a rank's files, commit, recover, find, read, verify. Imports no torch.

`store` is the interface to a storage, `local` implements it with files, `files` wraps system calls. COMMIT.md is the
writer's protocol. Not here: removal of checkpoints (`maintenance`), filling of tensors (`loading`).
"""
