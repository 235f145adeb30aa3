"""Tensors of a target that are made of tensors of the source: stacked, split, joined, or cast to another dtype.

`made_tensors` describes such a tensor, and `tensor_rules` makes them of a checkpoint's names by the rules of a user.
Here are no formats: what a target can hold is in the modules `write_*`. Elements are read by `source_reader`.
"""
