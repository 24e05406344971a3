"""`kvcompress bench`: what compression costs and saves, as ratios within one run.

Two things are measured in turn, never one after the other, since machines are shared; every ratio
comes with the spread of its repetitions.
"""

import copy
import gc
import json
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Annotated, Any, TypeVar

import typer

from kvcompress.errors import EvaluationError

Measured = TypeVar("Measured")

QUESTION_TOKENS = 20
ANSWER_TOKENS = 16


class What(StrEnum):
    """The measurements."""

    decode = "decode"
    prefill = "prefill"
    memory = "memory"
    questions = "questions"
    all = "all"


@dataclass(frozen=True)
class Ratio:
    """Ours against plain, measured side by side."""

    name: str
    unit: str
    ours: float
    plain: float
    ratio: float
    low: float
    """First quartile of the pairwise ratios."""
    high: float
    """Third quartile."""
    pairs: int


def compare(name: str, unit: str, ours: list[float], plain: list[float]) -> Ratio:
    """Ratio of medians, and the quartiles of the pairwise ratios."""
    pairs = [a / b for a, b in zip(ours, plain, strict=True)]
    low, _, high = quantiles(pairs, n=4) if len(pairs) > 1 else (pairs[0],) * 3
    first, second = median(ours), median(plain)
    return Ratio(name, unit, first, second, first / second, low, high, len(pairs))


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


def _seconds(call: Callable[[], Any]) -> float:
    from kvcompress.timing import clock

    started = clock()
    call()
    return clock() - started


def decode_ratio(model: Any, policy: Any, length: int, steps: int) -> Ratio:
    """A decode step after compressing `length` tokens / one from a plain cache of as many rows.

    One prefill each, then single steps in turn. The plain cache is cut to what the compressed one
    holds before every step, so that only the policy and the hosting differ. A policy that evicts
    every so many tokens is timed over as many, `steps` times.
    """
    import torch

    from kvcompress import CompressedCache
    from kvcompress_eval.measure import cache_of, random_ids

    ids = random_ids(model, length)
    compressed = CompressedCache(model, policy, prompt_length=length)
    interval: int = getattr(policy.part("decode"), "interval", 1)

    def step(cache: Any) -> float:
        return 1000 * _seconds(lambda: _forward(model, ids[:, :1], cache))

    with torch.inference_mode():
        _forward(model, ids, compressed)
        held = _held(compressed)
        dense = cache_of(_forward(model, ids[:, : held + 1], None))

        def plain_step() -> float:
            # Also when the compressed cache goes first, both steps start from equal caches.
            if rows < dense.get_seq_length():
                dense.crop(rows - dense.get_seq_length())
            return step(dense)

        pairs = []
        for number in range(steps * interval + 3):
            rows = _held(compressed)
            pairs.append(in_turn(1, lambda: step(compressed), plain_step, first=number))
    # The first steps pay for growing the buffers. Every step between two evictions counts alike.
    blocks = [pairs[i : i + interval] for i in range(3, len(pairs), interval)]
    ours, plain = ([fmean(pair[who][0] for pair in block) for block in blocks] for who in (0, 1))
    name = f"decode after {length} -> {held} with {policy} / plain from as many rows"
    return compare(name, "ms/token", ours, plain)


def _held(cache: Any) -> int:
    """Rows of the layer that holds most."""
    held: int = max(layer.held_tokens for layer in cache.report().layers)
    return held


def prefill_ratio(model: Any, policy: Any, length: int, repeats: int) -> Ratio:
    """Prefill with compression / plain prefill of the same prompt, in turn."""
    import torch

    from kvcompress import press
    from kvcompress_eval.measure import random_ids

    ids = random_ids(model, length)

    def pressed() -> None:
        with press(model, policy):
            _forward(model, ids, None)

    with torch.inference_mode():
        _forward(model, ids[:, :64], None)
        ours, plain = in_turn(
            repeats,
            lambda: _seconds(pressed),
            lambda: _seconds(lambda: _forward(model, ids, None)),
        )
    return compare(f"prefill of {length} with {policy} / plain prefill", "s", ours, plain)


def question_ratio(model: Any, policy: Any, length: int, repeats: int) -> Ratio:
    """Ten questions about one context through forks / its prefill and ten decodes.

    Both sides read the context once. Then one asks the same cache ten times; the other decodes each
    answer from a cache that is its own, made before the clock runs.

    Raises:
        EvaluationError: The answers differ.
    """
    import torch

    from kvcompress import press
    from kvcompress_eval.measure import random_ids

    ids = random_ids(model, length + 10 * QUESTION_TOKENS)
    context, questions = ids[:, :length], ids[:, length:].split(QUESTION_TOKENS, dim=1)
    options = {"max_new_tokens": ANSWER_TOKENS, "min_new_tokens": ANSWER_TOKENS, "do_sample": False}
    ours, plain = list[float](), list[float]()
    with press(model, policy) as session:
        for turn in range(repeats):

            def prefill() -> tuple[float, Any]:
                made = []
                read = partial(session.prefill, context, chunk_size=512, lookahead=0, hold_back=0)
                return _seconds(lambda: made.append(read())), made[0]

            def ask(cache: Any, question: Any, fork: bool, answers: list[Any]) -> None:
                answers.append(session.ask(cache, question, fork=fork, **options))

            def forked() -> list[Any]:
                seconds, cache = prefill()
                answers: list[Any] = []
                for question in questions:
                    seconds += _seconds(partial(ask, cache, question, True, answers))
                ours.append(seconds)
                return answers

            def separate() -> list[Any]:
                seconds, cache = prefill()
                answers: list[Any] = []
                for question in questions:
                    own = copy.deepcopy(cache)
                    seconds += _seconds(partial(ask, own, question, False, answers))
                plain.append(seconds)
                return answers

            both = [call() for call in ((forked, separate) if turn % 2 else (separate, forked))]
            if not all(map(torch.equal, *both)):
                raise EvaluationError(
                    f"{policy}: a fork answers differently than a cache of its own. This is a "
                    "fault of kvcompress or of the policy; please report it."
                )
    name = f"10 questions on {length} with {policy}, forked / prefill and 10 decodes"
    return compare(name, "s", ours, plain)


def _alone(measure: Callable[..., Ratio], *arguments: Any) -> list[Ratio]:
    return [measure(*arguments)]


def memory_ratios(options: dict[str, Any], policy: str, repeats: int) -> list[Ratio]:
    """Peak and lasting memory of a prefill, each in a process of its own."""

    def grown(pressed: str | None) -> dict[str, float]:
        child = json.dumps({**options, "policy": pressed})
        command = [sys.executable, "-m", "kvcompress_eval.bench", child]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return result

    ours, plain = in_turn(repeats, lambda: grown(policy), lambda: grown(None))
    return [
        compare(
            f"{title} a prefill of {options['length']} with {policy} / plain prefill",
            "MiB",
            [each[key] for each in ours],
            [each[key] for each in plain],
        )
        for key, title in (("peak", "peak memory of"), ("lasting", "memory held after"))
    ]


def _child(options: dict[str, Any]) -> dict[str, float]:
    """Memory that one prefill needs above what the loaded model takes, in MiB."""
    import torch

    from kvcompress import press
    from kvcompress.models import load
    from kvcompress_eval.measure import cache_of, random_ids
    from kvcompress_eval.memory import Memory

    torch.set_num_threads(options["threads"])
    model, _ = load(options["model"], device=options["device"])
    ids = random_ids(model, options["length"])
    policy = options["policy"]
    with torch.inference_mode():
        _forward(model, ids[:, :64], None)
        gc.collect()
        memory = Memory(model.device)
        if policy is None:
            output = _forward(model, ids, None)
        else:
            with press(model, policy):
                output = _forward(model, ids, None)
        result = {"peak": memory.peak()}
        cache = cache_of(output)
        del output
        gc.collect()
        result["lasting"] = memory.lasting()
        assert cache.get_seq_length() == options["length"]
    return result


def _forward(model: Any, ids: Any, cache: Any) -> Any:
    return model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)


def bench(
    what: Annotated[What, typer.Argument(help="Which measurement.")] = What.all,
    model: Annotated[str, typer.Option(help="Hub id or path; smollm2 is embedded.")] = "smollm2",
    policy: Annotated[
        list[str] | None,
        typer.Option(help="Policy, as name:field=value:...; may be repeated."),
    ] = None,
    length: Annotated[int, typer.Option(min=64, help="Prompt tokens.")] = 4096,
    repeats: Annotated[int, typer.Option(min=2, help="Pairs of prefills.")] = 5,
    steps: Annotated[
        int,
        typer.Option(min=5, help="Pairs of decode steps, or of steps from eviction to eviction."),
    ] = 60,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 2,
    device: Annotated[str | None, typer.Option(help="CUDA if there is one, else cpu.")] = None,
    out: Annotated[Path | None, typer.Option(help="Append the record to this JSONL file.")] = None,
) -> None:
    """Measure decode, prefill and memory against the plain model."""
    import warnings

    import torch
    import transformers
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    from kvcompress import __version__, policy_from
    from kvcompress.models import load

    warnings.filterwarnings("ignore", message="`past_key_values` is deprecated")
    torch.set_num_threads(threads)
    chosen = [policy_from(each) for each in policy or ["snapkv:capacity=512"]]
    jobs: list[Callable[[], list[Ratio]]] = []
    options = {"model": model, "length": length, "device": device, "threads": threads}
    if what in (What.memory, What.all):
        jobs += [partial(memory_ratios, options, each.to_string(), repeats) for each in chosen]
    if what is not What.memory:
        loaded, _ = load(model, device=device)
        measures: dict[What, tuple[Callable[..., Ratio], int]] = {
            What.decode: (decode_ratio, steps),
            What.prefill: (prefill_ratio, repeats),
            What.questions: (question_ratio, repeats),
        }
        wanted = measures if what is What.all else [what]
        for each in chosen:
            for name in wanted:
                measure, times = measures[name]
                jobs.append(partial(_alone, measure, loaded, each, length, times))
    ratios: list[Ratio] = []
    console = Console()
    for job in track(jobs, description="measuring", console=console):
        ratios += job()
    table = Table(title=f"{model}, {threads} threads")
    for heading in ("measurement", "ours", "plain", "unit", "ratio", "quartiles", "pairs"):
        table.add_column(heading, overflow="fold", min_width=len(heading))
    for ratio in ratios:
        table.add_row(
            ratio.name,
            f"{ratio.ours:.2f}",
            f"{ratio.plain:.2f}",
            ratio.unit,
            f"{ratio.ratio:.3f}",
            f"{ratio.low:.3f} to {ratio.high:.3f}",
            str(ratio.pairs),
        )
    console.print(table)
    if out is not None:
        record = {
            **options,
            "policies": [each.to_string() for each in chosen],
            "kvcompress": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "machine": f"{platform.machine()}, {threads} threads"
            if not torch.cuda.is_available()
            else torch.cuda.get_device_name(),
            "ratios": [asdict(each) for each in ratios],
        }
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    print(json.dumps(_child(json.loads(sys.argv[1]))))
