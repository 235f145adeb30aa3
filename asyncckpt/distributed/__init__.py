"""Ranks: how they meet, what they agree on for saves, and how they take one checkpoint.

Only `process_group` calls torch.distributed. Nothing here copies tensors, and nothing knows slots.
"""
