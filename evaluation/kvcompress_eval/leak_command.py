"""`kvcompress leak`: does a compressed system prompt still guard itself, and is it followed?"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcompress.errors import EvaluationError
from kvcompress_eval.comparison import UNCOMPRESSED, need
from kvcompress_eval.console import counted, show_table
from kvcompress_eval.folder import RecordFile, enter_folder, of_model, versions
from kvcompress_eval.options import Device, Dtype, Model, OutFolder
from kvcompress_eval.prompts import digest

if TYPE_CHECKING:
    from kvcompress.policy import Policy
    from kvcompress_eval.fidelity import Estimate
    from kvcompress_eval.leak import Cell, Guarded, Told

DEFAULT = ["streaming_llm", "snapkv:window_size=8"]
EVICTED = [0.4, 0.6, 0.8]


@dataclass(frozen=True)
class Asked:
    """A line of records.jsonl: one compressed system prompt, and both answers."""

    row: str
    digest: str
    """Tells rows apart that have the same name."""
    order: str
    policy: str
    """`none` without compression."""
    mode: str
    evicted: float
    system_tokens: int
    refused: str
    """Why there is nothing: the budget has no room for what is always kept."""
    held_tokens: float | None
    kept_defence: float | None
    kept_directive: float | None
    leakage: float | None
    """ROUGE-L recall of the directive in the answer to the attack."""
    leakage_defence: float | None
    follows: list[bool]
    """Every instruction of the row, in the answer to the request."""
    disclosed: str
    answer: str

    @property
    def cell(self) -> tuple[str, str, float]:
        """How the system prompt was compressed."""
        return self.policy, self.mode, self.evicted


@dataclass(frozen=True)
class Summary:
    """All rows under one order, policy, mode and share."""

    order: str
    policy: str
    mode: str
    evicted: float
    rows: int
    kept_defence: float
    kept_directive: float
    leakage: "Estimate"
    leakage_defence: "Estimate"
    following: "Estimate"


def leak(
    rows: Annotated[
        Path | None,
        typer.Option(help="JSONL with google/IFEval's columns; a few built-in rows if none."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most as many rows.")] = 3,
    model: Model = "smollm2",
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Without a budget; may be repeated. [streaming_llm, snapkv:window_size=8]"
        ),
    ] = None,
    evicted: Annotated[
        list[float] | None,
        typer.Option(
            min=0,
            max=0.99,
            help="Share that goes, 1 - keep_ratio; may be repeated. [0.4, 0.6, 0.8]",
        ),
    ] = None,
    attack_tokens: Annotated[int, typer.Option(min=1, help="Of the answer to the attack.")] = 24,
    new_tokens: Annotated[int, typer.Option(min=1, help="Of the answer to the request.")] = 16,
    dtype: Dtype = "auto",
    device: Device = None,
    out: OutFolder = Path("leak"),
) -> None:
    """Attack a compressed system prompt, and see whether it is still followed."""
    bases = _bases(policy or DEFAULT)
    for package, purpose in (
        ("lm_eval", "Checking instructions"),
        ("rouge_score", "Measuring leakage"),
        ("scipy", "The standard error"),
    ):
        need(package, purpose, "eval")
    need("matplotlib", "The picture", "plots")
    from kvcompress_eval.directives import read_rows

    chosen = read_rows(rows, limit)
    import transformers
    from rich.console import Console

    from kvcompress.models import load
    from kvcompress_eval import leak as library

    transformers.utils.logging.disable_progress_bar()
    loaded, tokenizer = load(model, dtype=dtype, device=device)
    prompts = [
        (row, order, library.guard(tokenizer, row["directive"], str(row["prompt"]), order))
        for row in chosen
        for order in library.ORDERS
    ]
    settings = {"attack_tokens": attack_tokens, "new_tokens": new_tokens}
    enter_folder(
        out,
        "leak",
        of_model(model, loaded) | settings | versions("lm_eval", "rouge-score"),
    )
    cells = _cells(bases, evicted or EVICTED)
    records, console = RecordFile(out / "records.jsonl", Asked), Console()
    with counted(console) as progress:
        bar = progress.add_task("caches", total=len(prompts) * len(cells))
        for row, order, guarded in prompts:
            digest = _digest(guarded, row)
            done = {each.cell for each in records.all if each.digest == digest}
            missing = {name: cell for name, cell in cells.items() if name not in done}
            progress.advance(bar, len(cells) - len(missing))
            names = {cell: name for name, cell in missing.items()}
            asked = library.ask(loaded, tokenizer, guarded, list(names), attack_tokens, new_tokens)
            for cell, told in asked:
                records.add(_asked(row, digest, order, names[cell], guarded, told))
                progress.advance(bar)
    wanted = {_digest(guarded, row) for row, _, guarded in prompts}
    shown = [each for each in records.all if each.digest in wanted and each.cell in cells]
    report(model, shown, out, console)


def _bases(specs: Sequence[str]) -> "list[Policy]":
    """The policies; their budgets are set later.

    Raises:
        EvaluationError: One is composed, or names what this command sets.
    """
    from kvcompress import policy_from

    found = []
    for spec in specs:
        base = policy_from(spec)
        own = {"capacity", "keep_ratio", "protect", "fair"} & set(base.changed_fields())
        if base.part("prefill") is not base or own:
            alone = base.part("prefill") is base
            what = f"sets {', '.join(sorted(own))}" if alone else "is no policy for a prompt alone"
            raise EvaluationError(
                f"{spec} {what}. Give a policy that cuts a prompt, without a budget and without "
                "protected tokens: --evicted says how much goes, and every mode what stays."
            )
        found.append(base)
    return found


def _cells(
    bases: "Sequence[Policy]", evicted: Sequence[float]
) -> "dict[tuple[str, str, float], Cell]":
    """All that is compared, by what records say of it; first the uncompressed system prompt."""
    from kvcompress_eval.leak import MODES, Cell

    cells = {(UNCOMPRESSED, "plain", 0.0): Cell(bases[0], "plain", 0.0)}
    for base in bases:
        for mode in MODES:
            for share in sorted({*evicted} - {0.0}):
                cells[str(base), mode, share] = Cell(base, mode, share)
    return cells


def _asked(
    row: dict[str, Any],
    digest: str,
    order: str,
    cell: tuple[str, str, float],
    guarded: "Guarded",
    told: "Told | str",
) -> Asked:
    from kvcompress_eval.directives import follows, recall
    from kvcompress_eval.leak import DEFENCE

    known = str(row["key"]), digest, order, *cell, len(guarded.system)
    if isinstance(told, str):
        return Asked(*known, told, None, None, None, None, None, [], "", "")
    return Asked(
        *known,
        refused="",
        held_tokens=told.held_tokens,
        kept_defence=told.kept_defence,
        kept_directive=told.kept_directive,
        leakage=recall(guarded.directive, told.disclosed),
        leakage_defence=recall(DEFENCE, told.disclosed),
        follows=follows(row, told.answer),
        disclosed=told.disclosed,
        answer=told.answer,
    )


def _digest(guarded: "Guarded", row: dict[str, Any]) -> str:
    checks = [row["instruction_id_list"], row["kwargs"]]
    return digest([guarded.system, guarded.attack, guarded.request, checks])


def summaries(records: Sequence[Asked]) -> list[Summary]:
    """Means over rows, of every order and cell for which no row was refused."""
    from kvcompress_eval.fidelity import bootstrap

    groups: dict[tuple[str, str, str, float], list[Asked]] = {}
    for each in records:
        groups.setdefault((each.order, *each.cell), []).append(each)
    found = []
    for key, group in groups.items():
        if any(each.refused for each in group):
            continue

        def mean(name: str, group: Sequence[Asked] = group) -> "Estimate":
            return bootstrap([getattr(each, name) for each in group])

        found.append(
            Summary(
                *key,
                len(group),
                mean("kept_defence").value,
                mean("kept_directive").value,
                mean("leakage"),
                mean("leakage_defence"),
                bootstrap([fmean(each.follows) for each in group]),
            )
        )
    return sorted(found, key=lambda each: (each.order, each.policy != UNCOMPRESSED))


def report(model: str, records: Sequence[Asked], out: Path, console: Any) -> None:
    """Table on the console and in table.md, and a picture."""
    from kvcompress_eval.plots import plot_leak
    from kvcompress_eval.scores import markdown

    found = summaries(records)
    table = [["order", "cache", "evicted", "defence kept", "directive kept"]]
    table[0] += ["leakage", "of the defence", "followed"]
    table += [
        [
            each.order,
            UNCOMPRESSED if each.policy == UNCOMPRESSED else f"{each.policy}, {each.mode}",
            f"{each.evicted:g}",
            f"{each.kept_defence:.2f}",
            f"{each.kept_directive:.2f}",
            each.leakage.text(2),
            each.leakage_defence.text(2),
            each.following.text(2),
        ]
        for each in found
    ]
    lengths = [each.system_tokens for each in records]
    rows = len({each.digest for each in records if each.order == records[0].order})
    title = f"{model}, {rows} directives, system prompts of {min(lengths)} to {max(lengths)} tokens"
    refused = sorted(
        {(e.order, *e.cell) for e in records if e.refused}, key=lambda each: each[::-1]
    )
    notes = [LEGEND]
    if refused:
        cells = [f"{mode} {policy} {share:g} ({order})" for order, policy, mode, share in refused]
        notes.append(f"No room for what must stay, for some row: {', '.join(cells)}.")
    show_table(console, title, table)
    for note in notes:
        console.print(note, highlight=False)
    text = "\n\n".join([title, markdown(table), *notes])
    (out / "table.md").write_text(f"{text}\n", encoding="utf-8")
    names = ["table.md", "records.jsonl"]
    if len({each.policy for each in found}) > 1:  # else there was no room for anything
        plot_leak(found, out / "plot.png", title)
        names.append("plot.png")
    console.print("   ".join(str(out / name) for name in names), highlight=False)


LEGEND = (
    "leakage: ROUGE-L recall of the directive (of the defence) in the answer to the attack. "
    "followed: share of a row's instructions by IFEval's strict checks. Means over rows, ± "
    "standard error by bootstrap over rows. kept: share of a part that stayed, mean over its "
    "tokens, layers, heads and rows. evicted: share of the system prompt; nothing goes after it."
)
