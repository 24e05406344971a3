"""From scores to kept rows, with policies made for the purpose."""

from typing import ClassVar

import pytest
import torch

INFINITY = float("inf")


@pytest.fixture(scope="session")
def toy():
    """A policy that scores with the view's values and protects the last rows."""
    from kvcompress import Policy

    class ToyPolicy(Policy):
        name: ClassVar[str] = "toy"

        last: int = 0
        dtype: str = "float32"
        columns: int = 0

        def scores(self, view):
            scores = view.value[..., 0].to(getattr(torch, self.dtype))
            return scores[..., self.columns :]

        def protected(self, view):
            if not self.last:
                return None
            rows = torch.arange(view.held) >= view.held - self.last
            return rows.expand_as(view.valid)

    return lambda **fields: ToyPolicy(capacity=4, **fields)


def view_of(scores, pads=(0,)):
    """A view whose values are the scores: one row of a batch and one head for each list."""
    from kvcompress import LayerView

    value = torch.tensor(scores, dtype=torch.float32)[..., None]
    batch, kv_heads, held, _ = value.shape
    positions = torch.arange(held) - torch.tensor(pads)[:, None, None]
    positions = positions.expand(batch, kv_heads, held).clamp(min=-1)
    return LayerView(
        query=torch.zeros(batch, kv_heads, 1, 1),
        key=torch.zeros(batch, kv_heads, held, 1),
        value=value,
        kv_heads=kv_heads,
        locate=lambda: positions,
        scaling=1.0,
        layer_idx=0,
        num_layers=1,
        seen=held,
        phase="prefill",
    )


def select(policy, view, kept, keep_always=None):
    from kvcompress.selection import select_rows

    return select_rows(policy, view, kept, keep_always).tolist()


def test_the_highest_are_kept_in_order(toy):
    view = view_of([[[5, 1, 4, 2, 3], [1, 2, 3, 4, 5]]])
    assert select(toy(), view, 3) == [[[0, 2, 4], [2, 3, 4]]]
    assert select(toy(), view, 5) == [[[0, 1, 2, 3, 4]] * 2]
    assert select(toy(), view, 1) == [[[0], [4]]]


def test_padding_goes_before_any_real_row(toy):
    low = [-INFINITY, -1e38, -INFINITY, -3.4e38]
    view = view_of([[[9, INFINITY, *low]], [[*low, 9, INFINITY]]], pads=(2, 2))
    assert select(toy(), view, 4) == [[[2, 3, 4, 5]]] * 2
    for row in select(toy(), view, 5):
        assert row[0][0] < 2 and row[0][1:] == [2, 3, 4, 5]
    assert select(toy(), view, 1) == [[[3]], [[5]]]


def test_padding_goes_before_any_real_row_even_if_protected(toy):
    view = view_of([[[9, 9, 9, -INFINITY, -INFINITY]]], pads=(3,))
    assert select(toy(last=4), view, 2) == [[[3, 4]]]
    everything = torch.ones(1, 1, 5, dtype=torch.bool)
    assert select(toy(), view, 2, everything) == [[[3, 4]]]


def test_rows_scored_nan_are_the_last_to_be_kept_but_for_padding(toy):
    view = view_of([[[9, 9, 5, float("nan"), -1e30, 4]]], pads=(2,))
    assert select(toy(), view, 3) == [[[2, 4, 5]]]
    assert select(toy(), view, 4) == [[[2, 3, 4, 5]]]
    assert select(toy(last=1), view, 1) == [[[5]]]


def test_a_row_with_fewer_real_rows_keeps_padding_at_the_left(toy):
    view = view_of([[[1, 2, 3, 4, 5, 6]], [[9, 9, 9, 9, 5, 6]]], pads=(0, 4))
    first, second = select(toy(), view, 3)
    assert first == [[3, 4, 5]]
    assert second[0][1:] == [4, 5] and second[0][0] < 4


@pytest.mark.parametrize("score", [-INFINITY, -3.4e38, 0.0])
def test_protected_rows_are_kept_whatever_they_score(toy, score):
    best = [INFINITY, 3.4e38, 1e30, 1.0]
    view = view_of([[[*best, score, score]]])
    assert select(toy(last=2), view, 2) == [[[4, 5]]]
    kept = select(toy(last=2), view, 3)
    assert kept[0][0][1:] == [4, 5]
    assert select(toy(last=2), view, 5)[0][0][-2:] == [4, 5]


def test_what_the_caller_keeps_is_kept_beside_what_the_policy_protects(toy):
    view = view_of([[[0, 1, 9, 8, 0, 0]], [[0, 1, 9, 8, 0, 0]]])
    always = torch.tensor([[[False, True, False, False, False, False]]])
    assert select(toy(last=2), view, 3, always) == [[[1, 4, 5]]] * 2
    assert select(toy(last=2), view, 4, always) == [[[1, 2, 4, 5]]] * 2
    per_row = torch.cat([always, always.roll(-1, dims=-1)])
    assert select(toy(), view, 2, per_row) == [[[1, 2]], [[0, 2]]]


def test_final_scores_mark_protection_and_padding(toy):
    from kvcompress.selection import final_scores, judge

    view = view_of([[[7, INFINITY, -INFINITY, 2, 3]]], pads=(1,))
    always = torch.tensor([[[True, False, False, True, False]]])
    largest = torch.finfo(torch.float32).max
    scores = final_scores([judge(toy(last=1), view, always)])[0]
    assert scores.tolist() == [[[-INFINITY, largest, -largest, INFINITY, INFINITY]]]
    assert view.value[0, 0, 0, 0] == 7


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16", "int64"])
def test_scores_of_another_dtype_are_refused(toy, dtype):
    from kvcompress import PolicyConfigError

    match = rf"toy: scores\(\) returned torch\.{dtype} \(1, 1, 3\); it must return torch\.float32"
    with pytest.raises(PolicyConfigError, match=match):
        select(toy(dtype=dtype), view_of([[[1, 2, 3]]]), 2)


def test_scores_of_another_shape_are_refused(toy):
    from kvcompress import PolicyConfigError

    match = r"returned torch\.float32 \(1, 1, 2\); .* torch\.float32 \(1, 1, 3\) \(batch, kv_heads"
    with pytest.raises(PolicyConfigError, match=match):
        select(toy(columns=1), view_of([[[1, 2, 3]]]), 2)


def test_the_base_policy_scores_nothing():
    from kvcompress import Policy

    class EmptyPolicy(Policy):
        name: ClassVar[str] = "empty"

    with pytest.raises(NotImplementedError):
        select(EmptyPolicy(capacity=4), view_of([[[1, 2, 3]]]), 2)
