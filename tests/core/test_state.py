"""A policy with state of its own, evicting while decoding: what core carries for it."""

from types import SimpleNamespace

import pytest
import torch


@pytest.fixture
def counting():
    """A toy policy: keeps the rows with most attention so far, and acts at decode as well."""
    from typing import ClassVar

    from kvcompress import DecodePolicy
    from kvcompress.tensors import attention_received

    class CountingPolicy(DecodePolicy):
        """Sums attention over all queries so far."""

        name: ClassVar[str] = "counting"
        needs: ClassVar = frozenset({"observe"})

        def observe(self, view):
            got = attention_received(view.query, view.key, view.valid, scaling=view.scaling)
            old = view.state.get("sum", torch.zeros_like(got))
            return {"sum": old + got}

        def scores(self, view):
            return view.state["sum"]

        def protected_tokens(self, layer_idx, num_layers):
            return 1

        def protected(self, view):
            rows = torch.arange(view.held, device=view.key.device)
            return (rows == view.held - 1).expand_as(view.valid)

    return CountingPolicy


@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.parametrize("lengths", [(60,), (60, 25, 10)], ids=["single", "padded"])
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_decode_time_eviction_equals_the_oracle(
    make_model, prompt, counting, interval, lengths, attn
):
    from kvcompress import press
    from kvcompress.testing import oracle, record

    model, inputs = make_model("llama", attn), prompt(*lengths)
    options = {
        "max_new_tokens": 14,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    policy = counting(capacity=20, interval=interval)
    with press(model, policy) as session, record(session) as evictions:
        ours = model.generate(**inputs, **options)
    held = [held for _, held in session.report().history]
    assert held[0] == 3 * 20
    assert max(held) == 3 * (20 + interval - 1)
    with oracle(model, evictions):
        theirs = model.generate(**inputs, **options)
    assert torch.equal(ours.sequences, theirs.sequences)
    for a, b in zip(ours.logits, theirs.logits, strict=True):
        assert (a - b).abs().max() < 1e-4


def test_chunked_prefill_observes_every_query(make_model, prompt, counting):
    from kvcompress import press

    model, inputs = make_model(), prompt(60, 33)
    kept = []
    for chunk in (None, 16, 59):
        with press(model, counting(capacity=20)):
            output = model.generate(
                **inputs,
                max_new_tokens=3,
                do_sample=False,
                prefill_chunk_size=chunk,
                return_dict_in_generate=True,
            )
        kept.append([layer.positions for layer in output.past_key_values.layers])
    for other in kept[1:]:
        assert all(torch.equal(a, b) for a, b in zip(kept[0], other, strict=True))


def test_state_follows_its_rows(make_model, prompt, counting):
    """Keep, crop, reorder, repeat, select, reset: rows and state go together."""
    from kvcompress import CompressedCache

    model = make_model()
    cache = CompressedCache(model, counting(capacity=20), prompt_length=60)
    with torch.no_grad():
        model(**prompt(60, 60), past_key_values=cache)

    def parts(layer):
        return layer.keys, layer.values, layer.columns, layer.rows.state["sum"]

    layer = cache.layers[1]
    before = [part.clone() for part in parts(layer)]
    assert all(part.shape[:3] == (2, 2, 20) for part in before)
    cache.batch_repeat_interleave(3)
    assert all(
        torch.equal(part, old.repeat_interleave(3, 0))
        for part, old in zip(parts(layer), before, strict=True)
    )
    cache.reorder_cache(torch.tensor([5, 0, 3, 1, 2, 4]))
    cache.batch_select_indices(torch.tensor([1, 0]))
    assert all(torch.equal(part, old) for part, old in zip(parts(layer), before, strict=True))
    cache.reset()
    assert layer.keys is None and not layer.rows.state and cache.get_seq_length() == 0


def test_padding_follows_the_batch(make_model, prompt):
    from kvcompress import CompressedCache

    cache = CompressedCache(make_model(), "snapkv:capacity=24:window_size=6", prompt_length=40)
    with torch.no_grad():
        make_model()(**prompt(40, 10), past_key_values=cache)
    assert cache.layers[0].positions[:, 0, 0].tolist()[1] == -1
    cache.reorder_cache(torch.tensor([1, 0]))
    first = cache.layers[0].positions[:, 0, 0].tolist()
    assert first[0] == -1 and first[1] >= 0
    assert (cache.layers[2].positions[0, 0] == -1).sum() == 24 - 10


def test_drafts_are_refused_for_policies_that_evict_while_decoding(make_model, prompt, counting):
    """Before the first token, which may already be on its way to somebody."""
    from kvcompress import UnsupportedModeError, press

    model = make_model()
    repeated = {"input_ids": torch.arange(1, 9).repeat(8)[None]}
    put = []
    with (
        press(model, counting(capacity=20)),
        pytest.raises(UnsupportedModeError, match="draft tokens"),
    ):
        model.generate(
            **repeated,
            max_new_tokens=9,
            do_sample=False,
            prompt_lookup_num_tokens=4,
            eos_token_id=100,  # older transformers need one here
            streamer=SimpleNamespace(put=put.append),
        )
    assert len(put) == 1  # the prompt


def test_drafts_are_refused_for_policies_that_keep_records(make_model):
    """Also if they evict at prefill only: rejected drafts' queries could not be taken back."""
    from typing import ClassVar

    from kvcompress import Policy, UnsupportedModeError, press

    class WatchfulPolicy(Policy):
        name: ClassVar[str] = "watchful"
        needs: ClassVar = frozenset({"observe"})

        def observe(self, view):
            return {"sum": view.attention_received()}

        def scores(self, view):
            return view.state["sum"]

    model = make_model()
    with (
        press(model, WatchfulPolicy(capacity=20)),
        pytest.raises(UnsupportedModeError, match=r"watchful keeps a record .* draft tokens"),
    ):
        model.generate(
            torch.arange(1, 9).repeat(8)[None],
            max_new_tokens=9,
            do_sample=False,
            prompt_lookup_num_tokens=4,
            eos_token_id=100,  # older transformers need one here
        )


def faulty(**methods):
    from typing import ClassVar

    from kvcompress import DecodePolicy

    class FaultyPolicy(DecodePolicy):
        name: ClassVar[str] = "faulty"
        needs: ClassVar = frozenset({"observe"})

        def observe(self, view):
            return {}

        def scores(self, view):
            return view.value.float().norm(dim=-1)

    return type("FaultyPolicy", (FaultyPolicy,), {"__annotations__": {}, **methods})(capacity=20)


@pytest.mark.parametrize(
    ("methods", "said"),
    [
        (
            {"observe": lambda self, view: {"sum": torch.zeros(1, 2, 3)}},
            r"observe\(\) returned 'sum' of shape \(1, 2, 3\); it must be \(1, 2, 40\)",
        ),
        ({"budget": lambda self, *sizes: 0}, r"budget\(\) gave 0 rows for layer 0"),
        (
            {"scores": lambda self, view: view.attention_received()},
            r"needs queries, and this view has none",
        ),
    ],
)
def test_faults_of_a_policy_are_told_before_a_token(make_model, prompt, methods, said):
    from kvcompress import PolicyConfigError, press

    model = make_model()
    with press(model, faulty(**methods)), pytest.raises(PolicyConfigError, match=said):
        model.generate(**prompt(40), max_new_tokens=2)


def test_observe_sees_no_more_than_its_view(make_model, prompt):
    """Shapes of every view, at prefill and at decode, with drafts of nothing."""
    from typing import ClassVar

    from kvcompress import DecodePolicy, press

    views = []

    class WatchingPolicy(DecodePolicy):
        name: ClassVar[str] = "watching"

        def protected_tokens(self, layer_idx, num_layers):
            return 5

        def protected(self, view):
            rows = torch.arange(view.held, device=view.key.device)
            return (rows >= view.held - 5).expand_as(view.valid)

        def query_tokens(self, layer_idx, num_layers):
            return 5

        def scores(self, view):
            views.append(view)
            return view.positions.float()

    with press(make_model(), WatchingPolicy(capacity=10)):
        make_model().generate(**prompt(30), max_new_tokens=3, do_sample=False)
    assert [view.phase for view in views] == ["prefill"] * 3 + ["decode"] * 6
    assert [view.seen for view in views] == [30] * 3 + [31] * 3 + [32] * 3
    assert [view.held for view in views] == [30] * 3 + [11] * 6
    assert [view.layer_idx for view in views] == [0, 1, 2] * 3
    assert {view.num_layers for view in views} == {3}
    assert all(view.query.shape[2] == 5 for view in views)
    assert {view.budget for view in views} == {10}
    assert all(view.valid.all() and view.kv_heads == 2 for view in views)
