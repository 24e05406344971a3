"""Tiny random models, offline and fast, whose attention is peaky enough to tell policies apart."""

from typing import Any

import torch
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

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "phi3": {},
    "qwen3": {"head_dim": 8},
}
"""Model types that the contract is run on, with what their configs need beside the common part."""


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
