"""The held rows of a layer: slack-buffered storage in which they are appended, evicted and moved.

Everything that belongs to a row (key, value, column, the policy's state) changes here together.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Int, Int64
from torch import Tensor

from kvcompress.report import LayerCounts
from kvcompress.tensors import newest_of, row_numbers

MIN_SLACK = 256
"""Rows that a grown buffer has to spare; 12.5 % where that is more."""


def with_slack(rows: int) -> int:
    """Rows to allocate for `rows` rows, so that appending rarely copies."""
    return rows + max(MIN_SLACK, rows // 8)


def _frozen(buffer: Tensor) -> bool:
    """Whether a buffer was made in inference mode and may not be written now."""
    return buffer.is_inference() and not torch.is_inference_mode_enabled()


class Spare:
    """Buffers that one eviction leaves and the next one takes.

    So an eviction at decode allocates nothing, at the cost of one layer's memory.
    """

    def __init__(self, *, shared: bool = False) -> None:
        self.shared = shared
        """Whether layers of the model read other layers' rows, later in the forward: then what an
        eviction leaves may not be written."""
        self._buffers: dict[str, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """What is held here."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def swap(self, kind: str, used: Tensor, shape: torch.Size) -> Tensor:
        """A buffer of `shape` like `used`, which may be taken over if it has that shape too."""
        spare = self._buffers.pop(kind, None)
        if used.shape == shape and not self.shared:
            self._buffers[kind] = used
        wanted = (shape, used.dtype, used.device, torch.is_inference_mode_enabled())
        if spare is not None:
            has = (spare.shape, spare.dtype, spare.device, spare.is_inference())
            if has == wanted:
                return spare
        return used.new_empty(shape)

    def clear(self) -> None:
        """Free them."""
        self._buffers.clear()


class Rows:
    """Keys and values of one layer, batch x kv_heads x rows x dim each, and what goes with them.

    They are in the order of their positions until `replace` is called; then only the newest is
    sure to be where its position puts it, at the end.
    """

    def __init__(self, counts: LayerCounts, spare: Spare) -> None:
        self.counts = counts
        self.spare = spare
        self.clear()

    def clear(self) -> None:
        """Forget all of them."""
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self.device = torch.device("cpu")
        """Where rows are used; buffers may be elsewhere meanwhile."""
        self.state: dict[str, Tensor] = {}
        """The policy's tensors, batch x kv_heads x rows; zeros for rows to come, if any."""
        self.front: Tensor | None = None
        """Keys of the rows at the front as they were before they were moved."""
        self.in_order = True
        self.counts.settled = 0
        self._columns: Tensor | None = None  # None until an eviction: rows are columns then
        self._written = 0  # rows whose columns are; later ones follow on from the newest
        self.seat: tuple[Ledger, int] | None = None
        """The ledger that has the columns instead, and where."""

    @property
    def keys(self) -> Tensor:
        """Held keys: a view of the buffer."""
        assert self._keys is not None
        return self._keys[:, :, : self.counts.held]

    @property
    def values(self) -> Tensor:
        """Held values: a view of the buffer."""
        assert self._values is not None
        return self._values[:, :, : self.counts.held]

    @property
    def empty(self) -> bool:
        """Whether nothing was appended yet."""
        return self._keys is None

    @property
    def capacity(self) -> int:
        """Rows of the buffers, used or not."""
        return 0 if self._keys is None else self._keys.shape[2]

    @property
    def batch_heads(self) -> tuple[int, int]:
        """Batch and KV heads."""
        assert self._keys is not None
        return self._keys.shape[0], self._keys.shape[1]

    @property
    def needs_grad(self) -> bool:
        """Whether rows are part of a graph, so that buffers may not be written."""
        return torch.is_grad_enabled() and self._keys is not None and self._keys.requires_grad

    def adopt(self, keys: Tensor, values: Tensor) -> None:
        """Take over tensors as they are."""
        self._keys, self._values, self.device = keys, values, keys.device

    def restore(self, values: dict[str, Any]) -> None:
        """Take over the tensors of a snapshot."""
        self.adopt(values["keys"], values["values"])
        self._columns, self._written = values["columns"], values["keys"].shape[2]
        self.front, self.state = values["front"], dict(values["state"])

    def move(self, device: torch.device | str) -> None:
        """Keys and values to another device: offloading."""
        if self._keys is not None and self._values is not None:
            self._keys = self._keys.to(device, non_blocking=True)
            self._values = self._values.to(device, non_blocking=True)

    @property
    def away(self) -> bool:
        """Whether they are on another device than where they are used."""
        return self._keys is not None and self._keys.device != self.device

    def pack(self) -> bool:
        """Store rows smaller if there is a way to, after a forward. True if something changed."""
        return False

    @property
    def row_bytes(self) -> int:
        """Of one token in full precision, in all heads of the batch."""
        assert self._keys is not None and self._values is not None
        width = self._keys.shape[3] * self._keys.itemsize
        width += self._values.shape[3] * self._values.itemsize
        batch, kv_heads = self.batch_heads
        return batch * kv_heads * width

    def append(self, keys: Tensor, values: Tensor) -> bool:
        """Add rows of new tokens, the caller's to keep. True if a buffer was allocated."""
        before = self._keys, self._values
        if self._keys is None:
            self.device = keys.device
        self._keys = self._appended(self._keys, keys)
        self._values = self._appended(self._values, values)
        self.counts.held += keys.shape[2]
        self.counts.seen += keys.shape[2]
        return before[0] is not self._keys or before[1] is not self._values

    def _appended(self, buffer: Tensor | None, rows: Tensor) -> Tensor:
        held = self.counts.held
        need = held + rows.shape[2]
        if buffer is None or held == 0:
            # No slack: a prompt is likely to be cut at once. A copy: the caller owns its rows.
            return rows.clone(memory_format=torch.contiguous_format)
        if torch.is_grad_enabled() and (buffer.requires_grad or rows.requires_grad):
            return torch.cat([buffer[:, :, :held], rows], dim=2)
        if buffer.shape[2] < need or _frozen(buffer):
            batch, kv_heads, _, dim = buffer.shape
            grown = buffer.new_empty(batch, kv_heads, with_slack(need), dim)
            grown[:, :, :held] = buffer[:, :, :held]
            buffer = grown
        buffer[:, :, held:need] = rows
        return buffer

    def columns(self) -> Int[Tensor, "batch kv_heads held"]:
        """Which of the seen tokens, padding included, every row is."""
        held, seen, written = self.counts.held, self.counts.seen, self._written
        if self.seat is not None:
            ledger, place = self.seat
            return ledger.columns(held, seen)[place]
        if self._columns is None:
            every = torch.arange(seen, dtype=torch.int32, device=self.device)
            return every.expand(*self.batch_heads, seen)
        if written < held:
            buffer = self._columns
            if buffer.shape[2] < held or _frozen(buffer):
                buffer = self._columns.new_empty(*self.batch_heads, with_slack(held))
                buffer[..., :written] = self._columns[..., :written]
            first = seen - held + written
            buffer[..., written:held] = torch.arange(first, seen, device=buffer.device)
            self._columns, self._written = buffer, held
        return self._columns[..., :held]

    def newest(self, count: int) -> Bool[Tensor, "batch kv_heads held"]:
        """Which rows are the newest `count`, in whatever order they are."""
        if self.seat is not None:
            ledger, place = self.seat
            return ledger.newest(count, self.counts.held, self.counts.seen)[place]
        return newest_of(self.columns(), count)

    def extend_state(self) -> None:
        """Zeros in the state for rows that came after it."""
        for name, rows in self.state.items():
            missing = self.counts.held - rows.shape[2]
            if missing > 0:
                self.state[name] = torch.nn.functional.pad(rows, (0, missing))

    def keep(
        self,
        index: Int64[Tensor, "batch kv_heads kept"],
        numbers: Int64[Tensor, " rows"],
    ) -> bool:
        """Evict every row that is not in `index`, which is ascending. True if buffers changed size.

        Args:
            index: The rows that stay.
            numbers: `numbers_for(index, ...)`: what the next buffers are filled with.
        """
        assert self._keys is not None and self._values is not None
        if self.front is not None:
            moved = self.front.shape[2]
            if self.needs_grad:
                self._keys = torch.cat([self.front, self._keys[:, :, moved:]], dim=2)
            else:
                self._keys[:, :, :moved] = self.front
        first = self._columns is None and self.seat is None
        self._columns = index.int() if first else self.columns().gather(2, index)
        self.seat = None
        self.state = {name: rows.gather(2, index) for name, rows in self.state.items()}
        self.counts.held = self.counts.settled = self._written = index.shape[2]
        before = self.capacity
        self._keys = self._gathered("keys", self._keys, numbers)
        self._values = self._gathered("values", self._values, numbers)
        return before != self.capacity

    def _gathered(self, kind: str, buffer: Tensor, numbers: Tensor) -> Tensor:
        batch, kv_heads, _, dim = buffer.shape
        shape = torch.Size((batch, kv_heads, numbers.numel() // (batch * kv_heads), dim))
        flat = buffer.flatten(0, 2)
        if torch.is_grad_enabled() and buffer.requires_grad:
            return flat.index_select(0, numbers).view(shape)
        out = self.spare.swap(kind, buffer, shape)
        torch.index_select(flat, 0, numbers, out=out.view(-1, dim))
        return out

    def numbers_for(
        self, index: Int64[Tensor, "*layers batch kv_heads kept"], size: int
    ) -> Int64[Tensor, "*layers rows"]:
        """Which rows of the buffers `keep` fills the next ones, of `size` rows, with."""
        # Rows to come are filled with the first one, which is quicker than a copy of a part.
        index = torch.nn.functional.pad(index, (0, size - index.shape[-1]))
        return row_numbers(index, self.capacity)

    def replace(
        self, victims: Int64[Tensor, "batch kv_heads 1"], numbers: Int64[Tensor, " rows"]
    ) -> None:
        """Evict one row of every head: the newest row takes its place, and nothing else moves.

        The ledger has to be told too, once for all its layers.

        Args:
            victims: The rows that go.
            numbers: `row_numbers(victims, capacity)`.
        """
        assert self._keys is not None and self._values is not None
        last = self.counts.held - 1
        for buffer in (self._keys, self._values):
            # A copy, since the newest row may itself be the one that goes.
            newest = buffer[:, :, last].flatten(0, 1).clone()
            buffer.flatten(0, 2).index_copy_(0, numbers, newest)
        for name, rows in self.state.items():
            self.state[name] = rows.scatter(2, victims, rows[..., last:])
            self.state[name][..., last:] = 0  # the next row's
        self.counts.held = self.counts.settled = last
        self.in_order = False

    def restore_order(self) -> None:
        """Bring rows that `replace` moved back into the order of their positions."""
        if not self.in_order:
            self.in_order = True
            index = self.columns().argsort(dim=-1)
            self.keep(index, self.numbers_for(index, self.capacity))

    def tail_is_whole(self, count: int) -> bool:
        """Whether the newest `count` tokens are all held."""
        if self._columns is None or count <= self.counts.held - self.counts.settled:
            return True
        if count >= self.counts.held:
            return False
        first = self.columns()[..., -count]
        return bool((first == self.counts.seen - count).all())

    def drop(self, count: int) -> None:
        """Forget the newest `count` tokens; rows are in order."""
        self.counts.held -= count
        self.counts.seen -= count
        held = self.counts.held
        self._written = min(self._written, held)
        self.state = {name: rows[..., :held] for name, rows in self.state.items()}

    def map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        """Change the rows of the batch: reorder, repeat or select them."""
        assert self._keys is not None and self._values is not None
        self._keys, self._values = change(self._keys), change(self._values)
        if self.seat is not None:
            self._columns, self._written = self.columns(), self.counts.held
            self.seat = None
        self._columns = None if self._columns is None else change(self._columns)
        self.front = None if self.front is None else change(self.front)
        self.state = {name: change(rows) for name, rows in self.state.items()}

    @property
    def nbytes(self) -> int:
        """What is allocated."""
        parts = [self._keys, self._values, self._columns, self.front, *self.state.values()]
        return sum(part.nbytes for part in parts if part is not None)


class Ledger:
    """Columns of the rows of several layers that are alike, while these rows are in no order.

    A step of decode is short, so its cost is the number of operations rather than their size: what
    is asked of every layer is computed once for all of them.
    """

    def __init__(self, layers: Sequence[Rows]) -> None:
        self._columns = torch.stack([rows.columns() for rows in layers])
        self._seen = layers[0].counts.seen
        self._newest: dict[int, tuple[Tensor, ...]] = {}
        self._layers = len(layers)
        for place, rows in enumerate(layers):
            rows.seat = self, place

    @classmethod
    def of(cls, layers: Sequence[Rows]) -> "Ledger":
        """The one that all of them are in, or a new one."""
        seat = layers[0].seat
        if seat is not None and seat[0]._layers == len(layers):
            ledger = seat[0]
            if all(rows.seat == (ledger, place) for place, rows in enumerate(layers)):
                return ledger
        return cls(layers)

    def columns(self, held: int, seen: int) -> Int[Tensor, "layers batch kv_heads held"]:
        """Those of layers that hold `held` rows of `seen` tokens."""
        if seen > self._seen:
            if _frozen(self._columns):
                self._columns = self._columns.clone()
            self._columns[..., held - 1] = seen - 1
            self._seen = seen
            self._newest.clear()
        return self._columns[..., :held]

    def newest(self, count: int, held: int, seen: int) -> tuple[Bool[Tensor, "..."], ...]:
        """For every layer, which of its rows are the newest `count`."""
        columns = self.columns(held, seen)
        if count not in self._newest:
            self._newest[count] = newest_of(columns, count).unbind()
        return self._newest[count]

    def replace(self, victims: Int64[Tensor, "layers batch kv_heads 1"]) -> None:
        """The newest row of every head is now where the victim was."""
        self._columns.scatter_(-1, victims, self._seen - 1)
