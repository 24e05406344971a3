"""Gradients, inference mode and half precision."""

import functools

import pytest
import torch

pytestmark = pytest.mark.usefixtures("one_thread")

POLICIES = [
    "snapkv:capacity=24:window_size=6",
    "tova:capacity=24",
    "h2o:capacity=24:interval=2",
    "streaming_llm:capacity=24",
    "snapkv:capacity=24:window_size=6+h2o:capacity=3:scope=generated",
]
MOVING = "streaming_llm:capacity=24:positions=cache"


def loss_of(model, cache, ids, targets, inputs):
    """A compressed prompt, then tokens one by one."""
    logits = [model(**inputs, past_key_values=cache).logits[:, -1]]
    for token in ids:
        logits.append(model(token[None, None], past_key_values=cache).logits[:, -1])
    return torch.nn.functional.cross_entropy(torch.cat(logits), targets)


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("policy", "train"), [*((policy, False) for policy in POLICIES), (POLICIES[2], True)]
)
def test_gradients_equal_the_oracles(prompt, policy, train):
    from transformers import DynamicCache

    from kvcompress import press
    from kvcompress.testing import oracle, record, tiny_model

    model, inputs = tiny_model().train(train), prompt(70)
    ids, targets = torch.randint(1, 101, (5,)), torch.randint(1, 101, (6,))
    with press(model, policy) as session, record(session) as evictions:
        loss = loss_of(model, DynamicCache(config=model.config), ids, targets, inputs)
        loss.backward()
    assert evictions.evicted(0) > 0
    ours = gradients(model)
    model.zero_grad()
    with oracle(model, evictions):
        theirs = loss_of(model, DynamicCache(config=model.config), ids, targets, inputs)
        theirs.backward()
    assert abs(float(loss.detach() - theirs.detach())) < 1e-5
    expected = gradients(model)
    assert ours.keys() == expected.keys()
    for name, grad in expected.items():
        assert (ours[name] - grad).abs().max() < 1e-4 * max(1.0, float(grad.abs().max())), name


def test_gradients_with_moved_keys(prompt):
    """Against differences of the loss: rows that move cannot be masked out of a plain cache."""
    from kvcompress import CompressedCache
    from kvcompress.testing import tiny_model

    model, inputs = tiny_model().double(), prompt(40)
    ids, targets = torch.randint(1, 101, (4,)), torch.randint(1, 101, (5,))

    def loss():
        cache = CompressedCache(model, MOVING, prompt_length=40)
        return loss_of(model, cache, ids, targets, inputs)

    loss().backward()
    step = 3e-4  # norms are in float32 in any dtype
    for name in ("k_proj", "q_proj", "v_proj"):
        weight = getattr(model.model.layers[0].self_attn, name).weight
        direction = torch.randn_like(weight)
        slope = float((weight.grad * direction).sum())
        with torch.no_grad():
            weight += step * direction
            up = float(loss())
            weight -= 2 * step * direction
            down = float(loss())
            weight += step * direction
        assert slope == pytest.approx((up - down) / (2 * step), rel=5e-3, abs=1e-3), name


def test_a_training_step_with_activation_checkpointing(prompt):
    """Which keeps no cache: nothing is compressed, and nothing breaks."""
    from kvcompress import press
    from kvcompress.testing import tiny_model

    model, inputs = tiny_model().train(), prompt(70)
    for part in model.modules():
        if hasattr(part, "gradient_checkpointing"):  # what both names of the switch set
            part.gradient_checkpointing = True
            part._gradient_checkpointing_func = functools.partial(
                torch.utils.checkpoint.checkpoint, use_reentrant=False
            )
    plain = model(**inputs, labels=inputs["input_ids"]).loss
    with press(model, POLICIES[0]) as session:
        loss = model(**inputs, labels=inputs["input_ids"]).loss
        loss.backward()
    assert torch.equal(loss, plain)
    assert not session.reports


@pytest.mark.parametrize("policy", [*POLICIES, MOVING])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.enable_grad])
def test_modes_give_the_same(make_model, prompt, policy, mode):
    from kvcompress import CompressedCache

    model, inputs = make_model(), prompt(70, seed=6)
    tokens = torch.randint(1, 101, (8,))

    def run(first, then):
        cache = CompressedCache(model, policy, prompt_length=70)
        logits = []
        with first():
            logits.append(model(**inputs, past_key_values=cache).logits[:, -1])
            for token in tokens[:4]:
                logits.append(model(token[None, None], past_key_values=cache).logits[:, -1])
        with then():
            for token in tokens[4:]:
                logits.append(model(token[None, None], past_key_values=cache).logits[:, -1])
        return torch.cat([rows.detach().clone() for rows in logits]), cache

    expected, kept = run(torch.no_grad, torch.no_grad)
    for then in (mode, torch.no_grad):
        logits, cache = run(mode, then)
        assert (logits - expected).abs().max() < 1e-5
        for mine, its in zip(cache.layers, kept.layers, strict=True):
            assert torch.equal(mine.positions, its.positions)


@pytest.mark.parametrize("policy", [*POLICIES, MOVING, "knorm:capacity=24"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(prompt, policy, dtype):
    """Finite, in bounds, and mostly the rows that the same weights keep in float32."""
    from kvcompress import press
    from kvcompress.testing import tiny_model

    half = tiny_model(initializer_range=0.05).to(dtype)
    whole = tiny_model(initializer_range=0.05).to(dtype).float()
    inputs = prompt(70, 41)
    kept = []
    for model in (half, whole):
        with press(model, policy) as session, torch.no_grad():
            cache = model(**inputs).past_key_values
            kept.append([layer.positions.clone() for layer in cache.layers])
            step, mask = torch.tensor([[3], [4]]), inputs["attention_mask"]
            for _ in range(4):
                mask = torch.nn.functional.pad(mask, (0, 1), value=1)
                logits = model(step, attention_mask=mask, past_key_values=cache).logits
                assert logits.isfinite().all()
        assert {layer.held_tokens for layer in session.report().layers} <= {24, 25, 27, 28}
        assert cache.layers[0].keys.dtype == model.dtype
    for ours, theirs in zip(*kept, strict=True):
        same = [
            len(set(a.tolist()) & set(b.tolist()))
            for a, b in zip(ours.flatten(0, 1), theirs.flatten(0, 1), strict=True)
        ]
        assert min(same) >= 20, same
