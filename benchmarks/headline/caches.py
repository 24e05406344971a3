"""Caches of a wanted length, made faster than by reading a prompt of that length."""

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from headline.shapes import random_ids
from kvcompress import CompressedCache, press
from kvcompress.hosting import host_cache, state_of
from kvcompress.plugins import policy_from
from kvcompress.session import cache_argument


def dense(model: PreTrainedModel, batch: int, length: int) -> DynamicCache:
    """An uncompressed cache with random rows: what a step costs does not depend on them."""
    config = model.config
    cache = DynamicCache(config=config)
    shape = (batch, config.num_key_value_heads, length, config.head_dim)
    for layer in range(config.num_hidden_layers):
        rows = [torch.randn(shape, dtype=model.dtype, device=model.device) for _ in range(2)]
        cache.update(rows[0], rows[1], layer)
    return cache


def dense_in_place(model: PreTrainedModel, batch: int, length: int) -> Cache:
    """The same, hosted under a policy that never has to evict: rows are appended in place.

    It tells what of a gain is due to evicting, and what to not copying the cache every step.
    """
    cache = dense(model, batch, length)
    host_cache(cache, model, policy_from(f"snapkv:capacity={4 * length}"))
    return cache


def compressed(
    model: PreTrainedModel, policy: str, batch: int, length: int, chunk: int
) -> CompressedCache:
    """A cache that has really read a random prompt, in chunks."""
    ids = random_ids(model, batch, length)
    with press(model, policy) as session:
        return session.prefill(ids, chunk_size=chunk, hold_back=0)


def step(model: PreTrainedModel, cache: Cache, token: torch.Tensor) -> None:
    """One step of decoding: nothing in it waits for the device."""
    arguments: dict[str, Any] = {cache_argument(model): cache}
    model(token, use_cache=True, logits_to_keep=1, **arguments)


def held_rows(cache: Cache) -> int:
    """Rows of the layer that holds most."""
    state = state_of(cache)
    return int(cache.get_seq_length() if state is None else state.longest)


def cache_bytes(cache: Cache) -> int:
    """What is allocated for it."""
    state = state_of(cache)
    if state is not None:
        return state.report().allocated_bytes
    layers: list[Any] = list(cache.layers)
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
