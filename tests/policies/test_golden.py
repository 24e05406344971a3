"""The policies beside SnapKV keep what reference implementations keep; see tests/data/golden.

PyramidKV's votes are SnapKV's, whose own golden vectors are in test_snapkv_golden.py: here it is
about how many rows each layer keeps.
"""

import json
from pathlib import Path

import pytest
import torch

KVF = {
    "h2o_kvf": ["w8_c32", "w16_c64_b2", "w32_c80", "passthrough_short"],
    "gqa_kvf": ["h2o_mean_g3"],
    "streamingllm_kvf": ["c32_sink4", "c32_w8_sink24", "exact_capacity", "passthrough_short"],
}
PYRAMIDS = [
    "pyramid_c80_L256",
    "pyramid_clipped_L136",
    "uniform_mid_L100",
    "tiny_budget_flat_double",
    "passthrough_short",
]
KVPRESS = [
    *["observed_A_r50", "observed_B_r70", "observed_C_r60"],
    *["stream_A_r50", "stream_B_r80", "stream_C_r25"],
    *["tova_A_r50", "tova_B_r75", "tova_C_r90"],
    *["knorm_A_r50", "knorm_B_r30", "knorm_C_r90_floor"],
]
SNAPKV = {"SnapKVCluster", "SnapKVPress"}  # in test_snapkv_golden.py
NOT_OFFERED = {"KeyDiffPress", "LagKVPress", "ExpectedAttentionPress", "PyramidKVPress"}

KVF_CASES = [(name, case) for name, cases in KVF.items() for case in cases]
SCHEDULES = json.loads(
    (Path(__file__).parents[1] / "data/golden/pyramidkv_kvf_schedules.json").read_text()
)["schedules"]


pytestmark = pytest.mark.usefixtures("one_thread")


def kvf_spec(name, meta):
    """Our string for a case of KVCache-Factory's H2O or StreamingLLM."""
    capacity, window = meta["params"]["max_capacity_prompt"], meta["params"]["window_size"]
    if name == "streamingllm_kvf":
        return f"streaming_llm:capacity={capacity}:n_sink={capacity - window}"
    return f"h2o:capacity={capacity}:recent_ratio={window / capacity}:normalize=none"


def kvpress_spec(meta, layer):
    """Our string for a case of kvpress."""
    return {
        "ObservedAttentionPress": "h2o:capacity={}:recent_ratio=0:normalize=observers",
        "StreamingLLMPress": "streaming_llm:capacity={}:n_sink={n_sink}",
        "TOVAPress": "tova:capacity={}",
        "KnormPress": "knorm:capacity={}",
    }[meta["press"]].format(meta["n_kept"][layer], **meta["params"])


def pyramid_spec(params, rounding):
    """Our string for a case of KVCache-Factory's PyramidKV; its schedules name no kernel."""
    return (
        f"pyramidkv:capacity={params['max_capacity_prompt']}:window_size={params['window_size']}"
        f":beta={params['beta']}:kernel_size={params.get('kernel_size', 5)}:pooling=avg"
        f":rounding={rounding}"
    )


def find(golden, name, case):
    cases, tensors = golden(name)
    (meta,) = [meta for meta in cases if meta["id"] == case]
    return meta, tensors


def kvf_case(golden, name, case):
    meta, tensors = find(golden, name, case)
    return meta, tensors, [tensors[f"{case}/{part}"] for part in ("query", "key", "value")]


def kvpress_case(golden, case, layer):
    meta, tensors = find(golden, "kvpress_gqa", case)
    fixture = f"fixture_{meta['fixture']}/layer{layer}"
    given = [tensors[f"{fixture}/{part}"] for part in ("query", "key", "value")]
    outcome = [tensors[f"{case}/layer{layer}/{part}"] for part in ("scores", "kept_indices_sorted")]
    return meta, given, *outcome


def assert_close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_no_case_is_left_out(golden):
    lists = {**KVF, "pyramidkv_kvf": PYRAMIDS, "kvpress_gqa": KVPRESS}
    for name, ids in lists.items():
        cases = [
            case
            for case in golden(name)[0]
            if not {case.get("cluster"), case.get("press")} & (SNAPKV | NOT_OFFERED)
        ]
        assert sorted(case["id"] for case in cases) == sorted(ids)
        # So sets may be compared strictly.
        assert not any(case["boundary_tie"] for case in cases)
    assert [len(ids) for ids in lists.values()] == [4, 1, 4, 5, 12]
    assert len(SCHEDULES) == 8


@pytest.mark.parametrize(("name", "case"), KVF_CASES)
def test_h2o_and_streaming_llm_of_kvcache_factory(golden, name, case):
    from kvcompress.testing import kept_positions, scores

    meta, tensors, given = kvf_case(golden, name, case)
    spec = kvf_spec(name, meta)
    length, window = given[1].shape[2], meta["params"]["window_size"]

    kept = kept_positions(spec, *given)
    assert kept.shape[-1] == meta["rows_out"] == min(meta["params"]["max_capacity_prompt"], length)
    assert torch.equal(kept, tensors[f"{case}/all_positions"].sort(dim=-1).values)
    if meta["passthrough"]:
        assert torch.equal(kept, torch.arange(length).expand_as(kept))

    expected = tensors.get(f"{case}/scores")
    assert (expected is None) == (name == "streamingllm_kvf" or meta["passthrough"])
    if expected is not None:
        ours = scores(spec, *given)
        assert_close(ours[..., : length - window], expected)
        assert ours[..., length - window :].isposinf().all()


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("case", KVPRESS)
def test_kvpress(golden, case, layer):
    from kvcompress.testing import kept_positions, scores

    meta, given, expected, theirs = kvpress_case(golden, case, layer)
    length = given[1].shape[2]
    assert meta["n_kept"][layer] == int(length * (1 - meta["params"]["compression_ratio"]))
    spec = kvpress_spec(meta, layer)
    assert torch.equal(kept_positions(spec, *given), theirs)

    # StreamingLLM is about places: its scores are anybody's choice.
    if meta["press"] != "StreamingLLMPress":
        ours = scores(spec, *given)
        fixed = 1 if meta["press"] == "TOVAPress" else 0
        assert_close(ours[..., : length - fixed], expected[..., : length - fixed])
        assert ours[..., length - fixed :].isposinf().all()


def observers(length):
    return torch.arange(length, 0, -1)


def attention(query, key):
    """Causal, of every query head: batch x heads x queries x rows."""
    keys = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    logits = query @ keys.transpose(2, 3) / query.shape[-1] ** 0.5
    hidden = torch.ones(logits.shape[2:], dtype=torch.bool).triu(1)
    return logits.masked_fill(hidden, float("-inf")).softmax(dim=-1)


def grouped(votes, key):
    return votes.unflatten(1, (key.shape[1], -1)).mean(dim=2)


def accumulated(query, key):
    return grouped(attention(query, key).sum(dim=2), key)


def averaged(query, key):
    return accumulated(query, key) / observers(key.shape[2])


def last_queries(query, key):
    return grouped(attention(query, key)[:, :, -8:].sum(dim=2), key)


def largest_in_group(query, key):
    votes = attention(query, key).sum(dim=2) / observers(key.shape[2])
    return votes.unflatten(1, (key.shape[1], -1)).amax(dim=2)


def interleaved_heads(query, key):
    """Query head h with KV head h % kv_heads."""
    order = torch.arange(query.shape[1]).view(-1, key.shape[1]).T.flatten()
    return averaged(query[:, order], key)


def newest_by_head(query, key):
    return grouped(attention(query, key)[:, :, -1], key)


def newest_of_all(query, key):
    votes = attention(query, key)[:, :, -1].mean(dim=1, keepdim=True)
    return votes.expand(key.shape[:3])


def small_keys(query, key):
    return -key.norm(dim=-1)


def large_keys(query, key):
    return key.norm(dim=-1)


# The right rule, and wrong ones.
H2O_RULES = accumulated, [averaged, last_queries]
PRESS_RULES = {
    "ObservedAttentionPress": (
        averaged,
        [accumulated, last_queries, largest_in_group, interleaved_heads],
    ),
    "TOVAPress": (newest_of_all, [newest_by_head]),
    "KnormPress": (small_keys, [large_keys]),
}


def assert_told_apart(rules, query, key, fixed, theirs):
    right, wrong = rules
    kept = theirs.shape[-1]
    assert torch.equal(kept_by(right, query, key, fixed, kept), theirs)
    for rule in wrong:
        assert not torch.equal(kept_by(rule, query, key, fixed, kept), theirs), rule


def kept_by(rule, query, key, fixed, kept):
    scores = rule(query, key).clone()
    scores[..., scores.shape[-1] - fixed :] = float("inf")
    return scores.topk(kept, dim=-1).indices.sort(dim=-1).values


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("case", [case for case in KVPRESS if not case.startswith("stream")])
def test_kvpress_vectors_tell_wrong_rules_from_the_right_one(golden, case, layer):
    meta, (query, key, _), _, theirs = kvpress_case(golden, case, layer)
    fixed = 1 if meta["press"] == "TOVAPress" else 0
    assert_told_apart(PRESS_RULES[meta["press"]], query, key, fixed, theirs)


@pytest.mark.parametrize(
    ("name", "case"),
    [
        (name, case)
        for name, case in KVF_CASES
        if name != "streamingllm_kvf" and case != "passthrough_short"
    ],
)
def test_h2o_vectors_tell_wrong_rules_from_the_right_one(golden, name, case):
    meta, tensors, (query, key, _) = kvf_case(golden, name, case)
    theirs = tensors[f"{case}/all_positions"].sort(dim=-1).values
    assert_told_apart(H2O_RULES, query, key, meta["params"]["window_size"], theirs)


@pytest.mark.parametrize("case", [case for case in KVPRESS if case.startswith("observed")])
def test_h2o_without_normalizing_is_another_rule(golden, case):
    from kvcompress.testing import kept_positions

    meta, given, _, theirs = kvpress_case(golden, case, 0)
    spec = kvpress_spec(meta, 0).replace("normalize=observers", "normalize=none")
    kept = kept_positions(spec, *given)
    assert torch.equal(kept, kept_by(accumulated, *given[:2], 0, theirs.shape[-1]))
    assert not torch.equal(kept, theirs)


@pytest.mark.parametrize(
    "params", SCHEDULES, ids=lambda p: "c{max_capacity_prompt}_L{seq_len}".format(**p)
)
def test_pyramidkv_schedules_of_kvcache_factory(params):
    from kvcompress.plugins import policy_from

    policy = policy_from(pyramid_spec(params, "reference"))
    layers, capacity = params["num_hidden_layers"], params["max_capacity_prompt"]
    rows = [policy.budget(params["seq_len"], layer, layers) for layer in range(layers)]
    assert rows == params["rows_per_layer"]
    # They leave a prompt below the capacity alone, whichever branch its length would take.
    for short in (1, params["window_size"], capacity - 1):
        assert all(policy.budget(short, layer, layers) >= short for layer in range(layers))


@pytest.mark.parametrize("case", PYRAMIDS)
def test_pyramidkv_of_kvcache_factory(golden, case):
    from kvcompress.plugins import policy_from
    from kvcompress.testing import kept_positions, scores

    meta, tensors, given = kvf_case(golden, "pyramidkv_kvf", case)
    policy = policy_from(pyramid_spec(meta["params"], "reference"))
    length, layers = given[1].shape[2], meta["params"]["num_hidden_layers"]
    prefix = length - meta["params"]["window_size"]
    window = torch.arange(prefix, length).expand(*given[1].shape[:2], -1)

    assert len(meta["rows_per_layer"]) == layers
    for layer, rows in enumerate(meta["rows_per_layer"]):
        kept = kept_positions(policy, *given, layer_idx=layer, num_layers=layers)
        assert kept.shape[-1] == rows == min(policy.budget(length, layer, layers), length)
        if meta["passthrough"]:
            assert torch.equal(kept, torch.arange(length).expand_as(kept))
            continue
        theirs = tensors[f"{case}/kept_prefix_positions/layer{layer}"].sort(dim=-1).values
        assert torch.equal(kept, torch.cat([theirs, window], dim=-1))

    expected = tensors.get(f"{case}/scores")
    assert (expected is None) == meta["passthrough"]
    if expected is not None:
        for layer in (0, layers - 1):
            ours = scores(policy, *given, layer_idx=layer, num_layers=layers)
            assert_close(ours[..., :prefix], expected)
            assert ours[..., prefix:].isposinf().all()


def test_pyramidkv_exact_spends_what_the_reference_overspends(golden):
    from kvcompress.plugins import policy_from

    settings = [*SCHEDULES, *[case["params"] for case in golden("pyramidkv_kvf")[0]]]
    for params in settings:
        layers, capacity = params["num_hidden_layers"], params["max_capacity_prompt"]
        exact, reference = (
            policy_from(pyramid_spec(params, how)) for how in ("exact", "reference")
        )
        long = 10 * capacity
        theirs = [reference.budget(long, layer, layers) for layer in range(layers)]
        assert sum(theirs) > layers * capacity
        # The shorter ones leave no room for the lowest layers' share.
        for length in (capacity + 1, capacity + capacity // 2, long):
            rows = [exact.budget(length, layer, layers) for layer in range(layers)]
            assert sum(rows) == layers * capacity
            assert rows == sorted(rows, reverse=True)
            assert length >= rows[0] and rows[-1] > params["window_size"]


def test_pyramidkv_exact_of_one_layer_is_snapkv(golden):
    from kvcompress.testing import kept_positions, scores

    for case in PYRAMIDS:
        meta, _, given = kvf_case(golden, "pyramidkv_kvf", case)
        pyramid = pyramid_spec(meta["params"], "exact")
        parts = pyramid.replace("pyramidkv", "snapkv").split(":")
        snapkv = ":".join(part for part in parts if not part.startswith(("beta", "rounding")))
        for ask in (kept_positions, scores):
            assert torch.equal(ask(pyramid, *given), ask(snapkv, *given))
