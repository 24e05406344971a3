"""Scissorhands: what was of little importance for a while will stay so."""

from typing import ClassVar

import torch
from jaxtyping import Bool, Float32
from pydantic import Field
from torch import Tensor

from kvcompress.policy import DecodePolicy, LayerView, NonNegativeInt, PositiveInt


def _less_than_an_even_share(attention: Tensor, seen: Tensor) -> Tensor:
    return (attention * seen < 1).to(torch.float32)


class ScissorhandsPolicy(DecodePolicy):
    """Evicts the rows that most often got less than an even share of attention of late.

    The last `history` queries each mark the rows to which they gave less than 1 / (rows they saw);
    the rows with most marks go, but for the `recent` newest.

    Source: Liu et al. 2023, arXiv:2305.17118, section 4, algorithm 2.
    Differs: `capacity` is what an eviction leaves and `interval` how many rows it evicts; the
    paper's budget is their sum, and it evicts half of it. Marks are set when rows are evicted, over
    the rows held then, which is the same as long as `history` does not reach back beyond the last
    eviction. A prompt is cut too, when it ends; marks are averaged over the query heads of a KV
    head, and layers have equal budgets unless `capacity` lists one for each.
    """

    name: ClassVar[str] = "scissorhands"
    shared_by_spans: ClassVar[frozenset[str]] = frozenset({"recent"})

    history: PositiveInt = Field(
        default=400, description="Last queries that set marks; at most `interval`."
    )
    recent: NonNegativeInt = Field(default=10, description="Newest rows that are always kept.")
    interval: PositiveInt = Field(
        default=400,
        description="Generated tokens between evictions; the cache grows by at most interval - 1 "
        "beyond its budget.",
    )

    def query_tokens(self, layer_idx: int, num_layers: int) -> int:
        """The history."""
        return self.history

    def protected_tokens(self, layer_idx: int, num_layers: int) -> int:
        """The newest rows."""
        return self.recent

    def protected(self, view: LayerView) -> Bool[Tensor, "1 1 held"]:
        """The newest rows."""
        return view.last(self.recent)

    def scores(self, view: LayerView) -> Float32[Tensor, "batch kv_heads held"]:
        """The fewer marks, the higher."""
        return -view.attention_received(weigh=_less_than_an_even_share)
