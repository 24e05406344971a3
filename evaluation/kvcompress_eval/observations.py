"""What the prompt's end knows of what the answer will attend to.

The observations on which SnapKV rests (arXiv:2404.14469, section 3 and figures 2 to 5), on any
model and document. A token of the prompt is important to some queries if it is among the share of
the prompt that they attend to most. The paper states neither share nor threshold.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Bool, Float
from pydantic import PrivateAttr
from torch import Tensor

from kvcompress.errors import EvaluationError
from kvcompress.policy import LayerView, Policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class _Watching(Policy):
    """Evicts nothing; shows every layer's queries and keys to somebody."""

    name: ClassVar[str] = "watching"
    needs = frozenset({"observe"})

    _look: Callable[[LayerView], None] = PrivateAttr()

    def observe(self, view: LayerView) -> Mapping[str, Tensor]:
        self._look(view)
        return view.state


@dataclass(frozen=True)
class Attention:
    """What the prompt's tokens get, summed over the queries of a window."""

    prompt: Float[Tensor, "layers windows kv_heads tokens"]
    """From the prompt's last windows, oldest first; 0 for tokens that a window does not see."""
    generated: Float[Tensor, "layers windows kv_heads tokens"]
    """From the answer, in windows."""
    answer: list[int]
    window: int

    @property
    def tokens(self) -> int:
        """Of the prompt."""
        return self.prompt.shape[-1]


def watch(
    model: "PreTrainedModel",
    input_ids: Tensor,
    *,
    window: int,
    windows: int,
    new_tokens: int,
) -> Attention:
    """Read a prompt and answer it greedily, and note the attention that the prompt's tokens get.

    Args:
        model: Any supported model.
        input_ids: 1 x prompt.
        window: Queries of a window.
        windows: How many of the prompt, counted from its end.
        new_tokens: Of the answer, exactly; in windows as long as those of the prompt.

    Raises:
        EvaluationError: The prompt is shorter than these windows.
    """
    from kvcompress import CompressedCache
    from kvcompress.session import cache_argument

    tokens = input_ids.shape[1]
    if windows * window >= tokens:
        raise EvaluationError(
            f"{windows} windows of {window} do not fit into a prompt of {tokens} tokens and leave "
            "something before them. Give fewer, or a longer prompt."
        )
    ends = [tokens - window * number for number in reversed(range(windows))]
    later = -(-new_tokens // window)
    prompt: dict[int, list[Tensor]] = {}
    generated: dict[int, Tensor] = {}

    def look(view: LayerView) -> None:
        held, queries = view.held, view.query.shape[2]
        if view.phase == "prefill":
            prompt[view.layer_idx] = [
                _received(view, end, view.query[:, :, end - window : end], tokens) for end in ends
            ]
            return
        first = held - queries - tokens
        own = generated.setdefault(view.layer_idx, torch.zeros(later, view.kv_heads, tokens))
        for number in range(queries):
            query = view.query[:, :, number : number + 1]
            seen = held - queries + number + 1
            own[(first + number) // window] += _received(view, seen, query, tokens)

    policy = _Watching(capacity=tokens + new_tokens)
    policy._look = look
    cache = CompressedCache(model, policy)
    generate: Any = model.generate
    output = generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        **{cache_argument(model): cache},
        max_new_tokens=new_tokens + 1,  # the last one is not fed
        min_new_tokens=new_tokens + 1,
        do_sample=False,
    )
    layers = sorted(prompt)
    return Attention(
        torch.stack([torch.stack(prompt[layer]) for layer in layers]),
        torch.stack([generated[layer] for layer in layers]),
        output[0, tokens:-1].tolist(),
        window,
    )


def _received(view: LayerView, end: int, query: Tensor, tokens: int) -> Tensor:
    """What the first `tokens` rows get from queries that end at row `end`, kv_heads x tokens."""
    part = replace(
        view,
        query=query,
        key=view.key[:, :, :end],
        value=view.value[:, :, :end],
        locate=lambda: view.positions[..., :end],
    )
    received = part.attention_received()[0, :, :tokens].cpu()
    return torch.nn.functional.pad(received, (0, tokens - received.shape[-1]))


def important(
    attention: Float[Tensor, "*lead tokens"], share: float, before: int
) -> Bool[Tensor, "*lead {before}"]:
    """The share of the first `before` tokens that get most, at least one."""
    among = attention[..., :before]
    count = max(1, round(share * before))
    best = among.topk(count, dim=-1).indices
    return torch.zeros(among.shape, dtype=torch.bool).scatter_(-1, best, True)


def hit_rate(
    found: Bool[Tensor, "*lead tokens"], wanted: Bool[Tensor, "*lead tokens"]
) -> Float[Tensor, " *lead"]:
    """How many of the wanted tokens were found (equation 7 of the paper)."""
    return (found & wanted).sum(dim=-1) / wanted.sum(dim=-1)


def by_prompt_window(attention: Attention, share: float) -> Float[Tensor, "layers windows"]:
    """Figure 2: of what the answer finds important, how much each window of the prompt does too.

    Each window is judged on the tokens before it, the only ones that all its queries see.
    """
    answer = attention.generated.sum(dim=1)
    rates = []
    for number in range(attention.prompt.shape[1]):
        before = attention.tokens - attention.window * (attention.prompt.shape[1] - number)
        found = important(attention.prompt[:, number], share, before)
        rates.append(hit_rate(found, important(answer, share, before)).mean(dim=-1))
    return torch.stack(rates, dim=1)


def by_answer_window(attention: Attention, share: float) -> Float[Tensor, "layers windows"]:
    """Figure 3: the same for the prompt's last window, against each window of the answer."""
    before = attention.tokens - attention.window
    found = important(attention.prompt[:, -1:], share, before)
    return hit_rate(found, important(attention.generated, share, before)).mean(dim=-1)


def between_questions(
    attentions: Sequence[Attention], document: slice, share: float
) -> Float[Tensor, "layers questions questions"]:
    """Figure 4: of the document's tokens that one question's window votes for, how many another's.

    Args:
        attentions: For each question after the same document.
        document: Where its tokens are, in all of them.
        share: Of the document.
    """
    votes = [
        important(each.prompt[:, -1, :, document], share, document.stop - document.start)
        for each in attentions
    ]
    return torch.stack(
        [torch.stack([hit_rate(a, b).mean(dim=-1) for b in votes], dim=1) for a in votes], dim=1
    )


def by_place(attention: Attention, document: slice, share: float) -> Float[Tensor, " layers"]:
    """Figure 5: of the document's tokens that the answer uses, how many the last window finds."""
    before = document.stop - document.start
    found = important(attention.prompt[:, -1, :, document], share, before)
    used = important(attention.generated.sum(dim=1)[..., document], share, before)
    return hit_rate(found, used).mean(dim=-1)
