"""Cached keys at other positions, turned there by the model's own rotary code."""

import contextlib
import importlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from kvcompress.errors import UnsupportedModelError

_LENGTH_DEPENDENT = ("dynamic", "longrope")
_CACHE_NAMES = ("cache", "past_key_values", "past_key_value", "layer_past")
_OLD = ((0, 1, 5, 100), (3, 40, 7, 2000))
_NEW = ((9, 3, 0, 61), (1000, 2, 400, 17))


class _UnmovableError(Exception):
    """Says in a clause why the keys of a model cannot be moved."""


class _Captured(Exception):
    """Ends the forward of an attention module that has its keys."""


class _Capture(DynamicCache):
    def update(self, key_states: Tensor, *args: Any, **kwargs: Any) -> NoReturn:
        raise _Captured(key_states)


@dataclass(frozen=True)
class _Way:
    """How the keys of one layer are turned."""

    module: str  # has `apply_rotary_pos_emb`, by name as not every form of it can be pickled
    alone: bool  # it takes keys, not queries and keys
    partial: bool  # it takes only that part of a head which turns
    options: dict[str, str]  # of the rotary module


class Rotation:
    """Moves post-RoPE keys to other positions, by the model's own rotary code.

    Every layer is tried when this is made: its attention module computes the keys of a few made-up
    tokens at two sets of positions, and the first ones, moved, must be the second ones. A layer
    whose keys do not depend on positions (NoPE) leaves them alone.

    Args:
        model: With its weights loaded. Its rotary module is kept; nothing about it changes.
        layers: Indices of the layers whose keys will be moved.

    Raises:
        UnsupportedModelError: Keys of this model cannot be moved; the message says why.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]) -> None:
        try:
            decoder = model.get_decoder()
            self._rotary = _rotary_of(decoder)
            with torch.no_grad():
                self._ways = [self._way_of(decoder, layer, model.dtype) for layer in layers]
        except Exception as error:
            problem = str(error)
            if not isinstance(error, _UnmovableError):
                problem = f"trying its attention gave {type(error).__name__}: {problem}"
            raise UnsupportedModelError(
                f"The cached keys of {type(model).__name__} cannot be moved to other positions: "
                f"{problem}. Use positions='original'."
            ) from error

    def __deepcopy__(self, memo: dict[int, Any]) -> "Rotation":
        return self  # it never changes, and its rotary module is the model's

    def move(
        self,
        key: Float[Tensor, "batch kv_heads n head_dim"],
        number: int,
        old: Int64[Tensor, "batch kv_heads n"],
        new: Int64[Tensor, "batch kv_heads n"],
    ) -> Float[Tensor, "batch kv_heads n head_dim"]:
        """The keys that the same tokens would have at other positions.

        Computed in float32 and rounded to the dtype of `key`, so half-precision keys that are moved
        again and again drift; move the first ones anew instead. Never waits for the device.

        Args:
            key: After RoPE.
            number: Which of `layers` they are of, counted from 0.
            old: The positions they are at; any number for padding.
            new: The positions they are to be at.
        """
        way = self._ways[number]
        return key if way is None else self._moved(key, way, old, new)

    def _moved(self, key: Tensor, way: _Way, old: Tensor, new: Tensor) -> Tensor:
        rows = key.flatten(0, 1).unsqueeze(1).float()  # a row per head, each with its own positions
        cos, sin = self._tables(rows, torch.cat([old, new]).flatten(0, 1), way.options)
        at_old, at_new = torch.complex(cos, sin).chunk(2)
        turn = at_new / at_old  # cancels the factor that some rope types have on their tables
        cos, sin = turn.real, turn.imag
        part = rows[..., : cos.shape[-1]] if way.partial else rows
        apply = importlib.import_module(way.module).apply_rotary_pos_emb
        # Without queries, so that no work is done for them.
        part = apply(part, cos, sin) if way.alone else apply(part[:, :0], part, cos, sin)[1]
        if way.partial:
            part = torch.cat([part, rows[..., cos.shape[-1] :]], dim=-1)
        return part.to(key.dtype).view(key.shape)

    def _tables(self, rows: Tensor, positions: Tensor, options: dict[str, str]) -> tuple[Any, ...]:
        """Cosines and sines in the dtype and on the device of `rows`."""
        tables = self._rotary(rows, positions, **options)
        if not isinstance(tables, tuple):
            raise _UnmovableError("its rotary module gives no cosines and sines")
        return tuple(table.to(rows.device) for table in tables)

    def _way_of(self, decoder: nn.Module, layer: int, dtype: torch.dtype) -> _Way | None:
        config: Any = decoder.config
        attention = _attention_of(decoder, layer)
        name = type(attention).__name__
        options = {}
        if "layer_type" in inspect.signature(type(self._rotary).forward).parameters:
            options["layer_type"] = config.layer_types[layer]
        device = next(attention.parameters()).device
        old, new = torch.tensor([_OLD, _NEW], device=device)
        count = old.numel() * config.hidden_size
        exact = torch.arange(count, dtype=torch.float32, device=device).sin().view(*old.shape, -1)
        tokens = exact.to(dtype)
        # Tables in float32 make exact keys in most half-precision models too.
        before = _keys(attention, tokens, old, self._tables(exact, old, options))
        after = _keys(attention, tokens, new, self._tables(exact, new, options))
        if torch.equal(before, after):
            return None
        with contextlib.suppress(TypeError, AttributeError):  # None has no cosines
            _keys(attention, tokens, old, None)
            raise _UnmovableError(
                f"whether layer {layer} is given position embeddings cannot be seen, as its {name} "
                "works without them too"
            )
        module = inspect.unwrap(type(attention).forward).__globals__["__name__"]
        signature = inspect.signature(importlib.import_module(module).apply_rotary_pos_emb)
        alone = next(iter(signature.parameters)) == "x"
        old, new = (rows.unsqueeze(1).expand(-1, before.shape[1], -1) for rows in (old, new))
        epsilon = max(torch.finfo(kind).eps for kind in (before.dtype, torch.float32))
        tolerance = 16 * epsilon * after.abs().max()
        for partial in (False, True):
            way = _Way(module, alone, partial, options)
            with contextlib.suppress(RuntimeError):  # shapes that do not fit
                if (self._moved(before, way, old, new) - after).abs().max() <= tolerance:
                    return way
        raise _UnmovableError(
            f"moved keys of layer {layer} are not those that its {name} computes there"
        )


def _rotary_of(decoder: nn.Module) -> nn.Module:
    """The decoder's rotary module, if its frequencies do not depend on the length."""
    config: Any = decoder.config
    if getattr(config, "kv_lora_rank", None) is not None:
        raise _UnmovableError(f"{config.model_type} caches latents (MLA), not keys")
    rope = getattr(config, "rope_parameters", None) or {}
    # One set of parameters, or one for each type of layer.
    ropes = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    for rope in ropes:
        if any(kind in rope.get("rope_type", "") for kind in _LENGTH_DEPENDENT):
            raise _UnmovableError(f"rope_type {rope['rope_type']!r} depends on the length")
    found = [part for part in decoder.modules() if "Rotary" in type(part).__name__]
    if len(found) != 1:
        raise _UnmovableError(f"it has {len(found)} rotary modules, not one for all layers")
    if hasattr(found[0], "mrope_section") or any("mrope_section" in rope for rope in ropes):
        raise _UnmovableError("its positions have three axes (mrope_section)")
    return found[0]


def _attention_of(decoder: nn.Module, layer: int) -> nn.Module:
    """The attention module of a layer."""
    parts = [part for part in decoder.modules() if "Attention" in type(part).__name__]
    found = [part for part in parts if getattr(part, "layer_idx", None) == layer]
    if len(found) != 1:
        raise _UnmovableError(f"layer {layer} has {len(found)} attention modules, not one")
    return found[0]


def _keys(attention: nn.Module, tokens: Tensor, positions: Tensor, tables: Any) -> Tensor:
    """The keys that an attention module gives its cache, batch x kv_heads x n x head_dim."""
    parameters = inspect.signature(inspect.unwrap(type(attention).forward)).parameters
    cache = next((name for name in _CACHE_NAMES if name in parameters), None)
    if cache is None or "position_embeddings" not in parameters:
        raise _UnmovableError(f"its {type(attention).__name__} is not given position embeddings")
    # Nothing that is not known here is made up: a call that needs more fails.
    given = {"position_embeddings": tables, "position_ids": positions, cache: _Capture()}
    given |= dict.fromkeys(("attention_mask", "shared_kv_states"))
    try:
        attention(tokens, **{name: given[name] for name in given.keys() & parameters.keys()})
    except _Captured as captured:
        return captured.args[0]  # type: ignore[no-any-return]
    raise _UnmovableError(f"its {type(attention).__name__} does not update its cache")
