"""Every model family: full-attention layers are hosted, the others left alone, or it is refused."""

import pytest
import torch

pytestmark = pytest.mark.usefixtures("one_thread")

# Layers with full attention and a cache of their own, and all layers.
HOSTED = {
    "llama": (3, 3),
    "mistral": (3, 3),
    "mixtral": (3, 3),
    "qwen2": (3, 3),
    "qwen3": (3, 3),
    "qwen3_moe": (3, 3),
    "phi3": (3, 3),
    "olmo2": (3, 3),
    "granite": (3, 3),
    "glm4": (3, 3),
    "stablelm": (3, 3),
    "gpt_neox": (3, 3),
    "starcoder2": (3, 3),
    "smollm3": (3, 3),
    "cohere": (3, 3),
    "cohere2": (2, 4),
    "gemma2": (2, 4),
    "gemma3_text": (2, 4),
    "gemma3n_text": (2, 6),
    "gpt_oss": (2, 4),
    "llama4_text": (2, 4),
    "lfm2": (2, 4),
    "qwen3_next": (2, 4),
    "deepseek_v3": (3, 3),
    "gemma3": (2, 4),
    "llava": (3, 3),
    "qwen2_vl": (3, 3),
}
WITH_IMAGES = ["gemma3", "llava", "qwen2_vl"]
REFUSED = {
    "mistral with a window in all layers": ("mistral", {"sliding_window": 16}),
    "falcon": ("falcon", {"alibi": False, "new_decoder_architecture": True}),
    "bloom": ("bloom", {}),
    "mpt": ("mpt", {"d_model": 64, "n_heads": 8, "n_layers": 2}),
    "doge": ("doge", {}),
    "falcon_h1": ("falcon_h1", {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8}),
    "t5": ("t5", {"d_model": 32, "d_kv": 8, "num_heads": 2, "num_layers": 1}),
}
IMAGE, IMAGE_TOKENS = 100, range(11, 15)
PROMPT, NEW = 70, 8
PER_LAYER = {3: "snapkv:capacity=24/33/28:window_size=6", 2: "snapkv:capacity=24/33:window_size=6"}


def _row(family):
    hosted, layers = HOSTED[family]
    what = f"{hosted} of {layers} layers" if hosted < layers else "all layers"
    return pytest.param(f"{family}, {what}", id=family)


def _image_config(family):
    from transformers import AutoConfig

    from kvcompress.testing.models import _COMMON, FAMILIES

    tower = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    tower |= {"image_size": 28, "patch_size": 14}
    if family == "gemma3":
        return AutoConfig.for_model(
            family,
            text_config={**_COMMON, **FAMILIES["gemma3_text"]},
            vision_config={**tower, "num_hidden_layers": 1},
            mm_tokens_per_image=4,
            image_token_index=IMAGE,
            boi_token_index=98,
            eoi_token_index=99,
        )
    if family == "llava":
        return AutoConfig.for_model(
            family,
            text_config={**_COMMON, "model_type": "llama"},
            vision_config={
                **tower,
                "model_type": "clip_vision_model",
                "num_hidden_layers": 2,
                "projection_dim": 32,
            },
            image_token_index=IMAGE,
            vision_feature_layer=-1,
        )
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    return AutoConfig.for_model(
        family,
        text_config={**_COMMON, "rope_parameters": rope},
        vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2},
        image_token_id=IMAGE,
        vision_start_token_id=98,
        vision_end_token_id=99,
        video_token_id=97,
    )


def _with_image(family, inputs):
    """The prompt with an image in its middle."""
    ids = inputs["input_ids"][:1].clone().clamp(max=90)
    ids[0, IMAGE_TOKENS.start - 1], ids[0, IMAGE_TOKENS.stop] = 98, 99
    ids[0, list(IMAGE_TOKENS)] = IMAGE
    more = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    image = torch.randn(1, 3, 28, 28)
    if family == "qwen2_vl":
        more |= {"pixel_values": torch.randn(16, 3 * 2 * 14 * 14)}
        more |= {"image_grid_thw": torch.tensor([[1, 4, 4]])}
        return more | {"mm_token_type_ids": (ids == IMAGE).long()}
    if family == "gemma3":
        more |= {"token_type_ids": (ids == IMAGE).long()}
    return more | {"pixel_values": image}


@pytest.fixture(scope="module")
def family_model(make_model):
    made = {}

    def make(family, attn):
        from transformers import AutoModelForImageTextToText

        from kvcompress import UnsupportedModelError
        from kvcompress.hosting import hosted_layers

        if family not in WITH_IMAGES:
            try:
                model = make_model(family, attn)
                hosted_layers(model.config)
            except ValueError as error:
                assert "Unrecognized model identifier" in str(error)
                pytest.skip(f"this transformers has no {family}")
            except UnsupportedModelError as error:
                if "Install a newer transformers" not in str(error):
                    raise
                pytest.skip(f"this transformers is too old for the cache of {family}")
            return model
        if (family, attn) not in made:
            torch.manual_seed(0)
            model = AutoModelForImageTextToText.from_config(
                _image_config(family), attn_implementation=attn
            )
            model.generation_config.eos_token_id = None
            model.generation_config.pad_token_id = 0
            made[family, attn] = model.eval()
        return made[family, attn]

    return make


def against_oracle(cell, model, policy, inputs, hosted=None, **options):
    from kvcompress import press
    from kvcompress.testing import oracle, record

    with press(model, policy) as session, record(session) as evictions:
        ours = cell.generate(model, inputs, max_new_tokens=NEW, **options)
    report = session.report()
    if hosted is not None:
        assert (report.hosted_layers, len(report.layers)) == hosted
    number = next(layer.layer_idx for layer in report.layers if layer.hosted)
    assert evictions.evicted(number) > 0
    with oracle(model, evictions):
        theirs = cell.generate(model, inputs, max_new_tokens=NEW, **options)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert max(worst(a, b) for a, b in zip(ours.logits, theirs.logits, strict=True)) < 1e-4


def worst(a, b):
    return (a - b).abs().max().item()


def greedy(cell, model, inputs, hosted):
    against_oracle(cell, model, PER_LAYER[hosted[0]], inputs, hosted)


def at_decode(cell, model, inputs, hosted):
    against_oracle(cell, model, "h2o:capacity=24", inputs, hosted)


def beams(cell, model, inputs, hosted):
    against_oracle(cell, model, PER_LAYER[hosted[0]], inputs, hosted, num_beams=3)


def moved_keys(cell, model, inputs, hosted):
    """Under the same policy, the tokens one by one give the same as `generate`."""
    from kvcompress import CompressedCache, press
    from kvcompress.session import cache_argument

    policy = "streaming_llm:capacity=24:positions=cache"
    with press(model, policy):
        ours = cell.generate(model, inputs, max_new_tokens=NEW)
    cache = CompressedCache(model, policy, prompt_length=PROMPT)
    mask, logits = inputs["attention_mask"], []
    given = {cache_argument(model): cache}
    for end in range(PROMPT, PROMPT + NEW):
        start = 0 if end == PROMPT else end - 1
        mask = torch.nn.functional.pad(mask, (0, end - mask.shape[1]), value=1)
        options = {"attention_mask": mask}
        if "pixel_values" not in inputs:
            options["position_ids"] = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, start:]
        with torch.no_grad():
            output = model(ours.sequences[:, start:end], **options, **given)
        logits.append(output.logits[:, -1])
    assert max(worst(a, b) for a, b in zip(ours.logits, logits, strict=True)) < 1e-4


def open_end(cell, model, inputs, hosted):
    """A loop without hooks, whose prompt turns out to have ended with the first single token."""
    from kvcompress import CompressedCache
    from kvcompress.session import cache_argument
    from kvcompress.testing.oracle import Evictions, oracle

    ids, name = inputs["input_ids"][:1], cache_argument(model)
    cache, evictions = CompressedCache(model, PER_LAYER[hosted[0]]), Evictions()
    pieces = [ids[:, :40], ids[:, 40:], *torch.arange(1, NEW + 1)[None].split(1, 1)]
    with torch.no_grad():
        ours = []
        for piece in pieces:
            ours.append(model(piece, **{name: cache}).logits)
            evictions.look(cache)
        # They go when the first single token comes, before it is attended to.
        for died in evictions._died.values():
            died[died == PROMPT + 1] = PROMPT
        with oracle(model, evictions):
            other, theirs = None, []
            for piece in pieces:
                output = model(piece, use_cache=True, **({name: other} if other else {}))
                other = output[name]
                theirs.append(output.logits)
    assert max(worst(a, b) for a, b in zip(ours, theirs, strict=True)) < 1e-4


def second_turn(cell, model, inputs, hosted):
    from kvcompress import press
    from kvcompress.session import cache_argument
    from kvcompress.testing import oracle, record

    inputs = {name: tensor[:1] for name, tensor in inputs.items()}
    turns = []
    policy, name = "snapkv:capacity=24:window_size=6", cache_argument(model)

    def talk():
        first = cell.generate(model, inputs, max_new_tokens=NEW)
        turns.append(first.sequences)
        ids = torch.cat([first.sequences, torch.arange(3, 33)[None]], dim=1)
        again = {"input_ids": ids, "attention_mask": torch.ones_like(ids), name: first[name]}
        return [*first.logits, *cell.generate(model, again, max_new_tokens=NEW).logits]

    with press(model, policy) as session, record(session) as evictions:
        ours = talk()
    with oracle(model, evictions):
        theirs = talk()
    assert torch.equal(turns[0], turns[1])
    assert max(worst(a, b) for a, b in zip(ours, theirs, strict=True)) < 1e-4


COLUMNS = {
    "sdpa": greedy,
    "eager": greedy,
    "state": at_decode,
    "beams": beams,
    "moved keys": moved_keys,
    "second turn": second_turn,
    "open end": open_end,
    "image": greedy,
}
LEGEND = {
    "sdpa, eager": "a batch with and without padding, SnapKV with another capacity in each layer; "
    "transformers has no sdpa for gemma2 and gpt_oss",
    "state": "`h2o` (evicts at each step, by all queries so far)",
    "beams": "beam search of a padded batch",
    "moved keys": "`streaming_llm` with `positions=cache`",
    "second turn": "a second `generate` with the kept cache",
    "open end": "a loop of model calls that is not told where its prompt ends",
    "image": "an image in the prompt of a model that takes images",
}


def _cells():
    from itertools import product

    from kvcompress.testing.models import ONLY_EAGER

    for family, column in product(HOSTED, COLUMNS):
        if column == "sdpa" and family in ONLY_EAGER:
            continue
        if column == "image" and family not in WITH_IMAGES:
            continue
        # Between prompts, the positions of image models come from helpers inside `generate`.
        yield pytest.param(*_row(family).values, column, id=f"{family}-{column}")


@pytest.mark.support("families", legend=LEGEND)
@pytest.mark.parametrize(("row", "column"), list(_cells()))
def test_family(cell, family_model, prompt, row, column):
    from kvcompress.testing.models import ONLY_EAGER

    family = row.partition(",")[0]
    eager = column == "eager" or family in ONLY_EAGER
    model, hosted = family_model(family, "eager" if eager else "sdpa"), HOSTED[family]
    with cell:
        if column == "image":
            COLUMNS[column](cell, model, _with_image(family, prompt(PROMPT)), hosted)
        else:
            COLUMNS[column](cell, model, prompt(PROMPT, 58, 41), hosted)


@pytest.mark.support("families")
@pytest.mark.parametrize("column", ["sdpa"])
@pytest.mark.parametrize("row", REFUSED)
def test_refused_family(cell, prompt, row, column):
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    from kvcompress.testing.models import _COMMON

    family, fields = REFUSED[row]
    kind = AutoModelForSeq2SeqLM if family == "t5" else AutoModelForCausalLM
    common = {**_COMMON, "decoder_start_token_id": 0, "num_hidden_layers": 2} | fields
    try:
        config = AutoConfig.for_model(family, **common)
    except ValueError:
        pytest.skip(f"this transformers has no {family}")
    model = kind.from_config(config).eval()
    with cell:
        against_oracle(cell, model, "snapkv:capacity=24:window_size=6", prompt(PROMPT))
