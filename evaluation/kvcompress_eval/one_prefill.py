"""One prefill for many policies: what they are to be compared on is read once."""

import copy
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedModel

from kvcompress.cache import KVLayer
from kvcompress.errors import PressStateError
from kvcompress.hosting import CompressedCache, hosted_layers, state_of
from kvcompress.policy import Phase, Policy
from kvcompress.session import cache_argument

EVERYTHING = 2**40
"""A capacity that no prompt reaches."""


class _Waiting(Policy):
    """Remembers queries for the policies that come later, and evicts nothing itself."""

    name: ClassVar[str] = "waiting"
    phases: ClassVar[frozenset[Phase]] = frozenset({"prefill"})

    queries: int = Field(ge=0)

    def query_tokens(self, layer_idx: int, num_layers: int) -> int:
        return self.queries


class OnePrefill:
    """A prompt that a model reads once, and the caches that policies make of it.

    A prefill is the same for every policy that looks at the prompt's keys, values and last queries
    when it has been read: nothing is evicted before. So the model runs once, and each policy cuts
    its own cache. Not so for policies that keep a record of all queries; see `serves`.

    Args:
        model: Any supported model.
        input_ids: 1 x prompt.
        policies: Those that will be asked for; None among them stands for the whole cache.
    """

    def __init__(
        self, model: PreTrainedModel, input_ids: Tensor, policies: Iterable[Policy | None]
    ) -> None:
        layers = len(hosted_layers(model.config))
        self._queries = max((_queries(policy, layers) for policy in policies), default=0)
        self._model, self._layers = model, layers
        self._whole = CompressedCache(model, _Waiting(capacity=EVERYTHING, queries=self._queries))
        self.logits = feed(model, input_ids, self._whole)
        """Of the prompt's last token, 1 x vocabulary; it has read everything."""

    @staticmethod
    def serves(policy: Policy | None) -> bool:
        """Whether a policy can be asked for; if not, it needs a prefill of its own."""
        return policy is None or policy.observer("prefill") is None

    def cache(self, policy: Policy | None) -> CompressedCache:
        """A cache that cuts itself when the next token is fed; for None, one that stays whole.

        Raises:
            PressStateError: The policy keeps a record of queries, or reads more than are left.
        """
        if policy is None:
            return copy.deepcopy(self._whole)
        if not self.serves(policy) or _queries(policy, self._layers) > self._queries:
            raise PressStateError(
                f"{policy} needs queries of the prompt that were not kept: it was not among the "
                "policies of this prefill, or keeps a record of all. Prefill under it."
            )
        cache = CompressedCache(self._model, policy)
        for number, layer in enumerate(self._whole.layers):
            own = cache.layers[number]
            if isinstance(layer, KVLayer) and isinstance(own, KVLayer):
                own.restore(layer.snapshot())
            else:
                cache.layers[number] = copy.deepcopy(layer)
        whole, state = state_of(self._whole), state_of(cache)
        assert whole is not None and state is not None
        state.restore(whole.snapshot())
        return cache

    def answer(
        self, policy: Policy | None, max_new_tokens: int
    ) -> tuple[list[int], CompressedCache]:
        """Greedy tokens without the end token, and the cache after all but the last were fed."""
        cache = self.cache(policy)
        stop = end_tokens(self._model)
        token, tokens = self.logits.argmax(dim=-1, keepdim=True), list[int]()
        while int(token) not in stop:
            tokens.append(int(token))
            if len(tokens) == max_new_tokens:
                break
            token = feed(self._model, token, cache).argmax(dim=-1, keepdim=True)
        return tokens, cache


def settled(model: PreTrainedModel, caches: Sequence[CompressedCache]) -> CompressedCache:
    """A cache that evicts nothing more, with the rows of several as the rows of a batch.

    Args:
        model: What filled them.
        caches: Each of one row, of the same prompt, which has ended, and in each layer of as many
            held tokens.
    """
    joined = CompressedCache(model, _Waiting(capacity=EVERYTHING, queries=0))
    for number, own in enumerate(joined.layers):
        parts = [cache.layers[number] for cache in caches]
        if isinstance(own, KVLayer):
            taken = [part.snapshot() for part in parts if isinstance(part, KVLayer)]
            values = taken[0] | {"front": None, "state": {}, "recent": [], "unseen": []}
            for name in ("keys", "values", "columns"):
                values[name] = torch.cat([each[name] for each in taken])
            own.restore(values)
        else:  # with a window or a state: the same whatever the policy
            other: Any = copy.deepcopy(parts[0])
            other.batch_repeat_interleave(len(caches))
            joined.layers[number] = other
    first, state = state_of(caches[0]), state_of(joined)
    assert first is not None and state is not None
    state.restore(first.snapshot())
    return joined


@torch.inference_mode()
def feed(model: PreTrainedModel, ids: Tensor, cache: Any) -> Tensor:
    """Logits after the last of some tokens, batch x vocabulary; the cache has read them then."""
    given = {cache_argument(model): cache, "use_cache": True, "logits_to_keep": 1}
    logits: Tensor = model(ids, **given).logits
    return logits[:, -1]


def end_tokens(model: PreTrainedModel) -> set[int | None]:
    """Tokens that end an answer."""
    ends = model.generation_config.eos_token_id
    return set(ends) if isinstance(ends, list) else {ends}


def _queries(policy: Policy | None, layers: int) -> int:
    if policy is None:
        return 0
    prompt, answer = policy.part("prefill"), policy.part("decode")
    found = [prompt.prompt_query_tokens(layer, layers) for layer in range(layers) if prompt]
    found += [answer.query_tokens(layer, layers) for layer in range(layers) if answer]
    return max(found)
