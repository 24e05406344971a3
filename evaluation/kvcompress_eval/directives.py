"""Instructions in IFEval's format: what a model is told, and whether an answer follows it.

What to say and how to check it is lm_eval's, which has both for every kind of instruction.
"""

import contextlib
import functools
import io
import json
from importlib import resources
from pathlib import Path
from typing import Any

from kvcompress.errors import EvaluationError
from kvcompress_eval.nltk_data import check_punkt
from kvcompress_eval.offline import Row, ifeval_rows


def built_in_rows() -> list[Row]:
    """A few rows whose prompts, unlike those of IFEval, do not repeat the instructions."""
    text = resources.files("kvcompress_eval").joinpath("leak_rows.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


def read_rows(path: Path | None, limit: int | None) -> list[Row]:
    """Rows with the text of their instructions as `directive`, from a file or the built-in ones.

    Args:
        path: JSON lines with the columns of google/IFEval. A column `directive` is what the model
            is told in place of lm_eval's wording.
        limit: At most as many, from the beginning.

    Raises:
        EvaluationError: The file cannot be read, or a row cannot be told or checked.
    """
    rows = (built_in_rows() if path is None else ifeval_rows(path))[:limit]
    if not rows:
        raise EvaluationError(f"There are no rows in {path}.")
    check_punkt(rows)
    return [row | {"directive": row.get("directive") or _directive(row)} for row in rows]


def follows(row: Row, answer: str) -> list[bool]:
    """Whether an answer follows each instruction of a row, by IFEval's strict checks."""
    checks, _ = _lm_eval()
    columns = {name: row[name] for name in ("key", "instruction_id_list", "prompt", "kwargs")}
    found = checks.test_instruction_following_strict(checks.InputExample(**columns), answer)
    return [bool(each) for each in found.follow_instruction_list]


def _directive(row: Row) -> str:
    _, kinds = _lm_eval()
    names, given = row["instruction_id_list"], row["kwargs"]
    if not names or len(names) != len(given):
        raise EvaluationError(
            f"Row {row['key']} has {len(names)} instructions and {len(given)} kwargs; it must have "
            "one for each, and at least one."
        )
    unknown = sorted(set(names) - set(kinds))
    if unknown:
        raise EvaluationError(
            f"Row {row['key']}: lm_eval checks no instruction {', '.join(unknown)}. Those it does: "
            f"{', '.join(sorted(kinds))}."
        )
    return " ".join(map(_told, names, given))


def _told(name: str, given: dict[str, Any]) -> str:
    _, kinds = _lm_eval()
    known = {key: value for key, value in given.items() if value}
    said: set[str] = set()
    for _ in range(8):  # what is not given is drawn at random
        said.add(str(kinds[name](name).build_description(**known)))
    if len(said) > 1:
        raise EvaluationError(
            f"An instruction {name} with kwargs {given} leaves open what is to be done. Give all "
            "arguments of its kind, as IFEval's rows do."
        )
    return said.pop()


@functools.cache
def _lm_eval() -> tuple[Any, dict[str, Any]]:
    """Its checks, and the classes of instructions by name."""
    import langdetect
    import nltk  # type: ignore[import-untyped]

    fetch = nltk.download
    # What it fetches when it is imported was looked for, and is needed by few instructions.
    nltk.download = lambda *_, **__: True
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            from lm_eval.tasks.ifeval import instructions_registry, utils
    finally:
        nltk.download = fetch
    langdetect.DetectorFactory.seed = 0  # else the same text may be of another language next time
    return utils, dict(instructions_registry.INSTRUCTION_DICT)


def recall(text: str, answer: str) -> float:
    """ROUGE-L recall of a text in an answer: the share of its words that it says in their order.

    Words are stemmed, as in arXiv:2510.00231.
    """
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    return float(scorer.score(text, answer)["rougeL"].recall)
