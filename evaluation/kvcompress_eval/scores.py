"""From the records of a comparison to what is shown: scores, paired differences, tables, curves."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from kvcompress.errors import EvaluationError
from kvcompress_eval.comparison import UNCOMPRESSED

Record = dict[str, Any]

HEADINGS = ("cache", "score", "minus none", "kept", "held MiB", "never compressed", "cut")
LEGEND = (
    "±: standard error. minus none: mean difference to the uncompressed cache on the same rows. "
    "kept: tokens in the cache at the end of those it has seen, mean (least to most). held MiB: a "
    "row's cache at the end, mean, of what it would be uncompressed. never compressed: requests of "
    "which nothing was evicted; they say nothing about the policy. cut: prompts longer than the "
    "model takes."
)


@dataclass(frozen=True)
class Curve:
    """Points of one policy over capacity, in its order."""

    label: str
    points: list[tuple[float, float, float | None]]
    """Capacity, value and its standard error."""


@dataclass(frozen=True)
class Panel:
    """What one picture shows: policies, and the uncompressed cache as a level."""

    title: str
    value: str
    curves: list[Curve]
    level: float | None


@dataclass(frozen=True)
class Estimate:
    """A number and its standard error, None where there is none."""

    value: float
    error: float | None

    def text(self, sign: str = "") -> str:
        """With four decimals."""
        spread = "" if self.error is None else f" ± {self.error:.4f}"
        return f"{self.value:{sign}.4f}{spread}"


def metric_names(record: Record) -> list[str]:
    """The numbers that lm_eval gives for a task, as `metric,filter`, without standard errors."""
    numbers = (name for name, value in record["metrics"].items() if isinstance(value, (int, float)))
    return [name for name in numbers if "_stderr," not in name]


def choose_metric(record: Record, wanted: Sequence[str]) -> str:
    """Which of a task's metrics is its score, as `metric,filter`.

    Args:
        record: Of any policy.
        wanted: Metrics with or without filter; the first that the task has. If it has none of
            them, or none is given: `score`, else the task's first.
    """
    names = metric_names(record)
    for each in (*wanted, "score"):
        for name in names:
            if each in (name, name.split(",")[0]):
                return name
    return names[0]


def check_metrics(records: Sequence[Record], wanted: Sequence[str]) -> None:
    """Refuse a metric that no task has.

    Raises:
        EvaluationError: There is one; the message lists what there is.
    """
    names = {name for record in records for name in metric_names(record)}
    known = names | {name.split(",")[0] for name in names}
    unknown = [each for each in wanted if each not in known]
    if unknown and records:
        raise EvaluationError(
            f"No task has the metric {', '.join(unknown)}. Metrics: {', '.join(sorted(names))}. "
            "Nothing is lost: give another --metric and the tables are made from the records."
        )


def score(record: Record, metric: str) -> Estimate:
    """As lm_eval computed it."""
    name, filtered = metric.split(",", 1)
    error = record["metrics"].get(f"{name}_stderr,{filtered}")
    return Estimate(
        float(record["metrics"][metric]), float(error) if isinstance(error, (int, float)) else None
    )


def difference(ours: Record, plain: Record, metric: str) -> Estimate | None:
    """Mean difference on the same rows, and its standard error from the spread over rows.

    A row's value is a number, or a list of them where a row has several parts (IFEval's
    instructions); then the score is the mean over all parts, and the error that of a ratio of sums.

    Returns:
        None if the rows differ, or the score is no mean over rows (a perplexity).
    """
    mine, theirs = _sums(ours, metric), _sums(plain, metric)
    hashes = [[row["hash"] for row in record["rows"]] for record in (ours, plain)]
    if mine is None or theirs is None or mine[1] != theirs[1] or hashes[0] != hashes[1]:
        return None
    first, second, parts = mine[0], theirs[0], mine[1]
    total, rows = sum(parts), len(parts)
    value = (sum(first) - sum(second)) / total
    if rows < 2:
        return Estimate(value, None)
    residuals = [a - b - value * n for a, b, n in zip(first, second, parts, strict=True)]
    return Estimate(value, stdev(residuals) * math.sqrt(rows) / total)


def _sums(record: Record, metric: str) -> tuple[list[float], list[int]] | None:
    """Sum and number of parts of each row, if the score is the mean of all parts."""
    values = record["values"].get(metric)
    lists = [value if isinstance(value, list) else [value] for value in values or ()]
    if not lists or not all(isinstance(part, (int, float)) for each in lists for part in each):
        return None
    sums, parts = [float(sum(each)) for each in lists], [len(each) for each in lists]
    total = sum(parts)
    reported = record["metrics"][metric]
    if not total or not math.isclose(sum(sums) / total, reported, rel_tol=1e-6, abs_tol=1e-9):
        return None
    return sums, parts


def cells(record: Record, plain: Record | None, metric: str) -> list[str]:
    """One row of a task's table, see `HEADINGS`."""
    stats = record["kvcompress"]
    requests = stats["requests"]
    kept, held = stats["kept_ratio"], stats["cache_bytes"]
    uncompressed = record["policy"] == UNCOMPRESSED
    less = None if plain is None or uncompressed else difference(record, plain, metric)
    return [
        record["policy"],
        score(record, metric).text(),
        "" if uncompressed else "not known" if less is None else less.text("+"),
        "all" if uncompressed else f"{kept['mean']:.3f} ({kept['min']:.3f} to {kept['max']:.3f})",
        f"{mebibytes(record):.2f} of {stats['dense_bytes'] / 2**20:.2f}" if held else "not known",
        "" if uncompressed else f"{stats['never_compressed']} of {requests}",
        f"{stats['truncated']} of {requests}",
    ]


def overview(records: Sequence[Record], metrics: dict[str, str]) -> list[list[str]]:
    """Scores of all tasks side by side, a heading first, a row for each policy.

    The mean is given where every task is scored by a metric of one name, and the policy has all.
    """
    tasks = list(metrics)
    alike = len({metric.split(",")[0] for metric in metrics.values()}) == 1
    rows = [["cache", *tasks, *(["mean"] if alike else [])]]
    for policy in dict.fromkeys(record["policy"] for record in records):
        found = {
            record["task"]: score(record, metrics[record["task"]])
            for record in records
            if record["policy"] == policy
        }
        row = [found[task].text() if task in found else "missing" for task in tasks]
        if alike:
            whole = len(found) == len(tasks)
            mean = fmean(each.value for each in found.values())
            row.append(f"{mean:.4f}" if whole else "missing")
        rows.append([policy, *row])
    return rows


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table; the first row is its heading."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def panels(title: str, group: Sequence[Record], metric: str) -> list[Panel]:
    """Score and memory of one task against capacity.

    Args:
        title: Names model and task.
        group: Records of the task, one for each policy.
        metric: The score.
    """
    plain = [record for record in group if record["policy"] == UNCOMPRESSED]
    by_series: dict[str, list[tuple[float, Record]]] = {}
    for record in group:
        if record["policy"] != UNCOMPRESSED:
            label, capacity = _series(record)
            by_series.setdefault(label, []).append((capacity, record))
    for points in by_series.values():
        points.sort(key=lambda point: point[0])

    def panel(value: str, of: Callable[[Record], Estimate]) -> Panel:
        curves = [
            Curve(label, [(x, of(record).value, of(record).error) for x, record in points])
            for label, points in by_series.items()
        ]
        return Panel(title, value, curves, of(plain[0]).value if plain else None)

    return [
        panel(metric, lambda record: score(record, metric)),
        panel("cache, MiB a row", lambda record: Estimate(mebibytes(record), None)),
    ]


def mebibytes(record: Record) -> float:
    """What a row's cache held at the end, mean."""
    return float(record["kvcompress"]["cache_bytes"]) / 2**20


def _series(record: Record) -> tuple[str, float]:
    """A policy without its budget, and the budget.

    A ratio, a list of capacities and a composition have no single one: then it is what was held.
    """
    from kvcompress import policy_from

    policy = policy_from(record["policy"])
    held = float(record["kvcompress"]["held_tokens"]["mean"])
    capacity = None if "+" in record["policy"] else policy.capacity
    budget = float(capacity) if isinstance(capacity, int) else held
    return without_budget(record["policy"]), budget


def without_budget(policy: str) -> str:
    """A policy's string without how much it keeps; a composition's as it is."""
    if "+" in policy:
        return policy
    parts = policy.split(":")
    return ":".join(part for part in parts if not part.startswith(("capacity=", "keep_ratio=")))
