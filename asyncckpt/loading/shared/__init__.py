"""Reads that ranks share: one rank reads what several of them want, and sends it to the others.

`broadcast_plan` says who reads what for whom, and is pure; `broadcast` reads and sends. What a rank wants of a
checkpoint is not decided here.
"""
