"""Tiny random models, offline and fast, whose attention is peaky enough to tell policies apart."""

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

_COMMON: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}

_MIXTURE: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


def _every_other(kind: str, **config: Any) -> dict[str, Any]:
    """Four layers, of which every other one has full attention."""
    layer_types = [kind, "full_attention"] * 2
    return {"num_hidden_layers": 4, "layer_types": layer_types, "sliding_window": 16, **config}


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "phi3": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {**_MIXTURE, "head_dim": 8},
    "gemma2": _every_other("sliding_attention", head_dim=8, query_pre_attn_scalar=8),
    "gemma3_text": _every_other("sliding_attention", head_dim=8, query_pre_attn_scalar=8),
    "gemma3n_text": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 2,
        "sliding_window": 16,
        "head_dim": 8,
        "vocab_size_per_layer_input": 101,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.0] * 6,
        "altup_num_inputs": 2,
        "intermediate_size": [64] * 6,
    },
    "cohere": {"logit_scale": 1.0},
    "cohere2": _every_other("sliding_attention", logit_scale=1.0),
    "gpt_oss": _every_other("sliding_attention", **_MIXTURE, head_dim=8),
    "olmo2": {},
    "granite": {},
    "glm4": {"head_dim": 8},
    "stablelm": {},
    "gpt_neox": {},
    "starcoder2": {"sliding_window": None},
    "smollm3": {"no_rope_layers": [1, 1, 0]},
    "deepseek_v3": {
        **_MIXTURE,
        "num_key_value_heads": 8,
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "qwen3_next": _every_other(
        "linear_attention",
        **_MIXTURE,
        head_dim=16,
        shared_expert_intermediate_size=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    "lfm2": _every_other("conv", block_ff_dim=64),
    "llama4_text": _every_other(
        "chunked_attention",
        **_MIXTURE,
        head_dim=8,
        intermediate_size_mlp=64,
        attention_chunk_size=16,
        no_rope_layers=[1, 0, 1, 0],
    ),
}
"""Model types that the contract is run on, with what their configs need beside the common part."""

ONLY_EAGER = {"gemma2", "gpt_oss"}
"""Of these, model types for which transformers has no sdpa."""


def tiny_model(
    family: str = "llama", *, attn: str = "sdpa", seed: int = 0, **config: Any
) -> PreTrainedModel:
    """A random decoder model on the CPU, the same for the same arguments.

    Args:
        family: A transformers model type, one of `FAMILIES` or any other with common names.
        attn: Attention implementation.
        seed: Of the weights.
        config: Replaces or adds config fields.
    """
    fields = {**_COMMON, **FAMILIES.get(family, {}), **config}
    settings = AutoConfig.for_model(family, **fields)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(settings, attn_implementation=attn)
    # Without an end token every generation runs its full length.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    result: PreTrainedModel = model.eval()
    return result


def random_prompt(*lengths: int, seed: int = 1) -> dict[str, Tensor]:
    """Token ids for a tiny model, batch x longest, left-padded with 0, and their mask.

    The same for the same lengths and seed.
    """
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.zeros(len(lengths), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, longest - length :] = torch.randint(1, 101, (length,), generator=generator)
        mask[row, longest - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}
