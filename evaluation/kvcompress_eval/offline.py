"""lm_eval's own LongBench and IFEval tasks on JSONL files of this machine instead of the hub's.

For every task a prepared copy of the chosen rows and a YAML that includes the installed task are
written, so that prompt, answer length and metric stay lm_eval's, and a recorded command can be run
again.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from kvcompress.errors import EvaluationError
from kvcompress_eval.nltk_data import check_punkt, needs_punkt

TAG = "kvcompress_local_tasks"
"""lm_eval's tags would otherwise name the local tasks too, in place of its own."""

SKIP_OPTION = "--skip-rows-needing-nltk"

Row = dict[str, Any]


@dataclass(frozen=True)
class Selection:
    """Which rows of a file are taken, from its beginning."""

    limit: int | None = None
    """At most as many."""
    max_prompt_tokens: int | None = None
    """Only rows whose text has at most as many tokens."""
    skip_rows_needing_nltk: bool = False
    count_tokens: Callable[[str], int] = len
    """By the model's tokenizer; asked only with `max_prompt_tokens`."""


@dataclass(frozen=True)
class LocalTask:
    """A task of lm_eval with rows of this machine."""

    stock: str
    definition: Path
    """The installed YAML."""
    split: str
    rows: list[Row]

    @property
    def name(self) -> str:
        """What lm_eval calls it."""
        return f"{self.stock}_local"

    def write(self, folder: Path) -> None:
        """Write rows and YAML.

        Raises:
            EvaluationError: The folder has other rows of an earlier run.
        """
        folder.mkdir(parents=True, exist_ok=True)
        data = folder.absolute() / f"{self.name}.jsonl"
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in self.rows)
        if data.exists() and data.read_text(encoding="utf-8") != text:
            raise EvaluationError(
                f"{data} holds other rows than are now chosen for {self.stock}: the data changed "
                "since. Compare into another folder."
            )
        data.write_text(text, encoding="utf-8")
        config = {
            "include": str(self.definition),
            "task": self.name,
            "tag": TAG,
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {self.split: str(data)}},
        }
        local = folder / f"{self.name}.yaml"
        local.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")


def tasks_folder() -> Path:
    """Where the installed lm_eval keeps its tasks; lm_eval is not imported.

    Raises:
        EvaluationError: It is not installed.
    """
    spec = find_spec("lm_eval")
    if spec is None or not spec.submodule_search_locations:
        raise EvaluationError("lm_eval is not installed. Run: pip install 'kvcompress[eval]'.")
    return Path(next(iter(spec.submodule_search_locations))) / "tasks"


def stock_tasks() -> dict[str, tuple[Path, Row]]:
    """The tasks that can read local rows, by name: their YAML's path and content."""
    folder = tasks_folder()
    paths = [*sorted((folder / "longbench").glob("*.yaml")), folder / "ifeval" / "ifeval.yaml"]
    found = ((path, _load(path)) for path in paths)
    return {config["task"]: (path, config) for path, config in found if "group" not in config}


def _load(path: Path) -> Row:
    """A task's YAML; functions that it names are left as text, so that no task is imported."""

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """Of its own, so that the constructor below is not every loader's."""

    Loader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))
    config: Row = yaml.load(path.read_text(encoding="utf-8"), Loader=Loader)
    return config


def read_local(task: str, data: Path, selection: Selection) -> LocalTask:
    """The chosen rows of one task. Nothing is written.

    Args:
        task: Its name in lm_eval, for example `longbench_qasper`.
        data: Folder that holds `longbench/NAME.jsonl` or `NAME.jsonl` (NAME as in LongBench), and
            one file in `ifeval` or `input_data.jsonl`.
        selection: Which rows.

    Raises:
        EvaluationError: The task has no local form, the file is missing or not as it should be,
            no row is left, or chosen rows cannot be scored.
    """
    known = stock_tasks()
    if task not in known:
        raise EvaluationError(
            f"{task!r} has no local form. With local data these can run: {', '.join(known)}."
        )
    definition, config = known[task]
    if task == "ifeval":
        path, normal, text_of = _ifeval_file(data), _ifeval_row, _ifeval_text
    else:
        path = _longbench_file(data, config["dataset_name"])
        normal, text_of = _longbench_row, _longbench_text
    rows = [normal(row, f"{path}:{row['source_line']}") for row in _read(path)]
    chosen = _select(rows, selection, text_of, path)
    check_punkt(chosen, f"Or leave such rows out: {SKIP_OPTION}.")
    return LocalTask(task, definition, config["test_split"], chosen)


def ifeval_rows(path: Path) -> list[Row]:
    """The rows of a JSONL file with the columns of google/IFEval.

    Raises:
        EvaluationError: It cannot be read, or a row is not as it should be.
    """
    try:
        return [_ifeval_row(row, f"{path}:{row['source_line']}") for row in _read(path)]
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(f"The rows {path} cannot be read: {error}") from None


def row_id(row: Mapping[str, Any]) -> str | int | None:
    """The row's name in its data set: LongBench's `_id`, IFEval's `key`."""
    name: str | int | None = row.get("_id", row.get("key"))
    return name


def _longbench_file(data: Path, name: str) -> Path:
    places = [data / "longbench" / f"{name}.jsonl", data / f"{name}.jsonl"]
    return _first(places, "LongBench")


def _ifeval_file(data: Path) -> Path:
    inside = sorted((data / "ifeval").glob("*.jsonl"))
    if len(inside) > 1:
        names = ", ".join(path.name for path in inside)
        raise EvaluationError(f"{data / 'ifeval'} must hold one JSONL file; it has {names}.")
    return _first([*inside, data / "input_data.jsonl"], "IFEval")


def _first(places: list[Path], what: str) -> Path:
    for place in places:
        if place.is_file():
            return place
    looked = " or ".join(map(str, places))
    raise EvaluationError(f"No rows of {what}: there is no {looked}.")


def _read(path: Path) -> Iterator[Row]:
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise EvaluationError(f"{path}:{number} is no JSON: {error}.") from None
        if not isinstance(row, dict):
            raise EvaluationError(f"{path}:{number} must be an object with columns.")
        yield row | {"source_line": number}


def _longbench_row(row: Row, where: str) -> Row:
    """LongBench's files say `input` where lm_eval's tasks read `question`: the row gets both."""
    _check_columns(row, {"context", "answers"}, where)
    texts = {row[column] for column in ("input", "question") if column in row}
    if len(texts) != 1:
        found = "both, and they differ" if texts else "neither"
        raise EvaluationError(
            f"{where} must have its question in 'input' or in 'question'; it has {found}."
        )
    (question,) = texts
    # What classification tasks alone have; lm_eval passes it on for all.
    return {"all_classes": None} | row | {"input": question, "question": question}


def _longbench_text(row: Row) -> str:
    return f"{row['context']}{row['question']}"


def _ifeval_row(row: Row, where: str) -> Row:
    _check_columns(row, {"key", "prompt", "instruction_id_list", "kwargs"}, where)
    return row


def _ifeval_text(row: Row) -> str:
    return str(row["prompt"])


def _check_columns(row: Row, needed: set[str], where: str) -> None:
    missing = sorted(needed - set(row))
    if missing:
        has = ", ".join(sorted(set(row) - {"source_line"}))
        raise EvaluationError(f"{where} has no column {', '.join(missing)}; it has {has}.")


def _select(
    rows: list[Row], selection: Selection, text_of: Callable[[Row], str], path: Path
) -> list[Row]:
    most = selection.max_prompt_tokens
    chosen: list[Row] = []
    lengths = []
    for row in rows:
        if len(chosen) == selection.limit:
            break
        if selection.skip_rows_needing_nltk and needs_punkt(row):
            continue
        if most is not None:
            lengths.append(selection.count_tokens(text_of(row)))
            if lengths[-1] > most:
                continue
        chosen.append(row)
    if not chosen:
        why = f"; the shortest has {min(lengths)} tokens, allowed are {most}" if lengths else ""
        raise EvaluationError(f"No row of the {len(rows)} in {path} is left{why}.")
    return chosen
