"""`kvcompress stream`: how well a model predicts a long text that it reads piece by piece.

The text may be longer than the context that the model was trained on: a policy must keep the cache
small, and positions must not run away. The reference is a fresh context of the same size for every
piece, which costs many times as much.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcompress_eval.console import save_numbers
from kvcompress_eval.options import Device, Model

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT = [
    "streaming_llm:capacity={context}:positions=cache",
    "streaming_llm:capacity={context}:n_sink=0:positions=cache",
    "streaming_llm:capacity={context}",
]

DIFFERENCES = ("to_fresh", "to_first_policy")


@contextmanager
def _progress(total: int, label: str) -> Iterator[Callable[[int], None]]:
    from rich.progress import Progress

    with Progress() as progress:
        task = progress.add_task(label, total=total)
        yield lambda done: progress.update(task, completed=done)


def _collected(parts: "Iterator[Tensor]", shown: Callable[[int], None]) -> "Tensor":
    import torch

    found, count = [], 0
    for part in parts:
        found.append(part)
        count += len(part)
        shown(count)
    return torch.cat(found)


def stream(
    model: Model = "smollm2",
    policy: Annotated[
        list[str] | None,
        typer.Option(help="Policy, may be repeated; StreamingLLM with and without sinks if none."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=16, help="Length of the text.")] = 12288,
    start: Annotated[int, typer.Option(min=1, help="Losses count from this token on.")] = 8192,
    context: Annotated[int, typer.Option(min=8, help="Capacity, and the reference's.")] = 512,
    chunk: Annotated[int, typer.Option(min=2, help="Tokens fed at once.")] = 32,
    text: Annotated[Path | None, typer.Option(help="A text; essays are embedded.")] = None,
    device: Device = None,
    out: Annotated[Path, typer.Option(help="The picture; numbers go beside it.")] = Path(
        "stream.png"
    ),
) -> None:
    """Read a text longer than the model's context and measure how well it is predicted."""
    import warnings

    import torch
    from rich.console import Console
    from rich.table import Table

    from kvcompress import policy_from
    from kvcompress.errors import PolicyConfigError
    from kvcompress.models import load
    from kvcompress_eval.comparison import need
    from kvcompress_eval.measure import environment, mean_of, stream_losses, window_losses
    from kvcompress_eval.needle import essays

    need("matplotlib", "The picture", "plots")
    from kvcompress_eval.plots import plot_losses

    if start >= tokens or context <= chunk:
        raise PolicyConfigError(
            f"start={start} must lie before tokens={tokens}, and chunk={chunk} below "
            f"context={context}."
        )
    warnings.filterwarnings("ignore", message="`past_key_values` is deprecated")
    policies = [policy_from(each.format(context=context)) for each in policy or DEFAULT]
    content = text.read_text(encoding="utf-8") if text is not None else "\n\n".join(essays())
    loaded, tokenizer = load(model, device=device)
    ids = tokenizer(content, add_special_tokens=False, return_tensors="pt")["input_ids"]
    if ids.shape[1] < tokens:
        raise PolicyConfigError(
            f"The text has {ids.shape[1]} tokens, --tokens asks for {tokens}. Give a longer text."
        )
    ids = ids[:, :tokens].to(loaded.device)
    losses: dict[str, torch.Tensor] = {}
    # The reference needs no tokens before its first context.
    from_token = max(0, start - context - start % chunk)
    fresh = window_losses(loaded, ids[:, from_token:], context, chunk)
    with _progress(tokens - from_token, "fresh context") as shown:
        losses[f"fresh context of {context}"] = _collected(fresh, shown)
    for each in policies:
        with _progress(tokens, str(each)) as shown:
            losses[str(each)] = _collected(stream_losses(loaded, ids, each, chunk), shown)
    counted = {label: every[-(tokens - start) :] for label, every in losses.items()}
    fresh_part, first_part, *_ = counted.values()
    rows: list[dict[str, Any]] = []
    for label, part in counted.items():
        rows.append(
            {
                "label": label,
                "nll": asdict(mean_of(part)),
                "to_fresh": asdict(mean_of(part - fresh_part)),
                "to_first_policy": asdict(mean_of(part - first_part)),
                "ratio": float(part.mean() / fresh_part.mean()),
            }
        )
    table = Table(title=f"tokens {start} to {tokens}, fed {chunk} at a time, {model}")
    for heading in ("cache", "NLL, nats", "ratio", "more than fresh", "more than first policy"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        more = [f"{row[key]['value']:+.3f} ± {row[key]['half_width']:.3f}" for key in DIFFERENCES]
        table.add_row(row["label"], f"{row['nll']['value']:.3f}", f"{row['ratio']:.3f}", *more)
    Console().print(table)
    Console().print("±: 95 % confidence, over blocks of neighbouring tokens.")
    plot_losses(losses, tokens, out, f"{model}, tokens fed {chunk} at a time")
    settings = {
        "model": model,
        "tokens": tokens,
        "start": start,
        "context": context,
        "chunk": chunk,
        "text": "embedded essays" if text is None else text.name,
        **environment(loaded),
    }
    save_numbers(out, {**settings, "results": rows}, Console())
