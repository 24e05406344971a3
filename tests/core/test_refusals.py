"""Contract 9: what cannot be right raises before any token, and the model works afterwards."""

import pytest
import torch

POLICY = "snapkv:capacity=24:window_size=6"


def test_encoder_decoder_is_refused(no_trace):
    from transformers import T5Config, T5ForConditionalGeneration

    from kvcompress import CompressedCache, UnsupportedModelError, press

    model = T5ForConditionalGeneration(
        T5Config(d_model=32, d_ff=32, num_layers=1, num_heads=2, d_kv=16, vocab_size=50)
    )
    for use in (press, CompressedCache):
        with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
            use(model, POLICY)


def test_attention_of_its_own_is_refused(prompt, no_trace):
    from transformers import FalconConfig, FalconForCausalLM

    from kvcompress import UnsupportedModelError, press

    model = FalconForCausalLM(
        FalconConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=101)
    ).eval()
    with pytest.raises(UnsupportedModelError, match="attention code of its own"):
        press(model, POLICY)
    model.generate(**prompt(40), max_new_tokens=2, do_sample=False, pad_token_id=0)


@pytest.mark.parametrize("layers", [1, 3])
def test_model_that_claims_support_and_bypasses_is_refused(prompt, layers, monkeypatch, no_trace):
    """The dynamic check: a layer that is updated and whose attention never passes the seam."""
    from transformers import FalconConfig, FalconForCausalLM

    from kvcompress import UnsupportedModelError, press

    model = FalconForCausalLM(
        FalconConfig(
            hidden_size=32, num_hidden_layers=layers, num_attention_heads=4, vocab_size=101
        )
    ).eval()
    monkeypatch.setattr(type(model.transformer), "_supports_attention_backend", True)
    options = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(**prompt(40), **options)
    with press(model, POLICY), pytest.raises(UnsupportedModelError, match="layer 0"):
        model.generate(**prompt(40), **options)
    assert torch.equal(model.generate(**prompt(40), **options), plain)


def test_sliding_windows_only_is_refused():
    from kvcompress import UnsupportedModelError, press
    from kvcompress.testing import tiny_model

    model = tiny_model("mistral", sliding_window=16)
    with pytest.raises(UnsupportedModelError, match="nothing to compress"):
        press(model, POLICY)


def test_not_a_transformers_model_is_refused():
    from kvcompress import UnsupportedModelError, press

    with pytest.raises(UnsupportedModelError, match="PreTrainedModel"):
        press(torch.nn.Linear(2, 2), POLICY)


@pytest.mark.parametrize("implementation", ["static", "offloaded_static"])
def test_static_caches_are_refused(make_model, prompt, implementation, no_trace):
    from kvcompress import UnsupportedCacheError, press

    model, inputs = make_model(), prompt(40)
    options = {"max_new_tokens": 3, "do_sample": False}
    plain = model.generate(**inputs, **options)
    with press(model, POLICY), pytest.raises(UnsupportedCacheError, match="StaticCache"):
        model.generate(**inputs, **options, cache_implementation=implementation)
    assert torch.equal(model.generate(**inputs, **options), plain)


def test_caches_that_are_none_of_transformers_are_refused(make_model, prompt):
    """Not replaced by an empty one, which would lose what was given."""
    from kvcompress import UnsupportedCacheError, press

    key = torch.zeros(1, 2, 5, 8)
    with press(make_model(), POLICY), pytest.raises(UnsupportedCacheError, match="A tuple"):
        make_model()(**prompt(40), past_key_values=((key, key),) * 3)


def test_continuous_batching_is_refused(make_model, no_trace):
    from kvcompress import UnsupportedModeError, press

    with press(make_model(), POLICY), pytest.raises(UnsupportedModeError, match="left-padded"):
        make_model().generate_batch([[5, 6, 7]], max_new_tokens=2)


def test_use_cache_false_is_refused_in_generate(make_model, prompt):
    from kvcompress import UnsupportedModeError, press

    with press(make_model(), POLICY), pytest.raises(UnsupportedModeError, match="use_cache"):
        make_model().generate(**prompt(40), max_new_tokens=3, use_cache=False)


def test_contexts_do_not_nest(make_model, prompt):
    from kvcompress import PressStateError, press

    model = make_model()
    with press(model, POLICY) as session:
        for inner in (model, model.model):
            with pytest.raises(PressStateError, match="do not nest"), press(inner, POLICY):
                raise AssertionError("not reached")
        model.generate(**prompt(40), max_new_tokens=2)
    assert session.report().layers[0].held_tokens == 25
    with press(model, POLICY):
        model.generate(**prompt(40), max_new_tokens=2)


def test_two_models_side_by_side(make_model, prompt):
    from kvcompress import press

    one, two = make_model(), make_model("qwen3")
    with press(one, POLICY) as first, press(two, POLICY) as second:
        one.generate(**prompt(40), max_new_tokens=2)
        two.generate(**prompt(50), max_new_tokens=2)
    assert first.report().layers[0].seen_tokens == 41
    assert second.report().layers[0].seen_tokens == 51


def test_another_policy_for_a_hosted_cache_is_refused(make_model, prompt):
    from kvcompress import CompressedCache, PressStateError, press

    model = make_model()
    cache = CompressedCache(model, POLICY)
    with press(model, "snapkv"), pytest.raises(PressStateError, match="stays with its cache"):
        model.generate(**prompt(40), max_new_tokens=2, past_key_values=cache)


@pytest.mark.parametrize("side", ["right", "middle"])
def test_padding_elsewhere_is_refused(make_model, prompt, side):
    from kvcompress import UnsupportedModeError, press

    model, inputs = make_model(), prompt(40, 40)
    inputs["attention_mask"][1, -3:] = 0
    if side == "middle":
        inputs["attention_mask"][1] = 1
        inputs["attention_mask"][1, 10:14] = 0
    for attn in ("sdpa", "eager"):
        with (
            press(make_model("llama", attn), POLICY),
            torch.no_grad(),
            pytest.raises(UnsupportedModeError, match="padding_side"),
        ):
            make_model("llama", attn)(**inputs)
    assert model is make_model()


def test_ratio_with_unequal_rows_is_refused(make_model, prompt):
    from kvcompress import UnsupportedModeError, press

    with (
        press(make_model(), "snapkv:keep_ratio=0.5:window_size=4"),
        pytest.raises(UnsupportedModeError, match="30 to 40 tokens"),
    ):
        make_model().generate(**prompt(40, 30), max_new_tokens=2)


def test_ratio_at_decode_with_unequal_rows_is_refused(make_model, prompt):
    """Both prompts are kept whole, but the shorter row alone would evict sooner."""
    from kvcompress import UnsupportedModeError, press

    with (
        press(make_model(), "h2o:keep_ratio=1.0"),
        pytest.raises(UnsupportedModeError, match="30 to 40 tokens"),
    ):
        make_model().generate(**prompt(40, 30), max_new_tokens=2)


def test_ratio_of_equal_padded_rows(make_model, prompt):
    """Padding does not count: 40 real tokens of 45 keep 20."""
    from kvcompress import press

    batch = prompt(40, 40)
    padded = {name: torch.nn.functional.pad(rows, (5, 0)) for name, rows in batch.items()}
    with press(make_model(), "snapkv:keep_ratio=0.5:window_size=4") as session, torch.no_grad():
        make_model()(**padded)
    assert session.report().layers[0].held_tokens == 20


def test_lists_that_do_not_fit_the_model(make_model):
    from kvcompress import CompressedCache, PolicyConfigError, press

    for use in (press, CompressedCache):
        with pytest.raises(PolicyConfigError, match="3 full-attention layers"):
            use(make_model(), "snapkv:capacity=64/48")


def test_a_cache_of_another_batch_size(make_model, prompt):
    from kvcompress import UnsupportedModeError, press

    model = make_model()
    with press(model, POLICY), torch.no_grad():
        cache = model(**prompt(40)).past_key_values
        with pytest.raises(UnsupportedModeError, match="batch_repeat_interleave"):
            model(torch.ones(3, 2, dtype=torch.long), past_key_values=cache)
        cache.batch_repeat_interleave(3)
        model(torch.ones(3, 2, dtype=torch.long), past_key_values=cache)


def test_generate_that_cannot_reach_the_context(make_model, prompt):
    """A forward that skips module hooks, as compiled ones do, is not silently uncompressed."""
    from kvcompress import UnsupportedModeError, press

    model = make_model()
    with press(model, POLICY):
        hooks, model._forward_pre_hooks = model._forward_pre_hooks, {}
        inner, model.model._forward_pre_hooks = model.model._forward_pre_hooks, {}
        try:
            with pytest.raises(UnsupportedModeError, match="nothing was compressed"):
                model.generate(**prompt(40), max_new_tokens=2)
        finally:
            model._forward_pre_hooks, model.model._forward_pre_hooks = hooks, inner


def test_prefilled_cache_is_adopted_and_other_caches_are_not(make_model, prompt):
    from transformers import DynamicCache

    from kvcompress import UnsupportedCacheError, press

    model, inputs = make_model(), prompt(70)
    with torch.no_grad():
        cache = model(inputs["input_ids"][:, :40], past_key_values=DynamicCache()).past_key_values
    with press(model, POLICY) as session:
        adopted = model.generate(**inputs, max_new_tokens=4, past_key_values=cache)
        whole = model.generate(**inputs, max_new_tokens=4)
    assert torch.equal(adopted, whole)
    assert session.reports[0].layers[0].held_tokens == 24 + 3

    batch = prompt(70, 55)
    with torch.no_grad():
        cache = model(
            batch["input_ids"][:, :40],
            attention_mask=batch["attention_mask"][:, :40],
            position_ids=(batch["attention_mask"].cumsum(1) - 1).clamp(min=0)[:, :40],
            past_key_values=DynamicCache(),
        ).past_key_values
    with press(model, POLICY):
        adopted = model.generate(**batch, max_new_tokens=4, past_key_values=cache)
        assert torch.equal(adopted, model.generate(**batch, max_new_tokens=4))

    with torch.no_grad():
        cache = model(inputs["input_ids"][:, :40], past_key_values=DynamicCache()).past_key_values
    with (
        press(model, "h2o:capacity=24"),
        pytest.raises(UnsupportedCacheError, match="40 tokens that it was not shown"),
    ):
        model.generate(**inputs, max_new_tokens=2, past_key_values=cache)

    class Mine(DynamicCache):
        pass

    with press(model, POLICY), pytest.raises(UnsupportedCacheError, match="Mine"):
        model.generate(**inputs, max_new_tokens=2, past_key_values=Mine(config=model.config))


def test_capacity_must_exceed_what_is_always_kept(make_model):
    import torch as _torch

    from kvcompress import Policy, PolicyConfigError, press

    class Keeper(Policy):
        name = "keeper"

        def protected_tokens(self, layer_idx, num_layers):
            return 8

        def scores(self, view):
            return _torch.zeros_like(view.positions, dtype=_torch.float32)

    with pytest.raises(PolicyConfigError, match="capacity=8 in layer 0 leaves no room"):
        press(make_model(), Keeper(capacity=8))
    press(make_model(), Keeper(capacity=9))


def test_untried_transformers_is_logged_once(make_model, monkeypatch):
    from kvcompress import hosting

    said = []
    monkeypatch.setattr(hosting.transformers, "__version__", "5.99.0")
    monkeypatch.setattr(hosting.logger, "warning", lambda *message: said.append(message))
    hosting._note_version.cache_clear()
    try:
        hosting.hostable_model(make_model())
        hosting.hostable_model(make_model())
    finally:
        hosting._note_version.cache_clear()
    assert len(said) == 1 and said[0][1:] == ("5.4", "5.24", "5.99.0")
