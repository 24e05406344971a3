"""SnapKV: the end of the prompt votes for what to keep of the rest."""

from typing import Annotated, ClassVar, Literal

from jaxtyping import Bool, Float32
from pydantic import AfterValidator, Field, model_validator
from torch import Tensor
from torch.nn import functional

from kvcompress.policy import LayerView, PerLayer, Policy
from kvcompress.tensors import GroupReduce

Pooling = Literal["avg", "max", "none"]


def pool_votes(
    votes: Float32[Tensor, "batch kv_heads kv_len"], kernel_size: int, pooling: Pooling
) -> Float32[Tensor, "batch kv_heads kv_len"]:
    """Votes of every position's neighbourhood, so that whole passages win instead of single points.

    Average pooling divides by `kernel_size` at the borders too, as the authors' code does; beyond
    the borders there are no votes.

    Source: Li et al. 2024, arXiv:2404.14469, section 4.
    """
    if pooling == "none" or votes.shape[-1] == 0:
        return votes
    pool = functional.avg_pool1d if pooling == "avg" else functional.max_pool1d
    pooled: Tensor = pool(votes, kernel_size, stride=1, padding=kernel_size // 2)
    return pooled


def odd(value: int | tuple[int, ...]) -> int | tuple[int, ...]:
    """Refuse even kernel sizes."""
    for size in value if isinstance(value, tuple) else (value,):
        if size % 2 == 0:
            raise ValueError(
                f"kernel_size must be odd, so that a position is at the centre of its own "
                f"neighbourhood; use {size - 1 or 1} or {size + 1}."
            )
    return value


class SnapKVPolicy(Policy):
    """Keeps the prompt's last tokens and, per KV head, what they attend to most.

    When a prompt ends, its last `window_size` queries (the observation window) vote with their
    attention; votes are summed over the window, combined over the query heads of a KV head, pooled
    over neighbours, and the best `capacity - window_size` rows stay beside the window itself.
    Generated tokens are all kept.

    Source: Li et al. 2024, arXiv:2404.14469, section 4; FasterDecoding/SnapKV, `update_kv`.
    Differs: votes are float32 throughout (the authors cast the softmax back to the model's dtype
    before summing, which makes ties in half precision). Rows are chosen per KV head, since that is
    what a cache stores (the authors repeat keys and values per query head first). Kept rows stay in
    position order (the authors' are in order of score). Padding gets and gives no votes (the
    authors ignore the mask). In a later turn the neighbours of a row are the rows that are left.
    """

    name: ClassVar[str] = "snapkv"
    per_layer: ClassVar[frozenset[str]] = frozenset({"capacity", "window_size", "kernel_size"})
    shared_by_spans: ClassVar[frozenset[str]] = frozenset({"window_size"})

    window_size: PerLayer = Field(
        default=32,
        description="Last tokens of the prompt that vote and are always kept; below capacity.",
    )
    kernel_size: Annotated[PerLayer, AfterValidator(odd)] = Field(
        default=5, description="Width of the pooling over neighbouring positions; odd."
    )
    pooling: Pooling = Field(
        default="avg",
        description="How votes are pooled: avg as in the authors' defaults, max as in their "
        "LongBench settings, none.",
    )
    group_reduce: GroupReduce = Field(
        default="mean",
        description="How the votes of the query heads that share a KV head are combined, before "
        "pooling.",
    )

    @model_validator(mode="after")
    def _window_fits(self) -> "SnapKVPolicy":
        if self.capacity is None:
            return self
        capacities = self.capacity if isinstance(self.capacity, tuple) else (self.capacity,)
        windows = self.window_size if isinstance(self.window_size, tuple) else (self.window_size,)
        if 1 < len(capacities) != len(windows) > 1:
            raise ValueError(
                f"capacity lists {len(capacities)} layers and window_size {len(windows)}; lists "
                "must have one value for each layer."
            )
        for layer in range(max(len(capacities), len(windows))):
            capacity = capacities[layer % len(capacities)]
            window = windows[layer % len(windows)]
            if window >= capacity:
                smaller = f", or window_size < {capacity}" if capacity > 1 else ""
                raise ValueError(
                    f"window_size={window} must be smaller than capacity={capacity}, which "
                    f"includes the window. Use capacity > {window}{smaller}."
                )
        return self

    def query_tokens(self, layer_idx: int, num_layers: int) -> int:
        """The window."""
        window: int = self.at("window_size", layer_idx)
        return window

    def protected_tokens(self, layer_idx: int, num_layers: int) -> int:
        """The window."""
        window: int = self.at("window_size", layer_idx)
        return window

    def protected(self, view: LayerView) -> Bool[Tensor, "1 1 held"]:
        """The last `window_size` rows."""
        return view.last(self.at("window_size", view.layer_idx))

    def scores(self, view: LayerView) -> Float32[Tensor, "batch kv_heads held"]:
        """Pooled votes for the rows before the window; 0 for the window, which is protected."""
        votes = view.attention_received(group_reduce=self.group_reduce)
        window = min(self.at("window_size", view.layer_idx), view.held)
        kernel_size = self.at("kernel_size", view.layer_idx)
        pooled = pool_votes(votes[..., : view.held - window], kernel_size, self.pooling)
        return functional.pad(pooled, (0, window))
