"""Which models and caches can be hosted, and how a cache comes to be hosted."""

import functools
import logging
import sys
from typing import Any

import transformers
from jaxtyping import Int
from packaging.version import Version
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    QuantizedCache,
)

from kvcompress.attention import Lease
from kvcompress.cache import KVLayer, Shared
from kvcompress.errors import (
    PolicyConfigError,
    PressStateError,
    UnsupportedCacheError,
    UnsupportedModeError,
    UnsupportedModelError,
)
from kvcompress.plugins import policy_from
from kvcompress.policy import Policy
from kvcompress.quantized import QuantizedRows, quantizes
from kvcompress.report import Report
from kvcompress.rotation import Rotation
from kvcompress.state import CacheState

logger = logging.getLogger(__name__)

TRIED_TRANSFORMERS = ("5.4", "5.24")
"""Oldest and newest minor release of transformers that the tests are run on."""

OWN_MASKS = {"doge": "it computes its own attention mask from the cached values"}
"""Model types whose attention passes the seam and would still go wrong."""

WITHOUT_ATTENTION = ("conv", "hybrid", "hybrid_sliding", "linear_attention", "mamba")
"""Kinds of layers with a state that is no list of tokens."""


@functools.cache
def _note_version() -> None:
    """Say once that this release of transformers was not tried."""
    oldest, newest = (Version(version) for version in TRIED_TRANSFORMERS)
    current = Version(transformers.__version__)
    if not oldest.release <= current.release[:2] <= newest.release:
        logger.warning(
            "kvcompress was tried with transformers %s to %s; this is %s.",
            *TRIED_TRANSFORMERS,
            transformers.__version__,
        )


def hostable_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside `model` (PEFT and compile wrappers are looked through).

    Raises:
        UnsupportedModelError: It cannot be hosted; the message says why.
    """
    _note_version()
    found = _outermost_models(model)
    name = type(model).__name__
    if not found:
        raise UnsupportedModelError(
            f"{name} contains no transformers PreTrainedModel. Pass a decoder model such as "
            "AutoModelForCausalLM.from_pretrained(...)."
        )
    inner = found[0]
    if len(found) > 1:
        raise UnsupportedModelError(
            f"{name} contains {len(found)} transformers models "
            f"({', '.join(type(part).__name__ for part in found)}), and one is compressed at a "
            "time. Pass the one that is meant."
        )
    config = inner.config
    if config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{name} is an encoder-decoder model; only decoder models are supported. Run it "
            "without kvcompress."
        )
    if config.model_type in OWN_MASKS:
        raise UnsupportedModelError(
            f"{name} cannot be compressed: {OWN_MASKS[config.model_type]}. Run it without "
            "kvcompress."
        )
    if not _asks_the_interface(inner.get_decoder()):
        raise UnsupportedModelError(
            f"{name} has attention code of its own that does not go through transformers' "
            "attention interface, so its cache cannot be compressed. Run it without kvcompress."
        )
    if _processes(inner, "pp") > 1:
        raise UnsupportedModelError(
            f"{name} is pipeline-parallel: its layers are in {_processes(inner, 'pp')} processes, "
            "and a cache is compressed as a whole. Load it without pp_size; tp_plan or device_map "
            "can spread it instead."
        )
    hosted_layers(config)
    return inner


def _outermost_models(module: nn.Module) -> list[PreTrainedModel]:
    if isinstance(module, PreTrainedModel):
        return [module]
    inside = [model for part in module.children() for model in _outermost_models(part)]
    return list(dict.fromkeys(inside))


def _asks_the_interface(decoder: nn.Module) -> bool:
    """Whether the decoder's attention may pass the seam; the first forward tells for certain."""
    file = vars(sys.modules[type(decoder).__module__])
    declared = getattr(decoder, "_supports_attention_backend", False)
    return bool(declared) or "ALL_ATTENTION_FUNCTIONS" in file


def hosted_layers(config: PreTrainedConfig) -> tuple[int, ...]:
    """Indices of the layers with full attention and a cache of their own: those that are hosted.

    Raises:
        UnsupportedModelError: There is none.
    """
    layers = DynamicCache(config=config).layers
    kinds = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
    for layer, kind in zip(layers, kinds, strict=False):
        if type(layer) is DynamicLayer and kind in WITHOUT_ATTENTION:
            raise UnsupportedModelError(
                f"This {config.model_type} model has layers of type {kind}, whose state "
                f"transformers {transformers.__version__} keeps in a cache of the model's own. "
                "Install a newer transformers, whose DynamicCache has such layers, or run it "
                "without kvcompress."
            )
    indices = tuple(i for i, layer in enumerate(layers) if type(layer) is DynamicLayer)
    if not indices:
        raise UnsupportedModelError(
            f"No layer of this {config.model_type} model has full attention over a cache of its "
            f"own (its {len(layers)} cache layers: "
            f"{', '.join(sorted({type(layer).__name__ for layer in layers}))}), so there is "
            "nothing to compress. Run it without kvcompress."
        )
    return indices


def _processes(model: PreTrainedModel, kind: str) -> int:
    """How many processes a model is spread over, by `kind` of parallelism: tp or pp."""
    settings = getattr(model.config, "distributed_config", None)  # also parts of the model have it
    return getattr(model, f"{kind}_size", None) or getattr(settings, f"{kind}_size", None) or 1


def check_fit(model: PreTrainedModel, policy: Policy) -> Rotation | None:
    """Refuse a policy that cannot act on this model; gives what moves keys, if it asks for that.

    Raises:
        PolicyConfigError: See `Policy.check_layers`.
        UnsupportedModelError: The processes of a tensor-parallel model would keep other rows than
            one process, or keys of this model cannot be moved.
    """
    layers = hosted_layers(model.config)
    count, processes = len(layers), _processes(model, "tp")
    policy.check_layers(count)
    for part in (policy.part("prefill"), policy.part("decode")):
        if part is not None and part.across_heads and processes > 1:
            raise UnsupportedModelError(
                f"{part.name} judges the rows of a head by other heads too, and this model is "
                f"tensor-parallel: each of {processes} processes has some of the "
                "heads. Use a policy that judges heads one by one (across_heads is False), such as "
                "snapkv, or load the model without tp_plan."
            )
    moves = any(policy.reindexed_tokens(number, count) for number in range(count))
    return Rotation(model, layers) if moves else None


def state_of(cache: Cache) -> CacheState | None:
    """The state of a hosted cache; None for any other."""
    layers = getattr(cache, "layers", ())
    return next((layer.state for layer in layers if isinstance(layer, KVLayer)), None)


def host_cache(
    cache: Cache,
    model: PreTrainedModel,
    policy: Policy,
    *,
    prompt_length: int | None = None,
    forward_is_turn: bool = False,
) -> CacheState:
    """Replace the full-attention layers of a cache by hosted ones; rows that it has stay.

    Raises:
        UnsupportedCacheError: The cache's layers cannot be replaced.
        PressStateError: It is hosted already, under another policy.
    """
    known = state_of(cache)
    if known is not None:
        if known.policy != policy:
            raise PressStateError(
                f"This cache is being compressed by {known.policy}, the context asks for "
                f"{policy}. A policy stays with its cache: use the same policy, or a new cache."
            )
        return known
    kind = type(cache).__name__
    if type(cache) not in (DynamicCache, QuantizedCache, CompressedCache):
        raise UnsupportedCacheError(
            f"A {kind} cannot be compressed, only a DynamicCache or a QuantizedCache can. Leave "
            "cache_implementation and past_key_values out, or pass one of these."
        )
    evicts_later = policy.part("decode") is not None
    if evicts_later and (getattr(cache, "offloading", False) or type(cache) is QuantizedCache):
        raise UnsupportedCacheError(
            f"{policy} goes on evicting while tokens are generated, which would "
            f"{'quantize' if type(cache) is QuantizedCache else 'move'} the whole cache at every "
            "eviction. Use a policy that acts when a prompt ends, such as snapkv, or a plain "
            "DynamicCache."
        )
    indices = hosted_layers(model.config)
    fresh = DynamicCache(config=model.config).layers
    if getattr(cache, "layer_class_to_replicate", None) is DynamicLayer:
        # It was meant to have no windows: old releases do so where drafts will be taken back.
        fresh = [
            DynamicLayer() if type(layer) is DynamicSlidingWindowLayer else layer for layer in fresh
        ]
    layers = [*cache.layers, *fresh[len(cache.layers) :]]
    plain = {
        i: layer
        for i, layer in enumerate(layers)
        if isinstance(layer, DynamicLayer)
        and (type(layer) is DynamicLayer or (quantizes(layer) and not layer.is_initialized))
    }
    for index in indices:
        if index not in plain:
            raise UnsupportedCacheError(
                f"Layer {index} of the cache is a {type(layers[index]).__name__}"
                f"{' that was filled before' if quantizes(layers[index]) else ''}, but this layer "
                "of the model has full attention and needs a DynamicLayer, or an empty quantized "
                "one. Pass DynamicCache(config=model.config)."
            )
    rotation = check_fit(model, policy)
    text = model.config.get_text_config(decoder=True)
    state = CacheState(
        policy,
        indices,
        max(len(layers), text.num_hidden_layers),  # some may read the keys of others
        model_name=type(model).__name__,
        prompt_length=prompt_length,
        forward_is_turn=forward_is_turn,
        splits_heads=_processes(model, "tp") > 1,
    )
    lease, shared = Lease(), Shared(shares_kv=bool(getattr(text, "num_kv_shared_layers", 0)))
    for number, index in enumerate(indices):
        given, rows = plain[index], None
        if quantizes(given):
            rows = QuantizedRows(state.counts[number], shared.spare, given)
        layer = KVLayer(state, number, lease, shared, rotation, rows)
        layer.adopt(given)
        layers[index] = layer
    observer = policy.observer("prefill")
    if observer is not None and state.counts[0].seen:
        raise UnsupportedCacheError(
            f"{observer.name} keeps a record of all queries, and this cache has seen "
            f"{state.counts[0].seen} tokens that it was not shown. Pass a new cache, or fill it "
            "under the policy."
        )
    cuts = policy.part("prefill")
    if cuts is not None and cuts.later_turns == "keep" and state.counts[0].seen:
        raise UnsupportedCacheError(
            f"later_turns='keep' cuts the first turn only, and this cache has seen "
            f"{state.counts[0].seen} tokens before it was compressed: it never would be. Pass a "
            "new cache, or use later_turns='revote'."
        )
    if len({count.seen for count in state.counts}) > 1:
        raise UnsupportedCacheError(
            "The layers of this cache hold different numbers of tokens. Pass a cache that one "
            "model filled, or a new one."
        )
    cache.layers = layers
    return state


class CompressedCache(DynamicCache):
    """A cache that compresses itself: pass it as `past_key_values`, no context needed.

    The policy travels with the cache, so several policies, or a compressed and a plain cache, can
    be used on one model at a time, in several threads too.

    Args:
        model: The model that will fill the cache.
        policy: A policy, or its string or dict form.
        prompt_length: Tokens of the first prompt, padding included. `generate` tells this by
            itself. In a loop of your own, a prompt fed in several calls ends here; without it, at
            the first one-token call or at `end_prefill()`, and the whole prompt is held until then.

    Raises:
        UnsupportedModelError: The model cannot be hosted.
        PolicyConfigError: The policy is wrong in itself or for this model.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: Policy | str | dict[str, Any],
        *,
        prompt_length: int | None = None,
    ) -> None:
        if prompt_length is not None and prompt_length < 1:
            raise PolicyConfigError(
                f"prompt_length={prompt_length}: a prompt has at least one token. Leave it out if "
                "the length is not known."
            )
        inner = hostable_model(model)
        super().__init__(config=inner.config)
        host_cache(self, inner, policy_from(policy), prompt_length=prompt_length)
        self.held_back: Int[Tensor, "batch tokens"] | None = None
        """Tokens of the prompt, or of an answer, that are still to be fed."""
        self.held_back_at = 0
        """How many tokens the cache had seen when they were."""

    def hold_back(self, tokens: Int[Tensor, "batch tokens"] | None) -> None:
        """Note the tokens that come next in the text, and have not been fed."""
        self.held_back, self.held_back_at = tokens, self.get_seq_length()

    @property
    def _state(self) -> CacheState:
        state = state_of(self)
        assert state is not None
        return state

    @property
    def policy(self) -> Policy:
        """The policy that compresses this cache."""
        return self._state.policy

    def end_prefill(self) -> None:
        """Say that the prompt has been fed completely: evict now. Does nothing after it has.

        Raises:
            UnsupportedModeError: The model stores latents; evicting needs its next forward.
        """
        state = self._state
        if not state.turn.open or state.counts[0].seen == state.turn.start:
            return
        if state.expands_latents:
            raise UnsupportedModeError(
                f"{state.model_name} caches latents, so rows can only be judged during a forward. "
                "Pass prompt_length= to CompressedCache instead."
            )
        state.turn.end, state.turn.open = state.counts[0].seen, False
        state.since_eviction = 0
        for layer in self.layers:
            if isinstance(layer, KVLayer):
                layer.end_prefill()

    def report(self) -> Report:
        """What the cache has seen and holds now."""
        return self._state.report()
