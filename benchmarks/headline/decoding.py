"""Sections about steps of decoding: their time and memory, the longest prompts, CUDA graphs."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import Cache

from headline import caches
from headline.results import Spread
from headline.run import FULL, IN_PLACE, Run, ratio_to

FLOOR_ROWS = 16
"""A cache so short that reading it costs nothing: what a step takes in launches and weights."""
WARM_UP = 3


def decode(run: Run) -> None:
    """Time and memory of a step against the length of the prompt."""
    # The batch that people ask about first; what no time is left for is the largest.
    for batch in run.settings.batches:
        filled: dict[str, tuple[Cache, int]] = {}
        for length in (FLOOR_ROWS, *sorted(run.settings.lengths)):
            _decode_cell(run, batch, length, filled)
            run.device.release()


def _decode_cell(run: Run, batch: int, length: int, filled: dict[str, tuple[Cache, int]]) -> None:
    label = f"batch {batch}, {length} tokens"
    if not run.budget.allows(0):
        run.skip(label, "no time left")
        return
    arms: dict[str, Cache] = {}
    notes: dict[str, str] = {}
    full = run.attempt(f"{label}, {FULL}", partial(caches.dense, run.model, batch, length))
    if full is not None:
        arms[FULL] = full
    floor = length == FLOOR_ROWS
    for policy in () if floor else run.settings.policies:
        found = run.attempt(
            f"{label}, {policy}",
            partial(_filled, run, policy, batch, length, filled),
            seconds=run.token_seconds * min(batch * length, run.settings.fill_tokens),
        )
        if found is not None:
            arms[policy], read = found
            notes[policy] = "" if read == length else f"rows of a prompt of {read}"
    if not floor:
        hosted = run.attempt(
            f"{label}, {IN_PLACE}", partial(caches.dense_in_place, run.model, batch, length)
        )
        if hosted is not None:
            arms[IN_PLACE] = hosted
    run.attempt(label, partial(_time_steps, run, batch, length, arms, notes))


def _filled(
    run: Run, policy: str, batch: int, length: int, filled: dict[str, tuple[Cache, int]]
) -> tuple[Cache, int]:
    """A cache of this policy, and how many tokens it has read.

    Longer prompts than there is time for leave as many rows, so a copy of an earlier one does.
    """
    if batch * length > run.settings.fill_tokens and policy in filled:
        template, read = filled[policy]
        return copy.deepcopy(template), read
    read = min(length, max(run.settings.fill_tokens // batch, run.settings.chunk))
    cache = run.fill(policy, batch, read)
    filled[policy] = copy.deepcopy(cache), read
    return cache, read


def _time_steps(
    run: Run, batch: int, length: int, arms: dict[str, Cache], notes: dict[str, str]
) -> None:
    settings = run.settings
    peaks: dict[str, float | None] = {}
    held: dict[str, int] = {}

    def first_steps(name: str) -> bool:
        # Also what grows a buffer, once, is done here.
        run.stepper(arms[name], batch, WARM_UP)()
        peaks[name] = run.step_peak_gib(arms[name], run.stepper(arms[name], batch))
        held[name] = caches.held_rows(arms[name])
        return True

    for name in list(arms):
        label = f"batch {batch}, {length} tokens, {name}, first steps"
        if not run.attempt(label, partial(first_steps, name)):
            del arms[name]
    if not arms:
        return
    steppers = {name: run.stepper(cache, batch, settings.steps) for name, cache in arms.items()}
    times = run.time_in_turn(steppers, settings.blocks, settings.steps)
    for name, cache in arms.items():
        run.add(
            "floor" if length == FLOOR_ROWS else "decode",
            name,
            batch,
            length,
            held=held[name],
            ms=Spread.of(times[name]),
            bound_ms=run.bound_ms(batch, held[name]),
            ratio=ratio_to(times, name),
            cache_gib=caches.cache_bytes(cache) / 2**30,
            peak_gib=peaks[name],
            note=notes.get(name, ""),
        )


def largest(
    fits: Callable[[int], bool | None], first: int, longest: int, halvings: int
) -> tuple[int | None, int | None]:
    """The largest length that fits and the smallest that does not, by doubling and halving.

    Args:
        fits: None if there was no time to try.
        first: The first length.
        longest: No longer one is tried.
        halvings: How often the interval between the two is halved.

    Returns:
        None for what was not found.
    """
    good: int | None = None
    bad: int | None = None
    length = first
    while bad is None and length <= longest:
        outcome = fits(length)
        if outcome is None:
            return good, bad
        if outcome:
            good, length = length, 2 * length
        else:
            bad = length
    for _ in range(halvings if bad is not None else 0):
        assert bad is not None
        middle = (bad + (good or 0)) // 2
        outcome = fits(middle)
        if outcome is None:
            break
        if outcome:
            good = middle
        else:
            bad = middle
    return good, bad


def limits(run: Run) -> None:
    """The longest prompt whose cache leaves room for a step, full and compressed."""
    first = run.settings.lengths[-1] // 2
    good, bad = largest(partial(_full_fits, run), first, run.settings.longest, 4)
    run.add(
        "longest",
        FULL,
        1,
        good or 0,
        held=good,
        note="not tried further" if bad is None else f"{bad} is too long",
    )
    for policy in run.settings.policies[:1]:
        good, bad = largest(
            partial(_compressed_fits, run, policy),
            first,
            run.settings.longest,
            0,
        )
        note = "longer ones were not tried" if bad is None else f"{bad} is too long"
        run.add("longest", policy, 1, good or 0, note=f"read in chunks; {note}")


def _full_fits(run: Run, length: int) -> bool | None:
    """Also for prompts that the card's time would not suffice to read: only rows are made."""
    label = f"1 x {length}, {FULL}"
    if not run.budget.allows(2):
        run.skip(label, "no time left")
        return None
    before = len(run.record.failed)

    def try_it() -> bool:
        cache = caches.dense(run.model, 1, length)
        decode = run.stepper(cache, 1)
        decode()
        peak = run.step_peak_gib(cache, decode)
        _note_steps(run, FULL, length, cache, 4, peak, "fits")
        return True

    fitted = run.attempt(label, try_it)
    run.device.release()
    return None if len(run.record.failed) > before else bool(fitted)


def _note_steps(
    run: Run, name: str, length: int, cache: Cache, times: int, peak_gib: float | None, note: str
) -> None:
    """Time some steps from a cache that fits, and note them."""
    decode = run.stepper(cache, 1)
    ms = [run.device.milliseconds(decode) for _ in range(times)]
    held = caches.held_rows(cache)
    run.add(
        "decode",
        name,
        1,
        length,
        held=held,
        ms=Spread.of(ms),
        bound_ms=run.bound_ms(1, held),
        cache_gib=caches.cache_bytes(cache) / 2**30,
        peak_gib=peak_gib,
        note=note,
    )


def _compressed_fits(run: Run, policy: str, length: int) -> bool | None:
    label = f"1 x {length}, {policy}"
    expected = run.token_seconds * length + 1
    if not run.budget.allows(expected):
        run.skip(label, f"needs about {expected:.0f} s of {max(run.budget.left, 0):.0f} left")
        return None
    before = len(run.record.failed)

    def try_it() -> bool:
        run.device.synchronize()
        run.device.reset_peak()
        cache = run.fill(policy, 1, length)
        peak = run.device.peak()
        read = run.token_seconds * length
        run.stepper(cache, 1, WARM_UP)()
        gib = None if peak is None else peak / 2**30
        _note_steps(run, policy, length, cache, 8, gib, f"read in {read:.1f} s")
        return True

    fitted = run.attempt(label, try_it)
    run.device.release()
    return None if len(run.record.failed) > before else bool(fitted)


def graph(run: Run) -> None:
    """Whether a step can be captured as a CUDA graph, and what it takes without launches.

    A replayed graph does the same step again, with the same rows in the same place, so this is no
    way to generate; it is what a step costs the device alone.
    """
    lengths = [each for each in run.settings.lengths if each <= run.settings.fill_tokens]
    for length in dict.fromkeys((lengths[0], lengths[-1])):
        makers: dict[str, Callable[[], Cache]] = {
            FULL: partial(caches.dense, run.model, 1, length),
        }
        for policy in run.settings.policies:
            makers[policy] = partial(run.fill, policy, 1, length)
        for name, make in makers.items():
            seconds = 0.0 if name == FULL else run.token_seconds * length
            label = f"1 x {length}, {name}"
            if not run.device.is_cuda:
                run.skip(label, "there are no CUDA graphs on this device")
                continue
            cache = run.attempt(label, make, seconds=seconds)
            if cache is not None:
                _replay(run, name, length, cache)
            del cache
            run.device.release()


def _replay(run: Run, name: str, length: int, cache: Cache) -> None:
    held = caches.held_rows(cache)
    try:
        ms = _captured_ms(run, run.stepper(cache, 1))
    except Exception as error:
        # An outcome, not a failure: nothing else of the benchmark needs graphs.
        said = (str(error).splitlines() or [""])[0]
        run.add("replay", name, 1, length, held=held, note=f"no: {type(error).__name__}: {said}")
        return
    run.add(
        "replay",
        name,
        1,
        length,
        held=held,
        ms=Spread.of(ms),
        bound_ms=run.bound_ms(1, held),
        note="captured",
    )


def _captured_ms(run: Run, decode: Callable[[], None]) -> list[float]:
    side: Any = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            decode()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        decode()
    for _ in range(WARM_UP):
        captured.replay()
    return [run.device.milliseconds(captured.replay) for _ in range(20)]
