"""Compressed caches on disk: one safetensors file, whose header says what made it.

No pickle: a file can hold wrong numbers, never code. What is read is checked against digests, and
against the model that is to go on from it, before a cache is made of it.
"""

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from kvcompress.cache import KVLayer
from kvcompress.errors import CacheFileError, UnsupportedCacheError
from kvcompress.hosting import CompressedCache, state_of
from kvcompress.plugins import policy_from
from kvcompress.quantized import QuantizedRows

FORMAT = 1
_KEY = "kvcompress"
_FREE = ("transformers_version", "_name_or_path", "use_cache", "dtype", "torch_dtype")
"""What of a configuration says nothing about keys and values, or is compared by itself."""


def save_cache(
    cache: Cache,
    path: str | Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Write a cache to one file; whole or not at all.

    Args:
        cache: What `session.prefill` gave, or any other whose prompt has ended.
        path: A new file, or one that is replaced.
        model: The model that filled it.
        tokenizer: What its text was read with, if loading is to check it.

    Raises:
        CacheFileError: The path is no place for a file.
        UnsupportedCacheError: Its prompt is still open, it is quantized or empty, or it has layers
            that cannot be saved.
    """
    state = state_of(cache)
    ended = state is not None and state.counts[0].seen and not state.turn.open
    if state is None or not ended or not isinstance(cache, CompressedCache):
        raise UnsupportedCacheError(
            "Only a CompressedCache whose prompt has ended can be saved. Make it by "
            "session.prefill(...), or pass one to generate."
        )
    from kvcompress import __version__

    tensors: dict[str, Tensor] = {}
    layers = [_of_layer(layer) for layer in cache.layers]
    parts = {
        "layers": layers,
        "state": state.snapshot(),
        "held_back": cache.held_back if cache.held_back_at == cache.get_seq_length() else None,
    }
    content = _take_apart(parts, "", tensors)
    header = {
        "format": FORMAT,
        "versions": {
            "kvcompress": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "model": _of_model(model),
        "tokenizer": None if tokenizer is None else _of_tokenizer(tokenizer),
        "policy": cache.policy.to_dict(),
        "content": content,
        "digests": {name: _digest(tensor) for name, tensor in tensors.items()},
    }
    text = json.dumps(header, sort_keys=True)
    metadata = {_KEY: text, "digest": hashlib.sha256(text.encode()).hexdigest()}
    path = Path(path)
    if not path.parent.is_dir() or path.is_dir():
        raise CacheFileError(
            f"{path} cannot be written: {path.parent} must be a folder, and {path.name} none. Make "
            "the folder, or give another path."
        )
    handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        save_file(tensors, beside, metadata)
        os.replace(beside, path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise


def load_cache(
    path: str | Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> CompressedCache:
    """Read a cache that `save_cache` wrote, for the model that filled it or an equal one.

    Args:
        path: The file.
        model: The model that is to go on from it; the cache is put on its device.
        tokenizer: To be compared with what the text was read with.

    Raises:
        CacheFileError: The file is damaged or none of ours, or was made by another model, another
            tokenizer or another format; the message says what differs.
    """
    header, tensors = _read(Path(path))
    if header.get("format") != FORMAT:
        raise CacheFileError(
            f"{path} has format {header.get('format')}, and this release reads {FORMAT}. Fill the "
            "cache again."
        )
    differs = _differences(header["model"], _of_model(model))
    if tokenizer is not None and header["tokenizer"] is not None:
        differs += _differences(header["tokenizer"], _of_tokenizer(tokenizer))
    if differs:
        raise CacheFileError(
            f"{path} was made by another model: {'; '.join(differs)}. Load that one, or fill the "
            "cache again."
        )
    tensors = {name: tensor.to(model.device) for name, tensor in tensors.items()}
    parts = _put_together(header["content"], tensors)
    cache = CompressedCache(model, policy_from(header["policy"]))
    if len(parts["layers"]) != len(cache.layers):
        raise CacheFileError(f"{path} has {len(parts['layers'])} layers, not {len(cache.layers)}.")
    for layer, (kind, values) in zip(cache.layers, parts["layers"], strict=True):
        if kind != type(layer).__name__:
            raise CacheFileError(f"{path} has a {kind} where the model has {type(layer).__name__}.")
        if isinstance(layer, KVLayer):
            layer.restore(values)
        else:
            vars(layer).update(values)
    state = state_of(cache)
    assert state is not None
    state.restore(parts["state"])
    cache.hold_back(parts["held_back"])
    return cache


def _of_layer(layer: Any) -> list[Any]:
    """A layer's kind and what it holds."""
    if not isinstance(layer, KVLayer):
        return [type(layer).__name__, dict(vars(layer))]
    if isinstance(layer.rows, QuantizedRows):
        raise UnsupportedCacheError("A quantized cache cannot be saved. Fill a plain one.")
    return [type(layer).__name__, layer.snapshot()]


def _take_apart(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Values that JSON has, with the names of tensors in place of tensors."""
    if isinstance(value, Tensor):
        tensors[name] = value.detach().contiguous().clone()
        return {"tensor": name}
    if isinstance(value, dict):
        return {
            "dict": [[key, _take_apart(v, f"{name}.{key}", tensors)] for key, v in value.items()]
        }
    if isinstance(value, (list, tuple)):
        return {"list": [_take_apart(v, f"{name}.{i}", tensors) for i, v in enumerate(value)]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": None}  # that of the model that loads it
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    raise UnsupportedCacheError(f"A {type(value).__name__} in a cache layer cannot be saved.")


def _put_together(value: Any, tensors: dict[str, Tensor]) -> Any:
    [(kind, content)] = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _put_together(each, tensors) for key, each in content}
    if kind == "list":
        return [_put_together(each, tensors) for each in content]
    if kind == "dtype":
        return getattr(torch, content)
    if kind == "device":
        return next(iter(tensors.values())).device
    return content


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and all tensors, each as it was written."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # Copies: these are views of the file, which may be written over.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise CacheFileError(f"There is no file {path}.") from None
    except (SafetensorError, OSError) as error:
        raise CacheFileError(f"{path} cannot be read: {error}. Fill the cache again.") from None
    text = metadata.get(_KEY)
    if text is None:
        raise CacheFileError(f"{path} is a safetensors file, but holds no cache of kvcompress.")
    if hashlib.sha256(text.encode()).hexdigest() != metadata.get("digest"):
        raise CacheFileError(f"{path} was changed: its header is not what was written.")
    header: dict[str, Any] = json.loads(text)
    found = {name: _digest(tensor) for name, tensor in tensors.items()}
    changed = sorted(set(found.items()) ^ set(header["digests"].items()))
    if changed:
        raise CacheFileError(f"{path} was changed: {changed[0][0]} is not what was written.")
    return header, tensors


def _digest(tensor: Tensor) -> str:
    data = tensor.cpu().contiguous().flatten().view(torch.uint8).numpy()
    shape = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    return hashlib.sha256(shape + data.tobytes()).hexdigest()


def _of_model(model: PreTrainedModel) -> dict[str, Any]:
    """What tells a model from others that would give other keys and values."""
    config = {name: value for name, value in model.config.to_dict().items() if name not in _FREE}
    plain: dict[str, Any] = json.loads(json.dumps(config, default=str))
    samples = hashlib.sha256()
    for weight in model.parameters():
        if not weight.is_meta:
            samples.update(weight.detach().flatten()[:8].float().cpu().numpy().tobytes())
    return {**plain, "dtype": str(model.dtype), "weights": samples.hexdigest()}


def _of_tokenizer(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    return {"vocabulary": hashlib.sha256(vocabulary.encode()).hexdigest()}


def _differences(saved: dict[str, Any], given: dict[str, Any]) -> list[str]:
    names = sorted({*saved, *given})
    return [
        f"{name} was {saved.get(name)!r} and is {given.get(name)!r}"
        for name in names
        if saved.get(name) != given.get(name)
    ]
