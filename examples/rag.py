"""Answer questions from a folder of documents: the full cache against a compressed one.

    python examples/rag.py
    python examples/rag.py --model MODEL --documents notes --question "Who ...?" --expect Smith

BM25 finds the passages, all of them go into one long prompt, and the policy decides what of the
prompt stays in the cache for the answer. Every sentence carries the number of its passage. If the
model names none, the answer is traced by its words: to the passage that has most of what the
answer adds to the question. Whether that passage really has the answer is checked and printed.
"""

import re
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import bm25s
import typer
from kvcompress_eval.console import show_table
from kvcompress_eval.measure import cache_of, size_of
from rich.console import Console

from kvcompress import press
from kvcompress.models import load
from kvcompress.timing import TimedStreamer

QUESTIONS = {
    "Who is the engineer for the electric boat?": "Nakamura",
    "How much does a car on the Maud Ellery cost?": "38 crowns",
}
"""What is asked of the folder beside this file, and what the right answer says."""


@dataclass
class Answer:
    """What one cache answered, what it cites, and what it took."""

    text: str
    cited: int | None
    """Number of a passage."""
    cited_by: str
    right: bool
    """It says what was expected."""
    supported: bool
    """So does the cited passage."""
    held_tokens: int
    mib: float
    prefill_seconds: float
    decode_ms: float

    def verdict(self) -> str:
        """What came of the check, in words."""
        answer = "right" if self.right else "WRONG"
        if self.cited is None:
            return f"is {answer} and cites nothing"
        has = "contains" if self.supported else "does NOT contain"
        what = "it" if self.right else "the right one"
        return f"is {answer} and cites [{self.cited}], which {has} {what}"


def retrieve(documents: list[str], question: str, count: int) -> list[str]:
    """The passages that fit a question; the best one last, where it is next to the question."""
    index = bm25s.BM25()
    index.index(bm25s.tokenize(documents, stopwords="en", show_progress=False), show_progress=False)
    query = bm25s.tokenize(question, stopwords="en", show_progress=False)
    found, _ = index.retrieve(query, k=min(count, len(documents)), show_progress=False)
    return [documents[number] for number in reversed(found[0])]


def write_prompt(passages: list[str], question: str) -> str:
    """All passages and the question; `[3]` stands behind every sentence of passage 3."""
    numbered = (
        re.sub(r"(?<=[.?!])\s+|\Z", f" [{number}] ", passage.strip()).strip()
        for number, passage in enumerate(passages, start=1)
    )
    return "\n\n".join([*numbered, f"Answer in one sentence, from the passages above. {question}"])


def words(text: str) -> set[str]:
    """The words and numbers of a text."""
    return set(re.findall(r"\w+", text.lower()))


def says(text: str, expected: str) -> bool:
    """Whether a text has these words, as whole words."""
    return re.search(rf"(?<!\w){re.escape(expected)}(?!\w)", text, re.IGNORECASE) is not None


def cite(text: str, question: str, passages: list[str]) -> tuple[int | None, str]:
    """The passage that an answer stands on, and who says so."""
    named = [int(number) for number in re.findall(r"\[(\d+)\]", text)]
    if named:
        return (named[0] if 1 <= named[0] <= len(passages) else None), "the model"
    new = words(text) - words(question)
    shared = [len(new & words(passage)) for passage in passages]
    best = max(range(len(passages)), key=lambda number: (shared[number], number))
    return (best + 1 if shared[best] else None), "its words"


def answer(
    model: Any, tokenizer: Any, passages: list[str], question: str, expect: str, policy: str | None
) -> Answer:
    """Ask once, from the full cache if no policy is given."""
    message = [{"role": "user", "content": write_prompt(passages, question)}]
    options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    inputs = tokenizer.apply_chat_template(message, **options).to(model.device)
    timed = TimedStreamer()
    options = {"max_new_tokens": 40, "do_sample": False, "return_dict_in_generate": True}
    with press(model, policy) if policy else nullcontext():
        output = model.generate(**inputs, **options, streamer=timed)
    new = output.sequences[0, inputs["input_ids"].shape[1] :]
    text = tokenizer.decode(new, skip_special_tokens=True).strip()
    cited, cited_by = cite(text, question, passages)
    held, held_bytes = size_of(cache_of(output))
    return Answer(
        text=text,
        cited=cited,
        cited_by=cited_by,
        right=says(text, expect),
        supported=cited is not None and says(passages[cited - 1], expect),
        held_tokens=held,
        mib=held_bytes / 2**20,
        prefill_seconds=timed.prefill_seconds,
        decode_ms=1000 * median(timed.decode_seconds or [0.0]),
    )


def main(
    model: str = "smollm2",
    policy: str = "snapkv:capacity=512",
    documents: Path = Path(__file__).parent / "documents",
    passages: int = 9,
    question: str | None = None,
    expect: str | None = None,
) -> dict[str, list[Answer]]:
    """Ask the folder questions: from the full cache, then from a compressed one."""
    texts = [file.read_text(encoding="utf-8") for file in sorted(documents.glob("*.txt"))]
    if not texts:
        raise typer.BadParameter(
            f"{documents} has no .txt files. Give --documents a folder of them."
        )
    if (question is None) != (expect is None):
        raise typer.BadParameter("Give --question together with --expect, words of its answer.")
    asked = QUESTIONS if question is None or expect is None else {question: expect}
    console = Console()
    loaded, tokenizer = load(model)
    answers: dict[str, list[Answer]] = {}
    for each, expected in asked.items():
        found = retrieve(texts, each, passages)
        both = [answer(loaded, tokenizer, found, each, expected, cache) for cache in (None, policy)]
        answers[each] = both
        rows = [("cache", "answer", "cites", "by", "held", "MiB", "prefill s", "ms/token")]
        for name, one in zip(("full", policy), both, strict=True):
            cited = f"[{one.cited}]" if one.cited else "-"
            took = (f"{one.mib:.1f}", f"{one.prefill_seconds:.1f}", f"{one.decode_ms:.0f}")
            rows.append((name, one.text, cited, one.cited_by, str(one.held_tokens), *took))
        show_table(console, each, rows)
        for name, one in zip(("full", "compressed"), both, strict=True):
            console.print(f"The {name} answer {one.verdict()}.", markup=False)
            if one.cited:
                title = found[one.cited - 1].splitlines()[0]
                console.print(f"  [{one.cited}] {title}", markup=False, highlight=False)
    return answers


if __name__ == "__main__":
    typer.run(main)
