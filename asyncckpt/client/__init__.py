"""The trainer's end of the wire, without torch: session, requests, pending saves, failover to another worker.

The slots that the worker has lent to this process belong to it as well: `slot`, `slot_pool`, `slot_stream`.
Nothing here copies tensors (`staging` does) or talks to other ranks (`distributed` does).
"""
