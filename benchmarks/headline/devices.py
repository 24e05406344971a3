"""The device that is measured: its clock, its memory, and how fast it can move bytes."""

import gc
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch

GIB = 2**30

CARDS = {
    "B200": 8000,
    "GH200 144G": 4900,
    "GH200": 4000,
    "H200": 4800,
    "H100 NVL": 3900,
    "H100 PCIe": 2000,
    "H100": 3350,
    "A100 80GB PCIe": 1935,
    "A100-SXM4-80GB": 2039,
    "A100": 1555,
    "L40S": 864,
    "L40": 864,
    "L4": 300,
    "A40": 696,
    "A10": 600,
    "V100": 900,
    "T4": 320,
    "RTX A6000": 768,
    "RTX 6000 Ada": 960,
    "RTX 5090": 1792,
    "RTX 4090": 1008,
    "RTX 3090": 936,
}
"""Memory bandwidth by part of the card's name, in GB/s, from the vendor's data sheets."""


def nominal_bandwidth(name: str) -> float | None:
    """Bytes per second by the card's name; the longest entry that it contains decides."""
    known = [card for card in CARDS if card.lower() in name.lower()]
    return 1e9 * CARDS[max(known, key=len)] if known else None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device had no memory left, in whatever way its libraries put it."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    said = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in said or "alloc_failed" in said)


@dataclass(frozen=True)
class Card:
    """What is known of the device before anything is measured on it."""

    name: str
    driver: str | None
    memory_gib: float | None
    nominal_gb_s: float | None
    copy_gb_s: float
    """Bytes read and written per second by a large copy."""

    @property
    def bandwidth(self) -> float:
        """Bytes per second that bounds are computed from: nominal if known, else measured."""
        return 1e9 * (self.nominal_gb_s or self.copy_gb_s)


class Device:
    """CUDA, or the CPU, on which memory is not measured.

    Args:
        name: As torch names it.
    """

    def __init__(self, name: str) -> None:
        self.torch = torch.device(name)
        self.is_cuda = self.torch.type == "cuda"

    def synchronize(self) -> None:
        """Wait for all work given to the device."""
        if self.is_cuda:
            torch.cuda.synchronize(self.torch)

    def milliseconds(self, call: Callable[[], Any]) -> float:
        """Time of a call, launches included; the host waits only after its end was recorded."""
        self.synchronize()
        if not self.is_cuda:
            started = perf_counter()
            call()
            return 1000 * (perf_counter() - started)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        elapsed: float = start.elapsed_time(end)
        return elapsed

    def release(self) -> None:
        """Give back what is no longer referred to."""
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()

    def allocated(self) -> int | None:
        """Bytes that tensors take now."""
        return torch.cuda.memory_allocated(self.torch) if self.is_cuda else None

    def reset_peak(self) -> None:
        """Forget the highest allocation so far."""
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.torch)

    def peak(self) -> int | None:
        """Bytes that tensors took at most since `reset_peak`."""
        return torch.cuda.max_memory_allocated(self.torch) if self.is_cuda else None

    def describe(self) -> Card:
        """Name, driver, memory and bandwidth."""
        if not self.is_cuda:
            return Card("CPU", None, None, None, self._copy_gb_s(32 * 2**20))
        properties = torch.cuda.get_device_properties(self.torch)
        nominal = nominal_bandwidth(properties.name)
        return Card(
            name=properties.name,
            driver=_driver(),
            memory_gib=properties.total_memory / GIB,
            nominal_gb_s=None if nominal is None else nominal / 1e9,
            copy_gb_s=self._copy_gb_s(min(2 * GIB, properties.total_memory // 8)),
        )

    def _copy_gb_s(self, size: int) -> float:
        source = torch.zeros(size, dtype=torch.uint8, device=self.torch)
        target = torch.empty_like(source)
        times = [self.milliseconds(partial(target.copy_, source)) for _ in range(12)]
        return 2 * size / (median(times[2:]) / 1000) / 1e9


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.splitlines()[0].strip() if done.stdout.strip() else None
