"""Model shapes, and the least time that a step of each can take."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from headline.devices import Device


class Shape(StrEnum):
    """Models by the sizes that matter for time and memory; their weights are random."""

    llama_8b = "llama-3.1-8b"
    lwm_7b = "lwm-7b"
    smoke = "smoke"


_LAYOUTS: dict[Shape, dict[str, int]] = {
    Shape.llama_8b: {
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "vocab_size": 128256,
    },
    # Llama-2-7B, which LWM-7B was trained from: as many KV heads as query heads.
    Shape.lwm_7b: {
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "vocab_size": 32000,
    },
    Shape.smoke: {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_size": 64,
        "intermediate_size": 128,
        "vocab_size": 512,
    },
}


@dataclass(frozen=True)
class Costs:
    """What a forward of a model has to read and compute at least."""

    parameters: int
    """Of everything that a token passes, so without the input embedding."""
    weight_bytes: int
    row_bytes: int
    """Of one token's keys and values in all layers."""
    attention_width: int
    """Layers x query heads x head_dim."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Costs":
        """The costs of a model with untied embeddings."""
        embedding = model.get_input_embeddings().weight
        weights = [each for each in model.parameters() if each is not embedding]
        config = model.config
        rows = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        return cls(
            parameters=sum(each.numel() for each in weights),
            weight_bytes=sum(each.nbytes for each in weights),
            row_bytes=rows * model.dtype.itemsize,
            attention_width=config.num_hidden_layers * config.num_attention_heads * config.head_dim,
        )

    def decode_bound_ms(self, batch: int, held: int, bandwidth: float) -> float:
        """A step that reads the weights and all held rows once, and does nothing else."""
        return 1000 * (self.weight_bytes + batch * held * self.row_bytes) / bandwidth

    def prefill_flops(self, batch: int, length: int) -> float:
        """Of a prompt's forward pass, with causal attention and the last token's logits only."""
        # The output embedding is among the parameters but only applied to one token: under 7 %.
        return batch * (2.0 * self.parameters * length + 2.0 * self.attention_width * length**2)


def build(shape: Shape, device: Device, attn: str) -> PreTrainedModel:
    """A model with random bfloat16 weights, made on the device."""
    layout: dict[str, Any] = dict(_LAYOUTS[shape])
    config = LlamaConfig(
        **layout,
        max_position_embeddings=2**24,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,  # else an answer may end early
        pad_token_id=0,
    )
    torch.manual_seed(0)
    with device.torch:
        made: Any = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=attn
        )
    model: PreTrainedModel = made.eval().requires_grad_(False)
    strayed = {str(each.device) for each in model.parameters()} - {str(model.device)}
    if strayed or model.device.type != device.torch.type or model.dtype != torch.bfloat16:
        raise RuntimeError(f"The model was made as {model.dtype} on {model.device}, {strayed}.")
    return model


def random_ids(model: PreTrainedModel, batch: int, length: int) -> Tensor:
    """Tokens of a prompt, the same for the same sizes."""
    generator = torch.Generator(device=model.device).manual_seed(0)
    return torch.randint(
        1, model.config.vocab_size, (batch, length), generator=generator, device=model.device
    )
