"""From a policy's scores to the rows that stay: protection, padding, top-k."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor

from kvcompress.errors import PolicyConfigError, UnsupportedModeError
from kvcompress.policy import LayerView, Policy
from kvcompress.tensors import top_positions


def batch_budget(policy: Policy, lengths: Sequence[int], layer_idx: int, num_layers: int) -> int:
    """Rows that a layer keeps of a batch whose rows have `lengths` real tokens.

    Raises:
        UnsupportedModeError: The lengths differ, and a row alone would keep another number.
    """
    longest = max(lengths)
    budget = policy.budget(longest, layer_idx, num_layers)
    for length in set(lengths) - {longest}:
        if min(policy.budget(length, layer_idx, num_layers), length) != min(budget, length):
            raise UnsupportedModeError(
                f"{policy} gives the rows of this batch different budgets in layer {layer_idx}: "
                f"their prompts have {min(lengths)} to {longest} tokens. Use a fixed capacity in "
                "every layer, or a batch of equal lengths."
            )
    return budget


def final_scores(
    policy: Policy,
    view: LayerView,
    keep_always: Bool[Tensor, "#batch #kv_heads held"] | None = None,
) -> Float32[Tensor, "batch kv_heads held"]:
    """A policy's scores with `+inf` for protected rows and `-inf` for padding.

    Raises:
        PolicyConfigError: The policy returned another dtype or shape than it must.
    """
    scores = policy.scores(view)
    if scores.dtype != torch.float32 or scores.shape != view.positions.shape:
        raise PolicyConfigError(
            f"{policy.name}: scores() returned {scores.dtype} {tuple(scores.shape)}; it must "
            f"return torch.float32 {tuple(view.positions.shape)} (batch, kv_heads, held)."
        )
    # Only protection and padding may be infinite, else a real row could tie with padding; NaN, as
    # overflowing half precision gives, has no place in an order.
    bound = torch.finfo(torch.float32).max
    scores = scores.nan_to_num(nan=-bound, posinf=bound, neginf=-bound)
    for rows in (policy.protected(view), keep_always):
        if rows is not None:
            scores = scores.masked_fill(rows, float("inf"))
    return scores.masked_fill(~view.valid, float("-inf")) if view.padded else scores


def select_rows(
    policy: Policy,
    view: LayerView,
    kept: int,
    keep_always: Bool[Tensor, "#batch #kv_heads held"] | None = None,
) -> Int64[Tensor, "batch kv_heads {kept}"]:
    """Columns of the rows that a policy keeps, ascending; padding goes before any real row."""
    return top_positions(final_scores(policy, view, keep_always), kept)
