"""The cache layer: what transformers and the seam call, and the moment of eviction."""

import time
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from kvcompress.attention import (
    AttentionCall,
    HostedLayer,
    Lease,
    announce,
    current_generation,
)
from kvcompress.errors import PolicyConfigError, UnsupportedModeError
from kvcompress.fair import judge_spans
from kvcompress.policy import LayerView, Phase, Policy
from kvcompress.rotation import Rotation
from kvcompress.rows import Ledger, Rows, Spare
from kvcompress.selection import Judgement, batch_budget, final_scores, judge
from kvcompress.state import CacheState, Plan
from kvcompress.tensors import (
    gather_rows,
    lowest,
    newest,
    positions_of,
    row_numbers,
    top_positions,
)

OBSERVED_TOGETHER = 16
"""Decode steps whose queries a policy with state is shown in one go, if it evicts as rarely."""


class Shared:
    """What the layers of a cache share in evicting."""

    def __init__(self, *, shares_kv: bool = False) -> None:
        self.nominees: list[tuple[KVLayer, Judgement, int]] = []
        """Layers that will evict when this forward ends, and how many of their rows stay."""
        self.spare = Spare(shared=shares_kv)


class KVLayer(DynamicLayer, HostedLayer):
    """One layer of a compressed cache.

    To transformers it is a layer that has *seen* `get_seq_length()` tokens, so positions and turns
    come out right, and *holds* fewer, which only its mask sizes tell.
    """

    is_sliding = False

    def __init__(
        self,
        state: CacheState,
        index: int,
        lease: Lease,
        shared: Shared,
        rotation: Rotation | None = None,
        rows: Rows | None = None,
    ) -> None:
        self.state = state
        self._shared = shared
        self._rotation = rotation
        parts: dict[Phase, Policy | None] = {"prefill": state.prefill, "decode": state.decode}
        self._reads: dict[Phase, int] = {  # queries, by the policy of each phase
            phase: part.query_tokens(index, state.num_layers) if part else 0
            for phase, part in parts.items()
        }
        if state.prefill is not None:
            self._reads["prefill"] = state.prefill.prompt_query_tokens(index, state.num_layers)
        self.index = index
        self.counts = state.counts[index]
        self.rows = Rows(self.counts, shared.spare) if rows is None else rows
        """The storage, with rows in whatever order they are."""
        self._lease = lease
        self._forget()
        super().__init__()  # type: ignore[no-untyped-call]
        self.record_past = False

    def _forget(self) -> None:
        self.rows.clear()
        self._recent: list[Tensor] = []  # the turn's last queries, oldest first
        self._unseen: list[Tensor] = []  # queries that the policy has still to observe
        self._new = 0
        self._lent = 0  # where the keys are that the last update returned
        self._facts: dict[str, Any] = {"scaling": 1.0}
        self._heads = 0  # query heads, until the first attention call tells

    # `keys` and `values` are properties because inherited code reads and assigns them.

    @property
    def keys(self) -> Tensor | None:
        """Held keys in position order, batch x kv_heads x held x head_dim: a view of a buffer."""
        self.rows.restore_order()
        return None if self.rows.empty else self.rows.keys

    @keys.setter
    def keys(self, rows: Tensor | None) -> None:
        if rows is not None:
            raise AttributeError("the keys of a compressed cache cannot be assigned")

    @property
    def values(self) -> Tensor | None:
        """Held values in position order, batch x kv_heads x held x head_dim."""
        self.rows.restore_order()
        return None if self.rows.empty else self.rows.values

    @values.setter
    def values(self, rows: Tensor | None) -> None:
        if rows is not None:
            raise AttributeError("the values of a compressed cache cannot be assigned")

    @property
    def columns(self) -> Int64[Tensor, "batch kv_heads held"]:
        """Which of the seen tokens, padding included, every held row is; ascending."""
        self.rows.restore_order()
        return self.rows.columns().long()

    @property
    def positions(self) -> Int64[Tensor, "batch kv_heads held"]:
        """Original position of every held row, ascending; -1 for padding."""
        return positions_of(self.columns, self.state.pads)

    def adopt(self, layer: DynamicLayer) -> None:
        """Take over the rows of a layer that was filled before it was hosted."""
        if not layer.is_initialized or layer.keys is None or layer.keys.ndim != 4:
            return
        assert layer.values is not None
        self.lazy_initialization(layer.keys, layer.values)
        self.rows.adopt(layer.keys, layer.values)
        self.counts.held = self.counts.seen = layer.keys.shape[2]
        self._account()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Remember device and dtype; buffers come with the first rows."""
        self.device, self.dtype = key_states.device, key_states.dtype
        self.is_initialized = True

    @torch.compiler.disable
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the new rows and return all that is held, for this call's attention.

        Raises:
            UnsupportedModelError: The previous layer's attention bypassed the seam.
        """
        rows, new = self.rows, key_states.shape[-2]
        if not rows.empty and rows.batch_heads[0] != key_states.shape[0]:
            raise UnsupportedModeError(
                f"The cache holds a batch of {rows.batch_heads[0]}, the call brings "
                f"{key_states.shape[0]} rows. Repeat it first: cache.batch_repeat_interleave(n)."
            )
        if self.index == 0:
            self.state.begin_forward(new)
        elif self.state.updated != self.state.attended:
            raise self.state.bypassed(self.state.counts[self.index - 1].layer_idx)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.state.plan is not Plan.DECODE or new > 1:
            rows.restore_order()
        if self.state.plan is Plan.EVICT_BEFORE and not self.state.expands_latents:
            self.end_prefill()
        allocated = rows.append(key_states, value_states)
        self._new = new
        self.state.updated += 1
        if allocated:
            self._account()
        announce(self)
        keys = rows.keys
        self._lent = keys.data_ptr()
        return keys, rows.values

    def undo_update(self) -> None:
        """Take the last update back."""
        self.counts.held -= self._new
        self.counts.seen -= self._new
        if self.counts.seen == 0:
            self._forget()
        self._new = 0
        if self.index == 0:
            self.state.updated = self.state.attended = 0

    def keep(
        self,
        index: Int64[Tensor, "batch kv_heads kept"],
        numbers: Int64[Tensor, " rows"] | None = None,
    ) -> None:
        """Evict every row that is not in `index` (ascending) and release its storage.

        Args:
            index: The rows that stay.
            numbers: `numbers_for(index)`, if it is at hand.
        """
        away = self.rows.away
        if away:
            self.rows.move(self.rows.device)
        changed = self.rows.keep(index, self.numbers_for(index) if numbers is None else numbers)
        if away:
            self.rows.move("cpu")
        if self._rotation is not None:
            self._reindex(self._rotation)
        if changed:
            self._account()

    def numbers_for(
        self, index: Int64[Tensor, "*layers batch kv_heads kept"]
    ) -> Int64[Tensor, "*layers rows"]:
        """Which rows of the buffers the next buffers are filled with.

        Room for what comes until the next eviction. Where there is none the first new token makes
        room: until then other layers may still need theirs, as at the end of a long prompt.
        """
        decode = self.state.decode
        room = 0 if decode is None else decode.interval
        return self.rows.numbers_for(index, index.shape[-1] + room)

    def _reindex(self, rotation: Rotation) -> None:
        """Move the keys at the front up to the rows behind them.

        Always from their original positions, so that no error adds up over a long stream.
        """
        moved = self.state.policy.reindexed_tokens(self.index, self.state.num_layers)
        old = self.rows.columns()[..., :moved].long()
        first = self.counts.seen - self.counts.held
        new = torch.arange(first, first + old.shape[-1], device=old.device).expand_as(old)
        if self.state.pads is not None:
            pads = self.state.pads[:, None, None]
            old, new = old - pads, new - pads
        keys = self.rows.keys[:, :, :moved]
        self.rows.front = keys.clone()
        keys.copy_(rotation.move(self.rows.front, self.index, old, new))

    @property
    def may_replace(self) -> bool:
        """Whether one row may be evicted by `Rows.replace`, after which rows are in no order."""
        actors = (self.state.decode, self.state.decode_observer)
        return (
            all(actor is None or actor.any_order for actor in actors)
            and self.state.decode is not None
            and self.state.decode.interval == 1  # the ledger writes one new row at a time
            and self._reads["decode"] <= 1  # the rows of several queries would have to be the last
            and self.state.pads is None  # padding must stay where the mask has it
            and self._rotation is None
            and not self.rows.spare.shared
            and not self.rows.needs_grad
        )

    def _account(self) -> None:
        allocated = self.rows.nbytes + sum(query.nbytes for query in self._recent)
        shared = self._shared.spare.nbytes if self.index == 0 else 0
        self.counts.allocated_bytes = allocated + shared
        self.counts.row_bytes = self.rows.row_bytes

    # What the seam calls.

    def before_attention(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """Check the forward, and evict first if the prompt turns out to have ended before it."""
        state, new = self.state, self._new
        state.attended += 1
        own = call.key.data_ptr() == self._lent
        state.expands_latents = not own
        if not own:
            state.check_latents()
        if self.index == 0 and new > 1:
            if state.total is None:
                state.read_padding(call, new)
            state.check_positions(call.position_ids, self.counts.seen - new, new)
        self._facts = {"scaling": call.scaling, "softcap": call.softcap, "sinks": call.sinks}
        self._heads = call.query.shape[1]
        if state.plan is not Plan.EVICT_BEFORE or own:
            return call.key, call.value
        # The model attends to keys that it made of cached latents: only here they can be judged.
        self.rows.extend_state()
        index = self._choose_of_prompt(call.key, call.value, trailing=new)
        if index is None:
            return call.key, call.value
        self.keep(index)
        index = index.expand(-1, call.key.shape[1], -1)
        return gather_rows(call.key, index), gather_rows(call.value, index)

    def after_attention(self, call: AttentionCall) -> None:
        """Remember queries, let the policy observe, and evict if this forward ends a prompt."""
        state = self.state
        observer = state.policy.observer(state.phase)
        if observer is None:
            self.rows.state, self._unseen = {}, []  # of an earlier turn; nobody will ask for it
        else:
            self._unseen.append(call.query)
            waits = state.phase == "decode" and state.decode is not None and not state.evicts_now
            if not waits or len(self._unseen) >= OBSERVED_TOGETHER:
                self._observe(observer, call)
        if state.plan is Plan.COLLECT:
            self._remember(call.query)
        elif state.plan is Plan.EVICT_AFTER:
            assert state.turn.end is not None
            trailing = self.counts.seen - state.turn.end
            self._remember(call.query[:, :, : call.query.shape[2] - trailing])
            self._end_prompt(call.key, call.value, trailing)
        elif state.decode is not None:
            self._remember(call.query)
            if state.evicts_now:
                self._nominate(state.decode, call)
        if not state.turn.open and self.rows.pack():
            self._account()
        if self.index == state.num_layers - 1:
            evict_together(self._shared.nominees)
            self._shared.nominees = []
            state.end_forward()

    def _nominate(self, policy: Policy, call: AttentionCall) -> None:
        """Score the rows; the choice is made for all layers together."""
        if self.index == 0:
            self._shared.nominees.clear()  # of a forward that broke off
        quota = self._decode_quota()
        judgement = self._judge(policy, "decode", call.key, call.value, quota)
        if judgement is not None:
            self._shared.nominees.append((self, judgement, sum(quota)))

    def end_prefill(self) -> None:
        """Evict now, outside a forward, with the queries that were remembered."""
        if not self.rows.empty:
            self.rows.restore_order()
            self._end_prompt(self.rows.keys, self.rows.values, trailing=0)

    def _end_prompt(self, key: Tensor, value: Tensor, trailing: int) -> None:
        """Evict at the end of a prompt; the last `trailing` rows came after it and stay."""
        index = self._choose_of_prompt(key, value, trailing)
        if index is not None:
            self.keep(index)

    def _choose_of_prompt(self, key: Tensor, value: Tensor, trailing: int) -> Tensor | None:
        index, rows = None, key.shape[2] - trailing
        if self.state.prefill is not None:
            quota = self._prompt_quota(rows)
            judged = key[:, :, :rows], value[:, :, :rows]
            judgement = self._judge(self.state.prefill, "prefill", *judged, quota)
            if judgement is not None:
                index = top_positions(final_scores([judgement])[0], sum(quota))
                if trailing:
                    tail = torch.arange(rows, rows + trailing, device=index.device)
                    index = torch.cat([index, tail.expand(*index.shape[:2], -1)], dim=-1)
        if self.state.decode is not self.state.prefill:
            # The rows of its queries may be gone.
            self._recent = []
        else:
            # Those that were read for the prompt need not stay alive.
            last = self._last_queries(self._reads["decode"])
            self._recent = [] if last is None else [last.clone()]
        left = key.shape[2] if index is None else index.shape[2]
        self._set_decode_quota(left, trailing)
        return index

    def _prompt_quota(self, rows: int) -> tuple[int, int]:
        """Of `rows` rows at the end of a prompt: the budget, and how many at the front stay."""
        state, policy = self.state, self.state.prefill
        assert policy is not None
        if policy.later_turns == "keep" and state.turn.start:
            return rows, 0
        budget = batch_budget(policy, state.prompt_lengths(), self.index, state.num_layers)
        budget += budget if state.spare is None else state.spare
        if policy.later_turns == "revote":
            return budget, 0
        assert state.turn.end is not None
        earlier = max(0, rows - (state.turn.end - state.turn.start))
        if earlier:
            self._check_unpadded("later_turns=append", self.counts.held)
        return budget, earlier

    def _set_decode_quota(self, rows: int, trailing: int) -> None:
        state, policy = self.state, self.state.decode
        unfinished = state.total is not None and self.counts.seen < state.total
        if policy is None or unfinished:
            return
        lengths = state.prompt_lengths()
        self.counts.budget = batch_budget(policy, lengths, self.index, state.num_layers, grows=True)
        if state.policy.spares_prompt:
            self._check_unpadded("scope=generated", rows)
            self.counts.spared = rows - trailing

    def _decode_quota(self) -> tuple[int, int]:
        counts = self.counts
        spared = min(counts.spared, counts.held)
        return (counts.held if counts.budget is None else counts.budget), spared

    def _remember(self, query: Tensor) -> None:
        """Keep the last queries of the turn that the policies will read."""
        state = self.state
        decode = self._reads["decode"]
        wanted = decode if state.phase == "decode" else max(self._reads["prefill"], decode)
        if not wanted:
            return
        new = query.shape[2]
        if new > 1 and (state.plan is not Plan.EVICT_AFTER or state.decode is not state.prefill):
            # They are needed beyond this forward; a view would keep the whole prompt's alive.
            query = query[:, :, -wanted:].clone()
        goes_on = self.counts.seen - self._new > state.turn.start
        self._recent = [*self._recent, query] if goes_on and new < wanted else [query]
        if len(self._recent) > 2 * wanted:
            self._recent = self._recent[-wanted:]

    def _last_queries(self, wanted: int) -> Tensor | None:
        if not self._recent or not wanted:
            return None
        if len(self._recent) > 1:
            self._recent = [torch.cat(self._recent, dim=2)]
        return self._recent[0][:, :, -wanted:]

    def _observe(self, observer: Policy, call: AttentionCall) -> None:
        """Show the policy all queries since the last time; no row was evicted in between."""
        started, key = time.perf_counter(), call.key
        unseen, self._unseen = self._unseen, []
        query = unseen[0] if len(unseen) == 1 else torch.cat(unseen, dim=2)
        self.rows.extend_state()
        with torch.no_grad():
            view = self._view(self.state.phase, query, key, call.value)
            self.rows.state = dict(observer.observe(view))
        expected = (*self.rows.batch_heads, key.shape[2])
        for name, rows in self.rows.state.items():
            if rows.shape != expected:
                raise PolicyConfigError(
                    f"{observer.name}: observe() returned {name!r} of shape {tuple(rows.shape)}; "
                    f"it must be {expected} (batch, kv_heads, held)."
                )
        self.counts.policy_seconds += time.perf_counter() - started

    def _view(
        self, phase: Phase, query: Tensor, key: Tensor, value: Tensor, budget: int = 0
    ) -> LayerView:
        held, rows = key.shape[2], self.rows
        return LayerView(
            query=query,
            key=key,
            value=value,
            kv_heads=rows.batch_heads[1],
            locate=lambda: positions_of(rows.columns()[:, :, :held], self.state.pads),
            find_newest=None if rows.in_order else rows.newest,
            padded=self.state.pads is not None,
            layer_idx=self.index,
            num_layers=self.state.num_layers,
            seen=self.counts.seen - (self.counts.held - held),
            phase=phase,
            budget=budget,
            state={name: tensor[:, :, :held] for name, tensor in rows.state.items()},
            **self._facts,
        )

    def _judge(
        self, policy: Policy, phase: Phase, key: Tensor, value: Tensor, quota: tuple[int, int]
    ) -> Judgement | None:
        """What a policy says of the rows, or None if all of them stay.

        Args:
            policy: The one that evicts now.
            phase: What it is told.
            key: As attended to.
            value: As attended to.
            quota: How many of the rows may stay beside those at the front that always do, and how
                many these are.
        """
        started = time.perf_counter()
        budget, spared = quota
        held = key.shape[2]
        if spared + budget >= held:
            return None
        with torch.no_grad():
            query = self._last_queries(self._reads[phase])
            if query is None:
                batch, _, _, dim = key.shape
                query = key.new_empty(batch, self._heads or key.shape[1], 0, dim)
            view = self._view(phase, query, key, value, budget)
            always = None
            if spared:
                always = ~newest(held, held - spared, key.device)
            if self.state.passing:
                passing = newest(held, self.state.passing, key.device)
                always = passing if always is None else always | passing
            if policy.fair and phase == "prefill" and not self._in_later_turn(policy):
                pads = self.state.pads_by_row()
                judgement = judge_spans(policy, view, pads, self.state.passing)
            else:
                judgement = judge(policy, view, always)
        self.counts.policy_seconds += time.perf_counter() - started
        return judgement

    def _in_later_turn(self, policy: Policy) -> bool:
        """Whether the first prompt, of which the spans are, is over; only new rows may go then."""
        later = self.state.turn.start > 0
        if later and policy.later_turns == "revote":
            raise UnsupportedModeError(
                f"{policy}: fair= divides the first prompt, and this later turn would cut all that "
                "is held, whatever span it is of. Use later_turns='keep' or 'append' with a policy "
                "that acts at prefill only, or a new cache."
            )
        return later

    def _check_unpadded(self, setting: str, held: int) -> None:
        """Refuse if padding is left among the `held` rows that will all stay."""
        evicted = self.counts.seen - held
        if any(pads > evicted for pads in self.state.pads_by_row()):
            raise UnsupportedModeError(
                f"{setting} cannot follow a padded batch in which a row had fewer real tokens than "
                "the capacity: that row would keep more new tokens than it would alone. Leave it "
                "out, or run the rows separately."
            )

    def take_back(self, count: int) -> None:
        """Forget the newest `count` tokens, whose rows are all held, and what they asked."""
        self.rows.drop(count)
        self.counts.settled = min(self.counts.settled, self.counts.held)
        if self._recent:
            query = torch.cat(self._recent, dim=2)[:, :, :-count]
            self._recent = [query] if query.shape[2] else []

    def snapshot(self) -> dict[str, Any]:
        """Everything that the layer holds, as tensors and plain values."""
        rows, counts = self.rows, self.counts
        rows.restore_order()
        return {
            "keys": rows.keys,
            "values": rows.values,
            "columns": rows.columns(),
            "front": rows.front,
            "state": dict(rows.state),
            "recent": self._recent,
            "unseen": self._unseen,
            "facts": dict(self._facts),
            "heads": self._heads,
            "counts": [counts.seen, counts.settled, counts.budget, counts.spared],
        }

    def restore(self, values: dict[str, Any]) -> None:
        """Hold what a snapshot says."""
        self._forget()
        self.lazy_initialization(values["keys"], values["values"])
        self.rows.restore(values)
        self._recent, self._unseen = list(values["recent"]), list(values["unseen"])
        self._facts, self._heads = dict(values["facts"]), values["heads"]
        counts = self.counts
        counts.held = values["keys"].shape[2]
        counts.seen, counts.settled, counts.budget, counts.spared = values["counts"]
        self._account()

    # What transformers calls.

    def offload(self) -> None:
        """Keys and values to the CPU, until `prefetch`."""
        self.rows.move("cpu")

    def prefetch(self) -> None:
        """Keys and values back to where they are used."""
        self.rows.move(self.rows.device)

    def get_seq_length(self) -> int:
        """Tokens seen, evicted ones included: the next token's position counts from here."""
        return self.counts.seen

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Columns of the mask, and which token the first of them stands for.

        All hosted layers share one mask, so it is sized for the layer that holds most; the seam
        cuts it down for the others.
        """
        new = query_length if isinstance(query_length, int) else query_length.shape[0]
        longest = self.state.longest
        return longest + new, self.counts.seen - longest

    def activate_past_recording(self) -> None:
        """Speculative decoding will take tokens back with `crop`."""
        self.record_past = True

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Whether tokens can be taken back at any time."""
        return not self.state.acts_at_decode

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest tokens.

        Args:
            tokens_to_remove: Negative: how many. Positive: how many to be left, as seen tokens
                (the older convention).

        Raises:
            UnsupportedModeError: The prompt is still open, or the tokens had a say in what was
                evicted or will be, so that the earlier state cannot be restored.
        """
        count = int(tokens_to_remove)
        remove = max(self.counts.seen - count, 0) if count > 0 else -count
        if self.state.turn.open and self.counts.seen:
            raise UnsupportedModeError(
                "crop() before the prompt has ended: the queries that will vote would be lost. "
                "Call cache.end_prefill() first, or pass prompt_length= to CompressedCache."
            )
        if remove == 0 or not self.is_initialized:
            return
        self.rows.restore_order()
        generation = current_generation()
        drafts = generation is not None and generation.drafts and not self.state.acts_at_decode
        # A model that drafts for itself takes back the end of its prompt; drafts are only guesses.
        if self.index == 0 and not (drafts and self.rows.tail_is_whole(remove)):
            self.state.check_crop(remove)
        self.rows.drop(remove)
        self._recent = []
        if self.index == self.state.num_layers - 1:
            self.state.since_eviction = max(0, self.state.since_eviction - remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows of the batch."""
        self._map_batch(lambda rows: rows.index_select(0, beam_idx.to(rows.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch `repeats` times."""
        self._map_batch(lambda rows: rows.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only some rows of the batch."""
        self._map_batch(lambda rows: rows[indices.to(rows.device)])

    def _map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.rows.empty:
            return
        self.rows.map_batch(change)
        self._recent = [change(query) for query in self._recent]
        self._unseen = [change(query) for query in self._unseen]
        state = self.state
        if self.index == 0 and state.pads is not None:
            state.set_padding(change(state.pads))
        self._account()

    def reset(self) -> None:
        """Back to an empty layer."""
        self._forget()
        self._shared.nominees.clear()
        self._shared.spare.clear()
        self.is_initialized = False
        self.record_past = False
        if self.index == 0:
            self.state.reset()


def evict_together(nominees: list[tuple[KVLayer, Judgement, int]]) -> None:
    """Evict from several layers, with one choice for all of them that are alike.

    A step of decode is short, so its cost is the number of operations rather than their size.
    """
    alike: dict[Any, list[tuple[KVLayer, Judgement]]] = {}
    for layer, judgement, kept in nominees:
        scores = judgement.scores
        replaces = kept == scores.shape[-1] - 1 and layer.may_replace
        key = (scores.shape, scores.device, layer.rows.capacity, kept, replaces)
        alike.setdefault(key, []).append((layer, judgement))
    for (shape, _, capacity, kept, replaces), members in alike.items():
        layers = [layer for layer, _ in members]
        scores = final_scores([judgement for _, judgement in members])
        if replaces:
            ledger = Ledger.of([layer.rows for layer in layers])
            counts = layers[0].counts
            victims = lowest(scores, ledger.columns(counts.held, counts.seen))
            numbers = row_numbers(victims, capacity)
            for layer, own, where in zip(layers, victims.unbind(), numbers.unbind(), strict=True):
                layer.rows.replace(own, where)
            ledger.replace(victims)
        else:
            index = top_positions(scores.flatten(0, 1), kept).view(-1, *shape[:2], kept)
            numbers = layers[0].numbers_for(index)
            for layer, own, where in zip(layers, index.unbind(), numbers.unbind(), strict=True):
                layer.keep(own, where)
