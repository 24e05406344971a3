"""From texts and files to the prompts that a model is given."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcompress.errors import EvaluationError

if TYPE_CHECKING:
    from kvcompress_eval.needle import Needle


def digest(value: Any) -> str:
    """Tells values apart that JSON can write, in 16 digits."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Prompt:
    """One prompt, and what is hidden in it if it is a needle's."""

    name: str
    """Of its file, or what is hidden in it."""
    input_ids: list[int]
    needle: "Needle | None" = None

    @property
    def digest(self) -> str:
        """Tells prompts apart that have the same name."""
        return digest(self.input_ids)


def chat_text(tokenizer: Any, text: str) -> str:
    """A text as one message of a user, ready for an answer; as it is without a chat template."""
    if not tokenizer.chat_template:
        return text
    message = [{"role": "user", "content": text}]
    return str(tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False))


def encode(tokenizer: Any, text: str, **options: Any) -> Any:
    """Encode what `chat_text` gave: special tokens are the template's, or the tokenizer's own."""
    return tokenizer(text, add_special_tokens=not tokenizer.chat_template, **options)


def read_prompt(path: Path) -> str:
    """A file's text.

    Raises:
        EvaluationError: There is none, or it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(f"The prompt {path} cannot be read: {error}") from None
    if not text.strip():
        raise EvaluationError(f"The prompt {path} is empty.")
    return text


def tokenize(tokenizer: Any, text: str, chat: bool) -> list[int]:
    """Tokens of a text, as one message of a user if asked for and there is a chat template."""
    encoded = encode(tokenizer, chat_text(tokenizer, text)) if chat else tokenizer(text)
    return list(encoded["input_ids"])
