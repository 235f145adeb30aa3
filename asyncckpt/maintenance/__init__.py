"""A directory of checkpoints over time: garbage collection, retention, pins, quarantine, events.jsonl. No torch.

Works on a `storage.store.Store`. Not here: writing, committing and reading of checkpoints (`storage`).
"""
