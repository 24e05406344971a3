"""Needles of all kinds, one prefill for many policies, and the grid command."""

import copy
import json

import pytest
import torch

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def tokenizer(saved_model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(saved_model)


@pytest.mark.parametrize("kind", ["number", "sentence", "key", "lines"])
def test_a_needle_of_every_kind(tokenizer, kind):
    from kvcompress_eval.needle import Kind, make_needle

    firsts = []
    for depth in (0.0, 0.5, 1.0):
        made = make_needle(tokenizer, 3000, depth, 3, Kind(kind))
        text = tokenizer.decode(made.input_ids)
        span = tokenizer.decode(made.input_ids[made.first : made.last + 1])
        assert span.startswith(made.parts[0]) and span.endswith(made.parts[-1])
        assert made.is_answered_by(f"{made.answer}.") and not made.is_answered_by(text[-60:])
        assert not made.is_answered_by(made.answer + "1")
        assert 0 < len(made.input_ids) - 3000 < 1000
        firsts.append(made.first)
    assert firsts == sorted(set(firsts))
    assert make_needle(tokenizer, 900, 0.5, 3, Kind(kind)) == make_needle(
        tokenizer, 900, 0.5, 3, Kind(kind)
    )
    assert made.parts != make_needle(tokenizer, 900, 1.0, 5, Kind(kind)).parts


def test_a_tokenizer_without_a_chat_template_adds_its_special_tokens(tokenizer):
    import copy

    from kvcompress_eval.needle import make_needle
    from kvcompress_eval.observe import _prompt
    from tokenizers.processors import TemplateProcessing

    plain = copy.deepcopy(tokenizer)
    plain.chat_template = None
    begun = copy.deepcopy(plain)
    first = begun.eos_token_id
    begun.backend_tokenizer.post_processor = TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", first)]
    )
    made, expected = (make_needle(each, 900, 0.5, 3) for each in (begun, plain))
    assert made.input_ids == [first, *expected.input_ids]
    assert (made.first, made.last) == (expected.first + 1, expected.last + 1)
    ids, place = _prompt(begun, "tea", "Why?", first=False)
    assert (ids[0], begun.decode(ids[place])) == (first, "tea")
    begun.chat_template = tokenizer.chat_template
    assert make_needle(begun, 900, 0.5, 3) == make_needle(tokenizer, 900, 0.5, 3)


def test_the_others_are_told_apart_by_their_names_only(tokenizer):
    from kvcompress_eval.needle import Kind, make_needle

    text = tokenizer.decode(make_needle(tokenizer, 3000, 0.5, 1, Kind.key).input_ids)
    assert text.count(" The code of the ") == 9


POLICIES = [
    "snapkv:capacity=24:window_size=6",
    "snapkv:capacity=32:window_size=8:kernel_size=3:pooling=max",
    "snapkv:keep_ratio=0.5:window_size=6",
    "pyramidkv:capacity=24:window_size=6",
    "streaming_llm:capacity=24",
    "streaming_llm:capacity=24:positions=cache",
    "tova:capacity=24",
    "knorm:capacity=24",
    "snapkv_decoding:capacity=24:window_size=6",
    "snapkv:capacity=24:window_size=6+tova:capacity=26",
    "snapkv:capacity=200",
]


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "gemma3_text"])
def test_one_prefill_gives_what_each_policy_gives_alone(make_model, prompt, family):
    from kvcompress_eval.one_prefill import OnePrefill

    from kvcompress import policy_from, press

    model, ids = make_model(family), prompt(70)["input_ids"]
    policies = [None, *map(policy_from, POLICIES)]
    if family == "deepseek_v3":
        policies = [each for each in policies if each is None or "cache" not in str(each)]
    prefill = OnePrefill(model, ids, policies)
    expected = model.generate(ids, max_new_tokens=9, do_sample=False)[0, 70:].tolist()
    for count in (None, 3):  # none of them changes what the others find
        for policy in policies[:count]:
            tokens, cache = prefill.answer(policy, 9)
            if policy is None:
                assert tokens == expected
                continue
            with press(model, policy) as session:
                alone = model.generate(ids, max_new_tokens=9, do_sample=False)
                again = session.report()
            assert tokens == alone[0, 70:].tolist()
            held = [layer.held_tokens for layer in cache.report().layers]
            assert held == [layer.held_tokens for layer in again.layers]


def test_the_whole_cache_stays_whole_however_long_the_prompt(make_model, prompt, monkeypatch):
    from kvcompress_eval.one_prefill import OnePrefill

    from kvcompress import Policy

    monkeypatch.setattr(Policy, "default_capacity", 24)
    tokens, cache = OnePrefill(make_model(), prompt(70)["input_ids"], [None]).answer(None, 4)
    assert len(tokens) == 4
    assert [layer.held_tokens for layer in cache.report().layers] == [73] * 3


def test_a_prefill_serves_whom_it_was_made_for(make_model, prompt):
    from kvcompress_eval.one_prefill import OnePrefill

    from kvcompress import PressStateError, policy_from

    model, ids = make_model(), prompt(70)["input_ids"]
    small, large, record = map(
        policy_from,
        ("snapkv:capacity=24:window_size=6", "snapkv:capacity=24:window_size=7", "h2o:capacity=24"),
    )
    prefill = OnePrefill(model, ids, [small])
    whole = copy.deepcopy(prefill.cache(None).layers[0].keys)
    for policy in (large, record):
        with pytest.raises(PressStateError, match="needs queries of the prompt"):
            prefill.cache(policy)
    assert not OnePrefill.serves(record) and OnePrefill.serves(None)
    prefill.answer(small, 4)
    assert torch.equal(prefill.cache(None).layers[0].keys, whole)


def test_the_grid(call, saved_model, tmp_path):
    out = tmp_path / "grid"
    arguments = [
        "needle", "--model", saved_model, "--policy", "snapkv:window_size=8", "--policy", "h2o",
        "--capacity", 40, "--tokens", 150, "--tokens", 200, "--depths", 2, "--seeds", 1,
        "--prefill-chunk-size", 64, "--lookahead", 0, "--spare", 8, "--device", "cpu", "--out", out,
    ]  # fmt: skip
    code, _, err = call(*arguments)
    assert code == 0, err
    lines = (out / "records.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert len(records) == 2 * 2 * 5
    assert {record["setting"] for record in records} == {
        "none",
        "snapkv:capacity=40:window_size=8",
        "h2o:capacity=40",
        "snapkv:capacity=40:window_size=8, chunks of 64, look-ahead 0, spare 8",
        "h2o:capacity=40, chunks of 64, look-ahead 0, spare 8",
    }
    for record in records:
        if record["setting"] == "none":
            assert record["held_tokens"] > record["prompt_tokens"] > 150
        else:
            assert record["held_tokens"] <= 40 + 24
    assert (out / "plot.png").read_bytes()[:4] == b"\x89PNG"
    assert (out / "table.md").read_text().count("\n") == 2 + 2 * 5
    # It goes on where it stopped, also in the middle of a line.
    (out / "records.jsonl").write_text("\n".join(lines[:7]) + "\n" + lines[7][:30])
    code, _, err = call(*arguments)
    assert code == 0, err
    assert (out / "records.jsonl").read_text().splitlines() == lines
    code, _, err = call(*arguments, "--dtype", "bfloat16")
    assert code == 1 and "dtype was 'torch.float32'" in err and "another folder" in err
    code, _, err = call("needle", "--lookahead", 4, "--out", tmp_path / "other")
    assert code == 1 and "--prefill-chunk-size" in err
    code, _, err = call("needle", "--spare", 4, "--out", tmp_path / "other")
    assert code == 1 and "--spare is for --prefill-chunk-size" in err


def test_shares_are_compared_on_the_same_prompts():
    from kvcompress_eval.needle_grid import Found, shares

    def records(setting, found):
        return [
            Found("number", 100, depth, 0, setting, 110, 50, "", each)
            for depth, each in enumerate(found)
        ]

    plain = records("none", [True, True, True, False])
    ours = records("snapkv", [True, False, False, False])
    first, second = shares(plain + ours)
    assert (first.value, first.difference, first.prompts) == (0.75, 0.0, 4)
    assert second.value == 0.25 and second.difference == -0.5
    assert first.error == pytest.approx(0.25) and second.difference_error == pytest.approx(
        (1 / 3) ** 0.5 / 2
    )
