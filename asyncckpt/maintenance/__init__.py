"""A directory of checkpoints over time: garbage collection, retention, pins, quarantine, events.jsonl. No torch.

Works on a `storage.store.Store`. What writes and commits a checkpoint, and what reads it, is `storage`.
"""
