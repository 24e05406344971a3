"""Where parts of a prompt stand among its tokens, for a policy's `protect` and `fair`."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from kvcompress.errors import ShapeError

Range = tuple[int, int]
"""First token, and the one behind the last."""


def text_ranges(
    tokenizer: PreTrainedTokenizerBase, text: str, *parts: str, **options: Any
) -> list[Range]:
    """The tokens of parts of a text; tokens that a part shares with its neighbours included.

        ranges = text_ranges(tokenizer, prompt, "Answer in French.")
        policy = SnapKVPolicy(capacity=512, protect=ranges)

    Args:
        tokenizer: A fast one.
        text: The whole prompt, as it is given to the tokenizer.
        *parts: Each must be in the text, and once.
        **options: For the tokenizer, such as add_special_tokens=False.

    Raises:
        ShapeError: A part is empty, or is not in the text once.
    """
    encoded: Any = tokenizer(text, return_offsets_mapping=True, **options)
    ranges = []
    for part in parts:
        count = text.count(part) if part else 0
        if count != 1:
            raise ShapeError(
                f"{part!r} is {count} times in the text, and which tokens are meant would not be "
                "known. Give a part that is there once."
            )
        begin = text.index(part)
        ranges.append(_tokens_of(encoded["offset_mapping"], begin, begin + len(part)))
    return ranges


def role_ranges(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *roles: str,
    **options: Any,
) -> list[Range]:
    """The tokens of the messages of some roles, with what the chat template puts around them.

        ranges = role_ranges(tokenizer, messages, "system", add_generation_prompt=True)

    Args:
        tokenizer: With a chat template.
        messages: The conversation.
        *roles: Of the messages that are meant; system if none is given.
        **options: As they are given to apply_chat_template.

    Raises:
        ShapeError: No message has such a role, or the template writes the first messages of a
            conversation otherwise than those of a longer one.
    """
    wanted = roles or ("system",)
    ranges = []
    whole = _tokens(tokenizer, messages, options)
    for number, message in enumerate(messages):
        if message.get("role") not in wanted:
            continue
        shorter = {**options, "add_generation_prompt": False}
        end = _tokens(tokenizer, messages[: number + 1], shorter)
        start = _tokens(tokenizer, messages[:number], shorter) if number else []
        if whole[: len(end)] != end or end[: len(start)] != start:
            raise ShapeError(
                f"The chat template writes message {number} ({message.get('role')}) otherwise in a "
                "longer conversation, so its tokens are not known. Use text_ranges with its text."
            )
        ranges.append((len(start), len(end)))
    if not ranges:
        found = sorted({str(message.get("role")) for message in messages})
        raise ShapeError(
            f"No message is of the role {' or '.join(wanted)}; there are {', '.join(found)}."
        )
    return ranges


def _tokens(tokenizer: Any, messages: Sequence[Mapping[str, Any]], options: Any) -> list[int]:
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _tokens_of(offsets: Sequence[tuple[int, int]], begin: int, end: int) -> Range:
    inside = [
        number for number, (left, right) in enumerate(offsets) if left < end and right > begin
    ]
    return inside[0], inside[-1] + 1
