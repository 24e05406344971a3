"""KV-cache compression for Hugging Face transformers; nothing heavy is imported before its use."""

import importlib
from typing import TYPE_CHECKING, Any

from kvcompress.errors import (
    CacheFileError,
    DuplicatePolicyError,
    EvaluationError,
    KVCompressError,
    MissingModelError,
    PluginLoadError,
    PolicyConfigError,
    PressStateError,
    ShapeError,
    UnknownPolicyError,
    UnsupportedCacheError,
    UnsupportedModeError,
    UnsupportedModelError,
)
from kvcompress.hookspecs import hookimpl

if TYPE_CHECKING:
    from kvcompress_policies.h2o import H2OPolicy
    from kvcompress_policies.knorm import KNormPolicy
    from kvcompress_policies.pyramidkv import PyramidKVPolicy
    from kvcompress_policies.scissorhands import ScissorhandsPolicy
    from kvcompress_policies.snapkv import SnapKVPolicy
    from kvcompress_policies.snapkv_decoding import SnapKVDecodingPolicy
    from kvcompress_policies.streaming_llm import StreamingLLMPolicy
    from kvcompress_policies.tova import TOVAPolicy

    from kvcompress.composition import ComposedPolicy
    from kvcompress.hosting import CompressedCache
    from kvcompress.plugins import policy_from
    from kvcompress.policy import DecodePolicy, LayerView, Policy
    from kvcompress.report import LayerReport, Report
    from kvcompress.session import Session, press
    from kvcompress.spans import role_ranges, text_ranges

__version__ = "0.1.0"

__all__ = [
    "CacheFileError",
    "ComposedPolicy",
    "CompressedCache",
    "DecodePolicy",
    "DuplicatePolicyError",
    "EvaluationError",
    "H2OPolicy",
    "KNormPolicy",
    "KVCompressError",
    "LayerReport",
    "LayerView",
    "MissingModelError",
    "PluginLoadError",
    "Policy",
    "PolicyConfigError",
    "PressStateError",
    "PyramidKVPolicy",
    "Report",
    "ScissorhandsPolicy",
    "Session",
    "ShapeError",
    "SnapKVDecodingPolicy",
    "SnapKVPolicy",
    "StreamingLLMPolicy",
    "TOVAPolicy",
    "UnknownPolicyError",
    "UnsupportedCacheError",
    "UnsupportedModeError",
    "UnsupportedModelError",
    "hookimpl",
    "policy_from",
    "press",
    "role_ranges",
    "text_ranges",
]

_LAZY = {
    "ComposedPolicy": "composition",
    "CompressedCache": "hosting",
    "DecodePolicy": "policy",
    "LayerReport": "report",
    "LayerView": "policy",
    "Policy": "policy",
    "Report": "report",
    "Session": "session",
    "policy_from": "plugins",
    "press": "session",
    "role_ranges": "spans",
    "text_ranges": "spans",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(importlib.import_module(f"kvcompress.{_LAZY[name]}"), name)
    elif name.endswith("Policy"):
        value = _policy_class(name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def _policy_class(name: str) -> Any:
    """The installed policy whose class is called `name`."""
    from kvcompress.plugins import registry

    for entry in registry().policies.values():
        if entry.policy.__name__ == name:
            return entry.policy
    raise AttributeError(f"No installed plugin provides a policy class {name!r}.")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
