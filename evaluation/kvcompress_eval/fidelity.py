"""How far a compressed cache's predictions are from the uncompressed model's, token by token.

The uncompressed model continues a prompt, and every policy's cache is fed that same continuation,
whatever it would have said itself (teacher forcing). So at every token both have read the same
text, and what differs is the cache. The continuation's first token is left out: it is predicted by
the prefill, which reads everything.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor
from transformers import PreTrainedModel

from kvcompress.hosting import CompressedCache
from kvcompress.policy import Policy
from kvcompress_eval.one_prefill import OnePrefill, end_tokens, feed

RESAMPLES = 9999


@dataclass(frozen=True)
class Fidelity:
    """One policy on one prompt. Lists have an entry for each token from the second one on."""

    continuation: list[int]
    """What the uncompressed model says, the first token included."""
    agrees: list[bool]
    """Whether the compressed cache's likeliest token is the continuation's."""
    divergence: list[float]
    """KL(uncompressed || compressed) of the next token's distribution, nats."""
    more_loss: list[float]
    """By how much the continuation's token is less likely, nats of NLL."""
    held_tokens: float
    """Rows in the end, mean over layers that policies act on, per KV head."""


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts, and its standard error; NaN from a single prompt."""

    value: float
    error: float

    def text(self, places: int, sign: str = "") -> str:
        """For a table; without an error where a single prompt gives none."""
        spread = "" if math.isnan(self.error) else f" ± {self.error:.{places}f}"
        return f"{self.value:{sign}.{places}f}{spread}"


def fidelity(
    model: PreTrainedModel,
    input_ids: Int64[Tensor, "1 prompt"],
    policies: Sequence[Policy],
    new_tokens: int,
) -> Iterator[tuple[Policy, Fidelity]]:
    """Compare every policy with the uncompressed cache on one prompt.

    Args:
        model: Any supported model.
        input_ids: The prompt, not padded.
        policies: Those that can share a prefill do.
        new_tokens: Length of the continuation, at least 2; it ends earlier at an end token, which
            is compared too.

    Yields:
        In the order given. Lists are empty if the continuation has one token.
    """
    shared = [policy for policy in policies if OnePrefill.serves(policy)]
    prefill = OnePrefill(model, input_ids, [None, *shared])
    said, full = continued(model, prefill, new_tokens)
    for policy in policies:
        if policy in shared:
            cache = prefill.cache(policy)
        else:
            cache = CompressedCache(model, policy, prompt_length=input_ids.shape[1])
            feed(model, input_ids, cache)
        yield policy, compare(said, full, read_on(model, cache, said[:-1]), cache)


def read_on(
    model: PreTrainedModel, cache: CompressedCache, tokens: Sequence[int]
) -> Float[Tensor, "tokens vocabulary"]:
    """Logits after each of the tokens that are fed to a cache, one at a time.

    At once would be faster where nothing is evicted meanwhile, but sums in another order, by which
    two equal caches would differ in half precision.
    """
    found = [feed(model, torch.tensor([[each]], device=model.device), cache) for each in tokens]
    if not found:
        return torch.empty(0, model.config.get_text_config(decoder=True).vocab_size)
    return torch.cat(found)


def bootstrap(values: Sequence[float]) -> Estimate:
    """The mean of independent values, with the standard error that resampling them gives.

    The same for the same values: the resampling is seeded.
    """
    from scipy import stats

    mean = float(np.mean(values))
    if len(values) < 2:
        return Estimate(mean, float("nan"))
    found = stats.bootstrap(
        (np.asarray(values),), np.mean, n_resamples=RESAMPLES, method="percentile", rng=0
    )
    return Estimate(mean, float(found.standard_error))


def continued(
    model: PreTrainedModel, prefill: OnePrefill, new_tokens: int
) -> tuple[list[int], Tensor]:
    """Greedy tokens up to an end token, and the logits that chose all but the first."""
    cache, logits = prefill.cache(None), list[Tensor]()
    stop = end_tokens(model)
    said = [int(prefill.logits.argmax())]
    while len(said) < new_tokens and said[-1] not in stop:
        logits.append(feed(model, torch.tensor([said[-1:]], device=model.device), cache))
        said.append(int(logits[-1].argmax()))
    return said, torch.cat([*logits, prefill.logits[:0]])


def compare(
    said: list[int],
    full: Float[Tensor, "tokens vocabulary"],
    ours: Float[Tensor, "tokens vocabulary"],
    cache: CompressedCache,
) -> Fidelity:
    """What a cache makes of a continuation.

    Args:
        said: The continuation, from its first token on.
        full: The uncompressed model's logits of all its tokens but the first.
        ours: Those of the compressed cache.
        cache: After it has read all but the last token.
    """
    report = cache.report()
    # In double precision, so that equal caches differ by nothing that could be seen.
    first: Float64[Tensor, "tokens vocabulary"] = full.double().log_softmax(dim=-1)
    second: Float64[Tensor, "tokens vocabulary"] = ours.double().log_softmax(dim=-1)
    targets = torch.tensor(said[1:], dtype=torch.long, device=full.device)[:, None]
    # Where the first is 0 its logarithm is -inf in some models that forbid tokens: 0 there.
    apart = torch.where(first.isinf(), 0.0, first.exp() * (first - second))
    less = (first - second).gather(1, targets)[:, 0]
    return Fidelity(
        continuation=said,
        agrees=(ours.argmax(dim=-1) == targets[:, 0]).tolist(),
        divergence=apart.sum(dim=-1).tolist(),
        more_loss=less.tolist(),
        held_tokens=report.held_tokens / report.hosted_layers,
    )
