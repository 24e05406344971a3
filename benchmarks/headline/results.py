"""What was measured: one kind of record, its table and its picture."""

import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import transformers
from kvcompress_eval.provenance import commit
from rich.table import Table

from headline.devices import Card
from kvcompress import __version__


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Of at least one value."""
        low, _, high = quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
        return cls(median(values), low, high, len(values))

    def text(self, digits: int) -> str:
        """The median, and the quartiles if they are not the same."""
        middle = f"{self.median:.{digits}f}"
        if self.count == 1:
            return middle
        return f"{middle} ({self.low:.{digits}f} to {self.high:.{digits}f})"


@dataclass(frozen=True)
class Measurement:
    """One row of the results; what does not apply is None."""

    section: str
    shape: str
    what: str
    cache: str
    batch: int
    length: int
    """Tokens of the prompt that it stands for."""
    held: int | None = None
    """Rows in the cache, per KV head and layer."""
    ms: Spread | None = None
    bound_ms: float | None = None
    """What the bytes alone take at the card's bandwidth."""
    ratio: Spread | None = None
    """To the full cache, pair by pair."""
    cache_gib: float | None = None
    peak_gib: float | None = None
    """Weights, cache and what was needed beside them."""
    note: str = ""

    @property
    def times_bound(self) -> float | None:
        """How far from the bound."""
        return self.ms.median / self.bound_ms if self.ms and self.bound_ms else None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "times_bound": self.times_bound}


@dataclass
class Record:
    """Everything about one run; written again after every section, so that a crash loses one."""

    card: Card
    settings: dict[str, Any]
    checks: list[str] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "commit": commit(),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "cuda": torch.version.cuda,
                "transformers": transformers.__version__,
                "kvcompress": __version__,
            },
            "machine": platform.machine(),
            "card": asdict(self.card),
            "settings": self.settings,
            "checks": self.checks,
            "measurements": [each.to_dict() for each in self.measurements],
            "skipped": self.skipped,
            "failed": self.failed,
            "seconds": self.seconds,
        }

    def write(self, folder: Path) -> None:
        """`gpu_headline.json`, complete or not there."""
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / "gpu_headline.json.part"
        part.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
        part.replace(folder / "gpu_headline.json")


class Budget:
    """Seconds that may be spent; nothing is interrupted, so what is begun must be foreseen.

    Args:
        seconds: From now on.
        clock: For tests.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    @property
    def left(self) -> float:
        """Seconds, negative if overdrawn."""
        return self._end - self._clock()

    def allows(self, seconds: float) -> bool:
        """Whether something may be begun that will take so long."""
        return self.left > seconds


def table(measurements: Sequence[Measurement], title: str) -> Table:
    """For people; columns that nothing was measured for are left out."""
    columns: dict[str, list[str]] = {
        "what": [each.what for each in measurements],
        "batch": [str(each.batch) for each in measurements],
        "length": [str(each.length) for each in measurements],
        "cache": [each.cache for each in measurements],
        "held": ["" if each.held is None else str(each.held) for each in measurements],
        "ms": ["" if each.ms is None else each.ms.text(2) for each in measurements],
        "bound ms": [_number(each.bound_ms, 2) for each in measurements],
        "x bound": [_number(each.times_bound, 2) for each in measurements],
        "ratio to full": ["" if e.ratio is None else e.ratio.text(3) for e in measurements],
        "cache GiB": [_number(each.cache_gib, 3) for each in measurements],
        "peak GiB": [_number(each.peak_gib, 2) for each in measurements],
        "note": [each.note for each in measurements],
    }
    shown = {heading: cells for heading, cells in columns.items() if any(cells)}
    result = Table(title=title)
    for heading in shown:
        result.add_column(heading, overflow="fold")
    for row in zip(*shown.values(), strict=True):
        result.add_row(*row)
    return result


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def plot(record: dict[str, Any], path: Path) -> bool:
    """Milliseconds per token against the prompt's length, one panel for a shape and a batch.

    Args:
        record: As written; pictures read nothing else.
        path: Of the PNG.

    Returns:
        False if the record has no step of decoding.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = [each for each in record["measurements"] if each["what"] == "decode" and each["ms"]]
    shapes = list(dict.fromkeys(each["shape"] for each in steps))
    batches = sorted({each["batch"] for each in steps})
    if not steps:
        return False
    figure, grid = plt.subplots(
        len(shapes),
        len(batches),
        figsize=(4.4 * len(batches) + 0.6, 3.6 * len(shapes) + 0.8),
        squeeze=False,
        layout="constrained",
    )
    caches = list(dict.fromkeys(each["cache"] for each in steps))
    colours = {cache: f"C{number}" for number, cache in enumerate(caches)}
    for row, shape in enumerate(shapes):
        for column, batch in enumerate(batches):
            axis = grid[row][column]
            for cache in caches:
                points = {
                    each["length"]: (each["ms"], each["bound_ms"])
                    for each in reversed(steps)  # of two for one length, the one timed in turn
                    if (each["shape"], each["batch"], each["cache"]) == (shape, batch, cache)
                }
                if not points:
                    continue
                lengths = sorted(points)
                times = [points[length][0] for length in lengths]
                middle = [ms["median"] for ms in times]
                # Quartiles of a single value lie on it; rounding must not make them negative.
                below = [max(ms["median"] - ms["low"], 0.0) for ms in times]
                above = [max(ms["high"] - ms["median"], 0.0) for ms in times]
                colour = colours[cache]
                axis.errorbar(
                    lengths,
                    middle,
                    yerr=[below, above],
                    color=colour,
                    label=cache,
                    marker="o",
                    ms=3,
                )
                bounds = [points[length][1] for length in lengths]
                axis.plot(lengths, bounds, color=colour, ls="--", lw=0.9)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_title(f"{shape}, batch {batch}", fontsize=9, loc="left")
            axis.set_xlabel("tokens of the prompt", fontsize=8)
            axis.set_ylabel("ms per token", fontsize=8)
            axis.legend(fontsize=6)
    figure.suptitle(
        f"Decoding on {record['card']['name']}; dashed: weights and rows at its bandwidth",
        fontsize=10,
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return True
