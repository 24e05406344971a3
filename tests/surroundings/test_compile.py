"""Compiled models: compressed and right, whatever was compiled and when, or an error."""

import gc
import shutil

import pytest
import torch

pytestmark = [
    pytest.mark.usefixtures("one_thread", "fresh_compiler"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the compiler
]

POLICIES = ["snapkv:capacity=24:window_size=6", "tova:capacity=24"]
STEPS = 4


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    gc.collect()  # what the traceback of an error keeps alive


@pytest.fixture
def model():
    from kvcompress.testing import tiny_model

    return tiny_model(num_hidden_layers=1)


def by_compile(model, **options):
    model.compile(**options)
    return model


def by_wrapper(model, **options):
    return torch.compile(model, **options)


def by_forward(model, **options):
    model.forward = torch.compile(model.forward, **options)
    return model


def by_layers(model, **options):
    for layer in model.model.layers:
        layer.compile(**options)
    return model


WAYS = [by_compile, by_wrapper, by_forward, by_layers]


def generate(model, ids, cache=None):
    more = {} if cache is None else {"past_key_values": cache}
    return model.generate(ids, max_new_tokens=STEPS, do_sample=False, **more)


@torch.no_grad()
def loop(model, ids, cache=None):
    more = {} if cache is None else {"past_key_values": cache}
    output = model(input_ids=ids, **more)
    for step in range(STEPS):
        if step:
            output = model(input_ids=ids[:, -1:], past_key_values=output.past_key_values)
        ids = torch.cat([ids, output.logits[:, -1:].argmax(dim=-1)], dim=1)
    return ids


def answers(model, ids, policy):
    """Without compilation: plain and compressed."""
    from kvcompress import press

    plain = loop(model, ids)
    with press(model, policy):
        compressed = loop(model, ids)
    assert not torch.equal(plain, compressed)
    return plain, compressed


@pytest.mark.parametrize("way", [by_compile, pytest.param(by_forward, marks=pytest.mark.slow)])
def test_compiled_and_used_before(model, prompt, way):
    """Code that was compiled for plain caches must not serve hosted ones."""
    from kvcompress import press

    ids = prompt(70)["input_ids"]
    plain, compressed = answers(model, ids, POLICIES[0])
    compiled = way(model, backend="eager")
    assert torch.equal(loop(compiled, ids), plain)
    with press(compiled, POLICIES[0]) as session:
        assert torch.equal(loop(compiled, ids), compressed)
    assert session.report().layers[0].held_tokens == 24 + STEPS - 1


def test_layers_in_and_out_of_contexts(model, prompt):
    """The compiler does not watch the methods of classes, which contexts replace."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from kvcompress import CompressedCache, press

    inputs = prompt(70)
    compiled = by_layers(model, backend="eager")
    attributes = set(vars(ALL_ATTENTION_FUNCTIONS))
    with torch.no_grad():
        for _ in range(2):
            with press(compiled, POLICIES[0]) as session:
                compiled(**inputs)
            assert session.report().layers[0].held_tokens == 24
            assert compiled(**inputs).past_key_values.get_seq_length() == 70
            assert set(vars(ALL_ATTENTION_FUNCTIONS)) == attributes
            cache = CompressedCache(compiled, POLICIES[0], prompt_length=70)
            compiled(**inputs, past_key_values=cache)
            assert cache.report().layers[0].held_tokens == 24
            del cache, session


def test_one_graph_is_refused(model, prompt):
    """By the compiler: hosting cannot be traced, so it breaks the graph."""
    from kvcompress import press

    ids = prompt(70)["input_ids"]
    compiled = by_wrapper(model, backend="eager", fullgraph=True)
    with (
        press(compiled, POLICIES[0]),
        pytest.raises(torch._dynamo.exc.Unsupported),
    ):
        loop(compiled, ids)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "policy", "call"),
    [
        *((way, POLICIES[0], loop) for way in WAYS),
        *((way, POLICIES[0], generate) for way in WAYS if way is not by_wrapper),
        (by_compile, POLICIES[1], loop),
        (by_forward, POLICIES[1], generate),
    ],
)
def test_before_and_inside_and_after(model, prompt, way, policy, call):
    from kvcompress import press
    from kvcompress.testing import tiny_model

    ids = prompt(70)["input_ids"]
    plain, compressed = answers(model, ids, policy)
    compiled = way(model, backend="eager")
    with press(compiled, policy):
        assert torch.equal(call(compiled, ids), compressed)
    assert torch.equal(call(compiled, ids), plain)
    with press(compiled, policy):
        assert torch.equal(call(compiled, ids), compressed)
    torch._dynamo.reset()
    other = tiny_model(num_hidden_layers=1)
    with press(other, policy):
        compiled = way(other, backend="eager")
        assert torch.equal(call(compiled, ids), compressed)
    assert torch.equal(call(compiled, ids), plain)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "call"), [*((way, loop) for way in WAYS), (by_forward, generate)])
def test_hook_free(model, prompt, way, call):
    from kvcompress import CompressedCache

    ids = prompt(70)["input_ids"]
    expected = [answers(model, ids, policy) for policy in POLICIES]
    compiled = way(model, backend="eager")
    for policy, (plain, compressed) in zip(POLICIES, expected, strict=True):
        cache = CompressedCache(compiled, policy, prompt_length=70)
        assert torch.equal(call(compiled, ids, cache), compressed)
        assert torch.equal(call(compiled, ids), plain)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor(model, prompt):
    from kvcompress import press

    ids = prompt(70)["input_ids"]
    plain, compressed = answers(model, ids, POLICIES[0])
    compiled = by_compile(model)
    with press(compiled, POLICIES[0]):
        assert torch.equal(loop(compiled, ids), compressed)
    assert torch.equal(loop(compiled, ids), plain)
