"""Pure functions on keys, queries and scores: the arithmetic that policies and core share."""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Float32, Int, Int64
from torch import Tensor

from kvcompress.errors import ShapeError

GroupReduce = Literal["mean", "max", "sum"]

SCORING_BYTES = 64 * 2**20
"""Default bound on the temporary memory of one scoring call."""


def gather_rows(
    rows: Float[Tensor, "batch kv_heads kv_len dim"],
    index: Int64[Tensor, "batch kv_heads kept"],
    out: Float[Tensor, "batch kv_heads kept dim"] | None = None,
) -> Float[Tensor, "batch kv_heads kept dim"]:
    """The chosen rows of every head, in the order of `index`."""
    expanded = index.unsqueeze(-1).expand(-1, -1, -1, rows.shape[-1])
    return torch.gather(rows, 2, expanded, out=out)


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


def reduce_groups(
    scores: Float[Tensor, "*lead heads kv_len"], kv_heads: int, how: GroupReduce
) -> Float[Tensor, "*lead {kv_heads} kv_len"]:
    """Scores per KV head from scores per query head; query head h belongs to KV head h // group.

    Raises:
        ShapeError: `heads` is no multiple of `kv_heads`.
    """
    heads = scores.shape[-2]
    if heads % kv_heads:
        raise ShapeError(f"{heads} query heads cannot be shared evenly by {kv_heads} KV heads.")
    grouped: Tensor = scores.unflatten(-2, (kv_heads, heads // kv_heads))
    if how == "max":
        return grouped.amax(dim=-2)
    return grouped.mean(dim=-2) if how == "mean" else grouped.sum(dim=-2)


def attention_received(
    query: Float[Tensor, "batch heads q_len head_dim"],
    key: Float[Tensor, "batch key_heads kv_len head_dim"],
    valid: Bool[Tensor, "batch kv_heads kv_len"],
    *,
    scaling: float,
    group_reduce: GroupReduce = "mean",
    softcap: float | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
    max_bytes: int = SCORING_BYTES,
) -> Float32[Tensor, "batch kv_heads kv_len"]:
    """Attention that each cached row gets from the last queries, summed over the queries.

    Softmax runs over all rows, causal among the last `q_len` of them, and in float32 whatever the
    input dtype. Padding gets nothing and gives nothing: a query that is itself padding does not
    vote. Computed in blocks of heads and queries, so that logits of all heads are never alive
    together.

    Args:
        query: After RoPE; the queries of the last `q_len` rows, oldest first.
        key: After RoPE, oldest first. More heads than `valid` has where the cache stores latents
            (MLA) and the keys were expanded per query head.
        valid: False for padding; one row of heads per head of the cache.
        scaling: Factor on the logits, 1/sqrt(head_dim) in most models.
        group_reduce: How the query heads of one KV head are combined, after the sum over queries.
        softcap: Logits become `softcap * tanh(logits / softcap)` first (Gemma 2).
        sinks: A learned logit per query head that only enters the denominator (gpt-oss).
        max_bytes: Bound on the temporary memory; at least one query of one head is held.

    Raises:
        ShapeError: Head counts do not divide, or there are more queries than rows.
    """
    batch, heads, q_len, _ = query.shape
    kv_heads, kv_len = valid.shape[1:]
    key_heads = key.shape[1]
    if heads % key_heads or key_heads % kv_heads:
        raise ShapeError(
            f"{heads} query heads, {key_heads} key heads and {kv_heads} cache heads do not divide."
        )
    if q_len > kv_len:
        raise ShapeError(f"{q_len} queries for {kv_len} rows: give the last queries only.")
    group = heads // kv_heads
    out = torch.zeros(batch, kv_heads, kv_len, dtype=torch.float32, device=key.device)
    # Logits of one KV head's group for one query, and the float32 copy of its keys.
    query_bytes = (4 * group + 1) * kv_len  # and the mask
    key_bytes = 0 if key.dtype == torch.float32 else 4 * kv_len * key.shape[-1]
    key_bytes *= key_heads // kv_heads
    per_head = key_bytes + query_bytes * q_len
    heads_at_once = max(1, min(kv_heads, max_bytes // max(per_head, 1)))
    queries_at_once = q_len
    if heads_at_once == 1:
        queries_at_once = min(q_len, max(1, (max_bytes - key_bytes) // query_bytes))
    repeat = heads // key_heads
    columns = torch.arange(kv_len, device=key.device)
    for row in range(batch):
        for first in range(0, kv_heads, heads_at_once):
            last = min(first + heads_at_once, kv_heads)
            chosen = slice(first * key_heads // kv_heads, last * key_heads // kv_heads)
            keys = key[row, chosen].float()
            block_heads = slice(first * group, last * group)
            block = query[row, block_heads].float() * scaling
            received = torch.zeros(
                (last - first) * group, kv_len, dtype=torch.float32, device=key.device
            )
            visible = valid[row, first:last]
            for start in range(0, q_len, queries_at_once):
                stop = min(start + queries_at_once, q_len)
                own = torch.arange(kv_len - q_len + start, kv_len - q_len + stop, device=key.device)
                # key_heads (repeat queries) kv_len
                part = block[:, start:stop].unflatten(0, (-1, repeat)).flatten(1, 2)
                logits = torch.matmul(part, keys.transpose(1, 2))
                logits = logits.view(last - first, group, stop - start, kv_len)
                if softcap is not None:
                    logits.div_(softcap).tanh_().mul_(softcap)
                hidden = (columns > own[:, None]) | ~visible[:, None, None, :]
                logits.masked_fill_(hidden, float("-inf"))
                peak = logits.amax(dim=-1, keepdim=True)
                if sinks is not None:
                    sink = sinks[block_heads].float().view(last - first, group, 1, 1)
                    peak = torch.maximum(peak, sink)
                # A padding query sees nothing: its peak is -inf and its row must end as zeros.
                peak.clamp_(min=torch.finfo(torch.float32).min)
                logits.sub_(peak).exp_()
                total = logits.sum(dim=-1, keepdim=True)
                if sinks is not None:
                    total += (sink - peak).exp_()
                voting = visible[:, own][:, None, :, None]
                logits.mul_(torch.where(voting, 1 / total, 0.0))
                received += logits.sum(dim=2).flatten(0, 1)
            del keys, logits  # before the next block makes its own
            out[row, first:last] = reduce_groups(received, last - first, group_reduce)
    return out


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
    return (positions - pads[:, None, None]).clamp_(min=-1)
