"""Demo, needle and benchmarks on a tiny model saved to disk; what they measure, not how fast."""

import importlib
import itertools
import json

import pytest


def test_needle_stands_where_it_says(saved_model):
    from kvcompress_eval.needle import make_needle
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(saved_model)
    firsts = []
    for depth in (0.0, 0.5, 1.0):
        needle = make_needle(tokenizer, 300, depth, seed=3)
        inside = tokenizer.decode(needle.input_ids[needle.first : needle.last + 1])
        assert inside == needle.answer and len(needle.answer) == 7
        assert tokenizer.decode(needle.input_ids).count(needle.answer) == 1
        firsts.append(needle.first)
    assert firsts == sorted(firsts) and firsts[0] < 60 and firsts[2] > 300
    assert make_needle(tokenizer, 300, 0.5, seed=3) == make_needle(tokenizer, 300, 0.5, seed=3)
    assert needle.is_answered_by(f"It is {needle.answer}.")
    assert not needle.is_answered_by(f"It is {needle.answer}1.")
    assert not needle.is_answered_by(needle.answer[:6])


def test_timed_run_counts_what_is_held(make_model, prompt):
    from kvcompress_eval.measure import timed_run

    from kvcompress import policy_from

    model, ids = make_model(), prompt(70)["input_ids"]
    plain = timed_run(model, ids, None, max_new_tokens=5)
    policy = policy_from("snapkv:capacity=24:window_size=6")
    ours = timed_run(model, ids, policy, max_new_tokens=5)
    row = 2 * 2 * 8 * 4 * 3  # key and value, KV heads, head_dim, bytes, layers
    assert (plain.seen_tokens, plain.held_tokens, plain.cache_bytes) == (74, 74, 74 * row)
    assert (ours.seen_tokens, ours.held_tokens, ours.cache_bytes) == (74, 28, 28 * row)
    assert plain.kept is None and ours.kept.shape == (3, 70)
    assert ours.kept.sum(dim=1).tolist() == pytest.approx([24] * 3)
    assert (ours.kept[:, -6:] == 1).all()
    assert len(ours.decode_seconds) == 4 and len(ours.tokens) == 5


def test_demo_writes_picture_and_numbers(saved_model, tmp_path, capsys):
    from kvcompress_eval.demo import RUNS, demo

    out = tmp_path / "demo.png"
    demo(model=str(saved_model), tokens=600, depth=0.5, seed=0, out=out, device="cpu")
    assert out.read_bytes()[:4] == b"\x89PNG"
    record = json.loads(out.with_suffix(".json").read_text())
    assert [run["label"] for run in record["runs"]] == [label for label, _ in RUNS]
    seen = record["prompt_tokens"] + 15
    held = [run["held_tokens"] for run in record["runs"]]
    assert held == [seen, seen, 512 + 15, 256 + 15, 512 + 15, 256 + 15]
    assert record["number"] in capsys.readouterr().out


@pytest.mark.parametrize("command", ["demo", "stream"])
def test_a_missing_package_is_named_before_the_model_is_loaded(call, monkeypatch, command):
    import kvcompress_eval.comparison as comparison

    import kvcompress.models

    monkeypatch.setattr(comparison, "find_spec", lambda name: None)
    monkeypatch.setattr(kvcompress.models, "load", lambda *_, **__: pytest.fail("loaded"))
    code, _, err = call(command)
    assert code == 1
    assert "The picture needs matplotlib. Run: pip install 'kvcompress[plots]'." in err


@pytest.fixture
def unchecked(monkeypatch):
    """Contracts take seconds, and another test sees to them."""
    from kvcompress_eval import bench

    monkeypatch.setattr(bench, "check_contracts", lambda policy: True)


def test_bench_measures_both_in_turn(saved_model, tmp_path, monkeypatch, unchecked):
    from kvcompress_eval import bench as measures
    from kvcompress_eval.bench_command import What, bench, bench_report

    monkeypatch.setattr(measures, "ANSWER_TOKENS", 3)
    out, policy = tmp_path / "bench.jsonl", "snapkv:capacity=40:window_size=8"
    for what in What:
        if what is not What.all:
            bench(
                what=what,
                model=str(saved_model),
                policy=[policy],
                length=96,
                lengths=[96, 192],
                layers=1,
                new_tokens=4,
                repeats=2,
                steps=5,
                threads=1,
                device="cpu",
                out=out,
            )
    records = [json.loads(line) for line in out.read_text().splitlines()]
    ratios = [ratio for record in records for ratio in record["ratios"]]
    assert [
        (each["name"].removesuffix(f" with {policy} / plain"), each["pairs"]) for each in ratios
    ] == [
        (f"decode after 96 -> 40 with {policy} / plain from as many rows", 5),
        (f"prefill of 96 with {policy} / plain prefill", 2),
        ("first token of 96", 2),
        (f"peak memory of a prefill of 96 with {policy} / plain prefill", 2),
        (f"memory held after a prefill of 96 with {policy} / plain prefill", 2),
        (f"scoring 96 rows with {policy} / its bound", 1),
        (f"10 questions on 96 with {policy}, forked / prefill and 10 decodes", 2),
        ("decode after 96", 5),
        ("decode after 192", 5),
        ("what 1000 tokens of prompt add to a step", 5),
        ("first token after 96", 2),
        ("3 more tokens after 96", 2),
        ("first token after 192", 2),
        ("3 more tokens after 192", 2),
    ]
    assert all(ratio["ours"] > 0 and ratio["plain"] > 0 for ratio in ratios[:3])
    assert all(record["policies"] == [policy] and record["not checked"] == [] for record in records)
    wanted = ("commit", "machine", "version of torch")
    assert all(record[name] for record in records for name in wanted)

    bench_report([out, out], out=tmp_path / "report")
    lines = (tmp_path / "report" / "bench.md").read_text().splitlines()
    assert len(lines) == 2 + len(ratios) and records[0]["commit"] in lines[2]
    assert (tmp_path / "report" / "bench.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "no measurement"), ("{}", "line 1, is no record"), ("[1", "line 1, is no record")],
)
def test_a_report_of_something_else_is_refused(tmp_path, text, message):
    from kvcompress_eval.bench_command import bench_report

    from kvcompress import EvaluationError

    path = tmp_path / "other.jsonl"
    path.write_text(text)
    with pytest.raises(EvaluationError, match=message):
        bench_report([path], out=tmp_path / "report")
    assert not (tmp_path / "report").exists()


def test_a_policy_that_breaks_a_contract_is_not_measured(saved_model, monkeypatch):
    """Whatever its budget: contracts are tried on a small one."""
    from kvcompress_eval import bench as measures
    from kvcompress_eval.bench import check_contracts

    from kvcompress import EvaluationError, SnapKVPolicy, policy_from

    contracts = importlib.import_module("kvcompress.testing.contracts")
    factors = itertools.cycle([1.0, 2.0])

    class Forgetful(SnapKVPolicy):
        name = "forgetful"

        def scores(self, view):
            return super().scores(view) * next(factors)

    tried = []
    monkeypatch.setattr(measures, "check_policy", lambda policy: tried.append(policy))
    for spec in (
        "snapkv:capacity=4096/512",
        "snapkv:capacity=900+h2o:capacity=950",
        "h2o:keep_ratio=0.5",
    ):
        assert check_contracts(policy_from(spec))
    assert [str(each) for each in tried] == [
        "snapkv:capacity=40",
        "snapkv:capacity=40+h2o:capacity=40",
        "h2o:keep_ratio=0.5",
    ]
    monkeypatch.undo()
    assert not check_contracts(SnapKVPolicy(window_size=400, capacity=2048))
    pure = "scores are pure float32"  # the others take minutes if scores change at every call
    monkeypatch.setattr(contracts, "_CONTRACTS", {pure: contracts._CONTRACTS[pure]})
    assert check_contracts(SnapKVPolicy(capacity=2048))
    with pytest.raises(EvaluationError, match=r"(?s)forgetful is not measured.*when repeated"):
        check_contracts(Forgetful(capacity=2048))


def test_scoring_is_weighed_without_its_inputs_and_result(make_model):
    from kvcompress_eval.bench import scoring_ratio

    from kvcompress import policy_from

    model = make_model()
    small, large = (
        scoring_ratio(model, policy_from("snapkv:capacity=40:window_size=8"), length)
        for length in (1000, 4000)
    )
    rows = 4 * 4 * 8 * 4000 / 2**20  # logits of 8 queries, 4 heads
    assert rows < large.ours < 6 * rows
    assert 3 < large.ours / small.ours < 5
    assert large.plain == 64 and large.ratio == large.ours / 64


def test_what_longer_prompts_add_to_a_step_is_fitted(make_model, monkeypatch):
    from kvcompress_eval import scaling

    from kvcompress import policy_from

    ticks = iter(range(10**6))
    monkeypatch.setattr(scaling, "clock", lambda: next(ticks) / 1000)
    model = make_model()
    original = model.forward

    def forward(ids, past_key_values=None, **options):
        if ids.shape[1] == 1:  # as long as it holds rows
            held = past_key_values.layers[0].keys.shape[2]
            for _ in range(held):
                next(ticks)
        return original(ids, past_key_values=past_key_values, **options)

    model.forward = forward
    try:
        *points, slope = scaling.decode_over_lengths(
            model, policy_from("snapkv:capacity=40:window_size=8"), [100, 200, 400], 5
        )
    finally:
        del model.forward
    assert [point.tokens for point in points] == [100, 200, 400]
    # Medians of five steps, after three that do not count.
    assert [point.ours for point in points] == pytest.approx([46] * 3)
    assert [point.plain for point in points] == pytest.approx([106, 206, 406])
    assert slope.plain == pytest.approx(1000) and slope.ours == pytest.approx(0, abs=1e-6)


def test_decode_is_timed_from_eviction_to_eviction_on_caches_of_equal_length(make_model):
    from kvcompress_eval import bench

    from kvcompress import policy_from

    model, lengths = make_model(), []
    original = model.forward

    def forward(ids, past_key_values=None, **options):
        if ids.shape[1] == 1:
            held = past_key_values.layers[0].keys.shape[2]
            lengths.append((type(past_key_values).__name__, held))
        return original(ids, past_key_values=past_key_values, **options)

    model.forward = forward
    try:
        ratio = bench.decode_ratio(model, policy_from("tova:capacity=40:interval=4"), 96, 5)
    finally:
        del model.forward
    assert ratio.pairs == 5 and len(lengths) == 2 * (5 * 4 + 3)
    for pair in zip(lengths[::2], lengths[1::2], strict=True):
        assert {name for name, _ in pair} == {"CompressedCache", "DynamicCache"}
        assert pair[0][1] == pair[1][1] in range(40, 44)


def test_losses_of_a_stream_are_those_of_the_whole_text(make_model, prompt):
    """As long as nothing is evicted; and a window of the whole text is the whole text."""
    import torch
    from kvcompress_eval.measure import stream_losses, window_losses

    from kvcompress import policy_from

    model, ids = make_model(), prompt(75)["input_ids"]
    with torch.no_grad():
        logits = model(ids).logits[0, :-1]
    expected = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
    policy = policy_from("streaming_llm:capacity=75")
    for chunk in (2, 16, 75):
        streamed = torch.cat(list(stream_losses(model, ids, policy, chunk)))
        torch.testing.assert_close(streamed, expected, atol=1e-4, rtol=1e-4)
        fresh = torch.cat(list(window_losses(model, ids, 75, chunk)))
        torch.testing.assert_close(fresh, expected, atol=1e-4, rtol=1e-4)
    narrow = torch.cat(list(window_losses(model, ids, 20, 4)))
    with torch.no_grad():
        last = model(ids[:, 55:]).logits[0, -2]
    assert narrow.shape == expected.shape
    loss = torch.nn.functional.cross_entropy(last[None], ids[0, -1:])
    torch.testing.assert_close(narrow[-1], loss, atol=1e-4, rtol=1e-4)


def test_a_mean_over_blocks():
    import torch
    from kvcompress_eval.measure import BLOCK, mean_of

    mean = mean_of(torch.tensor([1.0, 3.0]).repeat_interleave(BLOCK))
    assert mean.value == 2.0
    assert mean.half_width == pytest.approx(1.96 * 2**0.5 / 2**0.5, rel=1e-3)


def test_stream_writes_picture_and_numbers(saved_model, tmp_path, call):
    out = tmp_path / "stream.png"
    options = ["--tokens", 400, "--start", 200, "--context", 64, "--chunk", 16, "--out", out]
    code, shown, _ = call("stream", "--model", saved_model, *options)
    assert code == 0 and "NLL" in shown
    assert out.read_bytes()[:4] == b"\x89PNG"
    record = json.loads(out.with_suffix(".json").read_text())
    assert [row["label"] for row in record["results"]] == [
        "fresh context of 64",
        "streaming_llm:capacity=64:positions=cache",
        "streaming_llm:capacity=64:n_sink=0:positions=cache",
        "streaming_llm:capacity=64",
    ]
    assert record["results"][0]["ratio"] == 1
    code, _, shown = call("stream", "--model", saved_model, "--tokens", 10**7)
    assert code == 1 and "Give a longer text" in shown


def test_each_goes_first_half_of_the_time():
    from kvcompress_eval.ratios import compare, in_turn

    order = []
    in_turn(4, lambda: order.append("ours"), lambda: order.append("plain"))
    assert "".join(name[0] for name in order) == "pooppoop"
    assert compare("x", "s", [2.0, 9.0, 4.0], [1.0, 9.0, 4.0]).ratio == 1  # not that of the medians
    ratio = compare("x", "s", [2.0, 3.0, 4.0], [2.0, 2.0, 2.0])
    assert (ratio.ratio, ratio.low, ratio.high) == (1.5, 1.0, 2.0)


def test_long_prompts_in_bounded_memory(call, saved_model, tmp_path, monkeypatch):
    from kvcompress_eval import long_prompts

    children = []

    def in_child(options):
        if not children:
            children.append(in_a_process(options))
            return children[0]
        return long_prompts.read(options)  # the others here, for speed

    in_a_process = long_prompts._in_child
    monkeypatch.setattr(long_prompts, "_in_child", in_child)
    out = tmp_path / "long.png"
    code, shown, err = call(
        "long-prompts", "--model", saved_model, "--layers", 1, "--policy",
        "snapkv:capacity=40:window_size=8", "--prefill-chunk-size", 64, "--tokens", 256,
        "--tokens", 640, "--plain-up-to", 256, "--threads", 1, "--device", "cpu", "--out", out,
    )  # fmt: skip
    assert code == 0, err
    assert out.read_bytes()[:4] == b"\x89PNG"
    record = json.loads(out.with_suffix(".json").read_text())
    read = [(each["how"], each["tokens"]) for each in record["readings"]]
    assert read == [("chunks", 256), ("plain", 256), ("chunks", 640)]
    assert [each["held"] for each in record["readings"]] == [[[256, 40]], [], [[640, 40]]]
    assert all(each["seconds"] > 0 for each in record["readings"])
    assert set(record["fits"]) == {"chunks seconds", "chunks peak_mib"} and "R²" in shown
    code, _, err = call("long-prompts", "--layers", 99, "--model", saved_model, "--out", out)
    assert code == 1 and "--layers 99" in err


def test_a_line_through_points():
    from kvcompress_eval.long_prompts import Reading, fit

    points = [Reading("chunks", tokens, 2 + tokens / 500, 7.0, []) for tokens in (1000, 2000, 4000)]
    line = fit(points, "seconds")
    assert (line.base, line.slope, line.r_squared) == pytest.approx((2, 1 / 500, 1))
    assert fit(points, "peak_mib").exponent == pytest.approx(0, abs=1e-9)
    squares = [Reading("plain", tokens, tokens**2, 1.0, []) for tokens in (1000, 2000, 4000)]
    assert fit(squares, "seconds").exponent == pytest.approx(2)


def test_what_the_end_needs_is_asked_for_at_the_start():
    from kvcompress_eval.comparison import need

    from kvcompress import EvaluationError

    need("torch", "Everything", "plots")
    with pytest.raises(
        EvaluationError, match=r"The picture needs no_such_thing.*kvcompress\[plots\]"
    ):
        need("no_such_thing", "The picture", "plots")
