"""`kvcompress fidelity`: how often and how far a compressed cache predicts something else."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcompress.errors import EvaluationError
from kvcompress_eval.comparison import at_capacities, need
from kvcompress_eval.console import counted, show_table
from kvcompress_eval.folder import RecordFile, enter_folder, of_model
from kvcompress_eval.needle import Kind, make_needle
from kvcompress_eval.options import Chat, Device, Dtype, Model, NewTokens, OutFolder
from kvcompress_eval.prompts import Prompt, read_prompt, tokenize

if TYPE_CHECKING:
    from kvcompress_eval.fidelity import Estimate
    from kvcompress_eval.scores import Panel

DEFAULT = ["snapkv", "snapkv:kernel_size=13:pooling=max", "streaming_llm"]
CAPACITIES = [128, 256, 512]
NEEDLE_TOKENS = 800


@dataclass(frozen=True)
class Compared:
    """One policy on one prompt, as in records.jsonl; see `fidelity.Fidelity`."""

    prompt: str
    digest: str
    prompt_tokens: int
    policy: str
    text: str
    """The continuation."""
    continuation: list[int]
    agrees: list[bool]
    divergence: list[float]
    more_loss: list[float]
    held_tokens: float


@dataclass(frozen=True)
class Summary:
    """One policy over prompts: means of the prompts' means over tokens."""

    policy: str
    prompts: int
    held_tokens: float
    agreement: "Estimate"
    divergence: "Estimate"
    more_loss: "Estimate"


def fidelity(
    prompts: Annotated[
        list[Path] | None,
        typer.Argument(help="Files, a prompt each; four needles in 800 tokens if none is given."),
    ] = None,
    model: Model = "smollm2",
    policy: Annotated[
        list[str] | None,
        typer.Option(help="Policy, may be repeated; SnapKV and StreamingLLM if none is given."),
    ] = None,
    capacity: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Every policy that names no budget is taken at each. [128, 256, 512]"
        ),
    ] = None,
    new_tokens: NewTokens = 32,
    chat: Chat = True,
    dtype: Dtype = "auto",
    device: Device = None,
    out: OutFolder = Path("fidelity"),
) -> None:
    """Feed policies the uncompressed model's own answers and see how they would have gone on."""
    amounts = capacity or ([] if policy else CAPACITIES)
    policies = at_capacities(policy or DEFAULT, amounts)
    texts = {path: read_prompt(path) for path in prompts or ()}
    need("matplotlib", "The picture", "plots")
    need("scipy", "The standard error", "eval")
    import torch
    import transformers
    from rich.console import Console

    from kvcompress.models import load
    from kvcompress_eval import fidelity as library

    transformers.utils.logging.disable_progress_bar()
    loaded, tokenizer = load(model, dtype=dtype, device=device)
    enter_folder(out, "fidelity", of_model(model, loaded) | {"new_tokens": new_tokens})
    given = [Prompt(path.name, tokenize(tokenizer, text, chat)) for path, text in texts.items()]
    given = given or _needles(tokenizer)
    records, console = RecordFile(out / "records.jsonl", Compared), Console()
    with counted(console) as progress:
        bar = progress.add_task("caches", total=len(given) * len(policies))
        for prompt in given:
            done = {each.policy for each in records.all if each.digest == prompt.digest}
            missing = [each for each in policies if str(each) not in done]
            progress.advance(bar, len(policies) - len(missing))
            if not missing:
                continue
            ids = torch.tensor([prompt.input_ids], device=loaded.device)
            for each, found in library.fidelity(loaded, ids, missing, new_tokens):
                record = Compared(
                    prompt.name,
                    prompt.digest,
                    len(prompt.input_ids),
                    str(each),
                    str(tokenizer.decode(found.continuation, skip_special_tokens=True)),
                    **asdict(found),
                )
                records.add(record)
                progress.advance(bar)
    wanted = {prompt.digest for prompt in given}
    shown = [each for each in records.all if each.digest in wanted]
    report(model, summaries(shown, [str(each) for each in policies]), shown, out, console)


def _needles(tokenizer: Any) -> list[Prompt]:
    """One of every kind, at different depths."""
    return [
        Prompt(
            f"needle: {kind}",
            make_needle(
                tokenizer, NEEDLE_TOKENS, (number + 0.5) / len(Kind), number, kind
            ).input_ids,
        )
        for number, kind in enumerate(Kind)
    ]


def summaries(records: Sequence[Compared], policies: Sequence[str]) -> list[Summary]:
    """Of every policy, over prompts whose continuation has a second token.

    Raises:
        EvaluationError: There is no such prompt.
    """
    from kvcompress_eval.fidelity import bootstrap

    told = [each for each in records if each.agrees]
    if not told:
        raise EvaluationError(
            "The uncompressed model ends every continuation after its first token, which the whole "
            "prompt predicts under any policy: there is nothing to compare. Give other prompts."
        )
    found = []
    for policy in policies:
        group = [each for each in told if each.policy == policy]
        found.append(
            Summary(
                policy,
                len(group),
                fmean(each.held_tokens for each in group),
                bootstrap([fmean(each.agrees) for each in group]),
                bootstrap([fmean(each.divergence) for each in group]),
                bootstrap([fmean(each.more_loss) for each in group]),
            )
        )
    return found


def panels(found: Sequence[Summary]) -> "list[Panel]":
    """Agreement and divergence against rows held."""
    from kvcompress_eval.scores import Curve, Panel, without_budget

    def panel(title: str, value: str, name: str, level: float) -> Panel:
        curves = dict[str, list[tuple[float, float, float | None]]]()
        for each in sorted(found, key=lambda each: each.held_tokens):
            estimate = getattr(each, name)
            error = None if each.prompts < 2 else estimate.error
            points = curves.setdefault(without_budget(each.policy), [])
            points.append((each.held_tokens, estimate.value, error))
        return Panel(title, value, [Curve(*each) for each in curves.items()], level)

    return [
        panel("the same likeliest token ± standard error", "share of tokens", "agreement", 1.0),
        panel("KL(uncompressed || compressed) ± standard error", "nats a token", "divergence", 0.0),
    ]


def report(
    model: str, found: Sequence[Summary], records: Sequence[Compared], out: Path, console: Any
) -> None:
    """Table on the console and in table.md, and a picture."""
    from kvcompress_eval.plots import plot_comparison
    from kvcompress_eval.scores import markdown

    rows = [["cache", "held", "agreement", "KL, nats", "more NLL, nats", "prompts"]]
    rows += [
        [
            each.policy,
            f"{each.held_tokens:.1f}",
            each.agreement.text(3),
            each.divergence.text(4),
            each.more_loss.text(4, "+"),
            str(each.prompts),
        ]
        for each in found
    ]
    lengths = {each.digest: each.prompt_tokens for each in records}
    tokens = {each.digest: len(each.agrees) for each in records}
    title = (
        f"{model}, {len(lengths)} prompts of {min(lengths.values())} to {max(lengths.values())} "
        f"tokens, {sum(tokens.values())} tokens compared"
    )
    show_table(console, title, rows)
    console.print(LEGEND, highlight=False)
    (out / "table.md").write_text(f"{title}\n\n{markdown(rows)}\n\n{LEGEND}\n", encoding="utf-8")
    held = "tokens held in the end (mean over layers)"
    plot_comparison(panels(found), out / "plot.png", held, title)
    names = ("table.md", "plot.png", "records.jsonl")
    console.print("   ".join(str(out / name) for name in names), highlight=False)


LEGEND = (
    "Of the uncompressed model's own greedy continuation, from its second token on: mean over "
    "prompts of a prompt's mean over tokens, ± standard error by bootstrap over prompts. held: "
    "rows in the end, mean over layers. KL: of the uncompressed from the compressed distribution. "
    "more NLL: of the continuation."
)
