"""How large a model and the rows of its cache are, from its configuration alone.

The model is built on the meta device, where tensors have shapes and no memory, and reads one token
into a compressed cache. So sizes are those of the caches that the model really fills, whatever it
stores: grouped heads, latents, rows that later layers read too.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.cache_utils import DummyLayer, DynamicSlidingWindowLayer

from kvcompress.errors import EvaluationError, KVCompressError, UnsupportedModelError
from kvcompress.hosting import CompressedCache
from kvcompress.models import source_of
from kvcompress.session import cache_argument

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_top_k", "moe_k")


@dataclass(frozen=True)
class LayerSize:
    """One layer that has rows of its own in the cache."""

    layer_idx: int
    row_bytes: int
    """Of one token in all KV heads of one sequence, keys and values."""
    window: int | None = None
    """Rows that stay between two steps in a sliding-window layer, which is left alone; None: full
    attention, so that policies act on it."""
    whole_prompt: bool = False
    """Whether such a layer's memory is the whole prompt's until the first step."""


@dataclass(frozen=True)
class ModelSize:
    """What of a model's size matters for its decoding."""

    name: str
    """Its class."""
    dtype: str
    """Of weights and cache."""
    quantized: bool
    """Whether the weights are stored in another way than as parameters of that dtype."""
    parameters: int
    weight_bytes: int
    always_read_bytes: int
    """Weights that every step reads: decoder and output, tables that are only looked up left out,
    and experts."""
    expert_bytes: int
    """Weights of experts, of which a token chooses some."""
    expert_share: float
    """Chosen experts / all experts; 1 if the configuration does not say."""
    layers: tuple[LayerSize, ...]
    states: tuple[int, ...]
    """Layers that keep a state of fixed size instead of rows."""
    readers: tuple[int, ...]
    """Layers that keep nothing: they read the rows of another one, or have no attention."""
    positions: int | None
    """The longest text that the model was made for, if the configuration says."""

    @property
    def hosted(self) -> list[LayerSize]:
        """Layers with full attention, on which policies act."""
        return [layer for layer in self.layers if layer.window is None]

    @property
    def sliding(self) -> list[LayerSize]:
        """Layers with a sliding window."""
        return [layer for layer in self.layers if layer.window is not None]

    def read_bytes(self, batch: int) -> float:
        """Weights that one step reads for a batch.

        Of experts those that are expected if all tokens choose evenly and for themselves:
        1 - (1 - share)^batch of them.
        """
        return self.always_read_bytes + self.expert_bytes * (1 - (1 - self.expert_share) ** batch)


def read_config(model: str) -> PreTrainedConfig:
    """The configuration of a model, without its weights.

    Args:
        model: Hub id, path, or `smollm2`, which is unpacked when it is first used.

    Raises:
        EvaluationError: There is none, or it cannot be read.
        MissingModelError: The embedded model is not installed.
    """
    source = source_of(model)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise EvaluationError(
            f"The configuration of {model!r} cannot be read: {reason} Give a hub id, a folder with "
            "a config.json, or smollm2."
        ) from None
    return config


def measure(config: PreTrainedConfig, dtype: torch.dtype) -> ModelSize:
    """Sizes of a model that is never loaded.

    Args:
        config: Of any supported model.
        dtype: Of weights and cache.

    Raises:
        UnsupportedModelError: kvcompress cannot compress its cache.
        EvaluationError: It cannot be tried without weights.
    """
    model = _on_meta(config, dtype)
    text = config.get_text_config(decoder=True)
    cache = CompressedCache(model, "knorm")  # one token is within any policy's budget
    decoder = model.get_decoder()
    token = torch.zeros(1, 1, dtype=torch.long, device="meta")
    try:
        with torch.no_grad():
            decoder(token, **{cache_argument(decoder): cache, "use_cache": True})
    except KVCompressError:
        raise
    except Exception as error:  # whatever a model's code does not find on the meta device
        raise EvaluationError(
            f"{type(model).__name__} cannot be tried without its weights: "
            f"{type(error).__name__}: {error} Load it and look at the report of one token instead."
        ) from error
    layers, states, readers = _layers(cache)
    every = {id(each): each for each in model.parameters()}
    always, experts = _read_at_decode(model, decoder)
    share = 1.0
    if experts:
        of, chosen = _first(text, _EXPERTS), _first(text, _CHOSEN)
        share = min(1.0, chosen / of) if of and chosen else 1.0
    return ModelSize(
        name=type(model).__name__,
        dtype=str(dtype).removeprefix("torch."),
        quantized=getattr(config, "quantization_config", None) is not None,
        parameters=sum(each.numel() for each in every.values()),
        weight_bytes=sum(each.nbytes for each in every.values()),
        always_read_bytes=always,
        expert_bytes=experts,
        expert_share=share,
        layers=layers,
        states=states,
        readers=readers,
        positions=_first(text, ("max_position_embeddings",)),
    )


def _on_meta(config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    try:
        with torch.device("meta"):
            # These two work on every device and dtype; what is cached does not depend on them. The
            # model writes into its configuration.
            model = AutoModelForCausalLM.from_config(
                copy.deepcopy(config),
                dtype=dtype,
                attn_implementation="eager",
                experts_implementation="batched_mm",
            )
    except (ImportError, ValueError) as error:
        if "configuration class" not in str(error):
            raise EvaluationError(
                f"The configuration, of type {config.model_type}, makes no model: "
                f"{str(error).strip()}"
            ) from error
        raise UnsupportedModelError(
            f"transformers has no decoder model for a configuration of type {config.model_type}, "
            "and kvcompress compresses decoder models only."
        ) from None
    return model.eval()


def _layers(
    cache: CompressedCache,
) -> tuple[tuple[LayerSize, ...], tuple[int, ...], tuple[int, ...]]:
    """Of a cache that has read one token: layers with rows, with a state, and with neither."""
    sizes, states, readers = list[LayerSize](), list[int](), list[int]()
    whole = _slices_keep_the_prompt()
    for layer in cache.report().layers:
        number = layer.layer_idx
        own = cache.layers[number] if number < len(cache.layers) else None
        if layer.hosted:
            sizes.append(LayerSize(number, layer.dense_bytes))
        elif own is None or isinstance(own, DummyLayer):
            readers.append(number)
        elif isinstance(own, DynamicSlidingWindowLayer):
            assert own.keys is not None and own.values is not None
            row = own.keys.nbytes + own.values.nbytes
            sizes.append(LayerSize(number, row, own.sliding_window - 1, whole))
        else:
            states.append(number)
    return tuple(sizes), tuple(states), tuple(readers)


def _slices_keep_the_prompt() -> bool:
    """Whether a sliding-window layer holds on to the memory of rows that it has cut off.

    It does where what it keeps is a view of the prompt's keys, until a step replaces them.
    """
    layer, rows = DynamicSlidingWindowLayer(sliding_window=2), torch.zeros(1, 1, 8, 1)
    layer.update(rows, rows)
    assert layer.keys is not None
    return layer.keys.untyped_storage().nbytes() > layer.keys.nbytes


def _read_at_decode(model: nn.Module, decoder: nn.Module) -> tuple[int, int]:
    """Bytes of weights that a step reads: without experts, and those of all experts."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    read = dict(decoder.named_parameters())
    looked_up = {id(part.weight) for part in decoder.modules() if isinstance(part, nn.Embedding)}
    tail = {} if head is None else {f"head.{name}": each for name, each in head.named_parameters()}
    # A head that is tied to the embedding reads it after all.
    multiplied = {id(each) for each in tail.values()}
    counted = {
        id(each): (name, each)
        for name, each in {**read, **tail}.items()
        if id(each) not in looked_up or id(each) in multiplied
    }
    of_experts = [each for name, each in counted.values() if "experts" in name.split(".")]
    experts = sum(each.nbytes for each in of_experts)
    return sum(each.nbytes for _, each in counted.values()) - experts, experts


def _first(config: PreTrainedConfig, names: tuple[str, ...]) -> int | None:
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if isinstance(value, int)), None)
