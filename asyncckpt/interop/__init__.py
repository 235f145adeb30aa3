"""Conversion of checkpoints between formats, and their comparison.

`sources` reads checkpoints of other libraries; `loading` imports it. All other modules here import `loading`. No code
that a checkpoint names is imported or called.
"""
