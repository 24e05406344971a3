"""The seam by itself: masks, leases, patches."""

import copy
import gc
import pickle

import pytest
import torch


def block_mask(pads, q_len, kv_len):
    from torch.nn.attention.flex_attention import create_block_mask

    left = torch.tensor(pads)
    first = kv_len - q_len

    def rule(row, head, q_idx, kv_idx):
        return (kv_idx <= q_idx + first) & (kv_idx >= left[row])

    return create_block_mask(rule, len(pads), 1, q_len, kv_len, "cpu")


def dense_mask(pads, q_len, kv_len):
    columns = torch.arange(kv_len)
    queries = torch.arange(kv_len - q_len, kv_len)
    causal = columns <= queries[:, None]
    return (causal & (columns >= torch.tensor(pads)[:, None, None]))[:, None]


@pytest.mark.parametrize("q_len", [1, 5, 12])
def test_the_last_query_sees_all_but_padding(q_len):
    from kvcompress.attention import visible_to_last

    pads = [0, 3]
    dense = dense_mask(pads, q_len, 12)
    floats = torch.zeros(dense.shape).masked_fill(~dense, torch.finfo(torch.float32).min)
    flat = torch.arange(12) >= torch.tensor(pads)[:, None]
    for mask in (dense, floats, floats.bfloat16(), flat.long(), block_mask(pads, q_len, 12)):
        assert torch.equal(visible_to_last(mask, 2, 12), flat)
    assert visible_to_last(None, 2, 12) is None
    assert torch.equal(visible_to_last(dense[:1], 2, 12), torch.ones(2, 12, dtype=torch.bool))


def test_a_mask_of_another_form_is_refused():
    from kvcompress import UnsupportedModeError
    from kvcompress.attention import visible_to_last

    with pytest.raises(UnsupportedModeError, match="3 dimensions"):
        visible_to_last(torch.ones(2, 5, 5), 2, 5)


def test_fit_mask_drops_columns_at_the_left():
    from kvcompress.attention import fit_mask

    dense = dense_mask([0, 3], 2, 12)
    assert fit_mask(None, 9) is None
    assert fit_mask(dense, 12) is dense
    assert torch.equal(fit_mask(dense, 9), dense[..., 3:])
    flat = torch.tensor([[0, 0, 1, 1]])
    assert fit_mask(flat, 3).tolist() == [[0, 1, 1]]
    fitted = fit_mask(block_mask([0, 3], 2, 300), 140)
    assert fitted.shape == (2, 1, 2, 140)
    row, head = torch.tensor(1), torch.tensor(0)
    seen = [
        [bool(fitted.mask_mod(row, head, torch.tensor(q), torch.tensor(k))) for k in range(140)]
        for q in range(2)
    ]
    assert seen == [[True] * 139 + [False], [True] * 140]


def test_leases_keep_the_patches_until_the_last_is_gone(no_trace):
    from transformers import GenerationMixin
    from transformers.modeling_utils import AttentionInterface

    from kvcompress.attention import Lease

    def patched():
        return [
            hasattr(method, "__wrapped__")
            for method in (
                AttentionInterface.get_interface,
                GenerationMixin._get_candidate_generator,
                GenerationMixin._validate_model_kwargs,
            )
        ]

    plain = patched()
    first = Lease()
    assert all(patched()) and not any(plain)
    second, third = copy.deepcopy(first), pickle.loads(pickle.dumps(first))
    first.release()
    del first, second
    gc.collect()
    assert all(patched())
    third.release()
    third.release()
    assert patched() == plain


def test_a_patch_on_top_of_ours_is_left_alone(monkeypatch):
    from transformers.modeling_utils import AttentionInterface

    from kvcompress.attention import Lease

    before = AttentionInterface.get_interface
    lease = Lease()
    inner = AttentionInterface.get_interface

    def theirs(self, *args):
        return inner(self, *args)

    monkeypatch.setattr(AttentionInterface, "get_interface", theirs)
    lease.release()
    assert AttentionInterface.get_interface is theirs
    monkeypatch.setattr(AttentionInterface, "get_interface", before)
