"""The scripts in benchmarks/: a smoke run of each, and the parts that decide what they report."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

# On several threads tensors as small as these take very long when the machine is busy.
pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch):
    """As when a script is started from the shell."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """The record of a smoke run, its output and its folder."""
    out = tmp_path_factory.mktemp("gpu")
    script = str(BENCHMARKS / "gpu_headline.py")
    done = subprocess.run(
        [sys.executable, script, "--smoke", "--device", "cpu", "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((out / "gpu_headline.json").read_text()), done.stdout, out


def test_a_smoke_run_measures_every_section(smoke):
    record, said, out = smoke
    found = {each["section"] for each in record["measurements"]}
    assert found == {"decode", "limits", "prefill", "split"}
    assert not record["failed"]
    assert all("no CUDA graphs" in each for each in record["skipped"])
    assert len(record["checks"]) == 6
    assert "x bound" in said
    assert (out / "gpu_headline.png").read_bytes().startswith(b"\x89PNG")


def test_every_step_of_decoding_stands_beside_its_bound(smoke):
    record, _, _ = smoke
    steps = [e for e in record["measurements"] if e["what"] in ("decode", "each later token")]
    assert {each["cache"] for each in steps} >= {"full", "full, appended in place"}
    for each in steps:
        assert each["times_bound"] == pytest.approx(each["ms"]["median"] / each["bound_ms"])
    both = {each["cache"]: each for each in steps if each["batch"] == 2 and each["length"] == 512}
    policy = record["settings"]["policies"][0]
    assert both[policy]["held"] < 100 < both["full"]["held"]
    assert both[policy]["bound_ms"] < both["full"]["bound_ms"]
    assert both[policy]["ratio"]["count"] == record["settings"]["blocks"]


def test_a_record_says_where_it_was_made(smoke):
    record, _, _ = smoke
    assert record["versions"]["torch"] == torch.__version__
    assert record["card"]["copy_gb_s"] > 0
    assert record["commit"]


def test_nothing_is_timed_if_answers_are_wrong(monkeypatch, tmp_path, capsys):
    import gpu_headline
    import typer

    monkeypatch.setattr("headline.checks.TOLERANCE", -1.0)
    with pytest.raises(typer.Exit) as stop:
        gpu_headline.main(smoke=True, device="cpu", out=tmp_path / "out")
    assert stop.value.exit_code == 1
    assert "Nothing was timed: snapkv" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_the_check_notices_a_cache_that_is_not_compressed(monkeypatch):
    from contextlib import contextmanager

    from headline import checks
    from headline.devices import Device

    real = checks.press

    @contextmanager
    def idle(model, policy):
        with real(model, "snapkv:capacity=4096") as session:
            yield session

    monkeypatch.setattr(checks, "press", idle)
    with pytest.raises(checks.CheckFailedError, match="evicted nothing"):
        checks.check(Device("cpu"), "sdpa")


def test_the_largest_length_is_found_by_doubling_and_halving():
    from headline.decoding import largest

    tried = []

    def fits(length):
        tried.append(length)
        return length <= 11_000

    assert largest(fits, 1024, 10**6, 4) == (10_752, 11_264)
    assert tried == [1024, 2048, 4096, 8192, 16384, 12288, 10240, 11264, 10752]
    assert largest(fits, 16384, 10**6, 2) == (8192, 12288)
    assert largest(fits, 1024, 5000, 4) == (4096, None)


def test_a_search_without_time_keeps_what_it_found():
    from headline.decoding import largest

    outcomes = iter([True, True, None])
    assert largest(lambda length: next(outcomes), 8, 1000, 4) == (16, None)
    outcomes = iter([True, False, None])
    assert largest(lambda length: next(outcomes), 8, 1000, 4) == (8, 16)


@pytest.fixture
def run():
    """A section that has begun, with nothing measured."""
    import gpu_headline
    from headline.devices import Card, Device
    from headline.results import Record
    from headline.run import Run
    from headline.shapes import Shape, build

    device = Device("cpu")
    record = Record(Card("none", None, None, None, 1.0), {})
    settings = replace(gpu_headline.SMOKE, lengths=(128,), batches=(1,))
    made = Run(Shape.smoke, build(Shape.smoke, device, "sdpa"), device, settings, record)
    made.begin("decode", 600)
    return made


def test_what_does_not_fit_is_skipped_and_what_breaks_is_reported(run):
    def raises(error):
        def make():
            raise error

        return make

    assert run.attempt("first", raises(torch.OutOfMemoryError("CUDA out of memory"))) is None
    assert run.attempt("second", raises(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"))) is None
    assert run.attempt("third", lambda: 3, seconds=1000) is None
    assert run.record.failed == []
    first, second, third = run.record.skipped
    assert first == "decode, smoke, first: out of memory" and "out of memory" in second
    assert "needs about 1000 s" in third
    assert run.attempt("fourth", raises(ValueError("no such head"))) is None
    assert "fourth" in run.record.failed[0] and "no such head" in run.record.failed[0]
    assert run.attempt("fifth", lambda: 5) == 5


def test_a_cache_that_does_not_fit_leaves_the_others_in_the_cell(run, monkeypatch):
    from headline import caches, decoding

    def too_large(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(caches, "dense", too_large)
    decoding.decode(run)
    found = {each.cache for each in run.record.measurements}
    assert found == set(run.settings.policies)
    assert all(each.ratio is None for each in run.record.measurements)
    assert not run.record.failed
    assert decoding.largest(lambda n: decoding._full_fits(run, n), 64, 512, 1) == (None, 32)


def test_a_section_without_time_says_so(run):
    from headline import decoding

    run.begin("decode", 0)
    decoding.decode(run)
    decoding.limits(run)
    assert [each.length for each in run.record.measurements] == [0, 0]
    assert all("left" in each for each in run.record.skipped)


def test_bandwidth_is_known_by_the_cards_name():
    from headline.devices import nominal_bandwidth

    assert nominal_bandwidth("NVIDIA H100 80GB HBM3") == 3350e9
    assert nominal_bandwidth("NVIDIA H100 PCIe") == 2000e9
    assert nominal_bandwidth("NVIDIA A100-SXM4-80GB") == 2039e9
    assert nominal_bandwidth("NVIDIA L40S") == 864e9
    assert nominal_bandwidth("NVIDIA GH200 480GB") == 4000e9
    assert nominal_bandwidth("Some card") is None


def test_the_bound_is_weights_and_rows_over_bandwidth():
    from headline.devices import Device
    from headline.shapes import Costs, Shape, build

    costs = Costs.of(build(Shape.smoke, Device("cpu"), "sdpa"))
    # Two layers of two KV heads of 16 numbers of two bytes, keys and values.
    assert costs.row_bytes == 2 * 2 * 2 * 16 * 2
    assert costs.decode_bound_ms(2, 100, 1e9) == pytest.approx(
        1000 * (costs.weight_bytes + 200 * costs.row_bytes) / 1e9
    )


@pytest.mark.filterwarnings("ignore:.*has a meta device")
@pytest.mark.parametrize("policy", ["snapkv:capacity=64", "snapkv:capacity=64+h2o:capacity=64"])
def test_nothing_in_a_step_waits_for_the_device(policy):
    from headline import caches
    from headline.devices import Device
    from headline.shapes import Shape, build

    from kvcompress import CompressedCache
    from kvcompress.session import cache_argument

    device = Device("cpu")
    device.torch = torch.device("meta")  # it has no values, so whoever asks for one fails
    model = build(Shape.smoke, device, "sdpa")
    with torch.inference_mode():
        ids = torch.zeros(1, 300, dtype=torch.long, device="meta")
        cache = CompressedCache(model, policy, prompt_length=300)
        model(ids, use_cache=True, **{cache_argument(model): cache})
        for _ in range(3):
            caches.step(model, cache, ids[:, :1])
            caches.step(model, caches.dense_in_place(model, 1, 300), ids[:, :1])
    assert caches.held_rows(cache) == (64 if "h2o" in policy else 67)
