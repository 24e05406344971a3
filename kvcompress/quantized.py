"""Rows that are quantized once they have been chosen: compress, then quantize.

The arithmetic is that of transformers' quantized layers; here is what is packed, and when.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from kvcompress.report import LayerCounts
from kvcompress.rows import Rows, Spare

RESIDUAL = 128
"""Newest rows in full precision where the backend has no `residual_length` of its own."""


def quantizes(layer: object) -> bool:
    """Whether a cache layer is one of transformers' quantized ones."""
    return isinstance(layer, DynamicLayer) and hasattr(layer, "_quantize")


class QuantizedRows(Rows):
    """The rows of a layer in packed pieces, and the newest ones in full precision.

    While a prompt is open all rows are in full precision, so it is attended to and judged as such.
    When it ends, what stays is packed; later, every `residual_length` new rows are packed as a
    piece of their own.

    Differs from transformers' layers: these pack all rows again each time, so old rows are rounded
    over and over.
    """

    def __init__(self, counts: LayerCounts, spare: Spare, codec: Any) -> None:
        self._codec = codec
        self._residual = getattr(codec, "residual_length", RESIDUAL)
        super().__init__(counts, spare)

    def clear(self) -> None:
        """Forget all of them."""
        super().clear()
        self._packed: list[tuple[Any, Any]] = []
        self._packed_rows = 0
        self._batch: Tensor | None = None  # which rows of the packed batch are those of the batch

    def _unpacked(self, which: int) -> list[Tensor]:
        pieces = [self._codec._dequantize(piece[which]) for piece in self._packed]
        if self._batch is None:
            return pieces
        # Packed rows cannot be selected; a new order of the batch is applied after unpacking.
        return [piece.index_select(0, self._batch) for piece in pieces]

    def _recent(self, rows: Tensor | None) -> Tensor:
        """Those in full precision."""
        assert rows is not None
        return rows[:, :, : self.counts.held - self._packed_rows]

    @property
    def keys(self) -> Tensor:
        """Held keys, in full precision."""
        return torch.cat([*self._unpacked(0), self._recent(self._keys)], dim=2)

    @property
    def values(self) -> Tensor:
        """Held values, in full precision."""
        return torch.cat([*self._unpacked(1), self._recent(self._values)], dim=2)

    def append(self, keys: Tensor, values: Tensor) -> bool:
        """Add rows of new tokens, in full precision."""
        if self._keys is None:
            self.device = keys.device
            self._keys, self._values = keys.clone(), values.clone()
        else:
            self._keys = torch.cat([self._recent(self._keys), keys], dim=2)
            self._values = torch.cat([self._recent(self._values), values], dim=2)
        self.counts.held += keys.shape[2]
        self.counts.seen += keys.shape[2]
        return True

    def pack(self) -> bool:
        """Pack the rows in full precision if they are many, or none is packed. True if done."""
        rows = self.counts.held - self._packed_rows
        if rows == 0 or (self._packed and rows < self._residual):
            return False
        if self._batch is not None:  # a new piece is in the new order of the batch
            self._pack(self.keys, self.values)
        else:
            self._pack(self._recent(self._keys), self._recent(self._values), *self._packed)
        return True

    def drop(self, count: int) -> None:
        """Forget the newest `count` tokens."""
        if count > self.counts.held - self._packed_rows:
            self._unpack()
        super().drop(count)

    def _unpack(self) -> None:
        self._keys, self._values = self.keys, self.values
        self._packed, self._packed_rows, self._batch = [], 0, None

    def _pack(self, keys: Tensor, values: Tensor, *before: tuple[Any, Any]) -> None:
        """Quantize rows behind the pieces `before`; nothing is left in full precision."""
        if not self._codec.is_initialized:
            # Not the codec's own initialization, which may quantize what it is given.
            DynamicLayer.lazy_initialization(self._codec, keys, values)
        self._packed = [*before, (self._quantized(keys, "key"), self._quantized(values, "value"))]
        self._packed_rows = keys.shape[2] + (self._packed_rows if before else 0)
        self._batch = None
        self._keys, self._values = keys[:, :, :0], values[:, :, :0]

    def _quantized(self, rows: Tensor, kind: str) -> Any:
        rows = rows.contiguous()
        axis = getattr(self._codec, f"axis_{kind}", None)
        return self._codec._quantize(rows) if axis is None else self._codec._quantize(rows, axis)

    def keep(self, index: Int64[Tensor, "batch kv_heads kept"], numbers: Tensor) -> bool:
        """Evict every row that is not in `index`, and pack the others."""
        self._unpack()
        super().keep(index, numbers)
        assert self._keys is not None and self._values is not None
        kept = index.shape[2]
        self._pack(self._keys[:, :, :kept].clone(), self._values[:, :, :kept].clone())
        return True

    @property
    def capacity(self) -> int:
        """All rows."""
        return self.counts.held

    def map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        """Change the rows of the batch: reorder, repeat or select them."""
        if self._packed:
            every = torch.arange(self.batch_heads[0], device=self.device)
            self._batch = change(every if self._batch is None else self._batch)
        super().map_batch(change)

    def __deepcopy__(self, memo: dict[int, Any]) -> "QuantizedRows":
        memo[id(self._packed)] = self._packed  # never written in place, and some cannot be copied
        twin = memo[id(self)] = object.__new__(type(self))
        vars(twin).update(copy.deepcopy(vars(self), memo))
        return twin

    @property
    def nbytes(self) -> int:
        """What is allocated."""
        return super().nbytes + _nbytes(self._packed)


def _nbytes(packed: Any) -> int:
    """Bytes of all tensors in a quantized tensor, whatever a backend makes it of."""
    if isinstance(packed, Tensor):
        if hasattr(packed, "__tensor_flatten__"):
            names, _ = packed.__tensor_flatten__()
            return sum(_nbytes(getattr(packed, name)) for name in names)
        return packed.nbytes
    if isinstance(packed, dict):
        return sum(map(_nbytes, packed.values()))
    if isinstance(packed, (list, tuple)):
        return sum(map(_nbytes, packed))
    return 0
