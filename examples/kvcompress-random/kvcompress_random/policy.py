"""Random eviction: the baseline that a policy has to beat."""

from typing import ClassVar, TypeVar

import torch
from pydantic import Field

from kvcompress import LayerView, Policy

Number = TypeVar("Number", int, torch.Tensor)


def mix(number: Number) -> Number:
    """A hash of 32 bits; its products fit into int64, so every device computes the same."""
    number = (number + 0x9E3779B9) & 0xFFFFFFFF
    for _ in range(2):
        number = ((number ^ (number >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    return number ^ (number >> 16)


class RandomPolicy(Policy):
    """Keeps random rows, drawn anew for every KV head and layer."""

    name: ClassVar[str] = "random"
    across_heads: ClassVar[bool] = True  # heads are told apart by their number
    seed: int = Field(default=0, ge=0, lt=2**32, description="Another seed, other rows.")

    def scores(self, view: LayerView) -> torch.Tensor:
        """A hash of layer, head and position: no draw, which would depend on batch and padding."""
        heads = torch.arange(view.kv_heads, device=view.positions.device)[:, None]
        layer = mix(mix(self.seed) ^ view.layer_idx)
        hashed = mix(mix(heads ^ layer) ^ view.positions)  # batch kv_heads held
        return (hashed >> 8).float()  # float32 holds 24 bits exactly
