"""Long prompts in bounded memory, and many questions about one context."""

import copy

import pytest
import torch

pytestmark = pytest.mark.usefixtures("one_thread")

POLICY = "snapkv:capacity=24:window_size=6"
POLICIES = {
    "window": POLICY,
    "layer budgets": "pyramidkv:capacity=24:window_size=4:beta=4",
    "last query": "tova:capacity=24",
    "no query": "knorm:capacity=24:protect_recent=2",
    "recent": "streaming_llm:capacity=24",
    "generated": "snapkv:capacity=24:window_size=6+tova:capacity=4:scope=generated",
    "composed": "snapkv:capacity=24:window_size=6+streaming_llm:capacity=26",
    "decoding window": "snapkv_decoding:capacity=24:window_size=6:interval=6",
}
FAMILIES = ["llama", "gemma3_text", "qwen3_next", "deepseek_v3", "llama4_text"]
GREEDY = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture(autouse=True)
def in_inference():
    with torch.no_grad():
        yield


def hosted(cache):
    return [layer for layer in cache.layers if hasattr(layer, "positions")]


def same_rows(ours, theirs, tolerance=1e-4):
    """Caches that hold the same rows; ours may lack the newest ones."""
    for one, other in zip(hosted(ours), hosted(theirs), strict=True):
        missing = one.get_seq_length() - other.get_seq_length()
        end = other.positions.shape[-1] + missing
        assert torch.equal(one.positions, other.positions[..., :end])
        assert (one.keys - other.keys[:, :, :end]).abs().max() < tolerance
        assert (one.values - other.values[:, :, :end]).abs().max() < tolerance


def loop(model, cache, ids, steps=6):
    """Greedy tokens and logits of a loop that goes on from `ids`."""
    from kvcompress.session import cache_argument

    logits = []
    for _ in range(steps):
        logits.append(model(ids, **{cache_argument(model): cache}).logits[:, -1])
        ids = logits[-1].argmax(dim=-1, keepdim=True)
    return torch.stack(logits)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("hold_back", [0, 1, 3])
def test_one_chunk_keeps_what_an_ordinary_prefill_keeps(make_model, prompt, policy, hold_back):
    from kvcompress import CompressedCache, press

    if hold_back > 1 and ("tova" in policy or "knorm" in policy):
        pytest.skip("an ordinary prefill may evict what is to be held back")
    model, ids = make_model(), prompt(70)["input_ids"]
    ordinary = CompressedCache(model, policy, prompt_length=70)
    model(ids, past_key_values=ordinary)
    session = press(model, policy)
    cache = session.prefill(ids, chunk_size=100, hold_back=hold_back)
    assert cache.get_seq_length() == 70 - hold_back
    same_rows(cache, ordinary)
    if hold_back == 1:
        # Feeding it for good brings back its row, and evicts nothing else.
        output = model.generate(ids, past_key_values=cache, **GREEDY)
        assert output.shape == (1, 76)
        again = copy.deepcopy(ordinary)
        for layer in hosted(again):
            layer.take_back(1)
        again.layers[0].state.turn.open = False
        logits = loop(model, again, ids[:, -1:])
        assert output[0, 70:].tolist() == logits.argmax(dim=-1)[:, 0].tolist()


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_with_rows_to_spare_for_all_it_keeps_what_an_ordinary_prefill_keeps(
    make_model, prompt, policy
):
    from kvcompress import CompressedCache, press

    if policy == POLICIES["no query"]:
        pytest.skip("equal tokens have equal keys in the first layer, and rounding would decide")
    model, ids = make_model(), prompt(130)["input_ids"]
    ordinary = CompressedCache(model, policy, prompt_length=130)
    model(ids, past_key_values=ordinary)
    session = press(model, policy)
    cache = session.prefill(ids, chunk_size=16, spare=130)
    same_rows(cache, ordinary)
    least = session.prefill(ids, chunk_size=16, spare=0)
    if policy != POLICIES["recent"]:
        with pytest.raises(AssertionError):
            same_rows(least, cache)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_left_alone_forget_what_looked_ahead(make_model, prompt, family):
    """The chunked prefill of a capacity that is never reached gives the plain model's answer."""
    from kvcompress import UnsupportedModelError, press
    from kvcompress.hosting import hosted_layers
    from kvcompress.testing.models import ONLY_EAGER

    model = make_model(family, "eager" if family in ONLY_EAGER else "sdpa")
    try:
        hosted_layers(model.config)
    except UnsupportedModelError:
        pytest.skip("this transformers is too old for the cache of this family")
    inputs = prompt(70)
    plain = model.generate(**inputs, **GREEDY)
    session = press(model, "snapkv:capacity=100:window_size=6")
    for chunk_size in (16, 23, 64):
        cache = session.prefill(**inputs, chunk_size=chunk_size)
        assert cache.get_seq_length() == 69
        name = "cache" if "cache" in model.forward.__code__.co_varnames else "past_key_values"
        output = model.generate(**inputs, **{name: cache}, **GREEDY)
        assert torch.equal(output, plain)


def bounded(model, policy, inputs, tokens=6, **options):
    """Prefill in chunks and a greedy answer, with all evictions at the time of each."""
    from kvcompress import press
    from kvcompress.session import cache_argument
    from kvcompress.testing.oracle import Evictions

    evictions, steps = Evictions(), []

    def look(*step):
        evictions.look(session.cache)
        steps.append(step)

    with press(model, policy) as session:
        cache = session.prefill(**inputs, **options, progress=look)
        handle = model.register_forward_hook(lambda *_: evictions.look(session.cache))
        output = model.generate(
            **inputs,
            **{cache_argument(model): cache},
            max_new_tokens=tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        handle.remove()
    return cache, output, evictions, steps


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize(("chunk_size", "spare"), [(7, 0), (16, 0), (40, 0), (16, None), (7, 10)])
def test_memory_is_bounded_and_answers_are_the_oracles(
    make_model, prompt, policy, chunk_size, spare
):
    from kvcompress.testing import oracle

    model, inputs = make_model(), prompt(130)
    options = {"chunk_size": chunk_size, "spare": spare}
    cache, output, evictions, steps = bounded(model, policy, inputs, **options)
    history = [held for seen, held in cache.report().history if seen < 130]
    most, extra = max(history), 24 if spare is None else spare
    # layers x (budget, spare rows, chunk, look-ahead twice)
    assert most <= 3 * (24 + extra + chunk_size + 2 * 6)
    assert most >= 3 * (24 + extra)
    fed = [step for step, _ in steps]
    assert fed == sorted(set(fed)) and fed[-1] == 130
    assert len(fed) >= (130 - 12) // chunk_size
    assert evictions.evicted(0) > 0
    with oracle(model, evictions):
        plain = model(output.sequences[:, :-1]).logits[:, 129:]
    assert (torch.stack(output.logits, dim=1) - plain).abs().max() < 1e-4


@pytest.mark.parametrize(("family", "attn"), [("llama", "sdpa"), ("llama", "eager")])
def test_rows_of_a_padded_batch_equal_rows_alone(make_model, prompt, family, attn):
    """Also of one that a whole chunk has nothing of, and of one that is shorter than a chunk."""
    model, batch = make_model(family, attn), prompt(130, 121, 40, 11)
    cache, together, _, _ = bounded(model, POLICY, batch, chunk_size=16)
    for row, real in enumerate(batch["attention_mask"].bool()):
        one = {"input_ids": batch["input_ids"][row, real][None]}
        own, alone, _, _ = bounded(model, POLICY, one, chunk_size=16)
        assert torch.equal(alone.sequences[0, -6:], together.sequences[row, -6:])
        for mine, ours in zip(hosted(own), hosted(cache), strict=True):
            held = mine.positions.shape[-1]
            assert torch.equal(mine.positions[0], ours.positions[row, :, -held:])


def test_recent_rows_are_the_same_by_any_chunks(make_model, prompt):
    from kvcompress import CompressedCache, press

    model, ids = make_model(), prompt(130)["input_ids"]
    policy = "streaming_llm:capacity=24"
    ordinary = CompressedCache(model, policy, prompt_length=130)
    model(ids, past_key_values=ordinary)
    for chunk_size in (1, 9, 50):
        cache = press(model, policy).prefill(ids, chunk_size=chunk_size, hold_back=0)
        for one, other in zip(hosted(cache), hosted(ordinary), strict=True):
            assert torch.equal(one.positions, other.positions)


def test_the_question_decides_what_is_kept_of_early_chunks(make_model, prompt):
    from kvcompress import press

    model, ids = make_model(), prompt(130)["input_ids"]
    other = ids.clone()
    other[:, -6:] = torch.tensor([[7, 70, 17, 71, 27, 72]])
    session = press(model, POLICY)

    def early(tokens, **options):
        cache = session.prefill(tokens, chunk_size=32, **options)
        return [[p for p in head if p < 32] for head in cache.layers[1].positions[0].tolist()]

    assert early(ids) != early(other)
    # Without, nothing of the first chunk's choice depends on what comes later.
    context = ids[:, :-32], other[:, :-32]
    first, second = (
        session.prefill(tokens, chunk_size=32, lookahead=0, hold_back=0) for tokens in context
    )
    assert torch.equal(first.layers[1].positions, second.layers[1].positions)


def test_policies_that_keep_a_record(make_model, prompt):
    from kvcompress import UnsupportedModeError, press
    from kvcompress.testing import oracle

    model, inputs = make_model(), prompt(130)
    policy = "h2o:capacity=24"
    with pytest.raises(UnsupportedModeError, match=r"record of all queries.*lookahead=0"):
        press(model, policy).prefill(inputs["input_ids"], chunk_size=16, lookahead=4)
    _, output, evictions, _ = bounded(model, policy, inputs, chunk_size=16)
    with oracle(model, evictions):
        plain = model(output.sequences[:, :-1]).logits[:, 129:]
    assert (torch.stack(output.logits, dim=1) - plain).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("policy", "options", "error", "said"),
    [
        (POLICY, {"chunk_size": 0}, "ShapeError", r"chunk_size=0 .* at least 1"),
        (POLICY, {"input_ids": torch.ones(9)}, "ShapeError", r"of shape \(9,\); it must be"),
        (
            "scissorhands:capacity=24:history=400",
            {},
            "PolicyConfigError",
            r"lookahead=\d+ \(as many queries as it reads\)",
        ),
        (POLICY, {"lookahead": -1}, "ShapeError", r"lookahead=-1"),
        (POLICY, {"spare": -1}, "ShapeError", r"spare=-1 must be a whole number, at least 0"),
        (POLICY, {"hold_back": 130}, "ShapeError", r"hold_back=130, and the prompt has 130"),
        (POLICY, {"lookahead": 24}, "PolicyConfigError", r"keeps 24 rows .* lookahead=24"),
        ("snapkv:keep_ratio=0.5", {}, "PolicyConfigError", r"share of the prompt"),
        (
            "streaming_llm:capacity=24:positions=cache",
            {"lookahead": 2},
            "UnsupportedModeError",
            r"moves keys .* lookahead=0",
        ),
    ],
)
def test_what_cannot_be_is_refused(make_model, prompt, policy, options, error, said):
    import kvcompress

    given = {"input_ids": prompt(130)["input_ids"], "chunk_size": 16} | options
    with pytest.raises(getattr(kvcompress, error), match=said):
        kvcompress.press(make_model(), policy).prefill(**given)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"input_ids": [[5, 6]]}, "input_ids is a list"),
        ({"attention_mask": [[1, 1]]}, "attention_mask is a list"),
        ({"chunk_size": "512"}, "chunk_size='512' must be a whole number"),
        ({"lookahead": 2.5}, "lookahead=2.5 must be a whole number"),
    ],
)
def test_what_is_no_tensor_or_number_is_refused(make_model, prompt, wrong, said):
    from kvcompress import CompressedCache, ShapeError
    from kvcompress.prefill import ChunkedPrefill

    given = {"input_ids": prompt(130)["input_ids"], "attention_mask": None}
    given |= {"chunk_size": 16, "lookahead": 0, "hold_back": 1, "spare": 0}
    with pytest.raises(ShapeError, match=said):
        ChunkedPrefill(
            make_model(), CompressedCache(make_model(), POLICY), "cache", **given | wrong
        )


@pytest.mark.parametrize("question", ["Who?", [1, 2, 3]])
def test_a_question_that_is_no_tensor_is_refused(make_model, prompt, question):
    from kvcompress import ShapeError, press

    session = press(make_model(), POLICY)
    cache = session.prefill(**prompt(70), chunk_size=100)
    with pytest.raises(ShapeError, match=f"The question is a {type(question).__name__}"):
        # Without what checks annotations in these tests, as users have it.
        type(session).ask.__wrapped__(session, cache, question)


def test_batches_that_cannot_be_are_refused(make_model, prompt):
    from kvcompress import UnsupportedModeError, press

    session = press(make_model(), POLICY)
    with pytest.raises(UnsupportedModeError, match=r"A row has 5 real tokens, and lookahead=6"):
        session.prefill(**prompt(130, 5), chunk_size=16, lookahead=6)
    batch = prompt(130, 90)
    batch["attention_mask"] = batch["attention_mask"].flip(1)
    with pytest.raises(UnsupportedModeError, match="padding at the left"):
        session.prefill(**batch, chunk_size=16)


def test_drafts_are_refused_as_ever_by_policies_that_evict_later(make_model, prompt):
    from kvcompress import CompressedCache, UnsupportedModeError, press

    model, ids = make_model(), prompt(70)["input_ids"]
    drafts = {"prompt_lookup_num_tokens": 3, "eos_token_id": 100}
    for cache in (
        CompressedCache(model, "tova:capacity=24", prompt_length=70),
        press(model, "tova:capacity=24").prefill(ids, chunk_size=32),
    ):
        with pytest.raises(UnsupportedModeError, match="draft tokens"):
            model.generate(ids, past_key_values=cache, **drafts, **GREEDY)


# Many questions about one context.


@pytest.mark.parametrize("later", ["revote", "keep", "append"])
@pytest.mark.parametrize("hold_back", [0, 1])
def test_questions_find_the_context_as_it_was(make_model, prompt, later, hold_back):
    from kvcompress import press
    from kvcompress.session import cache_argument

    model, context = make_model(), prompt(130)["input_ids"]
    policy = f"{POLICY}:later_turns={later}"
    questions = [prompt(9, seed=seed)["input_ids"] for seed in range(2, 6)]
    with press(model, policy) as session:
        cache = session.prefill(context, chunk_size=32, hold_back=hold_back)
        before = copy.deepcopy(cache)
        answers = [session.ask(cache, question, **GREEDY) for question in questions]
        for layer, old in zip(hosted(cache), hosted(before), strict=True):
            assert torch.equal(layer.positions, old.positions)
            assert torch.equal(layer.keys, old.keys)
        for question, answer in zip(questions, answers, strict=True):
            alone = session.prefill(context, chunk_size=32, hold_back=hold_back)
            output = model.generate(
                torch.cat([context, question], dim=1), **{cache_argument(model): alone}, **GREEDY
            )
            assert torch.equal(answer, output[:, 139:])
        together = session.ask(cache, torch.cat(questions), **GREEDY)
    assert torch.equal(together, torch.cat(answers))
    assert len({tuple(answer[0].tolist()) for answer in answers}) > 1


@pytest.mark.parametrize("contexts", [1, 2])
def test_questions_are_answered_by_beams_and_several_times(make_model, prompt, contexts):
    from transformers import GenerationConfig

    from kvcompress import press
    from kvcompress.session import cache_argument

    model, batch = make_model(), prompt(*(130, 121)[:contexts])
    questions = prompt(9, seed=5)["input_ids"].expand(contexts, -1)
    beams = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 6, "do_sample": False}
    with press(model, POLICY) as session:
        cache = session.prefill(**batch, chunk_size=32, hold_back=0)
        found = session.ask(cache, questions, **beams)
        again = session.ask(cache, questions, generation_config=GenerationConfig(**beams))
        own = session.prefill(**batch, chunk_size=32, hold_back=0)
        own.batch_repeat_interleave(3)
        said = torch.cat([batch["input_ids"], questions], dim=1)
        mask = torch.cat([batch["attention_mask"], torch.ones_like(questions)], dim=1)
        output = model.generate(said, attention_mask=mask, **{cache_argument(model): own}, **beams)
        assert torch.equal(found, output[:, 139:]) and torch.equal(again, found)
        assert found.shape[0] == 2 * contexts
        torch.manual_seed(3)
        several = session.ask(
            cache, questions, num_return_sequences=4, do_sample=True, max_new_tokens=6
        )
    assert several.shape == (4 * contexts, 6)


def test_a_conversation_goes_on_in_a_fork(make_model, prompt):
    from kvcompress import press
    from kvcompress.session import cache_argument

    model, context = make_model(), prompt(130)["input_ids"]
    questions = [prompt(9, seed=seed)["input_ids"] for seed in (2, 3)]
    with press(model, POLICY) as session:
        cache = session.prefill(context, chunk_size=32)
        fork, whole = copy.deepcopy(cache), copy.deepcopy(cache)
        said = context
        for question in questions:
            answer = session.ask(fork, question, fork=False, **GREEDY)
            said = torch.cat([said, question], dim=1)
            output = model.generate(said, **{cache_argument(model): whole}, **GREEDY)
            assert torch.equal(answer, output[:, said.shape[1] :])
            said = output
    assert fork.get_seq_length() == whole.get_seq_length() == said.shape[1] - 1


def test_padded_contexts_can_be_asked(make_model, prompt):
    from kvcompress import press

    model, contexts = make_model(), prompt(130, 121)
    question = prompt(9, seed=5)["input_ids"]
    with press(model, POLICY) as session:
        cache = session.prefill(**contexts, chunk_size=32, hold_back=0)
        together = session.ask(cache, question.expand(2, -1), **GREEDY)
        for row in range(2):
            one = {name: tensor[row : row + 1] for name, tensor in contexts.items()}
            alone = session.prefill(**one, chunk_size=32, hold_back=0)
            assert torch.equal(session.ask(alone, question, **GREEDY)[0], together[row])


def test_questions_that_cannot_be_asked(make_model, prompt):
    from transformers import DynamicCache

    from kvcompress import CompressedCache, PressStateError, press

    model, session = make_model(), press(make_model(), POLICY)
    question = prompt(9)["input_ids"]
    with pytest.raises(PressStateError, match=r"session\.prefill"):
        session.ask(CompressedCache(model, POLICY), question)
    with pytest.raises(PressStateError, match=r"session\.prefill"):
        session.ask(DynamicCache(), question)
    used = session.prefill(**prompt(60), chunk_size=32)
    model.generate(**prompt(60), past_key_values=used, **GREEDY)
    with pytest.raises(PressStateError, match=r"was used since"):
        session.ask(used, question)
    used.reset()
    with pytest.raises(PressStateError, match=r"was used since"):
        session.ask(used, question)
    cache = session.prefill(**prompt(60, 58), chunk_size=32)
    with pytest.raises(PressStateError, match="3 questions, and a cache of 2 contexts"):
        session.ask(cache, question.expand(3, -1))
    with pytest.raises(PressStateError, match="fork=False"):
        session.ask(cache, question.expand(2, -1), fork=False)
    with pytest.raises(PressStateError, match="at least one"):
        session.ask(cache, question[:, :0])
    with pytest.raises(PressStateError, match=r"fork=False, and 3 beams"):
        session.ask(session.prefill(**prompt(60), chunk_size=32), question, fork=False, num_beams=3)
