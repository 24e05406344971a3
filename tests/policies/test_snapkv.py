"""SnapKV against loops written from the paper, and what must hold whatever the numbers are."""

import importlib.util
from pathlib import Path

import pytest
import torch

POOLINGS = [("avg", 1), ("avg", 5), ("avg", 7), ("max", 1), ("max", 5), ("max", 7), ("none", 5)]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="session")
def reference():
    path = Path(__file__).parents[1] / "reference" / "snapkv.py"
    spec = importlib.util.spec_from_file_location("reference_snapkv", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tensors(*lengths, kv_heads=2, group=2, dim=8, dtype=torch.float32, seed=3):
    """A left-padded batch whose attention is peaky, with its mask; the padding is not zero."""
    generator = torch.Generator().manual_seed(seed)
    longest, batch = max(lengths), len(lengths)
    query = 2 * torch.randn(batch, kv_heads * group, longest, dim, generator=generator)
    key = torch.randn(batch, kv_heads, longest, dim, generator=generator)
    value = torch.randn(batch, kv_heads, longest, dim, generator=generator)
    mask = torch.stack([torch.arange(longest) >= longest - length for length in lengths]).long()
    return query.to(dtype), key.to(dtype), value.to(dtype), mask


def assert_kept(kept, scores, capacity, window, tolerance=1e-5):
    """`kept` holds the window and the best of the prefix; within `tolerance` any choice will do.

    Args:
        kept: Columns of one head, -1 at the left for rows that hold fewer.
        scores: Of the prefix, in another implementation's numbers.
        capacity: Rows to keep, the window included.
        window: Rows of the window.
        tolerance: Relative.
    """
    length = len(scores) + window
    real = kept[kept >= 0]
    assert len(real) == min(capacity, length)
    assert torch.equal(kept, torch.cat([kept.new_full((len(kept) - len(real),), -1), real]))
    assert (real.diff() > 0).all()
    assert torch.equal(real[len(real) - window :], torch.arange(length - window, length))
    chosen = real[: len(real) - window]
    scores = torch.as_tensor(scores, dtype=torch.float64)
    if len(chosen) == len(scores):
        return
    cut = scores.sort(descending=True).values[len(chosen) - 1]
    found = torch.zeros(len(scores), dtype=torch.bool).index_fill(0, chosen, True)
    assert found[scores > cut * (1 + tolerance)].all()
    assert not found[scores < cut * (1 - tolerance)].any()


def assert_equals_reference(reference, policy, batch, **options):
    """Scores and kept columns of every row are the reference's of that row without its padding."""
    from kvcompress.testing import kept_positions, scores

    query, key, value, mask = batch
    layer = options.get("layer_idx", 0)
    capacity, window, kernel_size = (
        policy.at(name, layer) for name in ("capacity", "window_size", "kernel_size")
    )
    kept = kept_positions(policy, query, key, value, attention_mask=mask, **options)
    ours = scores(policy, query, key, value, attention_mask=mask, **options)
    assert kept.shape == (*key.shape[:2], min(capacity, key.shape[2]))
    for row, length in enumerate(mask.sum(1).tolist()):
        pads = key.shape[2] - length
        expected = reference.snapkv(
            query[row, :, pads:].tolist(),
            key[row, :, pads:].tolist(),
            capacity=capacity,
            window_size=window,
            kernel_size=kernel_size,
            pooling=policy.pooling,
            group_reduce=policy.group_reduce,
            scaling=options.get("scaling", key.shape[-1] ** -0.5),
        )
        for head, (prefix_scores, prefix_kept) in enumerate(expected):
            got = ours[row, head]
            prefix = len(prefix_scores)
            assert got[:pads].isneginf().all() and got[pads + prefix :].isposinf().all()
            torch.testing.assert_close(
                got[pads : pads + prefix].double(),
                torch.tensor(prefix_scores, dtype=torch.float64),
                atol=1e-5,
                rtol=1e-5,
            )
            columns = torch.where(kept[row, head] < 0, -1, kept[row, head] - pads)
            assert_kept(columns, prefix_scores, capacity, min(window, length))
            assert_kept(torch.tensor(prefix_kept), prefix_scores, capacity, min(window, length))


@pytest.mark.parametrize("group_reduce", ["mean", "max", "sum"])
@pytest.mark.parametrize(("pooling", "kernel_size"), POOLINGS)
@pytest.mark.parametrize("length", [33, 63, 100])
@pytest.mark.parametrize("group", [1, 2, 4])
def test_equals_the_paper(reference, group, length, pooling, kernel_size, group_reduce):
    from kvcompress import SnapKVPolicy

    policy = SnapKVPolicy(
        capacity=24,
        window_size=8,
        kernel_size=kernel_size,
        pooling=pooling,
        group_reduce=group_reduce,
    )
    # Full, about half, and shorter than the window.
    batch = tensors(length, length // 2, 5, group=group)
    assert_equals_reference(reference, policy, batch)


def test_equals_the_paper_in_every_layer_of_a_list(reference):
    from kvcompress import SnapKVPolicy
    from kvcompress.testing import kept_positions

    capacities, windows, kernels = (20, 41, 30), (5, 9, 1), (3, 7, 1)
    lists = SnapKVPolicy(capacity=capacities, window_size=windows, kernel_size=kernels)
    query, key, value, mask = batch = tensors(63, 41, 9)
    for layer in range(3):
        assert_equals_reference(reference, lists, batch, layer_idx=layer, num_layers=3)
        single = SnapKVPolicy(
            capacity=capacities[layer], window_size=windows[layer], kernel_size=kernels[layer]
        )
        assert torch.equal(
            kept_positions(
                lists, query, key, value, attention_mask=mask, layer_idx=layer, num_layers=3
            ),
            kept_positions(single, query, key, value, attention_mask=mask),
        )


@pytest.mark.parametrize("scaling", [1.0, 0.05])
def test_the_models_own_scaling_is_used(reference, scaling):
    from kvcompress import SnapKVPolicy

    policy = SnapKVPolicy(capacity=24, window_size=8)
    assert_equals_reference(reference, policy, tensors(63, 30), scaling=scaling)


@pytest.mark.parametrize("keep_ratio", [0.1, 0.3, 0.5, 1.0])
def test_keep_ratio(reference, keep_ratio):
    from kvcompress import SnapKVPolicy
    from kvcompress.testing import kept_positions

    query, key, value, _ = tensors(50, 50)
    ratio = SnapKVPolicy(keep_ratio=keep_ratio, window_size=8)
    # 0.1 would be 5 rows, less than the window and one more.
    capacity = {0.1: 9, 0.3: 15, 0.5: 25, 1.0: 50}[keep_ratio]
    expected = kept_positions(ratio.model_copy(update={"capacity": capacity}), query, key, value)
    assert expected.shape[-1] == capacity
    assert torch.equal(kept_positions(ratio, query, key, value), expected)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 23, 24])
def test_a_prompt_no_longer_than_capacity_is_kept_whole(length):
    from kvcompress import SnapKVPolicy
    from kvcompress.testing import kept_positions

    query, key, value, _ = tensors(length)
    kept = kept_positions(SnapKVPolicy(capacity=24, window_size=8), query, key, value)
    assert torch.equal(kept, torch.arange(length).expand(1, 2, length))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pooling", ["avg", "max", "none"])
def test_half_precision_keeps_what_float32_keeps(dtype, pooling):
    from kvcompress import SnapKVPolicy
    from kvcompress.testing import kept_positions, scores

    policy = SnapKVPolicy(capacity=24, window_size=8, pooling=pooling)
    for seed in range(4):
        query, key, value, mask = tensors(100, 77, dtype=dtype, group=4, seed=seed)
        exact = [part.float() for part in (query, key, value)]
        half = scores(policy, query, key, value, attention_mask=mask)
        full = scores(policy, *exact, attention_mask=mask)
        torch.testing.assert_close(half, full, atol=1e-6, rtol=1e-6)
        kept = kept_positions(policy, query, key, value, attention_mask=mask)
        other = kept_positions(policy, *exact, attention_mask=mask)
        assert kept.shape == other.shape == (2, 2, 24)
        for row, pads in enumerate([0, 23]):
            for head in range(2):
                prefix = full[row, head, pads:-8]
                assert_kept(kept[row, head] - pads, prefix, 24, 8, tolerance=1e-6)
                assert_kept(other[row, head] - pads, prefix, 24, 8, tolerance=1e-6)


def select(policy, batch):
    from kvcompress.testing import kept_positions, scores

    query, key, value, mask = batch
    return (
        kept_positions(policy, query, key, value, attention_mask=mask),
        scores(policy, query, key, value, attention_mask=mask),
    )


SMALL = "snapkv:capacity=24:window_size=8"
# Its plateaus of equal scores lie across the cut.
SMALL_MAX = f"{SMALL}:pooling=max:group_reduce=max"
PADDED_POLICIES = [
    SMALL,
    f"{SMALL}:pooling=none",
    SMALL_MAX,
]


@pytest.mark.parametrize("policy", PADDED_POLICIES)
@pytest.mark.parametrize("extra", [1, 8, 40])
@pytest.mark.parametrize("filling", [0.0, 50.0, float("nan")])
def test_more_left_padding_changes_nothing(policy, extra, filling):
    query, key, value, mask = tensors(63, 40, 5)
    kept, scores = select(policy, (query, key, value, mask))
    wide = [torch.nn.functional.pad(part, (0, 0, extra, 0)) for part in (query, key, value)]
    wide.append(torch.nn.functional.pad(mask, (extra, 0)))
    padding = wide[3] == 0
    for part in wide[:3]:
        part.masked_fill_(padding[:, None, :, None], filling)
    wide_kept, wide_scores = select(policy, wide)
    assert torch.equal(wide_kept, torch.where(kept < 0, -1, kept + extra))
    assert wide_scores[..., :extra].isneginf().all()
    torch.testing.assert_close(wide_scores[..., extra:], scores, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("policy", [SMALL, f"{SMALL}:pooling=none", SMALL_MAX])
def test_permuted_rows_permute(policy):
    batch = tensors(63, 40, 5, 33)
    order = torch.tensor([2, 0, 3, 1])
    for ours, theirs in zip(
        select(policy, [part[order] for part in batch]), select(policy, batch), strict=True
    ):
        assert torch.equal(ours, theirs[order])


@pytest.mark.parametrize("policy", PADDED_POLICIES)
def test_a_row_of_a_batch_equals_the_row_alone(policy):
    lengths = (63, 40, 24, 23, 12)
    query, key, value, mask = tensors(*lengths)
    kept, scores = select(policy, (query, key, value, mask))
    for row, length in enumerate(lengths):
        pads = 63 - length
        alone = [part[row : row + 1, :, pads:] for part in (query, key, value)]
        alone_kept, alone_scores = select(policy, [*alone, mask[row : row + 1, pads:]])
        assert torch.equal(kept[row, :, 24 - min(24, length) :], alone_kept[0] + pads), length
        assert (kept[row, :, : 24 - min(24, length)] == -1).all()
        torch.testing.assert_close(scores[row, :, pads:], alone_scores[0], atol=1e-6, rtol=1e-6)


def Allocations(*known):
    from kvcompress_eval.memory import Allocations

    return Allocations(*known)


def test_allocations_are_seen():
    start = torch.zeros(10)
    with Allocations(start) as made:
        for _ in range(3):
            big = start.repeat(100)
            del big
        small = start + 1
        view = small[:5]
    assert (made.largest(), made.peak, len(view)) == (4000, 4000, 5)
    with Allocations(start) as made:
        parts = [start.repeat(100) for _ in range(3)]
        view = start[:5]
    assert (made.largest(), made.peak, len(view)) == (4000, 12000, 5)
    with Allocations(start) as made:
        large, small = start.repeat(100), start + 1
    assert (made.largest(large), made.peak) == (small.nbytes, large.nbytes + small.nbytes)
    assert len(parts) == 3


def attention(query, key, valid, *, group_reduce="mean", scaling=0.3, softcap=None, sinks=None):
    """What `attention_received` must give, dense and in float64."""
    batch, heads, q_len, _ = query.shape
    kv_heads, kv_len = valid.shape[1:]
    keys = key.double().repeat_interleave(heads // key.shape[1], dim=1)
    seen = valid.repeat_interleave(heads // kv_heads, dim=1)
    logits = scaling * query.double() @ keys.transpose(2, 3)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    causal = torch.ones(q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len)
    logits = logits.masked_fill(~(causal & seen[:, :, None]), float("-inf"))
    if sinks is not None:
        extra = sinks.double().view(1, heads, 1, 1).expand(batch, heads, q_len, 1)
        logits = torch.cat([logits, extra], dim=-1)
    weights = logits.softmax(dim=-1)[..., :kv_len]
    votes = seen[:, :, kv_len - q_len :, None]
    received = torch.where(votes, weights, 0.0).sum(dim=2).unflatten(1, (kv_heads, -1))
    if group_reduce == "max":
        return received.amax(dim=2)
    return received.mean(dim=2) if group_reduce == "mean" else received.sum(dim=2)


def voters(kv_heads=2, key_heads=None, heads=4, q_len=7, kv_len=50, pads=(0, 20, 46)):
    """Queries of the last rows, keys, and what is real; in the last row not even all queries."""
    query = 2 * torch.randn(len(pads), heads, q_len, 4)
    key = torch.randn(len(pads), key_heads or kv_heads, kv_len, 4)
    valid = torch.stack([torch.arange(kv_len) >= pad for pad in pads])
    return query, key, valid[:, None].expand(-1, kv_heads, -1)


def received(query, key, valid, **options):
    from kvcompress.tensors import attention_received

    return attention_received(query, key, valid, **{"scaling": 0.3, **options})


def assert_dense(ours, query, key, valid, **options):
    expected = attention(query, key, valid, **options)
    torch.testing.assert_close(ours.double(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("group_reduce", ["mean", "max", "sum"])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("sinks", [None, "low", "high"])
def test_votes_with_softcap_and_sinks(group_reduce, softcap, sinks):
    query, key, valid = voters()
    if sinks is not None:
        sinks = torch.tensor([0.1, -1.0, 2.0, 0.5]) + (30.0 if sinks == "high" else 0.0)
    options = {"group_reduce": group_reduce, "softcap": softcap, "sinks": sinks}
    assert_dense(received(query, key, valid, **options), query, key, valid, **options)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("sinks", [None, 1.0])
def test_the_policy_votes_with_the_models_softcap_and_sinks(softcap, sinks):
    from kvcompress import LayerView, SnapKVPolicy

    query, key, valid = voters()
    sinks = None if sinks is None else torch.full((4,), sinks)
    view = LayerView(
        query=query,
        key=key,
        value=key,
        kv_heads=valid.shape[1],
        locate=lambda: valid.long().cumsum(-1) - 1,
        scaling=0.3,
        layer_idx=0,
        num_layers=1,
        seen=50,
        phase="prefill",
        softcap=softcap,
        sinks=sinks,
    )
    scores = SnapKVPolicy(capacity=24, window_size=7, pooling="none").scores(view)
    expected = attention(query, key, valid, softcap=softcap, sinks=sinks)
    torch.testing.assert_close(scores[..., :-7].double(), expected[..., :-7], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("kv_heads", "key_heads", "heads"), [(1, 8, 8), (2, 4, 8), (1, 2, 6)])
@pytest.mark.parametrize("max_bytes", [1, 2**26])
def test_votes_when_keys_have_more_heads_than_the_cache(kv_heads, key_heads, heads, max_bytes):
    query, key, valid = voters(kv_heads, key_heads, heads)
    sinks = torch.randn(heads)
    ours = received(query, key, valid, sinks=sinks, group_reduce="max", max_bytes=max_bytes)
    assert ours.shape == (3, kv_heads, 50)
    assert_dense(ours, query, key, valid, sinks=sinks, group_reduce="max")


def test_large_logits_do_not_overflow():
    query, key, valid = voters()
    query = query * 1e4
    ours = received(query, key, valid)
    assert ours.isfinite().all()
    assert_dense(ours, query, key, valid)


# Whole heads, then part of one head's queries; for 0 there is room for not even one query.
BLOCKS = [(2, 5), (3, 5), (4, 5), *[(1, queries) for queries in range(6)]]


@pytest.mark.parametrize(("heads_at_once", "queries_at_once"), BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_equal_the_whole(heads_at_once, queries_at_once, dtype):
    query, key, valid = voters(kv_heads=4, heads=8, q_len=5, pads=(20, 47))
    query, key = query.to(dtype), key.to(dtype)
    sinks = torch.randn(8)
    # Logits of one query for the two heads of a group, and the keys in float32 where they are not.
    one_query = 4 * 2 * 50
    keys = 0 if dtype == torch.float32 else 4 * 50 * 4
    max_bytes = max(1, heads_at_once * (keys + one_query * queries_at_once))
    options = {"group_reduce": "max", "softcap": 2.0, "sinks": sinks}
    whole = received(query, key, valid, **options)
    with Allocations(query, key, valid, sinks) as made:
        parts = received(query, key, valid, **options, max_bytes=max_bytes)
    torch.testing.assert_close(parts, whole, atol=1e-6, rtol=1e-6)
    assert_dense(parts, query, key, valid, **options)
    assert made.largest(parts) <= max(max_bytes, one_query)


@pytest.mark.parametrize("kv_heads", [2, 8])
def test_scoring_memory_is_bounded(kv_heads):
    query = torch.randn(1, 8, 32, 32).bfloat16()
    key = torch.randn(1, kv_heads, 20000, 32).bfloat16()
    valid = torch.ones(1, kv_heads, 20000, dtype=torch.bool)
    max_bytes = 4 * 2**20
    with Allocations(query, key, valid) as made:
        votes = received(query, key, valid, max_bytes=max_bytes)
    assert made.largest(votes) <= max_bytes
    # One block's tensors may still be alive while the next block's are made.
    assert made.peak - votes.untyped_storage().nbytes() <= 1.75 * max_bytes
    # Every query gives one vote in all to each KV head.
    torch.testing.assert_close(votes.sum(dim=(1, 2)), torch.tensor([32.0 * kv_heads]))


def test_a_head_of_many_keys_is_widened_piece_by_piece():
    """In half precision the float32 copy of one head's keys alone may exceed the bound."""
    query = torch.randn(1, 2, 32, 64).bfloat16()
    key = torch.randn(1, 1, 40000, 64).bfloat16()
    max_bytes = 4 * 2**20
    assert 2 * max_bytes < 4 * 40000 * 64
    with Allocations(query, key) as made:
        votes = received(query, key, None, max_bytes=max_bytes)
    assert made.peak - votes.untyped_storage().nbytes() <= 1.75 * max_bytes
    torch.testing.assert_close(votes, received(query, key, None), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("text", ["", "0", "-3", "1.5", "many"])
def test_a_bound_on_scoring_that_is_none_is_refused(monkeypatch, text):
    from kvcompress import PolicyConfigError
    from kvcompress.tensors import scoring_bytes

    monkeypatch.setenv("KVCOMPRESS_SCORING_MIB", text)
    scoring_bytes.cache_clear()
    with pytest.raises(PolicyConfigError, match=r"KVCOMPRESS_SCORING_MIB=.* 64 is the default"):
        received(*voters())
    scoring_bytes.cache_clear()


def test_the_bound_on_scoring_can_be_set(monkeypatch):
    from kvcompress.tensors import scoring_bytes

    query = torch.randn(1, 4, 32, 32)
    key = torch.randn(1, 4, 20000, 32)
    peaks = []
    for mib in ("64", "4"):
        monkeypatch.setenv("KVCOMPRESS_SCORING_MIB", mib)
        scoring_bytes.cache_clear()
        with Allocations(query, key) as made:
            received(query, key, None)
        peaks.append(made.peak)
    scoring_bytes.cache_clear()
    assert peaks[0] > 10 * 2**20 and peaks[1] <= 1.75 * 4 * 2**20


def test_blocks_on_the_cpu_are_small_enough_to_be_used_again():
    query, key = torch.randn(1, 4, 1500, 32), torch.randn(1, 4, 3000, 32)
    with Allocations(query, key) as made:
        ours = received(query, key, None)
    whole = received(query, key, None, max_bytes=2**30)
    torch.testing.assert_close(ours, whole, atol=1e-3, rtol=1e-5)
    assert 8 * 2**20 < made.peak <= 20 * 2**20


def test_masks_and_queries_that_cannot_be_are_refused():
    from kvcompress import ShapeError, UnsupportedModeError
    from kvcompress.testing import kept_positions

    query, key, value, mask = tensors(40, 30)
    for wrong in (mask.flip(1), mask.roll(-3, dims=1)):
        with pytest.raises(UnsupportedModeError, match="zeros at the left"):
            kept_positions(SMALL, query, key, value, attention_mask=wrong)
    with pytest.raises(UnsupportedModeError, match=r"keep_ratio=0\.5.* 30 to 40 tokens"):
        kept_positions(
            "snapkv:keep_ratio=0.5:window_size=4", query, key, value, attention_mask=mask
        )
    with pytest.raises(ShapeError, match="query has 40 tokens and key 39"):
        kept_positions(SMALL, query, key[:, :, 1:], value[:, :, 1:])


@pytest.mark.parametrize("pooling", ["avg", "max"])
@pytest.mark.parametrize("length", [3, 8])
def test_scores_of_a_prompt_no_longer_than_the_window(pooling, length):
    from kvcompress.testing import scores

    query, key, value, _ = tensors(length)
    assert scores(f"{SMALL}:pooling={pooling}", query, key, value).isposinf().all()
