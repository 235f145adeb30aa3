"""Removing what is not needed any more: garbage collection, retention, pins, putting aside. Imports no torch.

Works on a `storage.store.Store`. What writes and commits a checkpoint, and what reads it, is `storage`.
"""
