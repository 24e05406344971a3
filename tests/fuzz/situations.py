"""Small random situations, each compared with the oracle and with its own rows alone.

A situation is a model, a policy, a batch, a way to generate and up to three turns; `draw(seed)`
makes one and `examine(seed)` tries it. It must either be refused, before any token and for one of
the `REFUSALS`, or

- hold as many rows as the policy's budgets say, after every forward,
- keep rows in order, each once, no padding while a real token had to go, and keys that are those
  of their tokens and positions,
- give the tokens and logits of the oracle: the model on an uncompressed cache with exactly the
  evicted entries masked out (not where keys are moved, and not by the oracle alone where beams
  change places, since the oracle's rows do not),
- give what one of its rows gives alone, fed by hand under the same policy, down to the rows kept.

Two candidates may be so close that float noise decides between them. So what differs is tried again
with slightly different weights: a near tie is gone then, a fault is not. Equal tokens have keys of
equal norm in the first layer under any weights, so for K-norm other tokens are tried too. Many near
ties are a fault too.
"""

import contextlib
import copy
import functools
import itertools
import random
import re
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch

TOLERANCE = 1e-3
BEAMS = 3
DRAFTS = ("lookup", "assistant")
BEAM_MODES = ("beams", "beam_sample")
MODES = (
    *("greedy", "sample", "samples", "chunks", "embeds", "loop", "pieces"),
    *BEAM_MODES,
    *DRAFTS,
)


@dataclass(frozen=True)
class Situation:
    seed: int
    family: str
    attn: str
    policy: str
    lengths: tuple[int, ...]
    """Tokens of the prompts; shorter ones are padded at the left."""
    mode: str
    new_tokens: int
    host: str = "press"
    """press, or cache for a CompressedCache."""
    turns: tuple[int, ...] = ()
    """How many tokens each later turn brings."""
    only_new: bool = False
    """Whether a later turn is given its new tokens alone."""
    chunk: int = 1
    """Tokens that are fed at a time, where a prompt is fed in parts."""
    ending: str = "prompt_length"
    """How a loop with a CompressedCache says that the prompt is complete."""
    places: bool = True
    """Whether a loop gives position_ids."""
    repeats: bool = False
    """Whether prompts are of few different tokens, so that prompt lookup finds drafts there."""
    row: int = 0
    """The row that is tried alone."""

    @property
    def padded(self) -> bool:
        return len(set(self.lengths)) > 1

    @property
    def told_late(self) -> bool:
        """Whether only what follows the prompt tells that it is complete."""
        return self.mode == "pieces" and self.ending != "prompt_length"

    @property
    def pads(self) -> list[int]:
        return [max(self.lengths) - length for length in self.lengths]


# Drawing.


def _list(rng: random.Random, layers: int, low: int, high: int) -> int | list[int]:
    if rng.random() < 0.25:
        return [rng.randint(low, high) for _ in range(layers)]
    return rng.randint(low, high)


def _budget(rng: random.Random, layers: int, beside: int, lists: bool = True) -> dict[str, Any]:
    if rng.random() < 0.2:
        return {"keep_ratio": rng.choice([0.1, 0.3, 0.5, 0.8, 1.0])}
    low, high = beside + 1, beside + rng.choice([3, 12, 30])
    return {"capacity": _list(rng, layers, low, high) if lists else rng.randint(low, high)}


def _snapkv(rng: random.Random, layers: int, name: str = "snapkv") -> dict[str, Any]:
    pyramid = name == "pyramidkv"
    window = rng.randint(1, 8)
    fields = _budget(rng, layers, window, lists=not pyramid)
    fields["window_size"] = window if pyramid or rng.random() < 0.8 else [window] * layers
    fields["kernel_size"] = rng.choice([1, 3, 5, 7])
    fields["pooling"] = rng.choice(["avg", "max", "none"])
    fields["group_reduce"] = rng.choice(["mean", "max", "sum"])
    if pyramid:
        fields["beta"] = rng.choice([1, 3, 20])
        fields["rounding"] = rng.choice(["exact", "reference"])
    if name == "snapkv_decoding":
        fields["interval"] = rng.randint(1, 6)
    elif rng.random() < 0.3:
        fields["later_turns"] = rng.choice(["append", "keep"])
    return fields


def _fields(rng: random.Random, kind: str, layers: int) -> dict[str, Any]:
    """Fields of a policy, not all of which go together."""
    interval = {"interval": rng.choice([1, 1, 2, 5])}
    if kind in ("snapkv", "pyramidkv", "snapkv_decoding"):
        return _snapkv(rng, layers, kind)
    if kind == "streaming_llm":
        sinks = rng.randint(0, 4)
        positions = rng.choice(["original", "cache"])
        return _budget(rng, layers, sinks) | interval | {"n_sink": sinks, "positions": positions}
    if kind == "h2o":
        ratio, normalize = rng.choice([0, 0.3, 0.5, 0.9]), rng.choice(["none", "observers"])
        return _budget(rng, layers, 2) | interval | {"recent_ratio": ratio, "normalize": normalize}
    if kind == "knorm":
        recent = rng.choice([0, 0, 3])
        return _budget(rng, layers, recent) | interval | {"protect_recent": recent}
    if kind == "scissorhands":
        recent, step = rng.randint(0, 4), rng.randint(1, 6)
        history = {"recent": recent, "interval": step, "history": rng.randint(1, step)}
        return _budget(rng, layers, recent) | history
    return _budget(rng, layers, 4)


def _policy(rng: random.Random, layers: int, mode: str) -> str:
    """The string form of a policy that is valid for so many layers."""
    from kvcompress import PolicyConfigError, policy_from
    from kvcompress.plugins import registry

    installed = registry().policies
    kinds = sorted(name for name, entry in installed.items() if entry.distribution == "kvcompress")
    while True:
        first, second = rng.choice(kinds), rng.choice(kinds)
        spec: dict[str, Any] = {"policy": first, **_fields(rng, first, layers)}
        if rng.random() < 0.3:
            decode = {"policy": second, **_fields(rng, second, layers)}
            scope = rng.choice(["all", "generated"])
            spec = {"policy": "composed", "prefill": spec, "decode": decode, "scope": scope}
        try:
            policy = policy_from(spec)
            policy.check_layers(layers)
        except PolicyConfigError:
            continue
        # Refused with drafts, which need not be seen so often.
        if mode in DRAFTS and policy.part("decode") is not None and rng.random() < 0.97:
            continue
        return policy.to_string()


def _too_new() -> set[str]:
    """Families of which this transformers keeps states elsewhere; `press` refuses them."""
    return {"lfm2", "qwen3_next"} if _is_old() else set()


def draw(seed: int) -> Situation:
    """The situation of a seed."""
    from kvcompress.hosting import hosted_layers
    from kvcompress.testing import FAMILIES
    from kvcompress.testing.models import ONLY_EAGER

    rng = random.Random(seed)
    family = rng.choice(sorted(set(FAMILIES) - _too_new()))
    attn = "eager" if family in ONLY_EAGER else rng.choice(["sdpa", "eager"])
    layers = len(hosted_layers(model_of(family, attn).config))
    mode = rng.choice(MODES)
    batch = 1 if mode in DRAFTS else rng.randint(1, 3)
    longest = rng.choice([8, 25, 40, 60])
    lengths = [rng.randint(1, longest) for _ in range(batch)]
    if rng.random() < 0.4:
        lengths = lengths[:1] * batch
    turns = rng.choice([0, 0, 0, 0, 1] if mode in DRAFTS else [0, 0, 1, 2])
    if mode in (*BEAM_MODES, "pieces"):
        turns = 0
    host = "press" if mode == "loop" else rng.choice(["press", "cache"])
    return Situation(
        seed=seed,
        family=family,
        attn=attn,
        policy=_policy(rng, layers, mode),
        lengths=tuple(lengths),
        mode=mode,
        new_tokens=rng.choice([2, 3, 4, 7]),
        host="cache" if mode == "pieces" else host,
        turns=tuple(rng.randint(1, 20) for _ in range(turns)),
        only_new=rng.random() < 0.5,
        chunk=rng.randint(2, 30),
        ending=rng.choice(["prompt_length", "end_prefill", "one token"]),
        places=rng.random() < 0.7,
        repeats=mode == "lookup",
        row=rng.randrange(batch * (BEAMS if mode in BEAM_MODES else 1)),
    )


# Running.


@functools.cache
def model_of(family: str, attn: str, changed: int = 0) -> Any:
    """A tiny model; changed: with weights that differ a little, for every number in another way."""
    from kvcompress.testing import tiny_model

    if changed:
        model = copy.deepcopy(model_of(family, attn))
        _scatter(model.parameters(), 1e-5, changed)
    else:
        model = tiny_model(family, attn=attn)
        # As they are made, all keys behind a norm have the same one, and K-norm has only ties.
        _scatter((weight for weight in model.parameters() if weight.ndim == 1), 0.1, 0)
    return model


def _scatter(weights: Iterable[torch.Tensor], size: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in weights:
            weight.add_(size * torch.randn(weight.shape, generator=generator))


@functools.cache
def _assistant() -> Any:
    from kvcompress.testing import tiny_model

    return tiny_model("llama", seed=7, num_hidden_layers=1)


def cache_name(model: Any) -> str:
    """What the cache is called in calls of a model and in their outputs."""
    from kvcompress.session import cache_argument

    return cache_argument(model)


@dataclass
class Result:
    """What a situation gave."""

    ids: torch.Tensor
    """All tokens, padding and prompts included."""
    mask: torch.Tensor
    cache: Any = None
    ends: list[int] = field(default_factory=list)
    """Where every turn's prompt ends."""
    stops: list[int] = field(default_factory=list)
    """Where its answer ends."""
    logits: list[torch.Tensor] = field(default_factory=list)
    """Of every new token, steps x batch x vocabulary; none for beams."""
    scores: torch.Tensor | None = None
    """Of beams."""
    told_late: bool = False
    """Whether only what follows the prompt tells that it is complete."""


def _prompt(situation: Situation) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(situation.seed)
    batch, longest = len(situation.lengths), max(situation.lengths)
    if situation.repeats:
        ids = torch.randint(1, 9, (batch, longest), generator=generator)
    else:
        # No token twice: the same one has keys of the same norm, so that noise decides for K-norm.
        order = torch.rand(batch, 100, generator=generator).argsort(dim=1)
        ids = 1 + order[:, :longest]
    mask = (torch.arange(longest) >= torch.tensor(situation.pads)[:, None]).long()
    return ids * mask, mask


def _later(situation: Situation, turn: int, batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * situation.seed + turn)
    return torch.randint(1, 101, (batch, situation.turns[turn - 1]), generator=generator)


def _options(situation: Situation, turn: int) -> dict[str, Any]:
    mode = situation.mode
    options: dict[str, Any] = {"do_sample": mode in ("sample", "samples", "beam_sample")}
    if mode == "samples" and turn == 0:
        options |= {"num_return_sequences": 2}
    elif mode in BEAM_MODES:
        options |= {"num_beams": BEAMS, "num_return_sequences": BEAMS, "top_k": 0}
        options |= {"length_penalty": 0.0, "output_scores": True}
    elif mode == "chunks":
        options |= {"prefill_chunk_size": situation.chunk}
    elif mode == "lookup":
        options |= {"prompt_lookup_num_tokens": 3}
    elif mode == "assistant":
        options |= {"assistant_model": _assistant()}
    return options


class Talk:
    """A situation on one cache."""

    def __init__(self, situation: Situation, model: Any) -> None:
        self.situation = situation
        self.model = model
        self.watch: Any = None
        """Told of evictions between forwards."""
        self._name = cache_name(model)
        self.result = Result(*_prompt(situation), told_late=situation.told_late)

    def go(self) -> Result:
        """All turns."""
        for turn in range(1 + len(self.situation.turns)):
            result = self.result
            if turn:
                more = _later(self.situation, turn, len(result.ids))
                result.ids = torch.cat([result.ids, more], dim=1)
                result.mask = torch.cat([result.mask, torch.ones_like(more)], dim=1)
            result.ends.append(result.ids.shape[1])
            torch.manual_seed(self.situation.seed + turn)
            answer = self._loop if self.situation.mode in ("loop", "pieces") else self._generate
            answer(turn)
            result.stops.append(result.ids.shape[1])
        return self.result

    def _said(self, new: torch.Tensor) -> None:
        result = self.result
        times = len(new) // len(result.ids)
        result.ids = torch.cat([result.ids.repeat_interleave(times, 0), new], dim=1)
        mask = result.mask.repeat_interleave(times, 0)
        result.mask = torch.cat([mask, torch.ones_like(new)], dim=1)

    def _generate(self, turn: int) -> None:
        result, situation = self.result, self.situation
        given = {"attention_mask": result.mask}
        if situation.mode == "embeds" and turn == 0:
            given["inputs_embeds"] = self.model.get_input_embeddings()(result.ids)
        elif turn and situation.only_new:
            given["input_ids"] = result.ids[:, result.cache.get_seq_length() :]
        else:
            given["input_ids"] = result.ids
        if result.cache is not None:
            given[self._name] = result.cache
        output = self.model.generate(
            **given,
            **_options(situation, turn),
            max_new_tokens=situation.new_tokens,
            return_dict_in_generate=True,
            output_logits=True,
        )
        result.cache = output[self._name]
        self._said(output.sequences[:, -situation.new_tokens :])
        if situation.mode in BEAM_MODES:
            result.scores = output.sequences_scores
        else:
            result.logits.append(torch.stack(output.logits))

    def _loop(self, turn: int) -> None:
        result, situation = self.result, self.situation
        start = result.cache.get_seq_length() if turn else 0
        end = result.ids.shape[1]
        size = situation.chunk if situation.mode == "pieces" else end
        # No piece of one token after the first: it would be taken for a generated one.
        cuts = [*range(start, end - 1, size), end] if end > 1 else [0, 1]
        for first, last in itertools.pairwise(cuts):
            logits = self._feed(first, last)
        if situation.mode == "pieces" and situation.ending == "end_prefill":
            if hasattr(result.cache, "end_prefill"):
                result.cache.end_prefill()
            if self.watch is not None:
                self.watch.look(result.cache)
        steps = [logits]
        for _ in range(situation.new_tokens - 1):
            self._said(steps[-1].argmax(dim=-1, keepdim=True))
            steps.append(self._feed(result.ids.shape[1] - 1, result.ids.shape[1]))
        self._said(steps[-1].argmax(dim=-1, keepdim=True))
        result.logits.append(torch.stack(steps))

    def _feed(self, first: int, last: int) -> torch.Tensor:
        result = self.result
        given: dict[str, Any] = {"attention_mask": result.mask[:, :last]}
        if self.situation.places:
            positions = (result.mask.cumsum(dim=1) - 1).clamp(min=0)
            given["position_ids"] = positions[:, first:last]
        if result.cache is not None:
            given[self._name] = result.cache
        with torch.no_grad():
            output = self.model(result.ids[:, first:last], **given)
        result.cache = output[self._name]
        return output.logits[:, -1]


class Refused(Exception):
    """A situation is refused, for a reason that is known."""


def compressed(situation: Situation, model: Any) -> tuple[Result, Any]:
    """What a situation gives under its policy, and the evictions."""
    from kvcompress import CompressedCache, KVCompressError, press
    from kvcompress.testing import record

    talk = Talk(situation, model)
    seen: list[int] = []
    with contextlib.ExitStack() as stack:
        try:
            if situation.host == "press":
                host = stack.enter_context(press(model, situation.policy))
            else:
                length = None if situation.told_late else max(situation.lengths)
                talk.result.cache = CompressedCache(model, situation.policy, prompt_length=length)
                host = SimpleNamespace(model=model, cache=talk.result.cache)
            evictions = talk.watch = stack.enter_context(record(host))
            hook = model.register_forward_hook(lambda *_: seen.append(host.cache.get_seq_length()))
            stack.callback(hook.remove)
            return talk.go(), evictions
        except KVCompressError as error:
            told = [
                number for number in seen if number >= talk.result.ends[-1] + situation.told_late
            ]
            _judge_refusal(situation, error, len(told))
    raise AssertionError("not reached")


def plain(situation: Situation, model: Any) -> Result:
    """What a situation gives without any policy."""
    from transformers import DynamicCache

    talk = Talk(situation, model)
    if situation.host == "cache":
        talk.result.cache = DynamicCache(config=model.config)
    return talk.go()


# Refusals.


def _parts(situation: Situation) -> tuple[Any, Any]:
    """The policies that evict at prefill and at decode."""
    from kvcompress import policy_from

    policy = policy_from(situation.policy)
    return policy.part("prefill"), policy.part("decode")


def moves_keys(situation: Situation) -> bool:
    """Whether the policy moves keys, for which no mask can stand."""
    from kvcompress import policy_from

    return policy_from(situation.policy).reindexed_tokens(0, 1) > 0


def _by_length(situation: Situation) -> bool:
    """Whether rows of a batch may have budgets of their own."""
    parts = [part for part in _parts(situation) if part is not None]
    names = {part.name for part in parts}
    return any(part.keep_ratio is not None for part in parts) or "pyramidkv" in names


def _is_old() -> bool:
    """Whether this transformers makes no linear layers in caches, and some masks too short."""
    from transformers import cache_utils

    return not hasattr(cache_utils, "DYNAMIC_LAYER_TYPE_MAPPING")


REFUSALS = {
    "rows with different budgets": (
        r"different budgets in layer .* Use a fixed capacity",
        lambda it: it.padded and _by_length(it),
    ),
    "append after padding": (
        r"later_turns=append cannot follow a padded batch",
        lambda it: it.padded and it.turns and "append" in it.policy,
    ),
    "scope=generated after padding": (
        r"scope=generated cannot follow a padded batch",
        lambda it: it.padded and "scope=generated" in it.policy,
    ),
    "drafts while evicting": (
        r"(evicts|keeps a record) while decoding, and draft tokens .* may be taken back",
        lambda it: it.mode in DRAFTS and _parts(it)[1] is not None,
    ),
    "keys that cannot be moved": (
        r"cannot be moved to other positions: .* Use positions='original'",
        moves_keys,
    ),
    "drafts in a later turn": (
        r"they would be fed a second time",
        lambda it: it.mode in DRAFTS and it.turns,
    ),
    "chunks or drafts in a later turn, by an old transformers": (
        r"The attention mask hides tokens that are not padding",
        lambda it: _is_old() and it.mode in ("chunks", *DRAFTS) and it.turns,
    ),
    "latents judged between forwards": (
        r"caches latents, so rows can only be judged during a forward",
        lambda it: it.mode == "pieces" and it.ending == "end_prefill",
    ),
}
"""Why a situation may be refused: what the error says, and which situations it is right for."""


def _judge_refusal(situation: Situation, error: Exception, told: int) -> None:
    for reason, (said, fits) in REFUSALS.items():
        if re.search(said, str(error)) and fits(situation):
            assert not told, f"refused only after {told} tokens: {error}"
            raise Refused(reason) from error
    raise AssertionError(f"refused without need: {type(error).__name__}: {error}") from error


# Comparing.


def _state(result: Result) -> Any:
    from kvcompress.hosting import state_of

    state = state_of(result.cache)
    assert state is not None, "the cache was not compressed"
    return state


def _hosted(result: Result) -> list[Any]:
    from kvcompress.cache import KVLayer

    return [layer for layer in result.cache.layers if isinstance(layer, KVLayer)]


def check_rows(situation: Situation, result: Result) -> None:
    """Rows are in order, each once; padding goes first; StreamingLLM keeps what it says."""
    times = len(result.ids) // len(situation.lengths)
    for number, layer in enumerate(_hosted(result)):
        seen, columns, positions = layer.get_seq_length(), layer.columns, layer.positions
        assert columns.shape[2] == layer.rows.counts.held
        assert bool((columns.diff(dim=-1) > 0).all()), f"layer {number}: rows out of order"
        assert int(columns.max()) < seen, f"layer {number}: a row was not seen yet"
        for row, rows in enumerate(positions):
            pads = situation.pads[row // times]
            real = (rows >= 0).sum(dim=-1)
            assert bool(((rows >= 0).diff(dim=-1).sum(dim=-1) <= 1).all()), "padding is not at left"
            kept = torch.where(rows.shape[-1] > real, seen - pads, real)
            assert torch.equal(real, kept), f"layer {number}: padding is kept, real tokens are not"
            if situation.policy.startswith("streaming_llm") and "+" not in situation.policy:
                _check_stream(situation, rows, seen - pads)


def _check_stream(situation: Situation, rows: torch.Tensor, seen: int) -> None:
    sinks = _parts(situation)[0].n_sink
    for head in rows:
        real = head[head >= 0]
        first = torch.arange(min(sinks, len(real)))
        rest = torch.arange(seen - len(real) + len(first), seen)
        assert torch.equal(real, torch.cat([first, rest])), "not the sinks and the newest rows"


def check_keys(situation: Situation, result: Result, model: Any) -> None:
    """Keys of the first layer depend on the token and its position alone, so they can be made."""
    layer, row = result.cache.layers[0], situation.row
    if layer not in _hosted(result):
        return
    pads = situation.pads[row // (len(result.ids) // len(situation.lengths))]
    columns = layer.columns[row, 0]
    real = columns >= pads
    places = columns - pads + shift_of(situation, pads)
    if moves_keys(situation):
        sinks = min(_parts(situation)[0].n_sink, int(real.sum()))
        start = int(real.nonzero()[0])
        held = len(columns) - start
        places[start : start + sinks] = torch.arange(sinks) + places[-1] - held + 1
    if situation.mode in BEAM_MODES:  # in the cache they have other places than in what is returned
        real &= columns < result.ends[0]
    if not real.any():
        return
    with torch.no_grad():
        output = model(result.ids[row, columns[real]][None], position_ids=places[real][None])
    made = output[cache_name(model)].layers[0].keys[0, 0]
    off = float((made - layer.keys[row, 0, real]).abs().max())
    assert off < TOLERANCE, f"keys are off by {off:.2g} from those of their tokens and positions"


def shift_of(situation: Situation, pads: int) -> int:
    """The first real token's position: without position_ids, a loop counts padding too."""
    return pads if situation.mode in ("loop", "pieces") and not situation.places else 0


def check_counts(situation: Situation, result: Result) -> None:
    """Every forward leaves as many rows as the budgets say."""
    from kvcompress import policy_from

    policy, state = policy_from(situation.policy), _state(result)
    forwards, actual = map(list, zip(*state.history.entries(), strict=True))
    if situation.mode in DRAFTS:  # some of what was seen was taken back
        ends = zip(result.ends, result.stops, strict=True)
        forwards = [
            *[seen for end, stop in ends for seen in (end, stop - 1)][:-1],
            state.counts[0].seen,
        ]
        actual = [sum(count.held for count in state.counts)]
    expected = [0] * len(forwards)
    for layer in range(state.num_layers):
        held = held_rows(policy, layer, state.num_layers, forwards, result, min(situation.pads))
        expected = [total + rows for total, rows in zip(expected, held, strict=True)]
    expected = expected[-len(actual) :]
    assert actual == expected, f"rows held after each forward {actual}, by the budgets {expected}"


def held_rows(
    policy: Any, layer: int, layers: int, forwards: list[int], talk: Result, pads: int
) -> list[int]:
    """Rows of a layer after each forward, from the tokens seen and where prompts and turns end."""
    cut, evict = policy.part("prefill"), policy.part("decode")
    held = before = since = spared = limit = 0
    counts = []
    forwards = list(forwards)
    late = talk.told_late
    for end, stop in zip(talk.ends, talk.stops, strict=True):
        start, reading = before, True
        while forwards and forwards[0] < stop:
            seen = forwards.pop(0)
            held, since = held + seen - before, since + seen - before
            ends_here = reading and seen >= end + late
            if ends_here:
                since = seen - end
                rows = held - since
                if cut is not None:
                    earlier = 0 if cut.later_turns == "revote" else rows - (end - start)
                    if cut.later_turns != "keep" or not start:
                        rows = min(rows, earlier + cut.budget(end - pads, layer, layers))
                if evict is not None:
                    limit = evict.budget(end - pads, layer, layers)
                    spared = rows if policy.spares_prompt else 0
                held, reading = rows + since, False
            # The forward that ends a prompt evicts nothing else, unless it had ended before.
            decodes = not reading and (not ends_here or before >= end)
            if evict is not None and decodes and since >= evict.interval:
                held, since = min(held, spared + limit), 0
            counts.append(held)
            before = seen
    return counts


def check_equal(ours: Result, theirs: Result, what: str) -> None:
    """The same tokens, from logits that are the same up to float noise."""
    steps = [torch.cat(each.logits) for each in (ours, theirs) if each.logits]
    if len(steps) == 2:
        for number, (a, b) in enumerate(zip(*steps, strict=True)):
            worst = float((a - b).abs().max())
            assert worst < TOLERANCE, f"{what}: logits of new token {number} differ by {worst:.2g}"
    if ours.scores is not None and theirs.scores is not None:
        worst = float((ours.scores - theirs.scores).abs().max())
        assert worst < 10 * TOLERANCE, f"{what}: scores of beams differ by {worst:.2g}"
    assert torch.equal(ours.ids, theirs.ids), f"{what}: other tokens"


def alone(situation: Situation, result: Result, model: Any) -> tuple[Result, Any]:
    """One row of a result, its tokens fed by hand in a batch of one; and the evictions."""
    from kvcompress import press
    from kvcompress.testing import record

    with press(model, situation.policy) as session, record(session) as evictions:
        return _fed(situation, result, model), evictions


def _fed(situation: Situation, result: Result, model: Any) -> Result:
    pads = situation.pads[situation.row // (len(result.ids) // len(situation.lengths))]
    ids = result.ids[situation.row, pads:][None]
    ends = [end - pads for end in result.ends]
    stops = [stop - pads for stop in result.stops]
    shift = shift_of(situation, pads)
    own = Result(ids, torch.ones_like(ids), ends=ends, stops=stops)
    name, fed = cache_name(model), 0
    for end, stop in zip(ends, stops, strict=True):
        steps = []
        for last in range(end, stop):
            given = {} if own.cache is None else {name: own.cache}
            given["position_ids"] = torch.arange(fed, last)[None] + shift
            with torch.no_grad():
                if situation.mode == "embeds" and not fed:  # which some models make less of
                    output = model(
                        inputs_embeds=model.get_input_embeddings()(ids[:, :last]), **given
                    )
                else:
                    output = model(ids[:, fed:last], **given)
            own.cache, fed = output[name], last
            steps.append(output.logits[:, -1])
        own.logits.append(torch.stack(steps))
    return own


def check_alone(situation: Situation, result: Result, model: Any) -> None:
    """A row gives alone, and keeps alone, what it does in its batch."""
    from kvcompress.testing import oracle

    own, evictions = alone(situation, result, model)
    row = situation.row
    if result.scores is None:
        mine = [steps[:, row : row + 1] for steps in result.logits]
        check_equal(replace(own, logits=mine), own, f"row {row} and the row alone")
        for number, layers in enumerate(zip(_hosted(result), _hosted(own), strict=True)):
            together, single = layers[0].positions[row], layers[1].positions[0]
            if situation.mode not in DRAFTS:
                padding = together.shape[-1] - single.shape[-1]
                wanted = torch.nn.functional.pad(single, (padding, 0), value=-1)
                assert torch.equal(together, wanted), f"layer {number} keeps other rows alone"
        return
    chances = torch.cat(own.logits)[:, 0].log_softmax(dim=-1)
    tokens = own.ids[0, own.ends[0] :]
    score = chances.gather(1, tokens[:, None]).sum()
    off = float((score - result.scores[row]).abs())
    assert off < 10 * TOLERANCE, f"a beam's score is off by {off:.2g} from that of its tokens alone"
    if not moves_keys(situation):
        with oracle(model, evictions):
            check_equal(_fed(situation, result, model), own, "a beam's tokens and the oracle")


def _reference(situation: Situation) -> Situation:
    """The plainest situation that must give the same."""
    if situation.mode in DRAFTS:
        return replace(situation, mode="greedy")
    if situation.mode == "pieces":
        return replace(situation, ending="prompt_length")
    return situation


def check(situation: Situation, model: Any) -> str:
    """Why a situation is refused, or "equal"; raises AssertionError if it is wrong."""
    from kvcompress.testing import oracle

    try:
        result, evictions = compressed(situation, model)
    except Refused as refused:
        return str(refused)
    except AssertionError:
        raise
    except Exception as error:
        with contextlib.suppress(type(error)):
            plain(situation, model)
            raise AssertionError(f"{type(error).__name__}: {error}") from error
        return "transformers cannot do this"
    check_rows(situation, result)
    check_keys(situation, result, model)
    check_counts(situation, result)
    reference = _reference(situation)
    if reference != situation:
        same, evictions = compressed(reference, model)
        check_equal(result, same, f"{situation.mode} and {reference.mode}")
    beams_part = situation.mode in BEAM_MODES and _parts(situation)[1] is not None
    if not moves_keys(situation) and not beams_part:
        with oracle(model, evictions):
            check_equal(result, plain(reference, model), "the oracle")
    check_alone(situation, result, model)
    return "equal"


@dataclass(frozen=True)
class Verdict:
    situation: Situation
    outcome: str
    """equal, near tie, failure, or why it is refused."""
    message: str = ""

    def __str__(self) -> str:
        lines = [f"seed {self.situation.seed}: {self.outcome}", str(self.situation), self.message]
        return "\n".join([*lines, f"To repeat: make fuzz N=1 SEED={self.situation.seed}"])


def examine(seed: int) -> Verdict:
    """Draw and try the situation of a seed."""
    situation = draw(seed)
    model = model_of(situation.family, situation.attn)
    try:
        return Verdict(situation, check(situation, model))
    except Exception as error:
        message = "".join(traceback.format_exception(error))
    for changed in (1, 2, 3):
        other = situation
        if "knorm" in situation.policy:
            other = replace(situation, seed=seed + changed * 1_000_000)
        with contextlib.suppress(Exception):
            check(other, model_of(situation.family, situation.attn, changed))
            return Verdict(situation, "near tie", message)
    return Verdict(situation, "failure", message)
