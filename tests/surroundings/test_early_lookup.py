"""`model.generate` that was looked up before there was a context or a cache."""

import gc

import pytest
import torch

pytestmark = pytest.mark.usefixtures("one_thread")

# Prompt lookup in older transformers needs an end token.
GREEDY = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": 100}
POLICY = "snapkv:capacity=24:window_size=6"


MODES = {
    "chunks": {"prefill_chunk_size": 23},  # the last chunk is a token
    "lookup": {"prompt_lookup_num_tokens": 3},
    "assistant": {"assistant_model": None},
}


@pytest.mark.parametrize("policy", [POLICY, "h2o:capacity=24"])
@pytest.mark.parametrize("mode", MODES)
def test_a_cache_among_the_arguments(make_model, prompt, mode, policy):
    """Python looks up the method, then makes the cache."""
    from kvcompress import CompressedCache, UnsupportedModeError
    from kvcompress.attention import _leases

    model, inputs, more = make_model(), prompt(70), dict(MODES[mode])
    if mode == "assistant":
        more = {"assistant_model": make_model(num_hidden_layers=1)}
    expected = model.generate(**inputs, **GREEDY, past_key_values=CompressedCache(model, policy))
    gc.collect()
    assert not _leases

    def at_once():
        return model.generate(
            **inputs, **GREEDY, **more, past_key_values=CompressedCache(model, policy)
        )

    if mode != "chunks" and policy != POLICY:
        with pytest.raises(UnsupportedModeError, match="while decoding"):
            at_once()
        return
    assert torch.equal(at_once(), expected)


def test_a_bound_method_in_a_context(make_model, prompt):
    from kvcompress import UnsupportedModeError, press

    model, inputs = make_model(), prompt(70)
    gc.collect()
    early = model.generate
    with press(model, POLICY):
        expected = model.generate(**inputs, **GREEDY)
        assert torch.equal(early(**inputs, **GREEDY, prefill_chunk_size=23), expected)
        with pytest.raises(UnsupportedModeError, match="use_cache=False"):
            early(**inputs, **GREEDY, use_cache=False)


def test_a_method_that_was_bound_before_the_import_is_refused(make_model, prompt):
    from transformers import GenerationMixin

    from kvcompress import CompressedCache, PressStateError, press

    model, inputs = make_model(), prompt(70)
    early = GenerationMixin.generate.__wrapped__.__get__(model)
    plain = model.generate(**inputs, **GREEDY)
    cache = CompressedCache(model, POLICY)
    assert torch.equal(early(**inputs, **GREEDY), plain)
    with pytest.raises(PressStateError, match="looked up before kvcompress was ready"):
        early(**inputs, **GREEDY, past_key_values=cache)
    assert cache.get_seq_length() == 0
    with press(model, POLICY), pytest.raises(PressStateError, match="looked up before"):
        early(**inputs, **GREEDY, use_cache=False)
    assert torch.equal(early(**inputs, **GREEDY), plain)
