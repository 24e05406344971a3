"""How a request scales with the length of its prompt, compressed beside plain, in turn."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy
import torch

from kvcompress import CompressedCache
from kvcompress.timing import clock
from kvcompress_eval.measure import cache_of, forward, random_ids, timed_run
from kvcompress_eval.ratios import Ratio, compare, in_turn

WARM_UP = 3
"""Steps that pay for growing the buffers."""


def decode_over_lengths(model: Any, policy: Any, lengths: Sequence[int], steps: int) -> list[Ratio]:
    """A decode step after prompts of several lengths, and what longer prompts add to it.

    One prefill each; then rounds in which every cache takes one step, so that what the machine does
    beside is shared by all of them. The slope is fitted round by round.
    """
    caches: dict[int, tuple[Any, Any]] = {}
    times: dict[int, tuple[list[float], list[float]]] = {}
    with torch.inference_mode():
        for length in lengths:
            ids = random_ids(model, length)
            compressed = CompressedCache(model, policy, prompt_length=length)
            forward(model, ids, compressed)
            caches[length] = compressed, cache_of(forward(model, ids))
            times[length] = [], []
        token = random_ids(model, 1)

        def step(cache: Any) -> float:
            started = clock()
            forward(model, token, cache)
            return 1000 * (clock() - started)

        for number in range(steps + WARM_UP):
            for length, (compressed, plain) in caches.items():
                calls = partial(step, compressed), partial(step, plain)
                pair = in_turn(1, *calls, first=number)
                if number >= WARM_UP:
                    for side, found in zip(times[length], pair, strict=True):
                        side += found
    points = [
        compare(f"decode after {length} with {policy} / plain", "ms/token", *times[length], length)
        for length in lengths
    ]
    thousands = numpy.array(lengths) / 1000
    slopes = [
        numpy.polyfit(thousands, numpy.array([times[each][side] for each in lengths]), 1)[0]
        for side in (0, 1)
    ]
    name = f"what 1000 tokens of prompt add to a step with {policy} / plain"
    return [*points, compare(name, "ms/token", *(each.tolist() for each in slopes))]


def split_over_lengths(
    model: Any, policy: Any, lengths: Sequence[int], new_tokens: int, repeats: int
) -> list[Ratio]:
    """One request of `generate` in its two parts: until the first token, and all later ones.

    Source: Li et al. 2024, arXiv:2404.14469, appendix C.
    """
    found = []
    for length in lengths:
        ids = random_ids(model, length)

        def request(chosen: Any, ids: Any = ids) -> tuple[float, float]:
            limits = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
            run = timed_run(model, ids, chosen, **limits)
            return run.prefill_seconds, sum(run.decode_seconds)

        timed_run(model, ids[:, :64], None, max_new_tokens=2)
        sides = in_turn(repeats, partial(request, policy), partial(request, None))
        for part, title in enumerate(("first token", f"{new_tokens - 1} more tokens")):
            ours, plain = ([each[part] for each in side] for side in sides)
            name = f"{title} after {length} with {policy} / plain"
            found.append(compare(name, "s", ours, plain, length))
    return found
