"""One timed `generate` call, with a policy or without: the measurement that commands share."""

from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvcompress.policy import Policy
from kvcompress.session import press
from kvcompress.timing import TimedStreamer


@dataclass(frozen=True)
class Run:
    """What one greedy generation gave and took."""

    tokens: list[int]
    """The new tokens."""
    seen_tokens: int
    held_tokens: int
    """In the layer that holds most."""
    cache_bytes: int
    """Rows of all layers, slack not counted."""
    prefill_seconds: float
    decode_seconds: tuple[float, ...]
    kept: Tensor | None
    """Share of KV heads that kept each prompt token, layers x prompt, hosted layers only."""

    @property
    def decode_ms(self) -> float:
        """Median milliseconds per token."""
        return 1000 * median(self.decode_seconds) if self.decode_seconds else float("nan")


@torch.inference_mode()
def timed_run(
    model: PreTrainedModel,
    input_ids: Tensor,
    policy: Policy | None,
    *,
    max_new_tokens: int,
) -> Run:
    """Generate greedily from one prompt.

    Args:
        model: Any supported model.
        input_ids: 1 x prompt.
        policy: None for the uncompressed cache.
        max_new_tokens: Length of the answer.
    """
    streamer = TimedStreamer()
    generate: Any = model.generate
    options: dict[str, Any] = {
        "attention_mask": torch.ones_like(input_ids),
        "max_new_tokens": max_new_tokens,
        "do_sample": False,
        "streamer": streamer,
        "return_dict_in_generate": True,
    }
    if policy is None:
        output = generate(input_ids, **options)
        cache = cache_of(output)
        layers = [layer for layer in cache.layers if layer.keys is not None]
        seen = cache.get_seq_length()
        held = max(layer.keys.shape[2] for layer in layers)
        held_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
        kept = None
    else:
        with press(model, policy) as session:
            output = generate(input_ids, **options)
        report = session.report()
        seen = max(layer.seen_tokens for layer in report.layers)
        held = max(layer.held_tokens for layer in report.layers)
        held_bytes = report.held_bytes
        kept = kept_share(cache_of(output), input_ids.shape[1])
    prompt = input_ids.shape[1]
    return Run(
        tokens=output.sequences[0, prompt:].tolist(),
        seen_tokens=seen,
        held_tokens=held,
        cache_bytes=held_bytes,
        prefill_seconds=streamer.prefill_seconds,
        decode_seconds=tuple(streamer.decode_seconds),
        kept=kept,
    )


def cache_of(output: Any) -> Any:
    """The cache in a model's output; the field was renamed in transformers 5.24."""
    return output.cache if "cache" in output else output.past_key_values


def kept_share(cache: Any, prompt: int) -> Tensor:
    """Share of KV heads that hold each of the first `prompt` tokens, hosted layers x prompt."""
    rows = []
    for layer in cache.layers:
        if not hasattr(layer, "positions"):
            continue
        positions = layer.positions[0].cpu()
        held = torch.zeros(positions.shape[0], int(positions.max()) + 1)
        held.scatter_(1, positions, 1.0)
        rows.append(held[:, :prompt].mean(dim=0))
    return torch.stack(rows)
