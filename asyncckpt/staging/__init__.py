"""Copies a state into a slot: from host memory, from devices, behind the training, through a ring.

Start with `stager`. `slot_copy` starts a copy into a slot that holds the whole state, or into a ring. What is left when
`save()` returns is a `deferred_copy`; `overlap` makes the training wait for it before it changes the tensors. Nothing
here talks to the worker or owns a slot (`asyncckpt.client` does), or decides what is written where (`planning` does).
"""
