"""Runnable examples; installed as `asyncckpt.examples`."""
