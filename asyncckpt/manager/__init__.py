"""`CheckpointManager`: when a training saves, from which checkpoint it resumes, which checkpoints stay. Preemption."""
