"""StreamingLLM: the first tokens, where attention sinks lie, and the most recent ones."""

from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float32
from pydantic import Field
from torch import Tensor

from kvcompress.policy import DecodePolicy, LayerView, NonNegativeInt


class StreamingLLMPolicy(DecodePolicy):
    """Keeps the first tokens of a row (attention sinks) and the most recent ones.

    With `positions="cache"` the sinks follow the stream: their keys are rotated so that every kept
    row is as far from the newest as its place in the cache, and a stream may be longer than the
    context that the model was trained on.

    Source: Xiao et al. 2023, arXiv:2309.17453, section 3.2.
    Differs: the default keeps original positions, which works on every model. In cache positions
    the authors store unrotated keys and rotate all of them at every step from position 0 on; ours
    leave the recent keys where they are and move the sinks, which gives the same distances. A
    prompt is attended to as a whole and cut when it ends; feed a long stream in pieces. Padding is
    no sink.
    """

    name: ClassVar[str] = "streaming_llm"
    any_order: ClassVar[bool] = True

    n_sink: NonNegativeInt = Field(
        default=4, description="First tokens that are always kept; below capacity."
    )
    positions: Literal["original", "cache"] = Field(
        default="original",
        description="Where kept keys are: original leaves them, cache closes the gap behind the "
        "sinks by the model's own rotary code.",
    )

    def protected_tokens(self, layer_idx: int, num_layers: int) -> int:
        """The sinks."""
        return self.n_sink

    def reindexed_tokens(self, layer_idx: int, num_layers: int) -> int:
        """The sinks, with cache positions."""
        return self.n_sink if self.positions == "cache" else 0

    def protected(self, view: LayerView) -> Bool[Tensor, "batch kv_heads held"]:
        """The sinks."""
        return view.positions < self.n_sink

    def scores(self, view: LayerView) -> Float32[Tensor, "batch kv_heads held"]:
        """The later, the higher: minus the age, which stays exact however long the stream is."""
        return (view.positions - view.seen).to(torch.float32)
