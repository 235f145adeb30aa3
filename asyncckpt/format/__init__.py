"""The disk format, version 1: names, manifest, index, structure, objects, checksums, coverage. Contract: SPEC.md.

Encodes and decodes bytes; all files are read and written by `asyncckpt.storage`. `layout` and `dcp` lay out the shard
files of the two layouts; `torch_zip` and `torch_pickle` make what torch reads. Imports no torch and runs no code that a
file names.
"""
