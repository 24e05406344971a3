"""What both workers do alike: answer requests, run the plain model, time and weigh it.

A request is a line of JSON, `{"do": name, ...arguments}`; the answer is one too, `{"value": ...}`
or `{"error": ..., "trace": ...}`.
"""

import copy
import ctypes
import gc
import inspect
import json
import os
import platform
import random
import sys
import traceback
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig

_M_MMAP_THRESHOLD = -3
"""Of glibc's mallopt."""


@dataclass
class Decoding:
    """A cache from which decoding goes on."""

    cache: Any
    position: int
    """Of the next token."""
    method: str | None
    keep: int
    interval: int | None
    """Of evictions while decoding."""


class Side(ABC):
    """One library with the transformers that it needs."""

    def __init__(self) -> None:
        self._model: Any = None
        self._cache_name = ""
        self._decoding: dict[str, Decoding] = {}

    @abstractmethod
    def versions(self) -> dict[str, str]:
        """Of the library."""

    @abstractmethod
    def compressing(
        self, method: str, keep: int, length: int, interval: int | None
    ) -> AbstractContextManager[Any]:
        """A context in which a prompt of `length` is cut to `keep` rows."""

    @abstractmethod
    def stepping(self, state: Decoding) -> AbstractContextManager[Any]:
        """A context in which tokens are generated."""

    @abstractmethod
    def held(self, cache: Any) -> int:
        """Rows of the layer that holds most."""

    @property
    def model(self) -> Any:
        """The loaded model."""
        if self._model is None:
            raise RuntimeError("Nothing was loaded.")
        return self._model

    def hello(self) -> dict[str, Any]:
        """What runs here."""
        return {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            **self.versions(),
            "modules": sorted(
                {name.split(".")[0] for name in sys.modules} & {"kvcompress", "kvpress"}
            ),
        }

    def make_random(self, path: str, layers: int) -> str:
        """Save a model of SmolLM2-135M's layers, so many of them, with random weights.

        Its vocabulary is small, else a step would be all output embedding.
        """
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=layers,
            num_attention_heads=9,
            num_key_value_heads=3,
            vocab_size=1024,
            max_position_embeddings=2**17,
            tie_word_embeddings=True,
        )
        made: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        made.save_pretrained(path)
        return path

    def load(self, path: str, threads: int, device: str) -> None:
        """The model to measure, in float32 on the CPU and bfloat16 elsewhere."""
        torch.set_num_threads(threads)
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation="sdpa"
        )
        self._model = loaded.to(device).eval()
        # Renamed from past_key_values to cache in transformers 5.24.
        named = inspect.signature(type(loaded).forward).parameters
        self._cache_name = "cache" if "cache" in named else "past_key_values"

    def logits(self, length: int) -> list[float]:
        """The first few of the last token's, to compare the sides' plain models."""
        output = self._forward(self._ids(length), None)
        values: list[float] = output.logits[0, -1, :64].float().tolist()
        return values

    def prefill(self, length: int, method: str | None, keep: int) -> dict[str, float]:
        """Milliseconds of reading a prompt, and the rows that are left."""
        ids = self._ids(length)
        with self._context(method, keep, length, None):
            started = self._now()
            output = self._forward(ids, None)
            elapsed = self._now() - started
        return {"ms": 1000 * elapsed, "held": self._held(_cache_of(output), method)}

    def start(
        self, name: str, length: int, method: str | None, keep: int, interval: int | None
    ) -> int:
        """Read a prompt and remember the cache; gives the rows that it holds."""
        with self._context(method, keep, length, interval):
            cache = _cache_of(self._forward(self._ids(length), None))
        self._decoding[name] = Decoding(cache, length, method, keep, interval)
        return self._held(cache, method)

    def steps(self, name: str, count: int, fresh: bool) -> dict[str, float]:
        """Milliseconds per token of `count` steps.

        Args:
            name: Of what was started.
            count: Steps.
            fresh: From a copy of the cache, so that every block starts from as many rows.
        """
        state = self._decoding[name]
        cache = copy.deepcopy(state.cache) if fresh else state.cache
        token = self._ids(1)
        positions = [
            torch.tensor([[state.position + number]], device=token.device)
            for number in range(count)
        ]
        with self.stepping(state) if state.method else nullcontext():
            started = self._now()
            for position in positions:
                self._forward(token, cache, position)
            elapsed = self._now() - started
        if not fresh:
            state.position += count
        return {"ms": 1000 * elapsed / count, "held": self._held(cache, state.method)}

    def drop(self) -> None:
        """Forget all caches."""
        self._decoding.clear()
        gc.collect()

    def memory(self, length: int, method: str | None, keep: int) -> dict[str, float]:
        """MiB that a prefill needs at most above the loaded model; once per process."""
        ids = self._ids(length)
        libc = None if self.model.device.type == "cuda" else ctypes.CDLL("libc.so.6")
        if libc:
            # Each tensor in a mapping of its own: else what is freed is reused or not as the heap
            # happens to lie, and the peak is some 15 % of chance.
            libc.mallopt(_M_MMAP_THRESHOLD, 64 * 1024)
        # The code that runs is memory too, but not what is compared.
        with self._context(method, keep, keep + 64, None):
            self._forward(ids[:, : keep + 64], None)
        gc.collect()
        if libc is None:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        else:
            # Freed memory back to the system first, so that the resident set is what is in use.
            libc.malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
            before = _resident("VmRSS")
        with self._context(method, keep, length, None):
            output = self._forward(ids, None)
        peak = _resident("VmHWM") if libc else torch.cuda.max_memory_allocated()
        return {"mib": (peak - before) / 2**20, "held": self._held(_cache_of(output), method)}

    def _context(
        self, method: str | None, keep: int, length: int, interval: int | None
    ) -> AbstractContextManager[Any]:
        if method is None:
            return nullcontext()
        return self.compressing(method, keep, length, interval)

    def _held(self, cache: Any, method: str | None) -> int:
        return self.held(cache) if method else int(cache.get_seq_length())

    def _forward(self, ids: torch.Tensor, cache: Any, position: torch.Tensor | None = None) -> Any:
        more = {self._cache_name: cache}
        with torch.inference_mode():
            return self.model(ids, use_cache=True, logits_to_keep=1, position_ids=position, **more)

    def _ids(self, length: int) -> torch.Tensor:
        # Not from torch's generator: the sides may have other releases of it.
        drawn = random.Random(0).choices(range(5, self.model.config.vocab_size), k=length)
        return torch.tensor([drawn], device=self.model.device)

    def _now(self) -> float:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()
        return perf_counter()


def _cache_of(output: Any) -> Any:
    return output.cache if "cache" in output else output.past_key_values


def _resident(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return 1024 * int(line.split()[1])
    raise OSError(f"/proc/self/status has no {key}; memory is measured on Linux or CUDA only.")


def serve(side: Side) -> None:
    """Answer requests until the input ends."""
    transformers.logging.disable_progress_bar()
    # Libraries print; what they print must not get among the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        name = request.pop("do")
        try:
            if name.startswith("_"):
                raise ValueError(f"{name} is no request")
            answer = {"value": getattr(side, name)(**request)}
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            answer = {"error": said, "trace": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)
