"""lm_eval's own tasks on local rows: which rows, under what names, and what is refused."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs lm_eval")

REAL = Path(__file__).parents[3] / "shared" / "data"
COUNTING = "length_constraints:number_sentences"


def longbench(number, **changes):
    row = {
        "_id": f"row-{number}",
        "input": f"What is {number}?",
        "context": "word " * 10 * number,
        "answers": [str(number)],
        "all_classes": None,
    }
    return {column: value for column, value in (row | changes).items() if value != "absent"}


def ifeval(key, *instructions):
    instructions = instructions or ("punctuation:no_comma",)
    return {
        "key": key,
        "prompt": f"Write {key} words.",
        "instruction_id_list": list(instructions),
        "kwargs": [{} for _ in instructions],
    }


@pytest.fixture
def write(tmp_path):
    """Write rows to a file of the data folder; gives the folder."""

    def write(name, rows):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return tmp_path / "data"

    return write


@pytest.fixture
def read():
    from kvcompress_eval.offline import Selection, read_local

    return lambda task, data, **choice: read_local(task, data, Selection(**choice))


@pytest.fixture
def no_punkt(monkeypatch, tmp_path):
    """NLTK looks into one empty folder, which is given."""
    nltk = pytest.importorskip("nltk")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "nltk")])
    return tmp_path / "nltk"


@pytest.mark.parametrize("name", ["longbench/qasper.jsonl", "qasper.jsonl"])
@pytest.mark.parametrize("column", ["input", "question"])
def test_rows_have_their_question_under_both_names(write, read, name, column):
    other = {"input": "question", "question": "input"}[column]
    rows = [longbench(n, **{column: f"What is {n}?", other: "absent"}) for n in (1, 2)]
    task = read("longbench_qasper", write(name, rows))
    assert [(row["input"], row["question"]) for row in task.rows] == [
        ("What is 1?", "What is 1?"),
        ("What is 2?", "What is 2?"),
    ]


def test_prepared_files_include_the_installed_task(write, read, tmp_path):
    import yaml

    task = read("longbench_qasper", write("qasper.jsonl", [longbench(1), longbench(2)]), limit=1)
    folder = tmp_path / "prepared"
    task.write(folder)
    config = yaml.safe_load((folder / "longbench_qasper_local.yaml").read_text())
    assert config["task"] == "longbench_qasper_local"
    assert config["dataset_path"] == "json" and config["dataset_name"] is None
    stock = yaml.load(Path(config["include"]).read_text().replace("!function", ""), yaml.SafeLoader)
    assert stock["task"] == "longbench_qasper"
    assert config["tag"] not in stock["tag"]
    (data,) = config["dataset_kwargs"]["data_files"].values()
    assert list(config["dataset_kwargs"]["data_files"]) == [stock["test_split"]]
    assert Path(data).is_absolute()
    (row,) = map(json.loads, Path(data).read_text().splitlines())
    assert (row["_id"], row["source_line"], row["context"]) == ("row-1", 1, "word " * 10)
    task.write(folder)  # the same again


def test_rows_that_changed_since_are_refused(write, read, tmp_path):
    from kvcompress import EvaluationError

    read("longbench_qasper", write("qasper.jsonl", [longbench(1)])).write(tmp_path / "prepared")
    changed = read("longbench_qasper", write("qasper.jsonl", [longbench(2)]))
    with pytest.raises(EvaluationError, match="the data changed"):
        changed.write(tmp_path / "prepared")


def test_rows_are_chosen_from_the_front_by_length(write, read):
    from kvcompress import EvaluationError

    data = write("qasper.jsonl", [longbench(n) for n in (5, 1, 4, 2, 3)])

    def count(text):
        return len(text.split())

    chosen = read("longbench_qasper", data, limit=2, max_prompt_tokens=33, count_tokens=count)
    assert [(row["_id"], row["source_line"]) for row in chosen.rows] == [("row-1", 2), ("row-2", 4)]
    assert len(read("longbench_qasper", data, limit=9).rows) == 5
    with pytest.raises(EvaluationError, match=r"No row of the 5 .* shortest has 13 tokens.* 5"):
        read("longbench_qasper", data, max_prompt_tokens=5, count_tokens=count)


@pytest.mark.parametrize("name", ["ifeval/any.jsonl", "input_data.jsonl"])
def test_ifeval_rows(write, read, name):
    task = read("ifeval", write(name, [ifeval(7), ifeval(8)]))
    assert [row["key"] for row in task.rows] == [7, 8]
    assert task.name == "ifeval_local" and task.split == "train"


def test_rows_that_cannot_be_scored_are_refused_or_left_out(write, read, no_punkt):
    from kvcompress import EvaluationError

    data = write("input_data.jsonl", [ifeval(1), ifeval(2, COUNTING), ifeval(3)])
    with pytest.raises(EvaluationError, match="1 of 3 IFEval rows") as refused:
        read("ifeval", data)
    for way_out in ("nltk.downloader punkt_tab", "NLTK_DATA", "--skip-rows-needing-nltk"):
        assert way_out in str(refused.value)
    kept = read("ifeval", data, skip_rows_needing_nltk=True)
    assert [row["key"] for row in kept.rows] == [1, 3]
    assert len(read("ifeval", data, limit=1).rows) == 1
    (no_punkt / "tokenizers" / "punkt_tab" / "english").mkdir(parents=True)
    assert len(read("ifeval", data).rows) == 3


def test_other_tasks_need_no_nltk(no_punkt):
    from kvcompress_eval.nltk_data import check_punkt, needs_punkt

    assert not needs_punkt(longbench(1)) and not needs_punkt({"instruction_id_list": None})
    check_punkt([longbench(1), ifeval(1)])


def test_the_instructions_that_need_punkt_are_those_of_lm_eval():
    from kvcompress_eval.nltk_data import PUNKT_INSTRUCTIONS
    from kvcompress_eval.offline import tasks_folder

    folder = tasks_folder() / "ifeval"
    classes = re.split(r"^class ", (folder / "instructions.py").read_text(), flags=re.M)[1:]
    counting = {
        re.match(r"\w+", each).group() for each in classes if re.search(r"count_sent|nltk", each)
    }
    registry = (folder / "instructions_registry.py").read_text()
    prefixes = dict(re.findall(r'^(_\w+) = "([\w:-]+)"', registry, re.M))
    listed = re.findall(r'^    (_\w+)\s*\+ "(\w+)": \(?instructions\.(\w+)', registry, re.M)
    assert len(listed) > 20
    found = {prefixes[prefix] + name for prefix, name, made in listed if made in counting}
    assert found == PUNKT_INSTRUCTIONS


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [longbench(1, answers="absent")],
            r"qasper.jsonl:1 has no column answers; it has .*context",
        ),
        ([longbench(1), longbench(2, input="absent")], r":2 must have its question .* neither"),
        ([longbench(1, question="Other?")], "both, and they differ"),
        ([[1]], "must be an object"),
        ([], "No row of the 0"),
    ],
)
def test_rows_that_do_not_fit_are_refused(write, read, rows, message):
    from kvcompress import EvaluationError

    with pytest.raises(EvaluationError, match=message):
        read("longbench_qasper", write("qasper.jsonl", rows))


def test_files_that_are_not_there_are_named(write, read, tmp_path):
    from kvcompress import EvaluationError

    data = write("ifeval/one.jsonl", [ifeval(1)])
    with pytest.raises(
        EvaluationError, match=r"there is no .*longbench/trec.jsonl or .*trec.jsonl"
    ):
        read("longbench_trec", data)
    with pytest.raises(EvaluationError, match=r"'gsm8k' has no local form.*longbench_trec"):
        read("gsm8k", data)
    write("ifeval/two.jsonl", [ifeval(1)])
    with pytest.raises(EvaluationError, match=r"must hold one .*one.jsonl, two.jsonl"):
        read("ifeval", data)
    (tmp_path / "data" / "qasper.jsonl").write_text('{"a": 1\n')
    with pytest.raises(EvaluationError, match=r"qasper.jsonl:1 is no JSON"):
        read("longbench_qasper", data)


@pytest.mark.skipif(not REAL.is_dir(), reason="LongBench's and IFEval's files are not beside us")
def test_every_real_file_can_be_read(read):
    from kvcompress_eval.offline import row_id, stock_tasks

    names = [name for name in stock_tasks() if not name.endswith("_e")]
    assert len(names) == 22
    for name in names:
        task = read(name, REAL, limit=2, skip_rows_needing_nltk=True)
        assert len(task.rows) == 2 and all(row_id(row) is not None for row in task.rows)
