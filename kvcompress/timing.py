"""When tokens arrive: the time of a prefill and of each decode step of one `generate` call."""

import itertools
import time
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer


def clock() -> float:
    """Seconds, once all work given to an accelerator is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class TimedStreamer(BaseStreamer):
    """Notes when `generate` delivers tokens, and passes them on to another streamer if given.

    `generate` hands over the prompt before prefill and every token as soon as it is known, so the
    first interval is prefill and the others are decode steps. Not for beams.
    """

    def __init__(self, inner: Any = None) -> None:
        self._inner = inner
        self._marks: list[float] = []

    def put(self, value: Tensor) -> None:
        """The prompt, then one token a call."""
        self._marks.append(clock())
        if self._inner is not None:
            self._inner.put(value)

    def end(self) -> None:
        """Generation is over."""
        if self._inner is not None:
            self._inner.end()

    @property
    def prefill_seconds(self) -> float:
        """From the start to the first token."""
        return self._marks[1] - self._marks[0]

    @property
    def decode_seconds(self) -> list[float]:
        """For every further token."""
        marks = self._marks[1:]
        return [later - earlier for earlier, later in itertools.pairwise(marks)]
