"""`hub_rules`: of which tensors in memory the hub's tensors of an architecture are made."""

from __future__ import annotations

from asyncckpt.errors import ConfigError
from asyncckpt.interop.mapping.tensor_rules import TensorRule

_MIXTRAL = (
    TensorRule(
        "{p*}mlp.experts.gate_up_proj",
        ["{p*}block_sparse_moe.experts.{expert}.w1.weight", "{p*}block_sparse_moe.experts.{expert}.w3.weight"],
    ),
    TensorRule("{p*}mlp.experts.down_proj", "{p*}block_sparse_moe.experts.{expert}.w2.weight"),
    TensorRule("{p*}mlp.gate.weight", "{p*}block_sparse_moe.gate.weight"),
)
_QWEN_MOE = (
    TensorRule(
        "{p*}mlp.experts.gate_up_proj",
        ["{p*}mlp.experts.{expert}.gate_proj.weight", "{p*}mlp.experts.{expert}.up_proj.weight"],
    ),
    TensorRule("{p*}mlp.experts.down_proj", "{p*}mlp.experts.{expert}.down_proj.weight"),
)

HUB_RULES: dict[str, tuple[TensorRule, ...]] = {
    "mixtral": _MIXTRAL,
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "dots1", "glm4_moe", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next"), _QWEN_MOE
    ),
}
"""By the `model_type` of a config. transformers 5 stacks the experts of a layer in memory; checkpoints on the hub have
tensors for each expert, and these names. Source: `conversion_mapping.py` of transformers 5."""


def hub_rules(model_type: str) -> tuple[TensorRule, ...]:
    """Return the rules that make the hub's tensors of those that transformers 5 has in memory.

    `rule.inverse()` of each makes the tensors in memory of the hub's, for example to load a checkpoint of the hub into
    a model with stacked experts.

    Args:
        model_type: The `model_type` of the config, such as "mixtral".

    Raises:
        ConfigError: There are no rules for it.
    """
    try:
        return HUB_RULES[model_type]
    except KeyError:
        raise ConfigError(
            f"model_type={model_type!r}: there are rules for {', '.join(sorted(HUB_RULES))}; write your own with "
            "TensorRule, if names or shapes on the hub differ from those in memory",
            field="model_type",
            value=model_type,
        ) from None
