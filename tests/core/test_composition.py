"""Two policies on one cache: which pairs go together, and what each of them evicts."""

import pytest
import torch

PREFILL = "snapkv:capacity=20:window_size=6"


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("snapkv+snapkv", ["snapkv+snapkv", "evicts at prefill only", "decode policy"]),
        ("h2o+h2o", ["h2o+h2o", "both keep a record"]),
        (
            "streaming_llm:positions=cache+tova",
            ["streaming_llm+tova", "moves keys", "original positions"],
        ),
        ("snapkv+streaming_llm:positions=cache", ["snapkv+streaming_llm", "moves keys"]),
        ("snapkv:later_turns=append+tova", ["snapkv+tova", "append", "scope='generated'"]),
        ("snapkv:later_turns=keep+tova", ["snapkv+tova", "'keep'", "scope='generated'"]),
        ("snapkv:keep_ratio=0.5+tova", ["snapkv+tova", "one is a capacity and the other a ratio"]),
        ("snapkv+tova:scope=some", ["scope='some'", "'all' or 'generated'"]),
        ("snapkv+", ["No policy named ''"]),
        ({"policy": "composed", "prefill": "snapkv"}, ["decode", "required"]),
        (
            {"policy": "composed", "prefill": "snapkv", "decode": "tova", "capacity": 5},
            ["capacity cannot be set on a composition"],
        ),
    ],
    ids=str,
)
def test_pairs_that_do_not_go_together(spec, parts):
    from kvcompress import KVCompressError, policy_from

    with pytest.raises(KVCompressError) as caught:
        policy_from(spec)
    for part in parts:
        assert part in str(caught.value)


def test_a_composition_is_no_part_of_another():
    from kvcompress import ComposedPolicy, PolicyConfigError, SnapKVPolicy, policy_from

    inner = policy_from("snapkv+tova")
    with pytest.raises(PolicyConfigError, match="cannot be part of another"):
        ComposedPolicy(prefill=SnapKVPolicy(), decode=inner)


def test_a_field_named_scope_would_be_read_as_the_compositions():
    from typing import ClassVar

    from kvcompress import ComposedPolicy, DecodePolicy, PolicyConfigError, SnapKVPolicy

    class ScopedPolicy(DecodePolicy):
        name: ClassVar[str] = "scoped"
        scope: int = 1

    with pytest.raises(PolicyConfigError, match="field named scope"):
        ComposedPolicy(prefill=SnapKVPolicy(), decode=ScopedPolicy())


@pytest.mark.parametrize(
    "spec",
    [
        f"{PREFILL}+tova:capacity=19",
        "snapkv:capacity=20/30/20:window_size=6+tova:capacity=25",
        "pyramidkv:capacity=20:window_size=6+tova:capacity=20",
        "snapkv:keep_ratio=0.5:window_size=6+tova:keep_ratio=0.4",
    ],
)
def test_a_decode_budget_below_the_prefill_budget_is_refused_before_anything_runs(make_model, spec):
    from kvcompress import CompressedCache, PolicyConfigError, press

    for host in (press, CompressedCache):
        with pytest.raises(PolicyConfigError, match="below the prefill policy's"):
            host(make_model(), spec)


def held(model, spec, inputs, tokens):
    from kvcompress import press

    with press(model, spec) as session:
        output = model.generate(
            **inputs, max_new_tokens=tokens, do_sample=False, return_dict_in_generate=True
        )
    return [total for _, total in session.report().history], output.past_key_values


def test_scope_all_bounds_everything_and_the_history_shows_it(make_model, prompt):
    history, cache = held(make_model(), f"{PREFILL}+tova:capacity=24", prompt(60), 12)
    assert history == [3 * rows for rows in (20, 21, 22, 23, *[24] * 8)]
    # Rows of the prompt have gone for generated ones.
    assert any((layer.positions < 60).sum(dim=-1).min() < 20 for layer in cache.layers)


def test_scope_generated_keeps_what_was_kept_of_the_prompt(make_model, prompt):
    from kvcompress import press

    model, inputs = make_model(), prompt(60)
    with press(model, PREFILL):
        kept = model.generate(**inputs, max_new_tokens=1, return_dict_in_generate=True)
    spec = f"{PREFILL}+tova:capacity=4:scope=generated:interval=2"
    history, cache = held(model, spec, inputs, 12)
    assert history == [3 * (20 + rows) for rows in (0, 1, 2, 3, 4, 5, 4, 5, 4, 5, 4, 5)]
    for ours, prefill in zip(cache.layers, kept.past_key_values.layers, strict=True):
        assert torch.equal(ours.positions[..., :20], prefill.positions)
        assert (ours.positions[..., 20:] >= 60).all()


def test_a_later_turn_cuts_everything_by_the_prefill_policy(make_model, prompt):
    from kvcompress import press

    model, inputs = make_model(), prompt(60)
    spec = f"{PREFILL}+h2o:capacity=4:scope=generated"
    with press(model, spec) as session:
        first = model.generate(
            **inputs, max_new_tokens=8, do_sample=False, return_dict_in_generate=True
        )
        ids = torch.cat([first.sequences, prompt(15)["input_ids"]], dim=1)
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=first.past_key_values,
            max_new_tokens=8,
            do_sample=False,
        )
    rows = [total // 3 for _, total in session.report().history]
    assert rows[:8] == [20, 21, 22, 23, 24, 24, 24, 24]
    assert rows[8:] == [20, 21, 22, 23, 24, 24, 24, 24]


def test_short_padded_rows_under_scope_generated_are_refused_before_a_token(make_model, prompt):
    from kvcompress import UnsupportedModeError, press

    model = make_model()
    spec = f"{PREFILL}+tova:capacity=4:scope=generated"
    with press(model, spec), pytest.raises(UnsupportedModeError, match="scope=generated"):
        model.generate(**prompt(60, 10), max_new_tokens=1)


def test_h2o_that_judges_generated_rows_only_does_not_watch_the_prompt(
    make_model, prompt, monkeypatch
):
    """Its pass over a long prompt would cost as much as attention itself."""
    from kvcompress import H2OPolicy

    seen = []
    original = H2OPolicy.observe
    monkeypatch.setattr(
        H2OPolicy, "observe", lambda self, view: seen.append(view.phase) or original(self, view)
    )
    model, inputs = make_model(), prompt(60)
    held(model, f"{PREFILL}+h2o:capacity=4:scope=generated", inputs, 4)
    assert seen == ["decode"] * 9
    seen.clear()
    held(model, f"{PREFILL}+h2o:capacity=24", inputs, 4)
    assert seen == ["prefill"] * 3 + ["decode"] * 9


def test_copy_replaces_a_part():
    from kvcompress import TOVAPolicy, policy_from

    policy = policy_from(f"{PREFILL}+tova:capacity=24")
    other = policy.model_copy(update={"decode": TOVAPolicy(capacity=30)})
    assert str(other) == f"{PREFILL}+tova:capacity=30"


def test_a_name_is_reserved(monkeypatch):
    from typing import ClassVar

    from kvcompress import Policy
    from kvcompress.plugins import _is_policy

    class OwnPolicy(Policy):
        name: ClassVar[str] = "own"

    assert _is_policy(OwnPolicy)
    for name in ("composed", "a+b", "a:b", ""):
        monkeypatch.setattr(OwnPolicy, "name", name)
        assert not _is_policy(OwnPolicy)
