"""The oracle: the same model on an uncompressed cache, with exactly the evicted rows masked out.

    with press(model, policy) as session, record(session) as evictions:
        ours = model.generate(...)
    with oracle(model, evictions):
        theirs = model.generate(...)

Both must give the same tokens and, within float noise, the same logits.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_utils import AttentionInterface

from kvcompress.cache import KVLayer

_NEVER = 2**31 - 1


class Evictions:
    """For every layer, row, KV head and token: how many tokens had been seen when it was evicted.

    A query sees a token only if it was fed before that.
    """

    def __init__(self) -> None:
        self._died: dict[int, Tensor] = {}

    def look(self, cache: Cache) -> None:
        """Note which rows are gone from a cache."""
        for number, layer in enumerate(cache.layers):
            if isinstance(layer, KVLayer) and not layer.rows.empty:
                self._look(number, layer)

    def _look(self, number: int, layer: KVLayer) -> None:
        # Not `layer.columns`, which would bring the rows into order and so hide a mistake.
        columns, seen = layer.rows.columns().long(), layer.get_seq_length()
        batch, kv_heads, _ = columns.shape
        died = torch.full((batch, kv_heads, seen), _NEVER)
        old = self._died.get(number)
        if old is not None:
            if batch % old.shape[0] == 0:
                old = old.repeat_interleave(batch // old.shape[0], dim=0)
            shared = min(seen, old.shape[-1])
            died[..., :shared] = old[:batch, :, :shared]
        gone = torch.ones(batch, kv_heads, seen, dtype=torch.bool)
        gone.scatter_(2, columns.cpu(), False)
        died[gone & (died == _NEVER)] = seen
        self._died[number] = died

    def hosts(self, layer_idx: int) -> bool:
        """Whether a layer of the model has a compressed cache."""
        return layer_idx in self._died

    def evicted(self, layer_idx: int) -> int:
        """How many rows of a layer are gone, over batch and heads."""
        return int((self._died[layer_idx] < _NEVER).sum())

    def visible(self, layer_idx: int, batch: int, q_len: int, kv_len: int) -> Tensor | None:
        """Batch x kv_heads x q_len x kv_len; None for a layer without evictions."""
        died = self._died.get(layer_idx)
        if died is None:
            return None
        if died.shape[0] != batch:
            died = died.repeat_interleave(batch // died.shape[0], dim=0)
        missing = kv_len - died.shape[-1]
        if missing > 0:
            died = torch.nn.functional.pad(died, (0, missing), value=_NEVER)
        fed = torch.arange(kv_len - q_len, kv_len)
        return fed[:, None] < died[:, :, None, :kv_len]


@contextmanager
def record(session: Any) -> Iterator[Evictions]:
    """Note the evictions of a session's caches after every forward.

    One `generate` at a time. What beams exchange is not followed, so of beam search only what goes
    when the prompt ends can be compared.
    """
    evictions = Evictions()

    def after(module: Any, args: Any, output: Any) -> None:
        if session.cache is not None:
            evictions.look(session.cache)

    handle = session.model.register_forward_hook(after)
    try:
        yield evictions
    finally:
        handle.remove()


@contextmanager
def oracle(model: PreTrainedModel, evictions: Evictions) -> Iterator[None]:
    """Run `model` uncompressed, in eager attention, with the recorded evictions masked out."""
    original = AttentionInterface.get_interface
    stored: dict[int, weakref.ref[Tensor]] = {}  # the keys that each hosted layer attended to

    def get_interface(self: Any, name: Any, default: Callable[..., Any]) -> Callable[..., Any]:
        function = original(self, name, default)

        def attend(
            module: Any,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Any = None,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            batch, heads, q_len, _ = query.shape
            mask, layer_idx = attention_mask, getattr(module, "layer_idx", None)
            if layer_idx is None:  # of an image encoder
                return function(module, query, key, value, mask, *args, **kwargs)
            if evictions.hosts(layer_idx):
                stored[layer_idx] = weakref.ref(key)
            else:
                # A layer that shares another one's keys is given the same tensor.
                same = (number for number, keys in stored.items() if keys() is key)
                layer_idx = next(same, layer_idx)
            visible = evictions.visible(layer_idx, batch, q_len, key.shape[2])
            if visible is not None:
                visible = visible.repeat_interleave(heads // visible.shape[1], dim=1)
                visible = visible.to(query.device)
                hidden = torch.finfo(query.dtype).min
                extra = torch.zeros_like(visible, dtype=query.dtype).masked_fill(~visible, hidden)
                mask = extra if mask is None else (mask + extra).clamp_(min=hidden)
            return function(module, query, key, value, mask, *args, **kwargs)

        return attend

    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    AttentionInterface.get_interface = get_interface  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        AttentionInterface.get_interface = original  # type: ignore[method-assign]
        model.set_attn_implementation(before)
