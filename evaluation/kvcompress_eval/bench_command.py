"""`kvcompress bench` and its report: what compression costs and saves, as ratios in one run."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcompress.errors import EvaluationError
from kvcompress_eval.comparison import need
from kvcompress_eval.console import show_table
from kvcompress_eval.folder import versions
from kvcompress_eval.options import Device, Model, Threads
from kvcompress_eval.provenance import commit, machine
from kvcompress_eval.ratios import Ratio

if TYPE_CHECKING:
    from kvcompress.policy import Policy

LENGTHS = [1024, 2048, 4096, 8192, 16384, 32768]


class What(StrEnum):
    """The measurements; scaling and split take a model of few layers and random weights."""

    decode = "decode"
    prefill = "prefill"
    first_token = "first-token"
    memory = "memory"
    scoring = "scoring"
    questions = "questions"
    scaling = "scaling"
    parts = "split"
    all = "all"


@dataclass(frozen=True)
class Setup:
    """What the measurements of one run share."""

    model: str
    length: int
    lengths: Sequence[int]
    layers: int
    new_tokens: int
    repeats: int
    steps: int
    threads: int
    device: str | None

    @cached_property
    def loaded(self) -> Any:
        """The model itself."""
        from kvcompress.models import load

        return load(self.model, device=self.device)[0]

    @cached_property
    def few_layers(self) -> Any:
        """A model of its shape that reads long prompts soon."""
        from kvcompress_eval.long_prompts import random_model

        return random_model(self.model, self.layers, self.device)


Measurement = Callable[["Policy"], list[Ratio]]


def measurements(setup: Setup) -> dict[What, Measurement]:
    """What can be measured of a policy; models are loaded when they are first needed."""
    from kvcompress_eval import bench as library
    from kvcompress_eval import scaling

    length, repeats = setup.length, setup.repeats
    options = {name: getattr(setup, name) for name in ("model", "length", "threads", "device")}
    return {
        What.decode: lambda policy: [
            library.decode_ratio(setup.loaded, policy, length, setup.steps)
        ],
        What.prefill: lambda policy: [library.prefill_ratio(setup.loaded, policy, length, repeats)],
        What.first_token: lambda policy: [
            library.first_token_ratio(setup.loaded, policy, length, repeats)
        ],
        What.memory: lambda policy: library.memory_ratios(options, policy.to_string(), repeats),
        What.scoring: lambda policy: [library.scoring_ratio(setup.loaded, policy, length)],
        What.questions: lambda policy: [
            library.question_ratio(setup.loaded, policy, length, repeats)
        ],
        What.scaling: lambda policy: scaling.decode_over_lengths(
            setup.few_layers, policy, setup.lengths, setup.steps
        ),
        What.parts: lambda policy: scaling.split_over_lengths(
            setup.few_layers, policy, setup.lengths, setup.new_tokens, repeats
        ),
    }


def bench(
    what: Annotated[What, typer.Argument(help="Which measurement.")] = What.all,
    model: Model = "smollm2",
    policy: Annotated[
        list[str] | None,
        typer.Option(help="Policy, as name:field=value:...; may be repeated."),
    ] = None,
    length: Annotated[int, typer.Option(min=64, help="Prompt tokens.")] = 4096,
    lengths: Annotated[
        list[int] | None,
        typer.Option(min=64, help="For scaling and split; repeated. [1024 to 32768, doubling]"),
    ] = None,
    layers: Annotated[
        int, typer.Option(min=1, help="For scaling and split: of a model with random weights.")
    ] = 2,
    new_tokens: Annotated[
        int, typer.Option(min=2, help="For split: how many a request asks for.")
    ] = 512,
    repeats: Annotated[int, typer.Option(min=2, help="Pairs of prefills, or of requests.")] = 5,
    steps: Annotated[
        int,
        typer.Option(min=5, help="Pairs of decode steps, or of steps from eviction to eviction."),
    ] = 60,
    threads: Threads = 2,
    device: Device = None,
    out: Annotated[Path | None, typer.Option(help="Append the record to this JSONL file.")] = None,
) -> None:
    """Measure time and memory against the plain model; policies that are wrong are refused."""
    import warnings

    import torch
    from rich.console import Console
    from rich.progress import track

    from kvcompress import policy_from
    from kvcompress_eval.bench import check_contracts

    several = sorted(set(lengths or LENGTHS))
    if len(several) < 2:
        raise EvaluationError("A slope needs two lengths at least. Give --lengths twice or more.")
    warnings.filterwarnings("ignore", message="`past_key_values` is deprecated")
    torch.set_num_threads(threads)
    chosen = [policy_from(each) for each in policy or ["snapkv:capacity=512"]]
    setup = Setup(model, length, several, layers, new_tokens, repeats, steps, threads, device)
    console = Console()
    unchecked = []
    for each in track(chosen, description="checking contracts", console=console):
        if not check_contracts(each):
            unchecked.append(each.to_string())
            console.print(f"{each}: too large for the contract suite, so not checked by it.")
    known = measurements(setup)
    wanted = known if what is What.all else [what]
    jobs = [(known[name], each) for each in chosen for name in wanted]
    ratios: list[Ratio] = []
    for measure, each in track(jobs, description="measuring", console=console):
        ratios += measure(each)
    show_table(console, f"{model}, {threads} threads", table_of(ratios))
    if out is not None:
        record = {
            **asdict(setup),
            "policies": [each.to_string() for each in chosen],
            "not checked": unchecked,
            **versions("kvcompress", "torch", "transformers"),
            "commit": commit(),
            "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else machine(),
            "ratios": [asdict(each) for each in ratios],
        }
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def table_of(ratios: Sequence[Ratio]) -> list[list[str]]:
    """With its heading."""
    rows = [["measurement", "ours", "plain", "unit", "ratio", "quartiles", "pairs"]]
    for each in ratios:
        numbers = [f"{each.ours:.4g}", f"{each.plain:.4g}", each.unit, f"{each.ratio:.3f}"]
        spread = f"{each.low:.3f} to {each.high:.3f}" if each.pairs > 1 else ""
        rows.append([each.name, *numbers, spread, str(each.pairs)])
    return rows


def bench_report(
    records: Annotated[list[Path], typer.Argument(help="What `kvcompress bench --out` wrote.")],
    out: Annotated[Path, typer.Option(help="Folder for bench.md and bench.png.")] = Path("."),
) -> None:
    """A table and a picture of recorded measurements; a later one replaces the same one before."""
    from rich.console import Console

    need("matplotlib", "The picture", "plots")
    from kvcompress_eval.plots import plot_bench
    from kvcompress_eval.scores import markdown

    found: dict[tuple[str, str], tuple[Ratio, str]] = {}
    for path in records:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                record = json.loads(line)
                made = f"{record['model']}, {record['machine']}, {record.get('commit', 'unknown')}"
                for each in record["ratios"]:
                    found[record["model"], each["name"]] = Ratio(**each), made
            except (ValueError, KeyError, TypeError) as error:
                raise EvaluationError(
                    f"{path}, line {number}, is no record of kvcompress bench: {error!r}. Give "
                    "files that its --out wrote."
                ) from None
    if not found:
        raise EvaluationError(f"{', '.join(map(str, records))}: no measurement in them.")
    rows = table_of([ratio for ratio, _ in found.values()])
    rows[0].append("model, machine, commit")
    for row, (_, made) in zip(rows[1:], found.values(), strict=True):
        row.append(made)
    console = Console()
    show_table(console, "Measurements", rows)
    out.mkdir(parents=True, exist_ok=True)
    (out / "bench.md").write_text(f"{markdown(rows)}\n", encoding="utf-8")
    plot_bench([ratio for ratio, _ in found.values()], out / "bench.png")
    console.print(f"{out / 'bench.md'}   {out / 'bench.png'}", highlight=False)
