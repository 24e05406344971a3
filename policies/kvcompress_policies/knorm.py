"""K-norm: keys with a small norm tend to be attended to most."""

from typing import ClassVar

import torch
from jaxtyping import Bool, Float32
from pydantic import Field
from torch import Tensor

from kvcompress.policy import DecodePolicy, LayerView, NonNegativeInt
from kvcompress.tensors import reduce_groups


class KNormPolicy(DecodePolicy):
    """Keeps the rows whose keys have the smallest norm; reads no attention.

    Where a model normalizes its keys (Qwen 3, Gemma 3) they differ little in norm, and equal tokens
    have equal norms in the first layer but for rounding; there the choice says little.

    Source: Devoto et al. 2024, arXiv:2406.11430, section 3.
    Differs: evicts while decoding too, by the same rule; the authors' code leaves the kept rows in
    order of their norm, ours stay in position order.
    """

    name: ClassVar[str] = "knorm"
    any_order: ClassVar[bool] = True
    shared_by_spans: ClassVar[frozenset[str]] = frozenset({"protect_recent"})

    protect_recent: NonNegativeInt = Field(
        default=0,
        description="Newest rows that are always kept; below capacity. 0 is the paper's rule, "
        "under which even the newest token may go.",
    )

    def protected_tokens(self, layer_idx: int, num_layers: int) -> int:
        """The newest rows."""
        return self.protect_recent

    def protected(self, view: LayerView) -> Bool[Tensor, "#batch #kv_heads held"] | None:
        """The newest rows."""
        if not self.protect_recent:
            return None
        return view.last(self.protect_recent)

    def scores(self, view: LayerView) -> Float32[Tensor, "batch kv_heads held"]:
        """The negative norm; its mean over the heads where latents were expanded."""
        norms = torch.linalg.vector_norm(view.key, dim=-1, dtype=torch.float32)
        return -reduce_groups(norms, view.kv_heads, "mean")
