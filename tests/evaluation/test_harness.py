"""lm_eval's model on a compressed cache: what it answers and scores, refuses and reports."""

import json
import random
import re

import pytest
import torch

pytest.importorskip("lm_eval")

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs"]
CHOICES = [" fox", " the lazy dog", " a"]
SNAPKV = {"capacity": 64, "window_size": 8}
POLICIES = {
    "snapkv": SNAPKV,
    "layer budgets": {"policy": "pyramidkv", "capacity": 64, "window_size": 8},
    "ratio": {"keep_ratio": 0.4, "window_size": 8},
    "state": {"policy": "h2o", "capacity": 64},
    "interval": {"policy": "streaming_llm:capacity=64:interval=5"},
    "composed": {"policy": "snapkv:capacity=64:window_size=8+tova:capacity=70"},
    "generated": {"policy": "snapkv:capacity=64:window_size=8+h2o:capacity=4:scope=generated"},
}


def text(words, seed=0):
    chosen = random.Random(seed)
    return " ".join(chosen.choice(WORDS) for _ in range(words))


@pytest.fixture(scope="module", autouse=True)
def quiet():
    """Other people's warnings; what tests here look for are errors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("one_thread"),
]


@pytest.fixture(scope="module")
def make_lm(saved_model):
    def make(kind="ours", **arguments):
        from kvcompress_eval.harness import SnapKVLM
        from lm_eval.models.huggingface import HFLM

        known = {"ours": SnapKVLM, "theirs": HFLM}
        fixed = {"pretrained": str(saved_model), "device": "cpu", "dtype": "float32"}
        return known[kind](**fixed | arguments)

    return make


def questions(prompts, until=("\n\n",), tokens=8, docs=None):
    """Requests for answers; every prompt is a document of its own."""
    from lm_eval.api.instance import Instance

    asked = {"until": list(until), "max_gen_toks": tokens}
    return [
        Instance("generate_until", docs[n] if docs else {}, (prompt, asked), 0, ("tried", n, 1))
        for n, prompt in enumerate(prompts)
    ]


def choices(prompts, continuations=CHOICES, docs=None):
    from lm_eval.api.instance import Instance

    return [
        Instance(
            "loglikelihood", docs[n] if docs else {}, (prompt, ending), number, ("tried", n, 1)
        )
        for n, prompt in enumerate(prompts)
        for number, ending in enumerate(continuations)
    ]


def near(score):
    """A sum over tokens, to 1e-5 and what float32 leaves of it."""
    return pytest.approx(score, abs=1e-5, rel=1e-6)


def stats(lm):
    return lm.get_model_info()["kvcompress"]["tasks"]["tried"]


PROMPTS = [text(40, 1), text(25, 2), text(60, 3), text(5, 4)]


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("policy", ["snapkv", "h2o", "none"])
def test_capacity_above_the_prompt_gives_what_hf_gives(make_lm, policy, batch_size):
    theirs = make_lm("theirs", batch_size=batch_size)
    fields = {} if policy == "none" else {"capacity": 1000}
    ours = make_lm(policy=policy, batch_size=batch_size, **fields)
    assert ours.generate_until(questions(PROMPTS)) == theirs.generate_until(questions(PROMPTS))
    scores = ours.loglikelihood(choices(PROMPTS))
    for (mine, greedy), (stock, as_greedy) in zip(
        scores, theirs.loglikelihood(choices(PROMPTS)), strict=True
    ):
        assert mine == near(stock) and greedy is as_greedy
    assert stats(ours)["never_compressed"] == stats(ours)["requests"] == 4 + 4 * len(CHOICES)
    assert stats(ours)["kept_ratio"] == {"mean": 1, "min": 1, "max": 1}


@pytest.mark.parametrize("fields", POLICIES.values(), ids=POLICIES)
def test_batch_sizes_give_the_same(make_lm, fields):
    given, sums = [], []
    for batch_size in (1, 4, "auto"):
        lm = make_lm(batch_size=batch_size, **fields)
        answers = lm.generate_until(questions(PROMPTS, tokens=12))
        scores = lm.loglikelihood(choices(PROMPTS))
        held = stats(lm)
        given.append((answers, [greedy for _, greedy in scores], held))
        sums.append(torch.tensor([score for score, _ in scores]))
        assert (sums[-1] - sums[0]).abs().max() < 1e-4
    alone, together, auto = given
    assert alone[:2] == together[:2] == auto[:2]
    assert together[2]["held_tokens"] == pytest.approx(alone[2]["held_tokens"])
    assert 0 < together[2]["never_compressed"] < together[2]["requests"] or "keep_ratio" in fields


@pytest.mark.parametrize("fields", POLICIES.values(), ids=POLICIES)
def test_scores_are_those_of_the_oracle(make_lm, fields):
    from kvcompress import press
    from kvcompress.testing import oracle, record

    lm, plain = make_lm(**fields), make_lm(policy="none")
    evicts_later = lm.policy.part("decode") is not None
    prompt, ending = text(50, 7), " a dog runs"
    [[score, _]] = lm.loglikelihood(choices([prompt], [ending]))
    [[uncompressed, _]] = plain.loglikelihood(choices([prompt], [ending]))
    assert abs(score - uncompressed) > 1e-3
    context, continuation = lm._encode_pair(prompt, ending)
    ids = torch.tensor([context + continuation[:-1]])
    pieces = [len(context) - 1, *[1] * len(continuation)]
    if not evicts_later:
        pieces = [len(context) - 1, len(continuation)]
    with press(lm.model, lm.policy) as session, record(session) as evictions, torch.no_grad():
        cache = None
        for piece in ids.split(pieces, dim=1):
            given = {} if cache is None else {lm._cache_name: cache}
            cache = lm.model(piece, use_cache=True, **given)[lm._cache_name]
    with oracle(lm.model, evictions), torch.no_grad():
        logits = lm.model(ids).logits[0, -len(continuation) :]
    chances = logits.log_softmax(dim=-1).gather(1, torch.tensor(continuation)[:, None])
    assert score == pytest.approx(float(chances.sum()), abs=1e-4)


def test_a_context_is_compressed_once_for_its_choices(make_lm, monkeypatch):
    from kvcompress_eval import harness

    from kvcompress import CompressedCache

    made = []

    def count(*arguments, **named):
        made.append(CompressedCache(*arguments, **named))
        return made[-1]

    monkeypatch.setattr(harness, "CompressedCache", count)
    lm = make_lm(**SNAPKV, batch_size=2)
    lm.loglikelihood(choices(PROMPTS[:3]))
    assert len(made) == 2  # of three contexts, two at a time


def test_stop_strings_and_thoughts_are_cut_as_hf_cuts_them(make_lm):
    [whole] = make_lm("theirs").generate_until(questions(PROMPTS[:1], tokens=24))
    stop, thought = whole[14:16], whole[3:5]
    for arguments in ({}, {"think_end_token": thought}):
        asked = questions(PROMPTS[:1], until=[stop], tokens=24)
        wanted = make_lm("theirs", **arguments).generate_until(asked)
        assert make_lm(capacity=1000, **arguments).generate_until(asked) == wanted
        assert wanted != [whole]


def test_a_prompt_of_one_token_can_be_scored(make_lm):
    lm, plain = make_lm(**SNAPKV), make_lm("theirs")
    asked = choices(["", "a"])
    assert lm.loglikelihood(asked) == plain.loglikelihood(asked)


# Prompts that are too long.


@pytest.mark.parametrize("truncate", ["left", "middle"])
def test_long_prompts_are_cut_where_asked(make_lm, truncate):
    lm = make_lm(**SNAPKV, truncate=truncate, max_length=128, batch_size=2)
    short, long = text(8, 1), text(60, 2)
    ids, mask = lm.tok_batch_encode([short, long], left_truncate_len=100)
    whole = lm.tok_encode(long)
    kept = whole[-100:] if truncate == "left" else whole[:50] + whole[-50:]
    assert ids[1].tolist() == kept and mask[1].all()
    assert ids[0][mask[0].bool()].tolist() == lm.tok_encode(short)
    lm.generate_until(questions([short, long]))
    assert stats(lm)["truncated"] == 1 and stats(lm)["prompt_tokens"]["max"] == 120
    lm.loglikelihood(choices([long], [" fox"]))
    assert stats(lm)["truncated"] == 2


def test_left_is_what_hf_does(make_lm):
    ours, theirs = (make_lm(kind, batch_size=2, max_length=128) for kind in ("ours", "theirs"))
    prompts = [text(8, 1), text(60, 2)]
    for mine, stock in zip(
        ours.tok_batch_encode(prompts, left_truncate_len=100),
        theirs.tok_batch_encode(prompts, left_truncate_len=100),
        strict=True,
    ):
        assert torch.equal(mine, stock)
    wanted = [(near(score), greedy) for score, greedy in theirs.loglikelihood(choices(prompts))]
    assert ours.loglikelihood(choices(prompts)) == wanted


@pytest.mark.parametrize("fields", POLICIES.values(), ids=POLICIES)
def test_prompts_are_read_in_chunks(make_lm, fields):
    from kvcompress import press

    if "keep_ratio" in fields:
        pytest.skip("a share of the prompt bounds nothing")
    given = []
    for batch_size in (1, 4):
        lm = make_lm(**fields, prefill_chunk_size=48, batch_size=batch_size)
        answers = lm.generate_until(questions(PROMPTS, tokens=12))
        scores = lm.loglikelihood(choices(PROMPTS))
        given.append((answers, [score for score, _ in scores]))
    assert given[0][0] == given[1][0]
    assert given[0][1] == pytest.approx(given[1][1], abs=1e-4)
    ids = torch.tensor([lm.tok_encode(PROMPTS[2])])
    lm = make_lm(**fields, prefill_chunk_size=48, spare=3)
    given[0] = lm.generate_until(questions(PROMPTS, tokens=12)), given[0][1]
    with press(lm.model, lm.policy) as session:
        cache = session.prefill(ids, chunk_size=48, spare=3)
        output = lm.model.generate(
            ids, **{lm._cache_name: cache}, max_new_tokens=12, do_sample=False
        )
    assert lm.tok_decode(output[0, ids.shape[1] :]).startswith(given[0][0][2])
    at_once = make_lm(**fields).loglikelihood(choices(PROMPTS))
    assert [score for score, _ in at_once] != given[0][1]


def test_chunks_of_a_capacity_that_is_not_reached_give_what_hf_gives(make_lm):
    theirs = make_lm("theirs")
    for compress in ("prompt", "context"):
        docs = [{"context": prompt[:-9]} for prompt in PROMPTS]
        lm = make_lm(capacity=1000, prefill_chunk_size=32, compress=compress, batch_size=2)
        assert lm.generate_until(questions(PROMPTS, docs=docs)) == theirs.generate_until(
            questions(PROMPTS)
        )
        for (mine, _), (stock, _) in zip(
            lm.loglikelihood(choices(PROMPTS, docs=docs)),
            theirs.loglikelihood(choices(PROMPTS)),
            strict=True,
        ):
            assert mine == near(stock)
    report = lm.get_model_info()["kvcompress"]
    assert report["prefill_chunk_size"] == 32 and report["lookahead"] is None


# A context that is compressed before its question is seen.


@pytest.mark.parametrize("fields", POLICIES.values(), ids=POLICIES)
def test_context_is_compressed_before_the_question_is_seen(make_lm, fields):
    from kvcompress import CompressedCache

    context = text(40, 5)
    prompts = [f"Read this. {context}\nQuestion: {question}?" for question in ("who", "where to")]
    docs = [{"context": context}] * 2
    lm = make_lm(**fields, compress="context", batch_size=2)
    answers = lm.generate_until(questions(prompts, docs=docs))
    scores = lm.loglikelihood(choices(prompts, docs=docs))
    applied = lm.get_model_info()["kvcompress"]["policy_fields"]
    assert applied["later_turns"] == "keep" or lm._evicts_later
    first = len(lm.tok_encode(f"Read this. {context}"))
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([lm.tok_encode(prompt)])
        cache = CompressedCache(lm.model, lm._policy_for_context, prompt_length=first)
        with torch.no_grad():
            lm.model(ids[:, :first], **{lm._cache_name: cache})
        assert cache.layers[0].positions.shape[-1] < first
        output = lm.model.generate(
            ids, **{lm._cache_name: cache}, max_new_tokens=8, do_sample=False
        )
        assert lm.tok_decode(output[0, ids.shape[1] :]).startswith(answer)
    policy = lm._policy_for_context
    for prompt, given in zip(prompts, [scores[:3], scores[3:]], strict=True):
        for ending, (score, _) in zip(CHOICES, given, strict=True):
            tokens, continuation = lm._encode_pair(prompt, ending)
            cache = CompressedCache(lm.model, policy, prompt_length=first)
            pieces, logits = [tokens[:first], tokens[first:], *([t] for t in continuation)], []
            with torch.no_grad():
                for piece in pieces[:-1]:
                    output = lm.model(torch.tensor([piece]), **{lm._cache_name: cache})
                    logits.append(output.logits[0, -1])
            chances = torch.stack(logits[1:]).log_softmax(dim=-1)
            own = chances.gather(1, torch.tensor(continuation)[:, None]).sum()
            assert score == pytest.approx(float(own), abs=1e-4)
    later = make_lm(**fields, batch_size=2)
    assert scores != later.loglikelihood(choices(prompts, docs=docs))
    alone = make_lm(**fields, compress="context", batch_size=1)
    assert alone.generate_until(questions(prompts, docs=docs)) == answers
    assert alone.loglikelihood(choices(prompts, docs=docs)) == [
        (pytest.approx(score, abs=1e-4), greedy) for score, greedy in scores
    ]


def test_a_question_is_kept_whole_after_its_context(make_lm):
    context, question = text(40, 5), text(20, 6)
    lm = make_lm(**SNAPKV, compress="context")
    lm.generate_until(questions([f"{context} {question}"], docs=[{"context": context}]))
    after = len(lm.tok_encode(f"{context} {question}")) - len(lm.tok_encode(context))
    assert stats(lm)["held_tokens"]["mean"] == 64 + after + 7


def test_a_context_as_long_as_the_prompt_allows_is_followed_by_its_last_token(make_lm):
    for truncate in ("left", "middle"):
        lm = make_lm(**SNAPKV, compress="context", truncate=truncate, max_length=128)
        context = text(60, 5)
        request = questions([f"{context}{'?' * 30}"], docs=[{"context": context}])
        lm._note(request, lambda request: request.args[0])
        lm.tok_batch_encode([request[0].args[0]], left_truncate_len=60)
        assert [len(prompt.ids) for prompt in lm._prompts] == [60]
        assert lm._prompts[0].context == 30


@pytest.mark.parametrize("doc", [{}, {"context": "elsewhere"}, {"context": 3}, {"context": "fox"}])
def test_a_prompt_without_its_context_is_refused(make_lm, doc):
    from kvcompress import EvaluationError

    lm = make_lm(**SNAPKV, compress="context")
    for ask, requests in (
        (lm.generate_until, questions(PROMPTS[:1], docs=[doc])),
        (lm.loglikelihood, choices(PROMPTS[:1], docs=[doc])),
    ):
        with pytest.raises(EvaluationError, match=r"row 0 of tried (has|does) .*compress=prompt"):
            ask(requests)


def test_requests_are_all_looked_at_before_the_first_is_answered(make_lm, monkeypatch):
    from kvcompress import EvaluationError

    lm = make_lm(**SNAPKV, compress="context")
    monkeypatch.setattr(lm, "_model_generate", None)
    monkeypatch.setattr(lm, "_feed", None)
    docs = [{"context": PROMPTS[0][:-9]}, {"context": "o"}]
    for ask, requests in (
        (lm.generate_until, questions(PROMPTS[:2], docs=docs)),
        (lm.loglikelihood, choices(PROMPTS[:2], docs=docs)),
    ):
        with pytest.raises(EvaluationError, match=r"row 1 of tried .* once, but \d+ times"):
            ask(requests)
    several = questions(PROMPTS[:1])
    several[0].args[1]["num_return_sequences"] = 2
    with pytest.raises(EvaluationError, match="num_return_sequences=2"):
        make_lm(**SNAPKV).generate_until(several)


def test_the_whole_cache_is_not_said_to_be_read_in_chunks(make_lm):
    lm = make_lm(policy="none", prefill_chunk_size=32, lookahead=4)
    report = lm.get_model_info()["kvcompress"]
    assert report["prefill_chunk_size"] is None and report["lookahead"] is None


def test_contexts_whose_budgets_change_with_their_questions(make_lm):
    contexts = [text(22, 5), text(22, 6) + "x"]
    docs = [{"context": context} for context in contexts]
    prompts = [f"{context} what then?" for context in contexts]
    lm = make_lm(policy="h2o", keep_ratio=0.4, compress="context", batch_size=4)
    alone = make_lm(policy="h2o", keep_ratio=0.4, compress="context")
    scores = lm.loglikelihood(choices(prompts, docs=docs))
    assert [score for score, _ in scores] == pytest.approx(
        [score for score, _ in alone.loglikelihood(choices(prompts, docs=docs))], abs=1e-4
    )


# What is refused.


@pytest.mark.parametrize(
    "arguments, error, parts",
    [
        ({"capcity": 64}, "EvaluationError", ["'capcity'", "'capacity'"]),
        ({"window": 8}, "EvaluationError", ["'window'", "'window_size'"]),
        ({"polcy": "h2o"}, "EvaluationError", ["'polcy'", "'policy'"]),
        ({"dtyp": "float32"}, "EvaluationError", ["'dtyp'", "'dtype'"]),
        ({"pretrained": None}, "EvaluationError", ["no model", "smollm2"]),
        ({"wndow": 8}, "EvaluationError", ["nor the model knows 'wndow'"]),
        (
            {"keep_ratio": 0.5, "prefill_chunk_size": 32},
            "PolicyConfigError",
            ["share of the prompt"],
        ),
        (
            {"policy": "h2o", "prefill_chunk_size": 32, "lookahead": 8},
            "UnsupportedModeError",
            ["lookahead=0"],
        ),
        ({"truncate": "right"}, "EvaluationError", ["truncate='right'", "left or middle"]),
        ({"compress": "question"}, "EvaluationError", ["'question'", "prompt or context"]),
        ({"rolling": "off"}, "EvaluationError", ["refuse or uncompressed"]),
        ({"prefill_chunk_size": 0}, "EvaluationError", ["prefill_chunk_size=0", "at least 1"]),
        ({"lookahead": 4}, "EvaluationError", ["lookahead", "give prefill_chunk_size"]),
        ({"spare": 4}, "EvaluationError", ["spare is for", "give prefill_chunk_size"]),
        ({"policy": "h2o", "kernel_size": 5}, "PolicyConfigError", ["kernel_size", "recent_ratio"]),
        ({"policy": "snapk"}, "UnknownPolicyError", ["snapk", "snapkv"]),
        ({"policy": "none", "capacity": 64}, "PolicyConfigError", ["none", "capacity"]),
        ({"policy": "snapkv+h2o", "capacity": 64}, "PolicyConfigError", ["either part"]),
        ({"policy": "snapkv:capacity=9", "capacity": 64}, "PolicyConfigError", ["Give it once"]),
        ({"capacity": 0.25}, "PolicyConfigError", ["capacity=", "0.25"]),
        ({"capacity": [64, 64]}, "PolicyConfigError", ["lists 2 values"]),
        ({"compress": "context", "truncation": True}, "EvaluationError", ["truncation=True"]),
        ({"no_such_argument": 1}, "EvaluationError", ["knows 'no_such_argument'"]),
    ],
)
def test_wrong_arguments(make_lm, arguments, error, parts):
    import builtins

    import kvcompress

    kind = getattr(kvcompress, error, None) or getattr(builtins, error)
    with pytest.raises(kind, match=".*".join(map(re.escape, parts))):
        make_lm(**arguments)


def test_values_as_lm_eval_reads_them(make_lm):
    from lm_eval.utils import simple_parse_args_string

    written = "capacity=6_4,window_size=8.0,pooling=None,kernel_size=1e0"
    lm = make_lm(**simple_parse_args_string(written))
    assert str(lm.policy) == "snapkv:capacity=64:window_size=8:kernel_size=1:pooling=none"
    lists = make_lm(capacity=[64, 32, 48], window_size=8)
    assert str(lists.policy) == "snapkv:capacity=64/32/48:window_size=8"
    assert make_lm(policy="snapkv:capacity=64", window_size=8).policy.window_size == 8
    assert make_lm(policy=None).policy is None


def test_whole_texts_are_refused_unless_asked_for(make_lm):
    from lm_eval.api.instance import Instance

    from kvcompress import EvaluationError

    asked = [Instance("loglikelihood_rolling", {}, (text(30),), 0, ("tried", 0, 1))]
    with pytest.raises(EvaluationError, match=r"tried asks .* rolling=uncompressed"):
        make_lm(**SNAPKV).loglikelihood_rolling(asked)
    lm = make_lm(**SNAPKV, rolling="uncompressed")
    assert lm.loglikelihood_rolling(asked) == make_lm("theirs").loglikelihood_rolling(asked)
    assert lm.get_model_info()["kvcompress"]["rolling"] == "uncompressed"


def test_nothing_compressed_is_noticed(make_lm, monkeypatch):
    from kvcompress_eval import harness

    from kvcompress import EvaluationError

    lm = make_lm(**SNAPKV)

    def nothing_gone(cache, lengths, evicts_later=False, evicted=()):
        return [(float(length), 1.0, 1.0) for length in lengths]

    monkeypatch.setattr(harness, "held_rows", nothing_gone)
    lm.generate_until(questions([text(3)]))
    with pytest.raises(EvaluationError, match="evicted nothing of a prompt of"):
        lm.generate_until(questions(PROMPTS[:1]))
    with pytest.raises(EvaluationError, match="evicted nothing of a prompt of"):
        lm.loglikelihood(choices(PROMPTS[:1]))


def test_missing_data_of_a_scorer_is_noticed_before_answers(make_lm, monkeypatch):
    import nltk

    from kvcompress import EvaluationError

    monkeypatch.setattr(nltk.data, "path", [])
    lm = make_lm(**SNAPKV)
    doc = {"instruction_id_list": ["length_constraints:number_sentences"]}
    monkeypatch.setattr(lm, "_model_generate", None)
    with pytest.raises(EvaluationError, match="punkt_tab"):
        lm.generate_until(questions(PROMPTS[:1], docs=[doc]))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_that_learn_a_prompt_are_refused(make_lm, tmp_path):
    from peft import PromptTuningConfig, TaskType, get_peft_model

    from kvcompress import UnsupportedModelError

    config = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=4)
    get_peft_model(make_lm("theirs").model, config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="learns a prompt"):
        make_lm(**SNAPKV, peft=str(tmp_path))
    assert make_lm(policy="none", peft=str(tmp_path)).loglikelihood(choices(PROMPTS[:1]))


# What is reported, kept, and tried.


def test_the_report_of_a_run(make_lm):
    lm = make_lm(**SNAPKV, batch_size=4)
    lm.generate_until(questions(PROMPTS))
    report = lm.get_model_info()["kvcompress"]
    assert json.loads(json.dumps(report)) == report
    assert report["policy"] == "snapkv:capacity=64:window_size=8"
    assert report["policy_fields"]["pooling"] == "avg"
    assert report["policy_fields"]["later_turns"] == "revote"
    assert set(report["versions"]) == {"kvcompress", "transformers", "torch"}
    lengths = [len(lm.tok_encode(prompt)) for prompt in PROMPTS]
    own = report["tasks"]["tried"]
    assert own["prompt_tokens"]["min"] == min(lengths)
    assert own["prompt_tokens"]["max"] == max(lengths)
    assert own["held_tokens"]["max"] == 64 + 7 and own["requests"] == 4
    assert own["never_compressed"] == 1
    token = 3 * 2 * 2 * 8 * 4  # layers, keys and values, heads, head_dim, bytes
    seen = [length + 7 for length in lengths]
    assert own["dense_bytes"] == sum(seen) / 4 * token
    assert own["cache_bytes"] == own["held_tokens"]["mean"] * token


@pytest.mark.parametrize("policy", ["streaming_llm", "snapkv:window_size=8"])
def test_a_row_that_ends_early_counts_what_it_has_alone(make_lm, policy):
    """By a stop string or an end token, while another row of the batch goes on."""
    prompts = [text(9, 1), text(60, 3)]  # the first is within the budget until long after its end
    [first, _] = make_lm(policy="none").generate_until(questions(prompts, tokens=40))
    stop = first[3:5]
    for batch_size in (1, 2):
        lm = make_lm(policy=policy, capacity=64, batch_size=batch_size)
        answers = lm.generate_until(questions(prompts, until=[stop], tokens=40))
        assert answers[0] == first.split(stop)[0]
        end = lm.model.generation_config.eos_token_id
        lm.model.generation_config.eos_token_id = lm.tok_encode(first)[2]
        assert stats(lm)["never_compressed"] == 1
        assert stats(lm)["kept_ratio"]["max"] == 1
        kept = {batch_size: stats(lm)["held_tokens"]["min"]}
        lm.model.generation_config.eos_token_id = end
        assert kept[batch_size] <= len(lm.tok_encode(prompts[0])) + 5


def test_a_row_that_ends_early_is_not_taken_for_uncompressed(make_lm):
    """What other rows of the batch add behind its end is not its own."""
    prompts = [text(16, 1), text(60, 3)]
    [first] = make_lm(policy="snapkv:capacity=64:window_size=8").generate_until(
        questions(prompts[:1], tokens=60)
    )
    lm = make_lm(policy="snapkv_decoding:capacity=64:window_size=8", batch_size=2)
    length = len(lm.tok_encode(prompts[0]))
    assert 64 < length < 64 + 50
    lm.generate_until(questions(prompts, until=[first[3:5]], tokens=60))
    assert stats(lm)["never_compressed"] == 0
    assert 64 <= stats(lm)["held_tokens"]["min"] < length


def test_asked_repeatedly_a_request_counts_once(make_lm):
    lm = make_lm(**SNAPKV, batch_size=2)
    [request] = questions(PROMPTS[:1])
    lm.generate_until([request] * 5)
    assert stats(lm)["requests"] == 1 and len(lm._asked[PROMPTS[0]]) == 1


def test_windows_hold_no_more_than_they_are_wide(saved_model, tmp_path):
    from kvcompress_eval.harness import SnapKVLM

    from kvcompress.testing import tiny_model

    for file in saved_model.glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tiny_model("gemma3_text", vocab_size=258).save_pretrained(tmp_path)
    lengths = {}
    for name, policy in (("none", "none"), ("snapkv", "snapkv:capacity=64:window_size=8")):
        lm = SnapKVLM(str(tmp_path), policy=policy, device="cpu", dtype="float32")
        lm.generate_until(questions(PROMPTS[:1]))
        answered = stats(lm)["dense_bytes"]
        lm._samples = {}
        lm.loglikelihood(choices(PROMPTS[:1]))
        lengths[name] = answered, stats(lm)["dense_bytes"]
    token, seen = 2 * 2 * 8 * 4, len(lm.tok_encode(PROMPTS[0]))  # one layer's
    assert lengths["snapkv"][0] == lengths["none"][0] == 2 * token * (seen + 7 + 16)
    assert lengths["none"][1] == 2 * token * (seen + 16)


def test_a_model_with_windows_only_can_be_the_uncompressed_one(saved_model, tmp_path):
    from kvcompress_eval.harness import SnapKVLM

    from kvcompress.testing import tiny_model

    for file in saved_model.glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tiny_model("mistral", vocab_size=258, sliding_window=16).save_pretrained(tmp_path)
    lm = SnapKVLM(str(tmp_path), policy="none", device="cpu", dtype="float32")
    lm.generate_until(questions(PROMPTS))
    lm.loglikelihood(choices(PROMPTS))
    assert stats(lm)["kept_ratio"]["min"] == 1


def test_a_request_cache_is_never_shared_by_policies(make_lm, tmp_path, monkeypatch):
    from lm_eval.api.model import CachingLM

    from kvcompress import EvaluationError

    path = str(tmp_path / "answers.db")
    first = CachingLM(make_lm(**SNAPKV), path)
    answers = first.generate_until(questions(PROMPTS))
    scores = first.loglikelihood(choices(PROMPTS))
    for other in ({"capacity": 65, "window_size": 8}, {"policy": "none"}, {"policy": "h2o"}):
        with pytest.raises(EvaluationError, match=r"--use_cache: .* policy was 'snapkv:cap"):
            CachingLM(make_lm(**other), path)
    with pytest.raises(EvaluationError, match=r"dtype was 'torch.float32', is 'torch.bfloat16'"):
        CachingLM(make_lm(**SNAPKV, dtype="bfloat16"), path)
    with pytest.raises(EvaluationError, match="use_safetensors was None, is 'True'"):
        CachingLM(make_lm(**SNAPKV, use_safetensors=True), path)
    with pytest.raises(EvaluationError, match="truncate was 'left', is 'middle'"):
        CachingLM(make_lm(**SNAPKV, truncate="middle"), path)
    # As an earlier release wrote it, which did not have the setting.
    known = first.dbdict["kvcompress fingerprint"]
    first.dbdict["kvcompress fingerprint"] = {
        name: value for name, value in known.items() if name not in ("lookahead", "spare")
    }
    lm = make_lm(**SNAPKV)
    again = CachingLM(lm, path)
    monkeypatch.setattr(lm, "_model_generate", None)
    assert again.generate_until(questions(PROMPTS)) == answers
    assert again.loglikelihood(choices(PROMPTS)) == scores
    assert stats(lm) == stats(first.lm)


def test_a_request_cache_of_hf_is_not_taken_for_ours(make_lm, tmp_path):
    from lm_eval.api.model import CachingLM

    from kvcompress import EvaluationError

    path = str(tmp_path / "answers.db")
    CachingLM(make_lm("theirs"), path).generate_until(questions(PROMPTS[:1]))
    with pytest.raises(EvaluationError, match=r"--use_cache: .* not written by kvcompress"):
        CachingLM(make_lm(policy="none"), path)


def test_auto_tries_the_compressed_path_on_the_longest_prompt(make_lm, monkeypatch):
    from types import SimpleNamespace

    from kvcompress_eval import harness

    lm = make_lm(**SNAPKV, batch_size="auto")
    lm._probed = (6, 300)
    assert lm._detect_batch_size() == 1  # nothing to find out on a CPU
    tried, fed = [], []

    def feed(ids, cache, mask=None):
        fed.append((tuple(ids.shape), type(cache)))
        if len(ids) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return harness.SnapKVLM._feed(lm, ids, cache, mask)

    real = lm._probe
    monkeypatch.setattr(lm, "_probe", lambda size, n: tried.append(size) or real(size, n))
    monkeypatch.setattr(lm, "_feed", feed)
    monkeypatch.setattr(
        type(lm), "device", property(lambda self: SimpleNamespace(type="cuda")), raising=True
    )
    monkeypatch.setattr(harness.torch, "ones", lambda *size, **_: torch.full(size, 1))
    assert lm._detect_batch_size() == tried[-1] <= 2
    assert tried[0] == 6
    assert fed[-2:] == [((tried[-1], 300), harness.CompressedCache), ((tried[-1], 1), fed[-1][1])]
