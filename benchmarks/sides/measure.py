"""The measurements: what the workers are asked, in which order, and what becomes of it."""

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from time import perf_counter
from typing import Any

from sides.bars import Verdict, overhead, ratio, single
from sides.client import Worker, WorkerError

METHODS = ("snapkv", "streaming_llm", "knorm", "tova")
EVICTING = ("streaming_llm", "snapkv_decoding")


class Part(StrEnum):
    """What can be measured by itself."""

    start_up = "start-up"
    prefill = "prefill"
    decode = "decode"
    evict = "evict"
    memory = "memory"


@dataclass(frozen=True)
class Sizes:
    """What is measured; the bars are for the sizes given here."""

    length: int = 4096
    keep: int = 512
    held: tuple[int, ...] = (2048, 8192)
    memory_length: int = 8192
    interval: int = 16
    repeats: int = 5
    """Of prefills and of processes whose memory is measured."""
    blocks: int = 15
    """Of steps of decoding."""
    steps: int = 4
    """In a block; a block with evictions is a whole interval."""


class MismatchError(Exception):
    """The sides did not do the same, so their times cannot be compared."""


class Sides:
    """Two running workers, and how to start more of them.

    Args:
        ours: Has loaded the model.
        theirs: Has loaded it too.
        fresh: Starts a worker of a side, "ours" or "theirs", with the model loaded.
    """

    def __init__(self, ours: Worker, theirs: Worker, fresh: Callable[[str], Worker]) -> None:
        self.workers: Mapping[str, Worker] = {"ours": ours, "theirs": theirs}
        self.fresh = fresh

    def same(self, do: str, key: str | None, wanted: int, **arguments: Any) -> None:
        """Ask both for the same, and see that both hold as many rows."""
        for name, worker in self.workers.items():
            answer = worker.ask(do, **arguments)
            _expect(name, answer if key is None else answer[key], wanted, arguments)


def _expect(side: str, held: float, wanted: int, arguments: Mapping[str, Any]) -> None:
    if held != wanted:
        raise MismatchError(f"{side} holds {held:.0f} rows, not {wanted}, after {dict(arguments)}.")


def in_turn(
    arms: Mapping[str, Callable[[], float]], rounds: int, *, warm_up: int = 1
) -> dict[str, list[float]]:
    """What every arm gives, round by round; the order moves on, so that each comes first at times.

    Args:
        arms: By name.
        rounds: That count.
        warm_up: Rounds before them that do not.
    """
    found: dict[str, list[float]] = {name: [] for name in arms}
    names = list(arms)
    for number in range(-warm_up, rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            value = arms[name]()
            if number >= 0:
                found[name].append(value)
    return found


def plain_agreement(sides: Sides, length: int, tolerance: float) -> float:
    """The largest difference between logits of the sides' uncompressed models.

    Raises:
        MismatchError: They are not the same model, so nothing can be compared.
    """
    ours, theirs = (worker.ask("logits", length=length) for worker in sides.workers.values())
    worst = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    if not worst <= tolerance:
        raise MismatchError(
            f"The uncompressed models' logits differ by {worst:.3g}; at most {tolerance} is noise."
        )
    return float(worst)


def prefill(sides: Sides, sizes: Sizes) -> list[Verdict]:
    """Reading and cutting a prompt, every method on either side and plain on both."""
    length, keep = sizes.length, sizes.keep

    def arm(side: str, method: str | None, tokens: int) -> Callable[[], float]:
        def read() -> float:
            answer = sides.workers[side].ask("prefill", length=tokens, method=method, keep=keep)
            _expect(side, answer["held"], keep if method else tokens, {"method": method})
            return float(answer["ms"])

        return read

    kinds = [(side, method) for side in sides.workers for method in (None, *METHODS, "h2o")]
    for side, method in kinds:
        arm(side, method, min(keep + 64, length))()  # a short one warms up as well
    arms = {f"{side} {method}": arm(side, method, length) for side, method in kinds}
    times = in_turn(arms, sizes.repeats, warm_up=0)
    plain, other = times["ours None"], times["theirs None"]
    found = [ratio(f"prefill of {length}, plain, ours / kvpress", "ms", plain, other)]
    for method in [*METHODS, "h2o"]:
        ours, theirs = times[f"ours {method}"], times[f"theirs {method}"]
        name = f"prefill of {length} with {method}"
        eager = " (eager)" if method == "h2o" else ""
        found.append(ratio(f"{name}, ours / ours plain", "ms", ours, plain))
        found.append(ratio(f"{name}, kvpress{eager} / kvpress plain", "ms", theirs, other))
        found.append(ratio(f"{name}, ours / kvpress{eager}", "ms", ours, theirs))
    return found


def decode(sides: Sides, sizes: Sizes) -> list[Verdict]:
    """Steps from a compressed cache, and from a plain one of as many rows."""
    found = _decode_from(sides, sizes, sizes.length, sizes.keep)
    for held in sizes.held:
        found += _decode_from(sides, sizes, held + max(held // 8, 64), held)
    return found


def _decode_from(sides: Sides, sizes: Sizes, length: int, held: int) -> list[Verdict]:
    prompt = {"interval": None, "keep": held}
    sides.same("start", None, held, name="cut", length=length, method="snapkv", **prompt)
    sides.same("start", None, held, name="plain", length=held, method=None, **prompt)
    arms = {
        f"{side} {name}": _stepper(worker, name, sizes.steps, fresh=False)
        for side, worker in sides.workers.items()
        for name in ("cut", "plain")
    }
    times = in_turn(arms, sizes.blocks)
    for worker in sides.workers.values():
        worker.ask("drop")
    ours, plain = times["ours cut"], times["ours plain"]
    theirs, other = times["theirs cut"], times["theirs plain"]
    origin = f" of {length}" if held == sizes.keep else ""
    return [
        ratio(f"decode from {held} rows{origin}, ours / ours plain", "ms/token", ours, plain),
        ratio(f"decode from {held} rows, kvpress / kvpress plain", "ms/token", theirs, other),
        ratio(f"decode from {held} rows, ours / kvpress", "ms/token", ours, theirs),
        ratio(f"decode from {held} rows, plain, ours / kvpress", "ms/token", plain, other),
    ]


def _stepper(worker: Worker, name: str, steps: int, *, fresh: bool) -> Callable[[], float]:
    def ask() -> float:
        return float(worker.ask("steps", name=name, count=steps, fresh=fresh)["ms"])

    return ask


def evict(sides: Sides, sizes: Sizes) -> list[Verdict]:
    """Steps with an eviction every so many tokens, against plain steps from as many rows."""
    keep, interval = sizes.keep, sizes.interval
    found = []
    for method in EVICTING:
        prompt = {"length": keep + 128, "keep": keep}
        for name, wanted in ((method, method), ("plain", None)):
            given = prompt if wanted else {**prompt, "length": keep}
            every = interval if wanted else None
            sides.same("start", None, keep, name=name, method=wanted, interval=every, **given)
        arms = {
            f"{side} {name}": _stepper(worker, name, interval, fresh=True)
            for side, worker in sides.workers.items()
            for name in (method, "plain")
        }
        # After a whole interval both sides must have evicted.
        sides.same("steps", "held", keep, name=method, count=interval, fresh=True)
        times = in_turn(arms, sizes.blocks)
        for worker in sides.workers.values():
            worker.ask("drop")
        own, other = (
            (times[f"{side} {method}"], times[f"{side} plain"]) for side in ("ours", "theirs")
        )
        every_so_many = f"{method} every {interval} tokens"
        step = f"step with {every_so_many}"
        added = f"what {every_so_many} adds at {keep} rows, ours / kvpress"
        found += [
            ratio(f"{step}, ours / ours plain", "ms/token", *own),
            ratio(f"{step}, kvpress / kvpress plain", "ms/token", *other),
            ratio(f"{step}, ours / kvpress", "ms/token", own[0], other[0]),
            overhead(added, own, other),
        ]
    return found


def memory(sides: Sides, sizes: Sizes) -> list[Verdict]:
    """Peak memory of one prefill, each in a process of its own."""
    length = sizes.memory_length

    def arm(side: str, method: str | None) -> Callable[[], float]:
        def weigh() -> float:
            with sides.fresh(side) as worker:
                answer = worker.ask("memory", length=length, method=method, keep=sizes.keep)
            _expect(side, answer["held"], sizes.keep if method else length, {"method": method})
            return float(answer["mib"])

        return weigh

    methods = (None, "snapkv", "h2o")
    arms = {f"{side} {method}": arm(side, method) for side in sides.workers for method in methods}
    grown = in_turn(arms, sizes.repeats, warm_up=0)
    found = []
    for method, name in ((None, "plain"), ("snapkv", "with snapkv"), ("h2o", "with h2o")):
        eager = " (eager)" if method == "h2o" else ""
        both = grown[f"ours {method}"], grown[f"theirs {method}"]
        title = f"peak of a prefill of {length} {name}, ours / kvpress{eager}"
        found.append(ratio(title, "MiB", *both))
    return found


def start_up(python: Sequence[str], environment: Mapping[str, str], times: int) -> list[Verdict]:
    """What `import kvcompress` takes in a fresh process.

    Raises:
        WorkerError: It failed, or loads torch.
    """
    code = (
        "import sys, time; started = time.perf_counter(); import kvcompress; "
        "print(1000 * (time.perf_counter() - started)); sys.exit('torch' in sys.modules)"
    )
    found = []
    for _ in range(times):
        began = perf_counter()
        done = subprocess.run(
            [*python, "-c", code],
            capture_output=True,
            text=True,
            env={**os.environ, **environment},
        )
        if done.returncode:
            raise WorkerError(
                f"import kvcompress loads torch, or fails, after {perf_counter() - began:.1f} s: "
                f"{done.stderr.strip()[-400:]}"
            )
        found.append(float(done.stdout))
    return [single("import kvcompress, ms", "ms", found)]
