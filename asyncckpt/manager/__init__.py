"""`CheckpointManager`: when a training saves, what it goes on from, and what stays on disk."""
