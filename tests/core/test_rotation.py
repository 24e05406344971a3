"""Moved keys are those that the model computes at the new positions, or there is an error."""

import copy
import itertools
import pickle

import pytest
import torch

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 1024,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
LINEAR = {"rope_type": "linear", "factor": 4.0}
MIXED = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
FULL_AND_LINEAR = ["full_attention", "full_attention", "linear_attention"]
MOE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
MLA = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}


def rope(**parameters):
    return {"rope_parameters": {"rope_theta": 10000.0, **parameters}}


def rope_by_type(**full):
    local = {"rope_type": "default", "rope_theta": 10000.0}
    full = {"rope_theta": 1000000.0, **full}
    return MIXED | {"rope_parameters": {"sliding_attention": local, "full_attention": full}}


# Name of the case, model type, config, layers without RoPE.
FAMILIES = [
    ("llama", "llama", {}, set()),
    ("llama-linear", "llama", rope(**LINEAR), set()),
    ("llama-yarn", "llama", rope(**YARN), set()),
    ("llama-llama3", "llama", rope(**LLAMA3), set()),
    ("mistral", "mistral", {"sliding_window": None}, set()),
    ("mixtral", "mixtral", {"sliding_window": None, "num_local_experts": 4}, set()),
    ("ministral3", "ministral3", {"head_dim": 8}, set()),
    ("phi3", "phi3", {}, set()),
    ("phi3-partial", "phi3", {"partial_rotary_factor": 0.5}, set()),
    ("phi", "phi", {}, set()),
    ("qwen2", "qwen2", {}, set()),
    ("qwen3", "qwen3", {"head_dim": 8}, set()),
    ("qwen3_moe", "qwen3_moe", {"head_dim": 8, "moe_intermediate_size": 32, **MOE}, set()),
    ("gemma", "gemma", {"head_dim": 8}, set()),
    ("gemma2", "gemma2", {"head_dim": 8, **MIXED}, set()),
    ("gemma3", "gemma3_text", {"head_dim": 8, **rope_by_type(**LINEAR)}, set()),
    ("cohere", "cohere", {}, set()),
    ("cohere2", "cohere2", MIXED, {1}),
    ("exaone4", "exaone4", {"sliding_window": 64, **MIXED}, {1}),
    ("smollm3", "smollm3", {"no_rope_layers": [1, 0, 1]}, {1}),
    ("glm4", "glm4", {"head_dim": 8}, set()),
    ("gpt_neox", "gpt_neox", {}, set()),
    ("gpt_oss", "gpt_oss", {"head_dim": 8, **MIXED, **MOE}, set()),
    ("olmo2", "olmo2", {}, set()),
    ("stablelm", "stablelm", {}, set()),
    ("granite", "granite", {}, set()),
    ("starcoder2", "starcoder2", {}, set()),
    ("seed_oss", "seed_oss", {"head_dim": 8}, set()),
    ("ernie4_5", "ernie4_5", {"head_dim": 8}, set()),
]

REFUSED = [
    ("dynamic", "llama", rope(**DYNAMIC), "'dynamic' depends on the length"),
    ("dynamic-by-type", "gemma3_text", rope_by_type(**DYNAMIC), "'dynamic' depends on the length"),
    ("longrope", "phi3", rope(**LONGROPE), "'longrope' depends on the length"),
    ("mla", "deepseek_v3", MLA, "latents"),
    ("learned", "gpt2", {}, "0 rotary modules"),
    ("complex", "llama4_text", {"intermediate_size_mlp": 64, **MOE}, "cosines"),
    ("several", "moshi", {}, "3 rotary modules"),
    ("optional", "olmo_hybrid", {"layer_types": FULL_AND_LINEAR}, "works without them"),
    ("normed-after", "hunyuan_v1_dense", {"head_dim": 8}, "moved keys of layer 0 are not"),
    (
        "other-tables",
        "gptj",
        {"n_embd": 64, "n_head": 4, "n_layer": 3, "rotary_dim": 8},
        "trying|0 rotary",
    ),
]


@pytest.fixture(scope="module")
def build():
    """A tiny model with weights that are not all ones and zeros; skips what this release lacks."""
    from huggingface_hub.errors import StrictDataclassFieldValidationError
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    from kvcompress.testing import tiny_model

    def make(family, **config):
        if family not in CONFIG_MAPPING_NAMES:
            pytest.skip(f"this release of transformers has no {family}")
        try:
            model = tiny_model(family, attn="eager", **config)
        except StrictDataclassFieldValidationError as error:
            if "expected int, got bool" not in str(error):
                raise
            pytest.skip(f"{family} of this release does not accept its own defaults")
        generator = torch.Generator().manual_seed(3)
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.data += 0.2 * torch.randn(weight.shape, generator=generator)
        return model

    return make


@pytest.fixture
def llama(build):
    from kvcompress.rotation import Rotation

    model = build("llama")
    return model, Rotation(model, range(3))


def keys_at(model, positions):
    """Keys of every layer for the same tokens at these positions, batch x n."""
    from transformers import DynamicCache

    ids = torch.arange(1, 1 + positions.numel()).view(positions.shape)
    cache = DynamicCache()
    with torch.no_grad():
        model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
        )
    return [layer.keys for layer in cache.layers]


def moved(rotation, keys, number, old, new):
    heads = keys[number].shape[1]
    old, new = (rows.unsqueeze(1).expand(-1, heads, -1) for rows in (old, new))
    return rotation.move(keys[number], number, old, new)


def state(model):
    """All that a model consists of, and what its modules know."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return (
        {name: (id(tensor), tensor.grad, tensor.clone()) for name, tensor in tensors.items()},
        {name: sorted(vars(module)) for name, module in model.named_modules()},
    )


def assert_same_state(before, after):
    assert before[1] == after[1]
    assert before[0].keys() == after[0].keys()
    for name, (identity, grad, tensor) in before[0].items():
        assert after[0][name][0] == identity, name
        assert grad is None and after[0][name][1] is None, name
        assert torch.equal(after[0][name][2], tensor), name


@pytest.mark.parametrize(
    ("family", "config", "nope"),
    [case[1:] for case in FAMILIES],
    ids=[case[0] for case in FAMILIES],
)
def test_moved_keys_are_the_models_own(build, family, config, nope):
    from kvcompress.rotation import Rotation

    model = build(family, **config)
    before = state(model)
    rotation = Rotation(model, range(3))
    assert_same_state(before, state(model))
    old = torch.stack([torch.arange(8), torch.arange(40, 48)])
    keys = keys_at(model, old)
    # Keys of the first layer depend on nothing but their token and its position.
    new = torch.tensor([[0, 9, 3, 800, 801, 2, 3000, 77], [5, 6, 47, 46, 1000, 1, 0, 4000]])
    want = keys_at(model, new)[0]
    assert not torch.allclose(keys[0], want, atol=1e-2)
    ours = moved(rotation, keys, 0, old, new)
    torch.testing.assert_close(ours, want, atol=1e-5, rtol=1e-5)
    back = moved(rotation, [ours], 0, new, old)
    torch.testing.assert_close(back, keys[0], atol=1e-5, rtol=1e-5)
    # Attention sees distances only, so keys of later layers turn if all positions shift alike.
    shifted = keys_at(model, old + 137)
    for number in range(3):
        ours = moved(rotation, keys, number, old, old + 137)
        torch.testing.assert_close(ours, shifted[number], atol=1e-4, rtol=1e-4)
        assert (ours is keys[number]) == (number in nope)


@pytest.mark.parametrize(
    ("family", "config", "words"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_what_cannot_be_moved_is_refused(build, family, config, words):
    from kvcompress import UnsupportedModelError
    from kvcompress.rotation import Rotation

    model = build(family, **config)
    before = state(model)
    with pytest.raises(UnsupportedModelError, match=words) as caught:
        Rotation(model, range(3))
    assert type(model).__name__ in str(caught.value)
    assert str(caught.value).endswith("Use positions='original'.")
    assert_same_state(before, state(model))


def test_three_axes_of_positions_are_refused():
    from transformers import Qwen2VLTextConfig, Qwen2VLTextModel

    from kvcompress import UnsupportedModelError
    from kvcompress.rotation import Rotation

    config = Qwen2VLTextConfig(
        vocab_size=101,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        **rope(rope_type="default", mrope_section=[2, 1, 1]),
    )
    with pytest.raises(UnsupportedModelError, match="mrope_section"):
        Rotation(Qwen2VLTextModel(config), range(2))


def test_every_layer_is_tried(build):
    from kvcompress import UnsupportedModelError
    from kvcompress.rotation import Rotation

    model, calls = build("llama"), itertools.count()
    projection = model.model.layers[2].self_attn.k_proj
    projection.register_forward_hook(lambda module, args, output: output + next(calls))
    Rotation(model, [0, 1])
    with pytest.raises(UnsupportedModelError, match="moved keys of layer 2 are not"):
        Rotation(model, range(3))


def test_every_head_has_its_own_positions(llama):
    _, rotation = llama
    keys = torch.randn(2, 3, 5, 8)
    old, new = torch.randint(0, 3000, (2, 2, 3, 5))
    together = rotation.move(keys, 1, old, new)
    for row in range(2):
        for head in range(3):
            for item in range(5):
                one = row, head, item
                alone = (slice(row, row + 1), slice(head, head + 1), slice(item, item + 1))
                ours = rotation.move(keys[alone], 1, old[alone], new[alone])
                torch.testing.assert_close(ours[0, 0, 0], together[one], atol=1e-6, rtol=1e-6)


def test_numbers_count_in_the_given_layers(build):
    from kvcompress.rotation import Rotation

    model = build("cohere2", **MIXED)
    rotation = Rotation(model, [1, 2])
    keys, old = torch.randn(1, 2, 3, 8), torch.arange(3).expand(1, 2, 3)
    assert rotation.move(keys, 0, old, old + 5) is keys
    assert not torch.equal(rotation.move(keys, 1, old, old + 5), keys)


def test_far_positions(llama):
    """Float32 angles are coarse at a million; the model's own keys are as coarse as ours."""
    model, rotation = llama
    old, far = torch.arange(6)[None], torch.arange(1_000_000, 1_000_006)[None]
    near_keys, far_keys = keys_at(model, old), keys_at(model, far)
    there = moved(rotation, near_keys, 0, old, far)
    torch.testing.assert_close(there, far_keys[0], atol=1e-5, rtol=1e-5)
    back = moved(rotation, far_keys, 0, far, old)
    torch.testing.assert_close(back, near_keys[0], atol=1e-5, rtol=1e-5)


def test_many_small_moves_do_not_drift(llama):
    model, rotation = llama
    old = torch.arange(900_000, 900_004)[None]
    walking, wanted = keys_at(model, old)[0], keys_at(model, old + 300)[0]
    for step in range(300):
        walking = moved(rotation, [walking], 0, old + step, old + step + 1)
    torch.testing.assert_close(walking, wanted, atol=1e-4, rtol=1e-4)


def test_positions_of_padding_and_no_rows_at_all(llama):
    _, rotation = llama
    keys = torch.randn(1, 2, 3, 8)
    old = torch.tensor([-1, -1, 0]).expand(1, 2, 3)
    assert rotation.move(keys, 0, old, old).isfinite().all()
    assert rotation.move(keys, 0, old, old - 1000).isfinite().all()
    assert rotation.move(keys[:, :, :0], 0, old[..., :0], old[..., :0]).shape == (1, 2, 0, 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere", "phi"])
def test_other_dtypes(build, family, dtype):
    from kvcompress.rotation import Rotation

    model = build(family).to(dtype)
    rotation = Rotation(model, range(3))
    old = torch.arange(6)[None]
    new = torch.tensor([[0, 700, 3, 90, 41, 2000]])
    keys, want = keys_at(model, old), keys_at(model, new)[0]
    ours = moved(rotation, keys, 0, old, new)
    assert ours.dtype == dtype
    epsilon = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    assert (ours - want).abs().max() <= 4 * epsilon * want.abs().max()


def test_move_never_waits_for_the_device(llama):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(str(function))
            return function(*args, **(kwargs or {}))

    _, rotation = llama
    names, old = [], torch.arange(4).expand(1, 2, 4)
    with Calls():
        rotation.move(torch.randn(1, 2, 4, 8), 0, old, old + 1)
    assert not {name for name in names if "local_scalar" in name or "nonzero" in name}
    assert len(names) < 50  # views included
    names.clear()
    with Calls():
        old.sum().item()
    assert [name for name in names if "local_scalar" in name]


def test_survives_deepcopy_and_pickle(llama, monkeypatch):
    from transformers.models.llama import modeling_llama

    from kvcompress.rotation import Rotation

    model, rotation = llama
    keys, old = torch.randn(1, 2, 4, 8), torch.arange(4).expand(1, 2, 4)
    want = rotation.move(keys, 1, old, old + 9)
    stored = pickle.dumps(rotation)
    assert len(stored) < 10_000  # the weights are not in it
    for twin in (copy.deepcopy(rotation), pickle.loads(stored)):
        assert torch.equal(twin.move(keys, 1, old, old + 9), want)

    # Where kernels may replace it, the function is an object that cannot be pickled.
    original = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda *args: original(*args))
    twin = pickle.loads(pickle.dumps(Rotation(model, range(3))))
    assert torch.equal(twin.move(keys, 1, old, old + 9), want)


def test_random_numbers_are_left_alone(build):
    from kvcompress.rotation import Rotation

    model, before = build("llama"), torch.get_rng_state()
    Rotation(model, range(3))
    assert torch.equal(torch.get_rng_state(), before)
