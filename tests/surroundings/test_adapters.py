"""Models in the wrappers of PEFT and accelerate."""

import copy

import pytest
import torch

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # peft asks transformers by an old name.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning"),
]

GREEDY = {"max_new_tokens": 10, "do_sample": False}
VIRTUAL = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 7}
POLICIES = ["snapkv:capacity=24:window_size=6", "tova:capacity=24"]


def full(model, inputs, **more):
    return model.generate(
        **inputs, **GREEDY, **more, return_dict_in_generate=True, output_logits=True
    )


def assert_same(ours, theirs):
    assert torch.equal(ours.sequences, theirs.sequences)
    for a, b in zip(ours.logits, theirs.logits, strict=True):
        assert (a - b).abs().max() < 1e-4


@pytest.fixture(scope="module")
def lora():
    """A tiny llama with LoRA weights that change what it says."""
    peft = pytest.importorskip("peft")
    from kvcompress.testing import tiny_model

    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "k_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = peft.get_peft_model(tiny_model(), config).eval()
        for name, weight in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(weight, std=0.3)
    return model


@pytest.mark.parametrize("policy", POLICIES)
def test_lora_equals_the_merged_model_and_the_oracle(lora, prompt, policy):
    from kvcompress import press
    from kvcompress.testing import oracle, record

    inputs = prompt(70, 41)
    merged = copy.deepcopy(lora).merge_and_unload()
    with press(lora, policy) as session, record(session) as evictions:
        ours = full(lora, inputs)
    with press(merged, policy):
        assert_same(ours, full(merged, inputs))
    with oracle(lora.get_base_model(), evictions):
        assert_same(ours, full(lora, inputs))
    assert session.report().layers[0].seen_tokens == 79
    assert not torch.equal(ours.sequences, full(lora, inputs).sequences)


def test_lora_switched_off_and_hook_free(lora, prompt):
    from kvcompress import CompressedCache, press
    from kvcompress.testing import tiny_model

    inputs, base = prompt(70), tiny_model()
    with press(base, POLICIES[0]):
        without = full(base, inputs)
    with press(lora, POLICIES[0]):
        adapted = full(lora, inputs)
        with lora.disable_adapter():
            assert_same(full(lora, inputs), without)
        assert_same(full(lora, inputs), adapted)
    cache = CompressedCache(lora, POLICIES[0])
    assert_same(full(lora, inputs, past_key_values=cache), adapted)
    assert cache.report().layers[0].held_tokens == 24 + 9


def test_a_lora_model_is_pressed_once(lora):
    from kvcompress import PressStateError, press

    with (
        press(lora, POLICIES[0]),
        pytest.raises(PressStateError, match="do not nest"),
        press(lora.get_base_model(), POLICIES[0]),
    ):
        raise AssertionError("not reached")


@pytest.fixture
def prompt_learning():
    """Make a model with virtual tokens, where it works without compression."""
    peft = pytest.importorskip("peft")
    from kvcompress.session import cache_argument
    from kvcompress.testing import tiny_model

    model = tiny_model()
    if cache_argument(model) != "past_key_values":
        pytest.skip("this peft knows the cache of generate by its former name: a plain model's too")
    return lambda config: peft.get_peft_model(model, config(peft)).eval()


def assert_virtual_rows_are_rows(model, inputs):
    from kvcompress import press
    from kvcompress.testing import oracle, record

    with press(model, POLICIES[0]) as session, record(session) as evictions:
        ours = full(model, inputs)
    with oracle(model.get_base_model(), evictions):
        assert_same(ours, full(model, inputs))
    report = session.report()
    assert (report.layers[0].seen_tokens, report.layers[0].held_tokens) == (77 + 9, 24 + 9)


def test_virtual_tokens(prompt_learning, prompt):
    """Prompt tuning feeds embeddings before the prompt: they are rows like any other."""
    from kvcompress import UnsupportedModeError, press

    model, inputs = prompt_learning(lambda peft: peft.PromptTuningConfig(**VIRTUAL)), prompt(70)
    assert_virtual_rows_are_rows(model, inputs)
    # They come before the padding, which is then not at the left.
    with press(model, POLICIES[0]), pytest.raises(UnsupportedModeError, match="padding"):
        full(model, prompt(70, 41))


def test_virtual_rows(prompt_learning, prompt):
    """Prefix tuning hands every generate a cache that is filled already."""
    model, inputs = prompt_learning(lambda peft: peft.PrefixTuningConfig(**VIRTUAL)), prompt(70)
    assert_virtual_rows_are_rows(model, inputs)


def test_dispatched_model(prompt):
    accelerate = pytest.importorskip("accelerate")
    from kvcompress import CompressedCache, press
    from kvcompress.testing import tiny_model

    model, inputs = tiny_model(), prompt(70, 41)
    expected = []
    for policy in POLICIES:
        with press(model, policy):
            expected.append(full(model, inputs))
    parts = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    layers = {f"model.layers.{number}": "cpu" for number in range(3)}
    dispatched = accelerate.dispatch_model(
        tiny_model(),
        {**parts, **layers, "lm_head": "cpu"},
        main_device="cpu",
        force_hooks=True,
    )
    assert dispatched.model.layers[0]._hf_hook is not None
    for policy, its in zip(POLICIES, expected, strict=True):
        with press(dispatched, policy):
            assert_same(full(dispatched, inputs), its)
        cache = CompressedCache(dispatched, policy)
        assert_same(full(dispatched, inputs, past_key_values=cache), its)


@pytest.mark.filterwarnings("ignore:You are calling .generate:UserWarning")  # a device of meta
def test_model_offloaded_to_disk(prompt, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    from kvcompress import press
    from kvcompress.testing import tiny_model

    model, inputs = tiny_model(), prompt(70)
    with press(model, POLICIES[0]):
        expected = full(model, inputs)
    accelerate.disk_offload(model, tmp_path, execution_device="cpu")
    assert model.model.layers[0].self_attn.k_proj.weight.device.type == "meta"
    with press(model, POLICIES[0]):
        assert_same(full(model, inputs), expected)
