"""Runs whose ranks are on several nodes, with one worker each: leader and followers send each other tables.

`leader`: the worker of rank 0, which commits and ends saves; `follower`: any other worker, which reports its ranks'
parts; `tables`: the rows of both. Changes are sent at once, the whole table regularly, so lost messages do no harm.
Pure, as all of `core`. Sockets are in `io.node_sockets`, the messages in `asyncckpt.protocol.node_tables`.
"""
