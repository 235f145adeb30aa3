"""Reads checkpoints: `load`, `plan_load`, `open_checkpoint`. Needs no worker, and imports no checkpointer.

`load` is the entry point. `read_source` finds the bytes, `saved_state` is the checkpoint as one rank sees it,
`matching` decides which saved leaf fills which leaf of the target, `fetch` reads. No target changes before structure,
shapes and types have been checked. Readers of other formats are in `interop.sources`; all writing is in `storage`.
"""
