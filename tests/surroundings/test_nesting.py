"""Models inside other modules, and models that share modules."""

import pytest
import torch

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = {"max_new_tokens": 8, "do_sample": False}
POLICY = "snapkv:capacity=24:window_size=6"


class Wrapper(torch.nn.Module):
    """Somebody's module around a model."""

    def __init__(self, *models):
        super().__init__()
        self.parts = torch.nn.ModuleList(models)
        self.head = torch.nn.Linear(101, 2)

    def forward(self, **inputs):
        return self.head(self.parts[0](**inputs).logits[:, -1])


def test_a_model_inside_a_module(prompt):
    from kvcompress import CompressedCache, press
    from kvcompress.testing import tiny_model

    model, inputs = tiny_model(), prompt(70)
    outer = Wrapper(model)
    with press(model, POLICY):
        expected = model.generate(**inputs, **GREEDY)
    with press(outer, POLICY) as session, torch.no_grad():
        outer(**inputs)
        assert torch.equal(outer.parts[0].generate(**inputs, **GREEDY), expected)
    assert [report.layers[0].held_tokens for report in session.reports] == [24, 24 + 7]
    cache = CompressedCache(outer, POLICY)
    assert torch.equal(model.generate(**inputs, **GREEDY, past_key_values=cache), expected)


def test_a_module_with_two_models_is_refused():
    from kvcompress import CompressedCache, UnsupportedModelError, press
    from kvcompress.testing import tiny_model

    outer = Wrapper(tiny_model(), tiny_model("qwen3"))
    for use in (press, CompressedCache):
        with pytest.raises(
            UnsupportedModelError, match=r"2 .*LlamaForCausalLM, Qwen3ForCausalLM.*Pass the one"
        ):
            use(outer, POLICY)
    twice = tiny_model()
    press(Wrapper(twice, twice), POLICY)


def test_a_decoder_with_two_heads(prompt):
    """Two models around one decoder: what passes the decoder is compressed, by either."""
    from transformers import LlamaForSequenceClassification

    from kvcompress import PressStateError, press
    from kvcompress.testing import tiny_model

    model, inputs = tiny_model(), prompt(70)
    other = LlamaForSequenceClassification(model.config).eval()
    other.model = model.model
    with torch.no_grad():
        plain = other(**inputs)
        with press(model, POLICY) as session:
            compressed = other(**inputs, use_cache=True)
            with pytest.raises(PressStateError, match="do not nest"), press(other, POLICY):
                raise AssertionError("not reached")
            model.generate(**inputs, **GREEDY)
        again = other(**inputs)
    assert torch.equal(compressed.logits, plain.logits)  # a prompt is attended to as a whole
    assert torch.equal(again.logits, plain.logits)
    assert [report.layers[0].held_tokens for report in session.reports] == [24, 24 + 7]


def test_layers_shared_by_two_decoders(prompt):
    """Only calls of the model in the context are compressed, though the layers are the same."""
    from kvcompress import press
    from kvcompress.testing import tiny_model

    one, two, inputs = tiny_model(), tiny_model(), prompt(70)
    two.model.layers = one.model.layers
    plain = one.generate(**inputs, **GREEDY)
    with press(one, POLICY) as session:
        compressed = one.generate(**inputs, **GREEDY)
        assert torch.equal(two.generate(**inputs, **GREEDY), plain)
        with press(two, "tova:capacity=24") as second:
            other = two.generate(**inputs, **GREEDY)
            assert torch.equal(one.generate(**inputs, **GREEDY), compressed)
    assert not torch.equal(compressed, plain) and not torch.equal(other, compressed)
    assert (len(session.reports), len(second.reports)) == (2, 1)
