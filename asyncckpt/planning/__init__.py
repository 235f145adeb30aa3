"""Which rank writes what: the plan of one rank, and the agreement of the ranks about replicas and shards.

`load_balancing`, `sample_schedule`, `contributions`, `shard_ownership`, `write_agreement` and `save_plan` are pure and
import no torch: all ranks compute the same from the same input. `planner` flattens state dicts, which calls the user's
`state_dict()`; `replica_checks` reads the elements of tensors. Bytes are exchanged in `asyncckpt.distributed`.
"""
