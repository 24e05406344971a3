"""Pure functions on keys, queries and scores: the arithmetic that policies and core share."""

import functools
import os
from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Bool, Float, Float32, Int, Int64
from torch import Tensor

from kvcompress.errors import PolicyConfigError, ShapeError

GroupReduce = Literal["mean", "max", "sum"]

Weigh = Callable[[Tensor, Tensor], Tensor]

_CPU_BLOCK = 16 * 2**20
"""Bytes of a block on the CPU: the system maps and clears larger tensors anew for every block."""


@functools.cache
def scoring_bytes() -> int:
    """Bound on the temporary memory of scoring: `KVCOMPRESS_SCORING_MIB` MiB, 64 if it is not set.

    Raises:
        PolicyConfigError: It is no whole number of MiB above 0.
    """
    text = os.environ.get("KVCOMPRESS_SCORING_MIB", "64")
    if not text.isdecimal() or int(text) == 0:
        raise PolicyConfigError(
            f"KVCOMPRESS_SCORING_MIB={text!r} must be a whole number of MiB above 0; 64 is the "
            "default."
        )
    return int(text) * 2**20


@functools.lru_cache(maxsize=32)
def newest(held: int, count: int, device: torch.device) -> Bool[Tensor, "1 1 held"]:
    """True for the last `count` of `held` rows. The same tensor for the same arguments."""
    with torch.inference_mode(False):  # else it could not be used outside
        rows = torch.arange(held, device=device)
        return (rows >= held - count)[None, None]


def newest_of(columns: Int[Tensor, "*lead held"], count: int) -> Bool[Tensor, "*lead held"]:
    """True for the rows with the `count` highest columns; rows in any order."""
    held = columns.shape[-1]
    if count >= held:
        return torch.ones_like(columns, dtype=torch.bool)
    return columns > columns.kthvalue(held - count, dim=-1, keepdim=True).values


def row_numbers(
    index: Int64[Tensor, "*lead batch kv_heads kept"], kv_len: int
) -> Int64[Tensor, "*lead batch*kv_heads*kept"]:
    """Numbers of the chosen rows when the rows of all heads of a batch are counted through."""
    batch, heads = index.shape[-3:-1]
    starts = torch.arange(0, batch * heads * kv_len, kv_len, device=index.device)
    return (index + starts.view(batch, heads, 1)).flatten(-3)


def gather_rows(
    rows: Float[Tensor, "batch kv_heads kv_len dim"],
    index: Int64[Tensor, "batch kv_heads kept"],
) -> Float[Tensor, "batch kv_heads kept dim"]:
    """The chosen rows of every head, in the order of `index`.

    Whole rows are copied, which on the CPU is many times faster than `torch.gather`, which copies
    single numbers.
    """
    numbers = row_numbers(index, rows.shape[2])
    return rows.flatten(0, 2).index_select(0, numbers).view(*index.shape, rows.shape[3])


def top_positions(
    scores: Float32[Tensor, "batch kv_heads kv_len"], kept: int
) -> Int64[Tensor, "batch kv_heads {kept}"]:
    """Columns of the `kept` highest scores of every head, ascending; the earliest among equals.

    A defined choice among equals makes a row of a batch equal to the row alone: pooled votes have
    plateaus, and `torch.topk` breaks ties by where in memory they lie. `kept` is at least 1, and
    scores are not NaN.
    """
    cut = scores.topk(kept, dim=-1, sorted=False).values.amin(dim=-1, keepdim=True)
    above, equal = scores > cut, scores == cut
    missing = kept - above.sum(dim=-1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(dim=-1) <= missing))
    # Every chosen column goes to its rank, the others to a last slot that is cut off: ascending
    # without a sort, and without asking the device how many there are.
    rank = torch.where(chosen, chosen.cumsum(dim=-1) - 1, kept)
    columns = torch.arange(scores.shape[-1], device=scores.device).expand_as(rank)
    out = columns.new_empty(*scores.shape[:-1], kept + 1)
    return out.scatter_(-1, rank, columns)[..., :kept]


def lowest(
    scores: Float32[Tensor, "*lead kv_len"], columns: Int[Tensor, "*lead kv_len"]
) -> Int64[Tensor, "*lead 1"]:
    """The row with the lowest score; among equals the one of the latest column.

    What `top_positions` leaves out when all but one row are kept, for rows in any order.
    """
    ties = scores == scores.amin(dim=-1, keepdim=True)
    return torch.where(ties, columns, -1).argmax(dim=-1, keepdim=True)


def reduce_groups(
    scores: Float[Tensor, "*lead heads kv_len"], kv_heads: int, how: GroupReduce
) -> Float[Tensor, "*lead {kv_heads} kv_len"]:
    """Scores per KV head from scores per query head; query head h belongs to KV head h // group.

    Raises:
        ShapeError: `heads` is no multiple of `kv_heads`.
    """
    heads = scores.shape[-2]
    if heads == kv_heads:
        return scores
    if heads % kv_heads:
        raise ShapeError(f"{heads} query heads cannot be shared evenly by {kv_heads} KV heads.")
    grouped = scores.reshape(*scores.shape[:-2], kv_heads, heads // kv_heads, scores.shape[-1])
    if how == "max":
        return grouped.amax(dim=-2)
    return grouped.mean(dim=-2) if how == "mean" else grouped.sum(dim=-2)


def attention_received(
    query: Float[Tensor, "batch heads q_len head_dim"],
    key: Float[Tensor, "batch key_heads kv_len head_dim"],
    valid: Bool[Tensor, "batch kv_heads kv_len"] | None,
    *,
    scaling: float,
    kv_heads: int | None = None,
    group_reduce: GroupReduce = "mean",
    softcap: float | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
    weigh: Weigh | None = None,
    max_bytes: int | None = None,
) -> Float32[Tensor, "batch cache_heads kv_len"]:
    """Attention that each cached row gets from the last queries, summed over the queries.

    Softmax runs over all rows, causal among the last `q_len` of them, and in float32 whatever the
    input dtype. Padding gets nothing and gives nothing: a query that is itself padding does not
    vote. Computed in blocks of heads and queries, so that logits of all heads are never alive
    together. Policies call it by `LayerView.attention_received`.

    Args:
        query: After RoPE; the queries of the last `q_len` rows, oldest first.
        key: After RoPE, oldest first.
        valid: False for padding; None if there is none.
        scaling: Factor on the logits, 1/sqrt(head_dim) in most models.
        kv_heads: Heads of the cache, if not those of `valid` or `key`. Fewer than `key` has where
            the cache stores latents (MLA) and the keys were expanded per query head.
        group_reduce: How the query heads of one KV head are combined, after the sum over queries.
        softcap: Logits become `softcap * tanh(logits / softcap)` first (Gemma 2).
        sinks: A learned logit per query head that only enters the denominator (gpt-oss).
        weigh: What to sum instead of the attention itself, from a block of it (queries x rows in
            the last two dimensions) and the number of rows that each query sees (queries x 1).
        max_bytes: Bound on the temporary memory; if None `scoring_bytes()`, on the CPU at most
            16 MiB. At least one query of one head is held.

    Raises:
        ShapeError: Head counts do not divide, or there are more queries than rows.
    """
    batch, heads, q_len, _ = query.shape
    key_heads, kv_len = key.shape[1:3]
    if kv_heads is None:
        kv_heads = key_heads if valid is None else valid.shape[1]
    if heads % key_heads or key_heads % kv_heads:
        raise ShapeError(
            f"{heads} query heads, {key_heads} key heads and {kv_heads} cache heads do not divide."
        )
    if q_len > kv_len:
        raise ShapeError(f"{q_len} queries for {kv_len} rows: give the last queries only.")
    group = heads // kv_heads
    # Logits of one KV head's group for one query with the softmax or what `weigh` makes of them and
    # the mask, and the float32 copy of the head's keys.
    query_bytes = (4 * group * (2 if weigh is None else 3) + 1) * kv_len
    key_bytes = 0 if key.dtype == torch.float32 else 4 * kv_len * key.shape[-1]
    key_bytes *= key_heads // kv_heads
    per_head = max(key_bytes + query_bytes * q_len, 1)
    if max_bytes is None:
        max_bytes = scoring_bytes()
        if key.device.type == "cpu":
            max_bytes = min(max_bytes, _CPU_BLOCK)
    if batch * kv_heads * per_head <= max_bytes:
        if q_len == 1 and valid is None and softcap is None and sinks is None and weigh is None:
            return reduce_groups(_newest_attention(query, key, scaling), kv_heads, group_reduce)
        block = _attention_block(
            query, key.float(), valid, kv_heads, scaling, softcap, sinks, weigh, kv_len
        )
        return reduce_groups(block, kv_heads, group_reduce)
    heads_at_once = max(1, min(kv_heads, max_bytes // per_head))
    queries_at_once, rows_at_once = q_len, kv_len
    if heads_at_once == 1:
        if 2 * key_bytes > max_bytes:
            # The copy would leave too little for the logits: piece by piece, for every block.
            rows_at_once = max(1, kv_len * max_bytes // (4 * key_bytes))
            key_bytes = max_bytes // 4
        queries_at_once = min(q_len, max(1, (max_bytes - key_bytes) // query_bytes))
    out = torch.zeros(batch, kv_heads, kv_len, dtype=torch.float32, device=key.device)
    for row in range(batch):
        for first in range(0, kv_heads, heads_at_once):
            last = min(first + heads_at_once, kv_heads)
            of_keys = slice(first * key_heads // kv_heads, last * key_heads // kv_heads)
            of_queries = slice(first * group, last * group)
            keys = key[row : row + 1, of_keys]
            if rows_at_once == kv_len:
                keys = keys.float()
            received = out.new_zeros(1, (last - first) * group, kv_len)
            for start in range(0, q_len, queries_at_once):
                stop = min(start + queries_at_once, q_len)
                seen = kv_len - q_len + stop  # later rows are hidden from all of these queries
                received[..., :seen] += _attention_block(
                    query[row : row + 1, of_queries, start:stop],
                    keys[:, :, :seen],
                    None if valid is None else valid[row : row + 1, first:last, :seen],
                    last - first,
                    scaling,
                    softcap,
                    None if sinks is None else sinks[of_queries],
                    weigh,
                    rows_at_once,
                )
            out[row : row + 1, first:last] = reduce_groups(received, last - first, group_reduce)
            del keys  # before the next block makes its own
    return out


def _newest_attention(query: Tensor, key: Tensor, scaling: float) -> Tensor:
    """Attention of one query that sees all rows, batch x query heads x kv_len.

    What most policies ask for at every step of decode, in as few operations as it takes.
    """
    batch, heads, _, dim = query.shape
    key_heads, kv_len = key.shape[1:3]
    grouped = (query.float() * scaling).reshape(batch * key_heads, -1, dim)
    keys = key.float().reshape(batch * key_heads, kv_len, dim)
    logits = torch.bmm(grouped, keys.transpose(1, 2))
    return logits.softmax(dim=-1).view(batch, heads, kv_len)


def _attention_block(
    query: Tensor,
    key: Tensor,
    visible: Tensor | None,
    kv_heads: int,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
    weigh: Weigh | None,
    rows_at_once: int,
) -> Tensor:
    """Attention, summed over the queries of the last rows: batch x query heads x kv_len.

    Keys in half precision are widened so many rows at once.
    """
    batch, heads, q_len, dim = query.shape
    key_heads, kv_len = key.shape[1:3]
    # The query heads that share a key head are multiplied in one go.
    grouped = (query.float() * scaling).reshape(batch * key_heads, -1, dim)
    keys = key.reshape(batch * key_heads, kv_len, dim)
    if rows_at_once >= kv_len:
        logits = torch.bmm(grouped, keys.float().transpose(1, 2))
    else:
        logits = grouped.new_empty(*grouped.shape[:2], kv_len)
        for first in range(0, kv_len, rows_at_once):
            rows = slice(first, first + rows_at_once)
            logits[..., rows] = torch.bmm(grouped, keys[:, rows].float().transpose(1, 2))
    logits = logits.view(batch, kv_heads, heads // kv_heads, q_len, kv_len)
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    columns = torch.arange(kv_len, device=key.device)
    if visible is None and sinks is None and weigh is None:
        own = columns[-q_len:]
        logits[..., kv_len - q_len :].masked_fill_(own > own[:, None], float("-inf"))
        return logits.softmax(dim=-1).sum(dim=3).flatten(1, 2)
    shown = (columns <= columns[kv_len - q_len :, None])[None, None, None]
    if visible is not None:
        shown = shown & visible[:, :, None, None, :]
    logits.masked_fill_(~shown, float("-inf"))
    peak = logits.amax(dim=-1, keepdim=True)
    if sinks is not None:
        sinks = sinks.float().view(kv_heads, -1, 1, 1)
        peak = torch.maximum(peak, sinks)
    # A padding query sees nothing: its peak is -inf and its row must end as zeros.
    peak.clamp_(min=torch.finfo(torch.float32).min)
    logits.sub_(peak).exp_()
    total = logits.sum(dim=-1, keepdim=True)
    if sinks is not None:
        total += (sinks - peak).exp_()
    share = 1 / total
    if visible is not None:
        voting = visible[:, :, None, kv_len - q_len :, None]
        share = torch.where(voting, share, 0.0)
        shown = shown & voting
    logits.mul_(share)
    if weigh is not None:
        logits = weigh(logits, shown.sum(dim=-1, keepdim=True)) * shown
    return logits.sum(dim=3).flatten(1, 2)


def left_padding(real: Bool[Tensor, "batch kv_len"]) -> tuple[Int64[Tensor, " batch"], list[int]]:
    """Padding at the left of every row, on the device and read back; one wait for the device.

    Raises:
        ShapeError: A row has padding that is not at its left.
    """
    pads = (~real).long().cumprod(1).sum(1)
    by_row, lengths = torch.stack([pads, real.long().sum(1)]).tolist()
    kv_len = real.shape[1]
    if any(pad + length != kv_len for pad, length in zip(by_row, lengths, strict=True)):
        raise ShapeError("A row has padding that is not at its left.")
    return pads, by_row


def positions_of(
    columns: Int[Tensor, "batch kv_heads kv_len"], pads: Int[Tensor, " batch"] | None
) -> Int64[Tensor, "batch kv_heads kv_len"]:
    """Original positions of columns of a left-padded batch; -1 for padding."""
    positions = columns.long()
    if pads is None:
        return positions
    return (positions - pads[:, None, None].to(positions.device)).clamp_(min=-1)
