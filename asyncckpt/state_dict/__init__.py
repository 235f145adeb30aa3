"""State dicts: nested containers -> (tree, tensors, objects), and back; values that are not tensors as typed JSON.

`stateful` calls the user's `state_dict()`, and `pickling` pickles for users who asked for it. Nothing here copies the
elements of tensors for storage, knows other ranks or a slot: see `asyncckpt.planning` and `asyncckpt.staging`.
"""
