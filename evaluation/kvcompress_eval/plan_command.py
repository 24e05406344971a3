"""`kvcompress plan`: what fits on a card and how fast it can decode, before anything is loaded."""

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcompress_eval.comparison import UNCOMPRESSED, need

if TYPE_CHECKING:
    from kvcompress_eval.plan import CachePlan, Plan


class Card(StrEnum):
    """Cards whose memory and bandwidth are known."""

    h200 = "h200"
    h100 = "h100"
    a100 = "a100"
    rtx5090 = "5090"
    rtx4090 = "4090"


CARDS = {
    Card.h200: (140, 4.8),
    Card.h100: (80, 3.35),
    Card.a100: (80, 2.04),
    Card.rtx5090: (32, 1.79),
    Card.rtx4090: (24, 1.01),
}
"""Memory in GiB and its bandwidth in 10^12 bytes a second, as their makers state them (of the data
centre cards, those for SXM with most memory)."""


class Dtype(StrEnum):
    """Of weights and cache."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


def plan(
    model: Annotated[
        str, typer.Argument(help="Hub id or path; smollm2 is embedded. No weights are read.")
    ],
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of every prompt.")],
    batch: Annotated[int, typer.Option(min=1, help="Prompts answered together.")] = 1,
    policy: Annotated[
        list[str] | None, typer.Option(help="Policy, may be repeated. [snapkv]")
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="Length of the answer.")] = 256,
    dtype: Annotated[Dtype, typer.Option(help="Of weights and cache.")] = Dtype.bfloat16,
    card: Annotated[Card, typer.Option(help="Sets the next two.")] = Card.h100,
    card_gib: Annotated[
        float | None, typer.Option(help="Its memory, GiB.", show_default="the card's")
    ] = None,
    bandwidth_tbs: Annotated[
        float | None,
        typer.Option(help="Of its memory, 10^12 bytes a second.", show_default="the card's"),
    ] = None,
    reserve_gib: Annotated[
        float, typer.Option(min=0, help="Of its memory, kept free for what is not counted.")
    ] = 0,
    weights_gib: Annotated[
        float | None,
        typer.Option(help="Of the weights, if they are quantized or spread over several cards."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print numbers instead.")] = False,
    out: Annotated[Path | None, typer.Option(help="Picture of memory against length.")] = None,
) -> None:
    """Say what fits on a card, and how fast it can decode, without loading the model."""
    if out is not None:
        need("matplotlib", "The picture", "plots")
    import torch
    import transformers
    from rich.console import Console

    from kvcompress_eval import plan as library
    from kvcompress_eval.model_size import read_config

    transformers.utils.logging.set_verbosity_error()
    gib, bandwidth = CARDS[card]
    found = library.plan(
        read_config(model),
        policy or ["snapkv"],
        prompt_tokens=prompt_tokens,
        batch=batch,
        new_tokens=new_tokens,
        dtype=getattr(torch, dtype.value),
        card_gib=gib if card_gib is None else card_gib,
        bandwidth_tbs=bandwidth if bandwidth_tbs is None else bandwidth_tbs,
        reserve_gib=reserve_gib,
        weights_gib=weights_gib,
    )
    if out is not None:
        from kvcompress_eval.plots import plot_plan

        plot_plan(library.memory_by_length(found), found, out)
    if as_json:
        print(json.dumps({"source": model, **found.to_dict()}, indent=2))
        return
    console = Console()
    show(model, found, console)
    if out is not None:
        console.print(f"picture: {out}", highlight=False)


def show(model: str, plan: "Plan", console: Any) -> None:
    """Table and notes."""
    from rich import box
    from rich.table import Table

    from kvcompress_eval.plan import GIB, TERA

    size = plan.model
    console.print(
        f"{model} ({size.name}): {size.parameters / 1e9:.3f} billion parameters, weights "
        f"{plan.weight_bytes / GIB:.2f} GiB, of which a step reads {plan.read_bytes / GIB:.2f}; "
        f"cache {sum(layer.row_bytes for layer in size.layers) / 1024:g} KiB a token in "
        f"{len(size.layers)} layers, {len(size.hosted)} of them with full attention.",
        highlight=False,
    )
    table = Table(
        title=f"{plan.batch} x {plan.prompt_tokens} tokens, answers of {plan.new_tokens}, "
        f"{size.dtype}, card of {plan.card_bytes / GIB:g} GiB at {plan.bandwidth / TERA:g} TB/s",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for heading in HEADINGS:
        left = heading == "cache"
        table.add_column(heading, justify="left" if left else "right", overflow="fold")
    for cache in plan.caches:
        table.add_row(*_cells(plan, cache))
    console.print(table, markup=False)
    console.print(LEGEND, highlight=False)
    for note in plan.notes:
        console.print(note, highlight=False)


HEADINGS = (
    "cache",
    "tokens held",
    "GiB at end",
    "x",
    "GiB needed",
    "fits",
    "ms a step",
    "faster",
    "longest prompt",
    "largest batch",
)
LEGEND = (
    "tokens held: per KV head and full-attention layer, after the prompt and after the answer. "
    "GiB at end: rows of all layers; x: of the full-attention layers, dense / held. GiB needed: "
    "weights and the cache at its largest, with the slack of its buffers. ms a step: bytes read / "
    "bandwidth, mean over the answer; faster: at most."
)


def _cells(plan: "Plan", cache: "CachePlan") -> list[str]:
    from kvcompress_eval.plan import GIB

    needed = plan.weight_bytes + cache.peak_bytes
    plain = cache.policy == UNCOMPRESSED
    positions = plan.model.positions
    beyond = positions is not None and cache.longest_prompt >= positions
    return [
        cache.policy,
        f"{_spread(cache.prompt_tokens_held)}, {_spread(cache.end_tokens_held)}",
        f"{(cache.end_bytes + cache.window_bytes) / GIB:.3f}",
        f"{cache.compression:.1f}",
        f"{needed / GIB:.2f}",
        "yes" if needed + plan.reserve_bytes <= plan.card_bytes else "no",
        f"{1000 * cache.step_seconds:.2f}",
        "" if plain else f"{cache.speedup:.2f}x",
        f"all {positions}" if beyond else str(cache.longest_prompt),
        str(cache.largest_batch),
    ]


def _spread(rows: tuple[int, ...]) -> str:
    low, high = min(rows), max(rows)
    return str(low) if low == high else f"{low} to {high}"
