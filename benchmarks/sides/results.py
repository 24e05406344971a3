"""The table, the record and the picture of a comparison."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from sides.bars import Verdict


def table(verdicts: Sequence[Verdict], title: str) -> Table:
    """For people."""
    result = Table(title=title)
    for heading in ("measurement", "ours", "other", "unit", "ratio", "quartiles", "pairs", "bar"):
        result.add_column(heading, overflow="fold")
    result.add_column("")
    for each in verdicts:
        found = each.ratio
        numbers = [""] * 6
        if found is not None:
            other, share = f"{found.plain:.2f}", f"{found.ratio:.3f}"
            numbers = [f"{found.ours:.2f}", other, found.unit, share]
            numbers += [f"{found.low:.3f} to {found.high:.3f}", str(found.pairs)]
            if not found.plain:
                numbers[1] = numbers[3] = ""
        marks = {True: "pass", False: "FAIL", None: ""}
        said = f"{marks[each.passed]} {each.problem}".strip()
        bar = "" if each.bar is None else f"{each.bar:g}"
        result.add_row(each.name, *numbers, bar, said)
    return result


def write(record: dict[str, Any], folder: Path) -> None:
    """`side_by_side.json`, complete or not there."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / "side_by_side.json.part"
    part.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    part.replace(folder / "side_by_side.json")


def plot(record: dict[str, Any], path: Path) -> bool:
    """Measured ratios with their quartiles, and a tick where each bar is.

    Args:
        record: As written; pictures read nothing else.
        path: Of the PNG.

    Returns:
        False if there is no ratio.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [each for each in record["verdicts"] if each["ratio"] and each["ratio"]["plain"]]
    if not shown:
        return False
    figure, axis = plt.subplots(figsize=(10, 1.4 + 0.27 * len(shown)), layout="constrained")
    colours = {True: "tab:green", False: "tab:red", None: "tab:gray"}
    for row, each in enumerate(shown):
        found = each["ratio"]
        colour = colours[each["passed"]]
        axis.plot([found["low"], found["high"]], [row, row], color=colour, lw=1.5)
        axis.plot(found["ratio"], row, "o", color=colour, ms=5)
        if each["bar"] is not None:
            axis.plot(each["bar"], row, "|", color="black", ms=13, mew=2)
    axis.axvline(1, color="black", lw=0.6, ls=":")
    axis.set_yticks(range(len(shown)), [each["name"] for each in shown], fontsize=7)
    axis.invert_yaxis()
    axis.set_xlabel("ratio, with quartiles; black ticks are what it must not exceed")
    figure.suptitle(record["title"], fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return True
