"""What the caches of an evaluation held: one record for each request, and their summary."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer


@dataclass(frozen=True)
class Sample:
    """One request: a prompt that was answered, or a continuation that was scored."""

    task: str
    doc_id: int | None
    prompt_tokens: int
    """Padding not counted."""
    seen_tokens: int
    """Tokens of the prompt and of what came after it whose keys went into the cache."""
    held_tokens: float
    """Of these, how many were in the cache at the end: mean over KV heads and hosted layers."""
    held_bytes: float
    """Keys and values at the end, all layers."""
    dense_bytes: float
    """The same if nothing had been evicted."""
    truncated: bool
    """Whether the prompt was cut to fit the model."""

    @property
    def compressed(self) -> bool:
        """Whether anything was evicted."""
        return self.held_tokens < self.seen_tokens


def held_rows(
    cache: Any,
    lengths: Sequence[int],
    evicts_later: bool = False,
    evicted: Sequence[bool] = (),
) -> list[tuple[float, float, float]]:
    """What a cache holds of every row of its batch, padding not counted.

    Args:
        cache: As a model left it; with beams, several of its rows stand for each of `lengths`.
        lengths: Real tokens that each row has seen; rows of a batch that ended early have more
            behind them.
        evicts_later: Whether those may have taken the place of real ones.
        evicted: With that: whether each row surely lost something before its end. Where as many
            came behind, only its own are counted, fewer than it may have had at its end.

    Returns:
        For each row: tokens held (mean over KV heads and the layers that are compressed), bytes
        held, and bytes that an uncompressed cache would hold.
    """
    rows = len(lengths)
    held: list[list[float]] = []
    held_bytes = [0.0] * rows
    for layer in cache.layers:
        if not hasattr(layer, "positions"):
            sizes = [_dense_layer(layer, length, rows) for length in lengths]
            held_bytes = [total + size for total, size in zip(held_bytes, sizes, strict=True)]
            continue
        repeats, heads = layer.keys.shape[0] // rows, layer.keys.shape[1]
        device = layer.keys.device
        limit = torch.tensor(lengths, device=device).repeat_interleave(repeats)[:, None]
        real = layer.positions >= 0
        own = (real & (layer.positions < limit[..., None])).sum(dim=-1)
        if evicts_later:
            lost = torch.tensor(evicted or [False] * rows, device=device)
            counted = real.sum(dim=-1)
            only_own = lost.repeat_interleave(repeats)[:, None] & (counted >= limit)
            own = torch.where(only_own, own, counted.clamp(max=limit))
        count = own.double().mean(dim=-1)
        counts: list[float] = count.view(rows, repeats).mean(dim=1).tolist()
        held.append(counts)
        width = heads * _row_bytes(layer)
        held_bytes = [a + each * width for a, each in zip(held_bytes, counts, strict=True)]
    means = [fmean(by_layer) for by_layer in zip(*held, strict=True)] or [float(n) for n in lengths]
    dense = [dense_bytes(cache, length, rows) for length in lengths]
    return list(zip(means, held_bytes, dense, strict=True))


def dense_bytes(cache: Any, length: int, rows: int = 1) -> float:
    """Bytes of one row of a cache of this kind that has seen `length` tokens, nothing evicted."""
    return sum(_dense_layer(layer, length, rows) for layer in cache.layers)


def _dense_layer(layer: Any, length: int, rows: int) -> float:
    """Of one layer; what has a fixed size is shared by the `rows` of its batch."""
    if isinstance(layer, DynamicLayer):  # ours, too, and those with a window
        window = getattr(layer, "sliding_window", None)
        held = length if window is None else min(length, window)
        assert layer.keys is not None
        return held * layer.keys.shape[1] * _row_bytes(layer)
    return sum(tensor.nbytes for tensor in _tensors(vars(layer).values())) / rows


def _row_bytes(layer: Any) -> int:
    """Of one token in one head."""
    return sum(kept.shape[-1] * kept.element_size() for kept in (layer.keys, layer.values))


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (dict, list, tuple)):
            yield from _tensors(value.values() if isinstance(value, dict) else value)


def summary(samples: Iterable[Sample]) -> dict[str, dict[str, Any]]:
    """For each task what its requests' caches held, ready for JSON."""
    by_task: dict[str, list[Sample]] = {}
    for sample in samples:
        by_task.setdefault(sample.task, []).append(sample)
    return {task: _of_task(group) for task, group in sorted(by_task.items())}


def _of_task(samples: list[Sample]) -> dict[str, Any]:
    return {
        "requests": len(samples),
        "truncated": sum(sample.truncated for sample in samples),
        "never_compressed": sum(not sample.compressed for sample in samples),
        "prompt_tokens": _spread([sample.prompt_tokens for sample in samples]),
        "held_tokens": _spread([sample.held_tokens for sample in samples]),
        "kept_ratio": _spread([sample.held_tokens / sample.seen_tokens for sample in samples]),
        "cache_bytes": fmean(sample.held_bytes for sample in samples),
        "dense_bytes": fmean(sample.dense_bytes for sample in samples),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"mean": fmean(values), "min": min(values), "max": max(values)}
