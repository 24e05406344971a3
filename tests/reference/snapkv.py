"""SnapKV in float64 and plain loops, written from the paper; shares no code with kvcompress.

Li et al. 2024, arXiv:2404.14469, section 4: the last queries of the prompt (the observation window)
vote, C[h][j] = sum over the window's queries i of softmax_j(q_i . k_j), the votes are pooled over
neighbouring positions, and per head the top of the prefix is kept together with the window. The
query heads that share a KV head are combined before pooling.

A padded row is worked out by itself, with its padding cut off: there is no mask here to get wrong.
"""

import math


def window_votes(queries, keys, scaling):
    """Per query head and position: attention from the last queries, each seeing up to itself.

    Args:
        queries: heads x window x dim, nested lists; the queries of the last `window` positions.
        keys: kv_heads x length x dim.
        scaling: Factor on the logits.
    """
    group = len(queries) // len(keys)
    votes = []
    for head, asked in enumerate(queries):
        rows = keys[head // group]
        received = [0.0] * len(rows)
        for back, query in enumerate(reversed(asked)):
            visible = rows[: len(rows) - back]
            logits = [
                scaling * sum(a * b for a, b in zip(query, row, strict=True)) for row in visible
            ]
            peak = max(logits)
            weights = [math.exp(logit - peak) for logit in logits]
            total = math.fsum(weights)
            for position, weight in enumerate(weights):
                received[position] += weight / total
        votes.append(received)
    return votes


def reduce_group(votes, kv_heads, how):
    """One list of votes per KV head from one per query head."""
    group = len(votes) // kv_heads
    reduced = []
    for first in range(0, len(votes), group):
        columns = zip(*votes[first : first + group], strict=True)
        if how == "max":
            reduced.append([max(column) for column in columns])
        else:
            share = group if how == "mean" else 1
            reduced.append([math.fsum(column) / share for column in columns])
    return reduced


def pool(votes, kernel_size, pooling):
    """Votes of the neighbourhood of each position; averages count the places beyond the border."""
    if pooling == "none":
        return list(votes)
    reach = kernel_size // 2
    pooled = []
    for centre in range(len(votes)):
        near = votes[max(0, centre - reach) : centre + reach + 1]
        pooled.append(max(near) if pooling == "max" else math.fsum(near) / kernel_size)
    return pooled


def snapkv(query, key, *, capacity, window_size, kernel_size, pooling, group_reduce, scaling):
    """One unpadded prompt: per KV head the scores of the prefix and the positions kept.

    Args:
        query: heads x length x dim, nested lists, after RoPE.
        key: kv_heads x length x dim.
        capacity: Rows kept, the window included; a prompt no longer than that is kept whole.
        window_size: Queries that vote, and rows that are always kept.
        kernel_size: Odd.
        pooling: "avg", "max" or "none".
        group_reduce: "mean", "max" or "sum".
        scaling: Factor on the logits.
    """
    length = len(key[0])
    window = min(window_size, length)
    prefix = length - window
    votes = window_votes([rows[prefix:] for rows in query], key, scaling)
    result = []
    for head in reduce_group(votes, len(key), group_reduce):
        scores = pool(head[:prefix], kernel_size, pooling)
        best = sorted(range(prefix), key=lambda position: -scores[position])
        kept = sorted(best[: capacity - window]) + list(range(prefix, length))
        result.append((scores, kept))
    return result
