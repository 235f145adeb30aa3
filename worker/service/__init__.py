"""The control loop and what surrounds it: socket, lock, processes, log, metrics, observers.

Nothing here decides about a save (the state machine does) or touches storage (`io` does).
"""
