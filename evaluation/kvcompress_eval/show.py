"""`kvcompress show`: the prompt, each token shaded by how many heads kept it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcompress_eval.comparison import at_capacities
from kvcompress_eval.options import Device, Dtype, Model
from kvcompress_eval.prompts import read_prompt, tokenize

if TYPE_CHECKING:
    from rich.text import Text
    from torch import Tensor

    from kvcompress.policy import Policy

DEFAULT = ["snapkv:capacity=256", "snapkv:capacity=256:kernel_size=13:pooling=max"]
LEVELS = "0123456789abcdefghijklmnopqrstuvwxyz"
"""A share as one character, so that a page of many layers and tokens stays small."""


@dataclass(frozen=True)
class Kept:
    """What one policy kept of the prompt."""

    policy: str
    share: "Tensor"
    """Of KV heads that hold each token, hosted layers x prompt."""
    layers: list[int]
    """The layers' numbers in the model."""
    heads: int


def kept_by(model: Any, input_ids: Any, policies: Sequence["Policy"]) -> list[Kept]:
    """What each policy keeps of a prompt, 1 x tokens; those that can share a prefill do."""
    import torch

    from kvcompress import press
    from kvcompress_eval.measure import cache_of, kept_share
    from kvcompress_eval.one_prefill import OnePrefill

    shared = [policy for policy in policies if OnePrefill.serves(policy)]
    prefill = OnePrefill(model, input_ids, shared) if shared else None
    found = []
    for policy in policies:
        if prefill is not None and policy in shared:
            _, cache = prefill.answer(policy, 2)  # cuts itself when the first token is fed
        else:
            with press(model, policy), torch.inference_mode():
                cache = cache_of(model(input_ids, use_cache=True, logits_to_keep=1))
        layers: list[Any] = list(cache.layers)
        hosted = [i for i, layer in enumerate(layers) if hasattr(layer, "positions")]
        heads = layers[hosted[0]].keys.shape[1]
        share = kept_share(cache, input_ids.shape[1])
        found.append(Kept(policy.to_string(), share, hosted, heads))
    return found


def page(tokens: Sequence[str], kept: Sequence[Kept], title: str) -> str:
    """One HTML file that needs no network: tokens, a choice of policy, and a slider of layers.

    Args:
        tokens: Of the prompt, as text.
        kept: One for each policy.
        title: Of the page.
    """
    data = {
        "title": title,
        "tokens": list(tokens),
        "policies": [
            {
                "label": each.policy,
                "layers": each.layers,
                "levels": _levels(each),
                "heads": each.heads,
                "kept": [_coded(row, _levels(each)) for row in each.share.tolist()],
            }
            for each in kept
        ],
    }
    # In a script element nothing but its end tag is markup.
    text = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")
    template = resources.files("kvcompress_eval").joinpath("show.html").read_text("utf-8")
    return template.replace("{{data}}", text)


def _levels(kept: Kept) -> int:
    """Steps between no head and all: one a head, if there are characters for them."""
    return min(kept.heads, len(LEVELS) - 1)


def _coded(row: Sequence[float], levels: int) -> str:
    return "".join(LEVELS[round(share * levels)] for share in row)


def shaded(tokens: Sequence[str], kept: Kept) -> "Text":
    """The prompt for a terminal, averaged over layers."""
    from rich.text import Text

    text = Text()
    for token, share in zip(tokens, kept.share.mean(dim=0).tolist(), strict=True):
        # From the terminal's own background up; a token that no head kept is only dimmed.
        level = round(60 + 140 * share)
        style = f"black on rgb({level},{level},40)" if share >= 0.02 else "dim"
        text.append(token, style=style)
    return text


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Each token's text; a character that is spread over several tokens shows as replaced."""
    return [tokenizer.decode([token], skip_special_tokens=False) for token in ids]


def show(
    prompt: Annotated[
        Path | None, typer.Argument(help="File with the prompt; a needle in essays if none.")
    ] = None,
    model: Model = "smollm2",
    policy: Annotated[list[str] | None, typer.Option(help="Policy, may be repeated.")] = None,
    capacity: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Every policy that names no budget is taken at each."),
    ] = None,
    chat: Annotated[
        bool, typer.Option(help="Use the tokenizer's chat template, if it has one.")
    ] = True,
    colours: Annotated[bool, typer.Option(help="Print the first policy's, too.")] = True,
    dtype: Dtype = "auto",
    device: Device = None,
    out: Annotated[Path, typer.Option(help="The page.")] = Path("show.html"),
) -> None:
    """Show a prompt with each token shaded by how many heads kept it."""
    import torch
    import transformers
    from rich.console import Console

    from kvcompress.models import load
    from kvcompress_eval.needle import make_needle

    policies = at_capacities(policy or DEFAULT, capacity or [])
    if prompt is not None and not prompt.is_file():
        raise typer.BadParameter(f"{str(prompt)!r} is not a file. Give a file with the prompt.")
    transformers.utils.logging.disable_progress_bar()
    loaded, tokenizer = load(model, dtype=dtype, device=device)
    if prompt is None:
        ids = make_needle(tokenizer, 800, 0.5).input_ids
    else:
        ids = tokenize(tokenizer, read_prompt(prompt), chat)
    console = Console()
    with console.status(f"reading {len(ids)} tokens"):
        kept = kept_by(loaded, torch.tensor([ids], device=loaded.device), policies)
    tokens = pieces(tokenizer, ids)
    out.write_text(page(tokens, kept, f"What is kept of {len(ids)} tokens, {model}"), "utf-8")
    if colours:
        console.print(shaded(tokens, kept[0]))
        console.print(f"{kept[0].policy}: the brighter, the more heads kept it.", style="dim")
    for each in kept:
        console.print(
            f"{each.policy}: {each.share.mean():.3f} of the prompt", highlight=False, soft_wrap=True
        )
    console.print(f"page: {out}", highlight=False, soft_wrap=True)
