"""The contracts that need no oracle: identity, bounds, isolation, traces, memory."""

import copy
import gc
import pickle
import threading

import pytest
import torch

FAMILIES = ["llama", "mistral", "mixtral", "phi3", "qwen3"]
POLICY = "snapkv:capacity=24:window_size=6"
GREEDY = {"max_new_tokens": 8, "do_sample": False}


def full(model, inputs, **options):
    options = {**GREEDY, **options}
    return model.generate(**inputs, **options, return_dict_in_generate=True, output_logits=True)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", [(5,), (30,), (30, 11, 3)], ids=["short", "single", "padded"])
def test_capacity_not_reached_changes_no_bit(make_model, prompt, family, attn, lengths):
    from kvcompress import press

    model, inputs = make_model(family, attn), prompt(*lengths)
    plain = full(model, inputs)
    for policy in ("snapkv:capacity=30:window_size=16", "snapkv:capacity=4096", "snapkv"):
        with press(model, policy) as session:
            ours = full(model, inputs)
        assert torch.equal(ours.sequences, plain.sequences)
        assert all(torch.equal(a, b) for a, b in zip(ours.logits, plain.logits, strict=True))
        assert session.report().held_tokens == session.report().seen_tokens


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_logits_are_those_of_the_plain_model(make_model, prompt, family, attn):
    from kvcompress import press

    model, inputs = make_model(family, attn), prompt(80, 50)
    with torch.no_grad():
        plain = model(**inputs).logits
        with press(model, POLICY) as session:
            ours = model(**inputs).logits
    assert torch.equal(ours, plain)
    assert {layer.held_tokens for layer in session.report().layers} == {24}


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_a_batch_equal_rows_alone(make_model, prompt, family, attn):
    from kvcompress import press

    model, batch = make_model(family, attn), prompt(70, 41, 18, 2)
    with press(model, POLICY):
        together = full(model, batch)
    for row in range(4):
        real = batch["attention_mask"][row].bool()
        ids = batch["input_ids"][row, real][None]
        with press(model, POLICY):
            alone = full(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        assert torch.equal(together.sequences[row, -8:], alone.sequences[0, -8:])
        for a, b in zip(together.logits, alone.logits, strict=True):
            assert (a[row] - b[0]).abs().max() < 1e-4
        for mine, its in zip(
            together.past_key_values.layers, alone.past_key_values.layers, strict=True
        ):
            kept = its.positions[0]
            assert torch.equal(mine.positions[row][:, -kept.shape[-1] :], kept)
            assert (mine.positions[row][:, : -kept.shape[-1]] == -1).all()


def test_extra_left_padding_and_row_order_change_nothing(make_model, prompt):
    from kvcompress import press

    model, batch = make_model(), prompt(70, 41)
    padded = {
        "input_ids": torch.nn.functional.pad(batch["input_ids"], (9, 0)),
        "attention_mask": torch.nn.functional.pad(batch["attention_mask"], (9, 0)),
    }
    flipped = {name: rows.flip(0) for name, rows in batch.items()}
    with press(model, POLICY):
        base, more, swapped = full(model, batch), full(model, padded), full(model, flipped)
    assert torch.equal(base.sequences[:, -8:], more.sequences[:, -8:])
    assert torch.equal(base.sequences, swapped.sequences.flip(0))
    for a, b, c in zip(base.logits, more.logits, swapped.logits, strict=True):
        assert (a - b).abs().max() < 1e-4
        assert (a - c.flip(0)).abs().max() < 1e-4


def test_held_is_capacity_plus_generated_at_every_step(make_model, prompt):
    from kvcompress import press

    model = make_model()
    with press(model, "snapkv:capacity=20/33/70:window_size=6") as session:
        full(model, prompt(60, 44), max_new_tokens=20)
    report = session.report()
    prefill, *decode = report.history
    assert prefill == (60, 20 + 33 + 60)
    assert decode == [(60 + n, 20 + 33 + 60 + 3 * n) for n in range(1, 20)]
    assert [layer.held_tokens for layer in report.layers] == [39, 52, 79]


def test_kept_rows_are_ascending_and_hold_the_window(make_model, prompt):
    from kvcompress import press

    model = make_model()
    with press(model, POLICY):
        output = full(model, prompt(70))
    for layer in output.past_key_values.layers:
        positions = layer.positions
        assert (positions.diff(dim=-1) > 0).all()
        assert torch.equal(positions[0, 0, -13:], torch.arange(64, 77))


@pytest.mark.parametrize("family", FAMILIES)
def test_two_generates_and_interleaved_caches_do_not_meet(make_model, prompt, family):
    from kvcompress import press

    model, first, second = make_model(family), prompt(70, seed=1), prompt(55, seed=2)
    with press(model, POLICY) as session:
        a, b, again = full(model, first), full(model, second), full(model, first)
    assert torch.equal(a.sequences, again.sequences)
    assert [report.layers[0].seen_tokens for report in session.reports] == [77, 62, 77]
    with press(model, POLICY), torch.no_grad():
        one = model(**first)
        two = model(**second)
        step_one = model(a.sequences[:, 70:71], past_key_values=one.past_key_values)
        step_two = model(b.sequences[:, 55:56], past_key_values=two.past_key_values)
    assert torch.allclose(step_one.logits[:, -1], a.logits[1], atol=1e-4)
    assert torch.allclose(step_two.logits[:, -1], b.logits[1], atol=1e-4)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_second_turn_with_the_kept_cache(make_model, prompt, family, attn):
    """Full ids, or the new ones with a full mask: the same, and only new tokens are fed."""
    from kvcompress import press
    from kvcompress.testing import oracle, record

    model, inputs = make_model(family, attn), prompt(70, 41)
    more = torch.randint(1, 101, (2, 9))
    results = []
    for only_new in (False, True):
        with press(model, POLICY) as session, record(session) as evictions:
            first = full(model, inputs)
            ids = torch.cat([first.sequences, more], dim=1)
            mask = torch.cat([inputs["attention_mask"], torch.ones(2, 17, dtype=torch.long)], 1)
            unseen = ids[:, 77:] if only_new else ids
            second = full(
                model,
                {"input_ids": unseen, "attention_mask": mask},
                past_key_values=first.past_key_values,
            )
        assert session.report().layers[0].seen_tokens == 87 + 7
        assert session.report().layers[0].held_tokens == 24 + 7
        results.append((second, evictions, ids, mask))
    assert torch.equal(results[0][0].sequences[:, -8:], results[1][0].sequences[:, -8:])
    second, evictions, ids, mask = results[0]
    with oracle(model, evictions), torch.no_grad():
        from transformers import DynamicCache

        # Both turns in the forwards in which they were really fed.
        cache = DynamicCache(config=model.config)
        fed = [(0, 70), *((at, at + 1) for at in range(70, 77)), (77, 87)]
        position = mask.cumsum(1) - 1
        for start, stop in fed:
            step = model(
                ids[:, start:stop],
                attention_mask=mask[:, :stop],
                position_ids=position[:, start:stop].clamp(min=0),
                past_key_values=cache,
            )
    assert (step.logits[:, -1] - second.logits[0]).abs().max() < 1e-4


@pytest.mark.parametrize(
    "later, held", [("revote", 24), ("append", 24 + 7 + 24), ("keep", 24 + 7 + 41)]
)
def test_later_turns(make_model, prompt, later, held):
    from kvcompress import press

    model = make_model()
    with press(model, f"{POLICY}:later_turns={later}") as session:
        first = full(model, prompt(70))
        ids = torch.cat([first.sequences, torch.randint(1, 101, (1, 40))], dim=1)
        second = full(model, {"input_ids": ids}, past_key_values=first.past_key_values)
    assert session.report().layers[1].held_tokens == held + 7
    positions = second.past_key_values.layers[1].positions
    assert (positions.diff(dim=-1) > 0).all()
    if later != "revote":
        before = first.past_key_values.layers[1].positions  # the same cache, further on
        assert torch.equal(before, positions)
        assert (positions[0, 0] < 77).sum() == 24 + 7


def test_keep_needs_a_cache_that_was_compressed_from_its_beginning(make_model, prompt):
    from transformers import DynamicCache

    from kvcompress import UnsupportedCacheError, press

    model = make_model()
    filled = DynamicCache(config=model.config)
    model(prompt(70)["input_ids"], past_key_values=filled)
    before = filled.layers[0].keys.clone()
    with (
        press(model, f"{POLICY}:later_turns=keep"),
        pytest.raises(UnsupportedCacheError, match=r"seen 70 tokens .* never would be"),
    ):
        model(prompt(80)["input_ids"][:, 70:], past_key_values=filled)
    assert torch.equal(filled.layers[0].keys, before)


def test_append_after_short_padded_rows_is_refused(make_model, prompt):
    from kvcompress import UnsupportedModeError, press

    model = make_model()
    inputs = prompt(70, 10)
    with press(model, f"{POLICY}:later_turns=append"):
        first = full(model, inputs)
        ids = torch.cat([first.sequences, torch.randint(1, 101, (2, 40))], dim=1)
        mask = torch.cat([inputs["attention_mask"], torch.ones(2, 48, dtype=torch.long)], dim=1)
        with pytest.raises(UnsupportedModeError, match="append"):
            full(
                model,
                {"input_ids": ids, "attention_mask": mask},
                past_key_values=first.past_key_values,
            )


def test_feeding_twice_is_refused_and_loses_nothing(make_model, prompt):
    from kvcompress import CompressedCache, PressStateError, press

    model, inputs = make_model(), prompt(70)
    with press(model, POLICY), torch.no_grad():
        cache = model(**inputs).past_key_values
        before = [layer.keys.clone() for layer in cache.layers]
        with pytest.raises(PressStateError, match="second time"):
            full(model, inputs, past_key_values=cache)
        with pytest.raises(PressStateError, match=r"prompt of 2 tokens .* attention_mask"):
            full(model, {"input_ids": torch.ones(1, 2, dtype=torch.long)}, past_key_values=cache)
        with pytest.raises(PressStateError, match="starts at position 3"):
            model(
                inputs["input_ids"][:, 3:9],
                past_key_values=cache,
                position_ids=torch.arange(3, 9)[None],
            )
        assert all(torch.equal(a, b.keys) for a, b in zip(before, cache.layers, strict=True))
        longer = torch.cat([inputs["input_ids"], torch.tensor([[5]])], dim=1)
        full(model, {"input_ids": longer}, past_key_values=cache)
    with torch.no_grad():
        cache = CompressedCache(model, POLICY, prompt_length=70)
        model(**inputs, past_key_values=cache)
        with pytest.raises(PressStateError, match="starts at position 0"):
            model(
                inputs["input_ids"],
                past_key_values=cache,
                position_ids=torch.arange(70)[None],
            )
        assert cache.get_seq_length() == 70


def test_context_leaves_no_trace(make_model, prompt, no_trace):
    from kvcompress import press

    model, inputs = make_model(), prompt(70)
    plain = full(model, inputs).sequences
    names = set(vars(model)), set(vars(model.model))
    config = model.config.to_dict()
    with pytest.raises(ZeroDivisionError), press(model, POLICY):
        full(model, inputs)
        raise ZeroDivisionError
    assert (set(vars(model)), set(vars(model.model))) == names
    assert model.config.to_dict() == config
    assert not model._forward_hooks and not model._forward_pre_hooks
    assert not model.model._forward_hooks and not model.model._forward_pre_hooks
    assert torch.equal(full(model, inputs).sequences, plain)


def test_interrupted_forward(make_model, prompt):
    """An error in the middle of a forward: the cache says so, a new one works."""
    from kvcompress import PressStateError, press

    model, inputs = make_model(), prompt(70)

    def fail(module, args, kwargs):
        raise ZeroDivisionError

    with press(model, POLICY), torch.no_grad():
        expected = full(model, inputs).sequences
        cache = model(**inputs).past_key_values
        handle = model.model.layers[1].mlp.register_forward_pre_hook(fail, with_kwargs=True)
        try:
            with pytest.raises(ZeroDivisionError):
                model(inputs["input_ids"][:, :1], past_key_values=cache)
        finally:
            handle.remove()
        with pytest.raises(PressStateError, match="broke off after 2 of 3"):
            model(inputs["input_ids"][:, :1], past_key_values=cache)
        assert torch.equal(full(model, inputs).sequences, expected)


def test_cache_outlives_its_context(make_model, prompt):
    from kvcompress import press

    model, inputs = make_model(), prompt(70)
    step = torch.tensor([[7]])
    with press(model, "snapkv:capacity=24/30/70:window_size=6") as session, torch.no_grad():
        cache = model(**inputs).past_key_values
        twin = copy.deepcopy(cache)
        inside = model(step, past_key_values=twin).logits
    with torch.no_grad():
        outside = model(step, past_key_values=cache).logits
    assert torch.equal(inside, outside)
    assert session.report().layers[0].held_tokens == 25


def test_hook_free_equals_press(make_model, prompt, no_trace):
    from kvcompress import CompressedCache, press

    model, inputs = make_model(), prompt(70, 33)
    with press(model, POLICY):
        pressed = full(model, inputs)
    cache = CompressedCache(model, POLICY)
    free = full(model, inputs, past_key_values=cache)
    assert torch.equal(pressed.sequences, free.sequences)
    assert free.past_key_values is cache
    for a, b in zip(pressed.past_key_values.layers, cache.layers, strict=True):
        assert torch.equal(a.positions, b.positions)
    assert str(cache.policy) == POLICY
    del pressed, free, cache, a, b


@pytest.mark.parametrize("ending", ["one token", "end_prefill", "prompt_length"])
@pytest.mark.parametrize("chunks", [[70], [40, 30], [20, 20, 20, 10]])
def test_hook_free_loops(make_model, prompt, ending, chunks):
    """A prompt fed by hand in several calls keeps the same rows as in one."""
    from kvcompress import CompressedCache, press

    model, inputs = make_model(), prompt(70, 33)
    mask = inputs["attention_mask"]
    with press(model, POLICY):
        expected = full(model, inputs, max_new_tokens=2)
    length = 70 if ending == "prompt_length" else None
    cache = CompressedCache(model, POLICY, prompt_length=length)
    position = (mask.cumsum(1) - 1).clamp(min=0)
    start = 0
    with torch.no_grad():
        for size in chunks:
            model(
                inputs["input_ids"][:, start : start + size],
                attention_mask=mask[:, : start + size],
                position_ids=position[:, start : start + size],
                past_key_values=cache,
            )
            start += size
        if ending == "end_prefill":
            cache.end_prefill()
        held = {layer.held_tokens for layer in cache.report().layers}
        assert held == ({70} if ending == "one token" else {24})
        step = model(
            expected.sequences[:, 70:71],
            attention_mask=torch.nn.functional.pad(mask, (0, 1), value=1),
            position_ids=position[:, -1:] + 1,
            past_key_values=cache,
        )
    assert {layer.held_tokens for layer in cache.report().layers} == {25}
    for mine, its in zip(cache.layers, expected.past_key_values.layers, strict=True):
        assert torch.equal(mine.positions, its.positions)
    assert (step.logits[:, -1] - expected.logits[1]).abs().max() < 1e-4


@pytest.mark.parametrize("policy", ["tova:capacity=16", "h2o:capacity=16"])
def test_latents_are_cut_before_a_step_that_evicts_too(make_model, prompt, policy):
    """The step is judged by the rows that the cut has left."""
    from kvcompress import CompressedCache

    model, ids = make_model("deepseek_v3"), prompt(22)["input_ids"]
    caches = [CompressedCache(model, policy, prompt_length=known) for known in (20, None)]
    with torch.no_grad():
        for part in ids.tensor_split([20, 21], dim=1):
            steps = [model(part, past_key_values=cache).logits[:, -1] for cache in caches]
    assert (steps[0] - steps[1]).abs().max() < 1e-4
    for mine, its in zip(*(cache.layers for cache in caches), strict=True):
        assert torch.equal(mine.positions, its.positions)
        assert mine.positions.shape[2] == 16


def test_crop(make_model, prompt):
    from kvcompress import CompressedCache, UnsupportedModeError

    model, inputs = make_model(), prompt(70)
    extra = torch.randint(1, 101, (1, 5))
    cache = CompressedCache(model, POLICY)
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
        with pytest.raises(UnsupportedModeError, match="end_prefill"):
            cache.crop(-1)
        cache.end_prefill()
        before = copy.deepcopy(cache)
        for token in extra[0]:
            model(token[None, None], past_key_values=cache)
        cache.crop(-5)
        assert cache.get_seq_length() == 70
        for a, b in zip(cache.layers, before.layers, strict=True):
            assert torch.equal(a.keys, b.keys) and torch.equal(a.positions, b.positions)
        # The window is held whole, but the rest was chosen by it.
        for tokens in (1, 30):
            with pytest.raises(UnsupportedModeError, match=f"crop\\(\\) by {tokens} tokens"):
                cache.crop(-tokens)
        for a, b in zip(cache.layers, before.layers, strict=True):
            assert torch.equal(a.keys, b.keys) and torch.equal(a.positions, b.positions)


@pytest.mark.parametrize(
    ("family", "config", "policy", "generated", "back", "usable"),
    [
        ("llama", {}, "snapkv:capacity=70/24/70:window_size=4", 1, 10, True),
        ("gemma3_text", {"sliding_window": 99}, "tova:capacity=24", 1, 1, False),
        ("gemma3_text", {"sliding_window": 99}, "snapkv:capacity=24:window_size=4", 2, 5, False),
    ],
)
def test_a_refused_crop_changes_nothing_or_is_remembered(
    make_model, prompt, family, config, policy, generated, back, usable
):
    from kvcompress import PressStateError, UnsupportedModeError, press

    model, token = make_model(family, **config), torch.tensor([[9]])
    with press(model, policy), torch.no_grad():
        cache = model(**prompt(70)).past_key_values
        for number in range(generated):
            model(torch.tensor([[number + 1]]), past_key_values=cache)
        untouched = copy.deepcopy(cache)
        with pytest.raises(UnsupportedModeError, match="cannot be undone"):
            cache.crop(-back)
        if usable:
            ours = model(token, past_key_values=cache).logits
            assert torch.equal(ours, model(token, past_key_values=untouched).logits)
        else:
            with pytest.raises(PressStateError, match="no longer agree"):
                model(token, past_key_values=cache)
            cache.reset()
            model(**prompt(70), past_key_values=cache)


@pytest.mark.parametrize(
    ("policy", "whole", "back"),
    [
        ("tova:capacity=24", False, 0),
        ("tova:capacity=99", True, 3),
        ("knorm:capacity=24:interval=3", False, 2),
        ("h2o:capacity=24", False, 0),
        ("h2o:capacity=99", True, 0),
        ("snapkv_decoding:capacity=24:window_size=3:interval=3", False, 0),
    ],
)
def test_crop_leaves_no_trace_or_is_refused(make_model, prompt, policy, whole, back):
    """Tokens can be taken back until rows were judged by them."""
    from kvcompress import UnsupportedModeError, press

    model, inputs = make_model(), prompt(70)
    with press(model, policy), torch.no_grad():
        cache = model(**inputs).past_key_values
        expected = copy.deepcopy(cache)
        fed = max(back, 1)
        for token in range(1, fed + 1):
            model(torch.tensor([[token]]), past_key_values=cache)
        assert (cache.layers[0].keys.shape[2] == 70 + fed) == whole
        if not back:
            with pytest.raises(UnsupportedModeError, match="deepcopy"):
                cache.crop(-1)
            return
        cache.crop(-back)
        for token in (7, 8, 9, 10):
            ours = model(torch.tensor([[token]]), past_key_values=cache).logits
            theirs = model(torch.tensor([[token]]), past_key_values=expected).logits
            assert torch.equal(ours, theirs)
            for a, b in zip(cache.layers, expected.layers, strict=True):
                assert torch.equal(a.positions, b.positions)


def test_prompts_of_guidance_are_each_cut_when_they_end(make_model, prompt):
    from kvcompress import press

    model = make_model()
    for length in (40, 90):
        with press(model, POLICY) as session:
            negative = prompt(length, seed=3)["input_ids"]
            full(model, prompt(70), guidance_scale=1.5, negative_prompt_ids=negative)
        for report, seen in zip(session.reports, (70, length), strict=True):
            assert report.history[0] == (seen, 3 * 24)
            assert {layer.held_tokens for layer in report.layers} == {24 + 7}


def test_reset_and_reuse(make_model, prompt):
    from kvcompress import CompressedCache

    model, inputs = make_model(), prompt(70)
    cache = CompressedCache(model, POLICY)
    first = full(model, inputs, past_key_values=cache).sequences
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(full(model, inputs, past_key_values=cache).sequences, first)
    assert {layer.held_tokens for layer in cache.report().layers} == {24 + 7}


def test_threads_with_caches_of_their_own(make_model, prompt, at_once):
    from kvcompress import CompressedCache

    model = make_model()
    policies = [None, POLICY, "snapkv:capacity=12:window_size=4"]
    inputs = [prompt(70, seed=seed) for seed in range(3)]

    def run(number):
        policy = policies[number]
        cache = None if policy is None else CompressedCache(model, policy)
        return full(model, inputs[number], past_key_values=cache).sequences

    alone = [run(number) for number in range(3)]
    together = at_once(*(lambda n=n: [run(n) for _ in range(4)] for n in range(3)))
    for expected, results in zip(alone, together, strict=True):
        assert len(results) == 4
        assert all(torch.equal(expected, result) for result in results)


def test_press_covers_other_threads(make_model, prompt):
    from transformers import TextIteratorStreamer

    from kvcompress import press

    class Ids:
        def decode(self, ids, **_):
            return " ".join(map(str, ids)) + " "

    model, inputs = make_model(), prompt(70)
    with press(model, POLICY) as session:
        expected = full(model, inputs).sequences[0, 70:].tolist()
        streamer = TextIteratorStreamer(Ids(), skip_prompt=True)
        options = {**inputs, **GREEDY, "streamer": streamer}
        thread = threading.Thread(target=model.generate, kwargs=options)
        thread.start()
        text = "".join(streamer)
        thread.join()
    assert text.split() == [str(token) for token in expected]
    assert len(session.reports) == 2
    assert session.report().layers[0].held_tokens == 24 + 7


def test_copies_of_a_model_in_a_context_are_plain(prompt):
    from kvcompress import press
    from kvcompress.testing import tiny_model

    model, inputs = tiny_model(), prompt(70)
    plain = full(model, inputs).sequences
    with press(model, POLICY) as session:
        twin = copy.deepcopy(model)
        stored = pickle.loads(pickle.dumps(model))
        assert torch.equal(full(twin, inputs).sequences, plain)
        assert torch.equal(full(stored, inputs).sequences, plain)
        assert not session.reports


def test_inner_model_called_by_itself_is_compressed(make_model, prompt):
    from kvcompress import press

    model, inputs = make_model(), prompt(70)
    with press(model, POLICY) as session, torch.no_grad():
        model.model(**inputs)
    assert {layer.held_tokens for layer in session.report().layers} == {24}


def test_forward_without_cache_passes_through(make_model, prompt):
    from kvcompress import PressStateError, press

    model, inputs = make_model(), prompt(70)
    with press(model, POLICY) as session, torch.no_grad():
        assert model(**inputs, use_cache=False).past_key_values is None
        with pytest.raises(PressStateError, match="not called"):
            session.report()


def test_training_step_with_a_compressed_prompt(prompt):
    """Gradients flow through the kept rows."""
    from kvcompress import press
    from kvcompress.testing import tiny_model

    model, inputs = tiny_model(), prompt(70)
    with press(model, POLICY):
        first = model(**inputs)
        second = model(torch.tensor([[3, 4]]), past_key_values=first.past_key_values)
        second.logits.sum().backward()
    grad = model.model.layers[0].self_attn.k_proj.weight.grad
    assert grad is not None and grad.abs().sum() > 0


def test_inference_mode_cache_used_outside(make_model, prompt):
    from kvcompress import CompressedCache

    model, inputs = make_model(), prompt(70)
    cache = CompressedCache(model, POLICY)
    with torch.inference_mode():
        full(model, inputs, past_key_values=cache)
    with torch.no_grad():
        model(torch.tensor([[3]]), past_key_values=cache)
    assert cache.get_seq_length() == 78


def test_evicted_bytes_are_released(prompt):
    """Storage is what the report says: nothing of the prompt, slack from a new token on."""
    from kvcompress import press
    from kvcompress.testing import tiny_model

    model = tiny_model(num_hidden_layers=4, hidden_size=128)
    with press(model, "snapkv:capacity=300:window_size=8") as session, torch.no_grad():
        cache = model(**prompt(2000, 1500)).past_key_values
    report = session.report()
    gc.collect()
    live = {}
    for thing in gc.get_objects():
        # type, not isinstance: looking at some lazy objects warns.
        if type(thing) is torch.Tensor and thing.ndim == 4 and thing.shape[2] >= 300:
            storage = thing.untyped_storage()
            live[storage.data_ptr()] = storage.nbytes()
    rows = 2 * 2 * 16 * 4 * 2  # batch, KV heads, head_dim, bytes, key and value
    assert report.held_bytes == 4 * 300 * rows
    assert report.dense_bytes == 4 * 2000 * rows
    kv = sum(layer.rows.capacity for layer in cache.layers) * rows
    assert sum(live.values()) <= kv == 4 * 300 * rows
    columns = 4 * 2 * 2 * 300 * 4
    assert report.allocated_bytes == kv + columns
    with torch.no_grad():
        model(torch.tensor([[3], [3]]), past_key_values=cache)
    assert all(layer.rows.capacity == 301 + 256 for layer in cache.layers)


def test_report(make_model, prompt):
    import json

    from kvcompress import press

    model = make_model()
    with press(model, POLICY) as session:
        full(model, prompt(70))
    report = session.report()
    assert session.cache is None or report.hosted_layers == 3
    data = json.loads(json.dumps(report.to_dict()))
    assert data["policy"] == POLICY
    assert data["held_tokens"] == 3 * 31 and data["seen_tokens"] == 3 * 77
    assert data["layers"][2]["layer_idx"] == 2 and data["layers"][2]["hosted"]
    assert data["compression"] == pytest.approx(77 / 31)
    assert data["policy_seconds"] > 0
    text = str(report)
    assert "3 of 3 layers hosted" in text and "0-2" in text and "2.5x" in text
    del session
    gc.collect()
    assert report.layers[0].held_tokens == 31


def test_new_tokens_must_go_on_where_the_cache_ends(make_model, prompt):
    """The last token of an answer was never fed; without it the next turn would have a hole."""
    from kvcompress import PressStateError, press

    model, new = make_model(), torch.tensor([[5, 6, 7]])
    with press(model, POLICY):
        first = full(model, prompt(70))
        ids = torch.cat([first.sequences, new], dim=1)
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 2, "do_sample": False}
        cache = first.past_key_values
        with pytest.raises(PressStateError, match=r"got 3 tokens .* over 81, .* seen 77: 80 are"):
            model.generate(new, past_key_values=cache, **options)
        whole = copy.deepcopy(cache)
        ours = model.generate(ids[:, -4:], past_key_values=cache, **options)
        theirs = model.generate(ids, past_key_values=whole, **options)
        assert torch.equal(ours[:, -2:], theirs[:, -2:])


def test_states_that_an_old_transformers_keeps_elsewhere_are_refused(make_model, monkeypatch):
    from types import SimpleNamespace

    from transformers.cache_utils import DynamicLayer

    from kvcompress import UnsupportedModelError, hosting, press

    config = make_model().config
    monkeypatch.setattr(config, "layer_types", ["conv", "full_attention", "conv"], raising=False)
    plain = SimpleNamespace(layers=[DynamicLayer() for _ in range(3)])
    monkeypatch.setattr(hosting, "DynamicCache", lambda config: plain)
    with pytest.raises(UnsupportedModelError, match=r"type conv, .* Install a newer transformers"):
        press(make_model(), POLICY)


def test_a_cache_made_without_windows_gets_none(make_model, prompt):
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    from kvcompress import press

    model, inputs = make_model("gemma3_text"), prompt(40)
    plain = full(model, inputs)
    for cache, kind in (
        (DynamicCache(), DynamicLayer),
        (DynamicCache(config=model.config), DynamicSlidingWindowLayer),
    ):
        with press(model, "snapkv:capacity=60:window_size=6"):
            ours = full(model, inputs, past_key_values=cache)
        assert type(cache.layers[0]) is kind
        assert torch.equal(ours.sequences, plain.sequences)
