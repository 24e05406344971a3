"""Summarise a long document that is read in chunks, in memory that does not grow with its length.

    python examples/summarise.py
    python examples/summarise.py --model MODEL --document book.txt --tokens 100000 --capacity 4096

After every chunk the cache is cut to twice the capacity, and at the end to the capacity itself, by
the votes of the prompt's last tokens, which ask for the summary. A plain prefill is beside it, once
whole and once cut after it was read: its peak is the whole prompt in either case.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from kvcompress_eval.console import show_table
from kvcompress_eval.measure import cache_of, size_of
from rich.console import Console
from rouge import Rouge

from kvcompress import press
from kvcompress.models import load
from kvcompress.session import cache_argument
from kvcompress.timing import clock

LOOKAHEAD = 32
"""The prompt's last tokens, which ask for the summary, vote after every chunk."""


@dataclass
class Summary:
    """A summary, and what its cache took."""

    text: str
    peak_tokens: int
    """The most rows that a layer held at a time."""
    mib: float
    """Held at the end."""
    seconds: float
    rouge: dict[str, float]
    """F1 against the plain summary: rouge-1, rouge-2, rouge-l."""


def document_text(document: Path) -> str:
    """A file, or all files of a folder."""
    files = sorted(document.glob("*.txt")) if document.is_dir() else [document]
    if not files or not all(file.is_file() for file in files):
        raise typer.BadParameter(f"{document} is no text file and no folder with .txt files.")
    return "\n\n".join(file.read_text(encoding="utf-8").strip() for file in files)


def prompt_of(tokenizer: Any, text: str, tokens: int) -> Any:
    """The document's first tokens and the task, as token ids."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"][:tokens]
    task = "\n\nWrite a summary of the text above."
    message = [{"role": "user", "content": tokenizer.decode(ids) + task}]
    options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    return tokenizer.apply_chat_template(message, **options)


def summarise(
    model: Any,
    tokenizer: Any,
    inputs: Any,
    max_new_tokens: int,
    policy: str | None,
    chunk_size: int | None,
) -> Summary:
    """One summary: from the full cache without a policy, from chunks if their size is given."""
    given: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "do_sample": False,
        "return_dict_in_generate": True,
    }
    prompt, started = inputs["input_ids"].shape[1], clock()
    with press(model, policy) if policy else nullcontext() as session:
        if session and chunk_size:
            cache = session.prefill(inputs["input_ids"], chunk_size=chunk_size, lookahead=LOOKAHEAD)
            given[cache_argument(model)] = cache
        output = model.generate(**inputs, **given)
    seconds = clock() - started
    held, held_bytes = size_of(cache_of(output))
    if session and chunk_size:
        report = cache.report()
        # Written after every forward; while the prompt is read, the look-ahead comes on top.
        held = max(
            rows // report.hosted_layers + (LOOKAHEAD if seen < prompt else 0)
            for seen, rows in report.history
        )
    elif session:
        held = prompt  # a prefill at once holds the whole prompt first
    new = output.sequences[0, prompt:]
    return Summary(
        text=tokenizer.decode(new, skip_special_tokens=True).strip(),
        peak_tokens=held,
        mib=held_bytes / 2**20,
        seconds=seconds,
        rouge={},
    )


def main(
    model: str = "smollm2",
    document: Path = Path(__file__).parent / "documents",
    tokens: int = 2000,
    capacity: int = 512,
    chunk_size: int = 256,
    max_new_tokens: int = 96,
) -> list[Summary]:
    """Summarise a document: plain, cut after it was read, and read in chunks."""
    text = document_text(document)
    loaded, tokenizer = load(model)
    inputs = prompt_of(tokenizer, text, tokens).to(loaded.device)
    policy = f"snapkv:capacity={capacity}"
    caches = {
        "plain": (None, None),
        "cut after reading": (policy, None),
        f"chunks of {chunk_size}": (policy, chunk_size),
    }
    given = loaded, tokenizer, inputs, max_new_tokens
    summaries = [summarise(*given, *cache) for cache in caches.values()]
    rows: list[tuple[str, ...]] = [
        ("cache", "summary", "peak held", "MiB", "s", "ROUGE-1", "ROUGE-L")
    ]
    for name, one in zip(caches, summaries, strict=True):
        if one.text and summaries[0].text:
            scores = Rouge().get_scores(one.text, summaries[0].text)[0]
            one.rouge = {kind: score["f"] for kind, score in scores.items()}
        overlap = [f"{one.rouge.get(kind, 0.0):.2f}" for kind in ("rouge-1", "rouge-l")]
        took = str(one.peak_tokens), f"{one.mib:.1f}", f"{one.seconds:.1f}"
        rows.append((name, one.text, *took, *overlap))
    prompt = inputs["input_ids"].shape[1]
    title = f"A prompt of {prompt} tokens, {policy}; ROUGE against the plain summary"
    show_table(Console(), title, rows)
    return summaries


if __name__ == "__main__":
    typer.run(main)
