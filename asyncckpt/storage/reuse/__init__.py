"""Shards whose bytes have not changed since the previous save: linked to its files instead of written again.

What lives here: the memory of the shards that this process has written, and the comparison with it. What must not:
system calls; a store links (`Store.link`).
"""
