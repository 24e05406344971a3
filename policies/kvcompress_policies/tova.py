"""TOVA: the newest query alone decides what stays."""

from typing import ClassVar

from jaxtyping import Bool, Float32
from torch import Tensor

from kvcompress.policy import DecodePolicy, LayerView


class TOVAPolicy(DecodePolicy):
    """Keeps the rows that the newest query attends to most, the same rows in all heads of a layer.

    Source: Oren et al. 2024, arXiv:2401.06104, section 4.
    Differs: the newest row itself is always kept (the authors' code lets it go when other rows
    get more attention); the prompt is cut once, when it ends.
    """

    name: ClassVar[str] = "tova"
    any_order: ClassVar[bool] = True
    across_heads: ClassVar[bool] = True

    def query_tokens(self, layer_idx: int, num_layers: int) -> int:
        """The newest."""
        return 1

    def protected_tokens(self, layer_idx: int, num_layers: int) -> int:
        """The newest."""
        return 1

    def protected(self, view: LayerView) -> Bool[Tensor, "#batch #kv_heads held"]:
        """The newest row."""
        return view.last(1)

    def scores(self, view: LayerView) -> Float32[Tensor, "batch kv_heads held"]:
        """Attention of the newest query, its mean over all query heads."""
        return view.attention_received(whole_layer=True).expand(-1, view.kv_heads, -1)
