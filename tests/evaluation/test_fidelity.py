"""Agreement with the uncompressed model, against a slow reference that takes another way."""

import json
import math

import pytest
import torch

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT, NEW = 70, 12


def compared(model, ids, policies, new_tokens=NEW):
    from kvcompress_eval.fidelity import fidelity

    from kvcompress import policy_from

    found = list(fidelity(model, ids, [policy_from(each) for each in policies], new_tokens))
    assert [str(policy) for policy, _ in found] == [str(policy_from(each)) for each in policies]
    return [each for _, each in found]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3"])
def test_a_cache_that_keeps_everything_is_the_uncompressed_one(make_model, prompt, family):
    model, ids = make_model(family), prompt(PROMPT)["input_ids"]
    policies = ["snapkv", "streaming_llm:capacity=200", "h2o:capacity=81", "knorm:capacity=81"]
    for found in compared(model, ids, policies):
        assert found.agrees == [True] * (NEW - 1)
        assert max(map(abs, found.divergence)) < 1e-6
        assert max(map(abs, found.more_loss)) < 1e-6
        assert found.held_tokens == PROMPT + NEW - 1
        assert found.continuation == model.generate(ids, max_new_tokens=NEW)[0, PROMPT:].tolist()


def forced(model, ids, tokens):
    """Raw logits of every step of a `generate` that is made to say `tokens`."""
    from transformers import LogitsProcessor

    class Force(LogitsProcessor):
        def __call__(self, input_ids, scores):
            wanted = torch.full_like(scores, -math.inf)
            wanted[:, tokens[input_ids.shape[1] - PROMPT]] = 0
            return wanted

    output = model.generate(
        ids,
        max_new_tokens=len(tokens),
        do_sample=False,
        logits_processor=[Force()],
        output_logits=True,
        return_dict_in_generate=True,
    )
    assert output.sequences[0, PROMPT:].tolist() == tokens
    return [step[0].tolist() for step in output.logits]


def log_probabilities(logits):
    most = max(logits)
    total = most + math.log(sum(math.exp(each - most) for each in logits))
    return [each - total for each in logits]


def slowly(model, ids, policy):
    """What each list should be: by `generate`, on an uncompressed cache with rows masked out."""
    from kvcompress import press
    from kvcompress.testing import oracle, record

    tokens = model.generate(ids, max_new_tokens=NEW, do_sample=False)[0, PROMPT:].tolist()
    full = forced(model, ids, tokens)
    with press(model, policy) as session, record(session) as evictions:
        forced(model, ids, tokens)
    assert evictions.evicted(0) > 0
    with oracle(model, evictions):
        masked = forced(model, ids, tokens)
    agrees, divergence, more_loss = [], [], []
    for token, ours, theirs in list(zip(tokens, masked, full, strict=True))[1:]:
        agrees.append(ours.index(max(ours)) == token)
        p, q = log_probabilities(theirs), log_probabilities(ours)
        divergence.append(sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True)))
        more_loss.append(p[token] - q[token])
    return tokens, agrees, divergence, more_loss, session.report()


def test_it_is_what_a_slow_reference_finds(make_model, prompt):
    model, ids = make_model(), prompt(PROMPT)["input_ids"]
    policies = [
        "snapkv:capacity=24:window_size=6",
        "streaming_llm:capacity=24",
        "h2o:capacity=24",
        "snapkv_decoding:capacity=24:window_size=6:interval=7",
        "pyramidkv:capacity=24:window_size=6",
        "snapkv:capacity=24:window_size=6+h2o:capacity=28",
    ]
    for policy, found in zip(policies, compared(model, ids, policies), strict=True):
        tokens, agrees, divergence, more_loss, report = slowly(model, ids, policy)
        assert found.continuation == tokens and found.agrees == agrees, policy
        assert found.divergence == pytest.approx(divergence, abs=1e-4), policy
        assert found.more_loss == pytest.approx(more_loss, abs=1e-4), policy
        assert max(divergence) > 1e-3, policy
        assert found.held_tokens == report.held_tokens / report.hosted_layers


def test_a_continuation_ends_at_an_end_token(make_model, prompt):
    model, ids = make_model(), prompt(PROMPT)["input_ids"]
    policy = "snapkv:capacity=24:window_size=6"
    (whole,) = compared(model, ids, [policy])
    tokens = whole.continuation
    last = next(place for place in range(3, NEW) if tokens[place] not in tokens[:place])
    try:
        model.generation_config.eos_token_id = [tokens[last], 100]
        (cut,) = compared(model, ids, [policy])
        model.generation_config.eos_token_id = tokens[0]
        (empty,) = compared(model, ids, [policy, "h2o:capacity=24"][:1])
    finally:
        model.generation_config.eos_token_id = None
    assert cut.continuation == tokens[: last + 1]
    assert cut.divergence == whole.divergence[:last] and cut.agrees == whole.agrees[:last]
    assert empty.continuation == tokens[:1] and empty.agrees == empty.divergence == []


def test_errors_come_from_resampling_prompts():
    from kvcompress_eval.fidelity import bootstrap

    values = [0.1, 0.4, 0.2, 0.9, 0.5, 0.3, 0.8, 0.6]
    found = bootstrap(values)
    mean = sum(values) / 8
    spread = (sum((value - mean) ** 2 for value in values) / 8) ** 0.5
    assert found.value == pytest.approx(mean)
    assert found.error == pytest.approx(spread / 8**0.5, rel=0.05)
    assert bootstrap(values) == found
    assert bootstrap([1.0, 1.0, 1.0]).error == 0
    assert math.isnan(bootstrap([0.5]).error)


def test_means_are_over_prompts_first():
    from kvcompress_eval.fidelity_command import Compared, summaries

    from kvcompress import EvaluationError

    def record(digest, policy, agrees):
        losses = [0.5] * len(agrees)
        return Compared("name", digest, 70, policy, "", [1], agrees, losses, losses, 40.0)

    records = [
        record("a", "snapkv", [True, False]),
        record("b", "snapkv", [True] * 8),
        record("c", "snapkv", []),
        record("a", "tova", [False, False]),
    ]
    first, second = summaries(records, ["snapkv", "tova"])
    assert (first.agreement.value, first.prompts) == (0.75, 2)
    assert (second.agreement.value, second.prompts) == (0.0, 1)
    with pytest.raises(EvaluationError, match="ends every continuation after its first token"):
        summaries(records[2:3], ["snapkv"])


def test_the_command(call, saved_model, tmp_path):
    out, texts = tmp_path / "fidelity", [tmp_path / "first.txt", tmp_path / "second.txt"]
    texts[0].write_text("Tea and coffee, cups and spoons. " * 5)
    texts[1].write_text("Ships sail where winds blow; harbours wait. " * 5)
    arguments = [
        "fidelity", *texts, "--model", saved_model, "--policy", "snapkv:window_size=8",
        "--policy", "h2o", "--policy", "tova:capacity=50", "--capacity", 40, "--capacity", 60,
        "--new-tokens", 9, "--device", "cpu", "--out", out,
    ]  # fmt: skip
    code, shown, err = call(*arguments)
    assert code == 0, err
    assert "16 tokens compared" in shown and "bootstrap over prompts" in shown
    lines = (out / "records.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert len(records) == 2 * 5
    assert {record["policy"]: record["held_tokens"] for record in records} == {
        "snapkv:capacity=40:window_size=8": 48,
        "snapkv:capacity=60:window_size=8": 68,
        "h2o:capacity=40": 40,
        "h2o:capacity=60": 60,
        "tova:capacity=50": 50,
    }
    for record in records:
        assert len(record["continuation"]) == 9 and len(record["text"]) > 0
        assert len(record["agrees"]) == len(record["divergence"]) == len(record["more_loss"]) == 8
        assert min(record["divergence"]) > -1e-9
    assert (out / "plot.png").read_bytes()[:4] == b"\x89PNG"
    table = (out / "table.md").read_text()
    assert table.count("\n| ") == 1 + 5 and "h2o:capacity=40 | 40.0 |" in table
    # It goes on where it stopped, also in the middle of a line, and repeats nothing.
    (out / "records.jsonl").write_text("\n".join(lines[:7]) + "\n" + lines[7][:30])
    code, _, err = call(*arguments)
    assert code == 0, err
    assert (out / "records.jsonl").read_text().splitlines() == lines
    assert (out / "table.md").read_text() == table
    # Another text is another prompt, whatever its file is called.
    texts[0].write_text("Tea and coffee, cups and plates. " * 5)
    code, _, err = call(*arguments)
    assert code == 0, err
    assert len((out / "records.jsonl").read_text().splitlines()) == len(lines) + 5
    code, _, err = call(*arguments, "--new-tokens", 8)
    assert code == 1 and "new_tokens was 9 and is now 8" in err and "another folder" in err


def test_prompts_that_are_none(call, saved_model, tmp_path):
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n")
    code, _, err = call("fidelity", empty, "--model", saved_model, "--out", tmp_path / "out")
    assert code == 1 and "empty.txt is empty" in err
    code, _, err = call("fidelity", tmp_path / "no.txt", "--out", tmp_path / "out")
    assert code == 1 and "no.txt cannot be read" in err
    code, _, err = call("fidelity", empty, "--policy", "h2o:capacity=9", "--capacity", 8)
    assert code == 1 and "has its own budget" in err
    assert not (tmp_path / "out").exists()


def test_the_needles_are_of_every_kind(saved_model):
    from kvcompress_eval.fidelity_command import _needles
    from transformers import AutoTokenizer

    prompts = _needles(AutoTokenizer.from_pretrained(saved_model))
    assert [each.name for each in prompts] == [
        "needle: number",
        "needle: sentence",
        "needle: key",
        "needle: lines",
    ]
    assert len({each.digest for each in prompts}) == 4
    assert all(800 < len(each.input_ids) < 1600 for each in prompts)
