"""The cache layer: slack-buffered storage, positions, and the moment of eviction."""

import time
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from kvcompress.attention import AttentionCall, HostedLayer, Lease, announce
from kvcompress.errors import UnsupportedModeError
from kvcompress.policy import LayerView, Phase
from kvcompress.selection import batch_budget, select_rows
from kvcompress.state import CacheState, Plan
from kvcompress.tensors import gather_rows, positions_of

MIN_SLACK = 256
"""Rows that a grown buffer has to spare; 12.5 % where that is more."""


def with_slack(rows: int) -> int:
    """Rows to allocate for `rows` rows, so that appending rarely copies."""
    return rows + max(MIN_SLACK, rows // 8)


class KVLayer(DynamicLayer, HostedLayer):
    """One layer of a compressed cache.

    To transformers it is a layer that has *seen* `get_seq_length()` tokens, so positions and turns
    come out right, and *holds* fewer, which only its mask sizes tell. Keys and values live in
    buffers with slack: a decode step writes one row in place. Everything that belongs to rows (key,
    value, column, the policy's state) is kept, cropped, reordered, repeated and selected together.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, state: CacheState, index: int, lease: Lease) -> None:
        self.state = state
        self.index = index
        self.counts = state.counts[index]
        self._lease = lease
        self._forget()
        super().__init__()  # type: ignore[no-untyped-call]
        self.record_past = False

    def _forget(self) -> None:
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._columns: Tensor | None = None  # of rows up to the last eviction; later ones follow on
        self._state: dict[str, Tensor] = {}
        self._recent: Tensor | None = None  # the turn's last queries
        self._new = 0
        self._facts: dict[str, Any] = {"scaling": 1.0}

    # Storage. `keys` and `values` are properties because inherited code reads and assigns them.

    @property
    def keys(self) -> Tensor | None:
        """Held keys, batch x kv_heads x held x head_dim: a view of the buffer."""
        return None if self._keys is None else self._keys[:, :, : self.counts.held]

    @keys.setter
    def keys(self, rows: Tensor | None) -> None:
        self._keys = rows if rows is not None and rows.ndim == 4 else None

    @property
    def values(self) -> Tensor | None:
        """Held values, batch x kv_heads x held x head_dim: a view of the buffer."""
        return None if self._values is None else self._values[:, :, : self.counts.held]

    @values.setter
    def values(self, rows: Tensor | None) -> None:
        self._values = rows if rows is not None and rows.ndim == 4 else None

    def adopt(self, layer: DynamicLayer) -> None:
        """Take over the rows of a layer that was filled before it was hosted."""
        if not layer.is_initialized or layer.keys is None or layer.keys.ndim != 4:
            return
        assert layer.values is not None
        self.lazy_initialization(layer.keys, layer.values)
        self._keys, self._values = layer.keys, layer.values
        self.counts.held = self.counts.seen = layer.keys.shape[2]
        self._account()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Remember device and dtype; buffers come with the first rows."""
        self.device, self.dtype = key_states.device, key_states.dtype
        self.is_initialized = True

    @property
    def columns(self) -> Int64[Tensor, "batch kv_heads held"]:
        """Which of the seen tokens, padding included, every held row is."""
        assert self._keys is not None
        batch, kv_heads = self._keys.shape[:2]
        kept = 0 if self._columns is None else self._columns.shape[-1]
        seen, held = self.counts.seen, self.counts.held
        later = torch.arange(seen - held + kept, seen, device=self._keys.device)
        later = later.expand(batch, kv_heads, -1)
        return later if self._columns is None else torch.cat([self._columns.long(), later], dim=-1)

    @property
    def positions(self) -> Int64[Tensor, "batch kv_heads held"]:
        """Original position of every held row, ascending; -1 for padding."""
        return positions_of(self.columns, self.state.pads)

    @torch.compiler.disable
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the new rows and return all that is held, for this call's attention.

        Raises:
            UnsupportedModelError: The previous layer's attention bypassed the seam.
        """
        new = key_states.shape[-2]
        if self._keys is not None and self._keys.shape[0] != key_states.shape[0]:
            raise UnsupportedModeError(
                f"The cache holds a batch of {self._keys.shape[0]}, the call brings "
                f"{key_states.shape[0]} rows. Repeat it first: cache.batch_repeat_interleave(n)."
            )
        if self.index == 0:
            self.state.begin_forward(new)
        elif self.state.updated != self.state.attended:
            raise self.state.bypassed(self.state.counts[self.index - 1].layer_idx)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        buffers = self._keys, self._values
        self._keys = self._appended(self._keys, key_states)
        self._values = self._appended(self._values, value_states)
        self._new = new
        self.counts.held += new
        self.counts.seen += new
        self.state.updated += 1
        if buffers[0] is not self._keys or buffers[1] is not self._values:
            self._account()
        announce(self)
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    def _appended(self, buffer: Tensor | None, rows: Tensor) -> Tensor:
        held = self.counts.held
        need = held + rows.shape[2]
        if buffer is None or held == 0:
            # No slack: a prompt is likely to be cut at once. A copy: the caller owns its rows.
            return rows.clone(memory_format=torch.contiguous_format)
        if torch.is_grad_enabled() and (buffer.requires_grad or rows.requires_grad):
            return torch.cat([buffer[:, :, :held], rows], dim=2)
        frozen = buffer.is_inference() and not torch.is_inference_mode_enabled()
        if buffer.shape[2] < need or frozen:
            batch, kv_heads, _, dim = buffer.shape
            grown = buffer.new_empty(batch, kv_heads, with_slack(need), dim)
            grown[:, :, :held] = buffer[:, :, :held]
            buffer = grown
        buffer[:, :, held:need] = rows
        return buffer

    def undo_update(self) -> None:
        """Take the last update back."""
        self.counts.held -= self._new
        self.counts.seen -= self._new
        if self.counts.seen == 0:
            self._forget()
        self._new = 0
        if self.index == 0:
            self.state.updated = self.state.attended = 0

    def keep(self, index: Int64[Tensor, "batch kv_heads kept"]) -> None:
        """Evict every row that is not in `index` (ascending) and release its storage."""
        assert self._keys is not None and self._values is not None
        columns = self.columns.gather(2, index).int()
        self._keys = self._gathered(self._keys, index)
        self._values = self._gathered(self._values, index)
        self._state = {name: rows.gather(2, index) for name, rows in self._state.items()}
        self._columns = columns
        self.counts.held = index.shape[2]
        self._account()

    def _gathered(self, buffer: Tensor, index: Tensor) -> Tensor:
        rows = buffer[:, :, : self.counts.held]
        if torch.is_grad_enabled() and rows.requires_grad:
            return gather_rows(rows, index)
        batch, kv_heads, kept = index.shape
        out = rows.new_empty(batch, kv_heads, with_slack(kept), rows.shape[3])
        gather_rows(rows, index, out=out[:, :, :kept])
        return out

    def _account(self) -> None:
        assert self._keys is not None and self._values is not None
        parts = [self._keys, self._values, self._columns, self._recent, *self._state.values()]
        self.counts.allocated_bytes = sum(part.nbytes for part in parts if part is not None)
        batch, kv_heads = self._keys.shape[:2]
        width = self._keys.shape[3] * self._keys.itemsize
        width += self._values.shape[3] * self._values.itemsize
        self.counts.row_bytes = batch * kv_heads * width

    # What the seam calls.

    def before_attention(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """Check the forward, and evict first if the prompt turns out to have ended before it."""
        state, new = self.state, self._new
        state.attended += 1
        own = self._keys is not None and call.key.data_ptr() == self._keys.data_ptr()
        state.expands_latents = not own
        if self.index == 0 and new > 1:
            state.check_positions(call.position_ids, self.counts.seen - new, new)
            state.read_padding(call, new)
        self._facts = {"scaling": call.scaling, "softcap": call.softcap, "sinks": call.sinks}
        if state.plan is not Plan.EVICT_BEFORE:
            return call.key, call.value
        index = self._choose("prefill", self._recent, call.key, call.value, trailing=new)
        self._forget_queries()
        if index is None:
            return call.key, call.value
        self.keep(index)
        if own:
            assert self.keys is not None and self.values is not None
            return self.keys, self.values
        # MLA: the model attends to expanded latents.
        index = index.expand(-1, call.key.shape[1], -1)
        return gather_rows(call.key, index), gather_rows(call.value, index)

    def after_attention(self, call: AttentionCall) -> None:
        """Remember queries, let the policy observe, and evict if this forward ends a prompt."""
        state = self.state
        if "observe" in state.policy.needs:
            self._observe(call)
        if state.plan is Plan.COLLECT:
            self._remember(call.query)
        elif state.plan is Plan.EVICT_AFTER:
            assert state.turn.end is not None
            trailing = self.counts.seen - state.turn.end
            self._remember(call.query[:, :, : call.query.shape[2] - trailing])
            index = self._choose("prefill", self._recent, call.key, call.value, trailing)
            self._forget_queries()
            if index is not None:
                self.keep(index)
        elif state.plan is Plan.DECODE and "decode" in state.policy.phases:
            self._remember(call.query)
            self._decode(call)
        if self.index == state.num_layers - 1:
            state.end_forward()

    def _decode(self, call: AttentionCall) -> None:
        if self.state.since_eviction < self.state.interval:
            return
        index = self._choose("decode", self._recent, call.key, call.value, trailing=0)
        if index is not None:
            self.keep(index)
        if self.index == self.state.num_layers - 1:
            self.state.since_eviction = 0

    def end_prefill(self) -> None:
        """Evict now, outside a forward, with the queries that were remembered."""
        keys, values = self.keys, self.values
        if keys is None or values is None:
            return
        index = self._choose("prefill", self._recent, keys, values, trailing=0)
        self._forget_queries()
        if index is not None:
            self.keep(index)

    def _remember(self, query: Tensor) -> None:
        """Keep the last queries of the turn that the policy will read."""
        state = self.state
        wanted = state.policy.query_tokens(self.index, state.num_layers)
        if not wanted:
            return
        fresh = self.counts.seen - self._new <= state.turn.start
        recent = query if self._recent is None or fresh else torch.cat([self._recent, query], 2)
        recent = recent[:, :, -wanted:]
        # A view would keep the queries of the whole prompt alive until the next forward.
        self._recent = recent if self._votes_now() else recent.clone()

    def _forget_queries(self) -> None:
        if "decode" not in self.state.policy.phases:
            self._recent = None

    def _votes_now(self) -> bool:
        state = self.state
        return state.plan is Plan.EVICT_AFTER and "decode" not in state.policy.phases

    def _observe(self, call: AttentionCall) -> None:
        started = time.perf_counter()
        for name, rows in self._state.items():
            missing = call.key.shape[2] - rows.shape[2]
            self._state[name] = torch.nn.functional.pad(rows, (0, missing))
        phase: Phase = "decode" if self.state.plan is Plan.DECODE else "prefill"
        with torch.no_grad():
            view = self._view(phase, call.query, call.key, call.value)
            self._state = dict(self.state.policy.observe(view))
        self.counts.policy_seconds += time.perf_counter() - started

    def _view(self, phase: Phase, query: Tensor, key: Tensor, value: Tensor) -> LayerView:
        held = key.shape[2]
        positions = self.positions[:, :, :held]
        return LayerView(
            query=query,
            key=key,
            value=value,
            positions=positions,
            valid=positions >= 0,
            layer_idx=self.index,
            num_layers=self.state.num_layers,
            seen=self.counts.seen - (self.counts.held - held),
            phase=phase,
            state={name: rows[:, :, :held] for name, rows in self._state.items()},
            **self._facts,
        )

    def _choose(
        self, phase: Phase, query: Tensor | None, key: Tensor, value: Tensor, trailing: int
    ) -> Tensor | None:
        """Columns to keep, or None if everything stays; the last `trailing` rows always stay."""
        started = time.perf_counter()
        state, counts, policy = self.state, self.counts, self.state.policy
        rows = key.shape[2] - trailing
        earlier = 0
        if phase == "prefill":
            lengths = state.prompt_lengths()
            counts.budget = batch_budget(policy, lengths, self.index, state.num_layers)
            if policy.later_turns == "append":
                assert state.turn.end is not None
                earlier = rows - (state.turn.end - state.turn.start)
        kept = earlier + (rows if counts.budget is None else counts.budget)
        if kept >= rows:
            return None
        keep_always = None
        if earlier:
            self._check_append()
            keep_always = (torch.arange(rows, device=key.device) < earlier)[None, None]
        with torch.no_grad():
            if query is None:
                batch, _, _, dim = key.shape
                query = key.new_empty(batch, key.shape[1], 0, dim)
            view = self._view(phase, query, key[:, :, :rows], value[:, :, :rows])
            index = select_rows(policy, view, kept, keep_always)
            if trailing:
                tail = torch.arange(rows, rows + trailing, device=index.device)
                index = torch.cat([index, tail.expand(*index.shape[:2], -1)], dim=-1)
        counts.policy_seconds += time.perf_counter() - started
        return index

    def _check_append(self) -> None:
        evicted = self.counts.seen - self.counts.held
        if any(pads > evicted for pads in self.state.pads_by_row()):
            raise UnsupportedModeError(
                "later_turns='append' cannot follow a padded batch in which a row had fewer real "
                "tokens than the capacity: that row would keep more of the new turn than it would "
                "alone. Use later_turns='revote', or run the rows separately."
            )

    # What transformers calls.

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

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest tokens.

        Args:
            tokens_to_remove: Negative: how many. Positive: how many to be left, as seen tokens
                (the older convention).

        Raises:
            UnsupportedModeError: The prompt is still open, or rows before them were evicted, so
                that the earlier state cannot be restored.
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
        if not self._tail_is_whole(remove):
            raise UnsupportedModeError(
                f"crop() by {remove} tokens reaches back past rows that were evicted; the cache as "
                "it was then is gone. Crop less, or start again with a new cache."
            )
        self.counts.held -= remove
        self.counts.seen -= remove
        held = self.counts.held
        if self._columns is not None:
            self._columns = self._columns[..., :held]
        self._state = {name: rows[..., :held] for name, rows in self._state.items()}

    def _tail_is_whole(self, count: int) -> bool:
        if self._columns is None:
            return True
        if count <= self.counts.held - self._columns.shape[-1]:
            return True
        if count >= self.counts.held:
            return False
        first = self.columns[..., -count:][..., 0]
        return bool((first == self.counts.seen - count).all())

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows of the batch."""
        self._map_batch(lambda rows: rows.index_select(0, beam_idx.to(rows.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch `repeats` times."""
        self._map_batch(lambda rows: rows.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only some rows of the batch."""
        self._map_batch(lambda rows: rows[indices])

    def _map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        if self._keys is None or self._values is None:
            return
        self._keys, self._values = change(self._keys), change(self._values)
        self._columns = None if self._columns is None else change(self._columns)
        self._recent = None if self._recent is None else change(self._recent)
        self._state = {name: change(rows) for name, rows in self._state.items()}
        state = self.state
        if self.index == 0 and state.pads is not None:
            state.set_padding(change(state.pads))
        self._account()

    def reset(self) -> None:
        """Back to an empty layer."""
        self._forget()
        self.is_initialized = False
        self.record_past = False
        if self.index == 0:
            self.state.reset()
