"""The worker's decisions: a state machine that takes events and returns actions.

No clock, no randomness, no I/O, no threads. `machine` is the entry point; `model` has the phase table of a save.
`service` passes events in and performs the actions; `io` runs the jobs that may wait for a disk. The part of the state
machine for mirrors is `mirrors.schedule`.
"""
