"""SnapKV keeps what the reference implementations keep; see tests/data/golden/README.md."""

import pytest
import torch

OFFICIAL = [
    "avg_k5_w16",
    "max_k7_w8",
    "avg_k13_w16_b2",
    "avg_k7_w32_d64",
    "passthrough_short",
    "exact_capacity",
    "max_k5_w8_tie",
    "max_k13_w32_d80",
]
GROUPED = ["snap_mean_avg_g3", "snap_max_max_g3", "snap_mean_max_g4"]
KVPRESS = ["snap_A_r50", "snap_B_r70", "snap_C_r60"]
POOLING = {"avgpool": "avg", "maxpool": "max"}


def snapkv(params):
    from kvcompress import SnapKVPolicy

    return SnapKVPolicy(
        capacity=params["max_capacity_prompt"],
        window_size=params["window_size"],
        kernel_size=params["kernel_size"],
        pooling=POOLING[params["pooling"]],
        group_reduce=params.get("gqa_score_agg", "mean"),
    )


def find(cases, name):
    (case,) = [case for case in cases if case["id"] == name]
    return case


def assert_close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "ids", "wanted"),
    [
        ("snapkv_official", OFFICIAL, lambda case: True),
        ("gqa_kvf", GROUPED, lambda case: case["cluster"] == "SnapKVCluster"),
        ("kvpress_gqa", KVPRESS, lambda case: case["press"] == "SnapKVPress"),
    ],
    ids=["official", "grouped", "kvpress"],
)
def test_no_case_is_left_out(golden, name, ids, wanted):
    cases, _ = golden(name)
    assert sorted(case["id"] for case in cases if wanted(case)) == sorted(ids)
    assert len(set(ids)) == len(ids) == {"snapkv_official": 8}.get(name, 3)


@pytest.mark.parametrize(
    ("name", "case"),
    [
        *[("snapkv_official", case) for case in OFFICIAL],
        *[("gqa_kvf", case) for case in GROUPED],
    ],
)
def test_the_authors_and_kvcache_factory(golden, name, case):
    from kvcompress.testing import kept_positions, scores

    cases, tensors = golden(name)
    meta = find(cases, case)
    query, key, value = (tensors[f"{case}/{part}"] for part in ("query", "key", "value"))
    window, capacity = meta["params"]["window_size"], meta["params"]["max_capacity_prompt"]
    prefix = key.shape[2] - window
    policy = snapkv(meta["params"])

    kept = kept_positions(policy, query, key, value)
    ours = scores(policy, query, key, value)
    assert (kept.diff(dim=-1) > 0).all()
    assert ours[..., prefix:].isposinf().all()
    theirs = tensors[f"{case}/all_positions"].sort(dim=-1).values
    assert kept.shape == theirs.shape
    assert kept.shape[-1] == meta["rows_out"] == min(capacity, key.shape[2])

    if meta["passthrough"]:
        assert torch.equal(kept, torch.arange(key.shape[2]).expand_as(kept))
    else:
        expected = tensors[f"{case}/scores"]
        assert_close(ours[..., :prefix], expected)
        if meta["boundary_tie"]:
            assert_equal_but_for_ties(kept, theirs, expected, prefix)
            return
    assert torch.equal(kept, theirs)


def assert_equal_but_for_ties(kept, theirs, expected, prefix):
    window = torch.arange(prefix, kept.max() + 1)
    rows = kept.shape[-1] - len(window)
    assert torch.equal(kept[..., rows:], window.expand_as(kept[..., rows:]))
    values = expected.gather(2, kept[..., :rows])
    best = expected.gather(2, theirs[..., :rows])
    assert_close(values.sort(dim=-1).values, best.sort(dim=-1).values)
    # Strictly above the cut by more than float noise: kept in any right answer.
    above = expected > best.amin(dim=-1, keepdim=True) * (1 + 1e-5)
    found = torch.zeros_like(above).scatter(2, kept[..., :rows], True)
    assert above.any() and found[above].all()


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("case", KVPRESS)
def test_kvpress(golden, case, layer):
    from kvcompress import SnapKVPolicy
    from kvcompress.testing import kept_positions, scores

    cases, tensors = golden("kvpress_gqa")
    meta = find(cases, case)
    params, fixture = meta["params"], f"fixture_{meta['fixture']}/layer{layer}"
    query, key, value = (tensors[f"{fixture}/{part}"] for part in ("query", "key", "value"))
    capacity = int(key.shape[2] * (1 - params["compression_ratio"]))
    assert capacity == meta["n_kept"][layer]
    window = params["window_size"]
    prefix = key.shape[2] - window
    policy = SnapKVPolicy(
        capacity=capacity, window_size=window, kernel_size=params["kernel_size"], pooling="avg"
    )

    # Theirs are means over the window's queries.
    ours = scores(policy, query, key, value)[..., :prefix] / window
    assert_close(ours, tensors[f"{case}/layer{layer}/scores"][..., :prefix])
    kept = kept_positions(policy, query, key, value)
    assert torch.equal(kept, tensors[f"{case}/layer{layer}/kept_indices_sorted"])


def test_only_the_windows_queries_are_read(golden):
    from kvcompress.testing import kept_positions, scores

    cases, tensors = golden("snapkv_official")
    meta = find(cases, "avg_k5_w16")
    policy = snapkv(meta["params"])
    query, key, value = (tensors[f"avg_k5_w16/{part}"] for part in ("query", "key", "value"))
    last = query[:, :, -meta["params"]["window_size"] :]
    earlier = query.clone()
    earlier[:, :, : -meta["params"]["window_size"]] = float("nan")
    for given in (last, earlier):
        assert torch.equal(
            kept_positions(policy, given, key, value), kept_positions(policy, query, key, value)
        )
        assert torch.equal(scores(policy, given, key, value), scores(policy, query, key, value))
