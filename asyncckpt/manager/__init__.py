"""`CheckpointManager`: when a training saves, from which checkpoint it resumes, which checkpoints stay. Preemption.

Start with `manager`, which combines the other modules. What is removed from a directory, and how, is in
`asyncckpt.maintenance`; a single save or load is in the checkpointers.
"""
