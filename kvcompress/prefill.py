"""Prefill in bounded memory: a long prompt in chunks, the cache cut after each of them.

Early chunks are judged by what the prompt ends in, as FINCH does (Corallo & Papotti 2024,
arXiv:2408.00167): after every chunk the prompt's last tokens, the look-ahead, are fed at their true
positions, vote, and are taken out again.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvcompress.cache import KVLayer
from kvcompress.errors import PolicyConfigError, ShapeError, UnsupportedModeError
from kvcompress.hosting import CompressedCache, state_of
from kvcompress.policy import Policy
from kvcompress.state import Turn

Progress = Callable[[int, int], None]
"""Told the tokens that were read, and all of them."""


def default_lookahead(policy: Policy, num_layers: int) -> int:
    """How many of the prompt's last tokens vote after every chunk: as many queries as are read.

    None if the policy keeps a record of all queries, in which they would count once a chunk, or
    judges spans, each by its own.
    """
    part = policy.part("prefill")
    if part is None or part.fair or policy.observer("prefill") is not None:
        return 0
    return max(part.query_tokens(layer, num_layers) for layer in range(num_layers))


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def check_chunks(policy: Policy, num_layers: int, lookahead: int | None) -> None:
    """Refuse a policy that cannot act on a prompt in chunks, whatever the prompt.

    Raises:
        PolicyConfigError: Its budget is not fixed.
        UnsupportedModeError: It leaves the prompt whole, or cannot look ahead.
    """
    part = policy.part("prefill")
    if part is None:
        raise UnsupportedModeError(
            f"{policy} leaves the prompt whole, so its cache cannot be bounded. Compose it "
            "with a policy for the prompt."
        )
    if part.keep_ratio is not None:
        raise PolicyConfigError(
            f"{part} keeps a share of the prompt, which bounds nothing. Give it a capacity."
        )
    if lookahead and policy.observer("prefill") is not None:
        raise UnsupportedModeError(
            f"{policy} keeps a record of all queries, in which the look-ahead would count once "
            f"for every chunk. Use lookahead=0 instead of {lookahead}."
        )
    if lookahead and any(part.reindexed_tokens(i, num_layers) for i in range(num_layers)):
        raise UnsupportedModeError(
            f"{policy} moves keys to other positions, and the look-ahead is fed at its true "
            f"ones. Use lookahead=0 instead of {lookahead}."
        )


class ChunkedPrefill:
    """The prefill of one prompt: what is fed when, and what is taken out again.

    Args:
        model: Whatever is called with tokens.
        cache: An empty compressed cache.
        cache_name: What the model calls it.
        input_ids: Token ids, batch x prompt.
        attention_mask: The same or None; 0 for padding, at the left.
        chunk_size: Tokens that are fed between two evictions.
        lookahead: How many of the prompt's last tokens vote after every chunk; None for
            `default_lookahead`. With 0 every chunk is judged by its own end.
        hold_back: How many tokens at the prompt's end are to be fed again.
        spare: Rows beyond its budget that every layer keeps until the prompt's end; None for as
            many as the budget.

    Raises:
        PolicyConfigError: The policy's budget is not fixed, or leaves no room beside these tokens.
        ShapeError: The sizes do not fit together.
        UnsupportedModeError: The policy cannot act like this.
    """

    def __init__(
        self,
        model: Any,
        cache: CompressedCache,
        cache_name: str,
        input_ids: Any,
        attention_mask: Any,
        *,
        chunk_size: Any,
        lookahead: Any,
        hold_back: Any,
        spare: Any,
    ) -> None:
        state = state_of(cache)
        assert state is not None
        if not isinstance(input_ids, Tensor) or input_ids.ndim != 2 or input_ids.numel() == 0:
            raise ShapeError(f"input_ids is {_described(input_ids)}; it must be (batch, prompt).")
        if attention_mask is not None and not isinstance(attention_mask, Tensor):
            raise ShapeError(
                f"attention_mask is {_described(attention_mask)}; it must be (batch, prompt)."
            )
        self._model, self._cache, self._state, self._name = model, cache, state, cache_name
        self._ids = input_ids
        self._mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.long()
        self._positions = (self._mask.cumsum(dim=1) - 1).clamp(min=0)
        self._reads = ""
        if lookahead is None:
            self._reads = " (as many queries as it reads)"
            lookahead = default_lookahead(state.policy, state.num_layers)
            shortest = int(self._mask.sum(dim=1).min())
            lookahead = min(lookahead, max(shortest - max(hold_back, 1), 0))
        self._chunk, self._lookahead, self._hold_back = chunk_size, lookahead, hold_back
        self._spare = spare
        self._check()

    def _check(self) -> None:
        total, policy, layers = self._ids.shape[1], self._state.policy, self._state.num_layers
        sizes = {"chunk_size": (self._chunk, 1), "lookahead": (self._lookahead, 0)}
        sizes |= {"hold_back": (self._hold_back, 0)}
        if self._spare is not None:
            sizes["spare"] = (self._spare, 0)
        for name, (value, least) in sizes.items():
            if not isinstance(value, int) or value < least:
                raise ShapeError(f"{name}={value!r} must be a whole number, at least {least}.")
        for name in ("lookahead", "hold_back"):
            if sizes[name][0] >= total:
                raise ShapeError(
                    f"{name}={sizes[name][0]}, and the prompt has {total} tokens: it must be "
                    f"shorter. Use {name}=0, or a longer prompt."
                )
        if self._mask.shape != self._ids.shape:
            raise ShapeError(
                f"attention_mask is {tuple(self._mask.shape)} and input_ids "
                f"{tuple(self._ids.shape)}; both must be (batch, prompt)."
            )
        check_chunks(policy, layers, self._lookahead)
        part = policy.part("prefill")
        assert part is not None
        if part.fair and total > self._chunk + self._lookahead:
            raise UnsupportedModeError(
                f"{part}: the spans of a prompt are judged when all of it was read, and its "
                f"{total} tokens come in chunks of {self._chunk}, with an eviction after each. Use "
                f"chunk_size={total}, or leave fair out."
            )
        extra = max(self._lookahead, self._hold_back)
        named = part.named_tokens
        least = min(part.budget(total, layer, layers) for layer in range(layers))
        if least <= extra + named:
            beside = f" beside {named} tokens of protect" if named else ""
            raise PolicyConfigError(
                f"{part} keeps {least} rows in some layer, and lookahead={self._lookahead}"
                f"{self._reads}, hold_back={self._hold_back} need more than {extra}{beside}. Use "
                "a larger capacity, or give smaller ones of these."
            )
        pads = self._mask.argmax(dim=1)
        if not torch.equal(self._mask.sum(dim=1), total - pads):
            raise UnsupportedModeError(
                "The attention mask hides tokens that are not padding at the left of their row. "
                "Pad at the left (tokenizer.padding_side = 'left')."
            )
        shortest = total - int(pads.max())
        if shortest <= extra:
            raise UnsupportedModeError(
                f"A row has {shortest} real tokens, and lookahead={self._lookahead}, "
                f"hold_back={self._hold_back} need more than {extra}. Run it by itself, or use "
                "smaller ones of these."
            )
        if int(pads.max()):
            self._state.set_padding(pads)

    @torch.no_grad()
    def run(self, progress: Progress | None = None) -> None:
        """Feed all of the prompt."""
        total, fed = self._ids.shape[1], 0
        # Counted from the end, so that a row is cut alike with and without padding before it. What
        # is left at the end has nothing to look ahead to, and is long enough to vote itself.
        last = total - self._chunk - self._lookahead
        observed = self._state.policy.observer("prefill") is not None
        self._state.total = total - self._hold_back if observed else total
        self._state.spare = self._spare
        for end in reversed(range(last, 0, -self._chunk)):
            if self._lookahead:
                self._read(fed, end)
                self._read_and_evict(total - self._lookahead, total, back=self._lookahead)
            else:
                self._read_and_evict(fed, end)
            fed = end
            if progress is not None:
                progress(fed, total)
        self._state.spare = 0
        self._read_end(fed, total)
        self._state.total = None
        if progress is not None:
            progress(total, total)

    def _read_end(self, fed: int, total: int) -> None:
        last = total - self._hold_back
        if self._hold_back and self._state.policy.observer("prefill") is not None:
            # Its record could not forget them: they are left for when they are fed for good.
            self._read_and_evict(fed, last)
            return
        if self._hold_back and self._others() and last > fed:
            self._read(fed, last)
            fed = last
        self._read_and_evict(fed, total, back=self._hold_back)

    def _read(self, start: int, end: int) -> None:
        """Feed a part of the prompt; nothing is evicted."""
        self._state.turn = Turn(0, self._ids.shape[1] + 1)
        self._forward(start, end)

    def _read_and_evict(self, start: int, end: int, back: int = 0) -> None:
        """Feed a part of the prompt, evict, and take the last `back` of these tokens out again."""
        others = copy.deepcopy(self._others()) if back else {}
        self._state.turn = Turn(0, self._state.counts[0].seen + end - start)
        self._state.passing = back
        self._forward(start, end)
        self._state.passing = 0
        if back:
            for layer in self._cache.layers:
                if isinstance(layer, KVLayer):
                    layer.take_back(back)
        for number, layer in others.items():
            self._cache.layers[number] = layer

    def _others(self) -> dict[int, Any]:
        """Layers with windows or states: what they have read they cannot forget."""
        layers = enumerate(self._cache.layers)
        return {number: layer for number, layer in layers if not isinstance(layer, KVLayer)}

    def _forward(self, start: int, end: int) -> None:
        seen = self._state.counts[0].seen
        self._model(
            self._ids[:, start:end],
            attention_mask=torch.cat([self._mask[:, :seen], self._mask[:, start:end]], dim=1),
            position_ids=self._positions[:, start:end],
            use_cache=True,
            logits_to_keep=1,
            **{self._name: self._cache},
        )
