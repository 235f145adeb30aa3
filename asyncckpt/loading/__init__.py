"""Loads: `load`, `plan_load`, `open_checkpoint`. Needs no worker, and knows no checkpointer.

`load` leads. `read_source` finds the bytes, `saved_state` is the checkpoint as one rank sees it, `matching` decides
what fills what, `fetch` reads it. Nothing in a target changes before structure, shapes and types have been checked. The
readers of other formats are in `interop.sources`; whatever writes belongs to `storage`.
"""
