"""PyramidKV: SnapKV's vote, with more room in the lower layers."""

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from kvcompress.policy import PositiveInt
from kvcompress_policies.snapkv import SnapKVPolicy, odd


class PyramidKVPolicy(SnapKVPolicy):
    """SnapKV with a budget that falls linearly from the first layer to the last.

    Beside the window, the last layer has the average budget / `beta` and the first one twice the
    average less that; where the first would exceed the prompt, the line is flattened around the
    same average. `capacity` is the mean over the hosted layers.

    Source: Cai et al. 2024, arXiv:2406.02069, section 4; Zefan-Cai/KVCache-Factory,
    `PyramidKVCluster`.
    Differs: the budgets of all layers sum to layers x capacity, by largest remainders, and every
    layer keeps at least one row beside the window. The authors' integer steps miss that sum by up
    to a factor of two when layers are many and budgets small; `rounding="reference"` gives theirs
    to the row.
    """

    name: ClassVar[str] = "pyramidkv"
    per_layer: ClassVar[frozenset[str]] = frozenset()

    capacity: PositiveInt | None = Field(
        default=None,
        description="Mean over the layers of the tokens kept per KV head, the window included. "
        "Default 2048 unless keep_ratio is given.",
    )
    beta: PositiveInt = Field(
        default=20, description="The last layer's share of the average budget is 1 / beta."
    )
    window_size: PositiveInt = Field(
        default=32,
        description="Last tokens of the prompt that vote and are always kept; below capacity.",
    )
    kernel_size: Annotated[PositiveInt, AfterValidator(odd)] = Field(
        default=5, description="Width of the pooling over neighbouring positions; odd."
    )
    rounding: Literal["exact", "reference"] = Field(
        default="exact",
        description="exact: budgets sum to layers x capacity. reference: the authors' integers.",
    )

    def budget(self, prompt_tokens: int, layer_idx: int, num_layers: int) -> int:
        """Rows that this layer keeps: the window, and its place on the line."""
        average = super().budget(prompt_tokens, layer_idx, num_layers)
        prefix, room = average - self.window_size, prompt_tokens - self.window_size
        if prefix >= room or num_layers == 1:
            return average
        if self.rounding == "reference" and prompt_tokens < 2 * prefix:
            return average  # the authors' test for a prompt too short to be spread
        rule = _exact if self.rounding == "exact" else _reference
        return self.window_size + rule(prefix, room, self.beta, num_layers)[layer_idx]


def _exact(average: int, room: int, beta: int, layers: int) -> list[int]:
    """Integers on a falling line with sum layers x average, none below 1 or above `room`."""
    last = max(average / beta, 1.0, 2 * average - room)
    first = 2 * average - last
    line = [first + (last - first) * layer / (layers - 1) for layer in range(layers)]
    whole = [int(value) for value in line]
    # A stable sort gives what is left to the lower of two layers with equal remainders.
    by_remainder = sorted(range(layers), key=lambda layer: whole[layer] - line[layer])
    for layer in by_remainder[: layers * average - sum(whole)]:
        whole[layer] += 1
    return whole


def _reference(average: int, room: int, beta: int, layers: int) -> list[int]:
    """The authors' integer arithmetic."""
    last = average // beta
    first = 2 * average - last
    if first >= room:
        first, last = room, 2 * average - room
    step = (first - last) // (layers - 1)
    return [first - layer * step for layer in range(layers)]
