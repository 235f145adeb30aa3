"""The trainer's end of the wire, without torch: session, requests, pending saves, failover to another worker.

Nothing here copies tensors (`staging` does) or talks to other ranks (`distributed` does).
"""
