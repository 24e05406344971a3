"""Memory of this process, and of the tensors that a piece of code makes."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Memory:
    """Growth since it was made: the allocator's on CUDA, the resident set's on the CPU."""

    def __init__(self, device: Any) -> None:
        self._cuda = device.type == "cuda"
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            self._start = torch.cuda.memory_allocated()
        else:
            trim()
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
            self._start = _status("VmRSS")

    def peak(self) -> float:
        """MiB at most since the start."""
        now = torch.cuda.max_memory_allocated() if self._cuda else _status("VmHWM")
        return (now - self._start) / 2**20

    def lasting(self) -> float:
        """MiB now."""
        if self._cuda:
            return (torch.cuda.memory_allocated() - self._start) / 2**20
        trim()
        return (_status("VmRSS") - self._start) / 2**20


def trim() -> None:
    """Give freed memory back to the system, so that the resident set is what is in use."""
    import ctypes

    ctypes.CDLL("libc.so.6").malloc_trim(0)


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return 1024 * int(line.split()[1])
    raise OSError(f"/proc/self/status has no {key}; memory is measured on Linux or CUDA only.")


class Allocations(TorchDispatchMode):
    """Storages made while active, on any device: the most that was alive at once, and every size.

    Args:
        known: Tensors that do not count.
    """

    def __init__(self, *known: Tensor | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = {part.untyped_storage().data_ptr() for part in known if part is not None}
        self._alive: dict[int, tuple[int, StorageWeakRef]] = {}
        self._sizes: dict[int, int] = {}
        self.peak = 0
        """Bytes."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        self._alive = {
            place: (size, storage)
            for place, (size, storage) in self._alive.items()
            if not storage.expired()
        }
        for part in result if isinstance(result, tuple | list) else [result]:
            if isinstance(part, Tensor):
                storage = part.untyped_storage()
                place, size = storage.data_ptr(), storage.nbytes()
                if place not in self._known:
                    self._alive[place] = size, StorageWeakRef(storage)
                    self._sizes[place] = max(size, self._sizes.get(place, 0))
        self.peak = max(self.peak, sum(size for size, _ in self._alive.values()))
        return result

    def largest(self, *but: Tensor) -> int:
        """Bytes of the largest one, but for those of some tensors that are still alive."""
        others = {part.untyped_storage().data_ptr() for part in but}
        return max(size for place, size in self._sizes.items() if place not in others)
