"""A streamed conversation in a cache of bounded size, beside the full cache.

    python examples/chat.py
    python examples/chat.py --model MODEL --capacity 1024 --interactive

SnapKV-Decoding cuts the cache back to its capacity at the end of every message, and again every
`interval` tokens of an answer: between messages it holds at most capacity + interval - 1 rows,
however long the conversation gets. What nobody asked about for a while is forgotten, unless it is
protected: here the first message, which says who is talking.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import typer
from kvcompress_eval.console import show_table
from kvcompress_eval.measure import size_of
from rich.console import Console
from transformers import DynamicCache, TextStreamer

from kvcompress import CompressedCache, policy_from, role_ranges
from kvcompress.models import load
from kvcompress.session import cache_argument

SCRIPT = (
    "Hello! My name is Ines, and I keep bees.",
    "Name three flowers that bees like.",
    "How can I keep my bees warm in winter?",
    "Write two sentences about a harbour.",
    "What is my name?",
)


@dataclass
class Turn:
    """One answer, and the cache after it."""

    question: str
    answer: str
    seen_tokens: int
    held_tokens: int
    mib: float


class Chat:
    """A conversation that goes on in one cache; only what the cache has not seen is fed."""

    def __init__(self, model: Any, tokenizer: Any, cache: Any) -> None:
        self.model, self.tokenizer, self.cache = model, tokenizer, cache
        self.ids = torch.empty(1, 0, dtype=torch.long, device=model.device)
        self.turns: list[Turn] = []

    def say(self, message: str, max_new_tokens: int, streamer: Any = None) -> Turn:
        """Answer one message."""
        self.ids = torch.cat([self.ids, self._tokens(message)], dim=1)
        output = self.model.generate(
            self.ids,
            attention_mask=torch.ones_like(self.ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            streamer=streamer,
            **{cache_argument(self.model): self.cache},
        )
        answer = self.tokenizer.decode(output[0, self.ids.shape[1] :], skip_special_tokens=True)
        self.ids = output  # as it was generated: the same text could have other tokens
        held, held_bytes = size_of(self.cache)
        turn = Turn(
            question=message,
            answer=answer.strip(),
            seen_tokens=self.cache.get_seq_length(),
            held_tokens=held,
            mib=held_bytes / 2**20,
        )
        self.turns.append(turn)
        return turn

    def _tokens(self, message: str) -> torch.Tensor:
        """A message with what the chat template puts before and behind it."""
        user = {"role": "user", "content": message}
        before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "<answer>"}]
        history = before if self.turns else []
        text = self.tokenizer.apply_chat_template(
            [*history, user], add_generation_prompt=True, tokenize=False
        )
        if self.turns:
            text = text.split("<answer>")[1]
            if int(self.ids[0, -1]) == self.tokenizer.eos_token_id:
                text = text.removeprefix(self.tokenizer.eos_token)  # the model said it itself
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return torch.tensor([ids], device=self.model.device)


def typed() -> Iterator[str]:
    """Messages from the terminal, until an empty one."""
    while message := input("\n> ").strip():
        yield message


def main(
    model: str = "smollm2",
    capacity: int = 128,
    interval: int = 16,
    max_new_tokens: int = 48,
    interactive: bool = False,
) -> dict[str, list[Turn]]:
    """Talk, and show after every answer what is held."""
    policy = policy_from(f"snapkv_decoding:capacity={capacity}:window_size=16:interval={interval}")
    console = Console()
    loaded, tokenizer = load(model)
    if interactive:
        chat = Chat(loaded, tokenizer, CompressedCache(loaded, policy))
        for message in typed():
            answer_aloud(chat, message, max_new_tokens, console)
        return {"bounded": chat.turns}
    first = role_ranges(tokenizer, [{"role": "user", "content": SCRIPT[0]}], "user")
    caches = {
        "full": DynamicCache(config=loaded.config),
        "bounded": CompressedCache(loaded, policy),
        "first message protected": CompressedCache(
            loaded, policy.model_copy(update={"protect": first})
        ),
    }
    chats = {name: Chat(loaded, tokenizer, cache) for name, cache in caches.items()}
    for message in SCRIPT:
        console.print(f"\n> {message}", style="bold", markup=False)
        answer_aloud(chats["bounded"], message, max_new_tokens, console)
        for name in ("full", "first message protected"):
            chats[name].say(message, max_new_tokens)
    rows = [("after the message", *(f"{name}: held, MiB" for name in chats))]
    for number, message in enumerate(SCRIPT):
        turns = [chat.turns[number] for chat in chats.values()]
        rows.append((message, *(f"{turn.held_tokens}, {turn.mib:.1f}" for turn in turns)))
    show_table(console, f"The full cache, and {policy}", rows)
    last = [(name, chat.turns[-1].answer) for name, chat in chats.items()]
    show_table(console, SCRIPT[-1], [("cache", "answer"), *last])
    return {name: chat.turns for name, chat in chats.items()}


def answer_aloud(chat: Chat, message: str, max_new_tokens: int, console: Console) -> None:
    """Answer token by token, then say what is held, and what a full cache would take."""
    streamer = TextStreamer(chat.tokenizer, skip_prompt=True, skip_special_tokens=True)
    turn = chat.say(message, max_new_tokens, streamer)
    full = chat.cache.report().dense_bytes / 2**20
    tokens = f"{turn.held_tokens} of {turn.seen_tokens} tokens"
    console.print(f"{tokens}, {turn.mib:.1f} of {full:.1f} MiB", style="dim")


if __name__ == "__main__":
    typer.run(main)
