"""Tensors of which a process holds parts: DTensor, `ShardedSlice`, `FlatShard`, types that users register.

`mesh_layout` and `shard_claims` are pure and import no torch. The other modules inspect tensors. They copy no elements
and start no collective, but `dtensor.local_tensor` waits for a collective that still fills a local tensor. Which rank
writes which shard is decided in `asyncckpt.planning`.
"""
