"""State dicts: nested containers -> (tree, tensors, objects), and back; values that are not tensors as typed JSON.

`stateful` calls the user's `state_dict()`; `pickling` pickles, only with `allow_pickle=True`. Nothing here copies
elements of tensors for storage, or knows of other ranks or slots: see `asyncckpt.planning` and `asyncckpt.staging`.
"""
