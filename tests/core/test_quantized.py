"""Compress, then quantize: what stays of a prompt is packed by transformers' quantized layers."""

import copy

import pytest
import torch

pytestmark = pytest.mark.usefixtures("one_thread")

POLICY = "snapkv:capacity=24:window_size=6"
GROUPS = {"nbits": 4, "q_group_size": 16, "residual_length": 16}


@pytest.fixture(params=["fp8", "quanto"])
def backend(request):
    """Settings of `QuantizedCache`, for backends that are there."""
    from transformers import cache_utils

    if request.param == "fp8":
        if not hasattr(cache_utils, "Fp8QuantizedLayer"):
            pytest.skip("this transformers has no fp8 cache")
        return {"backend": "fp8"}
    pytest.importorskip("optimum.quanto")
    return {"backend": "quanto", **GROUPS}


def codec(backend, model):
    from transformers import QuantizedCache

    return QuantizedCache(config=model.config, **backend).layers[0]


def packed(layer, rows, kind):
    """What is left of rows after a round trip."""
    from transformers.cache_utils import DynamicLayer

    if not layer.is_initialized:
        DynamicLayer.lazy_initialization(layer, rows, rows)
    axis = [getattr(layer, f"axis_{kind}")] if hasattr(layer, f"axis_{kind}") else []
    return layer._dequantize(layer._quantize(rows.contiguous(), *axis))


def positions_of(mask):
    return (mask.cumsum(dim=1) - 1).clamp(min=0)


def generate(model, inputs, backend, tokens=12, **options):
    return model.generate(
        **inputs,
        max_new_tokens=tokens,
        do_sample=False,
        cache_implementation="quantized",
        cache_config=dict(backend),  # which old releases add to
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )


@pytest.mark.parametrize("lengths", [(70,), (70, 41, 18)], ids=["single", "padded"])
def test_rows_are_chosen_first_and_rounded_then(make_model, prompt, backend, lengths):
    """As an unquantized compressed cache whose rows are rounded once, when the prompt ends."""
    from kvcompress import CompressedCache, press

    model, inputs = make_model(), prompt(*lengths)
    with press(model, POLICY) as session:
        ours = generate(model, inputs, backend)
    cache = CompressedCache(model, POLICY, prompt_length=70)
    mask = inputs["attention_mask"]
    with torch.no_grad():
        positions = positions_of(mask)
        logits = [model(**inputs, position_ids=positions, past_key_values=cache).logits[:, -1]]
        for layer in cache.layers:
            rounder = codec(backend, model)
            layer.rows.keys.copy_(packed(rounder, layer.keys, "key"))
            layer.rows.values.copy_(packed(rounder, layer.values, "value"))
        for step in range(11):
            token = ours.sequences[:, 70 + step, None]
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
            positions = positions_of(mask)[:, -1:]
            output = model(
                token, attention_mask=mask, position_ids=positions, past_key_values=cache
            )
            logits.append(output.logits[:, -1])
    for a, b in zip(ours.logits, logits, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    report = session.report()
    assert {layer.held_tokens for layer in report.layers} == {24 + 11}
    assert report.held_bytes <= report.allocated_bytes < 0.7 * cache.report().held_bytes


def test_a_prompt_within_the_budget_is_quantized_too(make_model, prompt, backend):
    from kvcompress import press

    model = make_model()
    with press(model, "snapkv:capacity=100"):
        cache = generate(model, prompt(70), backend, tokens=2).past_key_values
    rows = cache.layers[1].rows
    assert rows._packed_rows == 70 and rows.counts.held == 71


def test_new_rows_are_packed_as_pieces(make_model, prompt, backend):
    from kvcompress import press

    model = make_model()
    with press(model, POLICY):
        cache = generate(model, prompt(70), backend, tokens=140).past_key_values
    rows = cache.layers[0].rows
    residual = backend.get("residual_length", 128)
    assert len(rows._packed) == 1 + 139 // residual
    assert rows._packed_rows == 24 + 139 // residual * residual
    assert cache.layers[0].positions.shape[-1] == rows.keys.shape[2] == 24 + 139


def test_later_turns(make_model, prompt, backend):
    from kvcompress import press

    model, inputs = make_model(), prompt(70)
    with press(model, POLICY) as session:
        first = generate(model, inputs, backend)
        more = torch.cat([first.sequences, prompt(9, seed=3)["input_ids"]], dim=1)
        model.generate(
            more,
            attention_mask=torch.ones_like(more),
            past_key_values=first.past_key_values,
            max_new_tokens=4,
            do_sample=False,
        )
    assert {layer.held_tokens for layer in session.report().layers} == {24 + 3}
    assert {layer.seen_tokens for layer in session.report().layers} == {70 + 12 + 9 + 3}


def test_beams_reorder_what_is_packed(make_model, prompt, backend):
    from kvcompress import press

    model, inputs = make_model(), prompt(70, 44)
    with press(model, POLICY):
        cache = generate(model, inputs, backend, tokens=3).past_key_values
        generate(model, inputs, backend, num_beams=3)
    rows, order = cache.layers[1].rows, torch.tensor([1, 0, 1])
    keys, values = rows.keys, rows.values
    copied = copy.deepcopy(cache)
    cache.batch_select_indices(order)
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    order = order[torch.tensor([2, 0, 1])]
    assert torch.equal(rows.keys, keys[order]) and torch.equal(rows.values, values[order])
    assert torch.equal(copied.layers[1].keys, keys)


def test_drafts_equal_greedy(make_model, prompt, backend):
    from transformers import cache_utils

    from kvcompress import press

    if not hasattr(cache_utils, "Fp8QuantizedLayer"):
        pytest.skip("this transformers takes a plain cache where there are drafts")
    model, inputs = make_model(), prompt(70)
    with press(model, POLICY):
        greedy = generate(model, inputs, backend, tokens=30)
        drafts = generate(model, inputs, backend, tokens=30, prompt_lookup_num_tokens=3)
    assert torch.equal(greedy.sequences[:, :80], drafts.sequences[:, :80])


def test_taking_back_more_than_is_unpacked(make_model, prompt, backend):
    from kvcompress import press

    model = make_model()
    with press(model, POLICY):
        cache = generate(model, prompt(70), backend, tokens=30).past_key_values
    rows = cache.layers[0].rows
    keys = rows.keys
    cache.crop(-20)
    assert torch.equal(rows.keys, keys[:, :, :-20]) and cache.get_seq_length() == 99 - 20


def test_reset_and_reuse(make_model, prompt, backend):
    from transformers import QuantizedCache

    from kvcompress import press

    model, inputs = make_model(), prompt(70)
    cache = QuantizedCache(config=model.config, **backend)
    with press(model, POLICY), torch.no_grad():
        first = model(**inputs, past_key_values=cache).logits
        keys = cache.layers[0].keys
        cache.reset()
        assert torch.equal(model(**inputs, past_key_values=cache).logits, first)
        assert torch.equal(cache.layers[0].keys, keys)


@pytest.mark.parametrize("policy", ["h2o:capacity=24", f"{POLICY}+tova:capacity=30"])
def test_policies_that_go_on_evicting_are_refused(make_model, prompt, backend, policy):
    from kvcompress import UnsupportedCacheError, press

    model = make_model()
    with (
        press(model, policy),
        pytest.raises(UnsupportedCacheError, match=r"goes on evicting.*such as snapkv"),
    ):
        generate(model, prompt(70), backend)


def test_a_quantized_cache_that_was_filled_before_is_refused(make_model, prompt, backend):
    from transformers import QuantizedCache

    from kvcompress import UnsupportedCacheError, press

    model, inputs = make_model(), prompt(70)
    cache = QuantizedCache(config=model.config, **backend)
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
        with (
            press(model, POLICY),
            pytest.raises(UnsupportedCacheError, match=r"filled before"),
        ):
            model(prompt(3)["input_ids"], past_key_values=cache)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="offloading needs CUDA")
def test_offloading(prompt):
    from kvcompress import press
    from kvcompress.testing import tiny_model

    model = tiny_model().cuda()
    inputs = {name: tensor.cuda() for name, tensor in prompt(70, 41).items()}
    options = {"max_new_tokens": 12, "do_sample": False}
    with press(model, POLICY):
        ours = model.generate(**inputs, **options, cache_implementation="offloaded")
        assert torch.equal(ours, model.generate(**inputs, **options))


def test_rows_that_are_elsewhere_are_brought_back_to_be_evicted(make_model, prompt):
    """Offloading without an accelerator: the CPU stands for both places."""
    from kvcompress import CompressedCache
    from kvcompress.rows import Rows

    model, moved = make_model(), []
    original = Rows.move, Rows.away

    def move(self, device):
        moved.append((self.counts.layer_idx, str(device)))

    cache = CompressedCache(model, POLICY, prompt_length=70)
    Rows.move, Rows.away = move, property(lambda self: True)
    try:
        cache.layers[1].offload()
        cache.layers[1].prefetch()
        with torch.no_grad():
            model(**prompt(70), past_key_values=cache)
    finally:
        Rows.move, Rows.away = original
    assert moved[:2] == [(1, "cpu"), (1, "cpu")]
    assert moved[2:] == [(layer, "cpu") for layer in range(3) for _ in range(2)]
