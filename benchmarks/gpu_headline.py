"""What compression does to decoding, memory and the longest prompt on one CUDA card.

    python benchmarks/gpu_headline.py --out results/h100

Models have real shapes and random weights, so nothing is downloaded. Answers are checked first, and
nothing is timed if they are wrong. Without CUDA, or with --smoke, everything runs in tiny sizes.
"""

import logging
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from headline import decoding, prompting
from headline.checks import CheckFailedError, check
from headline.devices import Device, is_out_of_memory
from headline.results import Budget, Record, plot, table
from headline.run import Run, Settings
from headline.shapes import Shape, build
from rich.console import Console


class Section(StrEnum):
    """The parts of the benchmark, in the order in which they are run."""

    decode = "decode"
    limits = "limits"
    prefill = "prefill"
    generate = "split"
    graph = "graph"


SECTIONS: dict[Section, tuple[Callable[[Run], None], float]] = {
    Section.decode: (decoding.decode, 0.46),
    Section.limits: (decoding.limits, 0.22),
    Section.prefill: (prompting.prefill, 0.15),
    Section.generate: (prompting.split, 0.09),
    Section.graph: (decoding.graph, 0.08),
}
"""What runs each, and its share of the time."""

FULL_SIZE = Settings(
    lengths=(4096, 16384, 32768, 65536, 131072, 262144, 524288),
    batches=(1, 8, 2),
    # The second has evicted at every step from the first one on, which is the most it can cost.
    policies=("snapkv:capacity=2048", "snapkv:capacity=2048+h2o:capacity=2048"),
    prefill_policies=("snapkv:capacity=2048", "h2o:capacity=2048"),
    prefill_lengths=(4096, 16384, 32768),
    split_length=16384,
    new_tokens=64,
    fill_tokens=65536,
    chunk=4096,
    longest=2**21,
    blocks=6,
    steps=4,
    repeats=3,
)

SMOKE = Settings(
    lengths=(256, 512),
    batches=(1, 2),
    policies=(
        "snapkv:capacity=64:window_size=16",
        "snapkv:capacity=64:window_size=16+h2o:capacity=64",
    ),
    prefill_policies=("snapkv:capacity=64:window_size=16", "h2o:capacity=64"),
    prefill_lengths=(256, 512),
    split_length=256,
    new_tokens=6,
    fill_tokens=512,
    chunk=128,
    longest=1024,
    blocks=2,
    steps=2,
    repeats=2,
)


def main(
    section: Annotated[
        list[Section] | None, typer.Option(help="Only these; may be repeated. All if not given.")
    ] = None,
    shape: Annotated[
        list[Shape] | None, typer.Option(help="Model shapes; may be repeated.")
    ] = None,
    length: Annotated[
        list[int] | None, typer.Option(help="Prompts of the decode section; may be repeated.")
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(help="May be repeated.")] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="Policies to decode with; may be repeated.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=1, help="For all sections; what no time is left for is listed.")
    ] = 270,
    attn: Annotated[str, typer.Option(help="Attention implementation.")] = "sdpa",
    device: Annotated[str | None, typer.Option(help="CUDA if there is one, else cpu.")] = None,
    smoke: Annotated[bool, typer.Option(help="Tiny sizes, to see that it runs.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the record and the picture.")] = Path(
        "benchmarks/results"
    ),
) -> None:
    """Measure compression on one card, and write a record, a table and a picture."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=180)  # a log is read without wrapped columns
    started = time.monotonic()
    place = Device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if not smoke and not place.is_cuda:
        console.print("There is no CUDA device: this is a smoke run, its times mean nothing.")
        smoke = True
    settings = _settings(smoke, length, batch, policy)
    shapes = shape or ([Shape.smoke] if smoke else [Shape.llama_8b, Shape.lwm_7b])
    chosen = [each for each in Section if section is None or each in section]
    card = place.describe()
    record = Record(
        card,
        {**asdict(settings), "attn": attn, "seconds": seconds, "smoke": smoke},
    )
    console.print(
        f"{card.name}, driver {card.driver}, bandwidth: nominal {_gb_s(card.nominal_gb_s)}, "
        f"by a copy {_gb_s(card.copy_gb_s)}"
    )
    with torch.inference_mode():
        try:
            record.checks = check(place, attn)
        except CheckFailedError as error:
            console.print(f"Nothing was timed: {error}")
            raise typer.Exit(1) from None
        for done in record.checks:
            console.print(f"checked: {done}")
        budget = Budget(seconds)
        parts = [(each, sections) for sections in _passes(chosen) for each in shapes]
        try:
            for number, (each, sections) in enumerate(parts):
                share = _weight(sections) / sum(_weight(left) for _, left in parts[number:])
                time_for_it = budget.left * share
                _measure(each, sections, time_for_it, place, attn, settings, record, out, console)
        finally:  # a device that is lost does not take what was measured with it
            record.seconds = time.monotonic() - started
            record.write(out)
    drawn = plot(record.to_dict(), out / "gpu_headline.png")
    for line in record.skipped:
        console.print(f"skipped: {line}", highlight=False)
    for line in record.failed:
        console.print(f"FAILED: {line}", highlight=False, markup=False)
    files = "gpu_headline.json" + (", gpu_headline.png" if drawn else "")
    console.print(f"{record.seconds:.0f} s; {out}: {files}")
    if record.failed:
        raise typer.Exit(1)


def _measure(
    shape: Shape,
    chosen: list[Section],
    seconds: float,
    device: Device,
    attn: str,
    settings: Settings,
    record: Record,
    out: Path,
    console: Console,
) -> None:
    budget = Budget(seconds)
    console.print(f"{shape}: making the model")
    try:
        model = build(shape, device, attn)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        record.skipped.append(f"{shape}: not even the model fits")
        return
    run = Run(shape, model, device, settings, record)
    for place, section in enumerate(chosen):
        measure, weight = SECTIONS[section]
        # What earlier sections left over is shared by the later ones.
        run.begin(section, budget.left * weight / _weight(chosen[place:]))
        before = len(record.measurements)
        run.attempt("all of it", partial(measure, run))
        found = record.measurements[before:]
        if found:
            console.print(table(found, f"{shape}: {section}"))
        record.write(out)
    del run, model
    device.release()


def _passes(chosen: list[Section]) -> list[list[Section]]:
    """Graphs of all shapes come last: a capture that fails may leave the device in a bad state."""
    passes: list[list[Section]] = [
        [each for each in chosen if (each is Section.graph) == last] for last in (False, True)
    ]
    return [each for each in passes if each]


def _weight(sections: list[Section]) -> float:
    return sum(SECTIONS[each][1] for each in sections)


def _settings(
    smoke: bool, length: list[int] | None, batch: list[int] | None, policy: list[str] | None
) -> Settings:
    settings = SMOKE if smoke else FULL_SIZE
    given: dict[str, Any] = {"lengths": length, "batches": batch, "policies": policy}
    changed = {name: tuple(value) for name, value in given.items() if value}
    if length:
        changed["lengths"] = tuple(sorted(length))
    return Settings(**{**asdict(settings), **changed})


def _gb_s(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.0f} GB/s"


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="`past_key_values` is deprecated")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    typer.run(main)
