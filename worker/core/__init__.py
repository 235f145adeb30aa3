"""What the worker decides: pure functions of events, which answer with actions.

No clock, no randomness, no I/O, no threads. `machine` leads; `model` has the table of a rank's part in a save.
`service` feeds events and performs what comes back, `io` does what may wait for a disk.
"""
