"""The contracts of every policy, and that the choice is random."""

import torch
from kvcompress_random.policy import RandomPolicy

from kvcompress.testing import check_policy, kept_positions

KEY = torch.zeros(1, 4, 64, 8)  # batch, KV heads, tokens, head size


def kept(seed: int, layer: int = 0) -> torch.Tensor:
    """The 16 of 64 tokens that every head keeps."""
    policy = RandomPolicy(capacity=16, seed=seed)
    return kept_positions(policy, KEY, KEY, KEY, layer_idx=layer, num_layers=2)[0]


def test_contracts() -> None:
    """Purity, padding, batches, devices: what every policy must satisfy."""
    check_policy(RandomPolicy, capacity=20)


def test_seeds_layers_and_heads_keep_different_rows() -> None:
    """And the same ones when asked again."""
    choices = [tuple(head.tolist()) for s in (0, 1) for n in (0, 1) for head in kept(s, n)]
    assert len(set(choices)) == 16
    assert torch.equal(kept(seed=1), kept(seed=1))


def test_every_token_is_equally_likely() -> None:
    """Each of 64 tokens is expected in 400 of 1600 choices of 16; the deviation is 17.3."""
    counts = sum(kept(seed).flatten().bincount(minlength=64) for seed in range(400))
    assert counts.sum() == 400 * 4 * 16
    assert (counts - 400).abs().max() < 4 * 17.3
