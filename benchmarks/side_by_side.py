"""kvcompress, kvpress and uncompressed transformers on one model, in turn, against stated bars.

    python benchmarks/side_by_side.py --venvs .venv-bars --out results/bars

The two libraries need different releases of transformers, so each has an environment and a process
of its own; this one only coordinates them, and loads no torch.
"""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from kvcompress_eval.provenance import commit, machine
from rich.console import Console
from sides import measure
from sides.bars import BARS, Verdict, failed
from sides.client import Worker, WorkerError
from sides.environments import OURS, THEIRS, ensure
from sides.measure import MismatchError, Part, Sides, Sizes
from sides.results import plot, table, write

HERE = Path(__file__).parent
TOLERANCE = 1e-2
"""Between the logits of the sides' plain models in float32: other releases, the same weights."""


@dataclass(frozen=True)
class Launch:
    """How a side's worker is started."""

    command: Sequence[str]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Setup:
    """What all workers of a run share."""

    ours: Launch
    theirs: Launch
    model: str
    layers: int | None
    """Of a random model, which is then used instead of `model`."""
    threads: int
    device: str
    timeout: float
    out: Path


def main(
    venvs: Annotated[
        Path, typer.Option(help="Folder for the two environments; made on first use.")
    ] = Path(".venv-bars"),
    ours_python: Annotated[
        Path | None, typer.Option(help="Use this environment for kvcompress instead.")
    ] = None,
    theirs_python: Annotated[
        Path | None, typer.Option(help="Use this environment for kvpress instead.")
    ] = None,
    part: Annotated[
        list[Part] | None, typer.Option(help="Only these; may be repeated. All if not given.")
    ] = None,
    model: Annotated[str, typer.Option(help="Hub id or path; smollm2 is embedded.")] = "smollm2",
    random_layers: Annotated[
        int | None,
        typer.Option(min=1, help="A model of its shape with so many layers and random weights."),
    ] = None,
    length: Annotated[int, typer.Option(min=64, help="Prompt that is cut.")] = Sizes.length,
    keep: Annotated[int, typer.Option(min=16, help="Rows that are left of it.")] = Sizes.keep,
    held: Annotated[
        list[int] | None, typer.Option(help="Rows to decode from; may be repeated.")
    ] = None,
    memory_length: Annotated[
        int, typer.Option(min=64, help="Prompt whose peak is measured.")
    ] = Sizes.memory_length,
    repeats: Annotated[int, typer.Option(min=2, help="Prefills of every kind.")] = Sizes.repeats,
    blocks: Annotated[int, typer.Option(min=2, help="Blocks of decode steps.")] = Sizes.blocks,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 2,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for one answer.")] = 3600,
    out: Annotated[Path, typer.Option(help="Folder for the record and the picture.")] = Path(
        "benchmarks/results"
    ),
) -> None:
    """Measure both libraries side by side; exits with 1 unless every bar is met."""
    # Not resolved: a link to another environment's Python would then be that environment's.
    own = str((ours_python or ensure(venvs / "ours", OURS)).absolute())
    other = str((theirs_python or ensure(venvs / "kvpress", THEIRS)).absolute())
    shared = {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": str(threads)}
    setup = Setup(
        ours=Launch([own, "-m", "sides.ours"], {**shared, "PYTHONPATH": _checkout()}),
        theirs=Launch([other, "-m", "sides.theirs"], shared),
        model=model,
        layers=random_layers,
        threads=threads,
        device=device,
        timeout=timeout,
        out=out,
    )
    sizes = replace(
        Sizes(),
        length=length,
        keep=keep,
        held=tuple(held or Sizes.held),
        memory_length=memory_length,
        repeats=repeats,
        blocks=blocks,
    )
    if not compare(setup, sizes, [each for each in Part if part is None or each in part]):
        raise typer.Exit(1)


def _checkout() -> str:
    """What is measured is the tree that this file is in, whatever else is installed."""
    root = HERE.parent
    return ":".join(map(str, (HERE, root, root / "policies", root / "evaluation")))


def compare(setup: Setup, sizes: Sizes, parts: Sequence[Part]) -> bool:
    """Run the measurements and report them; whether every bar was met."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=180)  # a log is read without wrapped columns
    started = time.monotonic()
    verdicts: list[Verdict] = []
    record: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit(),
        "machine": machine(),
        "model": setup.model if setup.layers is None else f"random, {setup.layers} layers",
        "threads": setup.threads,
        "device": setup.device,
        "sizes": asdict(sizes),
        "bars": BARS,
    }
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory())
        path = _model_path(setup, scratch)
        fresh = partial(_start, setup, path)
        ours, theirs = (stack.enter_context(fresh(side)) for side in ("ours", "theirs"))
        record["versions"] = {"ours": ours.ask("hello"), "theirs": theirs.ask("hello")}
        _check_apart(record["versions"])
        console.print("checking the contracts of our policies")
        record["contracts_hold_for"] = ours.ask("check")
        sides = Sides(ours, theirs, fresh)
        tolerance = TOLERANCE if setup.device == "cpu" else 1.0  # bfloat16
        record["plain_logits_differ_by"] = measure.plain_agreement(sides, 300, tolerance)
        jobs: dict[Part, Callable[[], list[Verdict]]] = {
            Part.start_up: partial(
                measure.start_up, setup.ours.command[:1], setup.ours.environment, 15
            ),
            Part.prefill: partial(measure.prefill, sides, sizes),
            Part.decode: partial(measure.decode, sides, sizes),
            Part.evict: partial(measure.evict, sides, sizes),
            Part.memory: partial(measure.memory, sides, sizes),
        }
        for part in parts:
            console.print(f"{part}: measuring")
            found = _measured(part, jobs[part])
            verdicts += found
            console.print(table(found, str(part)))
            record |= {"verdicts": [each.to_dict() for each in verdicts]}
            record |= {"seconds": time.monotonic() - started, "title": _title(record)}
            write(record, setup.out)
    plot(record, setup.out / "side_by_side.png")
    claimed = [each for each in verdicts if each.passed is not None]
    missed = [each for each in claimed if not each.passed]
    console.print(f"{len(claimed) - len(missed)} of {len(claimed)} bars met; {setup.out}")
    for each in missed:
        console.print(f"missed: {each.name} {each.problem}", highlight=False, markup=False)
    return not missed


def _measured(part: Part, job: Callable[[], list[Verdict]]) -> list[Verdict]:
    """What a job found; one failed line if it could not be done, since the others still can."""
    try:
        return job()
    except (WorkerError, MismatchError) as error:
        return [failed(str(part), str(error))]


def _model_path(setup: Setup, scratch: str) -> str:
    """A model that both sides can load, as a path if it is made or embedded."""
    with _spawn(setup, "ours") as worker:
        if setup.layers is not None:
            return str(worker.ask("make_random", path=f"{scratch}/model", layers=setup.layers))
        return str(worker.ask("locate", name=setup.model))


def _spawn(setup: Setup, side: str) -> Worker:
    launch = setup.ours if side == "ours" else setup.theirs
    log = setup.out / f"side_by_side.{side}.log"
    return Worker(side, launch.command, launch.environment, log, setup.timeout)


def _start(setup: Setup, path: str, side: str) -> Worker:
    worker = _spawn(setup, side)
    try:
        worker.ask("load", path=path, threads=setup.threads, device=setup.device)
    except WorkerError:
        worker.close()
        raise
    return worker


def _check_apart(versions: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse a side in which the other library is loaded too: it patches what is measured."""
    wanted = {"ours": ["kvcompress"], "theirs": ["kvpress"]}
    for side, expected in wanted.items():
        loaded = versions[side]["modules"]
        if loaded != expected:
            raise MismatchError(f"The worker for {side} has loaded {loaded}, not {expected}.")


def _title(record: Mapping[str, Any]) -> str:
    ours, theirs = record["versions"]["ours"], record["versions"]["theirs"]
    return (
        f"kvcompress {ours['kvcompress']} (transformers {ours['transformers']}) and kvpress "
        f"{theirs['kvpress']} (transformers {theirs['transformers']})\n{record['model']}, "
        f"{record['machine']}, {record['threads']} threads, commit {record['commit']}"
    )


if __name__ == "__main__":
    typer.run(main)
