"""What every section works with: the model, its budget, and how a cell may fail."""

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from headline import caches
from headline.devices import GIB, Device, is_out_of_memory
from headline.results import Budget, Measurement, Record, Spread
from headline.shapes import Costs, Shape, random_ids

Made = TypeVar("Made")

FULL = "full"
IN_PLACE = "full, appended in place"


@dataclass(frozen=True)
class Settings:
    """What was asked for."""

    lengths: Sequence[int]
    batches: Sequence[int]
    policies: Sequence[str]
    prefill_policies: Sequence[str]
    prefill_lengths: Sequence[int]
    split_length: int
    new_tokens: int
    fill_tokens: int
    """Tokens that are really read for one compressed cache of the decode section."""
    chunk: int
    longest: int
    """The limits section tries no longer prompts."""
    blocks: int
    """How often every cache is timed in a cell, in turn."""
    steps: int
    """Steps of decoding that are timed together."""
    repeats: int
    """Of a prefill, and of `generate`."""


class Run:
    """One shape, section after section.

    Args:
        shape: Of the model.
        model: On the device.
        device: What it is on.
        settings: What to measure.
        record: Where results go.
    """

    def __init__(
        self,
        shape: Shape,
        model: PreTrainedModel,
        device: Device,
        settings: Settings,
        record: Record,
    ) -> None:
        self.shape, self.model, self.device = shape, model, device
        self.settings, self.record = settings, record
        self.costs = Costs.of(model)
        self.token_seconds = 0.0
        """Of reading one token of a prompt in chunks, once that was measured."""
        self.section, self.budget = "", Budget(0)

    def begin(self, section: str, seconds: float) -> None:
        """From now on results belong to this section, which may take so long."""
        self.section, self.budget = section, Budget(seconds)

    def add(self, what: str, cache: str, batch: int, length: int, **values: Any) -> None:
        """Note a result."""
        measurement = Measurement(
            self.section, str(self.shape), what, cache, batch, length, **values
        )
        self.record.measurements.append(measurement)

    def skip(self, label: str, reason: str) -> None:
        """Note what was not measured, and why."""
        self.record.skipped.append(f"{self.section}, {self.shape}, {label}: {reason}")

    def attempt(self, label: str, make: Callable[[], Made], *, seconds: float = 0.0) -> Made | None:
        """What `make` gives; None, and a note, if there is no time or memory for it.

        Whatever else goes wrong is noted too: the other cells are worth having.

        Args:
            label: What it is called in the note.
            make: Does it.
            seconds: What it will take about.
        """
        if not self.budget.allows(seconds):
            self.skip(label, f"needs about {seconds:.0f} s of {max(self.budget.left, 0):.0f} left")
            return None
        reason = ""
        try:
            return make()
        except Exception as error:
            if is_out_of_memory(error):
                reason = "out of memory"
            else:
                lines = "".join(traceback.format_exception(error, limit=-6))
                self.record.failed.append(f"{self.section}, {self.shape}, {label}:\n{lines}")
        # Only here the exception, whose frames refer to what was half made, is gone.
        self.device.release()
        if reason:
            self.skip(label, reason)
        return None

    def bound_ms(self, batch: int, held: int) -> float:
        """Of a step of decoding."""
        return self.costs.decode_bound_ms(batch, held, self.record.card.bandwidth)

    def token(self, batch: int) -> Tensor:
        """Tokens to decode with."""
        return random_ids(self.model, batch, 1)

    def fill(self, policy: str, batch: int, length: int) -> Cache:
        """A compressed cache that has read a prompt; notes how long a token takes."""
        started = time.monotonic()
        cache = caches.compressed(self.model, policy, batch, length, self.settings.chunk)
        self.device.synchronize()
        self.token_seconds = (time.monotonic() - started) / (batch * length)
        return cache

    def stepper(self, cache: Cache, batch: int, times: int = 1) -> Callable[[], None]:
        """Decodes so many tokens; the token that is fed does not depend on the logits."""
        token = self.token(batch)

        def decode() -> None:
            for _ in range(times):
                caches.step(self.model, cache, token)

        return decode

    def step_peak_gib(self, cache: Cache, decode: Callable[[], None]) -> float | None:
        """Weights, this cache, and what one step needs beside them, whatever else is allocated."""
        self.device.synchronize()
        self.device.reset_peak()
        before = self.device.allocated()
        decode()
        self.device.synchronize()
        peak = self.device.peak()
        if before is None or peak is None:
            return None
        weights = sum(each.nbytes for each in self.model.parameters())
        return (weights + caches.cache_bytes(cache) + peak - before) / GIB

    def time_in_turn(
        self, arms: dict[str, Callable[[], Any]], times: int, each_is: int = 1
    ) -> dict[str, list[float]]:
        """Milliseconds of every arm, `times` times in turn; the order moves on with every round."""
        found: dict[str, list[float]] = {name: [] for name in arms}
        names = list(arms)
        for number in range(times):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                found[name].append(self.device.milliseconds(arms[name]) / each_is)
        return found


def ratio_to(times: dict[str, list[float]], name: str, other: str = FULL) -> Spread | None:
    """Of one arm to another, pair by pair; None if either is not there or they are the same."""
    if name == other or name not in times or other not in times:
        return None
    return Spread.of([a / b for a, b in zip(times[name], times[other], strict=True)])
