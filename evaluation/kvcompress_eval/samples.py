"""What the caches of an evaluation held: one record for each request, and their summary."""

from collections.abc import Iterable, Sequence
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


def held_rows(cache: Any, lengths: Sequence[int]) -> list[tuple[float, float, float]]:
    """What a cache holds of every row of its batch, padding not counted.

    Args:
        cache: As a model left it; with beams, several of its rows stand for each of `lengths`.
        lengths: Real tokens that each row has seen.

    Returns:
        For each row: tokens held (mean over KV heads and the layers with full attention), bytes
        held, and bytes that an uncompressed cache would hold.
    """
    rows = len(lengths)
    held, held_bytes, dense_bytes = [], [0.0] * rows, [0.0] * rows
    for layer in cache.layers:
        hosted = hasattr(layer, "positions")
        if not hosted and type(layer) is not DynamicLayer:
            # Left alone: a window or a state of fixed size.
            tensors = [value for value in vars(layer).values() if isinstance(value, Tensor)]
            share = sum(tensor.nbytes for tensor in tensors) / rows
            held_bytes = [size + share for size in held_bytes]
            dense_bytes = [size + share for size in dense_bytes]
            continue
        width = sum(kept.shape[-1] * kept.element_size() for kept in (layer.keys, layer.values))
        batch, heads = layer.keys.shape[:2]
        counts = [float(length) for length in lengths]
        if hosted:
            repeats = batch // rows
            limit = torch.tensor(lengths, device=layer.keys.device).repeat_interleave(repeats)
            positions = layer.positions
            real = (positions >= 0) & (positions < limit[:, None, None])
            counts = (
                real.sum(dim=-1).float().mean(dim=-1).view(rows, repeats).mean(dim=1)
            ).tolist()
        held.append(counts)
        held_bytes = [
            a + count * heads * width for a, count in zip(held_bytes, counts, strict=True)
        ]
        dense_bytes = [a + own * heads * width for a, own in zip(dense_bytes, lengths, strict=True)]
    means = [fmean(by_layer) for by_layer in zip(*held, strict=True)]
    return list(zip(means, held_bytes, dense_bytes, strict=True))


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
