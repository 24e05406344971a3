"""The state of one cache: its policy, where its prompt ends, its padding, its numbers."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor

from kvcompress.attention import AttentionCall, current_generation, visible_to_last
from kvcompress.errors import (
    PressStateError,
    ShapeError,
    UnsupportedModeError,
    UnsupportedModelError,
)
from kvcompress.policy import DecodePolicy, Phase, Policy
from kvcompress.report import History, LayerCounts, Report, make_report
from kvcompress.tensors import left_padding


class Plan(Enum):
    """What the hosted layers do in one forward."""

    COLLECT = "part of a prompt: remember the queries"
    EVICT_AFTER = "the prompt ends in this forward: attend, then evict"
    EVICT_BEFORE = "the prompt turns out to have ended before this forward: evict, then attend"
    DECODE = "generated tokens"


@dataclass
class Turn:
    """A prompt, or a later part of a conversation, that ends in an eviction."""

    start: int
    """Tokens seen before it."""
    end: int | None
    """Tokens seen when it ends; None while only the next one-token call will tell."""
    open: bool = True


class CacheState:
    """What the hosted layers of one cache share.

    Everything that changes lives here or in the layers, nothing in the policy or the model; it
    refers to no tensor but the padding, so reports may outlive the cache.

    Turns are told apart by the first rule that applies: inside `generate`, one call is one turn,
    and its mask or ids say where it ends; with `forward_is_turn`, every forward of more than one
    token is one; else a turn starts with a forward of more than one token, and ends at
    `prompt_length`, at `end_prefill()`, or at the first one-token call.
    """

    def __init__(
        self,
        policy: Policy,
        hosted: tuple[int, ...],
        model_layers: int,
        *,
        model_name: str,
        prompt_length: int | None = None,
        forward_is_turn: bool = False,
        splits_heads: bool = False,
    ) -> None:
        self.policy = policy
        self.model_layers = model_layers
        self.model_name = model_name
        decode = policy.part("decode")
        self.decode = decode if isinstance(decode, DecodePolicy) else None
        self.prefill = policy.part("prefill")
        self.expands_latents = False
        self.forward_is_turn = forward_is_turn
        self.splits_heads = splits_heads
        """Whether other processes have the layers' other heads."""
        self.counts = [LayerCounts(index) for index in hosted]
        self.reset(prompt_length)

    def reset(self, prompt_length: int | None = None) -> None:
        """Back to an empty cache."""
        for count in self.counts:
            count.seen = count.held = count.allocated_bytes = 0
            count.budget, count.spared, count.settled = None, 0, 0
        self.turn = Turn(0, prompt_length)
        self.plan = Plan.COLLECT
        self.pads: Tensor | None = None
        self._pads_by_row: list[int] | None = None
        self.generation = 0
        self.torn = False
        self.passing = 0
        """How many of the newest rows will be taken out again after they were judged by."""
        self.spare: int | None = 0
        """Rows that every layer keeps beyond its budget; as many again if None."""
        self.total: int | None = None
        """Tokens of a prompt that comes in chunks, each with an eviction. Its padding is known, and
        masks need not tell it: a chunk may be nothing else."""
        self.updated = self.attended = 0
        self.since_eviction = 0
        self.history = History()

    @property
    def num_layers(self) -> int:
        """Hosted layers."""
        return len(self.counts)

    @property
    def phase(self) -> Phase:
        """What this forward belongs to."""
        return "prefill" if self.plan in (Plan.COLLECT, Plan.EVICT_AFTER) else "decode"

    @property
    def evicts_now(self) -> bool:
        """Whether this forward of generated tokens ends in an eviction."""
        return self.decode is not None and self.since_eviction >= self.decode.interval

    @property
    def longest(self) -> int:
        """Rows of the layer that holds most."""
        return max(count.held for count in self.counts)

    def begin_forward(self, new: int) -> None:
        """Decide what this forward of `new` tokens means; called before anything is appended.

        Raises:
            PressStateError: The tokens were already fed, or an earlier forward broke off.
            UnsupportedModeError: The policy cannot act in this mode.
        """
        if self.updated and self.attended < self.num_layers:
            if not self.attended:
                raise self.bypassed(self.counts[0].layer_idx)
            raise PressStateError(
                f"An earlier forward broke off after {self.attended} of {self.num_layers} hosted "
                "layers, so the layers of this cache no longer agree. Start again with a new "
                "cache, or call cache.reset()."
            )
        first = self.counts[0].seen
        if self.torn or any(count.seen != first for count in self.counts):
            raise PressStateError(
                "A crop() was refused when some layers of this cache had been cropped already, so "
                "its layers no longer agree. Start again with a new cache or a copy of it, or "
                "call cache.reset()."
            )
        self._find_turn(first, new)
        turn = self.turn
        if not turn.open:
            self._begin_decode(new)
        elif turn.end is None:
            ended = new == 1 and first > turn.start
            self.plan = Plan.EVICT_BEFORE if ended else Plan.COLLECT
        else:
            self.plan = Plan.EVICT_AFTER if first + new >= turn.end else Plan.COLLECT
        if self.plan in (Plan.EVICT_AFTER, Plan.EVICT_BEFORE):
            turn.open = False
            turn.end = turn.end if turn.end is not None else first
            self.since_eviction = first + new - turn.end
        self.updated = self.attended = 0

    def _find_turn(self, first: int, new: int) -> None:
        generation = current_generation()
        if generation is not None and generation.serial == self.generation:
            return
        # Later ones in the same call hold something else (the negative prompt of guidance).
        if generation is not None and not generation.hosted:
            generation.hosted = True
            generation.check_unfed(first)  # again here: a plain cache may just have been adopted
            if generation.drafts:
                self._refuse_drafts()
            self.generation = generation.serial
            end = self.turn.end
            if not self.turn.open and end is not None and first < end == generation.prompt_end:
                return  # what was held back of a prompt that has been judged
            # A wrapper may add to the prompt of `generate`, as the virtual tokens of PEFT.
            self.turn = Turn(first, max(generation.prompt_end or 0, first + new))
        elif self.forward_is_turn:
            if new > 1 or first == 0:
                self.turn = Turn(first, first + new)
        elif not self.turn.open and new > 1:
            self.turn = Turn(first, None)

    def _begin_decode(self, new: int) -> None:
        self.plan = Plan.DECODE
        self.since_eviction += new
        if new > 1:
            self._refuse_drafts()

    def _refuse_drafts(self) -> None:
        busy = self.decode or self.decode_observer
        if busy is not None:
            does = "evicts" if busy is self.decode else "keeps a record"
            raise UnsupportedModeError(
                f"{busy.name} {does} while decoding, and draft tokens of speculative decoding may "
                "be taken back. Use greedy search or sampling without drafts, or a policy that "
                "acts at prefill only."
            )

    @property
    def decode_observer(self) -> Policy | None:
        """The policy that notes what generated tokens attend to, if any."""
        return self.policy.observer("decode")

    @property
    def acts_at_decode(self) -> bool:
        """Whether generated tokens have a say in what is evicted."""
        return bool(self.decode or self.decode_observer)

    def check_crop(self, tokens: int) -> None:
        """Refuse to take tokens back that cannot be; before any hosted layer is changed.

        Raises:
            UnsupportedModeError: Rows were judged by them, or will be by what was noted of them.
        """
        later = [count.held - count.settled for count in self.counts if count.held < count.seen]
        if later and self.decode is not None:
            later.append(self.since_eviction)
        layers = range(self.num_layers)
        noted = self.decode_observer is not None or (
            self.decode is not None
            and any(self.decode.query_tokens(layer, self.num_layers) > 1 for layer in layers)
        )
        if tokens <= min(later, default=tokens) and not noted:
            return
        self.torn = self.counts[0].layer_idx > 0  # layers before it may have taken them back
        raise UnsupportedModeError(
            f"crop() by {tokens} tokens: rows have been judged by them, or by what was noted of "
            "them, which cannot be undone. Keep a copy.deepcopy(cache) of what you may want to go "
            "back to."
        )

    def bypassed(self, layer_idx: int) -> UnsupportedModelError:
        """The error for a layer whose attention did not pass the seam."""
        return UnsupportedModelError(
            f"{self.model_name}: layer {layer_idx} updated its cache, but its attention did not go "
            "through transformers' attention interface, so it cannot be compressed. Models with "
            "attention code of their own are not supported; nothing was generated."
        )

    def check_latents(self) -> None:
        """Refuse a cache of latents whose heads are spread over processes.

        Raises:
            UnsupportedModelError: The processes would keep different rows of the same latents.
        """
        if self.splits_heads:
            raise UnsupportedModelError(
                f"{self.model_name} caches latents, which all heads share, and it is "
                "tensor-parallel: each process would keep what its own heads attend to. Load it "
                "without tp_plan."
            )

    def check_positions(self, position_ids: Tensor | None, first: int, new: int) -> None:
        """Refuse a forward of several tokens whose positions were already fed.

        Raises:
            PressStateError: The first new position lies below what the cache has seen.
        """
        # One token is not checked: reading its position would stall an accelerator every step.
        if position_ids is None or position_ids.ndim != 2 or new == 1 or first == 0:
            return
        start = position_ids[:, 0]
        if self.pads is not None:
            start = start + self.pads.to(start.device)
        lowest = int(start.min())
        if lowest < first:
            generation = current_generation()
            drafts = generation is not None and generation.drafts
            raise PressStateError(
                f"The forward starts at position {lowest}, but the cache has already seen {first} "
                "tokens: they would be fed a second time. "
                + ("Speculative decoding feeds all it is given. " if drafts else "")
                + "Pass only tokens that the cache has not seen, with an attention_mask over all "
                "of them, or a new cache."
            )

    def read_padding(self, call: AttentionCall, new: int) -> None:
        """Learn the padding of a left-padded batch from the mask; refuse any other padding.

        Raises:
            UnsupportedModeError: Tokens are masked that are not at the left of their row.
        """
        batch, kv_len = call.key.shape[0], call.key.shape[2]
        visible = visible_to_last(call.mask, batch, kv_len)
        if visible is None:
            return
        if kv_len < self.counts[0].seen:  # padding is known since before the first eviction
            if not bool(visible[:, -new:].all()):
                raise self._bad_padding()
            return
        try:
            pads, by_row = left_padding(visible)
        except ShapeError:
            raise self._bad_padding() from None
        self.set_padding(pads if any(by_row) else None, by_row)

    @staticmethod
    def _bad_padding() -> UnsupportedModeError:
        return UnsupportedModeError(
            "The attention mask hides tokens that are not padding at the left of their row. Pad "
            "batches at the left (tokenizer.padding_side = 'left'), do not pack several sequences "
            "into a row, and do not pad between turns."
        )

    def set_padding(self, pads: Tensor | None, by_row: list[int] | None = None) -> None:
        """New padding of the rows; `by_row` is the same on the host, if it is at hand."""
        self.pads = pads
        self._pads_by_row = by_row

    def pads_by_row(self) -> list[int]:
        """Padding of every row of the batch; waits for the device once after it has changed."""
        if self.pads is None:
            return [0]
        if self._pads_by_row is None:
            self._pads_by_row = self.pads.tolist()
        return self._pads_by_row

    def prompt_lengths(self) -> list[int]:
        """Real tokens of every row when the turn ends, or all chunks of the prompt have."""
        end = self.turn.end or 0 if self.total is None else self.total
        return [end - pads for pads in self.pads_by_row()]

    def end_forward(self) -> None:
        """The last hosted layer has attended."""
        if self.phase == "decode" and self.evicts_now:
            self.since_eviction = 0
        self.history.add(self.counts[0].seen, sum(count.held for count in self.counts))

    def snapshot(self) -> dict[str, Any]:
        """What a cache needs beside its rows to go on, as plain values."""
        turn = self.turn
        return {
            "turn": [turn.start, turn.end, turn.open],
            "since_eviction": self.since_eviction,
            "pads": self.pads,
            "expands_latents": self.expands_latents,
        }

    def restore(self, values: dict[str, Any]) -> None:
        """Go on from a snapshot; the layers have been restored."""
        self.turn = Turn(*values["turn"])
        self.since_eviction = values["since_eviction"]
        self.expands_latents = values["expands_latents"]
        self.set_padding(values["pads"])
        self.history.add(self.counts[0].seen, sum(count.held for count in self.counts))

    def report(self) -> Report:
        """The numbers as they are now."""
        return make_report(str(self.policy), self.model_layers, self.counts, self.history)
