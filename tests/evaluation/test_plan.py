"""What `kvcompress plan` says before anything is loaded, against caches that were really filled."""

import copy
import json

import pytest
import torch

pytestmark = pytest.mark.usefixtures("one_thread")

POLICIES = [
    "snapkv:capacity=24:window_size=6",
    "snapkv:keep_ratio=0.3:window_size=6",
    "snapkv:capacity=200",
    "pyramidkv:capacity=24:window_size=6",
    "streaming_llm:capacity=24",
    "knorm:capacity=24:interval=5",
    "snapkv_decoding:capacity=24:window_size=6:interval=7",
    "streaming_llm:capacity=80:interval=4",
    "snapkv:capacity=24:window_size=6+knorm:capacity=5:interval=3:scope=generated",
    "snapkv:capacity=24:window_size=6+knorm:capacity=30",
]
FAMILIES = [
    "llama",
    "gpt_neox",
    "deepseek_v3",
    "gemma3_text",
    "gemma3n_text",
    "gpt_oss",
    "llama4_text",
    "qwen3_next",
]
PROMPT, BATCH = 70, 2


@pytest.fixture
def build(make_model):
    from kvcompress.testing.models import ONLY_EAGER

    return lambda family: make_model(family, "eager" if family in ONLY_EAGER else "sdpa")


@pytest.fixture(scope="module")
def planned():
    """A plan; every model is measured once."""
    from kvcompress_eval.model_size import measure
    from kvcompress_eval.plan import plan

    sizes = {}

    def make(model, policies, new_tokens, **options):
        if id(model) not in sizes:
            sizes[id(model)] = measure(model.config, torch.float32)
        settings = {"prompt_tokens": PROMPT, "batch": BATCH, **options}
        return plan(sizes[id(model)], policies, new_tokens=new_tokens, **settings)

    return make


def generated(model, ids, policy, new_tokens):
    from kvcompress_eval.measure import cache_of

    from kvcompress import press

    options = {"max_new_tokens": new_tokens, "do_sample": False, "return_dict_in_generate": True}
    with press(model, policy) as session:
        output = model.generate(ids, **options)
    return cache_of(output), session.report()


@pytest.mark.parametrize("new_tokens", [1, 14])
@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_are_those_of_a_filled_cache(build, planned, prompt, family, new_tokens):
    model, ids = build(family), prompt(PROMPT, PROMPT)["input_ids"]
    policies = POLICIES if family == "llama" else POLICIES[::3]
    found = planned(model, policies, new_tokens)
    for policy, ours in zip(policies, found.caches[1:], strict=True):
        cache, report = generated(model, ids, policy, new_tokens)
        hosted = [layer for layer in report.layers if layer.hosted]
        assert [layer.layer_idx for layer in hosted] == [
            layer.layer_idx for layer in found.model.hosted
        ]
        assert ours.end_tokens_held == tuple(layer.held_tokens for layer in hosted)
        assert ours.end_bytes == report.held_bytes
        assert ours.end_dense_bytes == report.dense_bytes
        assert ours.compression == report.compression
        windows = [cache.layers[layer.layer_idx] for layer in found.model.sliding]
        assert ours.window_bytes == sum(each.keys.nbytes + each.values.nbytes for each in windows)
        if new_tokens == 1:
            assert ours.prompt_bytes == report.held_bytes
            assert all(
                each.keys.untyped_storage().nbytes() + each.values.untyped_storage().nbytes()
                == BATCH * size.row_bytes * (PROMPT if size.whole_prompt else size.window)
                for each, size in zip(windows, found.model.sliding, strict=True)
            )
        # What there is memory for is never more than was planned for.
        room = BATCH * sum(
            size.row_bytes * cache.layers[size.layer_idx].rows.capacity
            for size in found.model.hosted
        )
        assert report.held_bytes <= room <= ours.peak_bytes
    none = found.caches[0]
    assert none.end_bytes == none.end_dense_bytes and none.compression == none.speedup == 1


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_moe"])
def test_weights_are_those_of_the_model(build, family):
    from kvcompress_eval.model_size import measure

    model = build(family)
    size = measure(model.config, torch.float32)
    assert size.name == type(model).__name__
    assert size.parameters == sum(each.numel() for each in model.parameters())
    assert size.weight_bytes == sum(each.nbytes for each in model.parameters())
    tied = model.config.get_text_config().tie_word_embeddings
    embeddings = sum(
        part.weight.nbytes
        for part in model.get_decoder().modules()
        if isinstance(part, torch.nn.Embedding)
        and not (tied and part is model.get_input_embeddings())
    )
    assert size.always_read_bytes + size.expert_bytes == size.weight_bytes - embeddings


def test_experts_are_read_as_far_as_they_are_chosen(build):
    from kvcompress_eval.model_size import measure

    size = measure(build("qwen3_moe").config, torch.float32)
    # Three layers of four experts, each of three 64 x 32 matrices; a token chooses two.
    assert size.expert_bytes == 3 * 4 * 3 * 64 * 32 * 4
    assert size.expert_share == 0.5
    assert size.read_bytes(1) == size.always_read_bytes + size.expert_bytes / 2
    assert size.read_bytes(3) == size.always_read_bytes + size.expert_bytes * 7 / 8


@pytest.mark.parametrize(
    ("prompt_tokens", "batch", "capacity", "bound"),
    [
        (4096, 1, 1024, 1.03),
        (16384, 2, 2048, 1.24),
        (32768, 8, 4096, 2.54),
        (131072, 1, 2048, 2.10),
    ],
)
def test_the_bound_of_a_known_shape(prompt_tokens, batch, capacity, bound):
    """Llama 3.1 8B, worked out by hand from W = 15.01 GB and 128 KiB a token."""
    from kvcompress_eval.plan import plan
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
    )
    policy = f"snapkv:capacity={capacity}"
    found = plan(
        config,
        [policy],
        prompt_tokens=prompt_tokens,
        batch=batch,
        new_tokens=512,
        bandwidth_tbs=4.8,
    )
    plain, ours = found.caches
    assert found.model.parameters == 8_030_261_248 and round(found.read_bytes / 1e9, 2) == 15.01
    assert sum(layer.row_bytes for layer in found.model.layers) == 128 * 1024
    assert ours.speedup == pytest.approx(bound, abs=0.005)
    moved = found.read_bytes + batch * 131072 * (prompt_tokens + 256)
    assert plain.step_bytes == pytest.approx(moved, rel=1e-9)
    assert plain.step_seconds == pytest.approx(moved / 4.8e12)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_what_fits_fits_and_no_more_does(build, planned, family):
    model = build(family)
    policies = [
        "snapkv:capacity=24:window_size=6",
        "streaming_llm:capacity=24",
        "snapkv:keep_ratio=0.25",
    ]
    gib = 2**-7
    options = {"card_gib": gib, "weights_gib": gib / 2, "reserve_gib": gib / 8}
    room = round(2**23 * 3 / 8)
    found = planned(model, policies, 20, **options)
    for number, cache in enumerate(found.caches):
        assert cache.largest_batch > 0

        def need(prompt_tokens, batch, number=number):
            again = planned(
                model, policies, 20, prompt_tokens=prompt_tokens, batch=batch, **options
            )
            return again.caches[number].peak_bytes

        assert need(cache.longest_prompt, BATCH) <= room < need(cache.longest_prompt + 1, BATCH)
        assert need(PROMPT, cache.largest_batch) <= room < need(PROMPT, cache.largest_batch + 1)
    whole, cut, bounded, quarter = (cache.longest_prompt for cache in found.caches)
    assert whole < quarter < bounded <= cut
    none = planned(model, policies, 20, card_gib=gib, weights_gib=2 * gib)
    assert [(each.longest_prompt, each.largest_batch) for each in none.caches] == [(0, 0)] * 4


def test_a_prefill_needs_one_whole_layer_and_the_rest_cut(build, planned):
    model = build("llama")
    row = 2 * 2 * 8 * 4  # key and value, KV heads, head_dim, bytes; three layers
    _, cut, evicting = (
        each.peak_bytes
        for each in planned(
            model,
            ["snapkv:capacity=24:window_size=6", "streaming_llm:capacity=24"],
            2,
            prompt_tokens=10_000,
        ).caches
    )
    assert cut == BATCH * row * (10_000 + 3 * 24)
    assert evicting == BATCH * row * (10_000 + 3 * (24 + 1))


def test_refusals(build):
    from kvcompress_eval.model_size import measure, read_config
    from kvcompress_eval.plan import plan
    from transformers import AutoConfig

    from kvcompress import EvaluationError, PolicyConfigError, UnsupportedModelError

    falcon = AutoConfig.for_model("falcon", hidden_size=64, num_attention_heads=4, vocab_size=99)
    with pytest.raises(UnsupportedModelError, match="attention code of its own"):
        measure(falcon, torch.bfloat16)
    with pytest.raises(UnsupportedModelError, match="type t5"):
        measure(AutoConfig.for_model("t5"), torch.bfloat16)
    config = build("llama").config
    with pytest.raises(PolicyConfigError, match="lists 2 values"):
        plan(config, ["snapkv:capacity=64/48"], prompt_tokens=70)
    with pytest.raises(EvaluationError, match="batch=0: more than 0"):
        plan(config, [], prompt_tokens=70, batch=0)
    with pytest.raises(EvaluationError, match="bandwidth_tbs=-1"):
        plan(config, [], prompt_tokens=70, bandwidth_tbs=-1)
    with pytest.raises(EvaluationError, match="reserve_gib=-1: 0 or more"):
        plan(config, [], prompt_tokens=70, reserve_gib=-1)
    quantized = copy.deepcopy(config)
    quantized.quantization_config = {"quant_method": "gptq", "bits": 4}
    with pytest.raises(EvaluationError, match="are quantized"):
        plan(quantized, [], prompt_tokens=70)
    assert plan(quantized, [], prompt_tokens=70, weights_gib=1).weight_bytes == 2**30
    with pytest.raises(EvaluationError, match="'/no/such/folder' cannot be read"):
        read_config("/no/such/folder")


def test_the_command_reads_no_weights(call, saved_model, tmp_path):
    folder = tmp_path / "config"
    folder.mkdir()
    (folder / "config.json").write_text((saved_model / "config.json").read_text())
    out = tmp_path / "plan.png"
    arguments = [
        "plan", folder, "--prompt-tokens", 5000, "--batch", 3, "--policy", "snapkv:capacity=64",
        "--policy", "pyramidkv:capacity=64", "--dtype", "float16",
    ]  # fmt: skip
    code, shown, err = call(*arguments, "--card", "a100", "--out", out)
    assert code == 0, err
    assert "card of 80 GiB at 2.04 TB/s" in shown
    assert "5000, 5255" in shown and "64, 319" in shown and "Not counted" in shown
    assert out.read_bytes()[:4] == b"\x89PNG"
    code, shown, err = call(*arguments, "--json", "--card-gib", 40, "--new-tokens", 9)
    assert code == 0, err
    numbers = json.loads(shown)
    assert numbers["card_bytes"] == 40 * 2**30 and numbers["bandwidth"] == 3.35e12
    plain, first, second = numbers["caches"]
    row = 2 * 2 * 8 * 2 * 3  # key and value, KV heads, head_dim, bytes, layers
    assert plain["end_bytes"] == 3 * row * 5008 == first["end_dense_bytes"]
    assert first["end_bytes"] == second["end_bytes"] == 3 * row * (64 + 8)
    assert first["compression"] == 5008 / 72
    code, _, err = call("plan", tmp_path, "--prompt-tokens", 5000)
    assert code == 1 and "cannot be read" in err
    code, _, err = call("plan", folder, "--prompt-tokens", 5000, "--policy", "snapvk")
    assert code == 1 and "Did you mean 'snapkv'" in err
