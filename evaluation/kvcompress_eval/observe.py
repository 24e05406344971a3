"""`kvcompress observe`: does the prompt's end know what the answer will attend to?"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcompress_eval.comparison import need
from kvcompress_eval.console import save_numbers
from kvcompress_eval.options import Device, Dtype, Model
from kvcompress_eval.prompts import chat_text, encode, read_prompt

if TYPE_CHECKING:
    from torch import Tensor

QUESTIONS = (
    "What is the phone number of the office?",
    "Which machines did the author write programs on?",
    "Summarise the text in three sentences.",
)


def _prompt(tokenizer: Any, document: str, question: str, first: bool) -> tuple[list[int], slice]:
    """Tokens of a prompt with the question before or after the document, and where that is."""
    parts = (question, document) if first else (document, question)
    text = chat_text(tokenizer, "\n\n".join(parts))
    encoded = encode(tokenizer, text, return_offsets_mapping=True)
    begin = text.index(document)
    inside = [
        number
        for number, (left, right) in enumerate(encoded["offset_mapping"])
        if begin <= left < right <= begin + len(document)  # special tokens have no text
    ]
    return encoded["input_ids"], slice(inside[0], inside[-1] + 1)


def observe(
    document: Annotated[
        Path | None, typer.Argument(help="File with a document; essays with a needle if none.")
    ] = None,
    question: Annotated[
        list[str] | None, typer.Option(help="About it; may be repeated. The first is answered.")
    ] = None,
    model: Model = "smollm2",
    tokens: Annotated[int, typer.Option(min=200, help="Of the document, at most.")] = 1500,
    window: Annotated[int, typer.Option(min=1, help="Queries of a window.")] = 128,
    windows: Annotated[int, typer.Option(min=1, help="Of the prompt, from its end.")] = 8,
    new_tokens: Annotated[int, typer.Option(min=1, help="Of the answer.")] = 128,
    answer_window: Annotated[
        int, typer.Option(min=1, help="The question's and the answer's windows.")
    ] = 32,
    share: Annotated[
        float, typer.Option(min=0.001, max=1, help="Of the tokens that count as important.")
    ] = 0.1,
    dtype: Dtype = "auto",
    device: Device = None,
    out: Annotated[Path, typer.Option(help="Picture; the numbers go beside it.")] = Path(
        "observe.png"
    ),
) -> None:
    """Measure whether the prompt's end knows what the answer will attend to."""
    need("matplotlib", "The picture", "plots")
    import torch
    import transformers
    from rich.console import Console
    from rich.progress import Progress

    from kvcompress.models import load
    from kvcompress_eval.measure import environment
    from kvcompress_eval.needle import make_needle
    from kvcompress_eval.observations import (
        between_questions,
        by_answer_window,
        by_place,
        by_prompt_window,
        watch,
    )
    from kvcompress_eval.plots import plot_observations

    if document is not None and not document.is_file():
        raise typer.BadParameter(f"{str(document)!r} is not a file. Give a file with a document.")
    transformers.utils.logging.disable_progress_bar()
    loaded, tokenizer = load(model, dtype=dtype, device=device)
    if document is None:
        hidden = make_needle(tokenizer, tokens, 0.5)
        text = tokenizer.decode(hidden.input_ids, skip_special_tokens=True)
    else:
        text = read_prompt(document)
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][:tokens]
    text = str(tokenizer.decode(ids)).strip()
    asked = question or list(QUESTIONS)
    console = Console()
    found: dict[str, Tensor] = {}
    with Progress(console=console) as progress:
        task = progress.add_task("watching", total=len(asked) + 2)

        def seen(question: str, first: bool, size: int, count: int, new: int) -> Any:
            prompt, place = _prompt(tokenizer, text, question, first)
            given = torch.tensor([prompt], device=loaded.device)
            attention = watch(loaded, given, window=size, windows=count, new_tokens=new)
            progress.advance(task)
            return attention, place

        long, _ = seen(asked[0], False, window, windows, new_tokens)
        found["prompt windows"] = by_prompt_window(long, share)
        short = [seen(each, False, answer_window, 1, new_tokens) for each in asked]
        found["answer windows"] = by_answer_window(short[0][0], share)
        place = short[0][1]
        found["questions"] = between_questions([each for each, _ in short], place, share)
        found["question last"] = by_place(short[0][0], place, share)
        early, place = seen(asked[0], True, answer_window, 1, new_tokens)
        found["question first"] = by_place(early, place, share)
    for name, rates in found.items():
        shown = rates.flatten(1).mean(dim=1) if rates.ndim > 1 else rates
        console.print(
            f"{name}: mean {rates.mean():.3f}, layers {shown.min():.3f} to {shown.max():.3f}",
            highlight=False,
        )
    title = f"{model}: hit rates, important: {100 * share:g} % of the tokens; by chance {share:g}"
    plot_observations(found, share, out, title)
    record = {
        "model": model,
        "prompt_tokens": long.tokens,
        "window": window,
        "answer_window": answer_window,
        "new_tokens": new_tokens,
        "share": share,
        "questions": asked,
        **environment(loaded),
        "rates": {name: rates.tolist() for name, rates in found.items()},
    }
    save_numbers(out, record, console)
