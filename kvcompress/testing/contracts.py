"""The contract suite: what core and every user rely on a policy to do.

    def test_my_policy():
        check_policy(MyPolicy, capacity=20)

or one test for each contract:

    CONTRACTS = contracts(MyPolicy, capacity=20)

    @pytest.mark.parametrize("name", CONTRACTS)
    def test_contract(name):
        CONTRACTS[name]()
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvcompress.composition import ComposedPolicy
from kvcompress.hosting import state_of
from kvcompress.plugins import policy_from, registry
from kvcompress.policy import DecodePolicy, LayerView, Policy
from kvcompress.session import cache_argument, press
from kvcompress.tensors import newest_of
from kvcompress.testing.models import random_prompt, tiny_model
from kvcompress.testing.oracle import oracle, record
from kvcompress.testing.selection import kept_positions, view_of

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 3, 8, 2, 16
MAX_BUDGET = 200
LONG = 200
"""Tokens of the longest generation."""


class PolicyContractError(AssertionError):
    """Which contracts a policy breaks, and how."""


def check_policy(policy: type[Policy] | Policy | str, **fields: Any) -> None:
    """Run every contract on a policy, with tiny random models on the CPU; takes half a minute.

    Args:
        policy: A policy class with `fields`, or a policy, or its string form.
        fields: A small budget (at most 200 rows a layer), and whatever else should be tried.

    Raises:
        PolicyContractError: Naming every contract that is broken.
        PolicyConfigError: The fields are wrong.
        ValueError: The budget is too large for the prompts tried here.
    """
    broken = []
    for name, check in contracts(policy, **fields).items():
        try:
            check()
        except Exception as error:
            kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
            broken.append(f"{name}: {kind}{error}")
    if broken:
        raise PolicyContractError(
            f"{_made(policy, fields)} breaks {len(broken)} contracts:\n- " + "\n- ".join(broken)
        )


def contracts(policy: type[Policy] | Policy | str, **fields: Any) -> dict[str, Callable[[], None]]:
    """The checks that apply to a policy, by name; each raises if its contract is broken."""
    made = _made(policy, fields)
    budget = 0 if _by_ratio(made) else max(_budgets(made, 10 * MAX_BUDGET))
    if budget > MAX_BUDGET:
        raise ValueError(
            f"{made} keeps up to {budget} rows a layer; the contracts are tried on short prompts. "
            f"Give a budget of at most {MAX_BUDGET}, for example capacity=20."
        )
    checks = dict(_CONTRACTS)
    if any(made.reindexed_tokens(layer, LAYERS) for layer in range(LAYERS)):
        # Masking rows out of an uncompressed cache does not move their keys.
        checks = {name: check for name, check in checks.items() if "masked out" not in name}
    return {name: functools.partial(check, made) for name, check in checks.items()}


def _made(policy: type[Policy] | Policy | str, fields: dict[str, Any]) -> Policy:
    if isinstance(policy, type):
        return policy(**fields)
    made = policy_from(policy)
    return made.model_copy(update=fields) if fields else made


def _budgets(policy: Policy, tokens: int) -> list[int]:
    return [policy.budget(tokens, layer, LAYERS) for layer in range(LAYERS)]


def _length(policy: Policy) -> int:
    """Of a prompt that exceeds every budget."""
    if _by_ratio(policy):
        return 120
    return max(_budgets(policy, 10 * MAX_BUDGET)) + 40


def _by_ratio(policy: Policy) -> bool:
    return any(part.keep_ratio is not None for part in _parts(policy))


def _parts(policy: Policy) -> list[Policy]:
    parts = [policy.part("prefill"), policy.part("decode")]
    return [part for number, part in enumerate(parts) if part and part not in parts[:number]]


# One selection on bare tensors.


def _tensors(policy: Policy, rows: int = 3) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    length = _length(policy)
    shapes = {"query": HEADS, "key": KV_HEADS, "value": KV_HEADS}
    return {
        name: torch.randn(rows, heads, length, HEAD_DIM, generator=generator)
        for name, heads in shapes.items()
    }


def _views(policy: Policy) -> list[tuple[Policy, LayerView]]:
    tensors = _tensors(policy)
    mask = torch.ones(3, tensors["key"].shape[2], dtype=torch.long)
    if not _by_ratio(policy):
        mask[1, :5] = 0
    return [
        (part, view_of(part, **tensors, attention_mask=mask, layer_idx=layer, num_layers=LAYERS))
        for part in _parts(policy)
        for layer in range(LAYERS)
    ]


def _forms(policy: Policy) -> None:
    for part in _parts(policy):
        form = part.to_dict()
        assert form.pop("policy") == part.name, "to_dict() must give the name under 'policy'."
        assert type(part)(**form) == part, f"the dict form {form} reads back as another policy."
        text = part.to_string()
        name, *texts = text.split(":")
        assert name == part.name, f"the string form {text!r} must start with the name."
        read = type(part).parse(texts, text)
        assert read == part, f"the string form {text!r} reads back as {read}."
    installed = registry().policies
    if isinstance(policy, ComposedPolicy) and all(p.name in installed for p in _parts(policy)):
        for spec in (policy.to_string(), policy.to_dict()):
            assert policy_from(spec) == policy, f"{spec!r} reads back as another policy."


def _value(policy: Policy) -> None:
    hash(policy)
    for name in type(policy).model_fields:
        try:
            setattr(policy, name, getattr(policy, name))
        except Exception:
            continue
        raise AssertionError(f"{name} can be assigned to; policies are frozen values.")


def _scores(policy: Policy) -> None:
    for part, view in _views(policy):
        tensors = {"query": view.query, "key": view.key, "value": view.value, **view.state}
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        scores = part.scores(view)
        assert scores.dtype == torch.float32, f"scores() gave {scores.dtype}, not torch.float32."
        shape = tuple(view.positions.shape)
        assert tuple(scores.shape) == shape, f"scores() gave {tuple(scores.shape)}, not {shape}."
        assert not scores[view.valid].isnan().any(), "scores() gave NaN for real rows."
        again = part.scores(view)
        assert torch.equal(scores[view.valid], again[view.valid]), "scores() changed when repeated."
        for name, tensor in tensors.items():
            assert torch.equal(tensor, before[name]), f"scores() changed view.{name} in place."


def _protection(policy: Policy) -> None:
    for part, view in _views(policy):
        rows = part.protected(view)
        if rows is None:
            continue
        assert rows.dtype == torch.bool, f"protected() gave {rows.dtype}, not torch.bool."
        most = int((rows & view.valid).expand_as(view.valid).sum(dim=-1).max())
        room = view.budget - 1 if part.keep_ratio is not None else None
        stated = part.protected_tokens(view.layer_idx, LAYERS) if room is None else room
        assert most <= stated, f"protected() names {most} rows, protected_tokens() allows {stated}."


def _any_order(policy: Policy) -> None:
    for part, view in _views(policy):
        if not part.any_order:
            continue
        rows = view.held
        turn = torch.randperm(rows - 1, generator=torch.Generator().manual_seed(1))
        turn = torch.cat([turn, torch.tensor([rows - 1])])  # the newest is always the last
        turned = dataclasses.replace(
            view,
            key=view.key[:, :, turn],
            value=view.value[:, :, turn],
            locate=functools.partial(torch.index_select, view.positions, -1, turn),
            find_newest=functools.partial(newest_of, turn.expand_as(view.positions)),
            state={name: state[..., turn] for name, state in view.state.items()},
        )
        plain, other = part.scores(view)[..., turn], part.scores(turned)
        same = torch.isclose(plain, other, rtol=1e-4, atol=1e-6) | ~view.valid[..., turn]
        assert same.all(), "any_order is declared, but scores() depends on the order of the rows."
        stays, its = part.protected(view), part.protected(turned)
        if stays is not None and its is not None:
            stays = stays.expand_as(view.valid)[..., turn]
            assert torch.equal(stays, its.expand_as(stays)), (
                "any_order is declared, but protected() depends on the order of the rows."
            )


def _heads_alone(policy: Policy) -> None:
    for part, view in _views(policy):
        if part.across_heads:
            continue
        group = HEADS // KV_HEADS
        for head in range(KV_HEADS):
            own = slice(head, head + 1)
            alone = dataclasses.replace(
                view,
                query=view.query[:, head * group : (head + 1) * group],
                key=view.key[:, own],
                value=view.value[:, own],
                kv_heads=1,
                locate=functools.partial(torch.narrow, view.positions, 1, head, 1),
                state={name: state[:, own] for name, state in view.state.items()},
            )
            same = torch.isclose(part.scores(view)[:, own], part.scores(alone), 1e-4, 1e-6)
            assert (same | ~alone.valid).all(), (
                f"head {head} gets other scores when it is alone: declare across_heads."
            )


def _kept(policy: Policy, tensors: dict[str, Any], mask: Tensor | None = None) -> list[Tensor]:
    return [
        kept_positions(policy, **tensors, attention_mask=mask, layer_idx=layer, num_layers=LAYERS)
        for layer in range(LAYERS)
    ]


def _padding(policy: Policy) -> None:
    if policy.part("prefill") is None:
        return
    tensors, pads = _tensors(policy), 9
    padded = {
        name: torch.cat([torch.full_like(tensor[:, :, :pads], 50.0), tensor], dim=2)
        for name, tensor in tensors.items()
    }
    mask = torch.ones(3, padded["key"].shape[2], dtype=torch.long)
    mask[:, :pads] = 0
    for plain, shifted in zip(_kept(policy, tensors), _kept(policy, padded, mask), strict=True):
        moved = torch.where(shifted < 0, shifted, shifted - pads)
        assert torch.equal(plain, moved[..., -plain.shape[-1] :]), (
            f"{pads} more tokens of padding at the left change which rows are kept."
        )


def _order(policy: Policy) -> None:
    if policy.part("prefill") is None:
        return
    tensors = _tensors(policy)
    order = torch.tensor([2, 0, 1])
    turned = {name: tensor[order] for name, tensor in tensors.items()}
    for plain, other in zip(_kept(policy, tensors), _kept(policy, turned), strict=True):
        assert torch.equal(plain[order], other), "the rows of a batch influence each other."


# Whole generations.


@functools.cache
def _model(attn: str) -> PreTrainedModel:
    return tiny_model("llama", attn=attn, num_hidden_layers=LAYERS)


_prompt = functools.partial(random_prompt, seed=3)


def _generate(model: PreTrainedModel, inputs: dict[str, Tensor], tokens: int, **more: Any) -> Any:
    options: dict[str, Any] = {
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    generate: Any = model.generate
    return generate(**inputs, max_new_tokens=tokens, **options | more)


def _batch(policy: Policy) -> dict[str, Tensor]:
    """A left-padded batch in which every row exceeds the budget, or one row for a ratio."""
    length = _length(policy)
    return _prompt(length) if _by_ratio(policy) else _prompt(length, length - 17, length - 30)


def _same(ours: Any, theirs: Any, what: str) -> None:
    for step, (a, b) in enumerate(zip(ours.logits, theirs.logits, strict=True)):
        worst = float((a - b).abs().max())
        assert worst < 1e-3, f"{what}: logits of generated token {step} differ by {worst:.2g}."
    assert torch.equal(ours.sequences, theirs.sequences), f"{what}: other tokens."


def _no_bit(policy: Policy) -> None:
    model = _model("sdpa")
    shortest = min(_budgets(policy, 8))
    inputs = _prompt(max(1, min(shortest, 8) - 3))
    tokens = 3 if min(shortest, 8) > 3 else 1
    with press(model, policy):
        ours = _generate(model, inputs, tokens)
    theirs = _generate(model, inputs, tokens)
    assert all(torch.equal(a, b) for a, b in zip(ours.logits, theirs.logits, strict=True)), (
        "a prompt that fits the budget changed the logits."
    )


def _first_token(policy: Policy) -> None:
    model, inputs = _model("sdpa"), _batch(policy)
    with press(model, policy):
        ours = _generate(model, inputs, 1)
    assert torch.equal(ours.logits[0], _generate(model, inputs, 1).logits[0]), (
        "the prompt was cut before all of it was attended to."
    )


def _bound(policy: Policy) -> None:
    model, inputs = _model("sdpa"), _batch(policy)
    length, tokens = inputs["input_ids"].shape[1], 24
    decode = policy.part("decode")
    with press(model, policy) as session:
        cache = _generate(model, inputs, 1)[cache_argument(model)]
        for step in range(tokens):
            held = [layer.held_tokens for layer in session.report().layers]
            for layer, rows in enumerate(held):
                prompt = min(policy.budget(length, layer, LAYERS), length)
                if isinstance(decode, DecodePolicy):
                    budget = decode.budget(length, layer, LAYERS) + decode.interval - 1
                    bound = budget + prompt if policy.spares_prompt else max(budget, prompt)
                    assert rows <= bound, (
                        f"layer {layer} holds {rows} rows after {step} tokens, at most {bound} "
                        "were stated."
                    )
                else:
                    assert rows == prompt + step, (
                        f"layer {layer} holds {rows} rows after {step} tokens, not the budget "
                        f"{prompt} and the tokens."
                    )
            batch = inputs["input_ids"].shape[0]
            mask = torch.cat(
                [inputs["attention_mask"], inputs["attention_mask"].new_ones(batch, step + 1)], 1
            )
            with torch.no_grad():
                model(
                    torch.full((batch, 1), 1 + step),
                    attention_mask=mask,
                    **{cache_argument(model): cache},
                )


def _oracle(policy: Policy, attn: str, tokens: int) -> None:
    model, inputs = _model(attn), _batch(policy)
    with press(model, policy) as session, record(session) as evictions:
        ours = _generate(model, inputs, tokens)
    with oracle(model, evictions):
        theirs = _generate(model, inputs, tokens)
    _same(ours, theirs, f"{attn} against the same model with the evicted rows masked out")


def _rows_alone(policy: Policy) -> None:
    model, inputs = _model("sdpa"), _batch(policy)
    length = inputs["input_ids"].shape[1]
    with press(model, policy):
        together = _generate(model, inputs, 16)
    for row, real in enumerate(inputs["attention_mask"].sum(dim=1).tolist()):
        alone = {name: tensor[row : row + 1, length - real :] for name, tensor in inputs.items()}
        with press(model, policy):
            single = _generate(model, alone, 16)
        assert torch.equal(single.sequences[0, real:], together.sequences[row, length:]), (
            f"row {row} of a left-padded batch gives other tokens than the row alone."
        )


def _backends(policy: Policy) -> None:
    inputs = _batch(policy)
    kept = []
    for attn in ("sdpa", "eager"):
        model = _model(attn)
        with press(model, policy):
            cache = _generate(model, inputs, 8)[cache_argument(model)]
        kept.append([layer.positions for layer in cache.layers])
    assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True)), (
        "sdpa and eager attention keep different rows."
    )


def _two_generates(policy: Policy) -> None:
    model, inputs = _model("sdpa"), _batch(policy)
    other = _prompt(_length(policy) + 11)
    with press(model, policy):
        first = _generate(model, inputs, 8)
        _generate(model, other, 8)
        again = _generate(model, inputs, 8)
    _same(first, again, "a second prompt in the same context")


def _chunks(policy: Policy) -> None:
    model, inputs = _model("sdpa"), _batch(policy)
    length = inputs["input_ids"].shape[1]
    kept = []
    for chunk in (None, 16, length - 1):
        with press(model, policy):
            cache = _generate(model, inputs, 2, prefill_chunk_size=chunk)[cache_argument(model)]
        kept.append([layer.positions for layer in cache.layers])
        assert all(torch.equal(a, b) for a, b in zip(kept[0], kept[-1], strict=True)), (
            f"a prompt in chunks of {chunk} keeps other rows than in one piece."
        )


def _beams(policy: Policy) -> None:
    """A beam's score must be that of its tokens when they are forced on a cache of their own."""
    model, inputs = _model("sdpa"), _prompt(_length(policy))
    length, tokens = inputs["input_ids"].shape[1], 10
    with press(model, policy):
        beams = _generate(
            model,
            inputs,
            tokens,
            num_beams=3,
            num_return_sequences=3,
            output_scores=True,
            length_penalty=0.0,
        )
    for sequence, score in zip(beams.sequences, beams.sequences_scores.tolist(), strict=True):
        with press(model, policy), torch.no_grad():
            output = model(inputs["input_ids"])
            cache = output[cache_argument(model)]
            total = 0.0
            for token in sequence[length:]:
                total += float(output.logits[0, -1].log_softmax(dim=-1)[token])
                output = model(token.view(1, 1), **{cache_argument(model): cache})
        assert abs(total - score) < 1e-2, (
            f"a beam scored {score:.4f}; the same tokens on a cache of their own give {total:.4f}."
        )


def _later_turn(policy: Policy) -> None:
    model, inputs = _model("sdpa"), _prompt(_length(policy))
    more = _prompt(19)["input_ids"]
    with press(model, policy) as session:
        first = _generate(model, inputs, 6)
        ids = torch.cat([first.sequences, more], dim=1)
        conversation = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        cache = first[cache_argument(model)]
        second = _generate(model, conversation, 6, **{cache_argument(model): cache})
        seen = session.report().layers[0].seen_tokens
    assert seen == second.sequences.shape[1] - 1, f"{seen} tokens seen after a second turn."
    state = state_of(cache)
    assert state is not None
    positions = [layer.positions for layer in cache.layers]
    ascending = all(bool((rows[..., 1:] > rows[..., :-1]).all()) for rows in positions)
    assert ascending, "rows are out of order after a second turn."


_CONTRACTS: dict[str, Callable[[Policy], None]] = {
    "string and dict forms read back": _forms,
    "a policy is a frozen value": _value,
    "scores are pure float32": _scores,
    "no more is protected than stated": _protection,
    "rows in any order are judged alike": _any_order,
    "heads are judged one by one": _heads_alone,
    "padding changes nothing": _padding,
    "rows of a batch do not meet": _order,
    "a prompt within the budget changes no bit": _no_bit,
    "the prompt is attended to as a whole": _first_token,
    "held rows keep to the bound": _bound,
    f"equals the evicted rows masked out, sdpa, {LONG} tokens": functools.partial(
        _oracle, attn="sdpa", tokens=LONG
    ),
    "equals the evicted rows masked out, eager": functools.partial(
        _oracle, attn="eager", tokens=24
    ),
    "sdpa and eager keep the same": _backends,
    "a padded row equals the row alone": _rows_alone,
    "generates in one context do not meet": _two_generates,
    "a prompt in chunks keeps the same": _chunks,
    "beams carry their rows": _beams,
    "a later turn goes on": _later_turn,
}
