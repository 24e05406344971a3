"""TOVA: the newest query alone decides what stays."""

from typing import ClassVar

import torch
from jaxtyping import Bool, Float32
from torch import Tensor

from kvcompress.policy import DecodePolicy, LayerView
from kvcompress.tensors import attention_received


class TOVAPolicy(DecodePolicy):
    """Keeps the rows that the newest query attends to most, the same rows in all heads of a layer.

    Source: Oren et al. 2024, arXiv:2401.06104, section 4.
    Differs: the newest row itself is always kept (the authors' code lets it go when other rows
    get more attention); the prompt is cut once, when it ends.
    """

    name: ClassVar[str] = "tova"

    def query_tokens(self, layer_idx: int, num_layers: int) -> int:
        """The newest."""
        return 1

    def protected_tokens(self, layer_idx: int, num_layers: int) -> int:
        """The newest."""
        return 1

    def protected(self, view: LayerView) -> Bool[Tensor, "batch kv_heads held"]:
        """The newest row."""
        rows = torch.arange(view.held, device=view.key.device)
        return (rows == view.held - 1).expand_as(view.valid)

    def scores(self, view: LayerView) -> Float32[Tensor, "batch kv_heads held"]:
        """Attention of the newest query, its mean over all query heads."""
        received = attention_received(
            view.query,
            view.key,
            view.valid,
            scaling=view.scaling,
            softcap=view.softcap,
            sinks=view.sinks,
        )
        # Groups are of equal size, so the mean of their means is the mean over all query heads.
        return received.mean(dim=1, keepdim=True).expand_as(received)
