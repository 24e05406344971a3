"""Which IFEval rows need NLTK's data to be scored, and whether it is there.

lm_eval finds out after everything was generated, and the run dies; this asks before.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from kvcompress.errors import EvaluationError

PUNKT_INSTRUCTIONS = frozenset(
    {"length_constraints:number_sentences", "change_case:capital_word_frequency"}
)
"""Instructions whose check splits the answer into sentences with NLTK's trained Punkt model: by
`count_sentences` and `nltk.word_tokenize` in lm_eval's `tasks/ifeval/instructions.py`."""


def needs_punkt(doc: Mapping[str, Any]) -> bool:
    """Whether scoring this row of any task needs punkt_tab; false for rows of other tasks."""
    return not PUNKT_INSTRUCTIONS.isdisjoint(doc.get("instruction_id_list") or ())


def check_punkt(docs: Iterable[Mapping[str, Any]], instead: str = "") -> None:
    """Refuse rows that could not be scored. Imports NLTK only if a row needs its data.

    Args:
        docs: Rows of IFEval.
        instead: What else the caller offers, a sentence for the message.

    Raises:
        EvaluationError: A row needs punkt_tab, and NLTK or the data is not installed.
    """
    rows = list(docs)
    count = sum(map(needs_punkt, rows))
    missing = _missing() if count else None
    if missing is not None:
        raise EvaluationError(
            f"{count} of {len(rows)} IFEval rows are scored by counting sentences "
            f"({', '.join(sorted(PUNKT_INSTRUCTIONS))}), which {missing} {instead}".strip()
        )


def _missing() -> str | None:
    """What is missing and how to get it, or None."""
    try:
        import nltk  # type: ignore[import-untyped]
    except ImportError:
        return "needs the package nltk. Run: pip install 'kvcompress[eval]'."
    try:
        nltk.data.find("tokenizers/punkt_tab/english/")
    except LookupError:
        return (
            "needs NLTK's punkt_tab data, and it is in none of NLTK's folders. Run: python -m "
            "nltk.downloader punkt_tab. Without a network: copy tokenizers/punkt_tab from a "
            "machine that has it, and set NLTK_DATA to the folder that holds tokenizers."
        )
    return None
