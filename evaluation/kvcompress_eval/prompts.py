"""From a text to the prompt that a model is given."""

from typing import Any


def chat_text(tokenizer: Any, text: str) -> str:
    """A text as one message of a user, ready for an answer; as it is without a chat template."""
    if not tokenizer.chat_template:
        return text
    message = [{"role": "user", "content": text}]
    return str(tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False))
