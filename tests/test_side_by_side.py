"""benchmarks/side_by_side.py: its protocol, ratios and verdicts, with workers that only pretend."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"

FAKE = """
import json, sys, time

side, changes = sys.argv[1], json.loads(sys.argv[2])
library = {"ours": "kvcompress", "theirs": "kvpress"}[side]
MS = {
    "prefill": {"ours": {None: 100, "h2o": 140}, "theirs": {None: 105, "h2o": 400}},
    "steps": {"ours": {"plain": 10, "cut": 10.1}, "theirs": {"plain": 12, "cut": 14}},
    "evict": {"ours": 10.2, "theirs": 12.6},
    "memory": {"ours": {None: 90, "h2o": 100}, "theirs": {None: 90, "h2o": 900}},
}
started = {}
print("a library says something", file=sys.stderr)
for line in sys.stdin:
    asked = json.loads(line)
    do, method, name = asked["do"], asked.get("method"), asked.get("name")
    change = changes.get(do, {})
    if change.get("ends"):
        sys.exit(3)
    if change.get("sleeps"):
        time.sleep(60)
    if change.get("raises"):
        print(json.dumps({"error": "ValueError: no", "trace": "Traceback"}), flush=True)
        continue
    value = None
    rows = asked.get("keep", 0) if method else asked.get("length", 0)
    rows += change.get("more rows", 0) if method else 0
    factor = change.get("times", 1)
    if do == "hello":
        value = {"modules": [library], library: "0", "transformers": "0"} | change
    elif do in ("locate", "make_random"):
        value = name or asked["path"]
    elif do == "check":
        value = ["snapkv"]
    elif do == "logits":
        value = [0.5 + change.get("off", 0)] * 8
    elif do == "prefill":
        known = MS["prefill"][side]
        value = {"ms": factor * known.get(method, known[None] + 1), "held": rows}
    elif do == "start":
        started[name] = asked
        value = rows
    elif do == "steps":
        began = started[name]
        ms = MS["evict"][side] if began["interval"] else MS["steps"][side][name]
        if side == "theirs" and began["keep"] == 8192:
            ms = 30
        value = {"ms": factor * ms, "held": began["keep"]}
    elif do == "memory":
        value = {"mib": factor * MS["memory"][side].get(method, 90), "held": rows}
    print(json.dumps({"value": value}), flush=True)
"""


@pytest.fixture
def duel(tmp_path, monkeypatch):
    """Run the measurements with changed workers; gives whether bars were met, and the record."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import side_by_side
    from sides.measure import Part, Sizes

    script = tmp_path / "fake.py"
    script.write_text(FAKE)

    def run(ours=None, theirs=None, timeout=60, parts=None):
        launches = [
            side_by_side.Launch([sys.executable, str(script), side, json.dumps(changes or {})], {})
            for side, changes in (("ours", ours), ("theirs", theirs))
        ]
        setup = side_by_side.Setup(*launches, "a model", None, 1, "cpu", timeout, tmp_path / "out")
        chosen = parts or [part for part in Part if part is not Part.start_up]
        met = side_by_side.compare(setup, Sizes(repeats=2, blocks=3), chosen)
        return met, json.loads((tmp_path / "out" / "side_by_side.json").read_text())

    return run


def missed(record):
    return [each for each in record["verdicts"] if each["passed"] is False]


def test_every_bar_is_measured(duel, tmp_path, capsys):
    from sides.bars import BARS

    met, record = duel()
    claimed = [each for each in record["verdicts"] if each["bar"] is not None]
    assert {each["name"] for each in claimed} == set(BARS) - {"import kvcompress, ms"}
    assert met and not missed(record)
    by_name = {each["name"]: each["value"] for each in claimed}
    assert by_name["decode from 8192 rows, ours / kvpress"] == pytest.approx(10.1 / 30)
    added = by_name["what streaming_llm every 16 tokens adds at 512 rows, ours / kvpress"]
    assert added == pytest.approx((10.2 / 10 - 1) / (12.6 / 12 - 1))
    assert "10 of 10 bars met" in capsys.readouterr().out
    assert record["versions"]["theirs"]["kvpress"] == "0"
    assert record["plain_logits_differ_by"] == 0
    assert (tmp_path / "out" / "side_by_side.png").read_bytes().startswith(b"\x89PNG")
    assert "a library says" in (tmp_path / "out" / "side_by_side.ours.log").read_text()


def test_a_bar_that_is_exceeded_fails(duel):
    from sides.measure import Part

    met, record = duel(ours={"prefill": {"times": 1.2}}, parts=[Part.prefill])
    # Plain prefills are as much slower, so against those nothing has changed.
    assert met
    met, record = duel(ours={"memory": {"times": 1.2}}, parts=[Part.memory])
    assert not met
    (only,) = missed(record)
    assert only["name"] == "peak of a prefill of 8192 with snapkv, ours / kvpress"
    assert only["value"] == pytest.approx(1.2)


def test_sides_that_hold_other_rows_are_not_compared(duel):
    met, record = duel(theirs={"prefill": {"more rows": 1}})
    (only,) = missed(record)
    assert not met and "theirs holds 513 rows, not 512" in only["problem"]
    assert len(record["verdicts"]) > 10


def test_a_worker_that_fails_or_ends_is_a_failure(duel, tmp_path):
    from sides.measure import Part

    met, record = duel(ours={"start": {"raises": True}}, theirs={"memory": {"ends": True}})
    problems = {each["name"]: each["problem"] for each in missed(record)}
    assert not met and set(problems) == {Part.decode, Part.evict, Part.memory}
    assert "ours could not start" in problems["decode"] and "ValueError: no" in problems["decode"]
    assert "theirs ended with 3 at 'memory'" in problems["memory"]
    assert "Traceback" in (tmp_path / "out" / "side_by_side.ours.log").read_text()


def test_a_worker_that_hangs_is_ended(duel, monkeypatch):
    from sides import client
    from sides.measure import Part

    monkeypatch.setattr(client, "PATIENCE", 0.1)
    met, record = duel(theirs={"steps": {"sleeps": True}}, timeout=3)
    problems = {each["name"]: each["problem"] for each in missed(record)}
    assert not met and "theirs took more than 3 s over 'steps'" in problems[Part.decode]
    assert "theirs has ended before 'start'" in problems[Part.evict]


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ({"logits": {"off": 0.1}}, "logits differ by 0.1"),
        ({"hello": {"modules": ["kvcompress", "kvpress"]}}, "has loaded"),
    ],
)
def test_nothing_is_timed_if_the_sides_are_not_comparable(duel, theirs, message):
    from sides.measure import MismatchError

    with pytest.raises(MismatchError, match=message):
        duel(theirs=theirs)


def test_nothing_is_timed_if_a_policy_breaks_its_contract(duel):
    from sides.client import WorkerError

    with pytest.raises(WorkerError, match=r"ours could not check .*ValueError: no"):
        duel(ours={"check": {"raises": True}})


def test_an_overhead_within_noise_is_no_pass(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from sides.bars import overhead

    name = "what streaming_llm every 16 tokens adds at 512 rows, ours / kvpress"
    found = overhead(name, ([10, 10, 10], [10, 10, 10]), ([9, 10, 9], [10, 10, 10]))
    assert found.passed is False and "noise" in found.problem and found.bar == 0.6


def test_each_process_loads_only_its_side():
    imported = {}
    for file in (BENCHMARKS / "sides").glob("*.py"):
        nodes = list(ast.walk(ast.parse(file.read_text())))
        names = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        names |= {
            each.name for node in nodes if isinstance(node, ast.Import) for each in node.names
        }
        imported[file.stem] = {name.split(".")[0] for name in names if name}
    assert "kvpress" in imported["theirs"] and "kvcompress" in imported["ours"]
    for stem, names in imported.items():
        assert "kvpress" not in names or stem == "theirs"
        assert "kvcompress" not in names or stem == "ours"
        assert "torch" not in names or stem == "worker"
    code = "import side_by_side, sys; sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=BENCHMARKS, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
