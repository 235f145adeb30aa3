"""Ranks: how they exchange data in meetings, what they agree on for saves, and how they choose one checkpoint to load.

Only `process_group`, for the meetings, and `user_group`, for a group that the user gives, call torch.distributed.
Nothing here copies tensors, and nothing knows slots.
"""
