"""A decode step that evicts one row moves one row; nothing outside can tell."""

import copy

import pytest
import torch

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS = [
    "knorm:capacity=20",
    "tova:capacity=20",
    "h2o:capacity=20",
    "h2o:capacity=20/26/23",
    "streaming_llm:capacity=20",
]


def in_position_order(spec):
    """The same policy, for which core keeps rows in the order of their positions."""
    from kvcompress import policy_from

    policy = policy_from(spec)
    ordered = type("Ordered", (type(policy),), {"any_order": False})
    return ordered(**{key: value for key, value in policy.to_dict().items() if key != "policy"})


def start(model, policy, inputs):
    from kvcompress import CompressedCache

    cache = CompressedCache(model, policy, prompt_length=inputs["input_ids"].shape[1])
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
    return cache


def steps(model, cache, tokens):
    with torch.no_grad():
        return [model(token, past_key_values=cache).logits[:, -1] for token in tokens.split(1, 1)]


def in_disorder(cache):
    return [not layer.rows.in_order for layer in cache.layers]


def assert_equal(ours, theirs):
    """Caches with the same rows, by position; what is read of a cache is in that order."""
    for a, b in zip(ours.layers, theirs.layers, strict=True):
        assert torch.equal(a.positions, b.positions)
        assert (a.positions.diff(dim=-1) > 0).all()
        torch.testing.assert_close(a.keys, b.keys, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(a.values, b.values, atol=1e-5, rtol=1e-4)
        assert a.rows.state.keys() == b.rows.state.keys()
        for name, rows in a.rows.state.items():
            held, its = a.counts.held, b.rows.state[name]
            torch.testing.assert_close(rows[..., :held], its[..., :held], atol=1e-5, rtol=1e-4)


@pytest.fixture
def pair(make_model, prompt):
    """Two caches after 30 tokens, in one of which rows were moved into each other's places."""

    def make(spec, *lengths):
        model, inputs = make_model(), prompt(*lengths or (40, 40))
        tokens = prompt(*[31] * len(inputs["input_ids"]), seed=5)["input_ids"]
        pair = start(model, spec, inputs), start(model, in_position_order(spec), inputs)
        for a, b in zip(*(steps(model, cache, tokens) for cache in pair), strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
        assert not any(in_disorder(pair[1]))
        return model, *pair

    return make


@pytest.mark.parametrize("spec", SETTINGS)
def test_moving_rows_is_not_seen(pair, spec):
    _, cache, plain = pair(spec)
    assert all(in_disorder(cache))
    assert_equal(cache, plain)
    assert not any(in_disorder(cache))


def test_only_one_row_moves(make_model, prompt):
    model = make_model()
    cache = start(model, "knorm:capacity=20", prompt(40))
    steps(model, cache, prompt(1)["input_ids"])
    rows = cache.layers[1].rows
    buffers = rows._keys.data_ptr(), rows._values.data_ptr()
    for token in prompt(12, seed=3)["input_ids"].split(1, 1):
        before = rows.keys.clone()
        steps(model, cache, token)
        assert (rows.keys != before).any(dim=-1).sum(dim=-1).max() <= 1
    assert (rows._keys.data_ptr(), rows._values.data_ptr()) == buffers
    assert rows.capacity == 21 and rows.counts.held == 20


@pytest.mark.parametrize("spec", SETTINGS)
def test_rows_moved_and_then_everything_else(pair, prompt, spec):
    """Copies, reordered and repeated batches, crops, later turns, inference mode."""
    model, cache, plain = pair(spec)
    copied = copy.deepcopy(cache)
    both = [cache, plain]
    more = prompt(6, 6, seed=8)["input_ids"]
    with torch.inference_mode():
        steps(model, both[0], more)
        steps(model, both[1], more)
    steps(model, cache, more)
    steps(model, plain, more)
    assert all(in_disorder(cache))
    order = torch.tensor([1, 0])
    for each in both:
        each.reorder_cache(order)
        each.batch_repeat_interleave(2)
        each.batch_select_indices(torch.tensor([0, 3]))
    for a, b in zip(*(steps(model, each, more) for each in both), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    turn = prompt(9, 9, seed=4)["input_ids"]
    with torch.no_grad():
        for each in both:
            model(turn, past_key_values=each)
            each.end_prefill()
    assert_equal(cache, plain)
    # The copy did not see any of it.
    _, fresh, _ = pair(spec)
    assert_equal(copied, fresh)


def test_padded_batches_stay_in_order(pair):
    _, cache, plain = pair("tova:capacity=20", 40, 12)
    assert not any(in_disorder(cache))
    assert_equal(cache, plain)


def test_the_latest_of_equals_goes(make_model, prompt):
    """As where rows are in order: whether a batch is padded may not matter."""
    from kvcompress import KNormPolicy

    def equal(self, view):
        return torch.zeros(view.positions.shape)

    fields = {"scores": equal, "name": "equal", "__annotations__": {}}
    policy = type("Equal", (KNormPolicy,), fields)(capacity=20, protect_recent=3)
    model = make_model()
    cache = start(model, policy, prompt(40))
    steps(model, cache, prompt(9, seed=2)["input_ids"])
    assert all(in_disorder(cache))
    expected = [*range(17), 46, 47, 48]
    assert all(layer.positions[0, 0].tolist() == expected for layer in cache.layers)


def test_newest_of_rows_in_any_order():
    from kvcompress.tensors import lowest, newest_of

    columns = torch.tensor([[[7, 2, 9, 4]], [[1, 3, 0, 8]]], dtype=torch.int32)
    assert newest_of(columns, 2).tolist() == [
        [[True, False, True, False]],
        [[False, True, False, True]],
    ]
    assert newest_of(columns, 4).all() and not newest_of(columns, 0).any()
    scores = torch.tensor([[[1.0, 0.0, 0.0, 0.0]], [[2.0, 1.0, 3.0, 4.0]]])
    assert lowest(scores, columns).tolist() == [[[2]], [[1]]]
