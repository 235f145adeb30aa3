"""Copies a state into a slot, for both stagers: from host memory, from devices, behind the training, through a ring.

`stager` leads; `slot_copy` begins a copy into a slot that holds the whole state, or into a ring. What is left when
`save()` returns is a `deferred_copy`, which `overlap` makes the training wait for where it would change the tensors.
Nothing here talks to the worker, nor owns a slot: `asyncckpt.client` does. What is written where says `planning`.
"""
