"""An agent's tool definitions in a bounded cache: left to the policy, and protected.

    python examples/agent_tools.py
    python examples/agent_tools.py --model MODEL --policy h2o:capacity=2048:interval=64

The prompt begins with tool definitions; every request is to be answered by a call of the right one,
and the tool's result goes into the conversation. After a few requests the cache is full and
something has to go. `protect=` keeps the definitions in every head of every layer.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch
import typer
from kvcompress_eval.console import show_table
from kvcompress_eval.measure import size_of
from rich.console import Console
from transformers import DynamicCache

from kvcompress import CompressedCache, policy_from, role_ranges
from kvcompress.models import load
from kvcompress.session import cache_argument

TOOLS = {
    "boat_times": ("When a boat leaves.", "When does the boat to Hesk leave?", "Hesk"),
    "ticket_price": ("What a ticket costs.", "What does a ticket to Hesk cost?", "Hesk"),
    "weather_report": ("Wind and waves.", "Is it windy at Tarvel?", "Tarvel"),
    "lost_property": ("Search for lost things.", "I lost my brown hat.", "brown hat"),
    "reserve_car": (
        "Reserve a place for a car.",
        "Reserve a place for my car on Monday.",
        "Monday",
    ),
}
"""Name: what it does, an example of a request, and the argument of its call."""

RESULTS = {
    "boat_times": "Boats leave at 7:30, 11:00, 15:20 and 18:40, on Sundays at 8:15 only.",
    "ticket_price": "A single ticket costs 11 crowns, a return ticket 16 crowns and 50 cents.",
    "weather_report": "Force 4 from the west, waves of one metre, and showers in the evening.",
    "lost_property": "Nothing like that was found. Ask again when the office opens on Tuesday.",
    "reserve_car": "One place for a car is reserved, at 38 crowns, to be paid on board.",
}
REQUESTS = (
    ("When does the boat to Morvay leave?", "boat_times"),
    ("What does a ticket to Stour cost?", "ticket_price"),
    ("When does the boat to Stour leave?", "boat_times"),
    ("What does a ticket to Little Hesk cost?", "ticket_price"),
    ("When does the boat to Little Hesk leave?", "boat_times"),
    ("Is it windy at Stour?", "weather_report"),
    ("Reserve a place for my car on Friday.", "reserve_car"),
    ("I lost my green umbrella.", "lost_property"),
)
"""The last tools are asked for late, when their definitions are old."""


@dataclass
class Run:
    """A conversation with one cache."""

    answers: list[str]
    right: int
    """Answers that call the right tool."""
    definitions_held: float
    """Share of the definitions' rows that are held at the end, over heads and layers."""
    held_tokens: int
    mib: float


def set_up(tokenizer: Any) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """The first messages, and the tools for the chat template if it takes any."""
    task = "You call tools for the passengers of a ferry. Answer every request by one call."
    schemas = [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": purpose,
                "parameters": {"type": "object", "properties": {"about": {"type": "string"}}},
            },
        }
        for name, (purpose, _, _) in TOOLS.items()
    ]
    if "tools" in (tokenizer.chat_template or ""):
        return [{"role": "system", "content": task}], {"tools": schemas}
    # Else in words, with an example of each: a small model calls what it has seen called.
    lines = [f"- {name}: {purpose}" for name, (purpose, _, _) in TOOLS.items()]
    messages = [{"role": "system", "content": "\n".join([task, "", *lines])}]
    for name, (_, request, argument) in TOOLS.items():
        messages.append({"role": "user", "content": request})
        messages.append({"role": "assistant", "content": f"{name}({argument})"})
    return messages, {}


def converse(model: Any, tokenizer: Any, cache: Any, definitions: int) -> Run:
    """All requests on one cache, whose first tokens are the definitions."""
    messages, tools = set_up(tokenizer)
    device, given = model.device, {cache_argument(model): cache}
    ids, answers, right = torch.empty(1, 0, dtype=torch.long, device=device), list[str](), 0
    added: list[dict[str, str]] = []
    for request, wanted in REQUESTS:
        added.append({"role": "user", "content": request})
        text = tokenizer.apply_chat_template(
            [*messages, *added], add_generation_prompt=True, tokenize=False, **tools
        )
        if answers:  # what is new follows the answer, which is fed as it was generated
            text = text.split("<answer>")[1]
            if int(ids[0, -1]) == tokenizer.eos_token_id:
                text = text.removeprefix(tokenizer.eos_token)
        new = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"].to(device)
        ids = torch.cat([ids, new], dim=1)
        mask, end = torch.ones_like(ids), ids.shape[1]
        ids = model.generate(ids, attention_mask=mask, max_new_tokens=16, do_sample=False, **given)
        answers.append(tokenizer.decode(ids[0, end:], skip_special_tokens=True).strip())
        called = re.search(rf"\b({'|'.join(TOOLS)})\b", answers[-1])
        right += called is not None and called[0] == wanted
        result = RESULTS[called[0]] if called else f"There is no such tool: {answers[-1]}"
        asked = {"role": "user", "content": request}
        answer = {"role": "assistant", "content": "<answer>"}
        added = [asked, answer, {"role": "tool", "content": result}]
    layers = cache.layers
    held, held_bytes = size_of(cache)
    return Run(
        answers=answers,
        right=right,
        definitions_held=sum(_share(layer, definitions) for layer in layers) / len(layers),
        held_tokens=held,
        mib=held_bytes / 2**20,
    )


def _share(layer: Any, definitions: int) -> float:
    """How many of the first rows a layer holds; a full cache's layer has no positions."""
    if not hasattr(layer, "positions"):
        return 1.0
    heads = layer.positions.shape[1]
    held = int((layer.positions < definitions).sum())
    return held / float(heads * definitions)


def main(
    model: str = "smollm2",
    policy: str = "snapkv_decoding:capacity=288:window_size=16:interval=16",
) -> dict[str, Run]:
    """Send all requests to a full cache, to a bounded one, and to one that protects the tools."""
    chosen = policy_from(policy)
    loaded, tokenizer = load(model)
    messages, tools = set_up(tokenizer)
    ranges = role_ranges(tokenizer, messages, "system", "user", "assistant", **tools)
    definitions = ranges[-1][1]
    protecting = chosen.model_copy(update={"protect": ranges})
    caches = {
        "full": DynamicCache(config=loaded.config),
        "bounded": CompressedCache(loaded, chosen),
        "bounded, tools protected": CompressedCache(loaded, protecting),
    }
    runs = {name: converse(loaded, tokenizer, cache, definitions) for name, cache in caches.items()}
    console = Console()
    answers = zip(*(run.answers for run in runs.values()), strict=True)
    calls = [(request, *each) for (request, _), each in zip(REQUESTS, answers, strict=True)]
    show_table(console, f"Calls, {policy}", [("request", *runs), *calls])
    rows = [("cache", "right calls", "held of the definitions", "tokens held", "MiB")]
    for name, run in runs.items():
        share = f"{100 * run.definitions_held:.0f} % of {definitions}"
        right = f"{run.right} of {len(REQUESTS)}"
        rows.append((name, right, share, str(run.held_tokens), f"{run.mib:.1f}"))
    show_table(console, "After the last request", rows)
    return runs


if __name__ == "__main__":
    typer.run(main)
