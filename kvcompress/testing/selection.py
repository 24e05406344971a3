"""For tests of policies, yours included: one selection on bare tensors."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Float32, Int, Int64
from torch import Tensor

from kvcompress.errors import PolicyConfigError, ShapeError, UnsupportedModeError
from kvcompress.fair import judge_spans
from kvcompress.plugins import policy_from
from kvcompress.policy import LayerView, Policy
from kvcompress.selection import batch_budget, final_scores, judge
from kvcompress.tensors import left_padding, positions_of, top_positions


def kept_positions(
    policy: Policy | str | Mapping[str, Any],
    query: Float[Tensor, "batch heads q_len head_dim"],
    key: Float[Tensor, "batch kv_heads kv_len head_dim"],
    value: Float[Tensor, "batch kv_heads kv_len value_dim"],
    *,
    scaling: float | None = None,
    attention_mask: Int[Tensor, "batch kv_len"] | None = None,
    layer_idx: int = 0,
    num_layers: int = 1,
) -> Int64[Tensor, "batch kv_heads kept"]:
    """What a policy keeps of one prompt: ascending columns of `key`, per row and KV head.

    Args:
        policy: A policy, or its string or dict form.
        query: After RoPE: the queries of the prompt's last `q_len` tokens.
        key: After RoPE; all tokens of the prompt.
        value: All tokens of the prompt.
        scaling: Factor on the logits; 1/sqrt(head_dim) if not given.
        attention_mask: 1 for real tokens; padding at the left only.
        layer_idx: Among the hosted layers.
        num_layers: Hosted layers.

    Returns:
        All columns if nothing is evicted; -1 at the left where a row keeps fewer real tokens.

    Raises:
        UnsupportedModeError: Padding that is not at the left, or rows of unequal length under
            `keep_ratio`.
    """
    policy = _of_prompt(policy)
    wanted = policy.prompt_query_tokens(layer_idx, num_layers)
    view = view_of(
        policy, query, key, value, scaling, attention_mask, layer_idx, num_layers, wanted
    )
    columns = torch.arange(view.held, device=key.device).expand_as(view.positions)
    if view.budget == view.held:
        index = columns
    else:
        index = top_positions(_final_scores(policy, view), view.budget)
    return torch.where(view.valid.gather(2, index), index, -1)


def scores(
    policy: Policy | str | Mapping[str, Any],
    query: Float[Tensor, "batch heads q_len head_dim"],
    key: Float[Tensor, "batch kv_heads kv_len head_dim"],
    value: Float[Tensor, "batch kv_heads kv_len value_dim"],
    *,
    scaling: float | None = None,
    attention_mask: Int[Tensor, "batch kv_len"] | None = None,
    layer_idx: int = 0,
    num_layers: int = 1,
) -> Float32[Tensor, "batch kv_heads kv_len"]:
    """How a policy scores one prompt: `+inf` where protected, `-inf` on padding.

    Under `fair`, 1 for rows that stay and 0 for others.

    Arguments as for `kept_positions`.
    """
    policy = _of_prompt(policy)
    wanted = policy.prompt_query_tokens(layer_idx, num_layers)
    view = view_of(
        policy, query, key, value, scaling, attention_mask, layer_idx, num_layers, wanted
    )
    return _final_scores(policy, view)


def _final_scores(policy: Policy, view: LayerView) -> Float32[Tensor, "batch kv_heads held"]:
    if policy.fair and view.budget < view.held:
        pads = (~view.valid[:, 0]).sum(dim=-1).tolist()
        return final_scores([judge_spans(policy, view, pads)])[0]
    return final_scores([judge(policy, view)])[0]


def _of_prompt(spec: Policy | str | Mapping[str, Any]) -> Policy:
    policy = policy_from(spec)
    part = policy.part("prefill")
    if part is None:
        raise PolicyConfigError(f"{policy} does not evict when a prompt ends.")
    return part


def view_of(
    policy: Policy,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None = None,
    attention_mask: Tensor | None = None,
    layer_idx: int = 0,
    num_layers: int = 1,
    queries: int | None = None,
) -> LayerView:
    """What a policy is shown when a prompt ends; arguments as for `kept_positions`.

    With `queries`, so many of the last ones rather than as many as the policy reads.
    """
    batch, kv_heads, kv_len, head_dim = key.shape
    if query.shape[2] > kv_len:
        raise ShapeError(
            f"query has {query.shape[2]} tokens and key {kv_len}: give the last queries only."
        )
    policy.check_layers(num_layers)
    pads, lengths = None, [kv_len]
    if attention_mask is not None:
        try:
            pads, by_row = left_padding(attention_mask.bool())
        except ShapeError:
            raise UnsupportedModeError(
                "attention_mask must have its zeros at the left of a row."
            ) from None
        lengths = [kv_len - pad for pad in by_row]
    columns = torch.arange(kv_len, device=key.device).expand(batch, kv_heads, kv_len)
    positions = positions_of(columns, pads)
    facts: dict[str, Any] = {
        "key": key,
        "value": value,
        "kv_heads": kv_heads,
        "locate": lambda: positions,
        "padded": pads is not None,
        "scaling": head_dim**-0.5 if scaling is None else scaling,
        "layer_idx": layer_idx,
        "num_layers": num_layers,
        "seen": kv_len,
        "phase": "prefill",
    }
    state: Mapping[str, Tensor] = {}
    if "observe" in policy.needs:
        state = policy.observe(LayerView(query=query, **facts))
    wanted = policy.query_tokens(layer_idx, num_layers) if queries is None else queries
    last = query[:, :, query.shape[2] - min(wanted, query.shape[2]) :]
    budget = min(batch_budget(policy, lengths, layer_idx, num_layers), kv_len)
    return LayerView(query=last, state=state, budget=budget, **facts)
