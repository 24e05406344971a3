"""`kvcompress demo`: one long prompt, answered from the full cache and from compressed ones."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcompress_eval.console import save_numbers
from kvcompress_eval.options import Device, Model

RUNS = (
    ("full cache", None),
    ("SnapKV 1024", "snapkv:capacity=1024"),
    ("SnapKV 512", "snapkv:capacity=512"),
    ("SnapKV 256", "snapkv:capacity=256"),
    ("SnapKV 512 max13", "snapkv:capacity=512:kernel_size=13:pooling=max"),
    ("SnapKV 256 max13", "snapkv:capacity=256:kernel_size=13:pooling=max"),
)


def demo(
    model: Model = "smollm2",
    tokens: Annotated[int, typer.Option(min=100, help="Length of the haystack.")] = 3000,
    depth: Annotated[
        float, typer.Option(min=0, max=1, help="Where the number is hidden; 0 is the beginning.")
    ] = 0.5,
    seed: Annotated[int, typer.Option(help="Chooses the number and the essays.")] = 0,
    out: Annotated[Path, typer.Option(help="Picture; the numbers go beside it.")] = Path(
        "demo.png"
    ),
    device: Device = None,
) -> None:
    """Hide a number in essays and ask for it: full cache against SnapKV."""
    import torch
    import transformers
    from rich import box
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from kvcompress import policy_from
    from kvcompress.models import load
    from kvcompress_eval.comparison import need
    from kvcompress_eval.measure import environment, timed_run
    from kvcompress_eval.needle import essays, make_needle

    need("matplotlib", "The picture", "plots")
    essays()  # if they are missing, that is said before the model is loaded
    from kvcompress_eval.plots import plot_kept

    transformers.utils.logging.disable_progress_bar()
    console = Console()
    with Progress(console=console) as progress:
        task = progress.add_task("loading the model", total=len(RUNS) + 1)
        loaded, tokenizer = load(model, device=device)
        needle = make_needle(tokenizer, tokens, depth, seed)
        input_ids = torch.tensor([needle.input_ids], device=loaded.device)
        # The first call pays for allocations that later ones find ready.
        timed_run(loaded, input_ids[:, :64], None, max_new_tokens=2)
        progress.advance(task)
        results: list[tuple[str, str | None, Any]] = []
        for label, policy in RUNS:
            progress.update(task, description=label)
            chosen = None if policy is None else policy_from(policy)
            run = timed_run(loaded, input_ids, chosen, max_new_tokens=16)
            results.append((label, policy, run))
            progress.advance(task)
        progress.update(task, description="done")
    prompt = input_ids.shape[1]
    table = Table(
        title=f"Prompt of {prompt} tokens; the number {needle.answer} is hidden at token "
        f"{needle.first}.",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for heading in ("cache", "answer", "", "held/seen", "MiB", "prefill", "decode"):
        named = heading in ("cache", "answer")
        table.add_column(heading, justify="left" if named else "right", no_wrap=True)
    records = []
    for label, policy, run in results:
        answer = str(tokenizer.decode(run.tokens, skip_special_tokens=True)).strip()
        right = needle.is_answered_by(answer)
        table.add_row(
            label,
            answer,
            "[green]right[/green]" if right else "[red]wrong[/red]",
            f"{run.held_tokens}/{run.seen_tokens}",
            f"{run.cache_bytes / 2**20:.1f}",
            f"{run.prefill_seconds:.1f} s",
            f"{run.decode_ms:.0f} ms",
        )
        fields = {key: value for key, value in asdict(run).items() if key != "kept"}
        records.append(
            {"label": label, "policy": policy, "answer": answer, "right": right, **fields}
        )
    console.print(table)
    console.print("max13: kernel_size=13, pooling=max; the others: the authors' defaults.")
    pictures = [
        (f"{label}: {'right' if record['right'] else 'wrong'}", run.kept)
        for (label, _, run), record in zip(results, records, strict=True)
        if run.kept is not None
    ]
    title = (
        f"What SnapKV keeps of {prompt} tokens ({model}); the number {needle.answer} is asked for"
    )
    plot_kept(pictures, needle, out, title)
    settings = {
        "model": model,
        "haystack_tokens": tokens,
        "depth": depth,
        "seed": seed,
        "prompt_tokens": prompt,
        "number": needle.answer,
        "number_tokens": [needle.first, needle.last],
        **environment(loaded),
    }
    save_numbers(out, {**settings, "runs": records}, console)
