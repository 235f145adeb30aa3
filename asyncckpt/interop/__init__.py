"""Conversion of checkpoints between formats, and their comparison.

`sources` reads checkpoints of other libraries; `loading` imports it, so it must not import `loading`. The other modules
may. No code that a checkpoint names is imported or called.
"""
