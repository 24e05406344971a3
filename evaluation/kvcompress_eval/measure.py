"""Measurements that commands share: a timed `generate` call, and losses along a text."""

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist, median
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from kvcompress.policy import Policy
from kvcompress.session import press
from kvcompress.timing import TimedStreamer

BLOCK = 128
"""Neighbouring tokens are alike, so means are compared over blocks of as many."""


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
    min_new_tokens: int = 0,
) -> Run:
    """Generate greedily from one prompt.

    Args:
        model: Any supported model.
        input_ids: 1 x prompt.
        policy: None for the uncompressed cache.
        max_new_tokens: Length of the answer.
        min_new_tokens: What ends an answer has no effect before so many.
    """
    streamer = TimedStreamer()
    generate: Any = model.generate
    options: dict[str, Any] = {
        "attention_mask": torch.ones_like(input_ids),
        "max_new_tokens": max_new_tokens,
        "min_new_tokens": min_new_tokens or None,
        "do_sample": False,
        "streamer": streamer,
        "return_dict_in_generate": True,
    }
    if policy is None:
        output = generate(input_ids, **options)
        cache = cache_of(output)
        seen = cache.get_seq_length()
        held, held_bytes = size_of(cache)
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


def environment(model: PreTrainedModel) -> dict[str, str]:
    """What a record says about where it was made."""
    return {
        "device": str(model.device),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def random_ids(model: PreTrainedModel, length: int) -> Tensor:
    """A prompt of so many tokens, 1 x length; the same for the same length."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(0)
    return torch.randint(5, vocabulary, (1, length), generator=generator).to(model.device)


def forward(model: Any, ids: Tensor, cache: Any = None) -> Any:
    """The output of one call with the last token's logits alone, its cache in it."""
    return model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)


def cache_of(output: Any) -> Any:
    """The cache in a model's output; the field was renamed in transformers 5.24."""
    return output.cache if "cache" in output else output.past_key_values


def size_of(cache: Any) -> tuple[int, int]:
    """Rows of the layer that holds most, and bytes of all rows, slack not counted; of any cache."""
    layers = [layer for layer in cache.layers if layer.keys is not None]
    held = max(layer.keys.shape[2] for layer in layers)
    return held, sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)


def kept_share(cache: Any, tokens: int) -> Tensor:
    """Share of KV heads that hold each of the first `tokens` tokens, hosted layers x tokens."""
    rows = []
    for layer in cache.layers:
        if not hasattr(layer, "positions"):
            continue
        positions = layer.positions[0].cpu()
        held = torch.zeros(positions.shape[0], layer.get_seq_length())
        held.scatter_(1, positions, 1.0)
        rows.append(held[:, :tokens].mean(dim=0))
    return torch.stack(rows)


@dataclass(frozen=True)
class Mean:
    """A mean over tokens, with the half width of its 95 % confidence interval."""

    value: float
    half_width: float


def mean_of(losses: Tensor) -> Mean:
    """From blocks of neighbouring tokens, taken to be independent of each other."""
    blocks = torch.stack([block.mean() for block in losses.split(BLOCK)])
    spread = float(blocks.std()) / len(blocks) ** 0.5 if len(blocks) > 1 else float("nan")
    return Mean(float(losses.mean()), NormalDist().inv_cdf(0.975) * spread)


def stream_losses(
    model: PreTrainedModel, input_ids: Tensor, policy: Policy, chunk: int
) -> Iterator[Tensor]:
    """Negative log-likelihoods of a text, chunk by chunk, each evicted after it was read.

    Args:
        model: Any supported model.
        input_ids: 1 x tokens.
        policy: Cuts the cache after every chunk.
        chunk: Tokens fed at once, at least 2.

    Yields:
        Of every token but the text's first, in nats.
    """
    cache, last = None, None
    with press(model, policy), torch.inference_mode():
        for piece in input_ids.split(chunk, dim=1):
            given: dict[str, Any] = {} if cache is None else {"past_key_values": cache}
            output = model(piece, use_cache=True, **given)
            cache = cache_of(output)
            logits = output.logits if last is None else torch.cat([last, output.logits], dim=1)
            yield _losses(logits[:, :-1], piece if last is not None else piece[:, 1:])
            last = output.logits[:, -1:]


def window_losses(
    model: PreTrainedModel, input_ids: Tensor, context: int, chunk: int
) -> Iterator[Tensor]:
    """The same with a fresh context of the last `context` tokens for every chunk, no cache kept."""
    with torch.inference_mode():
        for end in range(chunk, input_ids.shape[1] + chunk, chunk):
            end = min(end, input_ids.shape[1])
            wanted = (end - 1) % chunk + 1
            piece = input_ids[:, max(0, end - context) : end]
            wanted = min(wanted, piece.shape[1] - 1)
            logits = model(piece, use_cache=False, logits_to_keep=wanted + 1).logits
            yield _losses(logits[:, :-1], piece[:, -wanted:])


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits[0].float(), targets[0], reduction="none").cpu()
