"""The memory of snapshots: the layout of a slot, its mapping, and whether there is room for it. Contract: SPEC.md.

`slot` and `streaming` are the layout, which trainer and worker share; `arena` and `mapping` make and map the memory.
Which slot is used for which save is decided in `asyncckpt.client` and in the worker. Imports no torch.
"""
