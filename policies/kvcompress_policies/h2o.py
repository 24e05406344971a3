"""H2O: rows that have been attended to most so far, and the most recent ones."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from jaxtyping import Bool, Float32
from pydantic import Field
from torch import Tensor

from kvcompress.policy import DecodePolicy, LayerView


class H2OPolicy(DecodePolicy):
    """Keeps heavy hitters (rows with most attention, over all queries so far) and recent rows.

    Attention is summed as queries go by, over prompt and generated tokens alike, in blocks beside
    any attention backend, so that no prompt x prompt matrix is ever held; it does cost a prompt the
    queries x keys product a second time.

    Source: Zhang et al. 2023, arXiv:2306.14048, section 4, algorithm 1.
    Differs: sums are per KV head, the mean over its query heads, and in float32. A prompt is
    attended to as a whole and cut once, when it ends (the paper evicts token by token there too).
    """

    name: ClassVar[str] = "h2o"
    any_order: ClassVar[bool] = True
    needs: ClassVar = frozenset({"observe"})

    recent_ratio: float = Field(
        default=0.5,
        ge=0,
        lt=1,
        description="Share of the budget for the most recent rows, rounded; the rest is for heavy "
        "hitters.",
    )
    normalize: Literal["none", "observers"] = Field(
        default="none",
        description="observers divides the attention that a row got by the number of queries that "
        "could see it; none, the paper's rule, favours early rows.",
    )

    def recent(self, budget: int) -> int:
        """Recent rows of a budget."""
        return round(budget * self.recent_ratio)

    def protected_tokens(self, layer_idx: int, num_layers: int) -> int:
        """The recent rows; 0 under `keep_ratio`, where they are a share of what is kept."""
        return 0 if self.capacity is None else self.recent(self.at("capacity", layer_idx))

    def protected(self, view: LayerView) -> Bool[Tensor, "#batch #kv_heads held"]:
        """The recent rows."""
        return view.last(self.recent(view.budget))

    def observe(self, view: LayerView) -> Mapping[str, Tensor]:
        """Add what this forward's queries attend to."""
        received = view.attention_received()
        before = view.state.get("received")
        return {"received": received if before is None else received + before}

    def scores(self, view: LayerView) -> Float32[Tensor, "batch kv_heads held"]:
        """Attention received so far."""
        received = view.state["received"]
        if self.normalize == "none":
            return received
        # A row is seen by its own query and by all later ones.
        observers = view.positions[..., -1:] + 1 - view.positions
        return received / observers
