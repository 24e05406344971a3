"""Contracts 1, 4 and 6: whatever way a model generates, it equals the oracle."""

import pytest
import torch

FAMILIES = ["llama", "mistral", "mixtral", "phi3", "qwen3"]
POLICY = "snapkv:capacity=24:window_size=6"


def run(model, inputs, **options):
    options = {"max_new_tokens": 12, "do_sample": False, **options}
    torch.manual_seed(5)
    return model.generate(**inputs, **options, return_dict_in_generate=True, output_logits=True)


def assert_equal(ours, theirs, tolerance=1e-4):
    assert torch.equal(ours.sequences, theirs.sequences)
    worst = max((a - b).abs().max().item() for a, b in zip(ours.logits, theirs.logits, strict=True))
    assert worst < tolerance, worst


def against_oracle(model, policy, inputs, **options):
    from kvcompress import press
    from kvcompress.testing import oracle, record

    with press(model, policy) as session, record(session) as evictions:
        ours = run(model, inputs, **options)
    assert evictions.evicted(0) > 0
    with oracle(model, evictions):
        theirs = run(model, inputs, **options)
    assert_equal(ours, theirs)
    return ours, session


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", [(70,), (70, 41, 18)], ids=["single", "padded"])
def test_greedy(make_model, prompt, family, attn, lengths):
    model = make_model(family, attn)
    _, session = against_oracle(model, POLICY, prompt(*lengths))
    report = session.report()
    assert {layer.held_tokens for layer in report.layers} == {24 + 11}
    assert {layer.seen_tokens for layer in report.layers} == {70 + 11}


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2, "do_sample": True},
        {"do_sample": True, "num_return_sequences": 3},
        {"prefill_chunk_size": 16},
        {"prefill_chunk_size": 23},
    ],
    ids=["beams", "beam-sampling", "sampling", "chunks", "chunks-last-of-one"],
)
@pytest.mark.parametrize("lengths", [(70,), (70, 41, 18)], ids=["single", "padded"])
def test_modes(make_model, prompt, options, lengths):
    against_oracle(make_model(), POLICY, prompt(*lengths), **options)


@pytest.mark.parametrize(
    "policy",
    [
        "snapkv:capacity=24/40/70:window_size=6",
        "snapkv:keep_ratio=0.4:window_size=6",
        "snapkv:capacity=24:window_size=6:pooling=max:kernel_size=7:group_reduce=max",
        "snapkv:capacity=2:window_size=1:pooling=none",
    ],
)
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_policies(make_model, prompt, policy, attn):
    against_oracle(make_model("llama", attn), policy, prompt(71))
    if "ratio" not in policy:
        against_oracle(make_model("llama", attn), policy, prompt(71, 30, 9))


def test_drafts_and_prompt_lookup_equal_greedy(make_model, prompt):
    from kvcompress import press

    model, inputs = make_model(), prompt(70)
    draft = make_model(seed=7, num_hidden_layers=1)
    end = {"eos_token_id": 100}  # prompt lookup in older transformers needs one
    with press(model, POLICY):
        greedy = run(model, inputs, **end)
        lookup = run(model, inputs, **end, prompt_lookup_num_tokens=3)
        assisted = run(model, inputs, **end, assistant_model=draft)
    plain = run(model, inputs, **end)
    assert torch.equal(lookup.sequences, greedy.sequences)
    assert torch.equal(assisted.sequences, greedy.sequences)
    assert not torch.equal(plain.sequences, greedy.sequences)


def test_chunked_prefill_keeps_the_same_rows(make_model, prompt):
    from kvcompress import press

    model, inputs = make_model(), prompt(70, 33)
    kept = []
    for chunk in (None, 7, 16, 23, 69):
        with press(model, POLICY):
            output = run(model, inputs, prefill_chunk_size=chunk)
        kept.append([layer.positions for layer in output.past_key_values.layers])
    for other in kept[1:]:
        assert all(torch.equal(a, b) for a, b in zip(kept[0], other, strict=True))
