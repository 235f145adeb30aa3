"""A directory of checkpoints over time: garbage collection, retention, copies to mirrors, pins, quarantine. No torch.

Works on a `storage.store.Store`, except for `event_log`, which appends to the local file `events.jsonl`. Not here:
writing, committing and reading of checkpoints (`storage`).
"""
