"""What is claimed, and whether a measurement bears it out."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Any

from kvcompress_eval.ratios import Ratio, compare

BARS = {
    "decode from 512 rows of 4096, ours / ours plain": 1.03,
    "decode from 2048 rows, ours / kvpress": 0.95,
    "decode from 8192 rows, ours / kvpress": 0.75,
    "what streaming_llm every 16 tokens adds at 512 rows, ours / kvpress": 0.6,
    "what snapkv_decoding every 16 tokens adds at 512 rows, ours / kvpress": 0.6,
    "prefill of 4096 with snapkv, ours / ours plain": 1.02,
    "prefill of 4096 with h2o, ours / ours plain": 1.5,
    "prefill of 4096 with h2o, ours / kvpress (eager)": 1.0,
    "peak of a prefill of 8192 with snapkv, ours / kvpress": 1.0,
    "peak of a prefill of 8192 with h2o, ours / kvpress (eager)": 0.25,
    "import kvcompress, ms": 60.0,
}
"""What the measured ratio, or the number itself, must not exceed."""


@dataclass(frozen=True)
class Verdict:
    """One line of the result."""

    name: str
    bar: float | None
    ratio: Ratio | None
    """None if it could not be measured."""
    problem: str = ""

    @property
    def value(self) -> float | None:
        """What is held against the bar."""
        if self.ratio is None:
            return None
        # Without a second side the number itself is the claim.
        return self.ratio.ratio if self.ratio.plain else self.ratio.ours

    @property
    def passed(self) -> bool | None:
        """None if nothing is claimed; what could not be measured has not passed."""
        if self.problem:
            return False
        if self.bar is None or self.value is None:
            return None
        return self.value <= self.bar

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "value": self.value, "passed": self.passed}


def ratio(name: str, unit: str, ours: Sequence[float], theirs: Sequence[float]) -> Verdict:
    """Median and quartiles of the pairwise ratios, and the bar of this name if there is one."""
    return Verdict(name, BARS.get(name), compare(name, unit, list(ours), list(theirs)))


def single(name: str, unit: str, values: Sequence[float]) -> Verdict:
    """A number that is claimed itself."""
    low, _, high = quantiles(values, n=4)
    found = Ratio(name, unit, median(values), 0.0, 0.0, low, high, len(values))
    return Verdict(name, BARS.get(name), found)


def overhead(
    name: str,
    ours: tuple[Sequence[float], Sequence[float]],
    theirs: tuple[Sequence[float], Sequence[float]],
) -> Verdict:
    """What evicting adds to a step, as a share of each side's own plain step, ours / theirs.

    Args:
        name: With its bar.
        ours: Milliseconds with a policy, and plain ones, in turn.
        theirs: The same. If they add nothing measurable, nothing can be compared with them.
    """
    own, other = (
        [100 * (with_policy / plain - 1) for with_policy, plain in zip(*side, strict=True)]
        for side in (ours, theirs)
    )
    base = median(other)
    if base <= 0:
        return failed(name, f"theirs adds {base:.1f} %, which is noise: measure more blocks")
    low, middle, high = quantiles([each / base for each in own], n=4)
    found = Ratio(name, "% of a step", median(own), base, middle, low, high, len(own))
    return Verdict(name, BARS.get(name), found)


def failed(name: str, problem: str) -> Verdict:
    """What could not be measured."""
    return Verdict(name, BARS.get(name), None, problem)
