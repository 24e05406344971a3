"""The cache layer: slack-buffered storage, positions, and the moment of eviction."""

import time
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from kvcompress.attention import AttentionCall, HostedLayer, Lease, announce
from kvcompress.errors import PolicyConfigError, UnsupportedModeError
from kvcompress.policy import LayerView, Phase, Policy
from kvcompress.rotation import Rotation
from kvcompress.selection import Judgement, batch_budget, final_scores, judge
from kvcompress.state import CacheState, Plan
from kvcompress.tensors import gather_rows, newest, positions_of, row_numbers, top_positions

MIN_SLACK = 256
"""Rows that a grown buffer has to spare; 12.5 % where that is more."""

OBSERVED_TOGETHER = 16
"""Decode steps whose queries a policy with state is shown in one go, if it evicts as rarely."""


def with_slack(rows: int) -> int:
    """Rows to allocate for `rows` rows, so that appending rarely copies."""
    return rows + max(MIN_SLACK, rows // 8)


class Shared:
    """What the layers of a cache share in evicting.

    Buffers that one eviction leaves serve the next one, so that a step of decode that evicts
    allocates nothing, at the cost of one layer's memory.
    """

    def __init__(self) -> None:
        self.nominees: list[tuple[KVLayer, Judgement, int]] = []
        """Layers that will evict when this forward ends, and how many of their rows stay."""
        self._buffers: dict[str, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """What is held here."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def swap(self, kind: str, used: Tensor, shape: torch.Size) -> Tensor:
        """A buffer of `shape` like `used`, which may be taken over if it has that shape too."""
        spare = self._buffers.pop(kind, None)
        if used.shape == shape:
            self._buffers[kind] = used
        wanted = (shape, used.dtype, used.device, torch.is_inference_mode_enabled())
        if spare is not None:
            has = (spare.shape, spare.dtype, spare.device, spare.is_inference())
            if has == wanted:
                return spare
        return used.new_empty(shape)

    def clear(self) -> None:
        """Forget all of it."""
        self.nominees.clear()
        self._buffers.clear()


class KVLayer(DynamicLayer, HostedLayer):
    """One layer of a compressed cache.

    To transformers it is a layer that has *seen* `get_seq_length()` tokens, so positions and turns
    come out right, and *holds* fewer, which only its mask sizes tell. Keys and values live in
    buffers with slack: a decode step writes one row in place. Everything that belongs to rows (key,
    value, column, the policy's state) is kept, cropped, reordered, repeated and selected together.
    """

    is_sliding = False
    is_croppable = True

    def __init__(
        self,
        state: CacheState,
        index: int,
        lease: Lease,
        shared: Shared,
        rotation: Rotation | None = None,
    ) -> None:
        self.state = state
        self._shared = shared
        self._rotation = rotation
        parts: dict[Phase, Policy | None] = {"prefill": state.prefill, "decode": state.decode}
        self._reads: dict[Phase, int] = {  # queries, by the policy of each phase
            phase: part.query_tokens(index, state.num_layers) if part else 0
            for phase, part in parts.items()
        }
        self.index = index
        self.counts = state.counts[index]
        self._lease = lease
        self._forget()
        super().__init__()  # type: ignore[no-untyped-call]
        self.record_past = False

    def _forget(self) -> None:
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._columns: Tensor | None = None  # None until an eviction: rows are columns then
        self._known = 0  # rows whose columns are written; later ones follow on from the newest
        self._settled = 0  # rows that the last eviction left
        self._state: dict[str, Tensor] = {}
        self._recent: Tensor | None = None  # the turn's last queries
        self._unseen: list[Tensor] = []  # queries that the policy has still to observe
        self._front: Tensor | None = None  # keys of reindexed rows, at their original positions
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
        held, seen = self.counts.held, self.counts.seen
        if self._columns is None:
            every = torch.arange(seen, device=self._keys.device)
            return every.expand(*self._keys.shape[:2], seen)
        return self._written_columns(self._columns)[..., :held].long()

    def _written_columns(self, buffer: Tensor) -> Tensor:
        """The buffer of columns, with those of the newest rows."""
        held, seen, known = self.counts.held, self.counts.seen, self._known
        if known == held:
            return buffer
        frozen = buffer.is_inference() and not torch.is_inference_mode_enabled()
        if buffer.shape[2] < held or frozen:
            grown = buffer.new_empty(*buffer.shape[:2], with_slack(held))
            grown[..., :known] = buffer[..., :known]
            buffer = grown
        if held == known + 1:
            buffer.narrow(2, known, 1).fill_(seen - 1)
        else:
            buffer[..., known:held] = torch.arange(seen - held + known, seen, device=buffer.device)
        self._columns, self._known = buffer, held
        return buffer

    @property
    def _heads(self) -> int:
        assert self._keys is not None
        return self._keys.shape[1]

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
        assert self._keys is not None and self._values is not None
        if self._front is not None:
            self._keys[:, :, : self._front.shape[2]] = self._front
        numbers = self.numbers_for(index) if numbers is None else numbers
        if self._columns is None:
            self._columns = index.int()
        else:
            self._columns = self._written_columns(self._columns).gather(2, index)
        self._state = {name: rows.gather(2, index) for name, rows in self._state.items()}
        self.counts.held = self._known = self._settled = index.shape[2]
        before = self._keys.shape
        self._keys = self._gathered("keys", self._keys, numbers)
        self._values = self._gathered("values", self._values, numbers)
        if self._rotation is not None:
            self._reindex(self._rotation)
        if self._keys.shape != before:
            self._account()

    def numbers_for(
        self, index: Int64[Tensor, "*layers batch kv_heads kept"]
    ) -> Int64[Tensor, "*layers rows"]:
        """Which rows of the buffers the next buffers are filled with."""
        kept, decode = index.shape[-1], self.state.decode
        evicts_again = decode is not None and self.state.phase == "decode"
        rows = kept + decode.interval if decode is not None and evicts_again else with_slack(kept)
        # Rows to come are filled with the first one, which is quicker than a copy of a part.
        index = torch.nn.functional.pad(index, (0, rows - kept))
        return row_numbers(index, self.rows)

    @property
    def rows(self) -> int:
        """Rows of the buffers, used or not."""
        return 0 if self._keys is None else self._keys.shape[2]

    def _reindex(self, rotation: Rotation) -> None:
        """Move the keys at the front up to the rows behind them.

        Always from their original positions, so that no error adds up over a long stream.
        """
        assert self._keys is not None and self._columns is not None
        moved = self.state.policy.reindexed_tokens(self.index, self.state.num_layers)
        old = self._columns[..., :moved].long()
        first = self.counts.seen - self.counts.held
        new = torch.arange(first, first + old.shape[-1], device=old.device).expand_as(old)
        if self.state.pads is not None:
            pads = self.state.pads[:, None, None]
            old, new = old - pads, new - pads
        self._front = self._keys[:, :, :moved].clone()
        self._keys[:, :, :moved] = rotation.move(self._front, self.index, old, new)

    def _gathered(self, kind: str, buffer: Tensor, numbers: Tensor) -> Tensor:
        batch, kv_heads, _, dim = buffer.shape
        shape = torch.Size((batch, kv_heads, numbers.numel() // (batch * kv_heads), dim))
        flat = buffer.flatten(0, 2)
        if torch.is_grad_enabled() and buffer.requires_grad:
            return flat.index_select(0, numbers).view(shape)
        out = self._shared.swap(kind, buffer, shape)
        torch.index_select(flat, 0, numbers, out=out.view(-1, dim))
        return out

    def _account(self) -> None:
        assert self._keys is not None and self._values is not None
        parts = [self._keys, self._values, self._columns, self._recent, self._front]
        parts += self._state.values()
        allocated = sum(part.nbytes for part in parts if part is not None)
        self.counts.allocated_bytes = allocated + (self._shared.nbytes if self.index == 0 else 0)
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
        index = self._choose_of_prompt(call.key, call.value, trailing=new)
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
        observer = state.policy.observer(state.phase)
        if observer is None:
            self._state, self._unseen = {}, []  # of an earlier turn; nobody will ask for it
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
        if self.keys is not None and self.values is not None:
            self._end_prompt(self.keys, self.values, trailing=0)

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
            self._recent = None
        left = key.shape[2] if index is None else index.shape[2]
        self._set_decode_quota(left, trailing)
        return index

    def _prompt_quota(self, rows: int) -> tuple[int, int]:
        """Of `rows` rows at the end of a prompt: the budget, and how many at the front stay."""
        state, policy = self.state, self.state.prefill
        assert policy is not None
        budget = batch_budget(policy, state.prompt_lengths(), self.index, state.num_layers)
        if policy.later_turns == "revote":
            return budget, 0
        assert state.turn.end is not None
        earlier = rows - (state.turn.end - state.turn.start)
        if earlier:
            self._check_unpadded("later_turns=append", self.counts.held)
        return budget, earlier

    def _set_decode_quota(self, rows: int, trailing: int) -> None:
        state, policy = self.state, self.state.decode
        if policy is None:
            return
        lengths = state.prompt_lengths()
        self.counts.budget = batch_budget(policy, lengths, self.index, state.num_layers)
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
        if query.shape[2] == wanted:
            self._recent = query
            return
        recent = query[:, :, -wanted:]
        goes_on = self.counts.seen - self._new > state.turn.start
        if self._recent is not None and goes_on and recent.shape[2] < wanted:
            recent = torch.cat([self._recent, recent], dim=2)[:, :, -wanted:]
        elif state.plan is not Plan.EVICT_AFTER or state.decode is state.prefill:
            # They are needed beyond this forward; a view would keep the whole prompt's alive.
            recent = recent.clone()
        self._recent = recent

    def _observe(self, observer: Policy, call: AttentionCall) -> None:
        """Show the policy all queries since the last time; no row was evicted in between."""
        started, key = time.perf_counter(), call.key
        unseen, self._unseen = self._unseen, []
        query = unseen[0] if len(unseen) == 1 else torch.cat(unseen, dim=2)
        for name, rows in self._state.items():
            missing = call.key.shape[2] - rows.shape[2]
            self._state[name] = torch.nn.functional.pad(rows, (0, missing))
        with torch.no_grad():
            view = self._view(self.state.phase, query, key, call.value)
            self._state = dict(observer.observe(view))
        expected = (key.shape[0], self._heads, key.shape[2])
        for name, rows in self._state.items():
            if rows.shape != expected:
                raise PolicyConfigError(
                    f"{observer.name}: observe() returned {name!r} of shape {tuple(rows.shape)}; "
                    f"it must be {expected} (batch, kv_heads, held)."
                )
        self.counts.policy_seconds += time.perf_counter() - started

    def _view(
        self, phase: Phase, query: Tensor, key: Tensor, value: Tensor, budget: int = 0
    ) -> LayerView:
        held = key.shape[2]
        return LayerView(
            query=query,
            key=key,
            value=value,
            kv_heads=self._heads,
            locate=lambda: self.positions[:, :, :held],
            padded=self.state.pads is not None,
            layer_idx=self.index,
            num_layers=self.state.num_layers,
            seen=self.counts.seen - (self.counts.held - held),
            phase=phase,
            budget=budget,
            state={name: rows[:, :, :held] for name, rows in self._state.items()},
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
            wanted, query = self._reads[phase], self._recent
            if query is None or not wanted:
                batch, _, _, dim = key.shape
                query = key.new_empty(batch, key.shape[1], 0, dim)
            view = self._view(phase, query[:, :, -wanted:], key, value, budget)
            always = None
            if spared:
                always = ~newest(held, held - spared, key.device)
            judgement = judge(policy, view, always)
        self.counts.policy_seconds += time.perf_counter() - started
        return judgement

    def _check_unpadded(self, setting: str, held: int) -> None:
        """Refuse if padding is left among the `held` rows that will all stay."""
        evicted = self.counts.seen - held
        if any(pads > evicted for pads in self.state.pads_by_row()):
            raise UnsupportedModeError(
                f"{setting} cannot follow a padded batch in which a row had fewer real tokens than "
                "the capacity: that row would keep more new tokens than it would alone. Leave it "
                "out, or run the rows separately."
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
        self._known, self._settled = min(self._known, held), min(self._settled, held)
        self._unseen = self._unseen[: max(0, len(self._unseen) - remove)]  # one token each
        self._state = {name: rows[..., :held] for name, rows in self._state.items()}

    def _tail_is_whole(self, count: int) -> bool:
        if self._columns is None:
            return True
        if count <= self.counts.held - self._settled:
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
        self._front = None if self._front is None else change(self._front)
        self._unseen = [change(query) for query in self._unseen]
        self._state = {name: change(rows) for name, rows in self._state.items()}
        state = self.state
        if self.index == 0 and state.pads is not None:
            state.set_padding(change(state.pads))
        self._account()

    def reset(self) -> None:
        """Back to an empty layer."""
        self._forget()
        self._shared.clear()
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
        key = (scores.shape, scores.device, layer.rows, kept)
        alike.setdefault(key, []).append((layer, judgement))
    for (shape, _, _, kept), members in alike.items():
        scores = final_scores([judgement for _, judgement in members])
        index = top_positions(scores.flatten(0, 1), kept).view(-1, *shape[:2], kept)
        numbers = members[0][0].numbers_for(index)
        for (layer, _), own, rows in zip(members, index.unbind(), numbers.unbind(), strict=True):
            layer.keep(own, rows)
