"""Memory of this process, for measurements that run in a process of their own."""

from pathlib import Path
from typing import Any


class Memory:
    """Growth since it was made: the allocator's on CUDA, the resident set's on the CPU."""

    def __init__(self, device: Any) -> None:
        import torch

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
        import torch

        now = torch.cuda.max_memory_allocated() if self._cuda else _status("VmHWM")
        return (now - self._start) / 2**20

    def lasting(self) -> float:
        """MiB now."""
        import torch

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
