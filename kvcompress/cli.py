"""The command line. Nothing heavy is imported until a command runs."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcompress.errors import KVCompressError
from kvcompress.plugins import policy_from, registry

if TYPE_CHECKING:
    from kvcompress.policy import Policy

app = typer.Typer(
    name="kvcompress",
    help="KV-cache compression for Hugging Face transformers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

POLICY_HELP = "Policy, as name:field=value:...; `kvcompress policies` lists all."
MODEL_HELP = "Hub id or path; smollm2 is the embedded default."


@app.command()
def generate(
    prompt: Annotated[
        str, typer.Argument(help="File with the prompt; - reads standard input.")
    ] = "-",
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "smollm2",
    policy: Annotated[str, typer.Option(help=POLICY_HELP)] = "snapkv",
    compare: Annotated[
        bool, typer.Option("--compare", help="Show the uncompressed answer beside it.")
    ] = False,
    prefill_chunk_size: Annotated[
        int | None,
        typer.Option(min=1, help="Read the prompt in chunks of as many tokens, in bounded memory."),
    ] = None,
    lookahead: Annotated[
        int | None,
        typer.Option(min=0, help="The prompt's last tokens that vote after every chunk."),
    ] = None,
    spare: Annotated[
        int | None,
        typer.Option(min=0, help="Rows kept beyond the capacity until all chunks were read."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length of the answer.")] = 256,
    chat: Annotated[
        bool, typer.Option(help="Use the tokenizer's chat template, if it has one.")
    ] = True,
    sample: Annotated[bool, typer.Option("--sample", help="Sample instead of greedy.")] = False,
    temperature: Annotated[float, typer.Option(min=0.01, help="With --sample.")] = 1.0,
    seed: Annotated[int, typer.Option(help="With --sample.")] = 0,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str | None, typer.Option(help="CUDA if there is one, else cpu.")] = None,
    attn: Annotated[str | None, typer.Option(help="Attention implementation.")] = None,
) -> None:
    """Answer a long prompt from a compressed cache."""
    chosen = policy_from(policy)
    chunks = {"chunk_size": prefill_chunk_size, "lookahead": lookahead, "spare": spare}
    for name in ("lookahead", "spare"):
        if chunks[name] is not None and prefill_chunk_size is None:
            raise typer.BadParameter(f"--{name} is for --prefill-chunk-size; give that too.")
    text = _read(prompt)
    import torch
    from rich.columns import Columns
    from rich.console import Console, Group
    from rich.panel import Panel
    from rich.text import Text

    from kvcompress.models import load

    loaded, tokenizer = load(model, dtype=dtype, device=device, attn=attn)
    inputs = _tokenize(tokenizer, text, chat).to(loaded.device)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": sample}
    if sample:
        options["temperature"] = temperature
    answers = []
    for title, each in [("compressed", chosen)] + ([("uncompressed", None)] if compare else []):
        torch.manual_seed(seed)
        stream = not compare
        read = chunks if each is not None and prefill_chunk_size is not None else None
        answer, summary = _answer(loaded, tokenizer, inputs, each, read, options, stream)
        # As texts, for what looks like rich's markup in an answer is none.
        answers.append(Panel(Group(Text(answer), Text(f"\n{summary}", style="dim")), title=title))
        if stream:
            Console(stderr=True).print(summary, style="dim")
    if compare:
        Console().print(Columns(answers, equal=True, expand=True))


def _read(prompt: str) -> str:
    path = Path(prompt)
    if prompt != "-" and not path.is_file():
        raise typer.BadParameter(
            f"{prompt!r} is not a file. Give a file with the prompt, or - and the prompt on "
            "standard input."
        )
    try:
        text = sys.stdin.read() if prompt == "-" else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(
            f"The prompt cannot be read from {prompt!r}: {error}. Give a text in UTF-8."
        ) from None
    if not text.strip():
        raise typer.BadParameter("The prompt is empty.")
    return text


def _tokenize(tokenizer: Any, text: str, chat: bool) -> Any:
    if chat and tokenizer.chat_template:
        return tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
    return tokenizer(text, return_tensors="pt")


def _answer(
    model: Any,
    tokenizer: Any,
    inputs: Any,
    policy: "Policy | None",
    chunks: dict[str, Any] | None,
    options: dict[str, Any],
    stream: bool,
) -> tuple[str, str]:
    """The answer and one line about what it took."""
    from contextlib import nullcontext
    from statistics import median

    from transformers import TextStreamer

    from kvcompress.session import cache_argument, press
    from kvcompress.timing import TimedStreamer, clock

    printer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    timed = TimedStreamer(printer if stream else None)
    started = clock()
    with press(model, policy) if policy is not None else nullcontext() as session:
        if session is not None and chunks is not None:
            options = options | {cache_argument(model): _read_in_chunks(session, inputs, chunks)}
        chunked = clock() - started
        output = model.generate(**inputs, **options, streamer=timed)
    length = inputs["input_ids"].shape[1]
    answer = tokenizer.decode(output[0, length:], skip_special_tokens=True)
    parts = [f"{length} prompt tokens"]
    if session is not None:
        report = session.report()
        hosted = max(report.hosted_layers, 1)
        parts.append(
            f"{report.held_tokens // hosted} of {report.seen_tokens // hosted} tokens held a "
            f"layer, {report.held_bytes / 2**20:.1f} of {report.dense_bytes / 2**20:.1f} MiB"
        )
    parts.append(f"prefill {chunked + timed.prefill_seconds:.2f} s")
    if timed.decode_seconds:
        parts.append(f"{1000 * median(timed.decode_seconds):.0f} ms a token")
    return answer, ", ".join(parts)


def _read_in_chunks(session: Any, inputs: Any, chunks: dict[str, Any]) -> Any:
    """The cache of a prompt, with a bar that says how far it is."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("reading"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=inputs["input_ids"].shape[1])
        return session.prefill(
            inputs["input_ids"],
            inputs["attention_mask"],
            **chunks,
            progress=lambda done, _: bar.update(task, completed=done),
        )


@app.command()
def policies(
    schema: Annotated[
        str | None, typer.Option(metavar="NAME", help="Print one policy's JSON schema.")
    ] = None,
) -> None:
    """List the installed policies and their fields."""
    if schema is not None:
        import json

        print(json.dumps(registry().get(schema).model_json_schema(), indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    found = registry().policies
    for name, entry in found.items():
        policy = entry.policy
        summary = next(iter((policy.__doc__ or "").strip().splitlines()), "")
        phases = ", ".join(sorted(policy.phases, reverse=True))
        console.print(f"[bold]{name}[/bold]  {summary}")
        console.print(f"evicts at {phases}; from {entry.distribution}", style="dim")
        table = Table()
        for heading in ("field", "default", "meaning"):
            table.add_column(heading)
        for field, info in policy.model_fields.items():
            default = policy.default_capacity if field == "capacity" else info.get_default()
            table.add_row(field, str(default).lower(), info.description or "")
        console.print(table)
    for distribution, error in sorted(registry().broken.items()):
        console.print(f"[red]broken plugin[/red] {distribution}: {type(error).__name__}: {error}")


@app.command()
def env() -> None:
    """Print versions, devices, backends and plugins: what a bug report needs."""
    from kvcompress.installation import facts

    for name, value in facts().items():
        print(f"{name}: {value}")


def main() -> None:
    """Run the command line; our own errors are one message, not a traceback."""
    registry().add_commands(app)
    try:
        app()
    except KVCompressError as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        raise SystemExit(1) from None
