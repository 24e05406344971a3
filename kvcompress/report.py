"""Numbers about one cache: what it has seen, what it holds, what that costs."""

from array import array
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class LayerCounts:
    """Running numbers of one hosted layer; plain integers, kept after the cache is gone."""

    layer_idx: int
    seen: int = 0
    held: int = 0
    allocated_bytes: int = 0
    row_bytes: int = 0
    settled: int = 0
    """Rows that the last eviction left."""
    budget: int | None = None
    """Rows after an eviction at decode; None until a prompt has ended."""
    spared: int = 0
    """Rows at the front that are kept at decode beside the budget."""
    policy_seconds: float = 0.0


@dataclass(frozen=True)
class LayerReport:
    """One layer of the model. Layers that are not hosted keep what transformers gives them."""

    layer_idx: int
    hosted: bool
    seen_tokens: int = 0
    held_tokens: int = 0
    dense_bytes: int = 0
    held_bytes: int = 0
    allocated_bytes: int = 0
    policy_seconds: float = 0.0


@dataclass(frozen=True)
class Report:
    """A snapshot of one cache; it holds no tensors. `print(report)` shows it as a table.

    Bytes are of all rows of the batch. `dense_bytes` is what the hosted layers would hold without
    eviction, `held_bytes` what their rows take, `allocated_bytes` what is really allocated: rows,
    slack for rows to come, positions and state. Tokens are counted per KV head; totals over
    layers add them up.
    """

    policy: str
    layers: tuple[LayerReport, ...]
    history: tuple[tuple[int, int], ...]
    """After every forward: tokens seen, and tokens held summed over hosted layers."""

    def _total(self, name: str) -> Any:
        return sum(getattr(layer, name) for layer in self.layers if layer.hosted)

    @property
    def hosted_layers(self) -> int:
        """Layers that the policy acts on."""
        return sum(layer.hosted for layer in self.layers)

    @property
    def seen_tokens(self) -> int:
        """Summed over hosted layers."""
        return int(self._total("seen_tokens"))

    @property
    def held_tokens(self) -> int:
        """Summed over hosted layers."""
        return int(self._total("held_tokens"))

    @property
    def dense_bytes(self) -> int:
        """What the hosted layers would hold without eviction."""
        return int(self._total("dense_bytes"))

    @property
    def held_bytes(self) -> int:
        """What the rows of the hosted layers take."""
        return int(self._total("held_bytes"))

    @property
    def allocated_bytes(self) -> int:
        """What is allocated for the hosted layers."""
        return int(self._total("allocated_bytes"))

    @property
    def policy_seconds(self) -> float:
        """Host time spent scoring and evicting; on an accelerator the work itself may run on."""
        return float(self._total("policy_seconds"))

    @property
    def compression(self) -> float:
        """Dense bytes / held bytes."""
        return self.dense_bytes / self.held_bytes if self.held_bytes else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        totals = ("seen_tokens", "held_tokens", "dense_bytes", "held_bytes", "allocated_bytes")
        return {
            "policy": self.policy,
            "hosted_layers": self.hosted_layers,
            **{name: getattr(self, name) for name in (*totals, "policy_seconds", "compression")},
            "layers": [asdict(layer) for layer in self.layers],
            "history": [list(entry) for entry in self.history],
        }

    def __str__(self) -> str:
        lines = [
            f"policy {self.policy}",
            f"{'layers':<12}{'seen':>8}{'held':>8}{'dense MiB':>11}{'held MiB':>10}"
            f"{'allocated':>11}{'policy ms':>11}",
        ]
        for first, last in _runs(self.layers):
            group = self.layers[first : last + 1]
            name = str(group[0].layer_idx)
            if last > first:
                name += f"-{group[-1].layer_idx}"
            if not group[0].hosted:
                lines.append(f"{name:<12}{'left alone':>16}")
                continue
            dense, held, allocated = (
                sum(getattr(layer, kind) for layer in group) / 2**20
                for kind in ("dense_bytes", "held_bytes", "allocated_bytes")
            )
            milliseconds = 1000 * sum(layer.policy_seconds for layer in group)
            lines.append(
                f"{name:<12}{group[0].seen_tokens:>8}{group[0].held_tokens:>8}{dense:>11.2f}"
                f"{held:>10.2f}{allocated:>11.2f}{milliseconds:>11.1f}"
            )
        lines.append(
            f"{self.hosted_layers} of {len(self.layers)} layers hosted, "
            f"{self.dense_bytes / 2**20:.2f} MiB -> {self.held_bytes / 2**20:.2f} MiB "
            f"({self.compression:.1f}x)"
        )
        return "\n".join(lines)


def _runs(layers: tuple[LayerReport, ...]) -> list[tuple[int, int]]:
    """Neighbouring layers with equal counts, as index ranges."""
    runs: list[tuple[int, int]] = []
    for index, layer in enumerate(layers):
        key = (layer.hosted, layer.seen_tokens, layer.held_tokens)
        if runs:
            other = layers[runs[-1][0]]
            if key == (other.hosted, other.seen_tokens, other.held_tokens):
                runs[-1] = (runs[-1][0], index)
                continue
        runs.append((index, index))
    return runs


class History:
    """Tokens seen and held after every forward, in 16 bytes a forward."""

    def __init__(self) -> None:
        self._seen, self._held = array("q"), array("q")

    def add(self, seen: int, held: int) -> None:
        """One more forward."""
        self._seen.append(seen)
        self._held.append(held)

    def entries(self) -> tuple[tuple[int, int], ...]:
        """All forwards, oldest first."""
        return tuple(zip(self._seen, self._held, strict=True))


def make_report(
    policy: str, model_layers: int, counts: list[LayerCounts], history: History
) -> Report:
    """A snapshot of the running numbers."""
    by_index = {count.layer_idx: count for count in counts}
    layers = []
    for index in range(model_layers):
        count = by_index.get(index)
        if count is None:
            layers.append(LayerReport(index, hosted=False))
            continue
        layers.append(
            LayerReport(
                layer_idx=index,
                hosted=True,
                seen_tokens=count.seen,
                held_tokens=count.held,
                dense_bytes=count.seen * count.row_bytes,
                # Quantized rows take what is allocated for them.
                held_bytes=min(count.held * count.row_bytes, count.allocated_bytes),
                allocated_bytes=count.allocated_bytes,
                policy_seconds=count.policy_seconds,
            )
        )
    return Report(policy, tuple(layers), history.entries())
