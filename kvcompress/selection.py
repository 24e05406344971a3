"""From a policy's scores to the rows that stay: protection, padding, top-k."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor

from kvcompress.errors import PolicyConfigError, UnsupportedModeError
from kvcompress.policy import LayerView, Policy
from kvcompress.tensors import top_positions


def batch_budget(
    policy: Policy,
    lengths: Sequence[int],
    layer_idx: int,
    num_layers: int,
    *,
    grows: bool = False,
) -> int:
    """Rows that a layer keeps of a batch whose rows have `lengths` real tokens.

    With `grows`, the budget is for tokens to come too, so that it counts beyond a row's length.

    Raises:
        UnsupportedModeError: The lengths differ, and a row alone would keep another number.
        PolicyConfigError: The budget has no room for the rows that are always kept.
    """
    longest = max(lengths)
    budget = policy.budget(longest, layer_idx, num_layers)
    fixed = max(policy.fixed_tokens(layer_idx, num_layers), 1)
    if budget < fixed:
        raise PolicyConfigError(
            f"{policy}: budget() gave {budget} rows for layer {layer_idx} and a prompt of "
            f"{longest} tokens; it must be at least {fixed}, the rows that are always kept. Use a "
            "larger budget, or protect fewer."
        )
    for length in set(lengths) - {longest}:
        alone, together = policy.budget(length, layer_idx, num_layers), budget
        if not grows:
            alone, together = min(alone, length), min(together, length)
        if alone != together:
            raise UnsupportedModeError(
                f"{policy} gives the rows of this batch different budgets in layer {layer_idx}: "
                f"their prompts have {min(lengths)} to {longest} tokens. Use a fixed capacity in "
                "every layer, or a batch of equal lengths."
            )
    return budget


@dataclass(frozen=True)
class Judgement:
    """What a policy says about the rows of one layer."""

    scores: Float32[Tensor, "batch kv_heads held"]
    always: tuple[Bool[Tensor, "#batch #kv_heads held"], ...]
    """Rows that stay whatever they score."""
    padding: Bool[Tensor, "batch kv_heads held"] | None


def judge(
    policy: Policy,
    view: LayerView,
    keep_always: Bool[Tensor, "#batch #kv_heads held"] | None = None,
) -> Judgement:
    """Ask a policy.

    Raises:
        PolicyConfigError: The policy returned another dtype or shape than it must.
    """
    scores = policy.scores(view)
    expected = (view.key.shape[0], view.kv_heads, view.held)
    if scores.dtype != torch.float32 or scores.shape != expected:
        raise PolicyConfigError(
            f"{policy.name}: scores() returned {scores.dtype} {tuple(scores.shape)}; it must "
            f"return torch.float32 {expected} (batch, kv_heads, held)."
        )
    always = (policy.protected(view), keep_always, _in_ranges(policy, view))
    return Judgement(
        scores,
        tuple(rows for rows in always if rows is not None),
        ~view.valid if view.padded else None,
    )


def _in_ranges(policy: Policy, view: LayerView) -> Bool[Tensor, "batch kv_heads held"] | None:
    """The rows of the tokens that the policy's `protect` names."""
    inside = None
    for start, end in policy.ranges:
        own = (view.positions >= start) & (view.positions < end)
        inside = own if inside is None else inside | own
    return inside


def final_scores(
    judgements: Sequence[Judgement],
) -> Float32[Tensor, "layers batch kv_heads held"]:
    """Scores of layers that are alike, `+inf` for rows that stay and `-inf` for padding."""
    # Only protection and padding may be infinite, else a real row could tie with padding; NaN, as
    # overflowing half precision gives, has no place in an order.
    bound = torch.finfo(torch.float32).max
    scores = torch.stack([each.scores for each in judgements])
    scores.nan_to_num_(nan=-bound, posinf=bound, neginf=-bound)
    for masks in zip(*(each.always for each in judgements), strict=True):
        scores.masked_fill_(_together(masks, scores), float("inf"))
    if judgements[0].padding is not None:
        padding = torch.stack([each.padding for each in judgements if each.padding is not None])
        scores.masked_fill_(padding, float("-inf"))
    return scores


def _together(masks: Sequence[Tensor], scores: Tensor) -> Tensor:
    """One mask for all layers; often it is the same for each of them."""
    if all(mask is masks[0] for mask in masks):
        return masks[0]
    return torch.stack([mask.expand(scores.shape[1:]) for mask in masks])


def select_rows(
    policy: Policy,
    view: LayerView,
    kept: int,
    keep_always: Bool[Tensor, "#batch #kv_heads held"] | None = None,
) -> Int64[Tensor, "batch kv_heads {kept}"]:
    """Columns of the rows that a policy keeps, ascending; padding goes before any real row."""
    return top_positions(final_scores([judge(policy, view, keep_always)])[0], kept)
