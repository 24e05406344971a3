"""Several threads on one model: every cache has what it has when its thread runs alone."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = {"max_new_tokens": 7, "do_sample": False}
DECODE = [
    "tova:capacity=20",
    "h2o:capacity=20",
    "h2o:capacity=20:interval=3",
    "streaming_llm:capacity=20:positions=cache",
    "snapkv_decoding:capacity=20:window_size=6:interval=4",
    "snapkv:capacity=20:window_size=6+h2o:capacity=4:scope=generated",
]
ROUNDS = 2


@pytest.fixture(autouse=True)
def switching():
    """Threads take turns far more often than they would."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def generate(model, inputs, policy):
    """Tokens, and what is kept unless there is no policy."""
    from kvcompress import CompressedCache

    cache = None if policy is None else CompressedCache(model, policy)
    tokens = model.generate(**inputs, **GREEDY, past_key_values=cache)
    return tokens, [layer.positions for layer in cache.layers] if policy is not None else []


def assert_same(ours, theirs):
    assert torch.equal(ours[0], theirs[0])
    assert all(torch.equal(a, b) for a, b in zip(ours[1], theirs[1], strict=True))


@pytest.mark.parametrize(
    "policies",
    [
        ["tova:capacity=20", "tova:capacity=20"],
        ["tova:capacity=20", "h2o:capacity=20"],
        ["h2o:capacity=20", None],
        [None, *DECODE],
    ],
    ids=["one-policy-twice", "two-policies", "compressed-and-plain", "all"],
)
def test_caches_side_by_side(at_once, make_model, prompt, policies):
    model = make_model()
    inputs = [prompt(60 + n, seed=n) for n in range(len(policies))]
    jobs = [
        lambda given=given, policy=policy: generate(model, given, policy)
        for given, policy in zip(inputs, policies, strict=True)
    ]
    alone = [job() for job in jobs]
    for _ in range(ROUNDS):
        for ours, theirs in zip(at_once(*jobs), alone, strict=True):
            assert_same(ours, theirs)


@pytest.mark.parametrize("policy", DECODE[:4])
def test_two_threads_in_one_context(at_once, make_model, prompt, policy):
    from kvcompress import press

    model, inputs = make_model(), [prompt(70, seed=1), prompt(55, 40, seed=2)]

    def run(given):
        output = model.generate(**given, **GREEDY, return_dict_in_generate=True)
        return output.sequences, [layer.positions for layer in output.past_key_values.layers]

    jobs = [lambda given=given: run(given) for given in inputs]
    with press(model, policy) as session:
        alone = [job() for job in jobs]
        for _ in range(ROUNDS):
            for ours, theirs in zip(at_once(*jobs), alone, strict=True):
                assert_same(ours, theirs)
    reports = session.reports
    assert len(reports) == 2 + 2 * ROUNDS
    assert (
        sorted(report.layers[0].seen_tokens for report in reports[2:])
        == [61] * ROUNDS + [76] * ROUNDS
    )


@pytest.mark.parametrize("policy", DECODE)
def test_layers_of_two_caches_in_turn(at_once, prompt, policy):
    """Both threads enter every layer of every forward together."""
    from kvcompress.testing import tiny_model

    model, inputs = tiny_model(), [prompt(70, seed=1), prompt(70, seed=2)]
    jobs = [lambda given=given: generate(model, given, policy) for given in inputs]
    alone = [job() for job in jobs]
    meeting = threading.Barrier(2)

    def meet(*_):
        meeting.wait(timeout=60)

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(meet)
        layer.self_attn.register_forward_hook(meet)
    for ours, theirs in zip(at_once(*jobs), alone, strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize("policy", DECODE)
def test_a_cache_handed_from_thread_to_thread(make_model, prompt, policy):
    from kvcompress import CompressedCache

    model, inputs = make_model(), prompt(70)
    expected = generate(model, inputs, policy)
    tokens = expected[0]
    cache = CompressedCache(model, policy, prompt_length=70)

    @torch.no_grad()
    def feed(ids):
        return model(ids, past_key_values=cache).logits[:, -1].argmax(dim=-1)

    fed = [inputs["input_ids"], *(tokens[:, at : at + 1] for at in range(70, 76))]
    for at, ids in enumerate(fed):
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(feed, ids).result() == tokens[:, 70 + at]
    assert_same((tokens, [layer.positions for layer in cache.layers]), expected)


def test_a_thread_that_fails_leaves_the_other_alone(at_once, make_model, prompt):
    from kvcompress import UnsupportedModeError, press

    model, inputs = make_model(), prompt(70)
    padded_right = prompt(40, 40)
    padded_right["attention_mask"][1, -3:] = 0

    def fail():
        for _ in range(4):
            with pytest.raises(UnsupportedModeError, match="padding_side"), torch.no_grad():
                model(**padded_right)

    with press(model, "tova:capacity=20"):
        expected = model.generate(**inputs, **GREEDY)
        tokens, _ = at_once(lambda: model.generate(**inputs, **GREEDY), fail)
    assert torch.equal(tokens, expected)
