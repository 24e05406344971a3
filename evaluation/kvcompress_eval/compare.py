"""`kvcompress compare`: models x policies x capacities x tasks of lm_eval in one table.

Every (model, policy) is one run of lm_eval's own command; its numbers become records as soon as it
ends, tables and picture are made from the records, and the same command goes on where it stopped.
"""

import hashlib
import re
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcompress.errors import EvaluationError
from kvcompress_eval.comparison import (
    UNCOMPRESSED,
    Comparison,
    leaf_tasks,
    need,
    policy_fields,
)
from kvcompress_eval.console import counted, show_table
from kvcompress_eval.harness_run import MODEL, HarnessRun, Record, Records
from kvcompress_eval.offline import LocalTask, Selection, read_local, tasks_folder
from kvcompress_eval.scores import (
    HEADINGS,
    LEGEND,
    Panel,
    cells,
    check_metrics,
    choose_metric,
    markdown,
    overview,
    panels,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from kvcompress.policy import Policy


def _help(name: str) -> str:
    """An option's help: what its field says."""
    return Comparison.model_fields[name].description or ""


def compare(
    config: Annotated[
        Path | None, typer.Option(help="YAML file with these settings; options win.")
    ] = None,
    model: Annotated[list[str] | None, typer.Option(help=_help("model"))] = None,
    policy: Annotated[list[str] | None, typer.Option(help=_help("policy"))] = None,
    capacity: Annotated[list[int] | None, typer.Option(help=_help("capacity"))] = None,
    task: Annotated[list[str] | None, typer.Option(help=_help("task"))] = None,
    limit: Annotated[int | None, typer.Option(help=_help("limit"))] = None,
    max_prompt_tokens: Annotated[int | None, typer.Option(help=_help("max_prompt_tokens"))] = None,
    offline_data: Annotated[Path | None, typer.Option(help=_help("offline_data"))] = None,
    skip_rows_needing_nltk: Annotated[
        bool | None,
        typer.Option("--skip-rows-needing-nltk", help=_help("skip_rows_needing_nltk")),
    ] = None,
    model_args: Annotated[str | None, typer.Option(help=_help("model_args"))] = None,
    gen_kwargs: Annotated[str | None, typer.Option(help=_help("gen_kwargs"))] = None,
    chat: Annotated[bool | None, typer.Option(help=_help("chat"))] = None,
    batch_size: Annotated[str | None, typer.Option(help=_help("batch_size"))] = None,
    device: Annotated[str | None, typer.Option(help=_help("device"))] = None,
    launch: Annotated[str | None, typer.Option(help=_help("launch"))] = None,
    metric: Annotated[list[str] | None, typer.Option(help=_help("metric"))] = None,
    out: Annotated[Path | None, typer.Option(help=_help("out"))] = None,
) -> None:
    """Compare policies by lm_eval's tasks: models x policies x capacities x tasks."""
    options = {name: value for name, value in locals().items() if name != "config"}
    settings = Comparison.read(config, options)
    plan = make_plan(settings)
    records = Records(settings.out / "records.jsonl")
    from rich.console import Console

    console = Console()
    failed = run_missing(plan, records, console)
    report(plan, records, console)
    if failed:
        console.print(
            f"[red]{failed} of {len(plan.cells)} runs failed.[/red] The same command tries again "
            "what is missing."
        )
        raise typer.Exit(1)


@dataclass(frozen=True)
class Plan:
    """What is to be run, checked."""

    settings: Comparison
    policies: list["Policy"]
    tasks: list[str]
    local: dict[str, list[LocalTask]]
    """Of every model; empty if the rows are the hub's."""

    @property
    def cells(self) -> list[tuple[str, str]]:
        """Models with policies, the uncompressed cache first."""
        names = [UNCOMPRESSED, *(policy.to_string() for policy in self.policies)]
        return [(model, name) for model in self.settings.model for name in names]

    def run(self, model: str, policy: str, tasks: list[str]) -> HarnessRun:
        """The run of some tasks."""
        folder = self.settings.out.absolute() / slug(model)
        local = {task.stock: task.name for task in self.local.get(model, ())}
        return HarnessRun(
            model=model,
            policy=policy,
            tasks={task: local.get(task, task) for task in tasks},
            folder=folder / slug(policy),
            include=folder / "tasks" if local else None,
        )


def slug(name: str) -> str:
    """A folder's name for a model or policy; the digest tells apart what looks alike."""
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{re.sub(r'[^a-zA-Z0-9.=+_-]+', '_', name)[-60:].strip('_')}-{digest}"


def make_plan(settings: Comparison) -> Plan:
    """Check everything that can be checked before a model is loaded, and enter the folder.

    Raises:
        KVCompressError: Something is wrong, missing, or other than in an earlier comparison there.
    """
    policies = settings.policies()
    tasks_folder()
    need("matplotlib", "The picture", "plots")
    check_model_args(settings.model_args)
    check_launcher(settings.launch)
    paths = {model: model_path(model) for model in settings.model}
    if settings.offline_data is None:
        tasks, local = leaf_tasks(settings.task), {}
    else:
        tasks = list(dict.fromkeys(settings.task))
        local = {
            model: [
                read_local(task, settings.offline_data, selection(settings, path)) for task in tasks
            ]
            for model, path in paths.items()
        }
    check_harness()
    settings.enter()
    plan = Plan(settings, policies, tasks, local)
    for model, found in local.items():
        for each in found:
            each.write(settings.out / slug(model) / "tasks")
    return plan


def check_model_args(text: str) -> None:
    """Refuse arguments that the comparison gives itself.

    Raises:
        EvaluationError: There is one.
    """
    own = {"pretrained": "model", "policy": "policy", "capacity": "capacity"}
    own |= {"batch_size": "batch-size", "device": "device"}
    fields = policy_fields()
    for part in text.split(","):
        name = part.split("=")[0].strip()
        if name in own:
            raise EvaluationError(f"--model-args has {part!r}: give it as --{own[name]}.")
        if name in fields:
            raise EvaluationError(
                f"--model-args has {part!r}, which is a policy's: write it into --policy, as in "
                f"snapkv:{part.strip()}."
            )


def check_launcher(text: str) -> None:
    """Refuse a launcher that is not there.

    Raises:
        EvaluationError: It is not on the path.
    """
    words = shlex.split(text)
    if words and shutil.which(words[0]) is None:
        raise EvaluationError(f"--launch: there is no program {words[0]!r} on the path.")


def check_harness() -> None:
    """Refuse to start if lm_eval's command would not find our model.

    Raises:
        EvaluationError: The start-up hook that adds it is off.
    """
    import lm_eval.models  # noqa: F401
    from lm_eval.api.registry import model_registry

    if MODEL not in model_registry:
        raise EvaluationError(
            f"lm_eval does not know the model {MODEL}: the start-up hook of kvcompress is not "
            "active. Install kvcompress again (pip install, not a path on PYTHONPATH), and leave "
            "KVCOMPRESS_NO_LM_EVAL_HOOK unset."
        )


def model_path(model: str) -> str:
    """Where a model's files are: a path or a hub id.

    Raises:
        EvaluationError: It looks like a path and is no folder, or cannot be given to lm_eval.
        MissingModelError: It is the embedded model, which is not installed.
    """
    from kvcompress.models import DEFAULT_MODEL, default_path

    if model == DEFAULT_MODEL:
        return str(default_path())
    if set(model) & set(",{}[]()\"'"):
        raise EvaluationError(f"--model {model!r}: lm_eval cannot read such a name. Rename it.")
    if model.startswith(("/", ".", "~")) and not Path(model).is_dir():
        raise EvaluationError(f"--model {model!r} is no folder. Give a model's folder or a hub id.")
    return model


def selection(settings: Comparison, path: str) -> Selection:
    """Which local rows are taken, counted by the model's own tokenizer."""
    return Selection(
        limit=settings.limit,
        max_prompt_tokens=settings.max_prompt_tokens,
        skip_rows_needing_nltk=settings.skip_rows_needing_nltk,
        count_tokens=_counter(path) if settings.max_prompt_tokens else len,
    )


def _counter(path: str) -> Callable[[str], int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    # Texts longer than the model are meant to be counted, too.
    return lambda text: len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def run_missing(plan: Plan, records: Records, console: "Console") -> int:
    """Run whatever has no complete record; gives the number of runs that failed."""
    failed = 0
    with counted(console) as progress:
        whole = progress.add_task("runs", total=len(plan.cells))
        for model, policy in plan.cells:
            missing = [task for task in plan.tasks if records.complete(model, policy, task) is None]
            if missing:
                rows = progress.add_task(policy, total=None)

                def show(done: int, total: int, rows: "TaskID" = rows) -> None:
                    progress.update(rows, completed=done, total=total)

                failed += not execute(
                    plan.run(model, policy, missing), plan, show, records, console
                )
                progress.remove_task(rows)
            progress.advance(whole)
    return failed


def execute(
    run: HarnessRun,
    plan: Plan,
    show: Callable[[int, int], None],
    records: Records,
    console: "Console",
) -> bool:
    """Run and record; a failure is shown and recorded, and gives False."""
    try:
        records.add(list(run.execute(plan.settings, show).values()))
    except EvaluationError as error:
        cell = {"model": run.model, "policy": run.policy, "error": str(error)}
        records.add([cell | {"task": task} for task in run.tasks])
        console.print(f"{run.policy} failed, see {run.log}", style="red", highlight=False)
        console.print(str(error), markup=False, highlight=False)
        return False
    return True


def report(plan: Plan, records: Records, console: "Console") -> None:
    """Tables on the console and in table.md, and the picture; of all that is complete.

    Raises:
        EvaluationError: A metric was asked for that no task has.
    """
    from kvcompress_eval.plots import plot_comparison

    out, pictures = plan.settings.out, list[Panel]()
    lines = ["# Comparison", _described(plan.settings)]
    for model in plan.settings.model:
        cells_of_model = [cell for cell in plan.cells if cell[0] == model]
        found = [records.complete(*cell, task) for task in plan.tasks for cell in cells_of_model]
        done = [record for record in found if record is not None]
        check_metrics(done, plan.settings.metric)
        lines.append(f"## {model}")
        tables, panels_of_model = tables_and_panels(model, done, plan.settings.metric)
        pictures += panels_of_model
        for title, rows in tables.items():
            lines += [f"### {title}", markdown(rows)]
            show_table(console, f"{model}: {title}", rows)
    console.print(LEGEND, highlight=False)
    (out / "table.md").write_text("\n\n".join([*lines, LEGEND]) + "\n", encoding="utf-8")
    if pictures:
        plot_comparison(pictures, out / "plot.png")
    names = ("table.md", "plot.png", "records.jsonl")
    console.print("   ".join(str(out / name) for name in names), highlight=False)


def tables_and_panels(
    model: str, records: list[Record], wanted: Sequence[str]
) -> tuple[dict[str, list[list[str]]], list[Panel]]:
    """Of one model: the tables by title, scores of several tasks first, and the pictures' parts."""
    by_task: dict[str, list[Record]] = {}
    for record in records:
        by_task.setdefault(record["task"], []).append(record)
    metrics = {task: choose_metric(group[0], wanted) for task, group in by_task.items()}
    tables = {"scores": overview(records, metrics)} if len(by_task) > 1 else {}
    pictures: list[Panel] = []
    for task, group in by_task.items():
        plain = next((each for each in group if each["policy"] == UNCOMPRESSED), None)
        rows = [list(HEADINGS), *(cells(each, plain, metrics[task]) for each in group)]
        tables[f"{task}: {metrics[task]}, {group[0]['n']} rows"] = rows
        pictures += panels(f"{model}, {task}", group, metrics[task])
    return tables, pictures


def _described(settings: Comparison) -> str:
    """What was set apart from models, policies and tasks."""
    shown = {
        name: value for name, value in settings.deciding().items() if value not in (None, "", False)
    }
    return ", ".join(f"{name}: {value}" for name, value in shown.items())
