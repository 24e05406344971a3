"""The one list of the built-in policies."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvcompress.hookspecs import hookimpl

if TYPE_CHECKING:
    from kvcompress.policy import Policy


@hookimpl
def kvcompress_policies() -> "Iterable[type[Policy]]":
    """The classes."""
    from kvcompress_policies.h2o import H2OPolicy
    from kvcompress_policies.knorm import KNormPolicy
    from kvcompress_policies.pyramidkv import PyramidKVPolicy
    from kvcompress_policies.scissorhands import ScissorhandsPolicy
    from kvcompress_policies.snapkv import SnapKVPolicy
    from kvcompress_policies.snapkv_decoding import SnapKVDecodingPolicy
    from kvcompress_policies.streaming_llm import StreamingLLMPolicy
    from kvcompress_policies.tova import TOVAPolicy

    return [
        SnapKVPolicy,
        PyramidKVPolicy,
        SnapKVDecodingPolicy,
        H2OPolicy,
        TOVAPolicy,
        StreamingLLMPolicy,
        KNormPolicy,
        ScissorhandsPolicy,
    ]
