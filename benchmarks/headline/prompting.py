"""Sections about whole prompts: what compressing adds to reading, and what share reading has."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from headline.caches import held_rows
from headline.results import Spread
from headline.run import FULL, Run, ratio_to
from headline.shapes import random_ids
from kvcompress import press
from kvcompress.session import cache_argument
from kvcompress.timing import TimedStreamer


def prefill(run: Run) -> None:
    """Real prefill of one prompt in one forward, plain and compressed."""
    for length in sorted(run.settings.prefill_lengths):
        expected = _expected_seconds(run, length)
        run.attempt(f"1 x {length}", partial(_prefill_cell, run, length), seconds=expected)
        run.device.release()


def _expected_seconds(run: Run, length: int) -> float:
    """From the last shorter prompt, as if all were quadratic in it."""
    for each in reversed(run.record.measurements):
        if (each.section, each.shape, each.cache) == (run.section, str(run.shape), FULL):
            arms = 1 + len(run.settings.prefill_policies)
            rounds = run.settings.repeats + 1
            assert each.ms is not None
            return each.ms.median / 1000 * (length / each.length) ** 2 * arms * rounds
    return 0.0


def _context(run: Run, policy: str | None) -> AbstractContextManager[Any]:
    return nullcontext() if policy is None else press(run.model, policy)


def _prefill_cell(run: Run, length: int) -> None:
    ids = random_ids(run.model, 1, length)

    def read(policy: str | None) -> None:
        with _context(run, policy):
            run.model(ids, use_cache=True, logits_to_keep=1)

    arms: dict[str, Callable[[], None]] = {FULL: partial(read, None)}
    arms |= {policy: partial(read, policy) for policy in run.settings.prefill_policies}
    peaks: dict[str, int | None] = {}
    for name, call in list(arms.items()):
        run.device.release()
        run.device.reset_peak()
        before = len(run.record.skipped) + len(run.record.failed)
        run.attempt(f"1 x {length}, {name}", call)
        if len(run.record.skipped) + len(run.record.failed) > before:
            del arms[name]
            continue
        run.device.synchronize()
        peaks[name] = run.device.peak()
    if not arms:
        return
    times = run.time_in_turn(arms, run.settings.repeats)
    flops = run.costs.prefill_flops(1, length)
    for name in arms:
        peak = peaks[name]
        ms = Spread.of(times[name])
        run.add(
            "prefill",
            name,
            1,
            length,
            ms=ms,
            ratio=ratio_to(times, name),
            peak_gib=None if peak is None else peak / 2**30,
            note=f"{flops / ms.median / 1e9:.0f} TFLOP/s",
        )


@dataclass
class Answered:
    """What one call of `generate` took."""

    prompt_ms: float
    token_ms: float
    seconds: float
    held: int
    """Rows in the cache at the end."""


def split(run: Run) -> None:
    """`generate` as users call it: how its time is split between the prompt and the answer."""
    settings = run.settings
    arms: dict[str, str | None] = {FULL: None, **{policy: policy for policy in settings.policies}}
    found: dict[str, list[Answered]] = {name: [] for name in arms}
    expected = 0.0
    # The first round warms up.
    for number in range(settings.repeats + 1):
        for name, policy in arms.items():
            label = f"1 x {settings.split_length}, {name}, round {number}"
            done = run.attempt(label, partial(_generate, run, policy), seconds=expected)
            run.device.release()
            if done is not None:
                expected = done.seconds
                found[name] += [done] if number else []
    rounds = min(len(answers) for answers in found.values())
    if not rounds:
        run.skip(f"1 x {settings.split_length}", "not every cache was timed after a warm-up")
        return
    prompts, tokens = (
        {name: [getattr(each, key) for each in answers[:rounds]] for name, answers in found.items()}
        for key in ("prompt_ms", "token_ms")
    )
    for name, answers in found.items():
        prompt, token = Spread.of(prompts[name]), Spread.of(tokens[name])
        whole = prompt.median + token.median * (settings.new_tokens - 1)
        share = f"{100 * prompt.median / whole:.0f} % of the time for {settings.new_tokens} tokens"
        held = answers[0].held
        run.add(
            "first token",
            name,
            1,
            settings.split_length,
            ms=prompt,
            ratio=ratio_to(prompts, name),
            note=share,
        )
        run.add(
            "each later token",
            name,
            1,
            settings.split_length,
            held=held,
            ms=token,
            bound_ms=run.bound_ms(1, held),
            ratio=ratio_to(tokens, name),
        )


def _generate(run: Run, policy: str | None) -> Answered:
    ids = random_ids(run.model, 1, run.settings.split_length)
    generate: Any = run.model.generate
    streamer = TimedStreamer()
    with _context(run, policy):
        output = generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=run.settings.new_tokens,
            do_sample=False,
            streamer=streamer,
            return_dict_in_generate=True,
        )
    return Answered(
        prompt_ms=1000 * streamer.prefill_seconds,
        token_ms=1000 * median(streamer.decode_seconds),
        seconds=streamer.prefill_seconds + sum(streamer.decode_seconds),
        held=held_rows(output[cache_argument(run.model)]),
    )
