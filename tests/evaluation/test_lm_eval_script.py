"""Our models in lm_eval's own programs: found by name, in one process and in two."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("lm_eval")

STARTUP = Path(__file__).parent.parent.parent / "evaluation" / "startup"
OPT_OUT = "KVCOMPRESS_NO_LM_EVAL_HOOK"
LETTERS = "abcdefghij klmnopqr stuvwxyz "

TASKS = {
    "tiny_answers": """
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["zz"], max_gen_toks: 6}
metric_list: [{metric: exact_match}]
""",
    "tiny_choices": """
output_type: multiple_choice
doc_to_choice: [" a", " bc", " def"]
doc_to_target: 1
metric_list: [{metric: acc}]
""",
}

EVALUATE = """
import json, sys
import lm_eval
from lm_eval.tasks import TaskManager
from kvcompress_eval.harness import SnapKVLM

lm = SnapKVLM(sys.argv[1], capacity=40, window_size=8, device="cpu", batch_size=2)
results = lm_eval.simple_evaluate(
    lm,
    tasks=["tiny_answers", "tiny_choices"],
    task_manager=TaskManager(include_path=sys.argv[2], include_defaults=False),
    log_samples=True,
)
print("ASKED", len(lm._asked))
if results is not None:
    told = {
        "results": results["results"],
        "kept": lm.get_model_info()["kvcompress"]["tasks"],
        "answers": {
            # lm_eval gives the process that has fewer its last request again.
            task: sorted((s["doc_id"], [each[0] for each in s["resps"]]) for s in samples)
            for task, samples in results["samples"].items()
        },
    }
    print("TOLD" + json.dumps(told))
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder with two small tasks, seven documents each."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [
        {"context": (LETTERS * 9)[n * 7 : n * 7 + 60 + 9 * n], "question": "?" * n, "answer": "a"}
        for n in range(7)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name, body in TASKS.items():
        (folder / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\n"
            f"dataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl}}}}\n"
            f'test_split: test\ndoc_to_text: "{{{{context}}}}{{{{question}}}}"\n{body}'
        )
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run a command offline; gives what it printed."""
    home = tmp_path_factory.mktemp("home")

    def call(*command, **variables):
        environment = os.environ | {
            "HF_HOME": str(home),
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }
        environment.pop(OPT_OUT, None)
        done = subprocess.run(
            list(map(str, command)),
            env=environment | variables,
            cwd=home,
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
        return done.stdout

    return call


def test_two_processes_give_what_one_gives(run, tasks, saved_model, tmp_path):
    script = tmp_path / "evaluate.py"
    script.write_text(EVALUATE)
    arguments = (script, saved_model, tasks)
    one = run(sys.executable, *arguments)
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", 2, "--standalone")
    two = run(sys.executable, *launch, *arguments, ACCELERATE_USE_CPU="true")
    told = [json.loads(out.split("TOLD")[1].splitlines()[0]) for out in (one, two)]
    assert told[1]["results"] == told[0]["results"]
    for task, answers in told[0]["answers"].items():
        others = told[1]["answers"][task]
        assert [doc for doc, _ in others] == [doc for doc, _ in answers]
        if task == "tiny_answers":
            assert others == answers
        else:
            sums = [
                [[score for score, _ in each] for _, each in told] for told in (answers, others)
            ]
            assert np.allclose(*sums, rtol=1e-5)
    kept = told[0]["kept"]
    assert set(kept) == set(TASKS) and kept["tiny_choices"]["requests"] == 21
    assert kept["tiny_answers"]["never_compressed"] == 0
    for task, own in told[1]["kept"].items():
        for name, value in own.items():
            assert value == pytest.approx(kept[task][name])
    # The requests were split: no process was asked for all of them.
    assert one.count("ASKED 21") == 1 and "ASKED 21" not in two and two.count("ASKED") == 2


def test_the_command_needs_no_hook(run, tasks, saved_model, tmp_path):
    kvcompress = shutil.which("kvcompress", path=str(Path(sys.executable).parent))
    run(
        *(kvcompress, "lm-eval", "run", "--model", "snapkv-hf", "--device", "cpu"),
        *("--model_args", f"pretrained={saved_model},policy=tova,capacity=40"),
        *("--tasks", "tiny_choices", "--include_path", tasks, "--batch_size", 3),
        *("--output_path", tmp_path, "--log_samples"),
        **{OPT_OUT: "1"},
    )
    [path] = tmp_path.rglob("results_*.json")
    results = json.loads(path.read_text())
    told = results["config"]["kvcompress"]
    assert told["policy"] == "tova:capacity=40"
    assert told["tasks"]["tiny_choices"]["requests"] == 21
    assert told["tasks"]["tiny_choices"]["kept_ratio"]["max"] < 1
    assert results["config"]["model"] == "snapkv-hf"


def test_lm_eval_knows_the_names_and_loads_nothing(run):
    ask = (
        "import sys; before = set(sys.modules); import lm_eval.models;"
        "from lm_eval.api.registry import model_registry as known;"
        "assert 'torch' not in sys.modules and 'kvcompress' not in sys.modules;"
        "print(*[name for name in ('hf', 'snapkv-hf', 'kvcompress-hf') if name in known])"
    )
    assert run(sys.executable, "-c", ask).split() == ["hf", "snapkv-hf", "kvcompress-hf"]
    assert run(sys.executable, "-c", ask, **{OPT_OUT: "1"}).split() == ["hf"]
    looked = "from importlib.util import find_spec; find_spec('lm_eval.models');"
    assert run(sys.executable, "-c", looked + ask).split() == ["hf", "snapkv-hf", "kvcompress-hf"]
    load = (
        "from lm_eval.api.registry import get_model; from kvcompress_eval.harness import SnapKVLM;"
        "assert get_model('snapkv-hf') is get_model('kvcompress-hf') is SnapKVLM"
    )
    run(sys.executable, "-c", load)


def test_the_hook_costs_an_interpreter_next_to_nothing(run):
    # What it imports, not what it takes: that is measured by `python -X importtime`.
    ask = "import sys; print(*sys.modules)"
    with_hook, without = (
        set(run(sys.executable, "-c", ask, **extra).split()) for extra in ({}, {OPT_OUT: "1"})
    )
    assert with_hook == without >= {"_kvcompress_lm_eval"}
    plain = set(run(sys.executable, "-S", "-c", ask).split())
    assert "_kvcompress_lm_eval" not in plain


def test_without_lm_eval_the_hook_is_silent(tmp_path):
    shutil.copy(STARTUP / "_kvcompress_lm_eval.py", tmp_path)
    ask = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "import _kvcompress_lm_eval as hook; hook.install(); hook.install();"
        "assert sys.meta_path.count(hook.Finder) == 1\n"
        "try:\n import lm_eval.models\n"
        "except ModuleNotFoundError as error: print(error)\n"
        "import json.tool; print(sys.meta_path.count(hook.Finder))"
    )
    # -S: no site-packages, so no lm_eval.
    done = subprocess.run(
        [sys.executable, "-S", "-c", ask, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["No module named 'lm_eval'", "1"] and not done.stderr


def test_an_lm_eval_that_is_otherwise_goes_on_working(tmp_path):
    shutil.copy(STARTUP / "_kvcompress_lm_eval.py", tmp_path)
    (tmp_path / "lm_eval").mkdir()
    (tmp_path / "lm_eval" / "__init__.py").write_text("")
    (tmp_path / "lm_eval" / "models.py").write_text("print('models')\n")
    ask = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "import _kvcompress_lm_eval as hook; hook.install(); import lm_eval.models"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", ask, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "models\n" and "will not know snapkv-hf" in done.stderr


def test_the_hook_leaves_a_registry_that_knows_us_alone(tmp_path):
    """A release of lm_eval that reads entry points has registered the names before."""
    shutil.copy(STARTUP / "_kvcompress_lm_eval.py", tmp_path)
    package = tmp_path / "lm_eval"
    (package / "api").mkdir(parents=True)
    for name in ("__init__.py", "api/__init__.py"):
        (package / name).write_text("")
    (package / "api" / "registry.py").write_text(
        "class Registry(dict):\n"
        "    def register(self, name, target):\n"
        "        assert name not in self\n"
        "        self[name] = target\n"
        "model_registry = Registry()\n"
    )
    (package / "models.py").write_text(
        "from lm_eval.api.registry import model_registry\n"
        "model_registry.register('snapkv-hf', 'an entry point')\n"
    )
    ask = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "import _kvcompress_lm_eval as hook; hook.install(); import lm_eval.models;"
        "from lm_eval.api.registry import model_registry; print(sorted(model_registry.items()))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", ask, str(tmp_path)], capture_output=True, text=True, check=True
    )
    ours = "kvcompress_eval.harness:SnapKVLM"
    assert done.stdout.strip() == str([("kvcompress-hf", ours), ("snapkv-hf", "an entry point")])
