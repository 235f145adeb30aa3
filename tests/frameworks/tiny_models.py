"""Small models of transformers, one of each architecture that exports are tested with, and inputs for them."""

from __future__ import annotations

from typing import Any

import torch

ARCHITECTURES = ("llama", "qwen3_moe", "mixtral", "gemma", "t5", "whisper")

_DECODER = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_HEADS = {"num_heads": 4, "d_model": 32, "d_kv": 8, "d_ff": 48}

_ROUTED = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
_LATENT = {
    **_DECODER,
    **_ROUTED,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "dots1": {**_DECODER, **_ROUTED, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "glm4_moe": {**_DECODER, **_ROUTED, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "mixtral": {**_DECODER, "num_local_experts": 4},
    "olmoe": {**_DECODER, "num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**_DECODER, **_ROUTED, "num_experts": 4, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**_DECODER, **_ROUTED, "num_experts": 4},
    "qwen3_next": {**_DECODER, **_ROUTED, "num_experts": 4, "shared_expert_intermediate_size": 16, "head_dim": 8},
}
"""Arguments of the configs of small models with experts, by `model_type`."""


def _config(architecture: str) -> Any:
    import transformers as hf

    if architecture == "llama":
        return hf.LlamaConfig(**_DECODER)
    if architecture == "qwen3_moe":
        more = {"moe_intermediate_size": 16, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2}
        return hf.Qwen3MoeConfig(**_DECODER, **more)
    if architecture == "mixtral":
        return hf.MixtralConfig(**_DECODER, num_local_experts=4)
    if architecture == "gemma":
        return hf.GemmaConfig(**_DECODER, head_dim=8)
    if architecture == "t5":
        return hf.T5Config(vocab_size=64, num_layers=2, decoder_start_token_id=0, dropout_rate=0.0, **_HEADS)
    assert architecture == "whisper"
    layers = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 2), ("ffn_dim", 48))}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes = {"vocab_size": 64, "d_model": 32, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return hf.WhisperConfig(**layers, **heads, **sizes, **tokens, suppress_tokens=None, begin_suppress_tokens=None)


def model_class(architecture: str) -> Any:
    import transformers as hf

    names = {
        "llama": "LlamaForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "mixtral": "MixtralForCausalLM",
        "gemma": "GemmaForCausalLM",
        "t5": "T5ForConditionalGeneration",
        "whisper": "WhisperForConditionalGeneration",
    }
    return getattr(hf, names[architecture])


def model(architecture: str, seed: int = 0) -> Any:
    """Return a new model in float32."""
    torch.manual_seed(seed)
    return model_class(architecture)(_config(architecture))


def blocks(model: Any) -> list[Any]:
    """Return the layers that are sharded on their own."""
    return [
        module
        for module in model.modules()
        if type(module).__name__.endswith(("DecoderLayer", "EncoderLayer", "T5Block"))
    ]


def inputs(architecture: str, seed: int) -> dict[str, Any]:
    """Return a batch, with labels."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 60, (2, 9), generator=random)
    if architecture == "whisper":
        return {"input_features": torch.randn(2, 8, 32, generator=random), "labels": ids}
    return {"input_ids": ids, "labels": ids}


def logits(model: Any, architecture: str) -> torch.Tensor:
    """Return what the model says to a fixed input."""
    model.eval()
    with torch.no_grad():
        found = model(**inputs(architecture, seed=99)).logits.clone()
    model.train()
    return found
