"""The pure functions on tensors, against plain loops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sizes = st.integers(1, 4)
quick = settings(deadline=None, max_examples=100)


@st.composite
def scored(draw):
    """Scores with many ties and infinities, and how many to keep."""
    batch, kv_heads, kv_len = draw(sizes), draw(sizes), draw(st.integers(1, 12))
    value = st.sampled_from([float("-inf"), -2.0, 0.0, 0.5, 1.0, float("inf")])
    values = draw(
        st.lists(value, min_size=batch * kv_heads * kv_len, max_size=batch * kv_heads * kv_len)
    )
    scores = torch.tensor(values).view(batch, kv_heads, kv_len)
    return scores, draw(st.integers(1, kv_len))


@quick
@given(scored())
def test_top_positions_are_the_top_ascending_and_the_earliest_among_equals(case):
    from kvcompress.tensors import top_positions

    scores, kept = case
    before = scores.clone()
    columns = top_positions(scores, kept)
    assert columns.shape == (*scores.shape[:2], kept)
    assert columns.dtype == torch.int64
    assert torch.equal(scores, before)
    for row, chosen in zip(
        scores.flatten(0, 1).tolist(), columns.flatten(0, 1).tolist(), strict=True
    ):
        best = sorted(range(len(row)), key=lambda column: -row[column])
        assert chosen == sorted(best[:kept])


@quick
@given(
    *[sizes] * 4, st.integers(0, 5), st.sampled_from([torch.float32, torch.bfloat16]), st.booleans()
)
def test_gather_rows(batch, kv_heads, kv_len, dim, kept, dtype, view):
    from kvcompress.tensors import gather_rows

    torch.manual_seed(0)
    rows = torch.randn(batch, kv_heads, kv_len, dim, dtype=dtype)
    # In any order, with repetitions.
    index = torch.randint(kv_len, (batch, kv_heads, kept))
    if view:  # not contiguous
        rows = torch.cat([rows, rows], dim=2)[:, :, :kv_len]
    gathered = gather_rows(rows, index)
    assert gathered.shape == (batch, kv_heads, kept, dim) and gathered.dtype == dtype
    for i in range(batch):
        for head in range(kv_heads):
            for place in range(kept):
                wanted = rows[i, head, index[i, head, place]]
                assert torch.equal(gathered[i, head, place], wanted)


@quick
@given(*[sizes] * 3, st.sampled_from(["mean", "max", "sum"]), st.lists(sizes, max_size=2))
def test_reduce_groups(kv_heads, group, kv_len, how, lead):
    from kvcompress.tensors import reduce_groups

    torch.manual_seed(0)
    scores = torch.randn(*lead, kv_heads * group, kv_len)
    reduced = reduce_groups(scores, kv_heads, how)
    assert reduced.shape == (*lead, kv_heads, kv_len)
    combine = {"mean": lambda values: sum(values) / group, "max": max, "sum": sum}[how]
    for head in range(kv_heads):
        members = [scores[..., head * group + member, :] for member in range(group)]
        for column in range(kv_len):
            columns = torch.stack([member[..., column] for member in members]).view(group, -1)
            wanted = torch.tensor([combine(values) for values in columns.T.tolist()])
            torch.testing.assert_close(reduced[..., head, column].flatten(), wanted)


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 4), (2, 4), (9, 2)])
def test_reduce_groups_refuses_uneven_groups(heads, kv_heads):
    from kvcompress import ShapeError
    from kvcompress.tensors import reduce_groups

    with pytest.raises(ShapeError, match=f"{heads} query heads .* {kv_heads} KV heads"):
        reduce_groups(torch.zeros(heads, 3), kv_heads, "mean")


@quick
@given(
    sizes,
    st.lists(st.integers(0, 12), min_size=1, max_size=4),
    st.integers(1, 10),
    st.sampled_from([torch.int32, torch.int64]),
    st.booleans(),
)
def test_positions_of(kv_heads, pads, kv_len, dtype, padded):
    from kvcompress.tensors import positions_of

    torch.manual_seed(0)
    columns = torch.randint(0, 20, (len(pads), kv_heads, kv_len)).to(dtype)
    before = columns.clone()
    positions = positions_of(columns, torch.tensor(pads) if padded else None)
    assert positions.dtype == torch.int64
    assert torch.equal(columns, before)
    for row, pad in enumerate(pads):
        for ours, column in zip(
            positions[row].flatten().tolist(), before[row].flatten().tolist(), strict=True
        ):
            assert ours == (column if not padded else column - pad if column >= pad else -1)


@pytest.mark.parametrize(
    ("heads", "key_heads", "kv_heads", "q_len", "message"),
    [
        (6, 4, 4, 3, "6 query heads, 4 key heads and 4 cache heads do not divide"),
        (6, 3, 2, 3, "6 query heads, 3 key heads and 2 cache heads do not divide"),
        (8, 2, 4, 3, "8 query heads, 2 key heads and 4 cache heads do not divide"),
        (4, 2, 2, 9, "9 queries for 8 rows: give the last queries only"),
    ],
)
def test_attention_received_refuses_shapes(heads, key_heads, kv_heads, q_len, message):
    from kvcompress import KVCompressError, ShapeError
    from kvcompress.tensors import attention_received

    with pytest.raises(ShapeError, match=message) as caught:
        attention_received(
            torch.zeros(1, heads, q_len, 4),
            torch.zeros(1, key_heads, 8, 4),
            torch.ones(1, kv_heads, 8, dtype=torch.bool),
            scaling=1.0,
        )
    assert isinstance(caught.value, KVCompressError) and isinstance(caught.value, ValueError)


@quick
@given(sizes, sizes, st.integers(1, 3), st.integers(1, 9), st.data())
def test_every_real_query_gives_one_vote_and_only_to_what_it_sees(
    batch, kv_heads, group, kv_len, data
):
    from kvcompress.tensors import attention_received

    torch.manual_seed(0)
    q_len = data.draw(st.integers(1, kv_len))
    pads = torch.tensor(data.draw(st.lists(st.integers(0, kv_len), min_size=batch, max_size=batch)))
    valid = (torch.arange(kv_len) >= pads[:, None])[:, None].expand(-1, kv_heads, -1)
    votes = attention_received(
        torch.randn(batch, kv_heads * group, q_len, 4),
        torch.randn(batch, kv_heads, kv_len, 4),
        valid,
        scaling=0.5,
        group_reduce="sum",
        max_bytes=data.draw(st.sampled_from([1, 100, 1000, 10**6])),
    )
    assert votes.dtype == torch.float32 and votes.isfinite().all()
    assert (votes >= 0).all() and (votes[~valid] == 0).all()
    real = (kv_len - pads).clamp(max=q_len)
    expected = (real * group).float()[:, None].expand(-1, kv_heads)
    torch.testing.assert_close(votes.sum(-1), expected, atol=1e-4, rtol=1e-4)
    # The last position is seen by the last query only.
    assert (votes[..., -1] <= group + 1e-4).all()
