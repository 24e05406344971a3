"""Fair eviction: the spans of a prompt share its budget by their lengths (`fair` of a policy).

A policy that judges a prompt as a whole may take most of what it evicts from one part of it, such
as the first of two instructions. Here every span is judged as if it were a prompt of its own.

Source: arXiv:2510.00231, algorithm 1.
Differs: any number of spans, shares rounded by the method of Sainte-Laguë (the authors have two,
and round the first one down). A span's attention is normalized over its own rows, as in a prompt of
its own (theirs over the whole prompt). A window such as SnapKV's is divided by the spans' lengths
(theirs into halves).
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvcompress.errors import PolicyConfigError, UnsupportedModeError
from kvcompress.policy import LayerView, Policy
from kvcompress.selection import Judgement, select_rows
from kvcompress.tensors import newest


@dataclass(frozen=True)
class Span:
    """A part of a prompt, and what judges it."""

    start: int
    """First token, padding not counted."""
    end: int
    policy: Policy
    budget: int
    """Rows that stay."""


@functools.lru_cache(maxsize=64)
def shares(total: int, lengths: tuple[int, ...], least: tuple[int, ...]) -> tuple[int, ...]:
    """A total in whole parts that are in proportion to `lengths`, which they never exceed.

    One by one to whoever has fewest for its length (Sainte-Laguë), so that no part shrinks when the
    total grows. Of two lengths each gets its exact share, rounded.

    Args:
        total: At least the sum of `least`, and at most that of `lengths`.
        lengths: What the parts are in proportion to.
        least: What a part has at least.
    """
    parts = list(least)
    for _ in range(total - sum(least)):
        room = [number for number, part in enumerate(parts) if part < lengths[number]]
        parts[max(room, key=lambda number: lengths[number] / (2 * parts[number] + 1))] += 1
    return tuple(parts)


def divide(
    policy: Policy, tokens: int, budget: int, layer_idx: int, num_layers: int, passing: int = 0
) -> list[Span]:
    """The spans of a prompt, and the budget of each; what `fair` leaves out are spans too.

    A span has at least the tokens of it that `protect` names, and those that the policy protects in
    it or, if none, one.

    Args:
        policy: With `fair`.
        tokens: Real tokens of the prompt, more than `budget`.
        budget: Rows of it that stay.
        layer_idx: Among the hosted layers.
        num_layers: Hosted layers.
        passing: How many of the newest rows stay in any case.

    Raises:
        PolicyConfigError: The spans are not in the prompt, or the budget has no room for them.
    """
    if policy.spans[-1][0] >= tokens:
        raise PolicyConfigError(
            f"{policy}: the span {policy.fair[-1]} begins behind the prompt's {tokens} tokens. "
            "Spans are counted in tokens of this prompt; role_ranges and text_ranges find them."
        )
    cuts = sorted({0, tokens, *(min(bound, tokens) for span in policy.spans for bound in span)})
    bounds = list(itertools.pairwise(cuts))
    lengths = tuple(end - start for start, end in bounds)
    fields: list[dict[str, int | float]] = [{"keep_ratio": 1.0} for _ in bounds]
    for name in sorted(policy.shared_by_spans):
        total = policy.at(name, layer_idx)
        least = (min(total, 1),) * len(bounds)
        parts = shares(min(max(total, sum(least)), tokens), lengths, least)
        for own, part in zip(fields, parts, strict=True):
            own[name] = part
    # Without a capacity of its own, which a span's budget stands for.
    policies = [policy.model_copy(update=own) for own in fields]
    named = [
        sum(max(0, min(end, last) - max(start, first)) for first, last in policy.ranges)
        for start, end in bounds
    ]
    named[-1] += passing
    fixed = [max(part.protected_tokens(layer_idx, num_layers), 1) for part in policies]
    least = tuple(map(min, map(sum, zip(named, fixed, strict=True)), lengths))
    if sum(least) > budget:
        raise PolicyConfigError(
            f"{policy}: {budget} rows in layer {layer_idx} have no room for the {len(bounds)} "
            f"spans of a prompt of {tokens} tokens: the rows that each keeps in any case are "
            f"{sum(least)}. Use a larger budget, smaller windows or fewer spans."
        )
    budgets = shares(budget, lengths, least)
    return [
        Span(start, end, part, own)
        for (start, end), part, own in zip(bounds, policies, budgets, strict=True)
    ]


def judge_spans(
    policy: Policy, view: LayerView, pads: Sequence[int], passing: int = 0
) -> Judgement:
    """Ask a policy span by span; the rows that stay score 1, the others 0.

    Args:
        policy: With `fair`.
        view: Of the first prompt, when it ends; with all of its queries, if the policy reads any.
        pads: Padding of every row of the batch, or one number for all.
        passing: How many of the newest rows stay in any case.

    Raises:
        PolicyConfigError: See `divide`.
        UnsupportedModeError: Rows or queries of the prompt are gone.
    """
    layer = view.layer_idx, view.num_layers
    held, queries = view.held, view.query.shape[2]
    if held != view.seen or (policy.prompt_query_tokens(*layer) and queries != held):
        raise UnsupportedModeError(
            f"{policy}: the spans of a prompt are judged by their own rows and queries, and of "
            f"{view.seen} tokens {held} rows and {queries} queries are left. Read the prompt under "
            "this policy, and evict nothing of it before it ends; or leave fair out."
        )
    scores = view.key.new_zeros(len(view.key), view.kv_heads, held, dtype=torch.float32)
    for pad in dict.fromkeys(pads):
        if held - pad <= view.budget:
            continue  # all of it stays
        rows = None
        if len(set(pads)) > 1:
            alike = [row for row, own in enumerate(pads) if own == pad]
            rows = torch.tensor(alike, device=scores.device)
        for span in divide(policy, held - pad, view.budget, *layer, passing):
            own = _view_of(span, view, pad, rows)
            stays = newest(own.held, passing, scores.device) if span.end == held - pad else None
            index = select_rows(span.policy, own, span.budget, stays)
            chosen = torch.zeros_like(own.key[:, : view.kv_heads, :, 0], dtype=torch.float32)
            chosen.scatter_(2, index, 1.0)
            place = slice(pad + span.start, pad + span.end)
            scores[slice(None) if rows is None else rows, :, place] = chosen
    return Judgement(scores, (), ~view.valid if view.padded else None)


def _view_of(span: Span, view: LayerView, pad: int, rows: Tensor | None) -> LayerView:
    """What a policy sees of one span of some rows of the batch: a prompt that ends with it."""

    def cut(tensor: Tensor) -> Tensor:
        own = tensor[:, :, pad + span.start : pad + span.end]
        return own if rows is None else own.index_select(0, rows)

    key = cut(view.key)
    positions = torch.arange(span.start, span.end, device=key.device)
    seen = replace(
        view,
        query=cut(view.query),
        key=key,
        value=cut(view.value),
        locate=lambda: positions.expand(len(key), view.kv_heads, -1),
        seen=pad + span.end,
        padded=False,
        budget=span.budget,
        state={},
    )
    state = span.policy.observe(seen) if "observe" in span.policy.needs else {}
    wanted = span.policy.query_tokens(view.layer_idx, view.num_layers)
    last = seen.query[:, :, max(0, seen.query.shape[2] - wanted) :]
    return replace(seen, query=last, state=state)
