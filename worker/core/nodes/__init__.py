"""Runs whose ranks have several workers: two tables that workers send each other until the other side has them.

`leader`: the worker of rank 0, which decides; `follower`: any other worker, which reports; `tables`: their rows.
Pure, as all of `core`. Sockets are in `io.node_sockets`, the messages in `asyncckpt.protocol.node_tables`.
"""
