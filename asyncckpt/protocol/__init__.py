"""What trainer and worker, and the workers of several nodes, send each other. Contract: `SPEC.md`.

`messages` and `node_tables` have the messages, `request` the save request in a slot, `codec` their bytes, `fields` the
checks of their fields. `endpoint`, `dealer` and `identity`: sockets, and the processes at their ends. No torch.
"""
