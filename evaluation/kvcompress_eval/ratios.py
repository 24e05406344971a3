"""Two things measured in turn, and what is said of them. Imports no torch."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, quantiles
from typing import TypeVar

Measured = TypeVar("Measured")


@dataclass(frozen=True)
class Ratio:
    """Ours against plain, measured side by side."""

    name: str
    unit: str
    ours: float
    plain: float
    ratio: float
    """Median of the pairwise ratios: what disturbs one moment disturbs both of its pair."""
    low: float
    """First quartile of the pairwise ratios."""
    high: float
    """Third quartile."""
    pairs: int
    tokens: int = 0
    """Of the prompt, where a measurement goes over several lengths."""


def compare(name: str, unit: str, ours: list[float], plain: list[float], tokens: int = 0) -> Ratio:
    """Median and quartiles of the pairwise ratios."""
    pairs = [a / b for a, b in zip(ours, plain, strict=True)]
    low, middle, high = quantiles(pairs, n=4) if len(pairs) > 1 else (pairs[0],) * 3
    return Ratio(name, unit, median(ours), median(plain), middle, low, high, len(pairs), tokens)


def in_turn(
    times: int, ours: Callable[[], Measured], plain: Callable[[], Measured], first: int = 0
) -> tuple[list[Measured], list[Measured]]:
    """What both give, called in turn; each goes first half of the time."""
    results: tuple[list[Measured], list[Measured]] = ([], [])
    for turn in range(first, first + times):
        order = [(results[0], ours), (results[1], plain)]
        for found, call in order if turn % 2 else reversed(order):
            found.append(call())
    return results
