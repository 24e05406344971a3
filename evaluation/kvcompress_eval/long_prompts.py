"""`kvcompress long-prompts`: memory and time of a prefill in chunks, over the prompt's length.

On a model of a given shape with few layers and random weights, so that lengths that matter can be
reached on any machine: memory and time of a layer do not depend on what the weights are.
"""

import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcompress.errors import EvaluationError
from kvcompress_eval.comparison import need
from kvcompress_eval.console import save_numbers
from kvcompress_eval.options import Device, Threads

LENGTHS = [8192, 16384, 32768, 65536, 131072]


@dataclass(frozen=True)
class Reading:
    """One prefill, in a process of its own."""

    how: str
    """chunks, or plain: the whole prompt at once and nothing evicted."""
    tokens: int
    seconds: float
    peak_mib: float
    """Above what the loaded model takes."""
    held: list[tuple[int, int]]
    """Tokens read, and rows of the fullest layer, after each forward that evicted or ended."""


@dataclass(frozen=True)
class Line:
    """A straight line by least squares, y = base + slope * tokens."""

    base: float
    slope: float
    r_squared: float
    exponent: float
    """Of the power law through the same points: 1 is linear, 0 flat."""


def fit(readings: Sequence[Reading], what: str) -> Line:
    """The line through one number of several lengths."""
    import numpy

    x = numpy.array([reading.tokens for reading in readings], dtype=float)
    y = numpy.array([getattr(reading, what) for reading in readings], dtype=float)
    slope, base = numpy.polyfit(x, y, 1)
    left = ((y - base - slope * x) ** 2).sum()
    whole = ((y - y.mean()) ** 2).sum()
    exponent, _ = numpy.polyfit(numpy.log(x), numpy.log(y), 1)
    share = 1 - left / whole if whole else 1.0
    return Line(float(base), float(slope), float(share), float(exponent))


def random_model(model: str, layers: int, device: str | None) -> Any:
    """A model of this shape with as many layers and random weights, float32.

    Raises:
        EvaluationError: The shape has fewer layers.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from kvcompress.models import default_device, source_of

    config = AutoConfig.from_pretrained(source_of(model))
    text = config.get_text_config(decoder=True)
    if text.num_hidden_layers < layers:
        raise EvaluationError(
            f"--layers {layers}: {model} has {text.num_hidden_layers}. Give fewer."
        )
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return made.to(device or default_device()).eval()


def read(options: dict[str, Any]) -> Reading:
    """One prefill in this process."""
    import torch

    from kvcompress import press
    from kvcompress.timing import clock
    from kvcompress_eval.measure import random_ids
    from kvcompress_eval.memory import Memory

    torch.set_num_threads(options["threads"])
    model = random_model(options["model"], options["layers"], options["device"])
    tokens, chunk = options["tokens"], options["chunk_size"]
    ids = random_ids(model, tokens)
    held: list[tuple[int, int]] = []
    with torch.inference_mode():
        model(ids[:, :64], use_cache=True, logits_to_keep=1)
        memory = Memory(model.device)
        started = clock()
        if options["policy"] is None:
            model(ids, use_cache=True, logits_to_keep=1)
        else:
            with press(model, options["policy"]) as session:
                cache = session.prefill(ids, chunk_size=chunk)
                layers = cache.report().hosted_layers
                held = [(seen, rows // layers) for seen, rows in cache.report().history]
        seconds, peak = clock() - started, memory.peak()
    return Reading("plain" if options["policy"] is None else "chunks", tokens, seconds, peak, held)


def _in_child(options: dict[str, Any]) -> Reading:
    command = [sys.executable, "-m", "kvcompress_eval.long_prompts", json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise EvaluationError(
            f"A prefill of {options['tokens']} tokens failed: {done.stderr.strip()[-500:]}"
        )
    return Reading(**json.loads(done.stdout.splitlines()[-1]))


def long_prompts(
    model: Annotated[
        str, typer.Option(help="Whose shape; hub id or path; smollm2 is embedded.")
    ] = "smollm2",
    layers: Annotated[int, typer.Option(min=1, help="With random weights.")] = 2,
    policy: Annotated[str, typer.Option(help="Policy of the chunks.")] = "snapkv:capacity=1024",
    prefill_chunk_size: Annotated[int, typer.Option(min=1, help="Tokens of a chunk.")] = 512,
    tokens: Annotated[
        list[int] | None,
        typer.Option(min=128, help="Length; may be repeated. [8192 to 131072, doubling]"),
    ] = None,
    plain_up_to: Annotated[
        int, typer.Option(min=0, help="Longest plain prefill, which is quadratic.")
    ] = 32768,
    threads: Threads = 2,
    device: Device = None,
    out: Annotated[Path, typer.Option(help="Picture; the numbers go beside it.")] = Path(
        "long-prompts.png"
    ),
) -> None:
    """Measure a prefill in chunks over the prompt's length, beside plain prefill."""
    need("matplotlib", "The picture", "plots")
    import torch
    import transformers
    from rich import box
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    from kvcompress import __version__, policy_from
    from kvcompress_eval.plots import plot_lengths

    chosen = policy_from(policy).to_string()
    lengths = sorted(set(tokens or LENGTHS))
    if len(lengths) < 2:
        raise EvaluationError("A line needs two lengths at least. Give --tokens twice or more.")
    shared = {
        "model": model,
        "layers": layers,
        "chunk_size": prefill_chunk_size,
        "threads": threads,
        "device": device,
    }
    jobs: list[dict[str, Any]] = []
    for length in lengths:
        jobs.append({**shared, "tokens": length, "policy": chosen})
        if length <= plain_up_to:
            jobs.append({**shared, "tokens": length, "policy": None})
    console = Console()
    readings = [_in_child(job) for job in track(jobs, description="reading", console=console)]
    table = Table(title=f"Prefill, {layers} layers of {model}'s shape", box=box.SIMPLE_HEAD)
    for heading in ("tokens", "read", "peak MiB", "seconds"):
        table.add_column(heading, justify="left" if heading == "read" else "right")
    for each in sorted(readings, key=lambda each: (each.how, each.tokens)):
        table.add_row(str(each.tokens), each.how, f"{each.peak_mib:.1f}", f"{each.seconds:.1f}")
    console.print(table)
    fits: dict[str, dict[str, Any]] = {}
    for how in dict.fromkeys(each.how for each in readings):
        group = [each for each in readings if each.how == how]
        if len(group) < 2:
            continue
        for what, unit in (("seconds", "s"), ("peak_mib", "MiB")):
            line = fit(group, what)
            fits[f"{how} {what}"] = asdict(line)
            console.print(
                f"{how}, {what}: {line.base:.2f} {unit} + {1000 * line.slope:.4f} {unit} per 1000 "
                f"tokens, R² {line.r_squared:.4f}; as a power, tokens^{line.exponent:.2f}",
                highlight=False,
            )
    title = (
        f"{chosen}, chunks of {prefill_chunk_size}, {layers} layers of {model}'s shape, "
        f"{threads} threads"
    )
    plot_lengths(readings, out, title)
    record = {
        **shared,
        "policy": chosen,
        "kvcompress": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
        "fits": fits,
        "readings": [{**asdict(each), "held": each.held[-1:]} for each in readings],
    }
    save_numbers(out, record, console)


if __name__ == "__main__":
    print(json.dumps(asdict(read(json.loads(sys.argv[1])))))
