"""The seam around transformers: where a hosted cache meets the attention function.

Methods of transformers are wrapped, on their classes. While any context is open or any hosted cache
is alive, and put back afterwards:

- `AttentionInterface.get_interface`: every model that uses the attention interface resolves its
  attention function there, whatever the backend, so the post-RoPE query, key and value of every
  layer pass by. The wrapper acts only on the call that follows the update of a hosted cache layer
  in the same thread.
- `GenerationMixin._get_candidate_generator`: drafts that come in one forward with the prompt would
  be verified before anything is evicted, and so accepted where greedy search goes elsewhere.
- `GenerationMixin._validate_model_kwargs`: refuses a `generate` that is not the wrapped one.
- `ContinuousMixin.init_continuous_batching`: refused for a model in a context.

From the import of this module on, and inert while there is no context and no hosted cache:

- `GenerationMixin.generate`: a call of it says how long the prompt is, which nothing further
  inside can know (chunked prefill). Python looks up `model.generate` before it makes a cache among
  the arguments, so a wrapper that came with the cache would come too late.
"""

import functools
import itertools
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import GenerationMixin
from transformers.generation.continuous_batching import ContinuousMixin
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from kvcompress.errors import PressStateError, UnsupportedModeError


@dataclass(frozen=True)
class AttentionCall:
    """What one layer's attention function was called with."""

    query: Float[Tensor, "batch heads q_len head_dim"]
    key: Float[Tensor, "batch key_heads kv_len head_dim"]
    value: Float[Tensor, "batch key_heads kv_len value_dim"]
    mask: Any
    scaling: float
    softcap: float | None
    sinks: Tensor | None
    position_ids: Tensor | None


class HostedLayer(ABC):
    """What the seam asks of a cache layer."""

    @abstractmethod
    def before_attention(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """May evict first; returns the key and value to attend to."""

    @abstractmethod
    def after_attention(self, call: AttentionCall) -> None:
        """May evict."""

    @abstractmethod
    def undo_update(self) -> None:
        """Take the last update back, after `before_attention` refused it."""


@dataclass
class Generation:
    """A call of `generate` that is running in this thread."""

    serial: int
    prompt_end: int | None
    """Length of the whole prompt in tokens, padding and earlier turns included, if known."""
    hosts: bool = False
    """Whether it is known from the start that it will feed a hosted cache."""
    hosted: bool = False
    """Whether it has fed one."""
    drafts: bool = False
    """Whether it guesses tokens and takes the wrong ones back."""

    def check_unfed(self, seen: int) -> None:
        """Refuse a prompt that brings nothing beyond the `seen` tokens of its cache.

        Raises:
            PressStateError: The whole prompt lies within what the cache has seen.
        """
        if self.prompt_end is not None and self.prompt_end <= seen:
            raise PressStateError(
                f"generate() got a prompt of {self.prompt_end} tokens and a cache that has already "
                f"seen {seen}: it would feed the prompt a second time. Pass the whole conversation "
                "with at least one new token, or only the new tokens with an attention_mask over "
                "all of them."
            )

    def check_gap(self, seen: int, given: int | None) -> None:
        """Refuse `given` new tokens alone that do not go on where the cache ends.

        Raises:
            PressStateError: The mask covers another number of tokens than were and will be fed.
        """
        end = self.prompt_end
        if seen and given and end is not None and given < end != seen + given:
            raise PressStateError(
                f"generate() got {given} tokens with an attention_mask over {end}, and a cache "
                f"that has seen {seen}: {seen + given} are needed. Pass all tokens that the cache "
                "has not seen (the last one of an answer was never fed), or the whole conversation."
            )


class _Thread(threading.local):
    pending: weakref.ref[HostedLayer] | None = None
    attended: weakref.ref[Tensor] | None = None
    generation: Generation | None = None


_thread = _Thread()
_lock = threading.RLock()  # re-entrant: finalizers may run at any allocation
_leases: set[int] = set()
_originals: dict[tuple[type, str], Any] = {}
_must_host: weakref.WeakSet[Any] = weakref.WeakSet()
_serials = itertools.count(1)


def announce(layer: HostedLayer) -> None:
    """Say that `layer` was updated: the next attention call of this thread is its own."""
    _thread.pending = weakref.ref(layer)


def withdraw() -> HostedLayer | None:
    """The layer that was announced and not yet attended to, if any; forgets it."""
    pending, _thread.pending = _thread.pending, None
    return None if pending is None else pending()


def current_generation() -> Generation | None:
    """The innermost `generate` call of this thread, while the seam is in place."""
    return _thread.generation


def require_hosting(model: Any, required: bool) -> None:
    """Make a `generate` of this model that never fed a hosted cache an error, or no more."""
    (_must_host.add if required else _must_host.discard)(model)


class Lease:
    """Keeps the seam in place while it lives; copies of a cache hold leases of their own."""

    def __init__(self) -> None:
        key = id(self)
        with _lock:
            _leases.add(key)
            _install()
        self._release = weakref.finalize(self, _drop_lease, key)

    def release(self) -> None:
        """Give the lease back before the object dies."""
        self._release()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Lease":
        return Lease()

    def __reduce__(self) -> tuple[type["Lease"], tuple[()]]:
        return Lease, ()


def _drop_lease(key: int) -> None:
    with _lock:
        _leases.discard(key)
        if not _leases:
            _uninstall()


def _install() -> None:
    if _originals:
        return
    for owner, name, wrap in _PATCHES:
        original = _originals[owner, name] = getattr(owner, name)
        setattr(owner, name, wrap(original))
    # The compiler does not notice that a class has another method, and would go on with the old
    # one; it does notice that an object has an attribute.
    vars(ALL_ATTENTION_FUNCTIONS).setdefault("get_interface", _get_interface)


def _get_interface(*args: Any, **kwargs: Any) -> Callable[..., Any]:
    """What the class does."""
    return AttentionInterface.get_interface(ALL_ATTENTION_FUNCTIONS, *args, **kwargs)


def _uninstall() -> None:
    if vars(ALL_ATTENTION_FUNCTIONS).get("get_interface") is _get_interface:
        del vars(ALL_ATTENTION_FUNCTIONS)["get_interface"]
    # A method that somebody else wrapped meanwhile is left alone: ours inside is inert.
    for owner, name, _ in _PATCHES:
        original = _originals.pop((owner, name), None)
        if getattr(getattr(owner, name), "__wrapped__", None) is original:
            setattr(owner, name, original)


def _wrap_interface(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_interface(self: Any, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return functools.partial(_attend, original(self, *args, **kwargs))

    return get_interface


def _wrap_generate(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _leases:
            return original(self, *args, **kwargs)
        call = Generation(next(_serials), _prompt_end(args, kwargs), hosts=self in _must_host)
        for name in ("cache", "past_key_values"):
            cache: Any = kwargs.get(name)
            if _is_hosted(cache):
                call.hosts, seen = True, cache.get_seq_length()
                call.check_unfed(seen)
                call.check_gap(seen, _length(args, kwargs, _IDS))
        outer, _thread.generation = _thread.generation, call
        try:
            result = original(self, *args, **kwargs)
        finally:
            _thread.generation = outer
        if self in _must_host and not call.hosted:
            raise UnsupportedModeError(
                f"generate() of {type(self).__name__} never reached the press context: nothing "
                "was compressed. A compiled forward skips it; compile inside the context, or "
                "pass past_key_values=CompressedCache(model, policy)."
            )
        return result

    return generate


def _is_hosted(cache: Any) -> bool:
    return any(isinstance(layer, HostedLayer) for layer in getattr(cache, "layers", ()))


def _wrap_validation(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _validate_model_kwargs(self: Any, model_kwargs: dict[str, Any]) -> None:
        hosts = self in _must_host or any(map(_is_hosted, model_kwargs.values()))
        if hosts and current_generation() is None:
            raise PressStateError(
                f"This generate() of {type(self).__name__} was looked up before kvcompress was "
                "ready, and cannot tell it where the prompt ends. Import press or CompressedCache "
                "by name (from kvcompress import CompressedCache), or make the cache in a line of "
                "its own, before model.generate is mentioned."
            )
        original(self, model_kwargs)

    return _validate_model_kwargs


def _wrap_candidates(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_candidate_generator(self: Any, *args: Any, **kwargs: Any) -> Any:
        generator = original(self, *args, **kwargs)
        generation = current_generation()
        if generation is not None:
            generation.drafts = True
            if generation.hosts:
                generator.get_candidates = functools.partial(_first_candidates, generator)
        return generator

    return get_candidate_generator


def _first_candidates(generator: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
    del generator.get_candidates  # from now on its class's own
    # Drafted all the same, since a later call relies on the assistant's cache of this one.
    generator.get_candidates(input_ids, *args, **kwargs)
    return input_ids, None


def _wrap_batching(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def init_continuous_batching(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self in _must_host:
            raise UnsupportedModeError(
                "Continuous batching (generate_batch) keeps its keys and values in pages of its "
                "own, which cannot be compressed. Use generate() with a left-padded batch, or "
                "leave the press context."
            )
        return original(self, *args, **kwargs)

    return init_continuous_batching


_IDS = ("inputs_embeds", "input_ids", "inputs")


def _prompt_end(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    # The mask covers earlier turns also when only the new tokens are passed.
    return _length(args, kwargs, ("attention_mask", *_IDS))


def _length(args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...]) -> int | None:
    for candidate in (*(kwargs.get(name) for name in names), *args[:1]):
        if isinstance(candidate, Tensor) and candidate.ndim in (2, 3):
            return candidate.shape[1]
    return None


_PATCHES: tuple[tuple[type, str, Callable[..., Any]], ...] = (
    (AttentionInterface, "get_interface", _wrap_interface),
    (GenerationMixin, "_validate_model_kwargs", _wrap_validation),
    (GenerationMixin, "_get_candidate_generator", _wrap_candidates),
    (ContinuousMixin, "init_continuous_batching", _wrap_batching),
)
GenerationMixin.generate = _wrap_generate(GenerationMixin.generate)  # type: ignore[method-assign]


@torch.compiler.disable
def _attend(
    function: Callable[..., Any],
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    layer = withdraw()
    if layer is None:
        if _thread.attended is not None and _thread.attended() is key:
            # A layer without a cache of its own, which reads the keys of the last hosted one.
            attention_mask = fit_mask(attention_mask, key.shape[-2])
        return function(module, query, key, value, attention_mask, *args, **kwargs)
    _thread.attended = weakref.ref(key)
    scaling = kwargs.get("scaling")
    position_ids = kwargs.get("position_ids")
    call = AttentionCall(
        query=query,
        key=key,
        value=value,
        mask=fit_mask(attention_mask, key.shape[-2]),
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
        position_ids=position_ids if isinstance(position_ids, Tensor) else None,
    )
    try:
        key, value = layer.before_attention(call)
    except BaseException:
        layer.undo_update()
        raise
    if key is not call.key:
        call = replace(call, key=key, value=value, mask=fit_mask(call.mask, key.shape[-2]))
    result = function(module, query, key, value, call.mask, *args, **kwargs)
    layer.after_attention(call)
    return result


def fit_mask(mask: Any, kv_len: int) -> Any:
    """The mask's last `kv_len` columns.

    A model builds one mask, for the layer that holds most. Rows are evicted padding first and
    stay in order, so what a layer lacks is always at the mask's left.
    """
    if mask is None or mask.shape[-1] == kv_len:
        return mask
    if isinstance(mask, Tensor):
        return mask[..., -kv_len:]
    return _fit_block_mask(mask, kv_len)


def _fit_block_mask(mask: Any, kv_len: int) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    batch, heads, q_len, columns = mask.shape
    shift, rule = columns - kv_len, mask.mask_mod
    return create_block_mask(
        lambda row, head, q_idx, kv_idx: rule(row, head, q_idx, kv_idx + shift),
        batch,
        heads,
        q_len,
        kv_len,
        mask.kv_indices.device,
        BLOCK_SIZE=mask.BLOCK_SIZE,
    )


def visible_to_last(mask: Any, batch: int, kv_len: int) -> Bool[Tensor, "batch kv_len"] | None:
    """Which columns the last query may see; None if the mask hides nothing from it.

    In a causal model the last query sees every column that is not padding.

    Raises:
        UnsupportedModeError: The mask has a form that cannot be read.
    """
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        index = torch.arange(max(batch, kv_len), device=mask.kv_indices.device)
        last = torch.full((), mask.shape[-2] - 1, device=index.device)
        rows = index[:batch, None].expand(batch, kv_len)
        columns = index[None, :kv_len].expand(batch, kv_len)
        seen = torch.vmap(torch.vmap(mask.mask_mod, (0, None, None, 0)), (0, None, None, 0))
        result: Tensor = seen(rows, torch.zeros_like(last), last, columns)
        return result
    if mask.ndim == 2:
        return mask.bool()
    if mask.ndim == 4:
        last_row: Tensor = mask[:, 0, -1]
        if last_row.dtype != torch.bool:
            last_row = last_row > torch.finfo(last_row.dtype).min / 2
        return last_row.expand(batch, kv_len)
    raise UnsupportedModeError(
        f"An attention mask of {mask.ndim} dimensions cannot be read. Pass a 2D mask "
        "(batch, tokens) with 1 for real tokens, or none."
    )
