"""Programs to learn from; installed as `asyncckpt.examples` so that `asyncckpt demo` can run them."""
