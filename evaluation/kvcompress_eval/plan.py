"""What a model and its cache will need and read, per policy, before anything is loaded."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import repeat
from typing import Any

import torch
from transformers import PreTrainedConfig

from kvcompress.errors import EvaluationError
from kvcompress.plugins import policy_from
from kvcompress.policy import DecodePolicy, Policy
from kvcompress.rows import with_slack
from kvcompress.selection import batch_budget
from kvcompress_eval.comparison import UNCOMPRESSED
from kvcompress_eval.model_size import ModelSize, measure

GIB = 2**30
TERA = 10**12
LONGEST = 2**32
"""No prompt is longer."""


@dataclass(frozen=True)
class HeldRows:
    """Rows of one hosted layer in each KV head, from the end of the prompt on."""

    prompt: int
    kept: int
    """When the prompt has been cut."""
    limit: int | None = None
    """What evictions while decoding cut it to; None if there are none."""
    interval: int = 1
    """Tokens between them."""
    compressed: bool = True

    def after(self, fed: int) -> int:
        """Rows held when `fed` generated tokens have been fed."""
        if self.limit is None:
            return self.kept + fed
        since = fed % self.interval
        return min(self.kept + fed - since, self.limit) + since

    def most(self, fed: int) -> int:
        """Rows held at most until then."""
        before_eviction = fed - (fed + 1) % self.interval
        return max(self.after(fed), self.after(max(before_eviction, 0)))

    def allocated(self, fed: int) -> int:
        """Rows that there is memory for until then, at most: with the slack of the buffers."""
        most = self.most(fed)
        if not self.compressed or (fed == 0 and self.kept == self.prompt):
            return most
        if fed == 0 or (self.kept == self.limit and self.kept < self.prompt):
            return self.kept + (0 if self.limit is None else self.interval)
        return with_slack(most)

    def read(self, steps: int) -> float:
        """Rows that a step attends to, mean over the first `steps` steps."""
        return sum(self.after(step) + 1 for step in range(steps)) / steps


@dataclass(frozen=True)
class CachePlan:
    """One policy's cache. Bytes are of the whole batch."""

    policy: str
    """`none` for the uncompressed cache."""
    prompt_tokens_held: tuple[int, ...]
    """Rows of every hosted layer when the prompt has been cut, per KV head."""
    end_tokens_held: tuple[int, ...]
    """The same when the answer is complete."""
    prompt_bytes: int
    """Rows of the hosted layers when the prompt has been cut."""
    end_bytes: int
    """The same when the answer is complete."""
    end_dense_bytes: int
    """What these layers would then hold uncompressed."""
    window_bytes: int
    """Rows of the sliding-window layers when the answer is complete."""
    peak_bytes: int
    """What the cache needs at most, in prefill or at the end, with the slack of buffers."""
    step_bytes: float
    """Read by one decode step, weights and rows, mean over the answer."""
    step_seconds: float
    """These bytes / bandwidth: no step is faster."""
    speedup: float
    """The uncompressed cache's step / this one's."""
    longest_prompt: int
    """Tokens that fit at this batch size; 0 if not even one does."""
    largest_batch: int
    """Prompts of this length that fit; 0 if not even one does."""

    @property
    def compression(self) -> float:
        """Dense bytes / held bytes of the hosted layers, when the answer is complete."""
        return self.end_dense_bytes / self.end_bytes


@dataclass(frozen=True)
class Plan:
    """A model on a card, with the uncompressed cache first."""

    model: ModelSize
    prompt_tokens: int
    new_tokens: int
    batch: int
    weight_bytes: int
    read_bytes: float
    """Weights that a decode step reads."""
    card_bytes: int
    reserve_bytes: int
    bandwidth: float
    """Bytes a second."""
    caches: tuple[CachePlan, ...]
    notes: tuple[str, ...]
    """What is not counted, and what was taken for granted."""

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        caches = [asdict(each) | {"compression": each.compression} for each in self.caches]
        return asdict(self) | {"caches": caches}


def plan(
    model: PreTrainedConfig | ModelSize,
    policies: Sequence[Policy | str],
    *,
    prompt_tokens: int,
    batch: int = 1,
    new_tokens: int = 256,
    dtype: torch.dtype = torch.bfloat16,
    card_gib: float = 80,
    bandwidth_tbs: float = 3.35,
    reserve_gib: float = 0,
    weights_gib: float | None = None,
) -> Plan:
    """What a model needs with its cache uncompressed, and under each policy.

    A step of decode reads the weights and every row, so it takes at least (W + B r(L + g)) /
    bandwidth, with B the batch, r the bytes of a row in all layers, L the prompt and g the tokens
    generated so far, mean over the answer; rows held take the place of L + g under a policy.

    Args:
        model: Configuration of a model that kvcompress supports; or its size, where several plans
            are made of one model.
        policies: The uncompressed cache always comes first and is not among them.
        prompt_tokens: Length of every prompt of the batch.
        batch: Prompts that are answered together.
        new_tokens: Length of the answer; its last token is never fed.
        dtype: Of weights and cache; a size has its own.
        card_gib: Memory of the card, GiB.
        bandwidth_tbs: Of its memory, 10^12 bytes a second.
        reserve_gib: Of that memory, what is kept free for all that is not counted.
        weights_gib: The weights' size if it is not parameters x dtype: quantized, or a part of them
            on this card.

    Raises:
        UnsupportedModelError: kvcompress cannot compress the model's cache.
        PolicyConfigError: A policy is wrong in itself or for this model.
        EvaluationError: A number is out of range, or the weights' size is not known.
    """
    _check(prompt_tokens=prompt_tokens, batch=batch, new_tokens=new_tokens)
    _check(card_gib=card_gib, bandwidth_tbs=bandwidth_tbs)
    if weights_gib is not None:
        _check(weights_gib=weights_gib)
    if reserve_gib < 0:
        raise EvaluationError(f"reserve_gib={reserve_gib}: 0 or more is needed.")
    size = model if isinstance(model, ModelSize) else measure(model, dtype)
    if size.quantized and weights_gib is None:
        raise EvaluationError(
            f"The weights of this {size.name} are quantized, so their size is not that of its "
            "parameters. Give it as --weights-gib (weights_gib=), as they lie on disk."
        )
    chosen = [None, *map(policy_from, policies)]
    for policy in chosen:
        if policy is not None:
            policy.check_layers(len(size.hosted))
    weights = size.weight_bytes if weights_gib is None else round(weights_gib * GIB)
    read = size.read_bytes(batch) * weights / size.weight_bytes
    room = (card_gib - reserve_gib) * GIB - weights
    bandwidth = bandwidth_tbs * TERA
    caches = list[CachePlan]()
    for policy in chosen:
        rows = rows_held(size, policy, prompt_tokens)
        step = read + batch * _read_by_step(size, rows, prompt_tokens, max(new_tokens - 1, 1))
        need = batch * _peak_bytes(size, rows, prompt_tokens, new_tokens)
        fed = new_tokens - 1
        end = [each.after(fed) for each in rows]
        caches.append(
            CachePlan(
                policy=UNCOMPRESSED if policy is None else str(policy),
                prompt_tokens_held=tuple(each.kept for each in rows),
                end_tokens_held=tuple(end),
                prompt_bytes=batch * _hosted_bytes(size, [each.kept for each in rows]),
                end_bytes=batch * _hosted_bytes(size, end),
                end_dense_bytes=batch * _hosted_bytes(size, repeat(prompt_tokens + fed)),
                window_bytes=batch * _window_bytes(size, prompt_tokens + fed),
                peak_bytes=need,
                step_bytes=step,
                step_seconds=step / bandwidth,
                speedup=(caches[0].step_bytes if caches else step) / step,
                longest_prompt=longest_prompt(size, policy, new_tokens, room / batch),
                largest_batch=max(0, int(room // (need // batch))),
            )
        )
    return Plan(
        model=size,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        batch=batch,
        weight_bytes=weights,
        read_bytes=read,
        card_bytes=round(card_gib * GIB),
        reserve_bytes=round(reserve_gib * GIB),
        bandwidth=bandwidth,
        caches=tuple(caches),
        notes=tuple(_notes(size, chosen, batch)),
    )


def _check(**numbers: float) -> None:
    for name, value in numbers.items():
        if value <= 0:
            raise EvaluationError(f"{name}={value}: more than 0 is needed.")


def rows_held(size: ModelSize, policy: Policy | None, prompt_tokens: int) -> list[HeldRows]:
    """Rows of every hosted layer for a prompt without padding; None for the uncompressed cache.

    Raises:
        PolicyConfigError: The policy's own `budget` leaves no room for rows that are always kept.
    """
    layers = len(size.hosted)
    if policy is None:
        return [HeldRows(prompt_tokens, prompt_tokens, compressed=False)] * layers
    first, then = policy.part("prefill"), policy.part("decode")
    found = list[HeldRows]()
    for layer in range(layers):
        kept, limit, interval = prompt_tokens, None, 1
        if first is not None:
            kept = min(kept, batch_budget(first, [prompt_tokens], layer, layers))
        if isinstance(then, DecodePolicy):
            limit = batch_budget(then, [prompt_tokens], layer, layers, grows=True)
            limit += kept if policy.spares_prompt else 0
            interval = then.interval
        found.append(HeldRows(prompt_tokens, kept, limit, interval))
    return found


def longest_prompt(size: ModelSize, policy: Policy | None, new_tokens: int, room: float) -> int:
    """Tokens of the longest prompt whose cache fits into `room` bytes; 0 if none does."""

    def need(prompt: int) -> int:
        return _peak_bytes(size, rows_held(size, policy, prompt), prompt, new_tokens)

    return bisect_right(range(1, LONGEST), room, key=need)


def _hosted_bytes(size: ModelSize, rows: Iterable[int]) -> int:
    """Of one sequence."""
    return sum(layer.row_bytes * count for layer, count in zip(size.hosted, rows, strict=False))


def _window_bytes(size: ModelSize, seen: int) -> int:
    """Of one sequence, between two steps."""
    return sum(layer.row_bytes * min(layer.window or 0, seen) for layer in size.sliding)


def _peak_bytes(
    size: ModelSize, rows: Sequence[HeldRows], prompt_tokens: int, new_tokens: int
) -> int:
    """What the cache of one sequence needs, in prefill or later.

    Every layer is cut when it has attended, so in prefill one layer is whole, and others are not.
    """
    cut = [
        layer.row_bytes * prompt_tokens
        for layer, each in zip(size.hosted, rows, strict=True)
        if each.kept < prompt_tokens
    ]
    windows = sum(
        layer.row_bytes
        * (prompt_tokens if layer.whole_prompt else min(layer.window or 0, prompt_tokens))
        for layer in size.sliding
    )
    in_prefill = _hosted_bytes(size, [each.allocated(0) for each in rows])
    in_prefill += max(cut, default=0) + windows
    fed = new_tokens - 1
    later = _hosted_bytes(size, [each.allocated(fed) for each in rows])
    return max(in_prefill, later + _window_bytes(size, prompt_tokens + fed))


def _read_by_step(
    size: ModelSize, rows: Sequence[HeldRows], prompt_tokens: int, steps: int
) -> float:
    """Bytes of rows that a step of decode reads for one sequence, mean over the first `steps`."""
    read = {each: each.read(steps) for each in set(rows)}
    hosted = sum(
        layer.row_bytes * read[each] for layer, each in zip(size.hosted, rows, strict=True)
    )
    # A window's rows and the newest one; all of them while there are fewer.
    windows = sum(_window_bytes(size, prompt_tokens + step) for step in range(steps)) / steps
    return hosted + windows + sum(layer.row_bytes for layer in size.sliding)


def _notes(size: ModelSize, policies: Sequence[Policy | None], batch: int) -> list[str]:
    notes = [
        "Not counted: activations, which in the prefill of a long prompt can exceed the cache, "
        "workspace, and the rows' positions. So what fits is at most that, and no step is faster."
    ]
    if size.positions is not None:
        notes.append(f"The model was made for texts of at most {size.positions} tokens.")
    if any(policy is not None for policy in policies):
        notes.append(
            "A prompt is read at once: one layer is whole while the others are cut already. Read "
            "in chunks it needs no whole layer."
        )
    if size.states:
        notes.append(f"Layers {_listed(size.states)} keep a state of fixed size: not counted.")
    if size.readers:
        notes.append(
            f"Layers {_listed(size.readers)} have no rows of their own; what they read of others' "
            "is counted once."
        )
    if any(layer.whole_prompt for layer in size.sliding):
        notes.append(
            f"Layers {_listed([layer.layer_idx for layer in size.sliding])} have sliding windows; "
            "with this transformers each of them has the whole prompt in memory until the first "
            "step."
        )
    if size.expert_bytes:
        read = 1 - (1 - size.expert_share) ** batch
        notes.append(
            f"Of the experts a step reads {read:.3g}: as many as are expected if every token "
            "chooses evenly and for itself."
            if size.expert_share < 1
            else "The configuration does not say how many experts a token chooses: all are read."
        )
    layers = len(size.hosted)
    for policy in policies:
        if policy and any(policy.reindexed_tokens(layer, layers) for layer in range(layers)):
            notes.append(
                f"{policy} moves keys; whether this model's can be moved is tried when it is "
                "loaded."
            )
    return notes


def _listed(numbers: Sequence[int]) -> str:
    """As ranges where neighbours follow each other: 0-4, 6."""
    parts = list[list[int]]()
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in parts)


def memory_by_length(plan: Plan, points: int = 200) -> dict[str, list[tuple[int, float]]]:
    """Of every cache, prompt tokens and the GiB that weights and cache need.

    Up to half more than the plan's prompt, or than the longest that fits uncompressed, whichever is
    longer.
    """
    furthest = max(plan.prompt_tokens, plan.caches[0].longest_prompt) * 3 // 2
    lengths = sorted({1 + (furthest - 1) * number // points for number in range(points + 1)})
    found = dict[str, list[tuple[int, float]]]()
    for cache in plan.caches:
        policy = None if cache.policy == UNCOMPRESSED else policy_from(cache.policy)
        need = [
            _peak_bytes(plan.model, rows_held(plan.model, policy, each), each, plan.new_tokens)
            for each in lengths
        ]
        found[cache.policy] = [
            (length, (plan.weight_bytes + plan.batch * each) / GIB)
            for length, each in zip(lengths, need, strict=True)
        ]
    return found
