"""Copies of models and caches, by deepcopy, pickle and torch.save."""

import copy
import gc
import io
import pickle

import pytest
import torch

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = {"max_new_tokens": 8, "do_sample": False}
POLICY = "snapkv:capacity=24:window_size=6"
POLICIES = [
    POLICY,
    "snapkv:capacity=24/30/70:window_size=6",
    "h2o:capacity=20",
    "h2o:capacity=20:interval=5",
    "tova:capacity=20",
    "streaming_llm:capacity=20:positions=cache",
    "snapkv:capacity=20:window_size=6+h2o:capacity=4:scope=generated",
]


def by_torch_save(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def by_pickle(thing):
    return pickle.loads(pickle.dumps(thing))


COPIES = [copy.deepcopy, by_pickle, by_torch_save]


@torch.no_grad()
def feed(model, cache, ids):
    logits = []
    for token in ids:
        logits.append(model(token[None, None], past_key_values=cache).logits[:, -1])
    return torch.stack(logits)


@pytest.mark.parametrize("duplicate", COPIES)
def test_a_copied_model_is_plain_and_can_be_pressed_itself(prompt, duplicate):
    from kvcompress import press
    from kvcompress.testing import tiny_model

    model, inputs = tiny_model(), prompt(70)
    plain = model.generate(**inputs, **GREEDY)
    with press(model, POLICY) as session:
        compressed = model.generate(**inputs, **GREEDY)
        twin = duplicate(model)
        assert torch.equal(twin.generate(**inputs, **GREEDY), plain)
        assert len(session.reports) == 1
        with press(twin, POLICY) as other:
            assert torch.equal(twin.generate(**inputs, **GREEDY), compressed)
        assert len(session.reports) == len(other.reports) == 1
        del twin
        assert torch.equal(model.generate(**inputs, **GREEDY), compressed)
    # A copy that outlives the context has hooks that do nothing; leaving another one keeps them.
    twin = duplicate(model)
    for part in (twin, twin.model):
        assert not part._forward_pre_hooks and not part._forward_hooks


@pytest.mark.parametrize("duplicate", COPIES[:2])
def test_hooks_that_a_copy_keeps_do_nothing(prompt, duplicate):
    from kvcompress import press
    from kvcompress.testing import tiny_model

    model, inputs = tiny_model(), prompt(70)
    plain = model.generate(**inputs, **GREEDY)
    with press(model, POLICY) as session:
        twin = duplicate(model)
    assert torch.equal(twin.generate(**inputs, **GREEDY), plain)
    for _ in range(2):
        with press(twin, POLICY) as own:
            assert not torch.equal(twin.generate(**inputs, **GREEDY), plain)
        assert own.report().layers[0].held_tokens == 24 + 7
    assert torch.equal(twin.generate(**inputs, **GREEDY), plain)
    assert not session.reports


def test_a_model_saved_in_a_context(prompt, tmp_path):
    from transformers import AutoModelForCausalLM

    from kvcompress import press
    from kvcompress.testing import tiny_model

    model, inputs = tiny_model(), prompt(70)
    plain = model.generate(**inputs, **GREEDY)
    weights = set(model.state_dict())
    with press(model, POLICY):
        model.save_pretrained(tmp_path)
        assert set(model.state_dict()) == weights
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded.generate(**inputs, **GREEDY), plain)
    assert not loaded._forward_pre_hooks and not loaded.model._forward_pre_hooks


@pytest.mark.parametrize(
    ("duplicate", "policy"),
    [
        *((copy.deepcopy, policy) for policy in POLICIES),
        *((by_pickle, policy) for policy in POLICIES[2:]),
        (by_torch_save, "tova:capacity=20"),
    ],
)
def test_a_copied_cache_goes_on_by_itself(make_model, prompt, duplicate, policy):
    """In the middle of an answer: between evictions, with state, and rows out of order."""
    from kvcompress import CompressedCache

    model, inputs = make_model(), prompt(70, seed=4)
    first, then, other = torch.randint(1, 101, (3, 6))

    def fresh():
        cache = CompressedCache(model, policy, prompt_length=70)
        with torch.no_grad():
            model(**inputs, past_key_values=cache)
        feed(model, cache, first)
        return cache

    cache = fresh()
    expected = feed(model, cache, then)
    original = fresh()
    twin = duplicate(original)
    assert str(twin.policy) == str(original.policy)
    elsewhere = feed(model, twin, other)
    assert torch.equal(feed(model, original, then), expected)
    again = duplicate(fresh())
    assert torch.equal(feed(model, again, then), expected)
    assert not torch.equal(elsewhere, expected)
    for mine, its in zip(again.layers, cache.layers, strict=True):
        assert torch.equal(mine.positions, its.positions)
        assert torch.equal(mine.keys, its.keys)
    assert [layer.held_tokens for layer in again.report().layers] == [
        layer.held_tokens for layer in cache.report().layers
    ]


@pytest.mark.parametrize("policy", [POLICY, "tova:capacity=20"])
def test_a_copied_cache_in_the_context_that_made_it(make_model, prompt, policy):
    from kvcompress import press

    model, inputs = make_model(), prompt(70)
    ids = torch.randint(1, 101, (7,))
    with press(model, policy) as session:
        with torch.no_grad():
            cache = model(**inputs).past_key_values
        twin = copy.deepcopy(cache)
        assert torch.equal(feed(model, cache, ids), feed(model, twin, ids))
    assert [report.layers[0].seen_tokens for report in session.reports] == [77, 77]


def test_copies_outlive_the_original(make_model, prompt):
    """The last cache to go takes transformers' wrapped methods with it, not the first."""
    from kvcompress import CompressedCache

    model, inputs, ids = make_model(), prompt(70), torch.tensor([3, 4, 5])
    cache = CompressedCache(model, "snapkv:capacity=24/30/70:window_size=6", prompt_length=70)
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
    copies = [duplicate(cache) for duplicate in COPIES]
    expected = feed(model, cache, ids)
    del cache
    gc.collect()
    while copies:
        assert torch.equal(feed(model, copies.pop(), ids), expected)
        gc.collect()
