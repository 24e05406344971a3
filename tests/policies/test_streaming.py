"""StreamingLLM with positions in the cache: keys move, and only those that must."""

import pytest
import torch


def rotated(key, delta, speeds=None):
    """Llama's rotation by `delta` positions, in float64."""
    if speeds is None:
        dim = key.shape[-1]
        speeds = 10000.0 ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = delta[..., None].double() * speeds
    cos, sin = angles.cos().repeat(1, 1, 1, 2), angles.sin().repeat(1, 1, 1, 2)
    first, second = key.double().chunk(2, dim=-1)
    return key.double() * cos + torch.cat([-second, first], dim=-1) * sin


@pytest.fixture
def originals(monkeypatch):
    """Every key that a layer is given, by layer."""
    from kvcompress.cache import KVLayer

    seen = {}
    update = KVLayer.update

    def record(layer, keys, values, *args, **options):
        known = seen.get(layer.index)
        seen[layer.index] = keys if known is None else torch.cat([known, keys], dim=2)
        return update(layer, keys, values, *args, **options)

    monkeypatch.setattr(KVLayer, "update", record)
    return seen


@pytest.mark.parametrize("n_sink", [0, 3])
@pytest.mark.parametrize("lengths", [(50,), (50, 33, 24)], ids=["single", "padded"])
@pytest.mark.parametrize("interval", [1, 4])
def test_every_row_is_as_far_from_the_newest_as_its_place(
    make_model, prompt, originals, n_sink, lengths, interval
):
    from kvcompress import press

    model = make_model()
    spec = f"streaming_llm:capacity=20:n_sink={n_sink}:positions=cache:interval={interval}"
    with press(model, spec):
        output = model.generate(
            **prompt(*lengths), max_new_tokens=30, do_sample=False, return_dict_in_generate=True
        )
    moved = 0
    for layer in output.past_key_values.layers:
        seen, held = layer.get_seq_length(), layer.keys.shape[2]
        place = torch.arange(seen - held, seen)
        columns = layer.columns
        index = columns[..., None].expand(*columns.shape, layer.keys.shape[3])
        given = originals[layer.index].gather(2, index)
        expected = rotated(given, place - columns)
        real = layer.positions >= 0
        torch.testing.assert_close(layer.keys.double()[real], expected[real], atol=1e-5, rtol=1e-5)
        changed = (layer.keys != given).any(dim=-1)
        moved += int(changed.sum())
        # All but the sinks are where they were, bit for bit.
        assert not (changed & (layer.positions >= n_sink)).any()
    assert (moved > 0) == (n_sink > 0)


def test_attention_of_the_first_layer_is_that_of_a_short_text(make_model, prompt):
    """What is fed after an eviction attends as if the kept tokens were all there ever was."""
    from kvcompress import press

    model = make_model(num_hidden_layers=1)
    ids = prompt(300)["input_ids"]
    spec = "streaming_llm:capacity=20:n_sink=4:positions=cache"
    with press(model, spec), torch.no_grad():
        cache = None
        for piece in ids[:, :280].split(20, dim=1):
            given = {} if cache is None else {"past_key_values": cache}
            cache = model(piece, **given).past_key_values
        ours = model(ids[:, 280:], past_key_values=cache).logits
    short = torch.cat([ids[:, :4], ids[:, 264:]], dim=1)
    with torch.no_grad():
        theirs = model(short).logits[:, 20:]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    with press(model, spec.replace("cache", "original")), torch.no_grad():
        cache = model(ids[:, :280]).past_key_values
        original = model(ids[:, 280:], past_key_values=cache).logits
    assert (original - theirs).abs().max() > 1e-2


def test_nothing_adds_up_over_a_long_stream_in_half_precision(prompt):
    """Sinks are always moved from their first keys."""
    from kvcompress import CompressedCache
    from kvcompress.testing import tiny_model

    model = tiny_model().to(torch.bfloat16)
    spec = "streaming_llm:capacity=20:n_sink=4:positions=cache"
    ids = prompt(400)["input_ids"]
    cache = CompressedCache(model, spec, prompt_length=10)
    with torch.no_grad():
        model(ids[:, :10], past_key_values=cache)
        first = cache.layers[0].keys[:, :, :4].clone()
        for token in ids[:, 10:].split(1, dim=1):
            model(token, past_key_values=cache)
    speeds = model.model.rotary_emb.inv_freq.double()  # rounded with the model
    expected = rotated(first, torch.full((1, 2, 4), 400 - 20), speeds)
    error = (cache.layers[0].keys[:, :, :4].double() - expected).abs().max()
    assert error <= first.abs().max() * 2**-8  # one rounding, not 380


@pytest.mark.parametrize(
    ("family", "config", "word"),
    [
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ("gpt2", {"n_positions": 64}, "rotary"),
    ],
)
def test_models_whose_keys_cannot_be_moved_are_refused_at_once(make_model, family, config, word):
    from kvcompress import CompressedCache, UnsupportedModelError, press

    if "rope_parameters" in config:
        config = {"rope_parameters": {**config["rope_parameters"], "rope_theta": 10000.0}}
    if family == "gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel

        model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=50))
    else:
        from kvcompress.testing import tiny_model

        model = tiny_model(family, **config)
    for host in (press, CompressedCache):
        with pytest.raises(UnsupportedModelError, match=word) as caught:
            host(model, "streaming_llm:capacity=20:positions=cache")
        assert "positions='original'" in str(caught.value)
    press(model, "streaming_llm:capacity=20")
