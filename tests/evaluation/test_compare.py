"""`kvcompress compare` with a program in place of lm_eval, and once with lm_eval itself."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import stdev

import pytest

CONFIGS = sorted((Path(__file__).parents[2] / "evaluation" / "configs").glob("*.yaml"))
needs_lm_eval = pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs lm_eval")

SCORES = {
    "none": [1.0, 0.5, 0.0, 0.5],
    "snapkv:capacity=64": [1.0, 0.0, 0.0, 0.5],
    "snapkv:capacity=96": [0.5, 0.5, 0.5, 1.0],
    "tova:capacity=64": [0.0, 0.0, 0.0, 0.0],
}

HARNESS = '''
"""Takes lm_eval's arguments, notes the policy, and writes what lm_eval would."""
import hashlib, json, os, sys, time
from pathlib import Path

here = Path(__file__).parent
given = dict(zip(sys.argv, sys.argv[1:]))
policy = dict(part.split("=", 1) for part in given["--model_args"].split(","))["policy"]
with (here / "calls").open("a") as calls:
    calls.write(policy + " " + given["--tasks"] + "\\n")
print("Running generate_until requests:  50%|#####     | 2/4 [00:01<00:01,  2.00it/s]")
if (here / "broken").exists() and (here / "broken").read_text() == policy:
    print("Traceback (most recent call last):\\nRuntimeError: no memory for " + policy)
    sys.exit(3)
if (here / "slow").exists():
    (here / "slow").write_text(str(os.getpid()))
    time.sleep(300)
everything = json.loads((here / "scores.json").read_text())
folder = Path(given["--output_path"]) / "model"
folder.mkdir(parents=True, exist_ok=True)
results = {"results": {}, "versions": {}, "lm_eval_version": "0", "config": {}}
stats = {}
spread = {"mean": 0.5, "min": 0.25, "max": 0.75}
for task in given["--tasks"].split(","):
    lines = (Path(given["--include_path"]) / (task + ".jsonl")).read_text().splitlines()
    scores = everything[policy][: len(lines)]
    samples = [
        {
            "doc_id": number, "doc": json.loads(line), "filter": "none", "score": value,
            "doc_hash": hashlib.sha256(line.encode()).hexdigest(), "metrics": ["score", "other"],
            "other": value / 2,
        }
        for number, (line, value) in enumerate(zip(lines, scores))
    ]
    path = folder / ("samples_" + task + "_now.jsonl")
    # Processes that share the work do not keep the order.
    path.write_text("".join(json.dumps(each) + "\\n" for each in reversed(samples)))
    mean = sum(scores) / len(scores)
    results["results"][task] = {
        "name": task, "alias": task, "sample_len": len(scores), "score,none": mean,
        "score_stderr,none": 0.125, "other,none": mean / 2, "other_stderr,none": "N/A",
    }
    stats[task] = {
        "requests": len(scores), "truncated": 1, "never_compressed": 4 if policy == "none" else 3,
        "prompt_tokens": spread, "held_tokens": spread, "kept_ratio": spread,
        "cache_bytes": 2**20 * (8 if policy == "none" else 2), "dense_bytes": 2**23,
    }
results["config"]["kvcompress"] = {
    "policy": "h2o" if (here / "other").exists() else policy, "compress": "prompt",
    "policy_fields": None, "truncate": "left", "device": "cpu", "versions": {"kvcompress": "0"},
    "tasks": stats,
}
(folder / "results_now.json").unlink(missing_ok=True)
number = len((here / "calls").read_text().splitlines())
for name in [*folder.glob("samples_*_now.jsonl")]:
    name.rename(folder / name.name.replace("now", str(number)))
(folder / f"results_{number}.json").write_text(json.dumps(results))
'''


@pytest.fixture
def harness(tmp_path, monkeypatch):
    """A folder with the program, its scores, and the rows of two tasks."""
    monkeypatch.setattr("kvcompress_eval.compare.check_harness", lambda: None)
    folder = tmp_path / "harness"
    folder.mkdir()
    (folder / "lm_eval.py").write_text(HARNESS)
    (folder / "scores.json").write_text(json.dumps(SCORES))
    rows = [
        {"_id": f"row-{n}", "input": "?", "context": "text", "answers": ["a"]} for n in range(4)
    ]
    for name in ("qasper", "trec"):
        lines = [json.dumps(row) + "\n" for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    (folder / "model").mkdir()
    return folder


@pytest.fixture
def calls(harness):
    """The runs so far, each its policy and its tasks."""
    return lambda: (
        (harness / "calls").read_text().splitlines() if (harness / "calls").exists() else []
    )


@pytest.fixture
def run(call, harness, tmp_path):
    """Run the command on that program; gives exit code, stdout and stderr."""

    def run(*more, policies=("snapkv:capacity=64", "tova:capacity=64"), tasks=("qasper",)):
        options = ["--model", harness / "model", "--offline-data", harness]
        options += ["--launch", f"{sys.executable} {harness / 'lm_eval.py'}"]
        options += [part for policy in policies for part in ("--policy", policy)]
        options += [part for task in tasks for part in ("--task", f"longbench_{task}")]
        return call("compare", *options, "--out", tmp_path / "out", *more)

    return run


@pytest.fixture
def records(tmp_path):
    """The records by policy and task."""

    def load():
        lines = (tmp_path / "out" / "records.jsonl").read_text().splitlines()
        return {(each["policy"], each["task"]): each for each in map(json.loads, lines)}

    return load


def table(text, title):
    """Cells of the Markdown table under a heading, by the first column."""
    part = text.split(f"### {title}")[1].split("\n\n")[1]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in part.splitlines()]
    return {row[0]: dict(zip(rows[0], row, strict=True)) for row in rows[2:]}


@needs_lm_eval
def test_tables_picture_and_records(run, calls, records, tmp_path):
    code, shown, _ = run(tasks=("qasper", "trec"))
    assert code == 0 and "never compressed" in shown
    both = "longbench_qasper_local,longbench_trec_local"
    assert calls() == [f"{policy} {both}" for policy in SCORES if policy != "snapkv:capacity=96"]
    assert (tmp_path / "out" / "plot.png").read_bytes()[:4] == b"\x89PNG"
    text = (tmp_path / "out" / "table.md").read_text()
    rows = table(text, "longbench_qasper: score,none, 4 rows")
    assert list(rows) == ["none", "snapkv:capacity=64", "tova:capacity=64"]
    ours = rows["snapkv:capacity=64"]
    # By hand: differences 0, -1/2, 0, 0.
    assert ours["score"] == "0.3750 ± 0.1250"
    assert ours["minus none"] == "-0.1250 ± 0.1250"
    assert ours["kept"] == "0.500 (0.250 to 0.750)" and ours["held MiB"] == "2.00 of 8.00"
    assert ours["never compressed"] == "3 of 4" and ours["cut"] == "1 of 4"
    assert rows["none"]["minus none"] == rows["none"]["never compressed"] == ""
    less = [a - b for a, b in zip(SCORES["tova:capacity=64"], SCORES["none"], strict=True)]
    expected = f"{sum(less) / 4:+.4f} ± {stdev(less) / 2:.4f}"
    assert rows["tova:capacity=64"]["minus none"] == expected
    scores = table(text, "scores")
    assert scores["snapkv:capacity=64"]["mean"] == "0.3750"
    record = records()["tova:capacity=64", "longbench_trec"]
    assert [row["id"] for row in record["rows"]] == ["row-0", "row-1", "row-2", "row-3"]
    assert [row["source_line"] for row in record["rows"]] == [1, 2, 3, 4]
    assert record["values"]["score,none"] == SCORES["tova:capacity=64"]
    assert record["metrics"]["score_stderr,none"] == 0.125 and record["n"] == 4
    assert "policy=tova:capacity=64" in record["command"] and record["seconds"] > 0
    assert record["environment"]["HF_HUB_OFFLINE"] == "1" and record["device"] == "cpu"
    assert record["kvcompress"]["never_compressed"] == 3


@needs_lm_eval
def test_an_interrupted_comparison_goes_on(run, calls, monkeypatch, tmp_path):
    from kvcompress_eval.harness_run import HarnessRun

    original = HarnessRun.execute

    def interrupted(self, *arguments):
        if self.policy.startswith("tova"):
            raise KeyboardInterrupt
        return original(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(HarnessRun, "execute", interrupted)
        code, _, _ = run()
    assert code != 0 and len(calls()) == 2
    assert not (tmp_path / "out" / "table.md").exists()
    code, _, _ = run()
    assert code == 0
    assert [each.split()[0] for each in calls()] == ["none", *list(SCORES)[1::2]]
    # More of everything: only what is new is run.
    code, _, _ = run(policies=("snapkv:capacity=96", "tova:capacity=64"), tasks=("trec", "qasper"))
    assert code == 0 and calls()[3:] == [
        "none longbench_trec_local",
        "snapkv:capacity=96 longbench_trec_local,longbench_qasper_local",
        "tova:capacity=64 longbench_trec_local",
    ]


@needs_lm_eval
def test_lm_eval_ends_with_the_command(harness, tmp_path):
    """When a batch system ends it; lm_eval would go on, and write where the next one does."""
    slow = harness / "slow"
    slow.touch()
    start = "import kvcompress_eval.compare as c; c.check_harness = lambda: None; "
    start += "from kvcompress.cli import main; main()"
    command = [sys.executable, "-c", start, "compare", "--model", harness / "model"]
    command += ["--offline-data", harness, "--task", "longbench_trec", "--policy", "tova"]
    command += ["--launch", f"{sys.executable} {harness / 'lm_eval.py'}", "--out", tmp_path / "out"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None and not slow.read_text():
            time.sleep(0.2)
        process.terminate()
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(slow.read_text()), 0)


@needs_lm_eval
def test_other_settings_are_refused_in_the_same_folder(run, calls, tmp_path):
    assert run("--limit", 3)[0] == 0
    code, _, shown = run("--limit", 2)
    assert code == 1 and "limit was 3 and is now 2" in shown and len(calls()) == 3
    code, _, shown = run("--limit", 3, "--chat", "--model-args", "dtype=float32")
    assert code == 1 and "chat was False and is now True" in shown and "model_args was" in shown
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    code, _, shown = run("--out", tmp_path / "other")
    assert code == 1 and "holds no comparison" in shown


@needs_lm_eval
def test_a_failing_run_is_shown_and_recorded_and_the_others_go_on(run, calls, harness, records):
    (harness / "broken").write_text("snapkv:capacity=64")
    code, shown, _ = run()
    assert code == 1 and "RuntimeError: no memory for snapkv:capacity=64" in shown
    assert "code 3" in shown and "%|" not in shown and "1 of 3 runs failed" in shown
    assert "no memory" in records()["snapkv:capacity=64", "longbench_qasper"]["error"]
    assert records()["tova:capacity=64", "longbench_qasper"]["n"] == 4
    (harness / "broken").unlink()
    code, _, _ = run()
    assert code == 0 and calls()[3:] == ["snapkv:capacity=64 longbench_qasper_local"]
    assert "error" not in records()["snapkv:capacity=64", "longbench_qasper"]


@needs_lm_eval
def test_a_run_that_used_another_policy_is_a_failure(run, harness):
    (harness / "other").touch()
    code, shown, _ = run(policies=("tova:capacity=64",))
    assert code == 1 and "asked for tova:capacity=64 and used h2o" in shown


@needs_lm_eval
def test_another_metric_needs_no_run(run, calls, tmp_path):
    assert run()[0] == 0
    code, _, shown = run("--metric", "accuracy")
    assert code == 1 and "No task has the metric accuracy. Metrics: other,none, score,none" in shown
    assert run("--metric", "other")[0] == 0 and len(calls()) == 3
    text = (tmp_path / "out" / "table.md").read_text()
    rows = table(text, "longbench_qasper: other,none, 4 rows")
    # lm_eval gave no standard error.
    assert rows["snapkv:capacity=64"]["score"] == "0.1875"
    assert rows["snapkv:capacity=64"]["minus none"] == "-0.0625 ± 0.0625"


@needs_lm_eval
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model-args", "dtype=float32,device=cpu"], "'device=cpu': give it as --device"),
        (["--launch", "no-such-launcher -m"], "no program 'no-such-launcher'"),
        (["--model", "/nowhere/model"], "is no folder"),
        (["--policy", "snapvk"], "Did you mean 'snapkv'"),
        (["--capacity", 64], "every policy has its own budget"),
        (["--task", "longbench_nothing"], "no local form"),
        (["--limit", 0], "greater than or equal to 1"),
    ],
)
def test_nothing_runs_before_everything_is_checked(run, calls, tmp_path, options, message):
    code, _, shown = run(*options)
    assert code == 1 and message in shown.replace("\n", " ")
    assert calls() == [] and not (tmp_path / "out").exists()


def read(tmp_path=None, text=None, **options):
    from kvcompress_eval.comparison import Comparison

    path = None
    if text is not None:
        path = tmp_path / "config.yaml"
        path.write_text(text)
    return Comparison.read(path, options)


def test_options_win_over_the_file(tmp_path):
    text = "policy: [snapkv, tova]\ncapacity: 64\ntask: ifeval\nlimit: 3\nchat: true\nbatch_size: 4"
    settings = read(tmp_path, text, limit=5, policy=["h2o"], task=None, chat=False)
    assert (settings.policy, settings.capacity, settings.task) == (("h2o",), (64,), ("ifeval",))
    assert (settings.limit, settings.chat, settings.batch_size) == (5, False, "4")


def test_a_file_that_is_not_there(tmp_path):
    from kvcompress_eval.comparison import Comparison

    from kvcompress import EvaluationError

    with pytest.raises(EvaluationError, match=r"nowhere.yaml cannot be read"):
        Comparison.read(tmp_path / "nowhere.yaml", {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("polcy: snapkv", r"No setting 'polcy'. Did you mean 'policy'\? Settings: model, policy, "),
        ("policy: snapkv\ntask: ifeval\nlimit: many", "limit: .*integer.*got 'many'"),
        ("policy: snapkv\ntask: ifeval\ncapacity: [0]", r"capacity: .* got 0"),
        ("task: ifeval", r"No policy is given"),
        ("policy: snapkv", r"No task is given"),
        ("- policy", r"must be a mapping"),
        ("policy: [", r"cannot be read"),
        ("policy: a\ntask: b\nmax_prompt_tokens: 9", r"--max-prompt-tokens chooses rows of --off"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path, text, message):
    from kvcompress import EvaluationError

    with pytest.raises(EvaluationError, match=message):
        read(tmp_path, text)


def test_policies_times_capacities():
    composed = "snapkv:capacity=64+h2o:capacity=32:scope=generated"
    policies = ["snapkv:window_size=8", "none", "tova", "h2o:keep_ratio=0.5", composed]
    settings = read(policy=[*policies, "tova:capacity=64"], capacity=[64, 128], task=["ifeval"])
    assert [policy.to_string() for policy in settings.policies()] == [
        "snapkv:capacity=64:window_size=8",
        "snapkv:capacity=128:window_size=8",
        "tova:capacity=64",
        "tova:capacity=128",
        "h2o:keep_ratio=0.5",
        composed,
    ]
    alone = read(policy=["snapkv"], task=["ifeval"])
    assert [policy.capacity for policy in alone.policies()] == [2048]


def a_run(tmp_path, **fields):
    from kvcompress_eval.harness_run import HarnessRun

    given = {"model": "org/name", "policy": "none", "tasks": {"a": "a", "b": "b_local"}}
    given |= {"folder": tmp_path / "run", "include": None}
    return HarnessRun(**given | fields)


def test_the_command_is_lm_evals_own(tmp_path):
    options = {"policy": ["snapkv"], "task": ["a"], "limit": 7, "model_args": "dtype=float16"}
    options |= {"chat": True, "gen_kwargs": "max_gen_toks=9", "device": "cuda"}
    command = a_run(tmp_path).command(read(**options))
    assert command[:4] == [sys.executable, "-m", "lm_eval", "run"]
    pairs = dict(pairwise(command))
    assert pairs["--model"] == "snapkv-hf" and pairs["--tasks"] == "a,b_local"
    assert pairs["--model_args"] == "pretrained=org/name,policy=none,dtype=float16"
    assert pairs["--limit"] == "7" and pairs["--gen_kwargs"] == "max_gen_toks=9"
    assert pairs["--device"] == "cuda" and command[-1] == "--apply_chat_template"
    assert pairs["--use_cache"].startswith(pairs["--output_path"])
    # Local rows are chosen when they are prepared.
    local = a_run(tmp_path, include=tmp_path / "tasks").command(read(**options | {"chat": False}))
    assert "--limit" not in local and local[local.index("--include_path") + 1].endswith("tasks")
    launch = "accelerate launch --num_processes 4 -m"
    command = a_run(tmp_path).command(read(**options, launch=launch))
    assert command[:7] == [*launch.split(), "lm_eval", "run"]
    command = a_run(tmp_path).command(read(**options, launch="srun -n 1"))
    assert command[:7] == ["srun", "-n", "1", sys.executable, "-m", "lm_eval", "run"]


def test_rows_are_counted_in_the_log(tmp_path):
    from kvcompress_eval.harness_run import last_lines, rows_done

    log = tmp_path / "log"
    log.write_text("Loading weights: 100%|##| 30/30 [00:00<00:00]\n")
    assert rows_done(log) is None
    bar = "\rRunning {} requests:  29%|██▊       | {}/7 [00:00<00:00,  9.22it/s]"
    log.write_text("x" * 9000 + bar.format("generate_until", 1) + bar.format("loglikelihood", 2))
    assert rows_done(log) == (2, 7)
    log.write_text("first\nKeyError: 'x'\n" + bar.format("generate_until", 1))
    assert last_lines(log, 1) == "KeyError: 'x'"
    log.write_text("")
    assert "nothing" in last_lines(log)


def a_record(values, metrics, policy="tova", **more):
    rows = [{"hash": str(number)} for number in range(len(next(iter(values.values()))))]
    return {"policy": policy, "values": values, "metrics": metrics, "rows": rows, **more}


def test_difference_of_a_score_over_parts_of_rows():
    """IFEval's instructions: the mean over all of them, whatever row they are in."""
    from kvcompress_eval.scores import difference

    ours = [[True], [False, False], [True, False, True]]
    plain = [[True], [True, False], [True, True, True]]
    sums = [(sum(a), sum(b), len(a)) for a, b in zip(ours, plain, strict=True)]
    found = difference(
        a_record({"acc,none": ours}, {"acc,none": 3 / 6}),
        a_record({"acc,none": plain}, {"acc,none": 5 / 6}),
        "acc,none",
    )
    assert found.value == pytest.approx(-1 / 3)
    residuals = [a - b + n / 3 for a, b, n in sums]
    assert found.error == pytest.approx(stdev(residuals) * math.sqrt(3) / 6)


def test_no_difference_where_there_is_none():
    from kvcompress_eval.scores import difference

    mean = a_record({"acc,none": [1.0, 0.0]}, {"acc,none": 0.5})
    assert difference(mean, mean, "acc,none").error == 0
    perplexity = a_record({"ppl,none": [[-3.0, 2], [-5.0, 4]]}, {"ppl,none": 3.8})
    assert difference(perplexity, perplexity, "ppl,none") is None
    others = a_record({"acc,none": [1.0, 0.0]}, {"acc,none": 0.5}) | {"rows": [{"hash": "x"}] * 2}
    assert difference(mean, others, "acc,none") is None
    one = a_record({"acc,none": [1.0]}, {"acc,none": 1.0})
    assert difference(one, one, "acc,none").error is None


def test_which_metric_is_the_score():
    from kvcompress_eval.scores import choose_metric

    math_task = {
        "exact_match,strict": 0.1,
        "exact_match_stderr,strict": 0.1,
        "exact_match,any": 0.2,
    }
    assert choose_metric({"metrics": math_task}, []) == "exact_match,strict"
    assert choose_metric({"metrics": math_task}, ["exact_match,any"]) == "exact_match,any"
    longbench = {"rouge_score,none": 0.1, "score,none": 0.1}
    assert choose_metric({"metrics": longbench}, ["absent"]) == "score,none"
    assert choose_metric({"metrics": longbench}, ["absent", "rouge_score"]) == "rouge_score,none"


def test_curves_are_over_capacity_or_over_what_was_held():
    from kvcompress_eval.scores import panels

    def at(policy, held, value):
        stats = {"held_tokens": {"mean": held}, "cache_bytes": held * 2**20}
        values, metrics = {"acc,none": [value]}, {"acc,none": value}
        return a_record(values, metrics, policy, kvcompress=stats)

    composed = "snapkv:capacity=64+h2o:capacity=32:scope=generated"
    group = [at("none", 90, 1.0), at("tova:capacity=80", 70, 0.5), at("tova:capacity=40", 40, 0.25)]
    group += [at("h2o:keep_ratio=0.5", 45, 0.4), at(composed, 60, 0.6), at("tova", 88, 0.9)]
    scores, memory = panels("title", group, "acc,none")
    points = {curve.label: [point[:2] for point in curve.points] for curve in scores.curves}
    assert points == {
        "tova": [(40, 0.25), (80, 0.5), (2048, 0.9)],
        "h2o": [(45, 0.4)],
        composed: [(60, 0.6)],
    }
    assert scores.level == 1.0 and memory.level == 90
    assert memory.curves[0].points[0] == (40, 40, None)


class Entry:
    def __init__(self, kind, tags=(), children=()):
        self.kind = type("Kind", (), {"name": kind})
        self.tags, self.cfg = set(tags), {"task": list(children)}


def test_groups_and_tags_are_their_tasks():
    from kvcompress_eval.comparison import _leaves

    from kvcompress import EvaluationError

    index = {name: Entry("TASK") for name in ("a_one", "a_two", "b")}
    index["a"] = Entry("TAG", tags=["a_two", "a_one"])
    index["all"] = Entry("GROUP", children=["a", "b"])
    index["changed"] = Entry("GROUP", children=[{"task": "b", "num_fewshot": 3}])
    assert _leaves("all", index) == ["a_one", "a_two", "b"]
    with pytest.raises(EvaluationError, match=r"no task 'a_on'. Near: a_one"):
        _leaves("a_on", index)
    with pytest.raises(EvaluationError, match="changes the definitions"):
        _leaves("changed", index)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configurations_can_be_read(path, tmp_path):
    from kvcompress_eval.compare import check_model_args
    from kvcompress_eval.comparison import Comparison

    given = {"offline_data": tmp_path} if "--offline-data" in path.read_text() else {}
    settings = Comparison.read(path, given)
    for policy in settings.policies():
        policy.check_layers(32)
    check_model_args(settings.model_args)
    assert f"evaluation/configs/{path.name}" in path.read_text()


@needs_lm_eval
def test_tasks_of_the_shipped_configurations_exist():
    from kvcompress_eval.comparison import Comparison, leaf_tasks
    from kvcompress_eval.offline import stock_tasks

    tasks = []
    for path in CONFIGS:
        settings = Comparison.read(path, {"offline_data": path.parent})
        tasks += settings.task
        if "--offline-data" in path.read_text():
            assert set(settings.task) <= set(stock_tasks())
    assert len(tasks) > 20
    assert leaf_tasks([*tasks, "longbench_code"]) == list(dict.fromkeys(tasks))


@needs_lm_eval
def test_the_real_lm_eval(call, saved_model, tmp_path):
    """A long and a short prompt, with and without compression, by lm_eval's own command."""
    from kvcompress_eval.compare import check_harness

    check_harness()
    rows = [
        {"_id": f"row-{n}", "input": "", "context": "x = 1\n" * n, "answers": ["x"]}
        for n in (2, 60)
    ]
    (tmp_path / "lcc.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out"
    code, shown, problem = call(
        "compare", "--model", saved_model, "--policy", "snapkv:window_size=8", "--capacity", 96,
        "--task", "longbench_lcc", "--offline-data", tmp_path, "--device", "cpu", "--out", out,
        "--model-args", "dtype=float32", "--gen-kwargs", "max_gen_toks=6",
    )  # fmt: skip
    assert code == 0, shown + problem
    rows = table((out / "table.md").read_text(), "longbench_lcc: score,none, 2 rows")
    assert rows["snapkv:capacity=96:window_size=8"]["never compressed"] == "1 of 2"
    records = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    assert [record["policy"] for record in records] == ["none", "snapkv:capacity=96:window_size=8"]
    plain, ours = (record["kvcompress"] for record in records)
    assert plain["kept_ratio"]["min"] == 1 and ours["kept_ratio"]["min"] < 0.4
    assert ours["cache_bytes"] < plain["cache_bytes"] == plain["dense_bytes"]
    assert [row["id"] for row in records[0]["rows"]] == ["row-2", "row-60"]
