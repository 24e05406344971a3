"""Situations in which cache compression is known to go wrong: each is right here, or refused.

Which test covers what:

Generating
    kept rows in order of score                 kept_rows_are_in_order_of_position
    attention sums only on eager attention      h2o_keeps_what_maps_would_choose_and_makes_none
Left-padded batches
    garbage in the padded row                   a_row_of_a_padded_batch_equals_the_row_alone
    padding scored as tokens, or as sinks       no_padding_is_kept_while_a_real_token_is_evicted
    a mask of the uncut length                  more_padding_and_another_order_change_nothing
    a budget of the padded length               a_ratio_is_of_the_real_tokens_or_refused
    more padding than capacity                  a_budget_above_the_real_length_changes_nothing
Edge sizes
    prompts of 1 or 2 tokens, of the window     a_prompt_that_fits_changes_no_bit
    a window, a last token or sinks dropped     what_is_protected_stays_in_the_smallest_budget
    even kernels, no window, ratios of 0 or 1   a_setting_that_cannot_work_is_refused
Ways of generating
    prompt lookup, assistant models             drafts_give_the_tokens_of_greedy_search
    the same under policies for decoding        drafts_are_refused_by_policies_for_decoding
    chunks of a prompt that are not compressed  a_prompt_in_chunks_is_one_prompt
    static caches                               a_static_cache_is_refused
    quantized caches                            a_quantized_cache_holds_the_same_rows
    offloaded caches                            an_offloaded_cache_gives_the_same_tokens
    other cache implementations                 other_names_of_a_growing_cache_are_the_same
    use_cache=False                             generating_without_a_cache_is_refused
Second turns
    old tokens fed again, wrong positions       a_second_turn_feeds_only_unseen_tokens
    the same in a padded batch                  a_second_turn_of_a_padded_batch_equals_the_oracle
    the same inside and outside the context     a_second_turn_outside_the_context_goes_on_the_same
    only new tokens passed                      new_tokens_without_a_whole_mask_are_refused
    calls without position_ids                  calls_without_position_ids_are_at_their_positions
    a vision model with a sliding first layer   a_vision_model_goes_on_in_a_second_turn
Lifecycle
    submodules, hooks, functions, exceptions    nothing_is_left_after_the_context
    marks that break an unrelated cache         a_plain_cache_is_untouched_by_other_contexts
    contexts inside each other                  contexts_do_not_nest_and_the_outer_one_works_on
    two models                                  two_models_are_compressed_side_by_side
    threads, with and without compression       threads_with_two_policies_and_none_on_one_model
Architectures
    sliding windows in every layer              a_model_whose_every_layer_slides_is_refused
    sliding windows in some layers              sliding_layers_are_left_alone_others_compressed
    a cache without the model's config          a_cache_made_without_the_models_config_is_the_same
    queries recomputed without norm or rotation the_window_votes_with_the_models_own_attention
    other policies on these models              policies_without_queries_on_these_models
    latents (MLA)                               a_model_that_caches_latents_is_compressed
    unknown models                              a_model_with_learned_positions_is_compressed,
                                                attention_that_cannot_be_reached_is_refused
While decoding
    a step counter carried to the next prompt   generates_of_one_context_do_not_meet
    votes of other queries than the last        evictions_at_decode_are_those_of_the_true_maps
    a window longer than the interval           a_window_longer_than_the_interval_works_throughout
    a prompt that is not cut, or a loose bound  capacity_bounds_every_layer_at_every_step
    growth under policies for prompts           a_policy_for_prompts_holds_the_whole_answer
    continuing is not generating longer         generating_in_two_parts_is_generating_at_once
Budgets, bytes and compositions
    other budgets in every layer                layers_may_hold_different_numbers_of_rows
    query heads stored, nothing freed           kv_heads_are_stored_and_bytes_are_freed
    wrong numbers of a composition              a_composition_holds_what_its_parts_state
    pairs that do not go together               a_pair_that_cannot_be_composed_is_named
"""

import contextlib
import gc

import pytest
import torch

pytestmark = pytest.mark.usefixtures("one_thread")

SNAPKV = "snapkv:capacity=24:window_size=6"
POLICIES = [
    SNAPKV,
    "streaming_llm:capacity=24",
    "knorm:capacity=24",
    "tova:capacity=24",
    "h2o:capacity=24",
    "snapkv_decoding:capacity=24:window_size=6:interval=4",
]
HYBRID = {
    "gemma2": {},
    "gemma3_text": {},
    "cohere2": {},
    "gpt_oss": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
}


@pytest.fixture
def make(make_model):
    """A tiny model, or a skip where this transformers cannot configure the family."""
    from transformers import AutoConfig

    def build(family="llama", attn="sdpa", **config):
        try:
            AutoConfig.for_model(family)
        except Exception as error:
            pytest.skip(f"{family} has no default config here: {type(error).__name__}")
        if family in ("gemma2", "gpt_oss"):
            attn = "eager"
        return make_model(family, attn, **config)

    return build


def generate(model, inputs, tokens=6, **options):
    options = {"do_sample": False, "max_new_tokens": tokens, **options}
    return model.generate(**inputs, **options, return_dict_in_generate=True, output_logits=True)


def pressed(model, policy, inputs, tokens=6, **options):
    from kvcompress import press

    with press(model, policy) as session:
        output = generate(model, inputs, tokens, **options)
    return output, session.report()


def worst(ours, theirs):
    return max((a - b).abs().max().item() for a, b in zip(ours.logits, theirs.logits, strict=True))


def assert_close(ours, theirs, tolerance=1e-4):
    assert worst(ours, theirs) < tolerance
    assert torch.equal(ours.sequences, theirs.sequences)


def assert_identical(ours, theirs):
    assert worst(ours, theirs) == 0
    assert torch.equal(ours.sequences, theirs.sequences)


def against_oracle(model, policy, run):
    """Of a function that uses the model in whatever way and returns generate's output."""
    from kvcompress import press
    from kvcompress.testing import oracle, record

    with press(model, policy) as session, record(session) as evictions:
        ours = run()
    report = session.report()
    assert any(evictions.evicted(layer.layer_idx) for layer in report.layers if layer.hosted)
    with oracle(model, evictions):
        theirs = run()
    assert_close(ours, theirs)
    return ours, report


def positions(cache):
    """Of the compressed layers: what they hold."""
    return [layer.positions for layer in cache.layers if hasattr(layer, "positions")]


def assert_same_rows(cache, other):
    pairs = list(zip(positions(cache), positions(other), strict=True))
    assert pairs and all(torch.equal(a, b) for a, b in pairs)


@contextlib.contextmanager
def positions_fed(model):
    """The positions of every forward, as they reach the rotary embedding."""
    fed = []

    def note(module, args, kwargs):
        fed.append((kwargs["position_ids"] if "position_ids" in kwargs else args[1]).clone())

    handle = model.get_decoder().rotary_emb.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield fed
    finally:
        handle.remove()


def alone(batch, row):
    ids = batch["input_ids"][row, batch["attention_mask"][row].bool()][None]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def left_padded(batch, pads):
    return {name: torch.nn.functional.pad(rows, (pads, 0)) for name, rows in batch.items()}


def true_votes(attention, window, kv_heads):
    """SnapKV's pooled votes from an attention map that the model returned, heads x L x L."""
    votes = attention[:, -window:, :-window].sum(dim=1)
    votes = votes.unflatten(0, (kv_heads, -1)).mean(dim=1)
    return torch.nn.functional.avg_pool1d(votes, 5, stride=1, padding=2)


def best(scores, count, always):
    """Columns of the `count` best, the last `always` columns among them."""
    columns = scores.shape[-1]
    scores = torch.nn.functional.pad(scores[..., : columns - always], (0, always), value=1e9)
    return scores.topk(count, dim=-1).indices.sort(dim=-1).values


# Left-padded batches.


@pytest.mark.parametrize(
    ("policy", "attn"), [*((policy, "sdpa") for policy in POLICIES), (SNAPKV, "eager")]
)
def test_a_row_of_a_padded_batch_equals_the_row_alone(make, prompt, policy, attn):
    model, batch = make(attn=attn), prompt(144, 26)
    together, _ = pressed(model, policy, batch)
    for row in range(2):
        single, _ = pressed(model, policy, alone(batch, row))
        assert torch.equal(together.sequences[row, -6:], single.sequences[0, -6:])
        for a, b in zip(together.logits, single.logits, strict=True):
            assert (a[row] - b[0]).abs().max() < 1e-4
        for a, b in zip(
            positions(together.past_key_values), positions(single.past_key_values), strict=True
        ):
            assert torch.equal(a[row], b[0])


@pytest.mark.parametrize("policy", POLICIES)
def test_no_padding_is_kept_while_a_real_token_is_evicted(make, prompt, policy):
    model, batch = make(), prompt(80, 20, 40)
    output, _ = pressed(model, policy, batch, tokens=1)
    for kept in positions(output.past_key_values):
        assert torch.equal(kept[1, :, -20:], torch.arange(20).expand(2, -1))
        assert (kept[1, :, :-20] == -1).all() and (kept[2] >= 0).all()
        if "streaming" in policy:
            assert torch.equal(kept[2, :, :4], torch.arange(4).expand(2, -1))


@pytest.mark.parametrize("policy", [policy.replace("=24", "=60") for policy in POLICIES])
def test_a_budget_above_the_real_length_changes_nothing(make, prompt, policy):
    model, batch = make(), left_padded(prompt(24, 20), 60)
    ours, report = pressed(model, policy, batch)
    assert_close(ours, generate(model, batch))
    assert report.layers[0].held_tokens < report.layers[0].seen_tokens


@pytest.mark.parametrize("policy", POLICIES)
def test_more_padding_and_another_order_change_nothing(make, prompt, policy):
    model, batch = make(), prompt(60, 41)
    base, _ = pressed(model, policy, batch)
    more, _ = pressed(model, policy, left_padded(batch, 9))
    turned, _ = pressed(model, policy, {name: rows.flip(0) for name, rows in batch.items()})
    for a, b, c in zip(base.logits, more.logits, turned.logits, strict=True):
        assert (a - b).abs().max() < 1e-4 and (a - c.flip(0)).abs().max() < 1e-4
    assert torch.equal(base.sequences[:, -6:], more.sequences[:, -6:])


def test_a_ratio_is_of_the_real_tokens_or_refused(make, prompt):
    from kvcompress import UnsupportedModeError

    model, policy = make(), "snapkv:keep_ratio=0.5:window_size=6"
    _, report = pressed(model, policy, left_padded(prompt(60, 60), 20), tokens=1)
    assert {layer.held_tokens for layer in report.layers} == {30}
    with pytest.raises(UnsupportedModeError, match=r"different budgets .* 38 to 60 tokens"):
        pressed(model, policy, prompt(60, 38))


# Edge sizes.


@pytest.mark.parametrize(
    "policy",
    [
        "snapkv",
        "snapkv:window_size=64",
        "snapkv:capacity=40:window_size=39",
        "snapkv:keep_ratio=1",
        "pyramidkv:capacity=70",
        "streaming_llm:n_sink=4",
        "streaming_llm:capacity=40:n_sink=39",
        "tova:capacity=40",
        "knorm:capacity=40",
        "h2o:capacity=40",
        "snapkv_decoding:capacity=40",
    ],
)
def test_a_prompt_that_fits_changes_no_bit(make, prompt, policy):
    for length in (1, 2, 4, 20, 32):
        ours, report = pressed(make(), policy, prompt(length), tokens=3)
        assert_identical(ours, generate(make(), prompt(length), tokens=3))
        assert report.held_tokens == report.seen_tokens == 3 * (length + 2)


@pytest.mark.parametrize(
    ("policy", "length", "held", "surely"),
    [
        ("snapkv:keep_ratio=0.5:window_size=32", 33, 33, range(33)),
        ("snapkv:keep_ratio=0.5:window_size=32", 80, 40, range(48, 80)),
        ("snapkv:keep_ratio=0.01:window_size=6", 200, 7, range(194, 200)),
        ("snapkv:capacity=7:window_size=6", 70, 7, range(64, 70)),
        ("snapkv:capacity=2:window_size=1", 70, 2, [69]),
        ("tova:keep_ratio=0.01", 200, 2, [199]),
        ("tova:capacity=2", 70, 2, [69]),
        ("knorm:keep_ratio=0.01", 200, 2, []),
        ("knorm:keep_ratio=0.01:protect_recent=1", 200, 2, [199]),
        ("streaming_llm:keep_ratio=0.01", 200, 5, [0, 1, 2, 3, 199]),
        ("streaming_llm:keep_ratio=0.5", 6, 5, [0, 1, 2, 3, 5]),
        ("h2o:keep_ratio=0.01", 200, 2, [199]),
    ],
)
def test_what_is_protected_stays_in_the_smallest_budget(make, prompt, policy, length, held, surely):
    model, inputs = make(), prompt(length)
    output, _ = pressed(model, policy, inputs, tokens=1)
    for kept in positions(output.past_key_values):
        assert kept.shape[-1] == held
        for head in kept[0].tolist():
            assert set(surely) <= set(head)
    if held < length:
        against_oracle(model, policy, lambda: generate(model, inputs, tokens=4))


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("snapkv:kernel_size=4", "kernel_size must be odd.* use 3 or 5"),
        ("snapkv:window_size=0", "window_size=.*greater than or equal to 1"),
        ("snapkv:capacity=32:window_size=32", "window_size=32 must be smaller than capacity=32"),
        ("snapkv:capacity=0", "capacity=.*greater than or equal to 1"),
        ("snapkv:keep_ratio=0", "keep_ratio=.*greater than 0"),
        ("snapkv:keep_ratio=-0.1", "keep_ratio=.*greater than 0"),
        ("knorm:keep_ratio=1.1", "keep_ratio=.*less than or equal to 1"),
        ("streaming_llm:capacity=4", "capacity=4 .* no room beside the 4 tokens"),
        ("tova:capacity=1", "capacity=1 .* no room beside the 1 tokens"),
        ("tova:interval=0", "interval=.*greater than or equal to 1"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(policy, message):
    from kvcompress import PolicyConfigError, policy_from

    with pytest.raises(PolicyConfigError, match=message):
        policy_from(policy)


# Ways of generating.


@pytest.mark.parametrize("policy", POLICIES)
def test_kept_rows_are_in_order_of_position(make, prompt, policy):
    output, _ = pressed(make(), policy, prompt(70))
    for kept in positions(output.past_key_values):
        assert (kept.diff(dim=-1) > 0).all()


def test_drafts_give_the_tokens_of_greedy_search(make, prompt):
    from kvcompress import CompressedCache
    from kvcompress.testing import tiny_model

    model, inputs, end = make(), prompt(70), {"eos_token_id": 100}
    greedy, _ = pressed(model, SNAPKV, inputs, 12, **end)
    assert not torch.equal(greedy.sequences, generate(model, inputs, 12, **end).sequences)
    for options in (
        {"prompt_lookup_num_tokens": 3},
        {"assistant_model": make(seed=7, num_hidden_layers=1)},
        {"assistant_model": tiny_model()},
    ):
        drafted, report = pressed(model, SNAPKV, inputs, 12, **end, **options)
        assert torch.equal(drafted.sequences, greedy.sequences)
        assert report.layers[0].held_tokens == report.layers[0].seen_tokens - 70 + 24
    cache = CompressedCache(model, SNAPKV)
    drafted = generate(model, inputs, 12, **end, assistant_model=model, past_key_values=cache)
    assert torch.equal(drafted.sequences, greedy.sequences)


@pytest.mark.parametrize("policy", POLICIES[1:])
def test_drafts_are_refused_by_policies_for_decoding(make, prompt, policy):
    from kvcompress import UnsupportedModeError

    with pytest.raises(UnsupportedModeError, match="draft tokens"):
        pressed(make(), policy, prompt(70), prompt_lookup_num_tokens=3, eos_token_id=100)


@pytest.mark.parametrize("lengths", [(70,), (70, 33)], ids=["single", "padded"])
def test_a_prompt_in_chunks_is_one_prompt(make, prompt, lengths):
    from kvcompress import press

    model, inputs = make(), prompt(*lengths)
    whole, _ = pressed(model, SNAPKV, inputs)
    real = inputs["attention_mask"].bool()
    for chunk in (16, 32, 999999):
        with press(model, SNAPKV) as session, positions_fed(model) as fed:
            ours = generate(model, inputs, prefill_chunk_size=chunk)
        assert_close(ours, whole)
        assert_same_rows(ours.past_key_values, whole.past_key_values)
        assert {layer.held_tokens for layer in session.report().layers} == {24 + 5}
        fed = torch.cat([step.expand(len(lengths), -1) for step in fed], dim=1)
        assert fed.shape[1] == 70 + 5
        for row, length in enumerate(lengths):
            assert torch.equal(fed[row, :70][real[row]], torch.arange(length))
            assert torch.equal(fed[row, 70:], torch.arange(length, length + 5))
    uncut, _ = pressed(model, "snapkv", inputs, prefill_chunk_size=16)
    assert_close(uncut, generate(model, inputs))


@pytest.mark.parametrize("implementation", ["static", "offloaded_static"])
def test_a_static_cache_is_refused(make, prompt, implementation):
    from kvcompress import UnsupportedCacheError

    with pytest.raises(UnsupportedCacheError, match=r"StaticCache .* Leave cache_implementation"):
        pressed(make(), SNAPKV, prompt(40), cache_implementation=implementation)


def quantized_cache():
    """Options of `generate`, with whatever backend there is."""
    from transformers import cache_utils

    if hasattr(cache_utils, "Fp8QuantizedLayer"):
        config = {"backend": "fp8"}
    else:
        pytest.importorskip("optimum.quanto")
        config = {"backend": "quanto", "nbits": 4, "q_group_size": 16, "residual_length": 16}
    return {"cache_implementation": "quantized", "cache_config": config}


def test_a_quantized_cache_holds_the_same_rows(make, prompt):
    from kvcompress import UnsupportedCacheError

    model, inputs, options = make(), prompt(70, 41), quantized_cache()
    plain, dense = pressed(model, SNAPKV, inputs, tokens=1)
    for _ in range(2):
        ours, report = pressed(model, SNAPKV, inputs, tokens=1, **options)
        assert_identical(ours, plain)  # rounded after the prompt was attended to
        assert_same_rows(ours.past_key_values, plain.past_key_values)
        assert report.held_tokens == dense.held_tokens
        assert report.held_bytes < dense.held_bytes
    _, report = pressed(model, SNAPKV, inputs, **options)
    assert report.history == tuple((70 + n, 3 * (24 + n)) for n in range(6))
    with pytest.raises(UnsupportedCacheError, match="goes on evicting"):
        pressed(model, "h2o:capacity=24", inputs, **options)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="offloading needs CUDA")
def test_an_offloaded_cache_gives_the_same_tokens(prompt):
    from kvcompress.testing import tiny_model

    model = tiny_model().cuda()
    inputs = {name: tensor.cuda() for name, tensor in prompt(70, 41).items()}
    ours, report = pressed(model, SNAPKV, inputs, cache_implementation="offloaded")
    assert_close(ours, pressed(model, SNAPKV, inputs)[0])
    assert {layer.held_tokens for layer in report.layers} == {24 + 5}


@pytest.mark.parametrize("implementation", ["dynamic", "hybrid"])
def test_other_names_of_a_growing_cache_are_the_same(make, prompt, implementation):
    model, inputs = make(), prompt(70)
    from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS

    if implementation not in ALL_CACHE_IMPLEMENTATIONS:
        pytest.skip(f"this transformers knows no {implementation} cache")
    named, _ = pressed(model, SNAPKV, inputs, cache_implementation=implementation)
    assert_identical(named, pressed(model, SNAPKV, inputs)[0])


def test_generating_without_a_cache_is_refused(make, prompt):
    from kvcompress import UnsupportedModeError

    with pytest.raises(UnsupportedModeError, match="keeps no cache"):
        pressed(make(), SNAPKV, prompt(40), use_cache=False)


@pytest.mark.parametrize("policy", [SNAPKV, "h2o:capacity=24", POLICIES[-1]])
def test_generating_in_two_parts_is_generating_at_once(make, prompt, policy):
    from kvcompress import press

    model, inputs = make(), prompt(70)
    whole, _ = pressed(model, policy, inputs, tokens=8)
    with press(model, policy), torch.no_grad():
        first = generate(model, inputs, tokens=3)
        cache, ids = first.past_key_values, first.sequences
        for step in whole.logits[3:]:
            logits = model(ids[:, -1:], past_key_values=cache).logits[:, -1]
            assert (logits - step).abs().max() < 1e-4
            ids = torch.cat([ids, logits.argmax(dim=-1, keepdim=True)], dim=1)
    assert torch.equal(ids, whole.sequences)
    assert_same_rows(cache, whole.past_key_values)


# Second turns.


def second_turn(model, inputs, more, only_new=False, between=contextlib.nullcontext):
    """Generates 6 tokens, then 6 more after `more`, from the kept cache."""
    first = generate(model, inputs)
    ids = torch.cat([first.sequences, more], dim=1)
    mask = torch.ones_like(ids)
    mask[:, : inputs["attention_mask"].shape[1]] = inputs["attention_mask"]
    cache = first.past_key_values
    unseen = ids[:, cache.get_seq_length() :] if only_new else ids
    with between():
        return generate(model, {"input_ids": unseen, "attention_mask": mask}, past_key_values=cache)


@pytest.mark.parametrize(
    ("policy", "only_new"), [*((policy, False) for policy in POLICIES), (SNAPKV, True)]
)
def test_a_second_turn_feeds_only_unseen_tokens(make, prompt, policy, only_new):
    model, inputs, more = make(), prompt(70), prompt(9, seed=3)["input_ids"]
    with positions_fed(model) as fed:
        _, report = against_oracle(
            model, policy, lambda: second_turn(model, inputs, more, only_new)
        )
    ours = fed[: len(fed) // 2]
    assert [step.shape[1] for step in ours] == [70, *[1] * 5, 10, *[1] * 5]
    assert torch.equal(torch.cat(ours, dim=1)[0], torch.arange(90))
    assert {layer.seen_tokens for layer in report.layers} == {90}


def test_a_second_turn_of_a_padded_batch_equals_the_oracle(make, prompt):
    model, inputs, more = make(), prompt(70, 41), prompt(9, 9, seed=3)["input_ids"]
    against_oracle(model, SNAPKV, lambda: second_turn(model, inputs, more))


def test_a_second_turn_outside_the_context_goes_on_the_same(make, prompt):
    from kvcompress import press

    model, inputs, more = make(), prompt(70), prompt(9, seed=3)["input_ids"]
    with press(model, SNAPKV):
        inside = second_turn(model, inputs, more)
    with contextlib.ExitStack() as stack:
        stack.enter_context(press(model, SNAPKV))

        @contextlib.contextmanager
        def left():
            stack.close()
            yield

        outside = second_turn(model, inputs, more, between=left)
    assert_identical(outside, inside)


def test_new_tokens_without_a_whole_mask_are_refused(make, prompt):
    from kvcompress import PressStateError, press

    model, inputs = make(), prompt(70)
    with press(model, SNAPKV):
        cache = generate(model, inputs).past_key_values
        with pytest.raises(PressStateError, match=r"prompt of 9 tokens .* attention_mask over"):
            generate(model, {"input_ids": prompt(9)["input_ids"]}, past_key_values=cache)


@pytest.mark.parametrize("policy", POLICIES)
def test_calls_without_position_ids_are_at_their_positions(make, prompt, policy):
    from kvcompress import press
    from kvcompress.testing import oracle, record

    model, inputs, more = make(), prompt(70)["input_ids"], prompt(9, seed=3)["input_ids"]

    def loop():
        with torch.no_grad():
            cache = model(inputs).past_key_values
            steps = [more[:, :1], more[:, 1:2]]
            # A forward of several tokens is a turn of its own, whose end evicts.
            return [model(step, past_key_values=cache).logits for step in (*steps, more[:, 2:])]

    with positions_fed(model) as fed, press(model, policy) as session, record(session) as gone:
        ours = loop()
    assert torch.equal(torch.cat(fed, dim=1)[0], torch.arange(79))
    with oracle(model, gone):
        theirs = loop()
    assert all((a - b).abs().max() < 1e-4 for a, b in zip(ours, theirs, strict=True))


def test_a_vision_model_goes_on_in_a_second_turn(prompt):
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    from kvcompress.testing.models import _COMMON

    text = {
        **_COMMON,
        "head_dim": 8,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    special = {"image_token_index": 102, "boi_token_index": 103, "eoi_token_index": 104}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **special)
    model = Gemma3ForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id = None
    inputs, more = prompt(70), prompt(9, seed=3)["input_ids"]
    _, report = against_oracle(model, SNAPKV, lambda: second_turn(model, inputs, more))
    assert [layer.hosted for layer in report.layers] == [False, True, True]


# What is left behind, and what meets.


@pytest.mark.parametrize(
    ("policy", "most"),
    [
        (SNAPKV, 24 + 7),
        ("h2o:capacity=24:interval=4", 24 + 3),
        ("snapkv_decoding:capacity=24:window_size=6:interval=5", 24 + 4),
        (f"{SNAPKV}+h2o:capacity=26", 26),
    ],
)
def test_generates_of_one_context_do_not_meet(make, prompt, policy, most):
    from kvcompress import press

    model, a, b = make(), prompt(70), prompt(50, seed=2)
    alone = [pressed(model, policy, inputs, 8)[0] for inputs in (a, b)]
    with press(model, policy) as session:
        together = [generate(model, inputs, 8) for inputs in (a, a, b, a)]
    for ours, theirs in zip(together, (alone[0], alone[0], alone[1], alone[0]), strict=True):
        assert_identical(ours, theirs)
        assert_same_rows(ours.past_key_values, theirs.past_key_values)
    for report, tokens in zip(session.reports, (70, 70, 50, 70), strict=True):
        prefill, *decode = report.history
        assert prefill == (tokens, 3 * 24)
        assert len(decode) == 7 and all(held <= 3 * most for _, held in decode)


def traces(model):
    from transformers import GenerationMixin
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    gc.collect()  # a cache that is alive keeps the functions wrapped
    return {
        "modules": [name for name, _ in model.named_modules()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "state": list(model.state_dict()),
        "hooks": [
            (len(module._forward_hooks), len(module._forward_pre_hooks))
            for module in model.modules()
        ],
        "functions": {name: id(ALL_ATTENTION_FUNCTIONS[name]) for name in ("sdpa",)},
        "lookup": AttentionInterface.get_interface,
        "generate": GenerationMixin.generate,
        "forwards": [id(type(module).forward) for module in model.modules()],
        "config": model.config.to_dict(),
    }


@pytest.mark.parametrize("ending", ["normal", "error of the user", "error of the policy"])
@pytest.mark.parametrize("policy", [SNAPKV, "h2o:capacity=24"])
def test_nothing_is_left_after_the_context(make, prompt, policy, ending, monkeypatch):
    from kvcompress import policy_from, press

    model, inputs = make(), prompt(70)
    policy = policy_from(policy)
    plain, before = generate(model, inputs), traces(model)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def fail(self, view):
        if view.layer_idx == 1:
            raise ZeroDivisionError
        return torch.zeros_like(view.positions, dtype=torch.float32)

    with monkeypatch.context() as patch:
        if ending == "error of the policy":
            patch.setattr(type(policy), "scores", fail)
        fails = ending != "normal"
        expected = pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext()
        with expected, press(model, policy):
            generate(model, inputs)
            if fails:
                raise ZeroDivisionError
    del expected  # its traceback holds the cache
    assert traces(model) == before
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert_identical(generate(model, inputs), plain)


def test_a_plain_cache_is_untouched_by_other_contexts(make, prompt):
    from transformers import DynamicCache

    model, inputs, step = make(), prompt(40), torch.tensor([[5]])
    with torch.no_grad():
        caches = [DynamicCache(config=model.config) for _ in range(2)]
        for cache in caches:
            model(**inputs, past_key_values=cache)
        expected = model(step, past_key_values=caches[0]).logits
        for policy in POLICIES:
            pressed(model, policy, prompt(70))
        assert torch.equal(model(step, past_key_values=caches[1]).logits, expected)


@pytest.mark.parametrize(
    ("outer", "inner"),
    [(SNAPKV, SNAPKV), (SNAPKV, "knorm:keep_ratio=0.5"), ["streaming_llm:capacity=24"] * 2],
)
def test_contexts_do_not_nest_and_the_outer_one_works_on(make, prompt, outer, inner):
    from kvcompress import PressStateError, press

    model, inputs = make(), prompt(70)
    expected, _ = pressed(model, outer, inputs)
    with press(model, outer):
        with pytest.raises(PressStateError, match="do not nest"), press(model, inner):
            pass
        assert_identical(generate(model, inputs), expected)


def test_two_models_are_compressed_side_by_side(make, prompt):
    from kvcompress import press

    one, two, inputs = make(), make("qwen3"), prompt(70)
    expected = [pressed(one, SNAPKV, inputs)[0], pressed(two, "tova:capacity=24", inputs)[0]]
    with press(one, SNAPKV), press(two, "tova:capacity=24"):
        assert_identical(generate(one, inputs), expected[0])
        assert_identical(generate(two, inputs), expected[1])


def test_threads_with_two_policies_and_none_on_one_model(make, prompt, at_once):
    from kvcompress import CompressedCache

    model, inputs = make(), prompt(70)

    def run(policy):
        cache = None if policy is None else CompressedCache(model, policy)
        return generate(model, inputs, past_key_values=cache)

    policies = [SNAPKV, "h2o:capacity=12", None]
    expected = [run(policy) for policy in policies]
    assert len({tuple(output.sequences[0].tolist()) for output in expected}) == 3
    results = at_once(*(lambda p=policy: [run(p) for _ in range(4)] for policy in policies))
    for ours, theirs in zip(results, expected, strict=True):
        assert len(ours) == 4
        for output in ours:
            assert_identical(output, theirs)


# Architectures.


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("mistral", {"sliding_window": 16}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}),
    ],
    ids=["mistral", "qwen2"],
)
def test_a_model_whose_every_layer_slides_is_refused(make, family, config):
    from kvcompress import UnsupportedModelError, press

    with pytest.raises(UnsupportedModelError, match=r"nothing to compress"):
        press(make(family, **config), SNAPKV)


@pytest.mark.parametrize("policy", [SNAPKV, "knorm:capacity=24", "streaming_llm:capacity=24"])
@pytest.mark.parametrize("family", HYBRID)
def test_sliding_layers_are_left_alone_others_compressed(make, prompt, family, policy):
    inputs = prompt(60)
    model = make(family, **HYBRID[family])
    _, report = against_oracle(model, policy, lambda: generate(model, inputs, tokens=5))
    plain, ours = generate(model, inputs, tokens=1), pressed(model, policy, inputs, tokens=1)[0]
    hosted = [type(layer).is_sliding is False for layer in plain.past_key_values.layers]
    assert [layer.hosted for layer in report.layers] == hosted and 0 < sum(hosted) < len(hosted)
    assert f"{sum(hosted)} of {len(hosted)} layers hosted" in str(report)
    assert str(report).count("left alone") > 0
    for layer, mine, its in zip(
        report.layers, ours.past_key_values.layers, plain.past_key_values.layers, strict=True
    ):
        if layer.hosted:
            assert mine.keys.shape[2] == 24 and its.keys.shape[2] == 60
            assert 24 <= layer.held_tokens <= 24 + 4 and layer.seen_tokens == 64
        else:
            assert torch.equal(mine.keys, its.keys) and torch.equal(mine.values, its.values)


def test_a_cache_made_without_the_models_config_is_the_same(make, prompt):
    from transformers import DynamicCache

    model, inputs = make("gemma3_text"), prompt(60)
    expected, report = pressed(model, SNAPKV, inputs)
    ours, other = pressed(model, SNAPKV, inputs, past_key_values=DynamicCache())
    assert torch.equal(ours.sequences, expected.sequences)
    assert worst(ours, expected) < 1e-4  # windows are masked there, as without us, and cut here
    assert [layer.hosted for layer in other.layers] == [layer.hosted for layer in report.layers]


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("cohere", {}),
        ("cohere", {"use_qk_norm": True}),
        ("olmo2", {}),
        ("glm4", {}),
        ("gemma2", {}),
        ("gpt_oss", {}),
        ("deepseek_v3", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_the_window_votes_with_the_models_own_attention(make, prompt, family, config):
    inputs = prompt(70)
    with torch.no_grad():
        maps = make(family, "eager", **config)(**inputs, output_attentions=True).attentions
    model = make(family, **config)
    output, report = pressed(model, SNAPKV, inputs, tokens=1)
    kept = positions(output.past_key_values)
    hosted = [layer.layer_idx for layer in report.layers if layer.hosted]
    for index, rows in zip(hosted, kept, strict=True):
        votes = true_votes(maps[index][0], 6, rows.shape[1])
        expected = best(torch.nn.functional.pad(votes, (0, 6)), 24, always=6)
        assert torch.equal(rows[0], expected)
    against_oracle(model, SNAPKV, lambda: generate(model, inputs, tokens=4))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_model_that_caches_latents_is_compressed(make, prompt, policy):
    model = make("deepseek_v3")
    _, report = against_oracle(model, policy, lambda: generate(model, prompt(70, 33)))
    assert report.hosted_layers == 3 and report.held_tokens < report.seen_tokens


@pytest.mark.parametrize("policy", ["knorm:capacity=24", "streaming_llm:capacity=24"])
@pytest.mark.parametrize("family", ["cohere", "olmo2", "glm4"])
def test_policies_without_queries_on_these_models(make, prompt, family, policy):
    model = make(family)
    against_oracle(model, policy, lambda: generate(model, prompt(70)))


def test_a_model_with_learned_positions_is_compressed(make, prompt):
    model = make("gpt2")
    against_oracle(model, SNAPKV, lambda: generate(model, prompt(70)))


@pytest.mark.parametrize("claims_support", [False, True])
def test_attention_that_cannot_be_reached_is_refused(prompt, claims_support, monkeypatch):
    from transformers import FalconConfig, FalconForCausalLM

    from kvcompress import UnsupportedModelError, press

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = FalconForCausalLM(FalconConfig(**sizes, vocab_size=101)).eval()
    if claims_support:
        monkeypatch.setattr(type(model.transformer), "_supports_attention_backend", True)
    message = "did not go through" if claims_support else "attention code of its own"
    with pytest.raises(UnsupportedModelError, match=message), press(model, SNAPKV):
        model.generate(**prompt(40), max_new_tokens=2, do_sample=False, pad_token_id=0)


# While decoding.


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("rule", ["knorm", "tova", "h2o", "snapkv_decoding"])
def test_evictions_at_decode_are_those_of_the_true_maps(make, prompt, rule, attn):
    """A prompt of 20 fits the 24; after 8 more tokens, 4 of the 28 rows go."""
    from kvcompress import press

    ids = prompt(28)["input_ids"]
    window = ":window_size=6" if rule == "snapkv_decoding" else ""
    model = make(attn=attn)
    with torch.no_grad():
        plain = make(attn="eager")(ids, output_attentions=True)
        with press(model, f"{rule}:capacity=24:interval=8{window}") as session:
            cache = model(ids[:, :20]).past_key_values
            for column in range(20, 28):
                assert {layer.held_tokens for layer in session.report().layers} == {column}
                model(ids[:, column : column + 1], past_key_values=cache)
    for layer, kept in enumerate(positions(cache)):
        attention, keys = plain.attentions[layer][0], plain.past_key_values.layers[layer].keys[0]
        if rule == "knorm":
            scores, always = -keys.norm(dim=-1), 0
        elif rule == "tova":
            scores, always = attention[:, -1].mean(dim=0).expand(2, -1), 1
        elif rule == "h2o":
            scores, always = attention.sum(dim=1).unflatten(0, (2, -1)).mean(dim=1), 12
        else:
            scores, always = torch.nn.functional.pad(true_votes(attention, 6, 2), (0, 6)), 6
        assert torch.equal(kept[0], best(scores, 24, always))


def test_a_window_longer_than_the_interval_works_throughout(make, prompt):
    model, policy = make(), "snapkv_decoding:capacity=24:window_size=12:interval=4"
    against_oracle(model, policy, lambda: generate(model, prompt(70), tokens=20))


@pytest.mark.parametrize(
    ("policy", "bound"),
    [
        ("knorm:capacity=64", 64),
        ("snapkv_decoding:capacity=64:window_size=8:interval=5", 68),
        ("snapkv:capacity=50:window_size=8+h2o:capacity=64:interval=5", 68),
    ],
)
def test_capacity_bounds_every_layer_at_every_step(make, prompt, policy, bound):
    from kvcompress import press

    model, held = make(num_hidden_layers=2), []
    with press(model, policy) as session:

        def note(*_):
            held.append([layer.held_tokens for layer in session.report().layers])

        handle = model.register_forward_hook(note)
        try:
            output = generate(model, prompt(100), tokens=200)
        finally:
            handle.remove()
    assert len(held) == 200
    assert max(map(max, held)) == bound
    assert [layer.keys.shape[2] for layer in output.past_key_values.layers] == held[-1]


def test_a_policy_for_prompts_holds_the_whole_answer(make, prompt):
    _, report = pressed(make(), SNAPKV, prompt(70), tokens=40)
    assert report.history == tuple((70 + n, 3 * (24 + n)) for n in range(40))


# Budgets, bytes and compositions.


@pytest.mark.parametrize("lengths", [(70,), (70, 60)], ids=["single", "padded"])
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "policy",
    ["pyramidkv:capacity=24:window_size=6", "snapkv:capacity=12/24/40:window_size=6"],
    ids=["pyramid", "list"],
)
def test_layers_may_hold_different_numbers_of_rows(make, prompt, policy, attn, lengths):
    model, inputs = make(attn=attn), prompt(*lengths)
    _, report = against_oracle(model, policy, lambda: generate(model, inputs, tokens=6))
    assert len({layer.held_tokens for layer in report.layers}) == 3


@pytest.mark.parametrize("policy", ["snapkv", "h2o", "knorm"])
def test_kv_heads_are_stored_and_bytes_are_freed(make, prompt, policy):
    capacity, length, row = 400, 1000, 2 * 8 * 2 * 4  # KV heads, head_dim, key and value, float32
    with torch.no_grad():
        output, report = pressed(make(), f"{policy}:capacity={capacity}", prompt(length), tokens=1)
    for layer in output.past_key_values.layers:
        assert layer.keys.shape == (1, 2, capacity, 8)
        storage = sum(rows.untyped_storage().nbytes() for rows in (layer.keys, layer.values))
        assert storage <= (capacity + 256) * row
    assert report.dense_bytes == 3 * length * row
    assert report.held_bytes == 3 * capacity * row
    assert report.compression == length / capacity


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, torch.Tensor):
                self.numel = max(self.numel, each.numel())
        return result


def test_h2o_keeps_what_maps_would_choose_and_makes_none(make, prompt):
    from kvcompress import press

    length, capacity = 2048, 64
    inputs = prompt(length)["input_ids"]
    model, eager = make(num_hidden_layers=1), make(attn="eager", num_hidden_layers=1)
    with press(model, f"h2o:capacity={capacity}"), torch.no_grad(), Largest() as largest:
        cache = model(inputs, logits_to_keep=1).past_key_values
    assert largest.numel < 8 * length**2 / 4  # a block of one layer's map
    with torch.no_grad():
        maps = eager(inputs, logits_to_keep=1, output_attentions=True).attentions
    for attention, kept in zip(maps, positions(cache), strict=True):
        sums = attention[0].sum(dim=1).unflatten(0, (2, -1)).mean(dim=1)
        assert torch.equal(kept[0], best(sums, capacity, always=capacity // 2))


@pytest.mark.parametrize(
    ("policy", "held"),
    [
        ("h2o:keep_ratio=0.5+knorm:keep_ratio=0.5", [40] * 12),
        ("knorm:keep_ratio=0.5+h2o:keep_ratio=0.5", [40] * 12),
        ("h2o:capacity=20+tova:capacity=26", [20 + min(n, 6) for n in range(12)]),
        (f"{SNAPKV}+h2o:capacity=6:scope=generated", [24 + min(n, 6) for n in range(12)]),
        ("tova:capacity=20+knorm:capacity=5:scope=generated", [20 + min(n, 5) for n in range(12)]),
    ],
)
def test_a_composition_holds_what_its_parts_state(make, prompt, policy, held):
    model, inputs = make(), prompt(80)
    output, report = against_oracle(model, policy, lambda: generate(model, inputs, tokens=12))
    assert report.history == tuple((80 + n, 3 * rows) for n, rows in enumerate(held))
    for layer, own in zip(output.past_key_values.layers, report.layers, strict=True):
        assert layer.keys.shape[2] == own.held_tokens == held[-1]
    assert report.compression == 91 / held[-1]


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("snapkv+snapkv", r"snapkv\+snapkv: .* cannot be the decode policy"),
        ("h2o+h2o", r"h2o\+h2o: both keep a record"),
    ],
)
def test_a_pair_that_cannot_be_composed_is_named(policy, message):
    from kvcompress import PolicyConfigError, policy_from

    with pytest.raises(PolicyConfigError, match=message):
        policy_from(policy)
