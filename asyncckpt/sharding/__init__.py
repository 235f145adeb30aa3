"""Tensors of which a process holds parts: DTensor, slices given by hand, flat ranges, types that users register.

`mesh_layout` and `shard_claims` are pure and import no torch. The others look at tensors, without copying elements and
without a collective, except that `dtensor.local_tensor` waits for one that still fills a local tensor. Who writes
which shard is decided in `asyncckpt.planning`.
"""
